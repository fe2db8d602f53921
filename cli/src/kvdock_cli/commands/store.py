"""List, verify and clean up a store."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import attrs

from kvdock.config import load_configuration
from kvdock.errors import KvdockError, NamespaceError
from kvdock.namespace import canonical, diff_records
from kvdock.plugin import import_entry_point, usable_entry_points
from kvdock.retention import Retention
from kvdock.stores import GROUP, TenantStore
from kvdock.units import format_bytes, parse_bytes, parse_seconds
from kvdock.wrappers.key_ring import destroy_keys
from kvdock_cli import progress
from kvdock_cli.arguments import backend_settings, hashes_of
from kvdock_cli.output import UsageProblem, confirm, emit
from kvdock_cli.reports import store as report
from kvdock_cli.reports.store import SHORT
from kvdock_cli.terminal import style_of

if TYPE_CHECKING:
    from kvdock.stores import NamespaceSurvey, PageReceiver, Store, StoredPage
    from kvdock_cli.reports._report import Report

T = TypeVar("T")

_FEW = 8  # namespaces that an error names


Order = Literal["size", "age", "pages", "model"]
_ORDERS: Mapping[Order, Callable[[NamespaceSurvey], Any]] = {
    "size": lambda survey: -survey.file_bytes,
    "age": lambda survey: survey.used_ns,
    "pages": lambda survey: -survey.pages,
    "model": lambda survey: (survey.model, survey.revision),
}


def ls(
    target: str,
    /,
    *,
    sort: Order | None = None,
    reverse: bool = False,
    retained: bool = False,
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """List the namespaces of a store with their models and sizes.

    Args:
        target: The store's root directory, or the URL of a bucket.
        sort: The largest, the longest unused, or the one with most pages first,
            or by model; else by digest.
        reverse: The other way round.
        retained: Only those with pages that are promised, or that expire, and how
            many.
        set_: Settings of its backend, as KEY=VALUE.
        json: Print one line of JSON.
    """
    store = open_store(target, set_)
    with progress.shown("reading") as bar:
        found = [done for _, done in _each(store, "", store.survey, bar)]
    if retained:
        found = [one for one in found if one.promised_bytes or one.expiring]
    if sort:
        found.sort(key=_ORDERS[sort])
    if reverse:
        found.reverse()
    unused = []
    for survey in found:
        with suppress(NamespaceError):  # gone meanwhile
            if survey.file_bytes and not store.in_use(survey.namespace):
                unused.append(survey)
    listed = report.listing(found, unused, store.now_ns(), retained=retained)
    return emit(listed, as_json=json)


def stat(
    target: str,
    /,
    *,
    namespace: str = "",
    tenants: bool = False,
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Show what a store holds of one namespace, pool by pool.

    Args:
        target: The store's root directory, or the URL of a bucket.
        namespace: The namespace, or enough of its first digits; not needed where
            there is only one.
        tenants: Show instead what each tenant takes in all namespaces; they are
            listed in the file that KVDOCK_CONFIG names.
        set_: Settings of its backend, as KEY=VALUE.
        json: Print one line of JSON.
    """
    store = open_store(target, set_)
    if not tenants:
        with progress.shown("reading"):
            found = store.survey(chosen(store, namespace))
        return emit(report.survey(found), as_json=json)
    if not isinstance(store, TenantStore):
        raise UsageProblem("this store does not know tenants")
    rooms = store.room(load_configuration(lenient=True).core.tenants)
    return emit(report.tenants(rooms), as_json=json)


def record(
    target: str,
    /,
    *,
    namespace: str = "",
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Show what the bytes of a namespace belong to, and verify its digest.

    Args:
        target: The store's root directory, or the URL of a bucket.
        namespace: The namespace, or enough of its first digits; not needed where
            there is only one.
        set_: Settings of its backend, as KEY=VALUE.
        json: Print one line of JSON.
    """
    return emit(
        report.record(_record(open_store(target, set_), namespace)), as_json=json
    )


def diff(
    target: str,
    other: str = "",
    /,
    *,
    namespace: tuple[str, ...] = (),
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Say in which fields two namespaces differ; exit 1 if they do.

    Args:
        target: The store's root directory, or the URL of a bucket.
        other: The store of the second namespace, if that is another one.
        namespace: The namespaces, or enough of their first digits; not needed where
            there are only two.
        set_: Settings of their backend, as KEY=VALUE.
        json: Print one line of JSON.
    """
    near = open_store(target, set_)
    far = open_store(other, set_) if other else near
    every = () if other else near.namespaces()
    names = namespace or (every if len(every) == 2 else ())  # noqa: PLR2004 - both
    first, second = (*names, "", "")[:2]
    found = diff_records(_record(near, first), _record(far, second))
    return emit(report.differences(found), as_json=json)


def _record(store: Store, prefix: str) -> Mapping[str, object]:
    namespace = chosen(store, prefix)
    if found := store.record(namespace):
        return found
    raise NamespaceError(
        f"the record of namespace {namespace[:SHORT]} is missing, or was altered or "
        "misplaced",
        fix="`kvdock store verify ROOT` says what is wrong.",
    )


def verify(
    target: str,
    /,
    *,
    namespace: str = "",
    heal: bool = False,
    shared_root: bool = False,
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Read every page and compare its checksum; 1 if any is wrong or lost.

    Args:
        target: The store's root directory, or the URL of a bucket.
        namespace: Only this one; enough of its first digits.
        heal: Forget what is wrong, so that the next write stores it again.
        shared_root: Heal under a root that others own or may write.
        set_: Settings of its backend, as KEY=VALUE.
        json: Print one line of JSON.
    """
    store = open_store(target, set_, shared_root=shared_root)
    with progress.shown("verifying", unit=format_bytes) as bar:
        surveys = _each(store, namespace, store.survey)
        bar.total = _stored_bytes([one for _, one in surveys])
        checked = _each(
            store, namespace, lambda one: store.verify(one, bar.advance, heal=heal)
        )
    return emit(report.checked([done for _, done in checked]), as_json=json)


def gc(
    target: str,
    /,
    *,
    namespace: str = "",
    to: str = "",
    older: str = "",
    newer: bool = False,
    shared_root: bool = False,
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Free what no version can read, and pages if asked to.

    What crashed writers left, torn index files, and segments of an earlier
    version of kvdock cannot be read. A namespace without pages that no engine
    has open goes as a whole.

    Args:
        target: The store's root directory, or the URL of a bucket.
        namespace: Only this one; enough of its first digits.
        to: Most that the namespace may keep, such as "20 GiB": the coldest
            pages go, or the oldest; segments in use by a writer stay.
        older: Delete pages of a bucket that were stored longer ago, such as
            "168 h".
        newer: Delete what a later version of kvdock has stored as well.
        shared_root: Accept a root that others own or may write.
        set_: Settings of its backend, as KEY=VALUE.
        json: Print one line of JSON.
    """
    if to and not namespace:
        raise UsageProblem(
            "--to without a namespace would evict pages of every model",
            fix="Give --namespace as well.",
        )
    most = parse_bytes(to) if to else None
    age_s = parse_seconds(older) if older else None
    store = open_store(target, set_, shared_root=shared_root)
    with progress.shown("freeing") as bar:
        freed = _each(
            store,
            namespace,
            lambda one: store.collect(one, to_bytes=most, older_s=age_s, newer=newer),
            bar,
        )
    return emit(report.freed(dict(freed)), as_json=json)


def rm(  # noqa: PLR0913 - one option each
    target: str,
    /,
    *,
    namespace: str = "",
    model: str = "",
    tenant: str = "",
    older: str = "",
    hashes: Path | None = None,
    also: tuple[str, ...] = (),
    keys: Path | None = None,
    dry_run: bool = False,
    yes: bool = False,
    force: bool = False,
    shared_root: bool = False,
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Delete namespaces by name, model, tenant or age, or pages by their hashes.

    Several of these narrow the choice. A namespace that an engine may have open stays,
    and so do single pages that an engine is writing beside; the exit code is then 1.
    All other single pages are overwritten, and no engine finds them. Nothing shows who
    has a bucket open, or a directory without locks: that takes --force, and an engine
    finds misses.

    Args:
        target: The store's root directory, or the URL of a bucket.
        namespace: Only this one; enough of its first digits.
        model: Those of a model, by its whole name or a pattern such as "org/*".
        tenant: Those with the salt of a tenant that the settings list, and pages of
            others that were stored for it.
        older: Those whose pages were last stored or read longer ago, such as
            "168 h"; of a bucket, stored. With --hashes, such pages.
        hashes: A file of keys, one a line: a page's hash with its suffix, or all of
            the key; only these pages.
        also: Other stores, the farther tiers, where the same is deleted.
        keys: A key file: the keys of the tenant are destroyed first.
        dry_run: Only say what would be deleted.
        yes: Do not ask.
        force: Delete also what a process may have open.
        shared_root: Accept a root that others own or may write.
        set_: Settings of the backend of `target`, as KEY=VALUE.
        json: Print one line of JSON.
    """
    meant = _Selection.of(namespace, model, tenant, older, "", hashes)
    if meant == _Selection():
        raise UsageProblem(
            "nothing says what to delete",
            fix="Give --namespace, --model, --tenant, --older or --hashes; several "
            "narrow the choice.",
        )
    if keys and not tenant:
        raise UsageProblem("--keys without --tenant says no keys to destroy")
    stores = {target: open_store(target, set_, shared_root=shared_root)}
    for place in also:
        stores[place] = open_store(place, (), shared_root=shared_root)
    rows: list[tuple[dict[str, Any], Store, list[StoredPage]]] = []
    with progress.shown("reading") as bar:
        for place, store in stores.items():
            # What one tier lacks, another may have.
            for _, one in _each(store, "" if also else namespace, store.survey, bar):
                pages = meant.doomed(store, one)
                if pages is None:
                    continue
                in_use = "" if pages else store.in_use(one.namespace)
                row: dict[str, Any] = {
                    "survey": one,
                    "in_use": in_use,
                    "goes": force or not in_use,
                    "freed_bytes": 0,
                    "target": place,
                    "pages": len(pages) or None,
                    "kept": 0,
                }
                rows.append((row, store, pages))
    going = [each for each in rows if each[0]["goes"]]
    if (going or keys) and not (yes or dry_run):
        listed = [row for row, _, _ in going]
        shown = report.listing([row["survey"] for row in listed])
        confirm(
            f"{shown.text(style_of(sys.stderr))}\nDelete {report.total(listed)}?",
            "delete",
            "deleted",
            "Give --yes to go ahead, or --dry-run to see what would go.",
        )
    destroyed = destroy_keys(keys, tenant) if keys and not dry_run else 0
    with progress.shown("deleting", total=len(going)) as bar:
        for row, store, pages in () if dry_run else going:
            name = row["survey"].namespace
            with suppress(NamespaceError):  # gone meanwhile
                if pages:
                    with store.receive(name, b"") as receiver:
                        kept = receiver.delete(pages)
                    row.update(pages=len(pages) - len(kept), kept=len(kept))
                    row["freed_bytes"] = sum(page.nbytes for page in pages)
                    row["freed_bytes"] -= sum(page.nbytes for page in kept)
                else:
                    row["freed_bytes"] = store.clear(name, unused=not force)
                    row["freed_bytes"] += store.collect(name)
            bar.advance()
    done = [row for row, _, _ in rows]
    return emit(
        report.removed(done, dry_run=dry_run, destroyed=destroyed), as_json=json
    )


_NOT_COPIED = MappingProxyType(
    {"copied": 0, "present": 0, "damaged": 0, "failed": 0, "copied_bytes": 0}
)


def copy(  # noqa: PLR0913 - one option each
    source: str,
    target: str,
    /,
    *,
    namespace: str = "",
    model: str = "",
    older: str = "",
    newer: str = "",
    hashes: Path | None = None,
    rate: str = "",
    dry_run: bool = False,
    shared_root: bool = False,
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Copy pages to another store, new or not, where engines then find them.

    Each object is verified before it is written and read again afterwards. What is
    there already is left out, so that a copy that was broken off goes on where it
    ended. A directory keeps digests and no keys: another directory, an archive say,
    takes all of its pages, and a bucket those that --hashes names.

    Args:
        source: The root directory of a store, or the URL of a bucket.
        target: Another one.
        namespace: Only this one; enough of its first digits.
        model: Only those of a model, by its whole name or a pattern.
        older: Only pages that were last stored or read longer ago, such as "24 h".
        newer: Only pages that were stored or read since then.
        hashes: A file of keys, one a line: a page's hash with its suffix, or all of
            the key; only these pages are copied.
        rate: At most so many bytes a second, such as "100 MiB"; no limit by default.
        dry_run: Only say what would be copied.
        shared_root: Accept a root that others own or may write.
        set_: Settings of the target's backend, as KEY=VALUE.
        json: Print one line of JSON.
    """
    if source.rstrip("/") == target.rstrip("/"):
        raise UsageProblem("source and target are the same store")
    most = parse_bytes(rate) if rate else 0
    if rate and not most:
        raise UsageProblem("at a rate of 0 nothing is copied")
    meant = _Selection.of(namespace, model, "", older, newer, hashes)
    near = open_store(source, ())
    far = open_store(target, set_, shared_root=shared_root)
    found: list[dict[str, Any]] = []
    with progress.shown("reading", unit=format_bytes) as bar:
        every = [one for _, one in _each(near, namespace, near.survey)]
        surveys = [one for one in every if fnmatchcase(one.model, model or "*")]
        bar.total = _stored_bytes(surveys)
        for one in surveys:
            about = {"namespace": one.namespace, "model": one.model}
            counts: dict[str, Any] = {**about, **_NOT_COPIED}
            found.append(counts)
            given = near.record(one.namespace)
            record = canonical(given) if given else b""
            with ExitStack() as opened:
                receiver = None
                if not dry_run:
                    taking = far.receive(one.namespace, record)
                    receiver = opened.enter_context(taking)
                bar.label, bar.note = "copying", one.namespace[:SHORT]
                for page in meant.pages(near, one.namespace, bar.advance):
                    began_s = time.monotonic()
                    outcome = _copy(page, receiver)
                    counts[outcome] += 1
                    counts["copied_bytes"] += page.nbytes * (outcome == "copied")
                    if most and receiver and outcome != "present":
                        ends_s = began_s + page.nbytes / most
                        time.sleep(max(0.0, ends_s - time.monotonic()))
    return emit(report.copied(found, dry_run=dry_run), as_json=json)


def _copy(page: StoredPage, receiver: PageReceiver | None) -> str:
    """Copy one object; return what became of it, a word of `_NOT_COPIED`."""
    if receiver is None:
        return "copied"
    if receiver.has(page):
        return "present"
    data = page.read()
    if data is None:
        return "damaged"
    return "copied" if receiver.take(page, data) else "failed"


def retain(  # noqa: PLR0913 - one option each
    target: str,
    /,
    *,
    namespace: str = "",
    keep: str = "",
    older: str = "",
    newer: str = "",
    hashes: Path | None = None,
    dry_run: bool = False,
    shared_root: bool = False,
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Promise pages a time in which nothing evicts them; 1 if some get no promise.

    The budget is that of the engines: give their quota, and their retained_share,
    with --set. A page that an engine is writing beside gets its promise later.

    Args:
        target: The store's root directory.
        namespace: Only this one; enough of its first digits.
        keep: For how long from now, such as "24 h".
        older: Only pages that were last stored or read longer ago, such as "1 h".
        newer: Only pages that were stored or read since then.
        hashes: A file of keys, one a line: a page's hash with its suffix, or all of
            the key; only these pages, the first ones first.
        dry_run: Only say what would be promised.
        shared_root: Accept a root that others own or may write.
        set_: Settings of its backend, as KEY=VALUE.
        json: Print one line of JSON.
    """
    if not keep:
        raise UsageProblem("nothing says for how long", fix='Give --keep, as in "1 h".')
    if not any(pair.startswith("quota=") for pair in set_):
        raise UsageProblem(
            "promises are bounded by a share of the quota, and none is given",
            fix="Give that of the engines: --set quota=SIZE, or --set quota=0.",
        )
    asked = Retention.lasting(keep_s=parse_seconds(keep))
    meant = _Selection.of(namespace, "", "", older, newer, hashes)
    store = open_store(target, set_, shared_root=shared_root)
    return emit(_changed(store, meant, asked, dry_run=dry_run), as_json=json)


def expire(  # noqa: PLR0913 - one option each
    target: str,
    /,
    *,
    namespace: str = "",
    after: str = "",
    older: str = "",
    newer: str = "",
    hashes: Path | None = None,
    dry_run: bool = False,
    shared_root: bool = False,
    set_: tuple[str, ...] = (),
    json: bool = False,
) -> int:
    """Let pages expire: none is served from then on; 1 if some do not.

    An engine that has the namespace open overwrites them soon after; without one
    `kvdock store gc` does.

    Args:
        target: The store's root directory.
        namespace: Only this one; enough of its first digits.
        after: In how long from now, such as "0 s".
        older: Only pages that were last stored or read longer ago, such as "1 h".
        newer: Only pages that were stored or read since then.
        hashes: A file of keys, one a line: a page's hash with its suffix, or all of
            the key; only these pages.
        dry_run: Only say what would expire.
        shared_root: Accept a root that others own or may write.
        set_: Settings of its backend, as KEY=VALUE.
        json: Print one line of JSON.
    """
    if not after:
        raise UsageProblem("nothing says when", fix='Give --after, as in "0 s".')
    asked = Retention.lasting(expire_s=parse_seconds(after))
    meant = _Selection.of(namespace, "", "", older, newer, hashes)
    store = open_store(target, set_, shared_root=shared_root)
    return emit(_changed(store, meant, asked, dry_run=dry_run), as_json=json)


def _changed(
    store: Store, meant: _Selection, asked: Retention, *, dry_run: bool
) -> Report:
    """Change the times of the pages that are chosen."""
    if meant == _Selection():
        raise UsageProblem(
            "nothing says which pages",
            fix="Give --namespace, --older, --newer or --hashes; several narrow it.",
        )

    def work(name: str) -> dict[str, Any]:
        order = meant.keys_in(name)
        every = meant.pages(store, name, expiring=True)
        pages = sorted(every, key=lambda page: order.get(page.key, 0))
        answers: dict[str, int] = {}
        if pages and not dry_run:
            with store.receive(name, b"") as receiver:
                answered = receiver.retain(pages, asked)
            answers = {answer.name.lower(): n for answer, n in answered.items()}
        nbytes = sum(one.nbytes for one in pages)
        return {
            "namespace": name,
            "pages": len(pages),
            "nbytes": nbytes,
            "answers": answers,
        }

    with progress.shown("changing") as bar:
        rows = [done for _, done in _each(store, meant.namespace, work, bar)]
    rows = [row for row in rows if row["pages"] or meant.namespace]
    return report.retained(rows, dry_run=dry_run)


@attrs.frozen
class _Selection:
    """Some namespaces of a store, and some of their pages.

    Args:
        namespace: First digits; "" for all.
        model: Name or pattern; "" for any.
        salt: Digest of the salt of a tenant; "" for any.
        tenant: Number of the tenant's pages in other namespaces.
        lines: Keys, or what follows the namespace in them, in order; empty for all.
        older_ns: Only what was last used longer ago; None for all.
        newer_ns: Only what was used since then; None for all.
    """

    namespace: str = ""
    model: str = ""
    salt: str = ""
    tenant: int = 0
    lines: tuple[str, ...] = ()
    older_ns: int | None = None
    newer_ns: int | None = None

    @classmethod
    def of(
        cls,
        namespace: str,
        model: str,
        tenant: str,
        older: str,
        newer: str,
        hashes: Path | None,
    ) -> _Selection:
        """Read what the user gave."""
        salt, number = "", 0
        if tenant:
            tenants = load_configuration().core.tenants
            if tenant not in tenants:
                listed = ", ".join(sorted(tenants)) or "none"
                raise UsageProblem(
                    f"the settings list no tenant {tenant!r}",
                    fix=f"Listed are: {listed}. KVDOCK_CONFIG names the file of "
                    "settings.",
                )
            salt, number = tenants[tenant], tenants.number(tenant)
        return cls(
            namespace,
            model,
            salt,
            number,
            hashes_of(hashes),
            int(parse_seconds(older) * 1e9) if older else None,
            int(parse_seconds(newer) * 1e9) if newer else None,
        )

    def keys_in(self, namespace: str) -> dict[str, int]:
        """Return whole keys that may be of a namespace, and their order."""
        head = f"{namespace}/"
        lines = (line if "/" in line else head + line for line in self.lines)
        return {key: at for at, key in enumerate(lines)}

    def pages(
        self,
        store: Store,
        namespace: str,
        passed: Callable[[int], object] = lambda _: None,
        *,
        expiring: bool = False,
    ) -> Iterator[StoredPage]:
        """Yield the pages of a namespace that are meant.

        `passed` is called with the bytes of each that is looked at.
        """
        keys, (first_ns, last_ns) = self.keys_in(namespace), self._span(store)
        for page in store.pages(namespace, [*keys], expiring=expiring):
            passed(page.nbytes)
            named = not keys or page.key in keys
            if named and first_ns <= page.used_ns <= last_ns:
                yield page

    def doomed(self, store: Store, one: NamespaceSurvey) -> list[StoredPage] | None:
        """Return what goes of a namespace: pages, [] for all of it, None for none."""
        named = one.namespace.startswith(self.namespace)
        if not (named and fnmatchcase(one.model, self.model or "*")):
            return None
        # Without pages it has no age.
        aged = self.older_ns and not self.lines
        if aged and not 0 < one.used_ns < self._span(store)[1]:
            return None
        record = store.record(one.namespace) if self.salt else {}
        whole = not self.salt or record.get("salt_sha256") == self.salt
        if whole and not self.lines:
            return []
        pages = self.pages(store, one.namespace, expiring=True)
        return [page for page in pages if whole or page.tenant == self.tenant] or None

    def _span(self, store: Store) -> tuple[int, int]:
        """Return when a page was used at the earliest, and at the latest."""
        timed = self.older_ns is not None or self.newer_ns is not None
        now_ns = store.now_ns() if timed else 0
        return (
            0 if self.newer_ns is None else now_ns - self.newer_ns,
            sys.maxsize if self.older_ns is None else now_ns - self.older_ns,
        )


def _stored_bytes(surveys: Sequence[NamespaceSurvey]) -> int:
    return sum(pool.stored_bytes for one in surveys for pool in one.pools)


def open_store(
    target: str, pairs: Sequence[str], *, shared_root: bool = False
) -> Store:
    """Open what is named with the backend that keeps it.

    `target` is a directory or a URL, `pairs` are settings as KEY=VALUE.

    Raises:
        UsageProblem: If no installed backend keeps a store there.
        KvdockError: If it cannot be opened.
    """
    given = [*pairs, "shared_root=true"] if shared_root else pairs
    wrong: KvdockError | None = None
    known: list[str] = []
    for candidate in usable_entry_points(GROUP):
        known.append(candidate.name)
        try:
            opener: Any = import_entry_point(candidate)
            store: Store | None = opener(
                target, backend_settings(candidate.name, given)
            )
        except KvdockError as error:
            # Another one may take it; otherwise the first says what is wrong.
            wrong = wrong or error
            continue
        if store is not None:
            return store
    raise wrong or UsageProblem(
        f"no installed backend keeps a store at {target!r}",
        fix=f"Backends with stores: {', '.join(known) or 'none'}. Give a directory, "
        "or the URL of a bucket.",
    )


def chosen(store: Store, prefix: str) -> str:
    """Return the one namespace that begins with a prefix, or the only one.

    Raises:
        UsageProblem: If none does, or several.
    """
    found = [name for name in store.namespaces() if name.startswith(prefix)]
    if len(found) == 1:
        return found[0]
    what = f"the store holds {len(found) or 'no'} namespaces"
    if prefix:
        what += f" that begin with {prefix!r}"
    named = ", ".join(name[:SHORT] for name in found[:_FEW])
    more = " and others" if len(found) > _FEW else ""
    raise UsageProblem(
        what,
        fix=f"Name one of them: {named}{more}."
        if found
        else "`kvdock store ls` lists what a store holds: look whether it is this one.",
    )


def _each(
    store: Store,
    prefix: str,
    do: Callable[[str], T],
    bar: progress.Progress | None = None,
) -> list[tuple[str, T]]:
    """Do the same for the namespace that is named, or for all that stay."""
    names = [chosen(store, prefix)] if prefix else store.namespaces()
    done = []
    for at, name in enumerate(names):
        if bar:
            bar.total, bar.done, bar.note = len(names), at, name[:SHORT]
        try:
            done.append((name, do(name)))
        except NamespaceError:
            # One that goes while others are looked at was not asked for.
            if prefix or name in store.namespaces():
                raise
    return done


COMMANDS: Mapping[str, Callable[..., int]] = MappingProxyType(
    {
        "ls": ls,
        "stat": stat,
        "record": record,
        "diff": diff,
        "verify": verify,
        "gc": gc,
        "rm": rm,
        "copy": copy,
        "retain": retain,
        "expire": expire,
    }
)
"""The commands below `kvdock store`."""

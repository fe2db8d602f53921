"""`kvdock store` on a directory of segment files."""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import attrs
import numpy as np

from kvdock.config import structure
from kvdock.errors import KvdockError, NamespaceError, SettingsError
from kvdock.generations import Generation
from kvdock.namespace import RECORD_NAME, load_record
from kvdock.stores import NamespaceSurvey, PoolSurvey
from kvdock_segments.cleanup import (
    clear_namespace,
    collect_garbage,
    delete_linked,
    lock_unused,
    remove_empty,
)
from kvdock_segments.copies import SegmentReceiver, stored_pages
from kvdock_segments.format import key_digests, key_seed
from kvdock_segments.limits import StoreLocation
from kvdock_segments.namespace_files import parse_record, remove_damaged
from kvdock_segments.ownership import read_liveness
from kvdock_segments.paths import (
    closing_fd,
    earlier_now_ns,
    namespaces_in,
    open_root,
)
from kvdock_segments.room import tenants_in
from kvdock_segments.upkeep import shrink
from kvdock_segments.usage import NamespaceUsage
from kvdock_segments.verify import verify_namespace
from kvdock_segments.walk import list_segments, namespace_of, pools, segments

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Self

    from kvdock.capacity import TenantUse
    from kvdock.config.tenants import Tenants
    from kvdock.stores import StoredPage, Verified
    from kvdock_segments.settings import SegmentSettings


_COUNTS = (
    "segments",
    "pages",
    "stored_bytes",
    "corrupt_records",
    "promised_bytes",
    "expiring",
)
"""What a survey counts of each pool."""


@attrs.frozen
class DirectoryStore:
    """The namespaces below a root directory: a `kvdock.stores.Store`.

    Backends on segments return it from their entry point of `kvdock.stores`.

    Args:
        shared: Accept one that others own or may write.
        settings: Of what is copied there; without them nothing limits it.
    """

    shows_users: ClassVar[bool] = True

    root: Path
    shared: bool = False
    settings: SegmentSettings | None = None

    @classmethod
    def open(
        cls,
        target: str,
        given: Mapping[str, object],
        backend: str,
        settings: type[SegmentSettings],
    ) -> Self | None:
        """Open a directory; None for a URL.

        `target` is what the user names; `given` are settings of the backend.

        Raises:
            SettingsError: If a setting is unknown or of the wrong kind, or there is
                no path.
        """
        if "://" in target:
            return None
        if not target.strip():
            # Where a root is optional, no text would be none.
            raise SettingsError(
                f"{target!r} is not a path", fix="Name the root of a backend."
            )
        where = f"backend {backend!r}"
        found = structure(settings, {**given, "root": target}, where=where)
        return cls(found.root, found.shared_root, found)

    def namespaces(self) -> tuple[str, ...]:
        """Return the digests of the namespaces, sorted.

        Raises:
            SettingsError: If the directory is missing, or holds other things only.
        """
        found: tuple[str, ...] = ()
        if self.root.is_dir():
            with closing_fd(open_root(self.root, shared=True, create=False)) as fd:
                found = namespaces_in(fd)
        if not found:
            self._check_store()
        return found

    def now_ns(self) -> int:
        """Return the time by this host's clock, or its file system's if earlier."""
        return earlier_now_ns(self.root)

    def room(self, tenants: Tenants) -> Mapping[str, TenantUse]:
        """Count what tenants take, in all namespaces."""
        self.namespaces()
        return tenants_in(self.root, tenants)

    def _check_store(self) -> None:
        """Raise unless a directory without namespaces is an empty store."""
        where = f"{self.root} is not a store"
        if not self.root.is_dir():
            why = "it is not a directory" if self.root.exists() else "it is missing"
            raise SettingsError(f"{where}: {why}", fix="Name the root of a backend.")
        if (self.root / RECORD_NAME).is_file():
            raise SettingsError(
                f"{where}: it is one namespace of {self.root.parent}",
                fix=f"Name {self.root.parent}, and {self.root.name[:12]} as namespace.",
            )
        try:
            others = [one for one in self.root.iterdir() if one.name[:1] != "."]
        except OSError as error:
            raise SettingsError(
                f"{self.root} cannot be read: {error.strerror or error}",
                fix="Run this as the user of the engine.",
            ) from error
        if others:
            raise SettingsError(
                f"{where}: it holds {len(others)} other files or directories, such as "
                f"{min(others).name}, and no namespace",
                fix="Name the root of a backend.",
            )

    def pages(
        self, namespace: str, keys: Sequence[str] = (), *, expiring: bool = False
    ) -> Iterator[StoredPage]:
        """Yield the objects of a namespace; those that go meanwhile read as None."""
        return stored_pages(self.root, namespace, keys, expiring=expiring)

    @contextmanager
    def receive(self, namespace: str, record: bytes) -> Iterator[SegmentReceiver]:
        """Open the store, new or not, for objects that are copied to it."""
        place = StoreLocation(
            root=self.root,
            namespace=namespace,
            pool="",
            object_bytes=(),
            record=record,
            shared=self.shared,
            digests=True,
        )
        with ExitStack() as opened:
            yield SegmentReceiver(place, self.settings, opened)

    def record(self, namespace: str) -> Mapping[str, object]:
        """Return the record of a namespace; empty if none is there that fits."""
        with suppress(NamespaceError):
            return load_record(self.root / namespace)
        return {}

    def finder(self, namespace: str) -> Callable[[Sequence[str]], Sequence[bool]]:
        """Return what says which of some keys are stored, as the store is now."""
        stored = [np.zeros((0, 2), np.uint64)]
        for segment in segments(self.root, namespace):
            live = segment.contents.records[segment.live]
            stored.append(np.stack([live["key_low"], live["key_high"]], axis=1))
        digests = np.sort(np.concatenate(stored).view("S16").ravel())

        def holds(keys: Sequence[str]) -> Sequence[bool]:
            asked = key_digests(keys, key_seed(namespace)).view("S16").ravel()
            after = np.searchsorted(digests, asked, "right")
            exists: list[bool] = (after > np.searchsorted(digests, asked)).tolist()
            return exists

        return holds

    def survey(self, namespace: str) -> NamespaceSurvey:
        """Count what is held of a namespace."""
        with namespace_of(self.root, namespace) as fd:
            listed = {
                pool: sum(one.nbytes for one in list_segments(folder))
                for pool, folder in pools(fd)
            }
            about = parse_record(fd, namespace)
        counts = {folder: Counter[str]() for folder in listed}
        used_ns = 0
        for segment in segments(self.root, namespace):
            contents, live = segment.contents, segment.live
            kept = live & (contents.records["keep_until"] > time.time())
            timed = live & (contents.records["expire_at"] > 0)
            counts.setdefault(segment.folder, Counter()).update(
                segments=1,
                pages=int(live.sum()),
                stored_bytes=contents.object_bytes * int(live.sum()),
                corrupt_records=len(contents.corrupt_slots),
                promised_bytes=contents.slot_bytes * int(kept.sum()),
                expiring=int(timed.sum()),
            )
            used_ns = max(used_ns, int(contents.used_ns[live].max(initial=0)))
        return NamespaceSurvey(
            namespace=namespace,
            model=str(about.get("model", "")),
            revision=str(about.get("revision", "")),
            generation=str(Generation.of(about) or ""),
            recorded=bool(about),
            used_ns=used_ns,
            pools=tuple(
                PoolSurvey(
                    pool=folder.rpartition(".")[0],
                    object_bytes=int(folder.rpartition(".")[2]),
                    file_bytes=listed.get(folder, 0),
                    **{name: count[name] for name in _COUNTS},
                )
                for folder, count in sorted(counts.items())
            ),
        )

    def verify(
        self,
        namespace: str,
        progress: Callable[[int], None] | None = None,
        *,
        heal: bool = False,
    ) -> Verified:
        """Read every page of a namespace and compare its checksum."""
        return verify_namespace(
            self.root, namespace, progress, heal=heal, shared=self.shared
        )

    def collect(
        self,
        namespace: str,
        *,
        to_bytes: int | None = None,
        older_s: float | None = None,
        newer: bool = False,
    ) -> int:
        """Delete what crashed writers left, and the coldest segments if asked to.

        Unreadable segments are deleted as well, and finally the namespace itself if it
        is empty and no store has it open. What has expired is overwritten first, unless
        an engine is writing beside it: that engine does it.

        Raises:
            KvdockError: If pages are to be deleted by their age, or other users own the
                root or can write there.
        """
        if older_s is not None:
            raise KvdockError(
                f"{self.root} deletes by use and not by age",
                fix="Give --to with the bytes that may stay, or set the quota of the "
                "backend.",
            )
        expiring = [one for one in self.survey(namespace).pools if one.expiring]
        if expiring:
            with self.receive(namespace, b"") as opened:
                opened.erase_expired(expiring)
        with namespace_of(self.root, namespace, shared=self.shared) as fd:
            kept_by = read_liveness(fd)
            usage = NamespaceUsage(fd)
            freed = remove_damaged(fd, namespace)
            for _, folder in pools(fd):
                freed += collect_garbage(folder, kept_by, lost=True, newer=newer)
            begun = usage.usage_bytes()
            delete_linked(fd, kept_by)
            if to_bytes is not None:
                shrink(self.root, namespace, fd, to_bytes)
            freed += begun - usage.usage_bytes()
        with closing_fd(open_root(self.root, shared=True, create=False)) as root_fd:
            remove_empty(root_fd, namespace)
        return freed

    def in_use(self, namespace: str) -> str:
        """Say why a process may have a namespace open; "" if none has."""
        with namespace_of(self.root, namespace) as fd:
            return lock_unused(fd)

    def clear(self, namespace: str, *, unused: bool = False) -> int:
        """Delete all pages of a namespace; return the bytes that were freed.

        If `unused`, processes are kept from opening it meanwhile, and one that has it
        open is an error.

        Raises:
            KvdockError: If other users own the root or can write there, or a process
                may have the namespace open and that is not accepted.
        """
        with namespace_of(self.root, namespace, shared=self.shared) as fd:
            if unused and (why := lock_unused(fd)):
                raise KvdockError(
                    f"namespace {namespace[:12]} of {self.root} is kept: {why}"
                )
            return clear_namespace(fd) + remove_damaged(fd, namespace)

"""The output of `kvdock store` about the namespaces of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from kvdock.namespace import flatten_record, namespace_digest
from kvdock.units import format_age, format_bytes
from kvdock_cli.reports._report import (
    Block,
    Column,
    Pairs,
    Report,
    Table,
    flagged,
    spelt,
)
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import Cell, plain

if TYPE_CHECKING:
    from kvdock.capacity import TenantUse
    from kvdock.namespace import Difference
    from kvdock.stores import NamespaceSurvey, Verified

SHORT = 12
"""Digits that distinguish namespaces for people."""

_FEW = 20  # bad pages that are shown one by one
_EMPTY = "the store is empty"


Removal = Mapping[str, Any]
"""A namespace that was chosen to go, and what became of it.

Its `survey`; why a process may have it open (`in_use`, "" if none has); whether it
`goes`; the `freed_bytes`; the `target` that it is in; how many of its `pages` go, None
for the whole of it; and how many others were chosen and are `kept`, because a process
is writing beside them.
"""


def _survey(row: NamespaceSurvey | Removal) -> NamespaceSurvey:
    return row["survey"] if isinstance(row, Mapping) else row


def _model(row: NamespaceSurvey | Removal) -> str:
    survey = _survey(row)
    return survey.model or ("-" if survey.recorded else "?")


_GENERATION = Column("GENERATION", lambda row: row.generation or "-", fold=True)
_NAMESPACE = Column("NAMESPACE", lambda row: row["namespace"][:SHORT])
_SURVEYS = (
    Column("NAMESPACE", lambda row: _survey(row).namespace[:SHORT]),
    Column("MODEL", _model, fold=True),
    Column("REVISION", lambda row: _survey(row).revision or "-", fold=True, drop=1),
    Column("PAGES", lambda row: str(_survey(row).pages)),
    Column("SIZE", lambda row: format_bytes(_survey(row).file_bytes)),
    Column("LAST USED", lambda row: _day(_survey(row).used_ns), fold=True, drop=2),
)
_TIMES = (Column("PROMISED", "promised_bytes"), Column("EXPIRING", "expiring"))
_POOLS = (
    Column("POOL", "pool"),
    Column("OBJECT", "object_bytes", drop=2),
    Column("PAGES", "pages"),
    Column("STORED", "stored_bytes"),
    Column("ON DISK", "file_bytes"),
    Column("SEGMENTS", "segments", drop=1),
    Column(
        "WRONG",
        lambda pool: flagged(str(pool.corrupt_records), pool.corrupt_records, Tone.BAD),
    ),
)
TENANTS = (
    Column("TENANT", "tenant", tone=Tone.STRONG),
    Column(
        "TAKES",
        lambda row: flagged(
            format_bytes(int(row["used_bytes"])),
            0 < row["quota_bytes"] < row["used_bytes"],
        ),
    ),
    Column("QUOTA", lambda row: spelt("bytes", row["quota_bytes"] or None)),
    Column("PROMISED", "promised_bytes"),
)
_DIFFERENCES = (
    Column("FIELD", "field"),
    Column("A", "left", fold=True),
    Column("B", "right", fold=True),
)


def listing(
    surveys: Sequence[NamespaceSurvey],
    unused: Sequence[NamespaceSurvey] = (),
    now_ns: int = 0,
    *,
    retained: bool = False,
) -> Report:
    """Report a line for each namespace.

    `unused` are those that no process has open. With `retained`, it shows what is
    promised and what expires.
    """
    generations = (_GENERATION,) if any(one.generation for one in surveys) else ()
    columns = (*_SURVEYS, *generations, *(_TIMES if retained else ()))
    blocks: list[Block] = [Table(columns, surveys)]
    if not surveys:
        blocks = ["no page is promised or expires" if retained else _EMPTY]
    if unused:
        by_use = sorted(unused, key=lambda survey: survey.used_ns)
        lines = [
            f"{survey.namespace[:SHORT]}: "
            + (
                f"not used for {format_age((now_ns - survey.used_ns) / 1e9)}, "
                if survey.used_ns
                else "never used, "
            )
            + format_bytes(survey.file_bytes)
            for survey in by_use
        ]
        blocks += [
            "",
            "No process has these open; they make way where there is no room:",
        ]
        blocks += _few(lines)
    data = {"namespaces": surveys, "unused": [survey.namespace for survey in unused]}
    return Report("kvdock.store-ls/1", data, blocks)


def survey(found: NamespaceSurvey) -> Report:
    """Report what a store holds of one namespace, pool by pool."""
    head = [
        ("namespace", found.namespace[:SHORT]),
        ("model", _model(found)),
        ("revision", found.revision or "-"),
        *([("generation", found.generation)] if found.generation else []),
        ("last used", _day(found.used_ns)),
    ]
    pools = Table(_POOLS, found.pools) if found.pools else "no pages"
    return Report("kvdock.store-stat/1", {"namespace": found}, [Pairs(head), "", pools])


def tenants(found: Mapping[str, TenantUse]) -> Report:
    """Report what each tenant takes in a store."""
    rows = [{"tenant": name, **plain(use)} for name, use in found.items()]
    return Report("kvdock.store-tenants/1", {"tenants": found}, [Table(TENANTS, rows)])


def record(found: Mapping[str, object]) -> Report:
    """Report what the bytes of a namespace belong to, its digest first."""
    digest = namespace_digest(found)
    rows = [("digest", digest), *flatten_record(found).items()]
    return Report("kvdock.ns/1", {"digest": digest, "record": found}, [Pairs(rows)])


def differences(found: Sequence[Difference]) -> Report:
    """Report in which fields two namespaces differ; all is well if in none."""
    same = "The same namespace: bytes are interchangeable."
    table = Table(_DIFFERENCES, found) if found else same
    return Report("kvdock.ns-diff/1", {"differences": found}, [table], not found)


def checked(found: Sequence[Verified]) -> Report:
    """Report what verifying found; what is wrong by its place on disk."""
    blocks: list[Block] = []
    for one in found:
        counts = {
            "{} are not": len(one.bad),
            "{} are lost (records not whole)": one.corrupt_records,
            "unreadable segments: {}": len(one.unreadable_segments),
            "damaged files: {}": len(one.damaged_files),
            "places that could not be written: {}": one.failed_slots,
        }
        wrong = [words.format(count) for words, count in counts.items() if count]
        verdict = ", ".join([f"{one.good} pages are right", *wrong])
        cell = Cell(verdict, Tone.GOOD if one.ok else Tone.BAD)
        blocks.append(Pairs([(one.namespace[:SHORT], cell)]))
        blocks += _few([f"{bad.where}, {format_bytes(bad.nbytes)}" for bad in one.bad])
        blocks += _few(one.unreadable_segments)
        blocks += _few(one.damaged_files)
    ok = all(one.ok for one in found)
    blocks += _ways_out(found)
    return Report(
        "kvdock.store-verify/1", {"namespaces": found}, blocks or [_EMPTY], ok
    )


def _few(lines: Sequence[object]) -> list[Block]:
    more = [f"  and {len(lines) - _FEW} more"] if len(lines) > _FEW else []
    return [*(Pairs([(str(line),)], indent=2) for line in lines[:_FEW]), *more]


def _ways_out(found: Sequence[Verified]) -> list[str]:
    """Say what to do about what is wrong."""
    forgotten = sum(one.forgotten for one in found)
    lost = any(one.bad or one.corrupt_records for one in found)
    ways = {
        f"{forgotten} records are forgotten: the next write heals them.": forgotten,
        "Reads of these are misses; verify --heal forgets them, so that the next write "
        "stores them again.": lost and not forgotten,
        "Pages of segments that cannot be read are lost; kvdock store gc frees their "
        "space.": any(one.unreadable_segments for one in found),
        "Places that could not be written are set aside and tried again later; many of "
        "them mean that a disk is failing.": any(one.failed_slots for one in found),
        "kvdock store gc deletes damaged files; the next engine that attaches writes a "
        "new record.": any(one.damaged_files for one in found),
    }
    return [way for way, needed in ways.items() if needed]


def freed(found: Mapping[str, int]) -> Report:
    """Report how much space was freed in each namespace."""
    lines = [
        f"{namespace[:SHORT]}  {format_bytes(nbytes)} freed"
        for namespace, nbytes in found.items()
    ]
    return Report("kvdock.store-gc/1", {"freed_bytes": found}, lines or [_EMPTY])


def total(rows: Sequence[Removal]) -> str:
    """Say how much namespaces hold."""
    whole = [row["survey"] for row in rows if row["pages"] is None]
    single = sum(row["pages"] or 0 for row in rows)
    pages = sum(one.pages for one in whole)
    size = format_bytes(sum(one.file_bytes for one in whole))
    several = "one namespace" if len(whole) == 1 else f"{len(whole)} namespaces"
    said = [f"{several} of {pages} pages, {size}"] if whole or not single else []
    return " and ".join([*said, *([f"{single} single pages"] if single else [])])


def removed(rows: Sequence[Removal], *, dry_run: bool, destroyed: int = 0) -> Report:
    """Report what was deleted, and what stays because it may be in use."""
    done = "would be deleted" if dry_run else "deleted"
    several = len({row["target"] for row in rows}) > 1
    outcome = Column("OUTCOME", partial(_outcome, done, several), fold=True)
    gone = total([row for row in rows if row["goes"]])
    blocks: list[Block] = [Table((*_SURVEYS, outcome), rows), "", f"{gone} {done}"]
    if not all(row["goes"] for row in rows):
        blocks.append("--force deletes what is kept.")
    if not rows:
        blocks = ["no namespace matches"]
    ok = dry_run or all(row["goes"] and not row["kept"] for row in rows)
    data = {"dry_run": dry_run, "keys_destroyed": destroyed, "removals": rows}
    return Report("kvdock.store-rm/1", data, blocks, ok)


def _outcome(done: str, several: bool, row: Removal) -> str | Cell:  # noqa: FBT001 - as `partial` passes it
    where = f" in {row['target']}" if several else ""
    if not row["goes"]:
        return Cell(f"kept{where}: {row['in_use']}", Tone.WARNING)
    kept, pages = row["kept"], row["pages"]
    beside = f", {kept} kept: a process is writing beside them" if kept else ""
    return (done if pages is None else f"{pages} pages {done}") + where + beside


def copied(found: Sequence[Mapping[str, Any]], *, dry_run: bool) -> Report:
    """Report what was copied of each namespace.

    Args:
        found: Of each, its `namespace` and `model`, and the objects that were `copied`
            and verified, were `present`, are `damaged` in the source, or `failed` in
            the target; and `copied_bytes`.
        dry_run: Whether nothing was copied.
    """
    columns = (
        _NAMESPACE,
        Column("MODEL", lambda row: row["model"] or "?", fold=True),
        Column("TO COPY" if dry_run else "COPIED", "copied"),
        Column("PRESENT", "present"),
        Column("DAMAGED", "damaged"),
        Column("FAILED", "failed"),
        Column("BYTES", "copied_bytes"),
    )
    table = Table(columns, found) if found else "no namespace matches"
    ok = not any(one["damaged"] or one["failed"] for one in found)
    data = {"dry_run": dry_run, "namespaces": found}
    return Report("kvdock.store-copy/1", data, [table], ok)


def retained(rows: Sequence[Mapping[str, Any]], *, dry_run: bool) -> Report:
    """Report how many objects of each namespace got their times.

    Args:
        rows: Of each, its `namespace`, `pages`, `nbytes`, and `answers`: how many were
            "accepted", "clipped", "absent" or "unsupported".
        dry_run: Whether nothing was changed.
    """
    nothing = "would change" if dry_run else "-"
    columns = (
        _NAMESPACE,
        Column("PAGES", "pages"),
        Column("BYTES", "nbytes"),
        Column(
            "ANSWERS",
            lambda row: (
                ", ".join(f"{n} {word}" for word, n in sorted(row["answers"].items()))
                or nothing
            ),
        ),
    )
    blocks: list[Block] = [Table(columns, rows)]
    if any("clipped" in row["answers"] for row in rows) and not dry_run:
        blocks.append(
            "What is clipped is stored without it: the budget is spent, or an engine "
            "is writing beside it; try again later."
        )
    if not any(row["pages"] for row in rows):
        blocks = ["no page matches"]
    ok = not any(set(row["answers"]) - {"accepted"} for row in rows)
    data = {"dry_run": dry_run, "namespaces": rows}
    return Report("kvdock.store-retain/1", data, blocks, ok)


def _day(stamp_ns: int) -> str:
    if not stamp_ns:
        return "never"
    from datetime import UTC, datetime  # noqa: PLC0415 - 2 ms that others save

    moment = datetime.fromtimestamp(stamp_ns // 10**9, UTC)
    return moment.strftime("%Y-%m-%d %H:%M UTC")

"""The output of `kvdock store` about the namespaces of a store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock.units import format_bytes
from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, columns, paragraph, plain, table

if TYPE_CHECKING:
    from kvdock.capacity import TenantUse
    from kvdock.stores import NamespaceSurvey, Verified

_SHORT = 12  # digits that distinguish namespaces for people
_FEW = 20  # bad pages that are shown one by one


def data(what: str, *, ok: bool = True, **found: object) -> dict[str, object]:
    """Describe what `kvdock store WHAT` found as data; False where it is a problem."""
    return {"schema": f"kvdock.store-{what}/1", "ok": ok, **plain(found)}


def listing_text(
    surveys: Sequence[NamespaceSurvey],
    style: Style = PLAIN,
    outcomes: Sequence[str | Cell] = (),
    *,
    retained: bool = False,
) -> str:
    """Render one line for each namespace, with what became of it if that is given.

    With `retained`, it shows what is promised and what expires.
    """
    if not surveys:
        return "no page is promised or expires" if retained else "the store is empty"
    rows = [
        (
            one.namespace[:_SHORT],
            _model(one),
            one.revision or "-",
            str(one.pages),
            format_bytes(one.file_bytes),
            _day(one.used_ns),
            *(
                (format_bytes(one.promised_bytes), str(one.expiring))
                if retained
                else ()
            ),
            *outcomes[at : at + 1],
        )
        for at, one in enumerate(surveys)
    ]
    headings = ["NAMESPACE", "MODEL", "REVISION", "PAGES", "SIZE", "LAST USED"]
    headings += ["PROMISED", "EXPIRING"] if retained else []
    headings += ["OUTCOME"] if outcomes else []
    drop = ["REVISION", "LAST USED"]
    fold = ["MODEL", "REVISION", "LAST USED", "OUTCOME"]
    return "\n".join(table(headings, rows, style, fold=fold, drop=drop))


def survey_text(one: NamespaceSurvey, style: Style = PLAIN) -> str:
    """Render what a store holds of one namespace, pool by pool."""
    head = columns(
        [
            ("namespace", _whole(one.namespace, style)),
            ("model", _model(one)),
            ("revision", one.revision or "-"),
            ("last used", _day(one.used_ns)),
        ],
        style,
    )
    rows = [
        (
            pool.pool,
            format_bytes(pool.object_bytes),
            str(pool.pages),
            format_bytes(pool.stored_bytes),
            format_bytes(pool.file_bytes),
            str(pool.segments),
            Cell(str(pool.corrupt_records), Tone.BAD if pool.corrupt_records else None),
        )
        for pool in one.pools
    ]
    headings = ("POOL", "OBJECT", "PAGES", "STORED", "ON DISK", "SEGMENTS", "WRONG")
    found = table(headings, rows, style, drop=["SEGMENTS", "OBJECT"])
    return "\n".join([*head, "", *(found or ["no pages"])])


def _whole(namespace: str, style: Style) -> str:
    """Return the digest, or its first digits where a line does not hold it."""
    fits = not style.width or len("namespace  " + namespace) <= style.width
    return namespace if fits else f"{namespace[:_SHORT]}... (--json has all of it)"


def tenants_text(found: Mapping[str, TenantUse], style: Style = PLAIN) -> str:
    """Render what each tenant takes in a store."""
    rows = [
        (
            Cell(name, Tone.STRONG),
            Cell(
                format_bytes(one.used_bytes),
                Tone.WARNING if 0 < one.quota_bytes < one.used_bytes else None,
            ),
            format_bytes(one.quota_bytes) if one.quota_bytes else "-",
            format_bytes(one.promised_bytes),
        )
        for name, one in found.items()
    ]
    return "\n".join(table(("TENANT", "TAKES", "QUOTA", "PROMISED"), rows, style))


def checked_text(found: Sequence[Verified], style: Style = PLAIN) -> str:
    """Render what verifying found; what is wrong by its place on disk."""
    lines: list[str] = []
    for one in found:
        verdict = f"{one.good} pages are right"
        if one.bad:
            verdict += f", {len(one.bad)} are not"
        if one.corrupt_records:
            verdict += f", {one.corrupt_records} are lost (records not whole)"
        if one.unreadable_segments:
            verdict += f", unreadable segments: {len(one.unreadable_segments)}"
        if one.damaged_files:
            verdict += f", damaged files: {len(one.damaged_files)}"
        if one.failed_slots:
            verdict += f", places that could not be written: {one.failed_slots}"
        cell = Cell(verdict, Tone.GOOD if one.ok else Tone.BAD)
        lines += columns([(one.namespace[:_SHORT], cell)], style)
        lines += _few(f"{spot.where}, {format_bytes(spot.nbytes)}" for spot in one.bad)
        lines += _few(map(str, one.unreadable_segments))
        lines += _few(map(str, one.damaged_files))
    for line in _ways_out(found):
        lines += paragraph(line, style)
    return "\n".join(lines) or "the store is empty"


def _few(lines: Iterable[str]) -> list[str]:
    every = [f"  {line}" for line in lines]
    more = [f"  and {len(every) - _FEW} more"] if len(every) > _FEW else []
    return every[:_FEW] + more


def _ways_out(found: Sequence[Verified]) -> list[str]:
    """Say what to do about what is wrong."""
    lines = []
    forgotten = sum(one.forgotten for one in found)
    if forgotten:
        lines.append(f"{forgotten} records are forgotten: the next write heals them.")
    elif any(one.bad or one.corrupt_records for one in found):
        lines.append(
            "Reads of these are misses; verify --heal forgets them, so that the "
            "next write stores them again."
        )
    if any(one.unreadable_segments for one in found):
        lines.append(
            "Pages of segments that cannot be read are lost; kvdock store gc "
            "frees their space."
        )
    if any(one.failed_slots for one in found):
        lines.append(
            "Places that could not be written are set aside and tried again later; "
            "many of them mean that a disk is failing."
        )
    if any(one.damaged_files for one in found):
        lines.append(
            "kvdock store gc deletes damaged files; the next engine that attaches "
            "writes a new record."
        )
    return lines


def freed_text(freed: Sequence[tuple[str, int]]) -> str:
    """Render how much space was freed in each namespace."""
    return (
        "\n".join(
            f"{namespace[:_SHORT]}  {format_bytes(nbytes)} freed"
            for namespace, nbytes in freed
        )
        or "the store is empty"
    )


@attrs.define(eq=False)
class Removal:
    """A namespace that was chosen to go, and what became of it.

    Args:
        in_use: Why a process may have it open; "" if none has.
        pages: How many of its pages go; None for the whole of it.
        kept: How many others were chosen and stay, because a process is writing
            beside them.
    """

    survey: NamespaceSurvey
    in_use: str
    goes: bool
    freed_bytes: int = 0
    target: str = ""
    pages: int | None = None
    kept: int = 0

    @property
    def ok(self) -> bool:
        """Return whether all that was chosen goes."""
        return self.goes and not self.kept


def total(rows: Sequence[Removal]) -> str:
    """Say how much namespaces hold."""
    whole = [row.survey for row in rows if row.pages is None]
    single = sum(row.pages or 0 for row in rows)
    pages = sum(one.pages for one in whole)
    size = format_bytes(sum(one.file_bytes for one in whole))
    several = "one namespace" if len(whole) == 1 else f"{len(whole)} namespaces"
    said = [f"{several} of {pages} pages, {size}"] if whole or not single else []
    return " and ".join([*said, *([f"{single} single pages"] if single else [])])


def removed_text(
    rows: Sequence[Removal], style: Style = PLAIN, *, dry_run: bool
) -> str:
    """Render what was deleted, and what stays because it may be in use."""
    if not rows:
        return "no namespace matches"
    done = "would be deleted" if dry_run else "deleted"
    several = len({row.target for row in rows}) > 1
    outcomes = []
    for row in rows:
        what = done if row.pages is None else f"{row.pages} pages {done}"
        where = f" in {row.target}" if several else ""
        if row.kept:
            where += f", {row.kept} kept: a process is writing beside them"
        kept = Cell(f"kept{where}: {row.in_use}", Tone.WARNING)
        outcomes.append(what + where if row.goes else kept)
    lines = [listing_text([row.survey for row in rows], style, outcomes), ""]
    lines.append(f"{total([row for row in rows if row.goes])} {done}")
    if not all(row.goes for row in rows):
        lines.append("--force deletes what is kept.")
    return "\n".join(lines)


@attrs.define
class Copied:
    """What became of the objects of a namespace that were to be copied.

    Args:
        copied: Objects that the target has now, verified there.
        present: Those that it had already.
        damaged: Those that are wrong or gone in the source.
        failed: Those that the target did not take.
    """

    namespace: str
    model: str
    copied: int = 0
    present: int = 0
    damaged: int = 0
    failed: int = 0
    copied_bytes: int = 0

    def add(self, outcome: str, nbytes: int) -> None:
        """Count one object."""
        setattr(self, outcome, getattr(self, outcome) + 1)
        self.copied_bytes += nbytes if outcome == "copied" else 0


def copied_text(found: Sequence[Copied], style: Style = PLAIN, *, dry_run: bool) -> str:
    """Render what was copied of each namespace."""
    rows = [
        (
            one.namespace[:_SHORT],
            one.model or "?",
            str(one.copied),
            str(one.present),
            str(one.damaged),
            str(one.failed),
            format_bytes(one.copied_bytes),
        )
        for one in found
    ]
    if not rows:
        return "no namespace matches"
    done = "TO COPY" if dry_run else "COPIED"
    titles = ("NAMESPACE", "MODEL", done, "PRESENT", "DAMAGED", "FAILED", "BYTES")
    return "\n".join(table(titles, rows, style, fold=["MODEL"]))


@attrs.define
class Retained:
    """What became of the objects of a namespace whose times were to change.

    Args:
        answers: How many were "accepted", "clipped", "absent" or "unsupported".
    """

    namespace: str
    pages: int
    nbytes: int
    answers: dict[str, int] = attrs.field(factory=dict)


def retained_text(
    rows: Sequence[Retained], style: Style = PLAIN, *, dry_run: bool
) -> str:
    """Render how many objects of each namespace got their times."""
    if not any(row.pages for row in rows):
        return "no page matches"
    shown = [
        (
            row.namespace[:_SHORT],
            str(row.pages),
            format_bytes(row.nbytes),
            ", ".join(f"{n} {answer}" for answer, n in sorted(row.answers.items()))
            or ("would change" if dry_run else "-"),
        )
        for row in rows
    ]
    lines = table(("NAMESPACE", "PAGES", "BYTES", "ANSWERS"), shown, style)
    if any("clipped" in row.answers for row in rows) and not dry_run:
        lines.append(
            "What is clipped is stored without it: the budget is spent, or an engine "
            "is writing beside it; try again later."
        )
    return "\n".join(lines)


def _model(one: NamespaceSurvey) -> str:
    return one.model or ("?" if not one.recorded else "-")


def _day(stamp_ns: int) -> str:
    if not stamp_ns:
        return "never"
    from datetime import UTC, datetime  # noqa: PLC0415 - 2 ms that others save

    moment = datetime.fromtimestamp(stamp_ns // 10**9, UTC)
    return moment.strftime("%Y-%m-%d %H:%M UTC")

"""The output of `kvdock why`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from kvdock_cli.reports._report import Block, Column, Report, Table
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import Cell, plain

if TYPE_CHECKING:
    from kvdock.journal import PoolAnswer, RequestAnswer

_SHOWN = 20
"""Requests, and differences, that text shows; JSON has all."""

_REQUESTS = (
    Column("TIME", lambda row: _time(row["at"])),
    Column("REQUEST", "request", fold=True),
    Column("PAGES", "pages"),
    Column("FOUND", "found"),
)


def requests(found: Mapping[str, tuple[float, int, int]]) -> Report:
    """Report the latest requests of a journal, the last one at the end."""
    rows: list[dict[str, Any]] = [
        {"request": request, "at": at_s, "pages": asked, "found": hits}
        for request, (at_s, asked, hits) in found.items()
    ]
    latest = sorted(rows, key=lambda row: row["at"])[-_SHOWN:]
    blocks: list[Block] = [Table(_REQUESTS, latest)]
    if len(rows) > len(latest):
        blocks.append(f"{len(rows) - len(latest)} earlier ones: see --json.")
    if not rows:
        blocks = ["The journal has no lookups of requests whose id is known."]
    return Report("kvdock.why-requests/1", {"requests": rows}, blocks)


def _causes(pool: PoolAnswer) -> str:
    listed = [f"{cause} ({pages})" for cause, pages in pool.causes.items()]
    return ", ".join(listed) or pool.cause or "-"


_POOLS = (
    Column("POOL", "pool"),
    Column("BACKEND", lambda pool: ", ".join(pool.backends) or "-", drop=1),
    Column("ASKED", "asked"),
    Column("FOUND", "found"),
    Column("LOADED", "loaded"),
    Column("MISSING BECAUSE", _causes, fold=True),
)
_DIFFERENCES = (
    Column("FIELD", "field"),
    Column("HERE", "left", fold=True),
    Column("THERE", "right", fold=True),
)


def answer(found: RequestAnswer) -> Report:
    """Report an answer: the verdict, what to do, and pool by pool."""
    verdict = Cell(found.verdict, Tone.GOOD if found.ok else Tone.BAD)
    blocks: list[Block] = [verdict, *filter(None, [found.fix])]
    if found.differences:
        blocks += ["", "This namespace and the one that has the pages differ in"]
        blocks += [Table(_DIFFERENCES, found.differences[:_SHOWN], indent=2)]
    blocks += ["", f"namespace {found.namespace[:16]}, {_time(found.at_s)}"]
    blocks.append(Table(_POOLS, found.pools))
    if found.lost_records:
        lost = f"The journal lost {found.lost_records} records"
        blocks.append(f"{lost}: a reason may be among them.")
    return Report("kvdock.why/1", plain(found), blocks, found.ok)


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(" ", "milliseconds")

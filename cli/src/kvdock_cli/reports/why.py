"""The output of `kvdock why`."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import paragraph, plain, table

if TYPE_CHECKING:
    from kvdock.journal import PoolAnswer, RequestAnswer

SCHEMA = "kvdock.why/1"
REQUESTS_SCHEMA = "kvdock.why-requests/1"

_SHOWN = 20
"""Requests, and differences, that text shows; JSON has all."""


def requests_text(
    found: Mapping[str, tuple[float, int, int]], style: Style = PLAIN
) -> str:
    """Render the latest requests, the last one at the end."""
    if not found:
        return "The journal has no lookups of requests whose id is known."
    latest = sorted(found.items(), key=lambda one: one[1][0])[-_SHOWN:]
    rows = [
        (_time(at_s), request, str(asked), str(there))
        for request, (at_s, asked, there) in latest
    ]
    lines = table(("TIME", "REQUEST", "PAGES", "FOUND"), rows, style, fold=["REQUEST"])
    if len(found) > len(latest):
        lines.append(f"{len(found) - len(latest)} earlier ones: see --json.")
    return "\n".join(lines)


def requests_data(found: Mapping[str, tuple[float, int, int]]) -> dict[str, object]:
    """Describe the requests of a journal."""
    return {
        "schema": REQUESTS_SCHEMA,
        "ok": True,
        "requests": [
            {"request": request, "at": at_s, "pages": asked, "found": there}
            for request, (at_s, asked, there) in found.items()
        ],
    }


def answer_text(answer: RequestAnswer, style: Style = PLAIN) -> str:
    """Render an answer: the verdict, what to do, and pool by pool."""
    lines = paragraph(answer.verdict, style)
    lines[0] = style.paint(lines[0], Tone.GOOD if answer.ok else Tone.BAD)
    if answer.fix:
        lines += paragraph(answer.fix, style)
    if answer.differences:
        fields = ("FIELD", "HERE", "THERE")
        differ = [(one.field, one.left, one.right) for one in answer.differences]
        lines += ["", "This namespace and the one that has the pages differ in"]
        lines += table(fields, differ[:_SHOWN], style, fold=fields[1:], indent=2)
    lines += ["", f"namespace {answer.namespace[:16]}, {_time(answer.at_s)}"]
    rows = [
        (
            one.pool,
            ", ".join(one.backends) or "-",
            str(one.asked),
            str(one.found),
            str(one.loaded),
            _causes(one),
        )
        for one in answer.pools
    ]
    heads = ("POOL", "BACKEND", "ASKED", "FOUND", "LOADED", "MISSING BECAUSE")
    lines += table(heads, rows, style, fold=["MISSING BECAUSE"], drop=["BACKEND"])
    if answer.lost_records:
        lines += paragraph(
            f"The journal lost {answer.lost_records} records: a reason may be among "
            "them.",
            style,
        )
    return "\n".join(lines)


def answer_data(answer: RequestAnswer) -> dict[str, object]:
    """Describe an answer; all is well if the whole prefix could be restored."""
    return {
        "schema": SCHEMA,
        "ok": answer.ok,
        **plain(answer),
    }


def _causes(pool: PoolAnswer) -> str:
    if not pool.causes:
        return pool.cause or "-"
    return ", ".join(f"{cause} ({pages})" for cause, pages in pool.causes.items())


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).isoformat(" ", "milliseconds")

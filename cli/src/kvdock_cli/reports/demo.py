"""The output of `kvdock demo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock.units import format_bytes
from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, paragraph, table

if TYPE_CHECKING:
    from kvdock_cli.demo.trial import Step

SCHEMA = "kvdock.demo-pages/1"

_WHAT = {
    "store": ("stores the pages of a prompt", "stores what was damaged once more"),
    "restore": (
        "restores them into empty memory",
        "restores what the damage left",
        "restores all of them again",
    ),
}


def head_text(backend: str, directory: str, notice: str, style: Style = PLAIN) -> str:
    """Render what is about to happen."""
    place = f" in {directory}" if directory else ""
    text = (
        f"Pages of a hybrid model with a draft: attention, states, a draft layer. "
        f"Backend {backend}{place}. Each line is a process of its own."
    )
    lines = paragraph(text, style)
    if notice:
        said = f"{notice[:1].upper()}{notice[1:]}."
        lines += [style.paint(line, Tone.WARNING) for line in paragraph(said, style)]
    return "\n".join(lines)


def as_text(
    steps: Sequence[Step], damaged: Sequence[tuple[str, int]], style: Style = PLAIN
) -> str:
    """Render what each process did."""
    seen = {"store": 0, "restore": 0}
    rows = []
    for step in steps:
        what = _WHAT[step.phase][seen[step.phase]]
        seen[step.phase] += 1
        found = step.found
        rate = found["bytes"] / max(found["seconds"], 1e-9)
        moved = ", ".join(f"{pool} {count}" for pool, count in found["pools"].items())
        rows.append(
            (
                str(step.pid),
                what,
                Cell(f"{found['pages']}/48", Tone.GOOD if step.ok else Tone.BAD),
                moved,
                str(found["wrong"]),
                f"{format_bytes(int(rate))}/s",
            )
        )
    harm = " and ".join(f"page {page + 1} of {pool}" for pool, page in damaged)
    headings = ("PROCESS", "WHAT", "PREFIX", "PAGES", "WRONG", "PACE")
    fold, drop = ["WHAT", "PAGES"], ["PROCESS", "PACE", "PAGES"]
    lines = table(headings, rows, style, fold=fold, drop=drop)
    lines += [
        "",
        *paragraph(f"Damaged in the store between lines 2 and 3: {harm}.", style),
    ]
    ok = all(step.ok for step in steps)
    words = (
        "A damaged page is a miss: the prefix ends before it, and no wrong byte came "
        "back."
        if ok
        else "FAILED: see the lines above."
    )
    tone = Tone.GOOD if ok else Tone.BAD
    lines += [style.paint(line, tone) for line in paragraph(words, style)]
    return "\n".join(lines)


def as_data(
    backend: str,
    steps: Sequence[Step],
    damaged: Sequence[tuple[str, int]],
    notice: str = "",
) -> dict[str, object]:
    """Describe what each process did as data."""
    return {
        "schema": SCHEMA,
        "ok": all(step.ok for step in steps),
        "backend": backend,
        "notice": notice,
        "damaged": [{"pool": pool, "page": page} for pool, page in damaged],
        "steps": [
            {
                "phase": step.phase,
                "pid": step.pid,
                "ok": step.ok,
                "pages": step.found["pages"],
                "expected_pages": step.pages,
                "pools": step.found["pools"],
                "bytes": step.found["bytes"],
                "seconds": step.found["seconds"],
                "wrong": step.found["wrong"],
            }
            for step in steps
        ],
    }

"""The output of `kvdock demo`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock.units import format_bytes
from kvdock_cli.reports._report import Block, Column, Report, Table
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import Cell

if TYPE_CHECKING:
    from kvdock_cli.demo.trial import Step

_WHAT = {
    "store": ("stores the pages of a prompt", "stores what was damaged once more"),
    "restore": (
        "restores them into empty memory",
        "restores what the damage left",
        "restores all of them again",
    ),
}


def head(backend: str, directory: str, notice: str) -> list[Block]:
    """Return blocks that say what is about to happen."""
    place = f" in {directory}" if directory else ""
    text = (
        f"Pages of a hybrid model with a draft: attention, states, a draft layer. "
        f"Backend {backend}{place}. Each line is a process of its own."
    )
    said = f"{notice[:1].upper()}{notice[1:]}."
    return [text, *([Cell(said, Tone.WARNING)] if notice else ())]


_COLUMNS = (
    Column("PROCESS", lambda step: step.found["pid"], drop=1),
    Column("WHAT", lambda step: _WHAT[step.phase][step.turn], fold=True),
    Column(
        "PREFIX",
        lambda step: Cell(
            f"{step.found['pages']}/48", Tone.GOOD if step.ok else Tone.BAD
        ),
    ),
    Column(
        "PAGES",
        lambda step: ", ".join(
            f"{pool} {n}" for pool, n in step.found["pools"].items()
        ),
        fold=True,
        drop=3,
    ),
    Column("WRONG", lambda step: step.found["wrong"]),
    Column(
        "PACE",
        lambda step: (
            format_bytes(int(step.found["bytes"] / max(step.found["seconds"], 1e-9)))
            + "/s"
        ),
        drop=2,
    ),
)


def report(
    backend: str,
    steps: Sequence[Step],
    damaged: Sequence[tuple[str, int]],
    notice: str = "",
) -> Report:
    """Report what each process did."""
    harm = " and ".join(f"page {page + 1} of {pool}" for pool, page in damaged)
    ok = all(step.ok for step in steps)
    verdict = Cell("FAILED: see the lines above.", Tone.BAD)
    if ok:
        verdict = Cell(
            "A damaged page is a miss: the prefix ends before it, and no wrong byte "
            "came back.",
            Tone.GOOD,
        )
    blocks: list[Block] = [
        "",
        Table(_COLUMNS, steps),
        "",
        f"Damaged in the store between lines 2 and 3: {harm}.",
        verdict,
    ]
    moved = [
        {
            "phase": step.phase,
            "pid": step.found["pid"],
            "ok": step.ok,
            "pages": step.found["pages"],
            "expected_pages": step.pages,
            "pools": step.found["pools"],
            "bytes": step.found["bytes"],
            "seconds": step.found["seconds"],
            "wrong": step.found["wrong"],
        }
        for step in steps
    ]
    places = [{"pool": pool, "page": page} for pool, page in damaged]
    data = {"backend": backend, "notice": notice, "damaged": places, "steps": moved}
    return Report("kvdock.demo-pages/1", data, blocks, ok)

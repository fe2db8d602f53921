"""The output of `kvdock bench`: a table, an object, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock.units import format_bytes
from kvdock_cli.reports._bars import Bar, picture
from kvdock_cli.reports._report import Block, Column, Report, Table
from kvdock_cli.reports._style import Style, Tone
from kvdock_cli.reports._tables import Cell

if TYPE_CHECKING:
    from kvdock_cli.bench.measure import Figure

_MOVES = ("put", "get")
_COLOURS = {"put": "#d95f02", "get": "#1b9e77", "raw": "#999999"}


@attrs.frozen(kw_only=True)
class Run:
    """The figures of one backend.

    Args:
        raw: What stands beside it: "disk" or "loopback".
        runs: Batches that were timed for each figure.
        recompute_tokens_per_s: Tokens that the engine prefills per second; 0 where
            that is not known.
        recompute_from: How that is known: "given" or "engine", which was measured.
    """

    backend: str
    raw: str
    runs: int
    figures: Sequence[Figure]
    token_bytes: int
    recompute_tokens_per_s: float = 0.0
    recompute_from: str = ""

    @property
    def best(self) -> Figure:
        """The figure that loads the most bytes per second."""
        return max(self.figures, key=lambda one: one.pace(one.get_s))

    @property
    def restored_tokens_per_s(self) -> float:
        """Tokens whose KV is loaded per second, at best."""
        return self.best.pace(self.best.get_s) / self.token_bytes

    @property
    def break_even_tokens(self) -> int | None:
        """Tokens from which on restoring is faster; None if it never is.

        A restore takes the time of a look-up and of its bytes at the best pace.
        """
        pace, restored = self.recompute_tokens_per_s, self.restored_tokens_per_s
        if not pace or restored <= pace:
            return None
        start_s = min(one.exists_s + one.get_s for one in self.figures)
        return int(start_s / (1 / pace - 1 / restored)) + 1


def report(run: Run) -> Report:
    """Report the figures as a table, and what they mean for an engine."""
    columns = (
        Column("PAGE", "page_bytes"),
        Column("BATCH", "batch"),
        Column("THREADS", "threads", drop=5),
        _paced("PUT", "put_s"),
        _paced("GET", "get_s", Tone.STRONG),
        _paced(f"{run.raw.upper()} WRITE", "raw_write_s", Tone.FAINT, drop=1),
        _paced(f"{run.raw.upper()} READ", "raw_read_s", Tone.FAINT, drop=3),
        Column("PUT MS", lambda one: f"{one.put_s * 1e3:.2f}", drop=2),
        Column("GET MS", lambda one: f"{one.get_s * 1e3:.2f}"),
        Column("EXISTS MS", lambda one: f"{one.exists_s * 1e3:.2f}", drop=4),
    )
    data = {
        "backend": run.backend,
        "raw": run.raw,
        "runs": run.runs,
        "figures": run.figures,
        "token_bytes": run.token_bytes,
        "restored_tokens_per_s": run.restored_tokens_per_s,
        "recompute_tokens_per_s": run.recompute_tokens_per_s,
        "recompute_from": run.recompute_from,
        "break_even_tokens": run.break_even_tokens,
    }
    blocks: list[Block] = [
        Table(columns, run.figures),
        "",
        _Paces(run),
        "",
        _meaning(run),
    ]
    return Report("kvdock.bench/1", data, blocks)


def _paced(heading: str, field: str, tone: Tone | None = None, drop: int = 0) -> Column:
    def show(figure: Figure) -> Cell:
        return Cell(_pace(figure.pace(getattr(figure, field))), tone)

    return Column(heading, show, drop=drop)


@attrs.frozen
class _Paces:
    """Each pace beside the others, with what its slowest and fastest run had."""

    run: Run

    def lines(self, style: Style) -> list[str]:
        """Draw them for a medium."""
        room = max(8, min(40, style.width - 50)) if style.width else 40
        figures = self.run.figures
        fastest = (
            one.pace(min(one.spread_s[move])) for one in figures for move in _MOVES
        )
        most = max(fastest)
        lines = [f"Median of {self.run.runs} runs, and the slowest to the fastest:"]
        for one in figures:
            lines += ["", style.paint(f"{_shape(one)} threads", Tone.FAINT)]
            for move in _MOVES:
                pace = one.pace(getattr(one, f"{move}_s"))
                fast, slow = (_pace(one.pace(end)) for end in one.spread_s[move])
                bar = style.paint(_bar(pace / most * room).ljust(room), Tone.GOOD)
                lines.append(f"  {move} {bar} {_pace(pace):>11}  {slow} to {fast}")
        return lines


def _shape(one: Figure) -> str:
    return f"{format_bytes(one.page_bytes)} x {one.batch}, {one.threads}"


def _bar(columns: float) -> str:
    """Return a bar of so many columns, to an eighth of one."""
    whole, part = divmod(round(columns * 8), 8)
    return "\u2588" * whole + (chr(0x2590 - part) if part else "")


def _pace(bytes_per_s: float) -> str:
    return f"{format_bytes(int(bytes_per_s))}/s" if bytes_per_s else "-"


def _meaning(run: Run) -> str:
    tokens = f"{run.restored_tokens_per_s:,.0f}"
    first = (
        f"At best {tokens} tokens per second are restored, at "
        f"{format_bytes(run.token_bytes)} a token (--token-bytes)."
    )
    if not run.recompute_tokens_per_s:
        return (
            f"{first} Restoring pays where an engine prefills fewer: --engine URL "
            "measures that, --recompute takes a figure."
        )
    given = f"{run.recompute_tokens_per_s:,.0f}"
    if run.recompute_from == "engine":
        given += " (measured)"
    if run.break_even_tokens is None:
        return f"{first} An engine that prefills {given} is faster without storage."
    return (
        f"{first} Against {given} that are prefilled, restoring is faster from "
        f"{run.break_even_tokens:,} tokens on."
    )


def drawn(run: Run) -> str:
    """Draw bytes per second: put, get and raw reads of each figure."""
    paces = [
        (
            one,
            move,
            one.pace(getattr(one, "raw_read_s" if move == "raw" else f"{move}_s")),
        )
        for one in run.figures
        for move in _COLOURS
    ]
    most = max((pace for _, _, pace in paces), default=1) or 1
    bars = [
        Bar(f"{move}, {_shape(one)} thr.", [(_COLOURS[move], pace / most)], _pace(pace))
        for one, move, pace in paces
    ]
    named = {
        f"{run.raw} read" if move == "raw" else move: colour
        for move, colour in _COLOURS.items()
    }
    return picture(f"{run.backend}: bytes per second", named, bars)

"""The output of `kvdock bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock.units import format_bytes
from kvdock_cli.reports._report import Block, Column, Report, Table
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import Cell

if TYPE_CHECKING:
    from kvdock_cli.bench.measure import Figure


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
    """Report the figures as tables, and what they mean for an engine."""
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
    raw = run.raw.upper()
    figures = (
        *_SHAPE,
        _paced("PUT", lambda one: one.put_s),
        _paced("GET", lambda one: one.get_s, Tone.STRONG),
        _paced(f"{raw} WRITE", lambda one: one.raw_write_s, Tone.FAINT, drop=1),
        _paced(f"{raw} READ", lambda one: one.raw_read_s, Tone.FAINT, drop=3),
        Column("PUT MS", lambda one: f"{one.put_s * 1e3:.2f}", drop=2),
        Column("GET MS", lambda one: f"{one.get_s * 1e3:.2f}"),
        Column("EXISTS MS", lambda one: f"{one.exists_s * 1e3:.2f}", drop=4),
    )
    spread = (
        *_SHAPE,
        _paced("SLOWEST PUT", lambda one: one.spread_s["put"][1]),
        _paced("FASTEST", lambda one: one.spread_s["put"][0]),
        _paced("SLOWEST GET", lambda one: one.spread_s["get"][1]),
        _paced("FASTEST", lambda one: one.spread_s["get"][0]),
    )
    blocks: list[Block] = [
        Table(figures, run.figures),
        "",
        f"Median of {run.runs} runs, which lie between",
        Table(spread, run.figures),
        "",
        _meaning(run),
    ]
    return Report("kvdock.bench/1", data, blocks)


def _paced(
    heading: str,
    seconds_of: Callable[[Figure], float],
    tone: Tone | None = None,
    drop: int = 0,
) -> Column:
    """Return a column of bytes a second; "-" where the time is not known."""

    def show(figure: Figure) -> Cell:
        pace = figure.pace(seconds_of(figure))
        return Cell(f"{format_bytes(int(pace))}/s" if pace else "-", tone)

    return Column(heading, show, drop=drop)


_SHAPE = (
    Column("PAGE", "page_bytes"),
    Column("BATCH", "batch"),
    Column("THREADS", "threads", drop=5),
)


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

"""The output of `kvdock bench`: a table, an object, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING
from xml.sax.saxutils import escape

import attrs

from kvdock.units import format_bytes
from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, paragraph, plain, table

if TYPE_CHECKING:
    from kvdock_cli.bench.measure import Figure

SCHEMA = "kvdock.bench/1"

_WIDE, _HIGH, _LEFT, _TOP = 640, 320, 80, 40
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


def as_text(run: Run, style: Style = PLAIN) -> str:
    """Render the figures as a table, and what they mean for an engine."""
    headings = (
        "PAGE", "BATCH", "THREADS", "PUT", "GET", f"{run.raw.upper()} WRITE",
        f"{run.raw.upper()} READ", "PUT MS", "GET MS", "EXISTS MS",
    )  # fmt: skip
    rows = [
        (
            format_bytes(one.page_bytes),
            str(one.batch),
            str(one.threads),
            _pace(one.pace(one.put_s)),
            Cell(_pace(one.pace(one.get_s)), Tone.STRONG),
            Cell(_pace(one.pace(one.raw_write_s)), Tone.FAINT),
            Cell(_pace(one.pace(one.raw_read_s)), Tone.FAINT),
            f"{one.put_s * 1e3:.2f}",
            f"{one.get_s * 1e3:.2f}",
            f"{one.exists_s * 1e3:.2f}",
        )
        for one in run.figures
    ]
    drop = [headings[5], "PUT MS", headings[6], "EXISTS MS", "THREADS"]
    lines = table(headings, rows, style, drop=drop)
    lines += ["", *_bars(run, style), "", *paragraph(_meaning(run), style)]
    return "\n".join(lines)


def _bars(run: Run, style: Style) -> list[str]:
    """Draw each pace beside the others, with what its slowest and fastest run had."""
    room = max(8, min(40, style.width - 50)) if style.width else 40
    most = max(one.pace(min(one.spread_s[what]))
               for one in run.figures for what in _MOVES)  # fmt: skip
    lines = [f"Median of {run.runs} runs, and the slowest to the fastest:"]
    for one in run.figures:
        shape = f"{format_bytes(one.page_bytes)} x {one.batch}, {one.threads} threads"
        lines += ["", style.paint(shape, Tone.FAINT)]
        for what, seconds in zip(_MOVES, (one.put_s, one.get_s), strict=True):
            fast, slow = (_pace(one.pace(end)) for end in one.spread_s[what])
            bar = _bar(one.pace(seconds) / most * room).ljust(room)
            lines.append(
                f"  {what} {style.paint(bar, Tone.GOOD)} "
                f"{_pace(one.pace(seconds)):>11}  {slow} to {fast}"
            )
    return lines


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


def as_data(run: Run) -> dict[str, object]:
    """Describe the figures as data."""
    return {
        "schema": SCHEMA,
        "ok": True,
        "backend": run.backend,
        "raw": run.raw,
        "runs": run.runs,
        "figures": plain(run.figures),
        "token_bytes": run.token_bytes,
        "restored_tokens_per_s": run.restored_tokens_per_s,
        "recompute_tokens_per_s": run.recompute_tokens_per_s,
        "recompute_from": run.recompute_from,
        "break_even_tokens": run.break_even_tokens,
    }


def as_svg(run: Run) -> str:
    """Draw bars of bytes per second: put, get and raw reads of each figure."""
    bars = [
        (one, {"put": one.pace(one.put_s), "get": one.pace(one.get_s),
               "raw": one.pace(one.raw_read_s)})
        for one in run.figures
    ]  # fmt: skip
    most = max((pace for _, paces in bars for pace in paces.values()), default=1) or 1
    room = (_WIDE - _LEFT - 20) / max(1, len(bars))
    base = _TOP + _HIGH
    size = f'width="{_WIDE}" height="{base + 80}"'
    title = f"{escape(run.backend)}: bytes per second"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-size="11">',
        "<style>text { font-family: sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="20" font-size="14">{title}</text>',
    ]
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = base - share * _HIGH
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDE - 20}" y1="{y:.0f}" y2="{y:.0f}" '
            f'stroke="#ddd"/><text x="{_LEFT - 6}" y="{y + 4:.0f}" text-anchor="end">'
            f"{_pace(most * share)}</text>"
        )
    for at, (one, paces) in enumerate(bars):
        x = _LEFT + at * room
        for column, (kind, pace) in enumerate(paces.items()):
            high = pace / most * _HIGH
            parts.append(
                f'<rect x="{x + 4 + column * (room - 8) / 3:.1f}" '
                f'y="{base - high:.1f}" width="{(room - 8) / 3 - 1:.1f}" '
                f'height="{high:.1f}" fill="{_COLOURS[kind]}"/>'
            )
        words = (format_bytes(one.page_bytes), f"x {one.batch}", f"{one.threads} thr.")
        parts += [
            f'<text x="{x + room / 2:.1f}" y="{base + 14 + 12 * line}" '
            f'text-anchor="middle" font-size="9">{word}</text>'
            for line, word in enumerate(words)
        ]
    parts += [
        f'<rect x="{_LEFT + 110 * at}" y="{base + 58}" width="10" height="10" '
        f'fill="{colour}"/><text x="{_LEFT + 14 + 110 * at}" y="{base + 67}">'
        f"{run.raw + ' read' if kind == 'raw' else kind}</text>"
        for at, (kind, colour) in enumerate(_COLOURS.items())
    ]
    return "\n".join([*parts, "</svg>\n"])

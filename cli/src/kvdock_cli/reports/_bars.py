"""Bars in a picture: parts of a whole, or paces beside each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

import attrs

_LEFT, _BAR, _RIGHT, _STEP = 230, 420, 310, 30


@attrs.frozen
class Bar:
    """One bar: what stands before and behind it, and its parts by colour, up to 1."""

    label: str
    parts: Sequence[tuple[str, float]]
    note: str = ""


def picture(title: str, legend: Mapping[str, str], bars: Sequence[Bar]) -> str:
    """Draw bars as SVG; the legend has a colour for each name."""
    size = f"{_LEFT + _BAR + _RIGHT} {(len(bars) + 2) * _STEP + 20}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">',
        "<style>text { font: 13px sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        _text(10, 22, title),
    ]
    for place, (name, colour) in enumerate(legend.items()):
        parts.append(_box(_LEFT + place * 90, 32, 12, 12, colour))
        parts.append(_text(_LEFT + place * 90 + 17, 43, name))
    for number, bar in enumerate(bars, 2):
        y, begin = number * _STEP, float(_LEFT)
        parts.append(_text(10, y + 16, bar.label))
        parts.append(_text(_LEFT + _BAR + 10, y + 16, bar.note))
        for colour, share in bar.parts:
            parts.append(_box(begin, y, share * _BAR, 22, colour))
            begin += share * _BAR
    return "\n".join([*parts, "</svg>", ""])


def _box(x: float, y: int, width: float, height: int, colour: str) -> str:
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"'
    return f'<rect {place} fill="{colour}"/>'


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'

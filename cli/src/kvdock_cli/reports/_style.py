"""The look of a report: how wide it may be, and what colours mean."""

from __future__ import annotations

from enum import StrEnum

import attrs


class Tone(StrEnum):
    """The meaning of a piece of text; the value is its terminal code."""

    GOOD = "32"
    """In order, or done directly."""
    WARNING = "33"
    """Works, and deserves attention."""
    BAD = "31"
    """Wrong, or rejected."""
    FAINT = "2"
    """Headings, and what is left out."""
    STRONG = "1"
    """The name of what a block is about."""


@attrs.frozen
class Style:
    """The medium of a report.

    Args:
        width: Columns of the terminal; 0 where lines may have any length.
        colour: Whether the medium shows colours.
    """

    width: int = 0
    colour: bool = False

    def paint(self, text: str, tone: Tone | None) -> str:
        """Return text in its colour."""
        if not (self.colour and tone and text):
            return text
        return f"\x1b[{tone}m{text}\x1b[0m"


PLAIN = Style()
"""A pipe or a file: no colours, and a row of a table is one line."""

_STATES = {
    "native": Tone.GOOD,
    "yes": Tone.GOOD,
    "closed": Tone.GOOD,
    "emulated": Tone.WARNING,
    "no": Tone.BAD,
    "?": Tone.FAINT,
    "-": Tone.FAINT,
    "ok": Tone.GOOD,
    "warning": Tone.WARNING,
    "problem": Tone.BAD,
    "MISSING": Tone.BAD,
    "skipped": Tone.FAINT,
}


def tone_of(word: str) -> Tone | None:
    """Return the tone of a state, None for any other word."""
    return _STATES.get(word)

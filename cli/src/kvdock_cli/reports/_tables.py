"""Plain JSON values from the records of the core, and text in columns."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any

import attrs

from kvdock_cli.reports._style import PLAIN, Style, Tone

_GAP = 2
_COMFORTABLE, _LEAST = 20, 12
"""Columns of a cell that is folded: with fewer than the first, other columns are
left out where they may be; with fewer than the second, a list is easier to read."""


@attrs.frozen
class Cell:
    """Text with a tone, for a table."""

    text: str
    tone: Tone | None = None


Row = Sequence[str | Cell]

_NUMBER = re.compile(
    r"[+-]?\d[\d,]*(\.\d+)?(/\d+)?( ?([KMGTP]i?B|B|%|[mun]?s|x|/s|pages))*(/s)?"
)
"""A number, with a unit or without."""


def plain(value: object) -> Any:  # noqa: ANN401 - whatever json.dumps takes
    """Return a value as JSON knows it; sets are sorted.

    New fields of a record appear by themselves, under their own names.
    """
    match value:
        case Enum():
            found: Any = value.value
        case None | bool() | int() | float() | str():
            found = value
        case Mapping():
            found = {str(plain(key)): plain(one) for key, one in value.items()}
        case AbstractSet():
            found = sorted((plain(one) for one in value), key=str)
        case Sequence():
            found = [plain(one) for one in value]
        case type():
            found = value.__name__
        case _ if attrs.has(cls := type(value)):
            names = (field.name for field in attrs.fields(cls))
            found = {name: plain(getattr(value, name)) for name in names}
        case _:
            found = str(value)
    return found


def table(
    headings: Sequence[str],
    rows: Sequence[Row],
    style: Style = PLAIN,
    *,
    fold: Collection[str] = (),
    drop: Sequence[str] = (),
    indent: int = 0,
) -> list[str]:
    """Lay rows out in columns that fit the medium; no word is broken.

    First the cells of the columns in `fold` take several lines, then the
    columns in `drop` are left out one by one, and last each row becomes a
    block with a line for each cell.
    """
    if not rows:
        return []
    whole = [[_cell(one) for one in row] for row in rows]
    tries = [
        (least, drop[:count])
        for least in (_COMFORTABLE, _LEAST)
        for count in range(len(drop) + 1)
    ]
    for least, left_out in tries:
        kept = [at for at, one in enumerate(headings) if one not in left_out]
        top = [Cell(headings[at], Tone.FAINT) for at in kept]
        body = [[row[at] for at in kept] for row in whole]
        folded = {where for where, at in enumerate(kept) if headings[at] in fold}
        widths = _widths([top, *body], folded, style.width - indent, least)
        if widths is not None:
            right = [_is_numeric([row[at].text for row in whole]) for at in kept]
            lines = [
                line
                for row in (top, *body)
                for line in _lines(row, widths, style, indent, right)
            ]
            return lines + _announced(left_out, style, indent)
    return _blocks(headings, whole, style, indent)


def _is_numeric(texts: Sequence[str]) -> bool:
    """Return whether a column holds numbers, sizes and shares, and nothing else."""
    shown = [text for text in texts if text not in ("", "-", "?")]
    return bool(shown) and all(map(_NUMBER.fullmatch, shown))


def _announced(left_out: Sequence[str], style: Style, indent: int) -> list[str]:
    """Return the line that names columns for which the medium is too narrow."""
    if not left_out:
        return []
    text = f"Too narrow for {', '.join(left_out)}: --json has all."
    return paragraph(text, style, indent=indent, hanging=2)


def columns(rows: Sequence[Row], style: Style = PLAIN, *, indent: int = 0) -> list[str]:
    """Align cells without headings; the last column is folded."""
    if not rows:
        return []
    whole = [[_cell(one) for one in row] for row in rows]
    last = {len(whole[0]) - 1}
    widths = _widths(whole, last, style.width - indent)
    if widths is None:
        # The last column holds a word that does not fit: it alone stands out.
        *before, _ = _widths(whole, set(), 0) or []
        room = style.width - indent - sum(before) - _GAP * len(before)
        widths = [*before, max(_LEAST, room)]
    return [line for row in whole for line in _lines(row, widths, style, indent)]


def paragraph(
    text: str, style: Style = PLAIN, *, indent: int = 0, hanging: int = 0
) -> list[str]:
    """Break text at spaces to fit the medium.

    Its own line breaks stay. Lines after the first are indented by `hanging` more.
    """
    lines = []
    for line in text.splitlines() or [""]:
        first, rest = " " * indent, " " * (indent + hanging)
        lines += _wrapped(line, style.width, first, rest) if line else [""]
    return lines


def _wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    if not width or len(first) + len(text) <= width:
        return [f"{first}{text}"]
    return textwrap.wrap(
        text,
        max(width, len(rest) + 1),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cell(one: str | Cell) -> Cell:
    cell = one if isinstance(one, Cell) else Cell(one)
    return attrs.evolve(cell, text=printable(cell.text))


def _widths(
    rows: Sequence[Sequence[Cell]],
    folded: Collection[int],
    width: int,
    least_folded: int = _LEAST,
) -> list[int] | None:
    """Return a width for each column, or None if the medium is too narrow."""
    texts = [[cell.text for cell in column] for column in zip(*rows, strict=True)]
    found = [max(map(len, column)) for column in texts]
    if width <= 0:
        return found
    least = [
        min(found[at], max(least_folded, *map(_longest_word, column)))
        if at in folded
        else found[at]
        for at, column in enumerate(texts)
    ]
    over = sum(found) + _GAP * (len(found) - 1) - width
    if sum(found) - sum(least) < over:
        return None
    for _ in range(over):
        # The widest one gives way, so that several become alike.
        at = max(
            (at for at in range(len(found)) if found[at] > least[at]),
            key=lambda at: found[at],
        )
        found[at] -= 1
    return found


def _longest_word(text: str) -> int:
    return max(map(len, text.split()), default=0)


def _lines(
    row: Sequence[Cell],
    widths: Sequence[int],
    style: Style,
    indent: int,
    right: Sequence[bool] = (),
) -> list[str]:
    """Return the lines of one row; nothing trails."""
    cells = [
        _wrapped(cell.text, width) for cell, width in zip(row, widths, strict=True)
    ]
    lines = []
    for line in itertools.zip_longest(*cells, fillvalue=""):
        parts = []
        for at, (text, width) in enumerate(zip(line, widths, strict=True)):
            space = " " * (width - len(text))
            painted = style.paint(text, row[at].tone)
            is_right = right and right[at]
            parts.append(space + painted if is_right else painted + space)
        lines.append((" " * indent + (" " * _GAP).join(parts)).rstrip())
    return lines


def _blocks(
    headings: Sequence[str], rows: Sequence[Sequence[Cell]], style: Style, indent: int
) -> list[str]:
    """Return a block for each row: its first cell, then the others below it."""
    longest = max(map(len, headings[1:]), default=0)
    lines = []
    for first, *others in rows:
        if first.text:
            lines.append(
                " " * indent + style.paint(first.text, first.tone or Tone.STRONG)
            )
        pairs = [
            (Cell(heading.lower().ljust(longest), Tone.FAINT), cell)
            for heading, cell in zip(headings[1:], others, strict=True)
            if cell.text
        ]
        lines += columns(pairs, style, indent=indent + 2)
    return lines


def printable(text: str) -> str:
    """Escape what would move the cursor or start a line: a record may hold it."""
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode()
        for one in text
    )


def words(name: str) -> str:
    """Spell a field's name for people."""
    return name.replace("_", " ")

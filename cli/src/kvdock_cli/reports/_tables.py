"""Plain JSON values from the records of the core, and text in columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import Enum
from typing import Any

import attrs


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


def columns(rows: Sequence[Sequence[str]], *, indent: int = 0) -> list[str]:
    """Align cells with two spaces between them; nothing trails."""
    if not rows:
        return []
    rows = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        " " * indent
        + "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


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

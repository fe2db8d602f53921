"""A report: data for programs, and blocks of text with one renderer.

A command answers with a `Report`. Its `data` are records as JSON knows them, and its
blocks are sentences and tables; a table is records and columns that say what they
show of one and how they give way where the medium is narrow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from kvdock.units import format_bytes
from kvdock_cli.reports._style import PLAIN, Style, Tone, tone_of
from kvdock_cli.reports._tables import Cell, Row, columns, paragraph, plain, table


@attrs.frozen
class Column:
    """One column of a table.

    Args:
        heading: Its title.
        show: The field of a record that it shows, or what makes a cell of a record;
            not needed where records are rows of cells.
        fold: Whether its cells may take several lines.
        drop: Where the medium is too narrow, columns are left out in this order; 0 for
            one that always stays.
        tone: Of its cells, where they have none of their own and are not the word of a
            state.
    """

    heading: str
    show: str | Callable[[Any], object] = ""
    fold: bool = False
    drop: int = 0
    tone: Tone | None = None

    def cell(self, record: Any) -> Cell:  # noqa: ANN401 - of any report
        """Return what it shows of a record."""
        if not isinstance(self.show, str):
            value = self.show(record)
        elif isinstance(record, Mapping):
            value = record[self.show]
        else:
            value = getattr(record, self.show)
        if isinstance(value, Cell):
            return value
        text = spelt(self.show if isinstance(self.show, str) else "", value)
        return Cell(text, tone_of(text) or self.tone)


def spelt(name: str, value: object) -> str:
    """Spell the value of a field; its name says the unit."""
    per_s = "/s" if name.endswith("_per_s") else ""
    if name.removesuffix("_per_s").endswith("bytes") and isinstance(value, int | float):
        return format_bytes(int(value)) + per_s
    if isinstance(value, float):
        return f"{value:.1f}/s" if per_s else f"{value:.12g}"
    data = plain(value)
    text = " ".join(map(str, data)) if isinstance(data, list) else str(data)
    return "-" if value is None or not text else text


def flagged(text: str, flag: object, tone: Tone = Tone.WARNING) -> Cell:
    """Return a cell that has a tone if it deserves attention."""
    return Cell(text, tone if flag else None)


@attrs.frozen
class Table:
    """Records, or rows of cells, in columns; nothing where there are none."""

    columns: Sequence[Column]
    records: Sequence[Any]
    indent: int = 0

    def lines(self, style: Style) -> list[str]:
        """Lay it out for a medium."""
        narrow = sorted(
            (one for one in self.columns if one.drop), key=lambda it: it.drop
        )
        return table(
            [one.heading for one in self.columns],
            [
                record
                if isinstance(record, tuple)
                else [one.cell(record) for one in self.columns]
                for record in self.records
            ],
            style,
            fold=[one.heading for one in self.columns if one.fold],
            drop=[one.heading for one in narrow],
            indent=self.indent,
        )


@attrs.frozen
class Pairs:
    """Names and their values; the last column is folded."""

    rows: Sequence[Row]
    indent: int = 0

    def lines(self, style: Style) -> list[str]:
        """Lay them out for a medium."""
        return columns(self.rows, style, indent=self.indent)


NO_LEAD = Cell("")


@attrs.frozen
class Text:
    """A sentence that begins with a toned word or name, and its indents."""

    words: str
    lead: Cell = NO_LEAD
    indent: int = 0
    hanging: int = 2

    def lines(self, style: Style) -> list[str]:
        """Fold it for a medium."""
        lead = self.lead.text
        first, *rest = paragraph(
            lead + self.words, style, indent=self.indent, hanging=self.hanging
        )
        if not lead:
            return [first, *rest]
        space = " " * self.indent
        toned = style.paint(lead, self.lead.tone)
        return [space + toned + first.removeprefix(space + lead), *rest]


class Lines(Protocol):
    """What lays itself out for a medium."""

    def lines(self, style: Style, /) -> list[str]:
        """Return its lines."""


Block = str | Cell | Lines


def rendered(blocks: Sequence[Block], style: Style = PLAIN) -> str:
    """Render blocks one below the other; an empty one is a blank line."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, str | Cell):
            cell = block if isinstance(block, Cell) else Cell(block)
            folded = paragraph(cell.text, style)
            lines += [style.paint(line, cell.tone) for line in folded]
        else:
            lines += block.lines(style)
    return "\n".join(lines)


@attrs.frozen
class Report:
    """The answer of a command.

    Args:
        schema: The name and number of the form of its data.
        data: Records, and what else programs read.
        blocks: What people read.
        ok: Whether all is well; the exit code is 1 where it is not.
    """

    schema: str
    data: Mapping[str, object]
    blocks: Sequence[Block]
    ok: bool = True

    def text(self, style: Style = PLAIN) -> str:
        """Return what people read."""
        return rendered(self.blocks, style)

    def as_data(self) -> dict[str, object]:
        """Return what programs read."""
        return {"schema": self.schema, "ok": self.ok, **plain(self.data)}

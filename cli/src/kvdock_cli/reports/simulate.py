"""The output of `kvdock simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

import attrs

from kvdock.units import format_bytes
from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, paragraph, plain, table
from kvdock_cli.reports._tables import Row as Cells

SCHEMA = "kvdock.simulate/1"
_LITTLE, _LITTLE_NEARER = 0.01, 0.05
"""Parts of the blocks that are not worth larger tiers: loaded at all, and loaded from a
host's own tiers instead of the last one."""
_COLOURS = ("#1b6ca8", "#3fa7a0", "#a8c256", "#d9a441", "#8a6fb0")
_COMPUTED = "#d0d0d0"
_LEFT, _BAR, _RIGHT, _STEP = 230, 420, 310, 30


@attrs.frozen(kw_only=True)
class TierRow:
    """What one tier does, over all hosts; `share` is of all blocks."""

    share: float
    read_bytes: int
    written_bytes: int
    read_bytes_per_s: float | None
    written_bytes_per_s: float | None


@attrs.frozen(kw_only=True)
class Row:
    """One number of hosts with tiers of one size."""

    hosts: int
    sizes: str
    hits: float
    tiers: Mapping[str, TierRow]
    saved_s: float
    computed_s: float

    @property
    def own(self) -> float:
        """Share of the blocks that come from a host's own tiers."""
        return sum(tier.share for tier in list(self.tiers.values())[:-1])

    @property
    def where(self) -> str:
        """Hosts and sizes in words."""
        return f"{self.hosts} host{'s' * (self.hosts > 1)}, {self.sizes}"


@attrs.frozen(kw_only=True)
class Simulation:
    """What was simulated, and what came of it; rates are over `seconds`."""

    trace: str
    requests: int
    blocks: int
    unique_bytes: int
    seconds: float
    spread: str
    rows: tuple[Row, ...]

    def paying(self) -> list[Row]:
        """Return for each number of hosts the first row after which little is gained.

        Rows are in the order in which the user named sizes, small ones first.
        """
        found = {}
        for one in reversed(self.rows):
            same = [other for other in self.rows if other.hosts == one.hosts]
            hits, own = max(row.hits for row in same), max(row.own for row in same)
            pays = one.hits >= hits - _LITTLE and one.own >= own - _LITTLE_NEARER
            if pays or one.hosts not in found:
                found[one.hosts] = one
        return list(found.values())[::-1]


def as_text(found: Simulation, style: Style = PLAIN) -> str:
    """Render a table, and which size pays."""
    lines = paragraph(
        f"{found.trace}: {found.requests} requests of {found.blocks} blocks, "
        f"{format_bytes(found.unique_bytes)} different ones.",
        style,
    )
    tiers = [one.upper() for one in found.rows[0].tiers]
    carried = (f"{tiers[-1]} READ", f"{tiers[-1]} WRITTEN")
    heads = ("HOSTS", "SIZES", "HITS", *tiers, *carried, "SAVED")
    rows: list[Cells] = [
        (
            str(one.hosts),
            Cell(one.sizes, Tone.STRONG),
            f"{one.hits:.1%}",
            *(f"{each.share:.1%}" for each in one.tiers.values()),
            *_carried(one),
            f"{one.saved_s / 3600:.1f} h",
        )
        for one in found.rows
    ]
    lines += ["", *table(heads, rows, style, drop=tiers[:-1]), ""]
    for one in found.paying():
        lines += paragraph(
            f"{one.where}: beyond it, which loads {one.hits:.1%} of the blocks and "
            f"{one.own:.1%} from a host's own tiers, no size gains much.",
            style,
        )
    return "\n".join(lines)


def _carried(one: Row) -> tuple[str, str]:
    """Spell what the last tier reads and writes, in a second where that is known."""
    far = list(one.tiers.values())[-1]
    if far.read_bytes_per_s is None or far.written_bytes_per_s is None:
        return format_bytes(far.read_bytes), format_bytes(far.written_bytes)
    rates = far.read_bytes_per_s, far.written_bytes_per_s
    return f"{format_bytes(rates[0])}/s", f"{format_bytes(rates[1])}/s"


def as_data(found: Simulation) -> dict[str, object]:
    """Describe a simulation as data; rates are None where no time is known."""
    pays = [{"hosts": one.hosts, "sizes": one.sizes} for one in found.paying()]
    return {"schema": SCHEMA, "ok": True, **plain(found), "pays": pays}


def picture(found: Simulation) -> str:
    """Draw a bar for each row: what each tier loads, and what is computed."""
    names = [*found.rows[0].tiers, "computed"]
    colours = [_COLOURS[at % len(_COLOURS)] for at in range(len(names) - 1)]
    size = f"{_LEFT + _BAR + _RIGHT} {(len(found.rows) + 2) * _STEP + 20}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}">',
        "<style>text { font: 13px sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        _text(10, 22, f"{found.trace}: blocks by where they come from"),
    ]
    for at, (name, colour) in enumerate(zip(names, [*colours, _COMPUTED], strict=True)):
        parts.append(_box(_LEFT + at * 90, 32, 12, 12, colour))
        parts.append(_text(_LEFT + at * 90 + 17, 43, name))
    for number, one in enumerate(found.rows, 2):
        y, begin = number * _STEP, float(_LEFT)
        read, written = _carried(one)
        said = f"{names[-2]} read {read}, written {written}"
        parts += [_text(10, y + 16, one.where), _text(_LEFT + _BAR + 10, y + 16, said)]
        shares = [*(tier.share for tier in one.tiers.values()), 1 - one.hits]
        for share, colour in zip(shares, [*colours, _COMPUTED], strict=True):
            parts.append(_box(begin, y, share * _BAR, 22, colour))
            begin += share * _BAR
    return "\n".join([*parts, "</svg>", ""])


def _box(x: float, y: int, width: float, height: int, colour: str) -> str:
    place = f'x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}"'
    return f'<rect {place} fill="{colour}"/>'


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'

"""The output of `kvdock simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from xml.sax.saxutils import escape

import attrs

from kvdock.units import format_bytes
from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, paragraph, plain, table

SCHEMA = "kvdock.simulate/1"
_LITTLE = 0.01
"""Part of the blocks that is not worth larger tiers; five times as much where these
only come from the last tier instead."""
_COLOURS = ("#1b6ca8", "#3fa7a0", "#a8c256", "#d9a441", "#8a6fb0")
_HEIGHT, _STEP, _LEFT = 22, 30, 230
_BAR = 420


@attrs.frozen(kw_only=True)
class TierRow:
    """What one tier does, over all hosts.

    Args:
        share: Of all blocks that were asked for, how many it loaded.
        read_bytes: Bytes that it loaded.
        written_bytes: Bytes that were written to it.
    """

    share: float
    read_bytes: int
    written_bytes: int


@attrs.frozen(kw_only=True)
class Row:
    """One number of hosts with tiers of one size."""

    hosts: int
    sizes: str
    hits: float
    tiers: Mapping[str, TierRow]
    saved_s: float
    computed_s: float


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


def paying(rows: tuple[Row, ...]) -> list[Row]:
    """Return for each number of hosts the first row after which little is gained.

    Rows are in the order in which the user named sizes, small ones first. A row is
    measured by all that it loads, and by what of that comes from a host's own tiers.
    """
    found = []
    for hosts in dict.fromkeys(one.hosts for one in rows):
        mine = [one for one in rows if one.hosts == hosts]
        hits, own = (max(map(of, mine)) for of in (_hits, _own))
        found.append(
            next(
                (
                    one for one in mine
                    if _hits(one) >= hits - _LITTLE and _own(one) >= own - 5 * _LITTLE
                ),
                mine[-1],
            )
        )  # fmt: skip
    return found


def _hits(one: Row) -> float:
    return one.hits


def _own(one: Row) -> float:
    *own, _ = one.tiers.values()
    return sum(tier.share for tier in own)


def as_text(found: Simulation, style: Style = PLAIN) -> str:
    """Render a table, and which size is nearly the best."""
    lines = paragraph(
        f"{found.trace}: {found.requests} requests of {found.blocks} blocks, "
        f"{format_bytes(found.unique_bytes)} different ones.",
        style,
    )
    names = list(found.rows[0].tiers)
    far = names[-1]
    heads = ("HOSTS", "SIZES", "HITS", *(one.upper() for one in names))
    last = (f"{far.upper()} READ", f"{far.upper()} WRITTEN", "SAVED")
    lines += ["", *table(
        (*heads, *last),
        [_cells(one, far, found.seconds) for one in found.rows],
        style,
        drop=[one.upper() for one in names[:-1]],
    ), ""]  # fmt: skip
    for one in paying(found.rows):
        lines += paragraph(
            f"{_hosts(one)}: beyond {one.sizes}, which loads {one.hits:.1%} and "
            f"{_own(one):.1%} without {far}, no size that was tried gains much.",
            style,
        )
    return "\n".join(lines)


def _hosts(one: Row) -> str:
    return f"{one.hosts} host{'s' * (one.hosts > 1)}"


def _cells(one: Row, far: str, seconds: float) -> tuple[str | Cell, ...]:
    def carried(nbytes: int) -> str:
        if not seconds:
            return format_bytes(nbytes)
        return f"{format_bytes(nbytes / seconds)}/s"

    tier = one.tiers[far]
    return (
        str(one.hosts),
        Cell(one.sizes, Tone.STRONG),
        f"{one.hits:.1%}",
        *(f"{each.share:.1%}" for each in one.tiers.values()),
        carried(tier.read_bytes),
        carried(tier.written_bytes),
        f"{one.saved_s / 3600:.1f} h",
    )


def as_data(found: Simulation) -> dict[str, object]:
    """Describe a simulation as data; rates are None where no time is known."""
    data = plain(found)
    for one in data["rows"]:
        for tier in one["tiers"].values():
            for way in ("read", "written"):
                rate = tier[f"{way}_bytes"] / found.seconds if found.seconds else None
                tier[f"{way}_bytes_per_s"] = rate
    pays = [{"hosts": one.hosts, "sizes": one.sizes} for one in paying(found.rows)]
    return {"schema": SCHEMA, "ok": True, **data, "pays": pays}


def picture(found: Simulation) -> str:
    """Draw a bar for each row: what each tier loads, and what is computed."""
    names = list(found.rows[0].tiers)
    far = names[-1]
    wide, high = _LEFT + _BAR + 260, (len(found.rows) + 2) * _STEP + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}">',
        "<style>text { font: 13px sans-serif }</style>",
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        _text(10, 22, f"{found.trace}: blocks by where they come from"),
    ]
    for at, name in enumerate([*names, "computed"]):
        x = _LEFT + at * 90
        parts.append(_box(x, 32, 12, 12, _colour(at, names)))
        parts.append(_text(x + 17, 43, name))
    for number, one in enumerate(found.rows):
        y, begin = (number + 2) * _STEP, float(_LEFT)
        parts.append(_text(10, y + 16, f"{_hosts(one)}, {one.sizes}"))
        shares = [tier.share for tier in one.tiers.values()]
        for at, share in enumerate([*shares, 1 - one.hits]):
            parts.append(_box(begin, y, share * _BAR, _HEIGHT, _colour(at, names)))
            begin += share * _BAR
        cells = _cells(one, far, found.seconds)
        said = f"{far} read {cells[-3]}, written {cells[-2]}"
        parts.append(_text(_LEFT + _BAR + 10, y + 16, said))
    return "\n".join([*parts, "</svg>", ""])


def _colour(at: int, names: list[str]) -> str:
    return "#d0d0d0" if at == len(names) else _COLOURS[at % len(_COLOURS)]


def _box(x: float, y: int, width: float, height: int, colour: str) -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{height}" '
        f'fill="{colour}"/>'
    )


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'

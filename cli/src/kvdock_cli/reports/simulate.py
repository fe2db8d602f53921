"""The output of `kvdock simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvdock.units import format_bytes
from kvdock_cli.reports._report import Block, Column, Report, Table, spelt
from kvdock_cli.reports._style import Tone

_LITTLE, _LITTLE_NEARER = 0.01, 0.05
"""Parts of the blocks that are not worth larger tiers: loaded at all, and loaded from a
host's own tiers instead of the last one."""


Row = Mapping[str, Any]
"""One number of hosts with tiers of one size: `hosts`, `sizes`, `hits`, `tiers` near
first, `saved_s` and `computed_s`."""


def report(trace: Mapping[str, Any], rows: Sequence[Row]) -> Report:
    """Report a row for each size, and which size pays.

    Args:
        trace: What was served: `trace`, `requests`, `blocks`, `unique_bytes`,
            `seconds` and `spread`. Rates of rows are None where the seconds are 0.
        rows: In the order in which the user named sizes.
    """
    tiers = [*rows[0]["tiers"]]
    far = tiers[-1].upper()
    columns = (
        Column("HOSTS", "hosts"),
        Column("SIZES", "sizes", tone=Tone.STRONG),
        Column("HITS", lambda row: f"{row['hits']:.1%}"),
        *(
            Column(tier.upper(), partial(_share, tier), drop=place)
            for place, tier in enumerate(tiers, 1)
        ),
        Column(f"{far} READ", lambda row: _carried(row, "read")),
        Column(f"{far} WRITTEN", lambda row: _carried(row, "written")),
        Column("SAVED", lambda row: f"{row['saved_s'] / 3600:.1f} h"),
    )
    pays = paying(rows)
    about = (
        f"{trace['trace']}: {trace['requests']} requests of {trace['blocks']} blocks, "
        f"{format_bytes(trace['unique_bytes'])} different ones."
    )
    meaning = [
        f"{row['hosts']} host{'s' * (row['hosts'] > 1)}, {row['sizes']}: beyond it, "
        f"which loads {row['hits']:.1%} of the blocks and {_nearer(row):.1%} from a "
        "host's own tiers, no size gains much."
        for row in pays
    ]
    named = [{"hosts": row["hosts"], "sizes": row["sizes"]} for row in pays]
    blocks: list[Block] = [about, "", Table(columns, rows), "", *meaning]
    return Report("kvdock.simulate/1", {**trace, "rows": rows, "pays": named}, blocks)


def paying(rows: Sequence[Row]) -> list[Row]:
    """Return for each number of hosts the first row after which little is gained.

    Rows are in the order in which the user named sizes, small ones first.
    """
    first: dict[int, Row] = {}
    for row in reversed(rows):
        same = [other for other in rows if other["hosts"] == row["hosts"]]
        hits = max(other["hits"] for other in same) - _LITTLE
        nearer = max(map(_nearer, same)) - _LITTLE_NEARER
        if row["hosts"] not in first or (
            row["hits"] >= hits and _nearer(row) >= nearer
        ):
            first[row["hosts"]] = row
    return list(first.values())[::-1]


def _nearer(row: Row) -> float:
    """Return the share of the blocks that come from a host's own tiers."""
    return sum(float(tier["share"]) for tier in list(row["tiers"].values())[:-1])


def _share(tier: str, row: Row) -> str:
    return f"{row['tiers'][tier]['share']:.1%}"


def _carried(row: Row, what: str) -> str:
    """Spell what the last tier reads or writes, in a second where that is known."""
    far = list(row["tiers"].values())[-1]
    field = f"{what}_bytes_per_s"
    field = field.removesuffix("_per_s") if far[field] is None else field
    return spelt(field, far[field])

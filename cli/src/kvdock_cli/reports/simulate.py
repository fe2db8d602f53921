"""The output of `kvdock simulate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import attrs

from kvdock.units import format_bytes
from kvdock_cli.reports._report import Block, Column, Report, Table
from kvdock_cli.reports._style import Tone

_LITTLE, _LITTLE_NEARER = 0.01, 0.05
"""Parts of the blocks that are not worth larger tiers: loaded at all, and loaded from a
host's own tiers instead of the last one."""


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
    def nearer(self) -> float:
        """Share of the blocks that come from a host's own tiers."""
        return sum(tier.share for tier in list(self.tiers.values())[:-1])

    @property
    def where(self) -> str:
        """Hosts and sizes in words."""
        return f"{self.hosts} host{'s' * (self.hosts > 1)}, {self.sizes}"


def report(trace: Mapping[str, Any], rows: Sequence[Row]) -> Report:
    """Report a row for each size, and which size pays.

    Args:
        trace: What was served: `trace`, `requests`, `blocks`, `unique_bytes`,
            `seconds` and `spread`. Rates of rows are None where the seconds are 0.
        rows: In the order in which the user named sizes.
    """
    tiers = [*rows[0].tiers]
    far = tiers[-1].upper()
    columns = (
        Column("HOSTS", "hosts"),
        Column("SIZES", "sizes", tone=Tone.STRONG),
        Column("HITS", lambda row: f"{row.hits:.1%}"),
        *(
            Column(tier.upper(), partial(_share, tier), drop=place)
            for place, tier in enumerate(tiers, 1)
        ),
        Column(f"{far} READ", lambda row: _carried(row, "read")),
        Column(f"{far} WRITTEN", lambda row: _carried(row, "written")),
        Column("SAVED", lambda row: f"{row.saved_s / 3600:.1f} h"),
    )
    pays = paying(rows)
    about = (
        f"{trace['trace']}: {trace['requests']} requests of {trace['blocks']} blocks, "
        f"{format_bytes(trace['unique_bytes'])} different ones."
    )
    meaning = [
        f"{row.where}: beyond it, which loads {row.hits:.1%} of the blocks and "
        f"{row.nearer:.1%} from a host's own tiers, no size gains much."
        for row in pays
    ]
    named = [{"hosts": row.hosts, "sizes": row.sizes} for row in pays]
    blocks: list[Block] = [about, "", Table(columns, rows), "", *meaning]
    return Report("kvdock.simulate/1", {**trace, "rows": rows, "pays": named}, blocks)


def paying(rows: Sequence[Row]) -> list[Row]:
    """Return for each number of hosts the first row after which little is gained.

    Rows are in the order in which the user named sizes, small ones first.
    """
    first = {}
    for one in reversed(rows):
        same = [other for other in rows if other.hosts == one.hosts]
        hits = max(row.hits for row in same)
        nearer = max(row.nearer for row in same)
        pays = one.hits >= hits - _LITTLE and one.nearer >= nearer - _LITTLE_NEARER
        if pays or one.hosts not in first:
            first[one.hosts] = one
    return list(first.values())[::-1]


def _share(tier: str, row: Row) -> str:
    return f"{row.tiers[tier].share:.1%}"


def _carried(row: Row, what: str) -> str:
    """Spell what the last tier reads or writes, in a second where that is known."""
    far = list(row.tiers.values())[-1]
    rate = getattr(far, f"{what}_bytes_per_s")
    nbytes = getattr(far, f"{what}_bytes") if rate is None else rate
    return format_bytes(nbytes) + ("" if rate is None else "/s")

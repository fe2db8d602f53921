"""Where each token's bytes lie in a pool's memory.

A `Grid` is the affine map of a pool before its runs are merged: address = base
of the part in a layer + page, token, outer and head times their strides. It
travels to a peer, whose own pool may have another layout, page size or rank;
`kvdock.geometry.matching` finds what both hold.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.errors import RegionError
from kvdock.pools.enums import Layout, Per, Sharding
from kvdock.pools.objects import LAYOUT_AXES, Span

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock.pools.part import Part
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec

_LARGEST = 1 << 62
"""No address of a grid is beyond this, nor the bytes of all its pages."""


@attrs.frozen(eq=False)
class PartGrid:
    """The place of one part of a pool.

    Args:
        row_bytes: Bytes of one head of one entry.
        outer: Rows of a head in one entry.
        heads: Span of the model's heads, or of the rows of a rank's state.
        bases: int64 (layers,), address of the first byte of each layer.
        page_stride: Bytes from a page to the next.
        token_stride: Bytes from an entry of a page to the next.
        outer_stride: Bytes from a row of a head to the next.
        head_stride: Bytes from a head to the next.
    """

    name: str
    row_bytes: int
    outer: int
    heads: Span
    bases: Int64Array = attrs.field(repr=False)
    page_stride: int
    token_stride: int
    outer_stride: int
    head_stride: int


@attrs.frozen(eq=False)
class Grid:
    """Where each token's bytes of one pool lie in one process.

    Args:
        page_tokens: Tokens of a page, over all ranks that divide them.
        per: What the parts are counted for: a token, or a page as a whole.
        layers: The model's numbers of the layers.
        runs: (index, count): which of the interleaved runs of tokens lie here.
        interleave_tokens: Length of such a run.
        rank: (index, count) of a state that every rank has of its own, or None.
    """

    pool: str
    pages: int
    page_tokens: int
    per: Per
    layers: tuple[int, ...]
    runs: Span
    interleave_tokens: int
    rank: Span | None
    parts: tuple[PartGrid, ...]

    @classmethod
    def of(
        cls,
        pool: PoolSpec,
        shard: Shard,
        origins: Mapping[str, tuple[int, ...]],
        pages: int,
    ) -> Grid | None:
        """Describe a pool's memory; None if its parts are counted differently.

        `origins` has for each part its address in page 0: one, or one per layer.
        """
        parts = [part for part in pool.parts if part.entry_bytes]
        counted = {part.per for part in parts}
        if len(counted) != 1:
            return None
        ranked = pool.sharding is Sharding.RANK
        return cls(
            pool=pool.name,
            pages=pages,
            page_tokens=pool.page_tokens,
            per=counted.pop(),
            layers=pool.local_layers(shard),
            runs=pool.token_runs(shard),
            interleave_tokens=pool.interleave_tokens,
            rank=(shard.tp_rank, shard.tp_size) if ranked else None,
            parts=tuple(
                _part_grid(pool, shard, part, origins[part.name], pages)
                for part in parts
            ),
        )

    @property
    def entries(self) -> int:
        """Entries of a page that lie here: its tokens, or the page itself."""
        return 1 if self.per is Per.PAGE else self.page_tokens // self.runs[1]

    @property
    def page_bytes(self) -> int:
        """Bytes of a page that lie here."""
        each = (p.row_bytes * p.outer * (p.heads[1] - p.heads[0]) for p in self.parts)
        return len(self.layers) * self.entries * sum(each)

    def positions(self, tokens: int) -> int:
        """Return how many pages so many tokens take."""
        return -(-tokens // self.page_tokens)

    def check(self) -> None:
        """Check a grid that came from a peer, so that arithmetic on it is safe.

        Raises:
            RegionError: If it contradicts itself, or reaches beyond all memory.
        """
        index, count = self.runs
        good = len(set(self.layers)) == len(self.layers) and index < count
        good = good and self.page_tokens % count == 0
        good = good and (self.rank is None or self.rank[0] < self.rank[1])
        good = good and len({part.name for part in self.parts}) == len(self.parts)
        good = good and all(self._reaches(part) < _LARGEST for part in self.parts)
        if not good or self.pages * self.page_bytes >= _LARGEST:
            raise RegionError(
                f"a peer sent a grid of pool {self.pool!r} that contradicts itself"
            )

    def _reaches(self, part: PartGrid) -> int:
        """Return an address beyond every byte of a part; `_LARGEST` if it has none."""
        first, last = part.heads
        bases = part.bases.tolist()
        if len(bases) != len(self.layers) or min(bases, default=0) < 0 or first > last:
            return _LARGEST
        axes = (
            (self.pages, part.page_stride),
            (self.entries, part.token_stride),
            (part.outer, part.outer_stride),
            (last - first, part.head_stride),
        )
        return max(bases, default=0) + part.row_bytes + sum(n * s for n, s in axes)


def _part_grid(
    pool: PoolSpec, shard: Shard, part: Part, origins: tuple[int, ...], pages: int
) -> PartGrid:
    layers = len(pool.local_layers(shard))
    units = pool.local_units(part, shard)
    first = 0
    if part.shard_axis is not None:
        first = pool.local_heads(shard)[0] if pool.by_head else shard.tp_rank * units
    extents = {
        "page": pages,
        "layer": 1 if len(origins) > 1 else layers,
        "token": pool.entries(part, shard),
        "outer": part.outer,
        "head": units,
    }
    order = LAYOUT_AXES[pool.layout]
    strides = {
        axis: part.row_bytes * math.prod(extents[inner] for inner in order[at + 1 :])
        for at, axis in enumerate(order)
    }
    if pool.layout is Layout.PAGE_OBJECT:
        strides["page"] = pool.page_bytes(shard)
    bases = np.array(origins, np.int64)
    if len(origins) == 1:
        bases = bases[0] + np.arange(layers, dtype=np.int64) * strides["layer"]
    return PartGrid(
        name=part.name,
        row_bytes=part.row_bytes,
        outer=part.outer,
        heads=(first, first + units),
        bases=bases,
        page_stride=strides["page"],
        token_stride=strides["token"],
        outer_stride=strides["outer"],
        head_stride=strides["head"],
    )

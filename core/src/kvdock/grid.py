"""Where each token's bytes lie in a pool's memory.

A `Grid` is the affine map of a pool before its runs are merged: address = base
of the part in a layer + page, token, outer and head times their strides. It
travels to a peer, whose own pool may have another layout, page size or rank;
`kvdock.matching` finds what both hold.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock.errors import RegionError
from kvdock.pools.enums import Layout, Per, Sharding
from kvdock.pools.objects import LAYOUT_AXES, Span
from kvdock.validators import is_int

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock.pools.part import Part
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec

MAX_GRID_BYTES = 1 << 20
"""A grid is a few kilobytes; a larger text is something else."""

_LARGEST = 1 << 56
"""No address, stride or count of a grid is beyond this."""


@attrs.frozen(eq=False)
class PartGrid:
    """Where one part of a pool lies.

    Args:
        name: The part's name.
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
        pool: The pool's name.
        pages: Pages of the memory.
        page_tokens: Tokens of a page, over all ranks that divide them.
        per: What the parts are counted for: a token, or a page as a whole.
        layers: The model's numbers of the layers.
        runs: (index, count): which of the interleaved runs of tokens lie here.
        interleave_tokens: Length of such a run.
        rank: (index, count) of a state that every rank has of its own, or None.
        parts: The parts, in the pool's order.
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

        Args:
            pool: The pool, with the layout in which its pages lie.
            shard: The slice that this process holds.
            origins: Part name to its address in page 0: one, or one per layer.
            pages: How many pages the memory holds.
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

    def to_bytes(self) -> bytes:
        """Encode it, for a peer."""
        return json.dumps(
            attrs.asdict(self, value_serializer=_plain), separators=(",", ":")
        ).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Grid:
        """Decode a grid that came from a peer.

        Raises:
            RegionError: If it is not a grid.
        """
        if len(data) > MAX_GRID_BYTES:
            raise RegionError(f"{len(data)} bytes are not the grid of a pool")
        try:
            found = json.loads(data)
            parts = tuple(_read_part(one) for one in found.pop("parts"))
            grid = cls(
                parts=parts,
                pool=str(found.pop("pool")),
                pages=_number(found.pop("pages"), 1),
                page_tokens=_number(found.pop("page_tokens"), 1),
                per=Per(found.pop("per")),
                layers=tuple(map(_number, found.pop("layers"))),
                runs=_span(found.pop("runs")),
                interleave_tokens=_number(found.pop("interleave_tokens"), 1),
                rank=_span(rank) if (rank := found.pop("rank")) else None,
            )
        except (
            ValueError, TypeError, KeyError, AttributeError, RecursionError,
        ) as error:  # fmt: skip
            raise RegionError(f"a peer sent what is not a grid: {error!r}") from error
        if found or not parts or any(len(p.bases) != len(grid.layers) for p in parts):
            raise RegionError("a peer sent a grid that contradicts itself")
        return grid


def _plain(_: object, __: object, value: object) -> object:
    return value.tolist() if isinstance(value, np.ndarray) else value


def _number(value: object, least: int = 0) -> int:
    if not is_int(value) or not least <= value < _LARGEST:
        raise ValueError(value)
    return value


def _span(value: Sequence[object]) -> Span:
    first, last = value
    return _number(first), _number(last, 1)


def _read_part(found: dict[str, Any]) -> PartGrid:
    return PartGrid(
        name=str(found["name"]),
        row_bytes=_number(found["row_bytes"], 1),
        outer=_number(found["outer"], 1),
        heads=_span(found["heads"]),
        bases=np.array([_number(base) for base in found["bases"]], np.int64),
        **{f"{a}_stride": _number(found[f"{a}_stride"]) for a in _STRIDES},
    )


_STRIDES = ("page", "token", "outer", "head")


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

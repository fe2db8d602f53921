"""Small pools of every kind, and the bytes that their pages hold.

The content of a page is a function of the pool and the page hash alone, over
all ranks. So each rank, each process and each test knows what it must find,
and a page in the wrong place differs from the right one.
"""

from __future__ import annotations

import hashlib
import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.pools.enums import DType, HitPolicy, Layout, Per, PoolKind, Sharding
from kvdock.pools.part import Part
from kvdock.pools.spec import PoolSpec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvdock.pools.shard import Shard

Content = npt.NDArray[np.uint8]

HEADS = 4
"""Heads of the sample pools, so that TP 1, 2, 4 and 8 differ."""

PAGE_TOKENS = 4
"""Tokens of a sample page, so that two DCP ranks share it evenly."""

_DIVIDED = (PoolKind.MHA, PoolKind.K_ONLY, PoolKind.SWA)

_PartWords = tuple[str, DType, tuple[int, ...], Per]
_PARTS: Mapping[PoolKind, tuple[_PartWords, ...]] = MappingProxyType(
    {
        # Widths are odd on purpose: no page is a multiple of anything handy.
        PoolKind.MHA: (
            ("k", DType.BF16, (HEADS, 9), Per.TOKEN),
            ("v", DType.BF16, (HEADS, 5), Per.TOKEN),
        ),
        PoolKind.K_ONLY: (("k", DType.F16, (HEADS, 7), Per.TOKEN),),
        PoolKind.MLA: (("kv", DType.U8, (37,), Per.TOKEN),),
        PoolKind.INDEXER: (("indexer", DType.U8, (33,), Per.TOKEN),),
        PoolKind.MAMBA: (
            ("temporal", DType.F32, (8, 3, 2), Per.PAGE),
            ("conv_0", DType.BF16, (16, 3), Per.PAGE),
        ),
        PoolKind.SWA: (
            ("k", DType.FP8_E4M3, (HEADS, 11), Per.TOKEN),
            ("v", DType.FP8_E4M3, (HEADS, 11), Per.TOKEN),
        ),
        PoolKind.COMPRESSED: (
            ("c4", DType.U8, (41,), Per.PAGE),
            ("rope", DType.BF16, (5,), Per.PAGE),
        ),
        PoolKind.LOGICAL: (),
    }
)


def possible_shardings(kind: PoolKind) -> tuple[Sharding, ...]:
    """Return how a sample pool of a kind can be divided, likeliest first."""
    if kind in _DIVIDED:
        return (Sharding.HEADS, Sharding.REPLICATED, Sharding.DCP)
    if kind is PoolKind.MAMBA:
        return (Sharding.RANK, Sharding.REPLICATED)
    if kind is PoolKind.COMPRESSED:
        return (Sharding.REPLICATED,)
    return (Sharding.REPLICATED, Sharding.DCP)


@attrs.frozen(kw_only=True)
class Sample:
    """A sample pool in plain words, which can be sent to another process."""

    kind: PoolKind = attrs.field(converter=PoolKind)
    layout: Layout = attrs.field(default=Layout.PAGE_OBJECT, converter=Layout)
    hit_policy: HitPolicy = attrs.field(
        default=HitPolicy.ALL_PAGES, converter=HitPolicy
    )
    sharding: Sharding | None = attrs.field(
        default=None, converter=attrs.converters.optional(Sharding)
    )
    name: str = ""
    draft: bool = False
    head_group: int = 0
    page_bytes: int = 0
    layers: int = 4

    def pool(self) -> PoolSpec:
        """Return the pool: a required sidecar, or an optional draft.

        `page_bytes` replaces the parts by one of just that many bytes.
        """
        sharding = self.sharding or possible_shardings(self.kind)[0]
        axis = 0 if sharding in (Sharding.HEADS, Sharding.RANK) else None
        parts = tuple(
            Part(name, dtype, shape, per, axis)
            for name, dtype, shape, per in _PARTS[self.kind]
        )
        layers = tuple(range(self.layers))
        if self.page_bytes:
            parts = (Part("bytes", DType.U8, (self.page_bytes,), Per.PAGE),)
            sharding, layers = Sharding.REPLICATED, (0,)
        trailing = self.hit_policy is HitPolicy.TRAILING_PAGES
        groups = self.hit_policy is HitPolicy.BLOCK_GROUPS
        return PoolSpec(
            name=self.name or f"{'draft_' if self.draft else ''}{self.kind}",
            kind=self.kind,
            parts=parts,
            layers=layers,
            page_tokens=PAGE_TOKENS,
            draft=self.draft,
            required=not self.draft and not groups,
            hit_policy=self.hit_policy,
            window_pages=2 if trailing else 0,
            block_pages=2 if groups else 0,
            group_pages=1 if groups else 0,
            sharding=sharding,
            layout=self.layout,
            head_group=self.head_group,
        )

    def words(self) -> dict[str, Any]:
        """Return what builds the same sample again, in plain types."""
        return {
            name: str(value) if isinstance(value, str) else value
            for name, value in attrs.asdict(self).items()
        }


def page_hash(label: object) -> str:
    """Return a page hash, 64 hex digits as engines make them."""
    return hashlib.sha256(f"page {label}".encode()).hexdigest()


def page_hashes(count: int, label: object = "") -> list[str]:
    """Return the hashes of a run of pages."""
    return [page_hash(f"{label} {index}") for index in range(count)]


def content(pool: PoolSpec, part: Part, page: str, seed: int = 0) -> Content:
    """Return what one part of a page holds, over all ranks.

    Returns:
        uint8 (layers, tokens, outer, units, row bytes); one token where the
        part is counted per page.
    """
    tokens = pool.page_tokens if part.per is Per.TOKEN else 1
    shape = (len(pool.layers), tokens, part.outer, part.units, part.row_bytes)
    recipe = f"{pool.name}/{part.name}/{page}/{seed}".encode()
    flat = hashlib.shake_128(recipe).digest(math.prod(shape))
    return np.frombuffer(flat, np.uint8).reshape(shape)


def local_content(
    pool: PoolSpec, part: Part, shard: Shard, page: str, seed: int = 0
) -> Content:
    """Return a part on one rank, uint8 (layers, entries, units, row bytes)."""
    whole = content(pool, part, page, seed)
    mine = pool.local_layers(shard)
    whole = whole[[pool.layers.index(layer) for layer in mine]]
    index, count = pool.token_runs(shard)
    if part.per is Per.TOKEN:
        whole = whole[:, index::count]
    if part.shard_axis is not None:
        units = pool.local_units(part, shard)
        first = shard.tp_rank * units
        if pool.by_head:
            first = pool.local_heads(shard)[0]
        whole = whole[:, :, :, first : first + units]
    layers, tokens, outer, units, row = whole.shape
    return np.ascontiguousarray(whole).reshape(layers, tokens * outer, units, row)

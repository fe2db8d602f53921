"""Pools as data: what one page of cached state is made of.

A pool description is global: all layers and all heads of the model, the same
on every rank. A `Shard` says which slice of it a process owns. That split is
what lets a key name what an object holds and never who wrote it.

Nothing here does I/O, imports numpy, or knows a model or a backend by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from enum import StrEnum
from types import MappingProxyType

import attrs

from kvdock.errors import PoolError, nearest

_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")


class PoolName(StrEnum):
    """Well-known pool names. Any other valid name may be used as well."""

    KV = "kv"
    """Target attention KV, usually the anchor."""
    DRAFT = "draft"
    """KV of a draft model (EAGLE, MTP, or a model of its own)."""
    INDEXER = "indexer"
    """Keys of a sparse-attention indexer (DSA)."""
    DRAFT_INDEXER = "draft_indexer"
    """Indexer keys of a draft model."""
    MAMBA = "mamba"
    """Recurrent state of linear-attention and Mamba layers."""
    SWA = "swa"
    """KV of sliding-window layers."""
    AUXILIARY_SWA = "auxiliary_swa"
    """KV of sliding-window layers with a second geometry."""
    DRAFT_SWA = "draft_swa"
    """Sliding-window KV of a draft model."""


class PoolKind(StrEnum):
    """What the bytes of a pool mean; routing and conformance go by this."""

    MHA = "mha"
    """Keys and values per head, widths may differ (MHA, GQA, MQA)."""
    K_ONLY = "k_only"
    """Keys alone, per head."""
    MLA = "mla"
    """One latent row per token, shared by all heads."""
    INDEXER = "indexer"
    """Quantised keys of a sparse-attention indexer with their scales."""
    MAMBA = "mamba"
    """Recurrent state: one temporal state and any number of conv states."""
    SWA = "swa"
    """Attention KV of layers that look back a fixed window."""
    COMPRESSED = "compressed"
    """Compressed KV and its side data, as padded pages or ring states."""
    LOGICAL = "logical"
    """An anchor that only counts pages and holds no bytes."""


class DType(StrEnum):
    """Logical element types; equal widths are still different types."""

    F32 = "f32"
    """IEEE single precision."""
    F16 = "f16"
    """IEEE half precision."""
    BF16 = "bf16"
    """bfloat16."""
    FP8_E4M3 = "fp8_e4m3"
    """8-bit float, 4 exponent bits."""
    FP8_E5M2 = "fp8_e5m2"
    """8-bit float, 5 exponent bits."""
    FP4_E2M1 = "fp4_e2m1"
    """4-bit float, two to a byte."""
    I32 = "i32"
    """32-bit integer."""
    I8 = "i8"
    """8-bit integer."""
    U8 = "u8"
    """Opaque bytes, among them rows that mix payload and scales."""

    @property
    def bits(self) -> int:
        """Width of one element in bits."""
        return _BITS[self]


_BITS = MappingProxyType(
    {
        DType.F32: 32,
        DType.F16: 16,
        DType.BF16: 16,
        DType.FP8_E4M3: 8,
        DType.FP8_E5M2: 8,
        DType.FP4_E2M1: 4,
        DType.I32: 32,
        DType.I8: 8,
        DType.U8: 8,
    }
)


class Per(StrEnum):
    """What a part's shape is counted for."""

    TOKEN = "token"  # noqa: S105 - a unit, not a secret
    """One entry per token and layer (attention)."""
    PAGE = "page"
    """One entry per page and layer (states, padded pages)."""


class HitPolicy(StrEnum):
    """Which pages of a pool must exist for a prefix to be restorable."""

    ALL_PAGES = "all_pages"
    """Every page of the prefix."""
    TRAILING_PAGES = "trailing_pages"
    """The last `window_pages` pages of the prefix, or all of a shorter one."""
    BLOCK_GROUPS = "block_groups"
    """Whole groups of blocks; reported, and cut nothing unless required."""


class Sharding(StrEnum):
    """How the ranks of a deployment divide the bytes of one page."""

    HEADS = "heads"
    """By head; ranks that hold the same heads share one writer."""
    REPLICATED = "replicated"
    """The same bytes on every rank, written by one of them."""
    RANK = "rank"
    """A state of its own on every tensor-parallel rank."""
    DCP = "dcp"
    """By token: each decode-context-parallel rank holds every n-th one."""


class Layout(StrEnum):
    """How a pool's pages lie in host memory."""

    LAYER_FIRST = "layer_first"
    """part, layer, page, token, head."""
    PAGE_FIRST = "page_first"
    """part, page, token, layer, head."""
    PAGE_FIRST_DIRECT = "page_first_direct"
    """part, page, layer, token, head."""
    PAGE_HEAD = "page_head"
    """part, page, head, token, layer: a head group is one run of bytes."""
    PAGE_OBJECT = "page_object"
    """page, part, layer, token, head: a whole page is one run of bytes."""

    @property
    def stored_order(self) -> str:
        """Order of the axes inside one stored part.

        Layouts that share it store the same bytes, so they share objects.
        """
        return _STORED_ORDER.get(self, "layer,token,head")


_STORED_ORDER = MappingProxyType(
    {
        Layout.PAGE_FIRST: "token,layer,head",
        Layout.PAGE_HEAD: "head,token,layer",
    }
)


class ObjectUnit(StrEnum):
    """How much of a page goes under one key."""

    PAGE = "page"
    """All parts and layers that a rank holds of the page."""
    PART = "part"
    """One part (k, v, ...) with all its layers."""
    LAYER = "layer"
    """One layer of one part."""


def _checked_name(_: object, attribute: attrs.Attribute[str], value: str) -> None:
    if not _NAME.fullmatch(value):
        raise PoolError(
            f"{attribute.name} {value!r} is not a valid name",
            fix="Use a-z, 0-9 and _, beginning with a letter, 48 characters at most.",
        )


def _positive(_: object, attribute: attrs.Attribute[int], value: int) -> None:
    if value < 1:
        raise PoolError(f"{attribute.name} must be at least 1, not {value}")


@attrs.frozen(kw_only=True)
class Shard:
    """Which slice of the model this process owns.

    `layers` is the half-open range of global layer numbers of this pipeline
    stage; None means that one stage holds all of them.
    """

    tp_rank: int = 0
    tp_size: int = attrs.field(default=1, validator=_positive)
    pp_rank: int = 0
    pp_size: int = attrs.field(default=1, validator=_positive)
    cp_rank: int = 0
    cp_size: int = attrs.field(default=1, validator=_positive)
    dcp_rank: int = 0
    dcp_size: int = attrs.field(default=1, validator=_positive)
    layers: tuple[int, int] | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse ranks outside their group and stages without layers."""
        for axis in ("tp", "pp", "cp", "dcp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise PoolError(f"{axis}_rank {rank} is outside of {axis}_size {size}")
        if self.pp_size > 1 and self.layers is None:
            raise PoolError(
                f"pp_size is {self.pp_size} but the stage's layers are not given",
                fix="Pass layers=(first, past_the_last) of this pipeline stage.",
            )
        if self.tp_size % self.dcp_size:
            raise PoolError(
                f"dcp_size {self.dcp_size} does not divide tp_size {self.tp_size}"
            )
        if self.dcp_size > 1 and self.tp_rank % self.dcp_size != self.dcp_rank:
            raise PoolError(
                f"dcp_rank {self.dcp_rank} does not belong to tp_rank {self.tp_rank} "
                f"in groups of {self.dcp_size}",
                fix="A DCP rank is the TP rank modulo the DCP size.",
            )


@attrs.frozen
class Part:
    """One physical component of a page, for one layer.

    Args:
        name: `k`, `v`, `kv`, `temporal`, `conv_0`, `indexer` ...
        dtype: Logical element type; part of the namespace.
        shape: Extents of one token's or one page's entry in one layer, over
            all ranks. An extent may be 0: the part then takes no bytes.
        per: Whether `shape` is counted per token or per page.
        shard_axis: The axis of `shape` that is divided among ranks, or None.
    """

    name: str = attrs.field(validator=_checked_name)
    dtype: DType = attrs.field(converter=DType)
    shape: tuple[int, ...] = attrs.field(converter=tuple)
    per: Per = attrs.field(default=Per.TOKEN, converter=Per)
    shard_axis: int | None = None

    def __attrs_post_init__(self) -> None:
        """Refuse shapes that cannot be stored."""
        if any(extent < 0 for extent in self.shape):
            raise PoolError(f"part {self.name!r} has a negative extent in {self.shape}")
        if self.shard_axis is not None and not 0 <= self.shard_axis < len(self.shape):
            raise PoolError(
                f"part {self.name!r}: shard_axis {self.shard_axis} is outside of "
                f"shape {self.shape}"
            )
        if self.row_bytes * 8 != self.row_bits:
            raise PoolError(
                f"part {self.name!r}: an innermost row of {self.shape} x {self.dtype} "
                "is not a whole number of bytes"
            )

    @property
    def units(self) -> int:
        """Extent of the divided axis (heads), or 1."""
        return 1 if self.shard_axis is None else self.shape[self.shard_axis]

    @property
    def row_bits(self) -> int:
        """Bits of what lies below the divided axis."""
        below = 0 if self.shard_axis is None else self.shard_axis + 1
        return math.prod(self.shape[below:]) * self.dtype.bits

    @property
    def row_bytes(self) -> int:
        """Bytes of what lies below the divided axis, rounded down."""
        return self.row_bits // 8

    @property
    def outer(self) -> int:
        """Product of the extents above the divided axis."""
        return (
            1 if self.shard_axis is None else math.prod(self.shape[: self.shard_axis])
        )

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry (a token's or a page's) of one layer, all ranks."""
        return self.outer * self.units * self.row_bytes


@attrs.frozen
class StoredObject:
    """What a backend keeps under one key: some parts of one page.

    `coordinate` spells what it holds, unique in its pool on every rank.
    """

    coordinate: str
    parts: tuple[str, ...]
    layers: tuple[int, ...]
    heads: tuple[int, int] | None
    nbytes: int


def _whole(layers: Sequence[int]) -> tuple[int, ...]:
    found = tuple(layers)
    if list(found) != sorted(set(found)) or any(layer < 0 for layer in found):
        raise PoolError(f"layers {found} are not ascending global layer numbers")
    return found


@attrs.frozen(kw_only=True)
class PoolSpec:
    """One kind of cached state, as pages of equal size.

    Args:
        name: The pool's name; no rule hangs on it.
        kind: What the bytes mean.
        parts: Components in the order in which they are stored.
        layers: Global numbers of the layers that have this pool.
        page_tokens: Tokens that one page covers, over all ranks.
        anchor: Whether this pool's pages define the prefix.
        draft: Whether it belongs to a draft model.
        required: Restoring without a required pool is wrong, without an
            optional one only slower.
        indices_from: The pool whose page indices it shares, or None.
        hit_policy: Which of its pages a prefix needs.
        window_pages: The window of TRAILING_PAGES.
        block_pages: Pages of one block of BLOCK_GROUPS.
        group_pages: Pages of one group of BLOCK_GROUPS.
        sharding: How ranks divide a page.
        layout: How pages lie in host memory.
        head_group: Heads per stored object; 0 keeps a rank's heads together.
            A common divisor of several TP sizes lets them share objects.
        object_unit: How much goes under one key; the router sets it.
    """

    name: str = attrs.field(validator=_checked_name)
    kind: PoolKind = attrs.field(converter=PoolKind)
    parts: tuple[Part, ...] = attrs.field(converter=tuple)
    layers: tuple[int, ...] = attrs.field(converter=_whole)
    page_tokens: int = attrs.field(validator=_positive)
    anchor: bool = False
    draft: bool = False
    required: bool = True
    indices_from: str | None = None
    hit_policy: HitPolicy = attrs.field(
        default=HitPolicy.ALL_PAGES, converter=HitPolicy
    )
    window_pages: int = 0
    block_pages: int = 0
    group_pages: int = 0
    sharding: Sharding = attrs.field(converter=Sharding)
    layout: Layout = attrs.field(default=Layout.PAGE_OBJECT, converter=Layout)
    head_group: int = 0
    object_unit: ObjectUnit = attrs.field(default=ObjectUnit.PAGE, converter=ObjectUnit)

    @sharding.default
    def _by_parts(self) -> Sharding:
        divided = any(part.shard_axis is not None for part in self.parts)
        return Sharding.HEADS if divided else Sharding.REPLICATED

    def __attrs_post_init__(self) -> None:
        """Refuse a description that contradicts itself."""
        where = f"pool {self.name!r}"
        names = [part.name for part in self.parts]
        if len(set(names)) != len(names):
            raise PoolError(f"{where} names a part twice: {names}")
        logical = self.kind is PoolKind.LOGICAL
        if logical != (not self.parts):
            raise PoolError(
                f"{where} of kind {self.kind} has {len(self.parts)} parts",
                fix="A logical anchor has no parts; every other pool has some.",
            )
        if not logical and not self.layers:
            raise PoolError(f"{where} has no layers")
        if self.anchor and self.hit_policy is not HitPolicy.ALL_PAGES:
            raise PoolError(f"{where} is the anchor, so every page of it must be there")
        if self.anchor and (self.indices_from or not self.required):
            raise PoolError(f"{where} is the anchor: required, with its own indices")
        self._check_policy(where)
        self._check_sharding(where)

    def _check_policy(self, where: str) -> None:
        if (self.hit_policy is HitPolicy.TRAILING_PAGES) != (self.window_pages > 0):
            raise PoolError(
                f"{where}: hit policy {self.hit_policy} with "
                f"window_pages={self.window_pages}",
                fix="TRAILING_PAGES needs a window of at least one page, "
                "the others none.",
            )
        grouped = self.block_pages > 0 and self.group_pages > 0
        if (self.hit_policy is HitPolicy.BLOCK_GROUPS) != grouped:
            raise PoolError(
                f"{where}: hit policy {self.hit_policy} with "
                f"block_pages={self.block_pages}, group_pages={self.group_pages}",
                fix="BLOCK_GROUPS needs both, the others none.",
            )

    def _check_sharding(self, where: str) -> None:
        divided = {part.units for part in self.parts if part.shard_axis is not None}
        if self.sharding is Sharding.RANK and not divided:
            raise PoolError(f"{where} is divided by {self.sharding}, but no part is")
        if self.sharding is Sharding.HEADS and None in {
            part.shard_axis for part in self.parts
        }:
            raise PoolError(
                f"{where} is divided by heads, but not every part is",
                fix="Give every part a shard_axis, or describe the others as a pool.",
            )
        if self.sharding is Sharding.REPLICATED and divided:
            raise PoolError(f"{where} is replicated, but a part has a shard_axis")
        if self.sharding is Sharding.HEADS and len(divided) > 1:
            raise PoolError(f"{where}: parts have different head counts {divided}")
        if self.head_group and self.sharding is not Sharding.HEADS:
            raise PoolError(f"{where}: head_group needs a pool divided by heads")
        if self.head_group and self.heads % self.head_group:
            raise PoolError(
                f"{where}: head_group {self.head_group} does not divide "
                f"{self.heads} heads"
            )

    @property
    def heads(self) -> int:
        """Heads of the whole model that this pool divides among ranks."""
        divided = [p.units for p in self.parts if p.shard_axis is not None]
        return divided[0] if divided else 1

    @property
    def physical(self) -> bool:
        """Whether the pool has bytes at all."""
        return self.kind is not PoolKind.LOGICAL

    def local_layers(self, shard: Shard) -> tuple[int, ...]:
        """Return the layers of this pool that the shard's stage holds."""
        if shard.layers is None:
            return self.layers
        start, stop = shard.layers
        return tuple(layer for layer in self.layers if start <= layer < stop)

    def local_heads(self, shard: Shard) -> tuple[int, int]:
        """Return the half-open head range that the shard holds.

        With more ranks than heads, neighbouring ranks hold the same head.

        Raises:
            PoolError: If heads and ranks do not divide each other.
        """
        if self.sharding is not Sharding.HEADS:
            return 0, self.heads
        heads, ranks = self.heads, shard.tp_size
        if heads % ranks == 0:
            each = heads // ranks
            return shard.tp_rank * each, (shard.tp_rank + 1) * each
        if ranks % heads == 0:
            head = shard.tp_rank // (ranks // heads)
            return head, head + 1
        raise PoolError(
            f"pool {self.name!r}: {heads} heads cannot be divided "
            f"among {ranks} tensor-parallel ranks"
        )

    def local_units(self, part: Part, shard: Shard) -> int:
        """Return how much of a part's divided axis the shard holds.

        Raises:
            PoolError: If a per-rank state does not divide evenly.
        """
        if part.shard_axis is None:
            return 1
        if self.sharding is Sharding.HEADS:
            start, stop = self.local_heads(shard)
            return stop - start
        if self.sharding is not Sharding.RANK:
            return part.units
        if part.units % shard.tp_size:
            raise PoolError(
                f"pool {self.name!r}: part {part.name!r} has {part.units} rows for "
                f"{shard.tp_size} tensor-parallel ranks"
            )
        return part.units // shard.tp_size

    def local_tokens(self, shard: Shard) -> int:
        """Return how many tokens of a page the shard holds.

        Raises:
            PoolError: If a page does not divide among DCP ranks.
        """
        if self.sharding is not Sharding.DCP:
            return self.page_tokens
        if self.page_tokens % shard.dcp_size:
            raise PoolError(
                f"pool {self.name!r}: a page of {self.page_tokens} tokens cannot be "
                f"divided among {shard.dcp_size} DCP ranks"
            )
        return self.page_tokens // shard.dcp_size

    def part_bytes(self, part: Part, shard: Shard) -> int:
        """Return the bytes of a part in one page and layer of the shard."""
        entries = self.local_tokens(shard) if part.per is Per.TOKEN else 1
        units = self.local_units(part, shard)
        return entries * part.outer * units * part.row_bytes

    def page_bytes(self, shard: Shard) -> int:
        """Return the bytes of one page that the shard holds."""
        layers = len(self.local_layers(shard))
        return layers * sum(self.part_bytes(part, shard) for part in self.parts)

    def head_groups(self, shard: Shard) -> tuple[tuple[int, int], ...]:
        """Return the head ranges that the shard's objects hold.

        Raises:
            PoolError: If the head group does not divide the shard's heads.
        """
        start, stop = self.local_heads(shard)
        group = self.head_group or stop - start
        if (stop - start) % group:
            raise PoolError(
                f"pool {self.name!r}: head_group {group} does not divide the "
                f"{stop - start} heads of a rank"
            )
        return tuple((head, head + group) for head in range(start, stop, group))

    def objects(self, shard: Shard) -> tuple[StoredObject, ...]:
        """Return what one page of this shard is stored as, in key order.

        Order: head group, then part, then layer. A logical anchor is one
        object without bytes, so that its presence can still be stored.
        """
        layers = self.local_layers(shard)
        if not self.physical:
            return (StoredObject(f"{self.name}.mark", (), layers, None, 0),)
        unit = self.object_unit
        picks: list[tuple[tuple[Part, ...], tuple[int, ...]]] = [(self.parts, layers)]
        if unit is not ObjectUnit.PAGE:
            picks = [((part,), layers) for part in self.parts]
        if unit is ObjectUnit.LAYER:
            picks = [(parts, (layer,)) for parts, _ in picks for layer in layers]
        return tuple(
            self._object(shard, heads, parts, some)
            for heads in self.head_groups(shard)
            for parts, some in picks
        )

    def _object(
        self,
        shard: Shard,
        heads: tuple[int, int],
        parts: tuple[Part, ...],
        layers: tuple[int, ...],
    ) -> StoredObject:
        by_head = self.sharding is Sharding.HEADS
        nbytes = 0
        for part in parts:
            entries = self.local_tokens(shard) if part.per is Per.TOKEN else 1
            divided = by_head and part.shard_axis is not None
            units = heads[1] - heads[0] if divided else self.local_units(part, shard)
            nbytes += entries * part.outer * units * part.row_bytes * len(layers)
        words = [self.name]
        if layers:
            words.append(f"L{layers[0]}-{layers[-1] + 1}")
        if by_head:
            words.append(f"H{heads[0]}-{heads[1]}")
        elif self.sharding is Sharding.RANK:
            words.append(f"R{shard.tp_rank}of{shard.tp_size}")
        elif self.sharding is Sharding.DCP:
            words.append(f"D{shard.dcp_rank}of{shard.dcp_size}")
        if len(parts) < len(self.parts) or self.object_unit is not ObjectUnit.PAGE:
            words.append(parts[0].name)
        return StoredObject(
            ".".join(words),
            tuple(part.name for part in parts),
            layers,
            heads if by_head else None,
            nbytes,
        )

    def writes(self, shard: Shard) -> bool:
        """Return whether this rank is the one that stores its objects.

        Every object has exactly one writer: rank 0 of the ranks that hold
        the same bytes. Context-parallel ranks hold the same pages.
        """
        if shard.cp_rank:
            return False
        if self.sharding is Sharding.REPLICATED:
            return shard.tp_rank == 0
        if self.sharding is Sharding.DCP:
            return shard.tp_rank == shard.dcp_rank
        if self.sharding is Sharding.HEADS and shard.tp_size > self.heads:
            return shard.tp_rank % (shard.tp_size // self.heads) == 0
        return True


def check_pools(pools: Sequence[PoolSpec]) -> PoolSpec:
    """Check that pools belong together and return the anchor.

    Raises:
        PoolError: On no or two anchors, a name twice, or a pool that shares
            the indices of one that is not there.
    """
    names = [pool.name for pool in pools]
    for name in names:
        if names.count(name) > 1:
            raise PoolError(f"pool {name!r} is described twice")
    anchors = [pool for pool in pools if pool.anchor]
    if len(anchors) != 1:
        raise PoolError(
            f"there must be one anchor, not {len(anchors)}: "
            f"{[pool.name for pool in anchors]}",
            fix="Set anchor=True on the pool whose pages define the prefix.",
        )
    for pool in pools:
        if pool.indices_from is not None and pool.indices_from not in names:
            raise PoolError(
                f"pool {pool.name!r} shares the indices of {pool.indices_from!r}, "
                "which is not there",
                fix=nearest(pool.indices_from, names),
            )
        if pool.page_tokens != anchors[0].page_tokens:
            raise PoolError(
                f"pool {pool.name!r} has pages of {pool.page_tokens} tokens, "
                f"the anchor {anchors[0].name!r} of {anchors[0].page_tokens}"
            )
    return anchors[0]

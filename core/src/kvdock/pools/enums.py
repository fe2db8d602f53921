"""The closed lists of words that pools, manifests and plans are made of.

Nothing here does I/O, imports numpy, or knows a model or a backend by name.
"""

from __future__ import annotations

from enum import StrEnum
from types import MappingProxyType

from kvdock.strict_enum import StrictEnum


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


class PoolKind(StrictEnum):
    """The meaning of a pool's bytes; routing and conformance go by this."""

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


class DType(StrictEnum):
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
    FP8_E8M0 = "fp8_e8m0"
    """8-bit power of two, the scale of a block of narrower numbers."""
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
        DType.FP8_E8M0: 8,
        DType.FP4_E2M1: 4,
        DType.I32: 32,
        DType.I8: 8,
        DType.U8: 8,
    }
)


class Per(StrictEnum):
    """The unit that a part's shape is counted for."""

    TOKEN = "token"  # noqa: S105 - a unit, not a secret
    """One entry per token and layer (attention)."""
    PAGE = "page"
    """One entry per page and layer (states, padded pages)."""


class HitPolicy(StrictEnum):
    """The pages of a pool that must exist for a prefix to be restorable."""

    ALL_PAGES = "all_pages"
    """Every page of the prefix."""
    TRAILING_PAGES = "trailing_pages"
    """The last `window_pages` pages of the prefix, or all of a shorter one."""
    BLOCK_GROUPS = "block_groups"
    """A second form of the prefix, kept as groups of pages at the ends of
    blocks. Reports how far whole groups reach and never cuts a prefix."""


class Sharding(StrictEnum):
    """The division of one page's bytes over the ranks of a deployment."""

    HEADS = "heads"
    """By head; ranks that hold the same heads share one writer."""
    REPLICATED = "replicated"
    """The same bytes on every rank, written by one of them."""
    RANK = "rank"
    """A state of its own on every tensor-parallel rank."""
    DCP = "dcp"
    """By token, among ranks that would hold the same bytes: every
    decode-context-parallel rank takes each n-th run of tokens of a page."""


class ContextSplit(StrictEnum):
    """The division of a pool over context-parallel ranks, on top of its sharding."""

    REPLICATED = "replicated"
    """They do not: all hold the same bytes, and the first one writes."""
    LAYERS = "layers"
    """Each holds a contiguous range of its stage's layers."""
    TOKENS = "tokens"
    """Each takes every n-th run of tokens of each page."""
    PAGES = "pages"
    """Each page lies whole on one of them, which writes it."""


class Layout(StrictEnum):
    """The layout of a pool's pages in host memory."""

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


class ObjectUnit(StrictEnum):
    """The share of a page that goes under one key."""

    PAGE = "page"
    """All parts and layers that a rank holds of the page."""
    PART = "part"
    """One part (k, v, ...) with all its layers."""
    LAYER = "layer"
    """One layer of one part."""

"""SGLang's host pools as kvdock's pools: one table, by exact class.

A subclass is another class: it may lay its memory out in its own way, so it is
rejected by name until the table has it. What the table says is compared with the
addresses that the pool itself reports before it is used.

Source: SGLang 0.5.23, `mem_cache/pool_host/` and `mem_cache/memory_pool_host.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from kvdock import DType, HitPolicy, Layout, PoolKind, PoolSpec, Region, Sharding
from kvdock.errors import PoolError
from kvdock.pools import Part, Per
from kvdock_sglang.engine_api import TESTED
from kvdock_sglang.page_order import page_order
from kvdock_sglang.pool_names import WINDOWS, EnginePool, is_draft

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdock import Shard


@attrs.frozen(kw_only=True)
class EngineContext:
    """The facts that all pools of an engine process share.

    Args:
        page_tokens: Tokens of one page, over all ranks.
        head_group: Heads per stored object, 0 for all heads of a rank.
        kv_heads: Heads of the target over all ranks, 0 where it is not known.
    """

    shard: Shard
    page_tokens: int
    head_group: int = 0
    kv_heads: int = 0


@attrs.frozen(eq=False)
class HostPool:
    """One of the engine's host pools, described.

    Args:
        page_slots: Host slots of one page, as the engine counts them.
        page_order: Digest of the order of bytes in a page; see `page_order`.
        packed_draft_layers: Layers of a draft model at the end of each page.
    """

    spec: PoolSpec
    region: Region
    page_slots: int
    page_order: str
    packed_draft_layers: int = 0

    @property
    def name(self) -> str:
        """Its name in the engine."""
        return self.spec.name


@attrs.frozen(kw_only=True, eq=False)
class _Shape:
    """The facts of one row of the table about a pool object."""

    kind: PoolKind
    parts: tuple[Part, ...]
    layers: int
    sharding: Sharding
    layout: Layout
    memory: tuple[object, ...]
    pages: int
    page_slots: int
    first_layer: int = 0
    packed_drafts: int = 0
    divided: tuple[int, int] | None = None


def class_name(pool: object) -> str:
    """Return a pool's class as the table spells it."""
    return class_name_of(type(pool))


def class_name_of(cls: type) -> str:
    """Return a class as the table spells it."""
    return f"{cls.__module__}.{cls.__qualname__}"


def describe(name: str, pool: object, place: EngineContext) -> HostPool:
    """Describe one host pool.

    Raises:
        PoolError: If its class or its layout is not known, or it lacks what
            the table reads of its class; the message names it.
        RegionError: If its memory is not as large as its pages, or the order of
            bytes in them cannot be read.
    """
    name = str(name)
    row = KNOWN.get(class_name(pool))
    if row is None:
        reason = REJECTED.get(class_name(pool))
        raise PoolError(
            f"host pool {name!r} is a {class_name(pool)}, "
            + (reason or "which kvdock-sglang does not know"),
            fix="Run the model without this feature, or ask for the class at "
            "kvdock's issue tracker.",
        )
    try:
        shape = row(_Known(name, pool, place))
    except AttributeError as error:
        raise PoolError(
            f"host pool {name!r} ({class_name(pool)}) cannot be described: {error}",
            fix=f"Use SGLang {' or '.join(TESTED)}, or a kvdock-sglang that was "
            "tested with yours.",
        ) from error
    heads = shape.sharding is Sharding.HEADS
    trailing = name == EnginePool.MAMBA or name in WINDOWS or name.endswith("_state")
    anchor = name == EnginePool.KV
    spec = PoolSpec(
        name=name,
        kind=PoolKind.SWA if name in WINDOWS else shape.kind,
        parts=shape.parts,
        layers=tuple(range(shape.first_layer, shape.first_layer + shape.layers)),
        page_tokens=place.page_tokens,
        anchor=anchor,
        draft=is_draft(name),
        required=not is_draft(name),
        hit_policy=HitPolicy.TRAILING_PAGES if trailing else HitPolicy.ALL_PAGES,
        # The engine passes a window's length with each request, not before.
        window_pages=1 if trailing else 0,
        sharding=shape.sharding,
        layout=shape.layout,
        head_group=place.head_group if heads else 0,
    )
    region = Region.of(spec, place.shard, shape.memory, shape.pages)
    return HostPool(
        spec,
        region,
        shape.page_slots,
        page_order(pool, shape.memory, shape.pages, shape.divided),
        shape.packed_drafts,
    )


def heads_of(pool: Any) -> int:  # noqa: ANN401 - the engine's object
    """Return the KV heads of a rank in a host pool that divides heads, else 0."""
    return int(pool.head_num) if KNOWN.get(class_name(pool)) in _BY_HEAD else 0


@attrs.frozen(eq=False)
class _Known:
    """A pool object with what is asked of every class."""

    name: str
    pool: Any
    place: EngineContext

    def reject(self, why: str) -> PoolError:
        """Return the error that names the pool and its class."""
        return PoolError(f"host pool {self.name!r} ({class_name(self.pool)}) {why}")

    def dtype(self, dtype: object) -> DType:
        """Translate an element type of torch."""
        word = str(dtype).removeprefix("torch.")
        if word not in _DTYPES:
            raise self.reject(f"holds elements of type {word}, which has no name here")
        return _DTYPES[word]

    def layout(self) -> Layout:
        """Translate a layout."""
        word = str(self.pool.layout)
        if word not in LAYOUTS:
            known = ", ".join(sorted(LAYOUTS))
            raise PoolError(
                f"host pool {self.name!r} lies in layout {word!r}",
                fix=f"Start SGLang with --hicache-mem-layout, one of {known}.",
            )
        return LAYOUTS[word]

    def per_head(self, name: str, width: int) -> Part:
        """Describe keys or values; a part counts the heads of all ranks."""
        ranks, heads = self.place.shard.tp_size, int(self.pool.head_num)
        heads *= ranks
        whole = self.place.kv_heads
        # Draft layers in the same pool may have other heads than the target.
        own = self.name == EnginePool.KV and not self.packed_drafts()
        if own and heads == ranks and 0 < whole < ranks and ranks % whole == 0:
            heads = whole
        return Part(name, self.dtype(self.pool.dtype), (heads, width), shard_axis=0)

    def head_axis(self) -> tuple[int, int]:
        """Return where the memory counts heads, from the innermost, and how many."""
        axis = -4 if self.layout() is Layout.PAGE_HEAD else -2
        return axis, int(self.pool.head_num)

    def packed_drafts(self) -> int:
        """Return how many layers of a draft model lie at the end of each page."""
        return int(self.pool.layer_num) - int(self.pool.target_layer_num)

    def buffer(self, attribute: str) -> object:
        """Return a piece of memory that must be there."""
        found = getattr(self.pool, attribute, None)
        if found is None:
            raise self.reject(
                f"has no {attribute} on this rank (deduplicated over ranks?)"
            )
        return found

    def whole_pages(self, row: int) -> _Shape:
        """Describe pages that are opaque rows of bytes, one per layer.

        Laid out layer first, each layer is a tensor of its own. It is described
        as one part per layer: parts may lie apart, layers of one may not.
        """
        pool, buffer = self.pool, self.buffer("kv_buffer")
        layers = int(pool.layer_num)
        layout = self.layout()
        apart = isinstance(buffer, list)
        names = [f"layer_{n}" for n in range(layers)] if apart else ["row"]
        return _Shape(
            kind=PoolKind.COMPRESSED,
            parts=tuple(Part(n, DType.U8, (int(row),), Per.PAGE) for n in names),
            layers=1 if apart else layers,
            sharding=Sharding.REPLICATED,
            layout=layout,
            memory=tuple(buffer) if isinstance(buffer, list) else (buffer,),
            pages=int(pool.num_host_pages),
            page_slots=int(pool.page_size),
            first_layer=int(pool.start_layer),
        )

    def shape(
        self,
        kind: PoolKind,
        parts: tuple[Part, ...],
        sharding: Sharding,
        buffers: str,
        *,
        pages: int | None = None,
        drafts: bool = True,
    ) -> _Shape:
        """Describe a pool whose class names its facts as most do.

        `buffers` are the attributes that are its memory. `pages` is None for what most
        classes call them. With `drafts`, layers of a draft model may lie at the end of
        a page.
        """
        pool = self.pool
        return _Shape(
            kind=kind,
            parts=parts,
            layers=int(pool.layer_num),
            sharding=sharding,
            layout=self.layout(),
            memory=tuple(map(self.buffer, buffers.split())),
            pages=int(pool.page_num) if pages is None else pages,
            page_slots=int(pool.page_size),
            first_layer=int(pool.start_layer),
            packed_drafts=self.packed_drafts() if drafts else 0,
            divided=self.head_axis() if sharding is Sharding.HEADS else None,
        )


def _mha(known: _Known) -> _Shape:
    pool = known.pool
    if pool.head_dim != pool.v_head_dim:
        raise known.reject("has keys and values of different widths in one buffer")
    return _keys_and_values(known, "kv_buffer")


def _keys_and_values(known: _Known, buffers: str) -> _Shape:
    pool = known.pool
    parts = (known.per_head("k", pool.head_dim), known.per_head("v", pool.v_head_dim))
    return known.shape(PoolKind.MHA, parts, Sharding.HEADS, buffers)


def _asymmetric(known: _Known) -> _Shape:
    return _keys_and_values(known, "k_buffer v_buffer")


def _k_only(known: _Known) -> _Shape:
    parts = (known.per_head("k", known.pool.head_dim),)
    return known.shape(PoolKind.K_ONLY, parts, Sharding.HEADS, "k_buffer", drafts=False)


def _mla(known: _Known) -> _Shape:
    pool = known.pool
    if _layers_are_divided(pool):
        raise known.reject("divides its layers among context-parallel ranks")
    parts = (Part("kv", known.dtype(pool.dtype), (int(pool.kv_cache_dim),)),)
    # A release without the attribute has no decode context parallelism.
    dcp = int(getattr(pool, "dcp_size", 1))
    sharding = Sharding.DCP if dcp > 1 else Sharding.REPLICATED
    shape = known.shape(PoolKind.MLA, parts, sharding, "kv_buffer")
    return attrs.evolve(shape, page_slots=shape.page_slots * dcp)


def _layers_are_divided(pool: Any) -> bool:  # noqa: ANN401 - the engine's object
    """Return whether context-parallel ranks have layers of their own."""
    if hasattr(pool, "_layer_shard_enabled"):
        return bool(pool._layer_shard_enabled)  # noqa: SLF001 - SGLang has no other name for it
    # SGLang 0.5.22 and before ask the device pool each time.
    return bool(getattr(pool.device_pool, "layer_shard_enabled", False))


def _dsa_indexer(known: _Known) -> _Shape:
    pool = known.pool
    if pool.device_pool.layer_shard_enabled:
        raise known.reject("divides its layers among context-parallel ranks")
    row = (int(pool.indexer_page_stride_size),)
    return known.shape(
        PoolKind.INDEXER,
        (Part("indexer", known.dtype(pool.indexer_dtype), row, Per.PAGE),),
        Sharding.REPLICATED,
        "index_k_with_scale_buffer",
        pages=int(pool.indexer_page_num),
    )


def _mamba(known: _Known) -> _Shape:
    pool = known.pool
    if len(pool.slot_state_buffers):
        raise known.reject("keeps side states beside its slots")
    ranks = known.place.shard.tp_size

    def part(name: str, dtype: object, shape: Sequence[int]) -> Part:
        # Every rank has a state of its own; which axis the model divides does
        # not change the bytes, so it is described as the first one.
        whole = (int(shape[0]) * ranks, *map(int, shape[1:])) if shape else (ranks,)
        return Part(name, known.dtype(dtype), whole, Per.PAGE, shard_axis=0)

    states = [("temporal", pool.temporal_dtype, pool.temporal_state_shape)]
    states += [
        (f"conv_{n}", pool.conv_dtype, shape)
        for n, shape in enumerate(pool.conv_state_shapes)
    ]
    buffers = (pool.temporal_buffer, *pool.conv_buffer)
    # Linear attention with convolutions alone has an empty temporal state.
    kept = [n for n, (_, _, shape) in enumerate(states) if 0 not in shape]
    return _Shape(
        kind=PoolKind.MAMBA,
        parts=tuple(part(*states[n]) for n in kept),
        layers=int(pool.num_mamba_layers),
        sharding=Sharding.RANK,
        layout=known.layout(),
        memory=tuple(buffers[n] for n in kept),
        pages=int(pool.size),
        page_slots=int(pool.page_size),
        packed_drafts=len(pool.mtp_draft_buffer_infos),
    )


def _compressed(known: _Known) -> _Shape:
    return known.whole_pages(int(known.pool.item_bytes))


def _ring_state(known: _Known) -> _Shape:
    return known.whole_pages(int(known.pool.state_page_bytes))


def _qsa_indexer(known: _Known) -> _Shape:
    pool = known.pool
    own_layers = len(pool.device_pool.qsa_compressed_k_buffer_pool)
    return attrs.evolve(
        known.whole_pages(int(pool.item_bytes)),
        kind=PoolKind.INDEXER,
        packed_drafts=int(pool.layer_num) - own_layers,
    )


def _nvfp4(known: _Known) -> _Shape:
    pool = known.pool
    ranks = known.place.shard.tp_size
    row = Part("row", DType.U8, (ranks, int(pool.row_bytes)), Per.PAGE, shard_axis=0)
    return known.shape(PoolKind.COMPRESSED, (row,), Sharding.RANK, "kv_buffer")


def _logical(known: _Known) -> _Shape:
    return _Shape(
        kind=PoolKind.LOGICAL,
        parts=(),
        layers=0,
        sharding=Sharding.REPLICATED,
        layout=Layout.PAGE_OBJECT,
        memory=(),
        pages=int(known.pool.size) // int(known.pool.page_size),
        page_slots=int(known.pool.page_size),
    )


_DTYPES = {
    "float32": DType.F32,
    "float16": DType.F16,
    "bfloat16": DType.BF16,
    "float8_e4m3fn": DType.FP8_E4M3,
    "float8_e5m2": DType.FP8_E5M2,
    "int32": DType.I32,
    "int8": DType.I8,
    "uint8": DType.U8,
}

LAYOUTS = {
    "layer_first": Layout.LAYER_FIRST,
    "page_first": Layout.PAGE_FIRST,
    "page_first_direct": Layout.PAGE_FIRST_DIRECT,
    "page_head": Layout.PAGE_HEAD,
}
"""Layouts of SGLang that can be described."""

_POOLS = "sglang.srt.mem_cache.pool_host"
_MORE_POOLS = "sglang.srt.mem_cache.memory_pool_host"

KNOWN: dict[str, Callable[[_Known], _Shape]] = {
    f"{_POOLS}.mha.MHATokenToKVPoolHost": _mha,
    f"{_POOLS}.mha.AsymmetricMHATokenToKVPoolHost": _asymmetric,
    f"{_POOLS}.mha.MHATokenToKOnlyPoolHost": _k_only,
    f"{_POOLS}.mla.MLATokenToKVPoolHost": _mla,
    f"{_POOLS}.dsa.DSAIndexerPoolHost": _dsa_indexer,
    f"{_POOLS}.mamba.MambaPoolHost": _mamba,
    f"{_POOLS}.qsa.QSAIndexerPoolHost": _qsa_indexer,
    f"{_POOLS}.minimax_m3_nvfp4.MiniMaxM3Nvfp4IndexKPoolHost": _nvfp4,
    f"{_POOLS}.minimax_m3_nvfp4.MiniMaxM3Nvfp4MainKVPoolHost": _nvfp4,
    f"{_MORE_POOLS}.DeepSeekV4PagedHostPool": _compressed,
    f"{_MORE_POOLS}.DeepSeekV4StateHostPool": _ring_state,
    f"{_MORE_POOLS}.LogicalHostPool": _logical,
}
"""Classes of SGLang's host pools, and what describes one of each."""

_BY_HEAD = (_mha, _asymmetric, _k_only)

REJECTED = {
    f"{_POOLS}.mha_mxfp8.MHATokenToKVPoolMXFP8Host": (
        "whose scales lie outside of its pages"
    ),
    f"{_POOLS}.page_interleave.PageInterleaveHostPool": (
        "which divides pages among ranks"
    ),
    f"{_POOLS}.unified.UnifiedPageEnvelopeHostPool": (
        "whose pages move in memory while it is in use"
    ),
}
"""Classes that cannot be described, and why."""

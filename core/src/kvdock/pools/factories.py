"""Constructors of the pools that common families of models have.

Each one turns the dimensions that a model's configuration names into a
`PoolSpec`, so that the bytes of a page follow from one formula in one place.
Whatever else a pool says (draft, required, layout ...) is passed through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TypedDict, Unpack

from kvdock.errors import PoolError

# Some only for types, which the descriptions' reader resolves at run time.
from kvdock.pools.enums import (
    ContextSplit,
    DType,
    HitPolicy,
    Layout,
    Per,
    PoolKind,
    Sharding,
)
from kvdock.pools.part import Part
from kvdock.pools.spec import PoolSpec
from kvdock.validators import as_int, is_int

_State = tuple[str, DType, tuple[int, ...]]
"""Name, element type and shape over all ranks, divided along the first axis."""


class PoolOptions(TypedDict, total=False):
    """Options that every constructor passes on unchanged."""

    anchor: bool
    draft: bool
    required: bool
    indices_from: str | None
    context: ContextSplit
    interleave_tokens: int
    layout: Layout
    head_group: int


class PolicyOptions(PoolOptions, total=False):
    """The same, where the family does not settle which pages a prefix needs."""

    hit_policy: HitPolicy
    window_pages: int
    block_pages: int
    group_pages: int


class _Heads(TypedDict):
    heads: int
    head_dim: int


class AttentionOptions(_Heads, PoolOptions, total=False):
    """The dimensions of `mha` as keywords."""

    v_head_dim: int
    dtype: DType


def window_pages(window_tokens: int, page_tokens: int) -> int:
    """Return how many trailing pages hold a window of tokens.

    Source: SGLang 0.5.23, `ceil(window / page)`.
    """
    if window_tokens < 1:
        raise PoolError(f"a window of {window_tokens} tokens holds nothing")
    return -(-window_tokens // page_tokens)


def check_kind(name: str, kind: PoolKind, *known: PoolKind) -> None:
    """Refuse a kind whose pools have other dimensions."""
    if kind not in known:
        raise PoolError(
            f"pool {name!r}: its dimensions make no pool of kind {kind}",
            fix=f"They make {' or '.join(known)}.",
        )


def check_counts(name: str, **counts: int) -> None:
    """Refuse dimensions that divide or fill nothing."""
    for field, count in counts.items():
        if not is_int(as_int(count)) or count < 1:
            raise PoolError(f"pool {name!r}: {field} must be at least 1, not {count!r}")


def with_window(
    name: str, kind: PoolKind, window: int, page_tokens: int, options: PolicyOptions
) -> PolicyOptions:
    """Settle which pages a pool needs, whose layers may have a window."""
    if window:
        for field in ("hit_policy", "window_pages"):
            if field in options:
                raise PoolError(
                    f"pool {name!r}: window={window} and {field} say the same thing",
                    fix="Give one of them.",
                )
        trailing: PolicyOptions = {
            "hit_policy": HitPolicy.TRAILING_PAGES,
            "window_pages": window_pages(window, page_tokens),
        }
        return options | trailing
    if kind is PoolKind.SWA and not options.get("window_pages"):
        raise PoolError(
            f"pool {name!r} of kind {kind} has no window",
            fix="Give `window` in tokens.",
        )
    return options


def mha(  # noqa: PLR0913 - the dimensions of attention
    name: str,
    *,
    layers: Iterable[int],
    page_tokens: int,
    heads: int,
    head_dim: int,
    v_head_dim: int = 0,
    dtype: DType = DType.BF16,
    window: int = 0,
    kind: PoolKind = PoolKind.MHA,
    **options: Unpack[PolicyOptions],
) -> PoolSpec:
    """Describe keys and values per head (MHA, GQA, MQA).

    Args:
        name: The pool's name.
        layers: Global numbers of its layers.
        page_tokens: Tokens of a page.
        heads: KV heads of the whole model.
        head_dim: Width of a key.
        v_head_dim: Width of a value, if it is another one.
        dtype: Element type of both.
        window: Tokens that the layers look back, or 0 for all.
        kind: MHA, or SWA for layers with a window.
        options: Any further field of `PoolSpec`.
    """
    kind = PoolKind(kind)
    check_kind(name, kind, PoolKind.MHA, PoolKind.SWA)
    return PoolSpec(
        name=name,
        kind=kind,
        parts=(
            Part("k", dtype, (heads, head_dim), shard_axis=0),
            Part("v", dtype, (heads, v_head_dim or head_dim), shard_axis=0),
        ),
        layers=layers,
        page_tokens=page_tokens,
        **with_window(name, kind, window, page_tokens, options),
    )


def k_only(
    name: str,
    *,
    layers: Iterable[int],
    page_tokens: int,
    heads: int,
    head_dim: int,
    dtype: DType = DType.BF16,
    **options: Unpack[PolicyOptions],
) -> PoolSpec:
    """Describe keys without values, as some sparse indexers keep them."""
    return PoolSpec(
        name=name,
        kind=PoolKind.K_ONLY,
        parts=(Part("k", dtype, (heads, head_dim), shard_axis=0),),
        layers=layers,
        page_tokens=page_tokens,
        **options,
    )


def mla(  # noqa: PLR0913 - the dimensions of attention
    name: str,
    *,
    layers: Iterable[int],
    page_tokens: int,
    latent: int,
    rope: int,
    dtype: DType = DType.BF16,
    scale_block: int = 0,
    window: int = 0,
    kind: PoolKind = PoolKind.MLA,
    **options: Unpack[PolicyOptions],
) -> PoolSpec:
    """Describe one latent row per token, shared by all heads.

    Args:
        name: The pool's name.
        layers: Global numbers of its layers.
        page_tokens: Tokens of a page.
        latent: Width of the latent, `kv_lora_rank`.
        rope: Width of the positional part, `qk_rope_head_dim`.
        dtype: Element type of the latent.
        scale_block: Elements of the latent that share an f32 scale in the row;
            the positional part then stays bf16. 0 for a plain row.
        window: Tokens that the layers look back, or 0 for all.
        kind: MLA, or SWA for layers with a window.
        options: Any further field of `PoolSpec`.
    """
    kind = PoolKind(kind)
    check_kind(name, kind, PoolKind.MLA, PoolKind.SWA)
    part = Part("kv", dtype, (latent + rope,))
    if scale_block:
        check_counts(name, scale_block=scale_block)
        if latent % scale_block:
            raise PoolError(
                f"pool {name!r}: blocks of {scale_block} do not divide {latent}"
            )
        row = latent * dtype.bits // 8 + latent // scale_block * 4 + rope * 2
        part = Part(
            "kv",
            DType.U8,
            (row,),
            encoding=f"{dtype} {latent}, f32 scale per {scale_block}, bf16 {rope}",
        )
    return PoolSpec(
        name=name,
        kind=kind,
        parts=(part,),
        layers=layers,
        page_tokens=page_tokens,
        **with_window(name, kind, window, page_tokens, options),
    )


def indexer(
    name: str,
    *,
    layers: Iterable[int],
    page_tokens: int,
    head_dim: int,
    dtype: DType = DType.FP8_E4M3,
    scale_block: int = 128,
    **options: Unpack[PolicyOptions],
) -> PoolSpec:
    """Describe quantised keys of a sparse indexer with their scales.

    A page keeps its keys first and then its scales, so it is one piece that
    cannot be cut between tokens.

    Args:
        name: The pool's name.
        layers: Global numbers of its layers.
        page_tokens: Tokens of a page.
        head_dim: Width of a key.
        dtype: Element type of a key.
        scale_block: Elements of a key that share an f32 scale; a narrower key
            has one scale.
        options: Any further field of `PoolSpec`.
    """
    check_counts(name, head_dim=head_dim, scale_block=scale_block)
    # A row has a scale, however narrow it is.
    block = min(scale_block, head_dim)
    if head_dim % block:
        raise PoolError(
            f"pool {name!r}: blocks of {scale_block} do not divide {head_dim}",
            fix="Give `scale_block`, the elements that share a scale.",
        )
    row = head_dim * dtype.bits // 8 + 4 * (head_dim // block)
    return PoolSpec(
        name=name,
        kind=PoolKind.INDEXER,
        parts=(
            Part(
                "indexer",
                DType.U8,
                (page_tokens * row,),
                Per.PAGE,
                encoding=f"{dtype} {head_dim}, then f32 scale per {block}",
            ),
        ),
        layers=layers,
        page_tokens=page_tokens,
        **options,
    )


def mamba(  # noqa: PLR0913 - the dimensions of a recurrent state
    name: str,
    *,
    layers: Iterable[int],
    page_tokens: int,
    conv: Sequence[Sequence[int]],
    temporal: Sequence[int] = (),
    conv_dtype: DType = DType.BF16,
    temporal_dtype: DType = DType.F32,
    heads: int = 0,
    conv_channels: Sequence[Sequence[int]] = (),
    **options: Unpack[PoolOptions],
) -> PoolSpec:
    """Describe a recurrent state: one temporal part and any conv parts.

    Without `heads` each rank keeps a state of its own, which equal TP sizes
    share. With it the state is divided into heads, as attention is, and other
    TP sizes can share it.

    Args:
        name: The pool's name.
        layers: Global numbers of its layers.
        page_tokens: Tokens between two checkpoints of the state.
        conv: Shape of each conv state over all ranks, divided along its
            first axis.
        temporal: Shape of the temporal state over all ranks, divided along
            its first axis; empty for models without one.
        conv_dtype: Element type of the conv states.
        temporal_dtype: Element type of the temporal state.
        heads: Into how many equal runs ranks divide the first axis of every
            state; the most that divides all of them. 0 for none.
        conv_channels: For each conv state the channels of its fused
            projections (query, key, value) in their order: a rank holds its
            run of each. Empty where nothing is fused.
        options: Any further field of `PoolSpec`.

    Raises:
        PoolError: If heads do not divide the states, or the channels of a
            conv state do not add up.
    """
    states = [("temporal", temporal_dtype, tuple(temporal))] if temporal else []
    states += [(f"conv_{n}", conv_dtype, tuple(c)) for n, c in enumerate(conv)]
    return PoolSpec(
        name=name,
        kind=PoolKind.MAMBA,
        parts=_state_parts(name, states, heads, conv_channels),
        layers=layers,
        page_tokens=page_tokens,
        sharding=Sharding.HEADS if heads else Sharding.RANK,
        hit_policy=HitPolicy.TRAILING_PAGES,
        window_pages=1,
        **options,
    )


def _state_parts(
    pool: str,
    states: Sequence[_State],
    heads: int = 0,
    conv_channels: Sequence[Sequence[int]] = (),
) -> list[Part]:
    """Return the parts of a recurrent state.

    Args:
        pool: The pool's name, for messages.
        states: The states; those named `conv_0`, `conv_1` ... are convolutions.
        heads: Into how many equal runs ranks divide the first axis of each
            state; 0 where each rank keeps one state.
        conv_channels: For each convolution the channels of its fused
            projections, in order; a rank holds its run of each.

    Raises:
        PoolError: If heads do not divide a state, or the channels of a
            convolution do not add up.
    """
    if not heads:
        return [Part(*state, Per.PAGE, 0) for state in states]
    fused = {f"conv_{n}": channels for n, channels in enumerate(conv_channels)}
    parts = []
    for name, dtype, (width, *rest) in states:
        channels = fused.get(name, (width,))
        if sum(channels) != width:
            raise PoolError(
                f"pool {pool!r}: channels {list(channels)} of {name} do not add up to "
                f"{width}"
            )
        names = [name]
        if len(channels) > 1:
            names = [f"{name}_{n}" for n in range(len(channels))]
        for part, count in zip(names, channels, strict=True):
            if count % heads:
                raise PoolError(
                    f"pool {pool!r}: {heads} heads do not divide the {count} rows of "
                    f"{part}"
                )
            shape = (heads, count // heads, *rest)
            parts.append(Part(part, dtype, shape, Per.PAGE, 0))
    return parts


def swa(
    name: str,
    *,
    layers: Iterable[int],
    page_tokens: int,
    window: int,
    **dimensions: Unpack[AttentionOptions],
) -> PoolSpec:
    """Describe KV of layers that look back a window of tokens.

    Args:
        name: The pool's name.
        layers: Global numbers of its layers.
        page_tokens: Tokens of a page.
        window: The window in tokens.
        dimensions: As for `mha`.
    """
    return mha(
        name,
        layers=layers,
        page_tokens=page_tokens,
        kind=PoolKind.SWA,
        window=window,
        **dimensions,
    )


def compressed(  # noqa: PLR0913 - the dimensions of compressed KV
    name: str,
    *,
    layers: Iterable[int],
    page_tokens: int,
    row_bytes: int,
    ratio: int = 1,
    pad_to: int = 1,
    window: int = 0,
    encoding: str = "",
    kind: PoolKind = PoolKind.COMPRESSED,
    **options: Unpack[PolicyOptions],
) -> PoolSpec:
    """Describe pages of opaque rows, one for every `ratio` tokens, padded.

    Args:
        name: The pool's name.
        layers: Global numbers of its layers.
        page_tokens: Tokens of a page.
        row_bytes: Bytes of one row.
        ratio: Tokens that one row stands for.
        pad_to: Multiple to which the bytes of a page are padded.
        window: Tokens that the layers look back, or 0 for all.
        encoding: What a row is made of.
        kind: COMPRESSED, or SWA or INDEXER for what else is kept like this.
        options: Any further field of `PoolSpec`.
    """
    kind = PoolKind(kind)
    check_kind(name, kind, PoolKind.COMPRESSED, PoolKind.SWA, PoolKind.INDEXER)
    check_counts(name, row_bytes=row_bytes, ratio=ratio, pad_to=pad_to)
    if page_tokens % ratio:
        raise PoolError(
            f"pool {name!r}: a page of {page_tokens} tokens is not a whole number of "
            f"rows for {ratio} tokens each"
        )
    nbytes = page_tokens // ratio * row_bytes
    padded = -(-nbytes // pad_to) * pad_to
    words = [encoding, f"{row_bytes} B for {ratio} tokens", f"padded to {pad_to}"]
    return PoolSpec(
        name=name,
        kind=kind,
        parts=(
            Part(
                "rows",
                DType.U8,
                (padded,),
                Per.PAGE,
                encoding=", ".join(filter(None, words)),
            ),
        ),
        layers=layers,
        page_tokens=page_tokens,
        **with_window(name, kind, window, page_tokens, options),
    )


def ring_state(
    name: str,
    *,
    layers: Iterable[int],
    page_tokens: int,
    ring: int,
    slot: int,
    window: int,
    dtype: DType = DType.F32,
    **options: Unpack[PoolOptions],
) -> PoolSpec:
    """Describe the ring of pending rows of a compressor, one ring per page.

    Args:
        name: The pool's name.
        layers: Global numbers of its layers.
        page_tokens: Tokens of a page.
        ring: Slots of the ring.
        slot: Elements of a slot.
        window: Tokens of the window whose pages carry the ring.
        dtype: Element type of a slot.
        options: Any further field of `PoolSpec`.
    """
    return PoolSpec(
        name=name,
        kind=PoolKind.COMPRESSED,
        parts=(Part("state", dtype, (ring, slot), Per.PAGE),),
        layers=layers,
        page_tokens=page_tokens,
        hit_policy=HitPolicy.TRAILING_PAGES,
        window_pages=window_pages(window, page_tokens),
        **options,
    )


def logical(
    name: str,
    *,
    page_tokens: int,
    layers: Iterable[int] = (),
    **options: Unpack[PoolOptions],
) -> PoolSpec:
    """Describe an anchor that only counts pages and holds no bytes."""
    return PoolSpec(
        name=name,
        kind=PoolKind.LOGICAL,
        parts=(),
        layers=layers,
        page_tokens=page_tokens,
        **options,
    )


FAMILIES: Mapping[str, Callable[..., PoolSpec]] = MappingProxyType(
    {
        one.__name__: one
        for one in (
            mha,
            k_only,
            mla,
            indexer,
            mamba,
            swa,
            compressed,
            ring_state,
            logical,
        )
    }
)
"""Constructors by the name that a model description calls them by."""

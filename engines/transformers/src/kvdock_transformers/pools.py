"""The pools of a transformers cache.

A cache is described by looking at one: layer classes and tensor shapes say
more than configurations do, whose fields differ from model to model. One token
fed through the model makes a cache that can be described.

Source: transformers 5.19.0, `cache_utils.DynamicCache` and its layer classes.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import attrs
import torch
from transformers import Cache

from kvdock import DType, HitPolicy, PoolKind, PoolSpec, Sharding
from kvdock.pools import Part, Per, PoolName
from kvdock_transformers.errors import UnsupportedCache

T = TypeVar("T")

CacheLayer = Any
"""A layer of a cache; its classes share no typed interface."""

DTYPES = {
    torch.float32: DType.F32,
    torch.float16: DType.F16,
    torch.bfloat16: DType.BF16,
}


@attrs.frozen
class CachePools:
    """The pools of one model's cache.

    Args:
        attention: Pool of the layers that keep every token.
        sliding: Pool of the layers that keep a window, or None.
        state: Pool of recurrent states, or None.
        window_tokens: Tokens that a sliding layer keeps; 0 without one.
    """

    attention: PoolSpec
    sliding: PoolSpec | None = None
    state: PoolSpec | None = None
    window_tokens: int = 0

    @property
    def all(self) -> tuple[PoolSpec, ...]:
        """All pools that there are, the attention pool first."""
        pools = (self.attention, self.sliding, self.state)
        return tuple(pool for pool in pools if pool is not None)


def describe(
    cache: Cache, page_tokens: int, *, draft: bool = False, latent: bool = False
) -> CachePools:
    """Describe the pools of a cache that has seen at least one token.

    Args:
        cache: A `DynamicCache` made with the model's configuration.
        page_tokens: Tokens per page.
        draft: Whether the cache belongs to a draft model; its pools are then
            optional and follow the target's anchor.
        latent: Whether attention layers cache a latent row and its rotary key
            (MLA) in the places of keys and values.

    Raises:
        UnsupportedCache: If a layer is of a class without a known pool, or
            the layers of one pool differ in shape.
    """
    layers: Sequence[CacheLayer] = cache.layers
    known = [_keeps_tokens(layer) or _keeps_state(layer) for layer in layers]
    if not all(known):
        strange = layers[known.index(False)]
        message = f"no pool is known for the cache layer {type(strange).__name__}"
        raise UnsupportedCache(message)
    tokens = [n for n, layer in enumerate(layers) if _keeps_tokens(layer)]
    full = [n for n in tokens if not _slides(layers[n])]
    slides = [n for n in tokens if _slides(layers[n])]
    recurrent = [n for n, layer in enumerate(layers) if _keeps_state(layer)]
    if not full:
        message = "no layer keeps every token, so no pool can be the anchor"
        raise UnsupportedCache(message)
    usual: dict[str, Any] = {
        "page_tokens": page_tokens,
        "draft": draft,
        "required": not draft,
    }
    sliding = state = None
    window_tokens = 0
    if slides:
        windows = (int(layers[n].sliding_window) - 1 for n in slides)
        window_tokens = _same("the window", windows)
        sliding = PoolSpec(
            name=PoolName.DRAFT_SWA if draft else PoolName.SWA,
            kind=PoolKind.SWA,
            parts=_rows(("k", "v"), layers, slides, latent=False),
            layers=slides,
            hit_policy=HitPolicy.TRAILING_PAGES,
            window_pages=-(-window_tokens // page_tokens),
            **usual,
        )
    if recurrent:
        state = PoolSpec(
            name="draft_mamba" if draft else PoolName.MAMBA,
            kind=PoolKind.MAMBA,
            parts=_states(layers, recurrent),
            layers=recurrent,
            hit_policy=HitPolicy.TRAILING_PAGES,
            window_pages=1,
            sharding=Sharding.RANK,
            **usual,
        )
    names = ("kv", "rope") if latent else ("k", "v")
    attention = PoolSpec(
        name=PoolName.DRAFT if draft else PoolName.KV,
        kind=PoolKind.MLA if latent else PoolKind.MHA,
        parts=_rows(names, layers, full, latent=latent),
        layers=full,
        anchor=not draft,
        indices_from=PoolName.KV if draft else None,
        **usual,
    )
    return CachePools(attention, sliding, state, window_tokens)


def _keeps_tokens(layer: CacheLayer) -> bool:
    return getattr(layer, "keys", None) is not None


def _keeps_state(layer: CacheLayer) -> bool:
    return any(
        state is not None for state in getattr(layer, "recurrent_states", {}).values()
    )


def _slides(layer: CacheLayer) -> bool:
    return bool(getattr(layer, "is_sliding", False))


def _same(what: str, values: Iterable[T]) -> T:
    found = list(dict.fromkeys(values))
    if len(found) > 1:
        message = f"{what} differs between layers of one pool: {found}"
        raise UnsupportedCache(message)
    return found[0]


def _dtype(tensor: torch.Tensor) -> DType:
    if tensor.dtype not in DTYPES:
        message = f"no stored type is known for {tensor.dtype}"
        raise UnsupportedCache(message)
    return DTYPES[tensor.dtype]


def _rows(
    names: tuple[str, str],
    layers: Sequence[CacheLayer],
    numbers: Sequence[int],
    *,
    latent: bool,
) -> tuple[Part, ...]:
    """Describe what attention layers keep per token.

    The tensors are (1, heads, tokens, width); a latent row has no heads.
    """
    parts = []
    for name, kept in zip(names, ("keys", "values"), strict=True):
        tensors = [getattr(layers[n], kept) for n in numbers]
        dtype, heads, width = _same(
            f"the shape of {name}",
            ((_dtype(tensor), tensor.shape[1], tensor.shape[3]) for tensor in tensors),
        )
        shape = (width,) if latent else (heads, width)
        parts.append(Part(name, dtype, shape, shard_axis=None if latent else 0))
    return tuple(parts)


def _states(layers: Sequence[CacheLayer], numbers: Sequence[int]) -> tuple[Part, ...]:
    """Describe what recurrent layers keep at a page boundary."""
    parts = []
    for index, (temporal, conv) in enumerate(state_part_names(layers[numbers[0]])):
        for name, kept in ((temporal, "recurrent_states"), (conv, "conv_states")):
            tensors = [getattr(layers[n], kept)[index] for n in numbers]
            dtype, shape = _same(
                f"the shape of {name}",
                ((_dtype(tensor), tuple(tensor.shape[1:])) for tensor in tensors),
            )
            parts.append(Part(name, dtype, shape, per=Per.PAGE, shard_axis=0))
    return tuple(parts)


def state_part_names(layer: CacheLayer) -> list[tuple[str, str]]:
    """Name the parts of each state of a recurrent layer: temporal and conv."""
    count = layer.number_of_states
    return [
        ("temporal" if count == 1 else f"temporal_{n}", f"conv_{n}")
        for n in range(count)
    ]

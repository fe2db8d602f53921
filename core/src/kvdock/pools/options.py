"""What the constructors of pools have in common: options and their checks.

The types are read at run time as well: a model description is held against
them field by field.
"""

from __future__ import annotations

from typing import TypedDict

from kvdock.errors import PoolError
from kvdock.pools.validators import (as_whole, is_whole)
from kvdock.pools.enums import (ContextSplit, DType, HitPolicy, Layout, PoolKind)


class PoolOptions(TypedDict, total=False):
    """What every constructor passes on unchanged."""

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
        if not is_whole(as_whole(count)) or count < 1:
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

"""Pools of every kind that a request has, and peers that are closed after a test."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

from kvdock.pools.enums import DType, HitPolicy, Layout, Per, PoolKind
from kvdock.pools.part import Part
from kvdock.pools.spec import PoolSpec

if TYPE_CHECKING:
    from peers import Peer

HEADS = 4


def attention(
    page_tokens: int = 4, layout: Layout = Layout.PAGE_OBJECT, **more: Any
) -> PoolSpec:
    given: dict[str, Any] = {
        "name": "kv",
        "kind": PoolKind.MHA,
        "parts": [
            Part("k", DType.BF16, (HEADS, 9), shard_axis=0),
            Part("v", DType.BF16, (HEADS, 5), shard_axis=0),
        ],
        "layers": range(3),
        "page_tokens": page_tokens,
        "layout": layout,
        "anchor": True,
    }
    return PoolSpec(**{**given, **more})


def draft(page_tokens: int = 4, layout: Layout = Layout.PAGE_OBJECT) -> PoolSpec:
    return attention(
        page_tokens, layout, name="draft", anchor=False, draft=True, required=False,
        indices_from="kv", layers=range(1),
    )  # fmt: skip


def latent(page_tokens: int = 4, layout: Layout = Layout.PAGE_OBJECT) -> PoolSpec:
    parts = [Part("kv", DType.U8, (37,))]
    return attention(page_tokens, layout, kind=PoolKind.MLA, parts=parts)


def states(page_tokens: int = 4, layout: Layout = Layout.PAGE_OBJECT) -> PoolSpec:
    parts = [
        Part("temporal", DType.F32, (HEADS, 3), Per.PAGE, 0),
        Part("conv_0", DType.BF16, (HEADS, 5), Per.PAGE, 0),
    ]
    return attention(
        page_tokens, layout, name="mamba", kind=PoolKind.MAMBA, parts=parts,
        anchor=False, hit_policy=HitPolicy.TRAILING_PAGES, window_pages=1,
    )  # fmt: skip


def window(page_tokens: int = 4, layout: Layout = Layout.PAGE_OBJECT) -> PoolSpec:
    return attention(
        page_tokens, layout, name="swa", kind=PoolKind.SWA, anchor=False,
        hit_policy=HitPolicy.TRAILING_PAGES, window_pages=8 // page_tokens,
    )  # fmt: skip


@contextmanager
def peers(*built: Peer) -> Iterator[Sequence[Peer]]:
    with ExitStack() as stack:
        for one in built:
            stack.callback(one.close)
        yield built

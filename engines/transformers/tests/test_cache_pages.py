"""Caches come apart into pages and go together again, bit for bit."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import transformers

from kvdock import HitPolicy, PoolKind
from kvdock_transformers.errors import UnsupportedCache
from kvdock_transformers.paged import PagedModel
from kvdock_transformers.pools import describe
from model_demo import models
from model_demo.engine import flip_signs
from model_demo.families import WORKLOADS, Family, Scale
from model_demo.generation import generate

WORK = WORKLOADS[Scale.TINY]
QWEN3_NEXT = "qwen3_next"
"""Linear attention in layers of its own, which no demo model has."""
KINDS = [*Family, QWEN3_NEXT]


@cache
def model_of(kind: str) -> Any:
    if kind != QWEN3_NEXT:
        return models.build(Family(kind), Scale.TINY).target
    torch.manual_seed(1)
    config = transformers.Qwen3NextConfig(
        vocab_size=models.VOCAB_TOKENS,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        layer_types=["linear_attention", "full_attention"] * 2,
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        linear_conv_kernel_dim=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )
    model: Any = transformers.Qwen3NextForCausalLM
    return model(config).eval()


def paged(kind: str) -> PagedModel:
    prompt = models.prompt_token_ids(Family.MHA, WORK.prompt_tokens)
    return PagedModel(model_of(kind), prompt, WORK.page_tokens, WORK.chunk_tokens)


def prefilled(kind: str) -> PagedModel:
    made = paged(kind)
    made.prefill(WORK.prefix_tokens, WORK.chunk_tokens, keep=True)
    return made


def logits_of(model: PagedModel) -> torch.Tensor:
    model.prefill(WORK.prefix_tokens, WORK.chunk_tokens, keep=False)
    return generate(model.running, model.prompt, 4).logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pages", [WORK.prefix_pages, WORK.prefix_pages // 2, 4])
def test_a_rebuilt_cache_goes_on_bit_for_bit(kind: str, pages: int) -> None:
    model = prefilled(kind)
    warm = logits_of(model)
    model.rebuild(pages)
    assert model.running.tokens == pages * WORK.page_tokens
    assert torch.equal(logits_of(model), warm)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_fit_into_another_model_instance(kind: str) -> None:
    """As in a new process: nothing but host memory is carried over."""
    model, other = prefilled(kind), paged(kind)
    for name, host in model.hosts.items():
        other.hosts[name].buffer.copy_(host.buffer)
    other.rebuild(WORK.prefix_pages)
    assert torch.equal(logits_of(other), logits_of(model))


@pytest.mark.parametrize("kind", KINDS)
def test_altering_any_pool_changes_the_logits(kind: str) -> None:
    model = prefilled(kind)
    warm = logits_of(model)
    for pool in model.pools.all:
        flip_signs(model, pool.name)
        model.rebuild(WORK.prefix_pages)
        assert (logits_of(model) - warm).abs().max() > 1e-3, pool.name
        flip_signs(model, pool.name)


def test_only_the_pages_that_a_prefix_needs_are_read() -> None:
    model = prefilled(Family.SWA)
    warm = logits_of(model)
    swa = model.pools.sliding
    assert swa is not None
    needed = model.needed(swa, WORK.prefix_pages)
    assert len(needed) == swa.window_pages < WORK.prefix_pages
    model.hosts[swa.name].buffer[: needed.start] = 0
    model.rebuild(WORK.prefix_pages)
    assert torch.equal(logits_of(model), warm)


@pytest.mark.parametrize("kind", [Family.MAMBA, QWEN3_NEXT])
@pytest.mark.parametrize("stop", [WORK.page_tokens, WORK.page_tokens // 2])
def test_a_state_is_kept_where_a_chunk_ends_and_nowhere_else(
    kind: str, stop: int
) -> None:
    """A prompt ends where it likes; a state is that of one place only."""
    whole = prefilled(kind)
    prompt = whole.prompt[: 2 * WORK.chunk_tokens + stop]
    model = PagedModel(model_of(kind), prompt, WORK.page_tokens, WORK.chunk_tokens)
    model.prefill(len(prompt), WORK.page_tokens, keep=True)
    state = model.pools.state
    assert state is not None
    chunk_pages = WORK.chunk_tokens // WORK.page_tokens
    assert model.kept[state.name] == [chunk_pages - 1, 2 * chunk_pages - 1]
    model.rebuild(2 * chunk_pages)
    row = generate(model.running, whole.prompt, 1).logits
    whole.rebuild(2 * chunk_pages)
    wanted = generate(whole.running, whole.prompt, 1).logits
    assert torch.allclose(row, wanted, atol=2e-4)


def test_chunks_that_end_within_a_page_are_refused() -> None:
    with pytest.raises(UnsupportedCache, match="Choose a multiple"):
        PagedModel(model_of(Family.MAMBA), range(64), page_tokens=8, chunk_tokens=12)


def test_rebuilding_nothing_is_an_empty_cache() -> None:
    model = prefilled(Family.MAMBA)
    model.rebuild(0)
    assert model.running.tokens == 0


@pytest.mark.parametrize(
    ("kind", "pools"),
    [
        (Family.MHA, {"kv": PoolKind.MHA}),
        (Family.MLA, {"kv": PoolKind.MLA}),
        (Family.SWA, {"kv": PoolKind.MHA, "swa": PoolKind.SWA}),
        (Family.MAMBA, {"kv": PoolKind.MHA, "mamba": PoolKind.MAMBA}),
        (QWEN3_NEXT, {"kv": PoolKind.MHA, "mamba": PoolKind.MAMBA}),
    ],
)
def test_each_family_has_its_pools(kind: str, pools: dict[str, PoolKind]) -> None:
    assert {pool.name: pool.kind for pool in paged(kind).pools.all} == pools


def test_a_latent_pool_stores_the_latent_and_not_expanded_heads() -> None:
    pool = paged(Family.MLA).pools.attention
    assert {part.name: part.shape for part in pool.parts} == {"kv": (32,), "rope": (8,)}


def test_a_state_pool_needs_only_the_last_page() -> None:
    pool = paged(Family.MAMBA).pools.state
    assert pool is not None
    assert (pool.hit_policy, pool.window_pages) == (HitPolicy.TRAILING_PAGES, 1)
    assert [part.name for part in pool.parts] == ["temporal", "conv_0"]


def test_a_draft_pool_is_optional_and_shares_the_anchors_indices() -> None:
    draft = models.build(Family.MHA, Scale.TINY).draft
    assert draft is not None
    prompt = models.prompt_token_ids(Family.MHA, WORK.prompt_tokens)
    pool = PagedModel(
        draft, prompt, WORK.page_tokens, WORK.chunk_tokens, draft=True
    ).pools.attention
    assert (pool.name, pool.required, pool.indices_from) == ("draft", False, "kv")


def test_a_window_that_has_moved_on_cannot_be_stored() -> None:
    model = paged(Family.SWA)
    with pytest.raises(UnsupportedCache, match="no longer holds"):
        model.prefill(WORK.prefix_tokens, WORK.prefix_tokens, keep=True)


def test_a_cache_that_has_seen_nothing_cannot_be_described() -> None:
    config = model_of(Family.MHA).config
    with pytest.raises(UnsupportedCache, match="no pool is known"):
        describe(transformers.DynamicCache(config=config), WORK.page_tokens)


def test_a_cache_without_full_attention_has_no_anchor() -> None:
    layer = transformers.cache_utils.DynamicSlidingWindowLayer(sliding_window=8)
    layer.update(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
    with pytest.raises(UnsupportedCache, match="anchor"):
        describe(transformers.Cache(layers=[layer]), WORK.page_tokens)


def test_layers_of_unlike_shape_are_no_pool() -> None:
    layers: list[Any] = [
        transformers.cache_utils.DynamicLayer()  # type: ignore[no-untyped-call]
        for _ in range(2)
    ]
    for heads, layer in enumerate(layers, 1):
        layer.update(torch.zeros(1, heads, 2, 4), torch.zeros(1, heads, 2, 4))
    with pytest.raises(UnsupportedCache, match="differs"):
        describe(transformers.Cache(layers=layers), WORK.page_tokens)

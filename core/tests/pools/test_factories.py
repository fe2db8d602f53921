"""Bytes of a page against the formulas that engines allocate by."""

from __future__ import annotations

from typing import Any

import pytest

from kvdock.errors import PoolError
from kvdock.pools import factories
from kvdock.pools.enums import DType, HitPolicy, Sharding
from kvdock.pools.factories import mamba, window_pages
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec

P, L, H, D = 64, 4, 8, 128
BASE: dict[str, Any] = {"layers": range(L), "page_tokens": P}


@pytest.mark.parametrize(
    ("pool", "wanted"),
    [
        (factories.mha("kv", heads=H, head_dim=D, **BASE), 2 * L * P * H * D * 2),
        (
            factories.mha("kv", heads=H, head_dim=192, v_head_dim=D, **BASE),
            L * P * H * (192 + D) * 2,
        ),
        (factories.k_only("indexer", heads=H, head_dim=D, **BASE), L * P * H * D * 2),
        (factories.mla("kv", latent=512, rope=64, **BASE), L * P * 576 * 2),
        (
            factories.mla(
                "kv",
                latent=512,
                rope=64,
                dtype=DType.FP8_E4M3,
                scale_block=128,
                **BASE,
            ),
            L * P * 656,
        ),
        (factories.indexer("indexer", head_dim=128, **BASE), L * P * 132),
        (
            factories.indexer("indexer", head_dim=128, layers=range(3), page_tokens=64),
            25344,
        ),
        (
            factories.indexer("indexer", head_dim=128, dtype=DType.FP4_E2M1, **BASE),
            L * P * (64 + 4),
        ),
        (
            factories.mamba(
                "mamba", temporal=(32, 128), conv=[(64, 3), (32, 3)], **BASE
            ),
            L * (32 * 128 * 4 + 96 * 3 * 2),
        ),
        (
            factories.swa("swa", heads=H, head_dim=D, window=100, **BASE),
            2 * L * P * H * D * 2,
        ),
        (
            factories.compressed(
                "c4",
                row_bytes=584,
                ratio=4,
                pad_to=576,
                layers=range(L),
                page_tokens=256,
            ),
            L * 65 * 576,
        ),
        (
            factories.ring_state("s", ring=8, slot=512, window=128, **BASE),
            L * 8 * 512 * 4,
        ),
        (factories.logical("kv", page_tokens=P), 0),
    ],
    ids=lambda value: value.name if isinstance(value, PoolSpec) else "",
)
def test_a_page_has_the_bytes_of_the_formula(pool: PoolSpec, wanted: int) -> None:
    assert pool.page_bytes(Shard()) == wanted


def test_a_window_keeps_as_many_pages_as_it_can_touch() -> None:
    assert [window_pages(w, 64) for w in (1, 64, 65, 4096)] == [1, 1, 2, 64]
    with pytest.raises(PoolError, match="window of 0 tokens"):
        window_pages(0, 64)


def test_states_are_trailing_and_of_each_rank() -> None:
    pool = factories.mamba("mamba", temporal=(8, 4), conv=[(8, 3)], **BASE)
    assert (pool.hit_policy, pool.window_pages) == (HitPolicy.TRAILING_PAGES, 1)
    assert pool.sharding is Sharding.RANK
    assert [part.name for part in pool.parts] == ["temporal", "conv_0"]


def test_rows_for_several_tokens_must_fill_a_page() -> None:
    with pytest.raises(PoolError, match="'c128': a page of 64 tokens"):
        factories.compressed("c128", row_bytes=584, ratio=128, **BASE)


def test_blocks_of_scales_must_divide_the_latent() -> None:
    with pytest.raises(PoolError, match="blocks of 100 do not divide 512"):
        factories.mla("kv", latent=512, rope=64, scale_block=100, **BASE)


@pytest.mark.parametrize(("head_dim", "scales"), [(64, 1), (96, 1), (128, 1), (256, 2)])
def test_every_row_of_an_indexer_has_a_scale(head_dim: int, scales: int) -> None:
    """A key narrower than a block of scales still has one."""
    pool = factories.indexer("indexer", head_dim=head_dim, **BASE)
    assert pool.page_bytes(Shard()) == L * P * (head_dim + 4 * scales)
    block = head_dim // scales
    assert pool == factories.indexer(
        "indexer", head_dim=head_dim, scale_block=block, **BASE
    )


@pytest.mark.parametrize("head_dim", [192, 130])
def test_blocks_of_scales_must_divide_the_keys_of_an_indexer(head_dim: int) -> None:
    with pytest.raises(PoolError, match="blocks of 128 do not divide") as raised:
        factories.indexer("indexer", head_dim=head_dim, **BASE)
    assert "scale_block" in raised.value.fix


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("compressed", {"row_bytes": 584, "ratio": 0}),
        ("compressed", {"row_bytes": 584, "pad_to": 0}),
        ("compressed", {"row_bytes": 0}),
        ("compressed", {"row_bytes": 584.0}),
        ("indexer", {"head_dim": 128, "scale_block": 0}),
        ("indexer", {"head_dim": 0}),
        ("mla", {"latent": 512, "rope": 64, "scale_block": -128}),
    ],
)
def test_a_dimension_that_divides_nothing_is_refused_by_name(
    family: str, given: dict[str, Any]
) -> None:
    with pytest.raises(PoolError, match=f"{list(given)[-1]} must be at least 1"):
        factories.FAMILIES[family]("p", **given, **BASE)


@pytest.mark.parametrize(
    ("family", "given", "kind"),
    [
        ("mha", {"heads": H, "head_dim": D}, "mamba"),
        ("mha", {"heads": H, "head_dim": D}, "mla"),
        ("mla", {"latent": 512, "rope": 64}, "mha"),
        ("compressed", {"row_bytes": 584}, "logical"),
    ],
)
def test_a_family_makes_pools_of_its_own_kinds_alone(
    family: str, given: dict[str, Any], kind: str
) -> None:
    with pytest.raises(PoolError, match=f"make no pool of kind {kind}"):
        factories.FAMILIES[family]("p", kind=kind, **given, **BASE)


@pytest.mark.parametrize(
    ("family", "given"),
    [
        ("mha", {"heads": H, "head_dim": D}),
        ("mla", {"latent": 512, "rope": 64}),
        ("compressed", {"row_bytes": 584}),
    ],
)
def test_a_pool_of_a_window_is_given_one(family: str, given: dict[str, Any]) -> None:
    make = factories.FAMILIES[family]
    with pytest.raises(PoolError, match="of kind swa has no window"):
        make("p", kind="swa", **given, **BASE)
    pool = make("p", kind="swa", window=100, **given, **BASE)
    assert (pool.hit_policy, pool.window_pages) == (HitPolicy.TRAILING_PAGES, 2)


def test_states_with_heads_are_the_same_bytes_in_parts_that_ranks_divide() -> None:
    sizes: dict[str, Any] = {
        "layers": range(2),
        "page_tokens": 64,
        "conv": [[64, 3]],
        "temporal": [16, 4, 4],
    }
    whole = mamba("mamba", **sizes)
    divided = mamba("mamba", heads=8, conv_channels=[[16, 16, 32]], **sizes)
    assert divided.page_bytes(Shard()) == whole.page_bytes(Shard())
    assert divided.sharding is Sharding.HEADS
    assert {part.name: part.shape for part in divided.parts} == {
        "temporal": (8, 2, 4, 4),
        "conv_0_0": (8, 2, 3),
        "conv_0_1": (8, 2, 3),
        "conv_0_2": (8, 4, 3),
    }


@pytest.mark.parametrize(
    ("heads", "channels", "message"),
    [
        (8, [[16, 16]], r"channels \[16, 16\] of conv_0 do not add up to 64"),
        (32, [[16, 16, 32]], "32 heads do not divide the 16 rows of temporal"),
    ],
)
def test_heads_that_do_not_divide_a_state_are_refused(
    heads: int, channels: list[list[int]], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        mamba(
            "mamba",
            layers=range(2),
            page_tokens=64,
            conv=[[64, 3]],
            temporal=[16, 4, 4],
            heads=heads,
            conv_channels=channels,
        )


@pytest.mark.parametrize("tp_size", [1, 2, 8, 16])
def test_attention_divides_by_heads_and_latents_do_not(tp_size: int) -> None:
    shard = Shard(tp_size=tp_size)
    per_head = factories.mha("kv", heads=H, head_dim=D, **BASE)
    latent = factories.mla("kv", latent=512, rope=64, **BASE)
    held = max(1, H // tp_size)
    assert per_head.page_bytes(shard) == 2 * L * P * held * D * 2
    assert latent.page_bytes(shard) == latent.page_bytes(Shard())

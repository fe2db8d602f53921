from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from kvdock.errors import PoolError
from kvdock.keys import check_suffixes, key_suffixes
from kvdock.models.assembly import Assembly, Deployment, assemble
from kvdock.models.description import (
    load_model,
    shipped_models,
)
from kvdock.namespace import Namespace, namespace_digest, namespace_record
from kvdock.pools.enums import ContextSplit, DType, PoolKind, Sharding
from kvdock.pools.layout import stored_objects
from kvdock.pools.shard import Shard

DRAFTED = [
    (name, draft)
    for name in shipped_models()
    for draft in ("", *load_model(name).drafts)
]


def pools_of(name: str, draft: str = "", **deployment: Any) -> Assembly:
    return assemble(load_model(name), Deployment(**deployment), draft=draft)


@pytest.mark.parametrize(("name", "draft"), DRAFTED)
def test_every_shipped_model_has_one_writer_for_every_object(
    name: str, draft: str
) -> None:
    for tp_size, pp_size, cp_size in product((1, 2, 8), (1, 3), (1, 2)):
        assembly = pools_of(
            name, draft, tp_size=tp_size, pp_size=pp_size, cp_size=cp_size
        )
        shards = list(assembly.shards())
        assert len(shards) == tp_size * pp_size * cp_size
        for pool in assembly.pools:
            writers: Counter[str] = Counter()
            for shard in shards:
                for stored in stored_objects(pool, shard):
                    writers[stored.coordinate] += pool.writes(shard)
            assert set(writers.values()) == {1}, pool.name


@pytest.mark.parametrize(("name", "draft"), DRAFTED)
def test_the_keys_of_every_shipped_model_are_lawful(name: str, draft: str) -> None:
    assembly = pools_of(name, draft, tp_size=8, pp_size=3)
    for shard in assembly.shards():
        check_suffixes(
            "any",
            [
                (pool, key_suffixes(pool, shard), stored_objects(pool, shard))
                for pool in assembly.pools
            ],
        )


def summary(assembly: Assembly) -> dict[str, tuple[str, str, str]]:
    return {
        pool.name: (str(pool.kind), str(pool.sharding), str(pool.hit_policy))
        for pool in assembly.pools
    }


# One system of pools for each of the field reports that this model began with.
REPLICATED_ALL = ("replicated", "all_pages")


def test_sparse_attention_with_a_draft_of_its_own_kind() -> None:
    """Draft offload: MLA and indexer, and both again for the draft."""
    for name in ("glm-5", "deepseek-v3.2"):
        assembly = pools_of(name, "mtp", tp_size=8)
        assert summary(assembly) == {
            "kv": ("mla", *REPLICATED_ALL),
            "indexer": ("indexer", *REPLICATED_ALL),
            "draft": ("mla", *REPLICATED_ALL),
            "draft_indexer": ("indexer", *REPLICATED_ALL),
        }
        assert [p.required for p in assembly.pools] == [True, True, False, False]


def test_a_draft_per_head_on_a_replicated_target_is_written_by_every_rank() -> None:
    """Draft offload: the draft's kind does not follow the target's."""
    assembly = pools_of("deepseek-v3", "eagle", tp_size=8)
    kv, draft = assembly.pools
    writers = {
        pool.name: [pool.writes(shard) for shard in assembly.shards()]
        for pool in (kv, draft)
    }
    assert writers == {"kv": [True] + [False] * 7, "draft": [True] * 8}


def test_states_beside_latents_are_written_by_every_rank() -> None:
    """Hybrid pools: sharded states beside a replicated target."""
    assembly = pools_of("kimi-linear-48b", tp_size=4)
    kv, mamba = assembly.pools
    assert (kv.kind, mamba.kind) == (PoolKind.MLA, PoolKind.MAMBA)
    assert all(mamba.writes(shard) for shard in assembly.shards())
    assert sum(kv.writes(shard) for shard in assembly.shards()) == 1


def test_compressed_attention_hangs_on_a_logical_anchor() -> None:
    """Windows and compressed KV: two index sources, two policies."""
    assembly = pools_of("deepseek-v4-flash", "mtp")
    sources = {
        pool.name: (pool.indices_from, str(pool.hit_policy)) for pool in assembly.pools
    }
    trailing = ("swa", "trailing_pages")
    assert sources == {
        "kv": (None, "all_pages"),
        "swa": (None, "trailing_pages"),
        "deepseek_v4_c4": ("kv", "all_pages"),
        "deepseek_v4_c4_indexer": ("kv", "all_pages"),
        "deepseek_v4_c128": ("kv", "all_pages"),
        "deepseek_v4_c4_state": trailing,
        "deepseek_v4_c4_indexer_state": trailing,
        "deepseek_v4_c128_state": trailing,
        "draft_swa": trailing,
    }
    assert not assembly.pools[0].physical
    bytes_of = {pool.name: pool.page_bytes(Shard()) for pool in assembly.pools}
    assert bytes_of["swa"] == 43 * 260 * 576
    assert bytes_of["deepseek_v4_c4"] == 21 * 65 * 576
    assert bytes_of["deepseek_v4_c128"] == 20 * 3 * 576


def digest(assembly: Assembly) -> str:
    return namespace_digest(namespace_record(Namespace(model="m"), assembly.pools))


def test_packed_draft_layers_make_larger_pages_and_another_namespace() -> None:
    plain = pools_of("deepseek-v3.2")
    packed = pools_of("deepseek-v3.2", "mtp", packed=True)
    assert [pool.name for pool in packed.pools] == ["kv", "indexer"]
    assert packed.pools[0].layers == tuple(range(62))
    assert packed.pools[0].page_bytes(Shard()) > plain.pools[0].page_bytes(Shard())
    assert (
        len({digest(plain), digest(packed), digest(pools_of("deepseek-v3.2", "mtp"))})
        == 3
    )


def test_a_draft_of_other_parts_cannot_be_packed() -> None:
    with pytest.raises(PoolError, match="'draft' cannot be packed into 'kv'"):
        pools_of("deepseek-v3", "eagle", packed=True)


def test_a_draft_lives_in_the_last_stage_whether_packed_or_not() -> None:
    for packed in (False, True):
        assembly = pools_of("deepseek-v3.2", "mtp", pp_size=2, packed=packed)
        assert assembly.stages == ((0, 31), (31, 62))


def test_stages_may_be_uneven() -> None:
    assembly = pools_of("deepseek-v3", pp_layers=(20, 21, 20))
    assert assembly.stages == ((0, 20), (20, 41), (41, 61))
    with pytest.raises(PoolError, match=r"\[20, 20\] layers do not make up the 61"):
        pools_of("deepseek-v3", pp_layers=(20, 20))
    with pytest.raises(PoolError, match=r"\[60\] layers do not make up the 61"):
        pools_of("deepseek-v3", pp_layers=(60,))
    with pytest.raises(PoolError, match="are not a partition"):
        pools_of("llama-3.1-8b", pp_size=33)
    with pytest.raises(PoolError, match="in 3 stages"):
        pools_of("deepseek-v3", pp_layers=(30, 31), pp_size=3)


def test_attention_is_divided_by_token_where_dcp_is_on() -> None:
    assembly = pools_of("deepseek-v3.2", tp_size=8, dcp_size=4, interleave_tokens=16)
    kv, indexer = assembly.pools
    assert (kv.sharding, kv.interleave_tokens) == (Sharding.DCP, 16)
    assert indexer.sharding is Sharding.REPLICATED, "its page cannot be cut"
    assert sum(kv.writes(shard) for shard in assembly.shards()) == 4


def test_context_ranks_may_divide_layers() -> None:
    assembly = pools_of("glm-5", cp_size=4, context=ContextSplit.LAYERS)
    held = [len(assembly.pools[0].local_layers(shard)) for shard in assembly.shards()]
    assert held == [20, 20, 19, 19]


def test_another_element_type_changes_attention_and_nothing_else() -> None:
    assembly = pools_of("qwen3-next-80b", dtype="fp8_e5m2")
    kv, mamba = assembly.pools
    assert {part.dtype for part in kv.parts} == {DType.FP8_E5M2}
    assert mamba == pools_of("qwen3-next-80b").pools[1]
    row = pools_of("deepseek-v3.2", dtype="fp8_e4m3").pools[0].parts[0]
    assert row.entry_bytes == 656


def test_tp_sizes_that_are_to_share_get_a_common_head_group() -> None:
    def objects(tp_size: int) -> set[str]:
        assembly = pools_of("llama-3.1-8b", tp_size=tp_size, share_tp=(2, 4))
        return {
            stored.coordinate
            for shard in assembly.shards()
            for stored in stored_objects(assembly.pools[0], shard)
        }

    assert objects(2) == objects(4)
    assert objects(8) == {f"kv.L0-32.H{n}-{n + 1}" for n in range(8)}


def test_an_element_type_that_no_pool_follows_is_refused() -> None:
    for dtype in ("bf16", "fp8_e4m3"):
        with pytest.raises(PoolError, match=f"no pool that could be kept in {dtype}"):
            pools_of("deepseek-v4-flash", "mtp", dtype=dtype)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tp_size": 0}, "tp_size must be at least 1, not 0"),
        ({"pp_size": 0}, "pp_size must be at least 1, not 0"),
        ({"cp_size": -1}, "cp_size must be at least 1, not -1"),
        ({"dcp_size": 0}, "dcp_size must be at least 1, not 0"),
        ({"tp_size": 2.0}, "tp_size is a whole number, not 2.0"),
        ({"interleave_tokens": 0}, "interleave_tokens must be at least 1"),
        ({"page_tokens": -64}, "page_tokens must be at least 0, not -64"),
        ({"share_tp": (0,)}, r"share_tp are at least 1 each, not \(0,\)"),
        ({"share_tp": 2}, "share_tp is a row of whole numbers, not 2"),
        ({"pp_layers": (1, -1)}, "pp_layers are at least 1 each"),
        ({"packed": "no"}, "packed is true or false, not 'no'"),
        ({"tp_size": 10**10}, "a deployment of 10000000000 processes is beyond"),
    ],
)
def test_a_deployment_of_impossible_numbers_is_refused_by_name(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        Deployment(**given)


def test_ranks_that_cannot_divide_a_pool_are_refused_before_there_is_any() -> None:
    with pytest.raises(PoolError, match="8 heads cannot be divided among 3"):
        pools_of("llama-3.1-8b", tp_size=3)
    with pytest.raises(PoolError, match="cannot be divided among 64 ranks"):
        pools_of("deepseek-v3", tp_size=128, dcp_size=64, interleave_tokens=2)


def test_a_misspelled_draft_is_refused_with_the_nearest() -> None:
    with pytest.raises(PoolError, match="Did you mean 'mtp'"):
        pools_of("deepseek-v3", "mpt")
    with pytest.raises(PoolError, match="It has none"):
        pools_of("gemma-3-27b", "x")


@pytest.mark.parametrize(
    "name", ["jamba-1.5-mini", "kimi-linear-48b", "qwen3-next-80b"]
)
@pytest.mark.parametrize("layout", ["page_object", "page_head", "page_first_direct"])
def test_tp_sizes_that_share_have_the_same_objects_of_recurrent_states(
    name: str, layout: str
) -> None:
    def objects(tp_size: int, *share_tp: int) -> dict[str, int]:
        assembly = pools_of(name, tp_size=tp_size, share_tp=share_tp, layout=layout)
        (pool,) = [one for one in assembly.pools if one.kind is PoolKind.MAMBA]
        return {
            stored.coordinate: stored.nbytes
            for shard in assembly.shards()
            for stored in stored_objects(pool, shard)
        }

    assert objects(2, 4) == objects(4, 2)
    # Alone, each rank has one object, as it always had.
    assert ".R0of2" in next(iter(objects(2)))
    # 3 divides no state of these models, and every rank keeps its own.
    assert ".R0of2" in next(iter(objects(2, 3)))

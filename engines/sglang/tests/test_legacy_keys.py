"""Golden names, as SGLang 0.5.23 builds them."""

from __future__ import annotations

from typing import Any

import pytest

from kvdock import DType, PoolKind, PoolSpec, Shard, Sharding
from kvdock.errors import KvdockError, NamespaceError
from kvdock.pools import Part, Per
from kvdock_sglang.legacy_keys import LegacyKeys, Spelling

MODEL = "org/Model"


def spec(name: str, kind: PoolKind, *parts: Part, **changes: Any) -> PoolSpec:
    return PoolSpec(
        name=name, kind=kind, parts=parts, layers=(0, 1), page_tokens=64, **changes
    )


def mha(name: str = "kv", **changes: Any) -> PoolSpec:
    parts = [Part(part, DType.BF16, (8, 16), shard_axis=0) for part in ("k", "v")]
    return spec(name, PoolKind.MHA, *parts, **changes)


def mla(name: str = "kv", **changes: Any) -> PoolSpec:
    return spec(name, PoolKind.MLA, Part("kv", DType.BF16, (576,)), **changes)


MHA, MLA = mha(anchor=True), mla(anchor=True)
MLA_DCP = mla(anchor=True, sharding=Sharding.DCP)
INDEXER = spec("indexer", PoolKind.INDEXER, Part("indexer", DType.U8, (132,)))
C4 = spec("deepseek_v4_c4", PoolKind.COMPRESSED, Part("kv", DType.U8, (584,), Per.PAGE))
MAMBA = spec(
    "mamba",
    PoolKind.MAMBA,
    Part("temporal", DType.F32, (8, 4), Per.PAGE, 0),
    Part("conv_0", DType.BF16, (8, 3), Per.PAGE, 0),
    sharding=Sharding.RANK,
)
CONV_ONLY = spec(
    "mamba",
    PoolKind.MAMBA,
    Part("temporal", DType.F32, (0, 4), Per.PAGE, 0),
    Part("conv_0", DType.BF16, (8, 3), Per.PAGE, 0),
    sharding=Sharding.RANK,
)
TP = Shard(tp_rank=1, tp_size=2)
PP = Shard(tp_rank=1, tp_size=2, pp_rank=1, pp_size=2, layers=(1, 2))
CP = Shard(tp_rank=1, tp_size=2, cp_rank=1, cp_size=2)
DCP = Shard(tp_rank=1, tp_size=4, dcp_rank=1, dcp_size=2)


def names(
    spelling: str, target: PoolSpec, shard: Shard, pool: PoolSpec, tag: str = ""
) -> list[str]:
    keys = LegacyKeys(
        spelling=Spelling(spelling), model=MODEL, target=target, shard=shard, tag=tag
    )
    return list(keys.of("HASH", pool))


@pytest.mark.parametrize(
    ("target", "shard", "pool", "name"),
    [
        (MHA, TP, MHA, "HASH_org-Model_1_2.bin"),
        (MHA, TP, MAMBA, "HASH.mamba_org-Model_1_2.bin"),
        (MHA, TP, mha("draft"), "HASH.draft_org-Model_1_2.bin"),
        (MLA, TP, MLA, "HASH_org-Model.bin"),
        (MLA, TP, MAMBA, "HASH.mamba_org-Model_1_2.bin"),
        (MLA, TP, mla("draft"), "HASH.draft_org-Model.bin"),
        (MHA, PP, MHA, "HASH_org-Model_1_2_2_1.bin"),
        (MLA, PP, MLA, "HASH_org-Model_2_1.bin"),
        (MHA, CP, MHA, "HASH_org-Model_1_2_cp1_2.bin"),
        (MLA_DCP, DCP, MLA_DCP, "HASH_org-Model_tp4_dcp1_2_page64.bin"),
    ],
)
def test_whole_pages_are_called_as_the_engine_calls_its_files(
    target: PoolSpec, shard: Shard, pool: PoolSpec, name: str
) -> None:
    assert names("whole_pages", target, shard, pool) == [name]


@pytest.mark.parametrize(
    ("target", "shard", "pool", "ends"),
    [
        (MHA, TP, MHA, ["1_k", "1_v"]),
        (MHA, TP, MAMBA, ["1_temporal", "1_conv_0"]),
        (MHA, TP, CONV_ONLY, ["1_conv_0"]),
        (MHA, TP, INDEXER, ["_indexer"]),
        (MHA, TP, mha("swa"), ["1_swa_k", "1_swa_v"]),
        (MHA, TP, mha("draft"), ["1_draft_k", "1_draft_v"]),
        (MHA, TP, mha("draft_swa"), ["1_draft_swa_k", "1_draft_swa_v"]),
        (MHA, TP, C4, ["_deepseek_v4_c4"]),
        (MLA, TP, MLA, ["_k"]),
        (MLA, TP, mla("swa"), ["_swa"]),
        (MLA, TP, mla("draft"), ["_draft_k"]),
        (MLA, TP, mha("draft"), ["1_draft_k", "1_draft_v"]),
        (MHA, PP, MHA, ["1_1_k", "1_1_v"]),
        (MLA, PP, MLA, ["1_k"]),
        (
            MHA,
            TP,
            mha(anchor=True, head_group=2),
            ["2_k", "2_v", "3_k", "3_v"],
        ),
    ],
)
def test_components_are_called_as_the_engine_calls_its_objects(
    target: PoolSpec, shard: Shard, pool: PoolSpec, ends: list[str]
) -> None:
    found = names("components", target, shard, pool)
    assert found == [f"org-Model_HASH_{end}" for end in ends]


def test_a_tag_and_the_topology_stand_before_the_hash() -> None:
    assert names("components", MHA, TP, MHA, "prod")[0] == "prod_org-Model_HASH_1_k"
    assert names("components", MLA_DCP, DCP, MLA_DCP) == [
        "org-Model_tp4_dcp2_page64_pp1_cp1_HASH_dcp1_cp0_k"
    ]


def test_a_logical_anchor_has_no_components() -> None:
    logical = PoolSpec(
        name="kv",
        kind=PoolKind.LOGICAL,
        parts=(),
        layers=(),
        page_tokens=256,
        anchor=True,
    )
    assert names("components", logical, TP, logical) == []
    assert names("whole_pages", logical, TP, logical) == ["HASH_org-Model.bin"]


def test_heads_that_the_engine_mixed_up_are_not_migrated() -> None:
    with pytest.raises(NamespaceError, match="'draft' differs from rank to rank"):
        names("whole_pages", MLA, TP, mha("draft"))
    assert names("whole_pages", MLA, Shard(), mha("draft"))
    with pytest.raises(NamespaceError, match="formats a list of ranks"):
        names("components", MHA, TP, mha("draft", head_group=2))
    keys = [Part("k", DType.BF16, (4, 16), shard_axis=0)]
    with pytest.raises(NamespaceError, match="'indexer' differs from rank to rank"):
        names("components", MHA, TP, spec("indexer", PoolKind.K_ONLY, *keys))


def test_what_the_engine_never_stored_there_is_rejected() -> None:
    with pytest.raises(NamespaceError, match="stores no pool 'auxiliary_swa'"):
        names("components", MHA, TP, mha("auxiliary_swa"))
    with pytest.raises(NamespaceError, match="keep a rank's heads together"):
        names("whole_pages", MHA, TP, mha(anchor=True, head_group=2))


@pytest.mark.parametrize("page_hash", ["../../etc/passwd", "", "a b", "é"])
def test_a_hash_is_no_way_out_of_a_name(page_hash: str) -> None:
    for spelling in Spelling:
        with pytest.raises(KvdockError, match="not made of letters and digits"):
            LegacyKeys(spelling=spelling, model=MODEL, target=MHA, shard=TP).of(
                page_hash, MHA
            )

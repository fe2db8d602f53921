"""Sets of pools as models have them, on every backend: stored, found, loaded."""

from __future__ import annotations

from typing import Any

import pytest
import test_families as families
import torch
import zoo
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

PAGES = [0, 1, 2]

EVERY = ["file", "hf3fs", "mooncake", "mooncake, zero copy", "nixl", "s3"]
pytestmark = pytest.mark.parametrize("backend", EVERY, indirect=True, scope="module")


def sparse() -> tuple[dict[str, Any], dict[str, Any]]:
    """Latent KV with its indexer, and a draft model that comes late."""
    anchor, indexer = zoo.dsa_pair()
    return {"kv": anchor, "indexer": indexer}, {
        "draft": zoo.mha_host(layers=1, page=64)
    }


def hybrid() -> tuple[dict[str, Any], dict[str, Any]]:
    """KV whose layers lie apart, windows, states, and a draft of two pools."""
    start = {
        "kv": zoo.mha_host("layer_first"),
        "swa": zoo.mha_host("layer_first"),
        "mamba": zoo.mamba_host(),
    }
    late = {"draft": zoo.mha_host(layers=1), "draft_swa": zoo.mha_host(layers=1)}
    return start, late


def compressed() -> tuple[dict[str, Any], dict[str, Any]]:
    """An anchor without bytes, compressed pages and ring states."""
    return {
        "kv": zoo.logical_host(),
        "deepseek_v4_c4": zoo.compressed_host(),
        "deepseek_v4_c4_state": zoo.state_host(),
    }, {}


def sidecars(pools: dict[str, Any], keys: list[str]) -> list[PoolTransfer]:
    """The pages of all pools beside the anchor."""
    return [
        PoolTransfer(PoolName(name), zoo.slots(pool, PAGES), keys=keys)
        for name, pool in pools.items()
        if name != "kv"
    ]


def pages_of(pools: dict[str, Any]) -> dict[str, list[torch.Tensor]]:
    """What is in memory, of pools that have bytes."""
    return {
        name: [zoo.page(pool, index) for index in PAGES] for name, pool in pools.items()
    }


@pytest.mark.parametrize("model", [sparse, hybrid, compressed])
def test_the_pools_of_a_model_come_back_from_every_backend_and_can_be_cleared(
    store: dict[str, Any], model: Any
) -> None:
    keys = families.hashes(len(PAGES), model.__name__)
    start, late = model()
    pools = {**start, **late}
    physical = {n: p for n, p in pools.items() if (model, n) != (compressed, "kv")}
    moves = sidecars(pools, keys)
    anchor = keys, zoo.slots(pools["kv"], PAGES)
    asked = [PoolTransfer(move.name) for move in moves]
    every = {str(move.name): [True] * len(PAGES) for move in moves}

    def attached() -> Any:
        cfg = families.config_of(store, replicated=model is not hybrid)
        return families.attached(cfg, start, late)

    for seed, pool in enumerate(physical.values()):
        zoo.fill(pool, seed)
    expected = pages_of(physical)
    with attached() as storage:
        assert storage.batch_set_v2(moves) == every
        assert all(storage.batch_set_v1(*anchor))
    for pool in physical.values():
        zoo.fill(pool, 99)
    with attached() as storage:
        assert storage.batch_exists_v2(keys, asked).kv_hit_pages == len(PAGES)
        assert all(storage.batch_get_v1(*anchor))
        assert storage.batch_get_v2(moves) == every
        for name, pages in pages_of(physical).items():
            assert all(map(torch.equal, pages, expected[name])), name
        assert storage.clear()
        assert storage.batch_exists_v2(keys, asked).kv_hit_pages == 0

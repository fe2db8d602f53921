"""(2) SGLang's own cache controller and its threads over kvdock."""

from __future__ import annotations

from typing import Any

import controllers
import pytest
import torch
import zoo
from sglang.srt.mem_cache.hicache_storage import PoolName

from kvdock_sglang import KvdockStorage

PAGES = 6


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return controllers.become_rank(0, 1, tmp_path_factory.mktemp("gloo") / "store")


def pages_of(pool: Any, indices: list[int]) -> list[torch.Tensor]:
    return [zoo.page(pool, index) for index in indices]


def modes_of(storage: KvdockStorage) -> set[str]:
    """Return how the pages of the attached pools get to their backends."""
    return {
        str(route.mode)
        for pool in storage._attachments.pools.values()
        if pool.attachment is not None
        for route in pool.attachment.plan.accepted
    }


def expected_mode(store: dict[str, Any]) -> str:
    """Return it for settings: what may be late is copied unless they say otherwise."""
    if "calls" in store["core"]:
        return "zero copy"
    return {"file": "gated", "mooncake": "staged"}[store["plugin"]]


def test_backup_restart_and_prefetch_of_four_pools_through_the_engines_threads(
    store: dict[str, Any], group: Any
) -> None:
    token_ids = controllers.tokens(PAGES * 64)

    def pools() -> tuple[dict[str, Any], dict[str, Any]]:
        anchor, indexer = zoo.dsa_pair()
        draft = zoo.mha_host(layers=1, page=64)
        start = {"kv": anchor, "indexer": indexer, "mamba": zoo.mamba_host()}
        return start, {"draft": draft}

    start, late = pools()
    for seed, pool in enumerate([*start.values(), *late.values()]):
        zoo.fill(pool, seed)
    # The small pools have four whole pages and one that is never handed out.
    held = {name: pages_of(start[name], [0, 1, 2, 3]) for name in ("kv", "indexer")}
    held["draft"] = pages_of(late["draft"], [0, 1, 2, 3])
    held["mamba"] = pages_of(start["mamba"], [7])
    token_ids = token_ids[: 4 * 64]
    with controllers.controller(start, store, group=group, page=64, late=late) as made:
        hashes = controllers.page_hashes(made, token_ids)
        done = controllers.back_up(
            made,
            zoo.slots(start["kv"], [0, 1, 2, 3]),
            token_ids,
            [
                controllers.follows("indexer"),
                controllers.follows("draft"),
                controllers.states("mamba", zoo.slots(start["mamba"], [7]), hashes[3:]),
            ],
        )
        assert done.completed_tokens == len(token_ids)
        storage = made.storage_backend
        assert isinstance(storage, KvdockStorage)
        assert made.page_get_func == made._page_get_zero_copy
        assert modes_of(storage) == {expected_mode(store)}

    again, late = pools()
    for seed, pool in enumerate([*again.values(), *late.values()]):
        zoo.fill(pool, 90 + seed)
    with controllers.controller(again, store, group=group, page=64, late=late) as made:
        loaded = controllers.fetch(
            made,
            token_ids,
            zoo.slots(again["kv"], [0, 1, 2, 3]),
            [
                controllers.follows("indexer"),
                controllers.follows("draft"),
                controllers.states(
                    "mamba", zoo.slots(again["mamba"], [2]), ["?"], window=True
                ),
            ],
        )
        assert loaded.completed_tokens == len(token_ids)
        hits = loaded.pool_storage_result.extra_pool_hit_pages
        assert hits[PoolName.MAMBA] == 1
    got = {name: pages_of(again[name], [0, 1, 2, 3]) for name in ("kv", "indexer")}
    got["draft"] = pages_of(late["draft"], [0, 1, 2, 3])
    got["mamba"] = pages_of(again["mamba"], [2])
    for name, pages in held.items():
        assert all(map(torch.equal, pages, got[name])), name


def test_a_prefix_ends_where_a_sparse_state_was_kept(
    store: dict[str, Any], group: Any
) -> None:
    token_ids = controllers.tokens(PAGES * zoo.PAGE)
    pools = {"kv": zoo.mha_host(), "mamba": zoo.mamba_host()}
    for seed, pool in enumerate(pools.values()):
        zoo.fill(pool, seed)
    with controllers.controller(pools, store, group=group) as made:
        hashes = controllers.page_hashes(made, token_ids)
        slots = zoo.slots(pools["mamba"], [5, 6])
        sparse = controllers.states("mamba", slots, [hashes[1], hashes[3]])
        every = zoo.slots(pools["kv"], list(range(PAGES)))
        controllers.back_up(made, every, token_ids, [sparse])
        # The two states are the only ones, so five pages are not restorable.
        asked = controllers.states(
            "mamba", zoo.slots(pools["mamba"], [9]), ["?"], window=True
        )
        target = zoo.slots(pools["kv"], list(range(8, 8 + PAGES)))
        loaded = controllers.fetch(made, token_ids[: 5 * zoo.PAGE], target, [asked])
        assert loaded.pool_storage_result.restorable_prefix_pages == [2, 4]
        assert loaded.completed_tokens == 4 * zoo.PAGE
        assert torch.equal(zoo.page(pools["mamba"], 9), zoo.page(pools["mamba"], 6))


def test_a_missing_draft_page_shortens_the_prefix_and_never_misaligns_it(
    store: dict[str, Any], group: Any
) -> None:
    token_ids = controllers.tokens(PAGES * zoo.PAGE)
    pools, late = {"kv": zoo.mha_host()}, {"draft": zoo.mha_host(layers=1)}
    zoo.fill(pools["kv"], 1)
    zoo.fill(late["draft"], 2)
    with controllers.controller(pools, store, group=group, late=late) as made:
        every = zoo.slots(pools["kv"], list(range(PAGES)))
        few = token_ids[: 3 * zoo.PAGE]
        controllers.back_up(
            made, every[: len(few)], few, [controllers.follows("draft")]
        )
        controllers.back_up(made, every, token_ids, [])
        target = zoo.slots(pools["kv"], list(range(8, 8 + PAGES)))
        loaded = controllers.fetch(
            made, token_ids, target, [controllers.follows("draft")]
        )
        assert loaded.completed_tokens == len(few)
        for index in range(3):
            for pool in (pools["kv"], late["draft"]):
                assert torch.equal(zoo.page(pool, 8 + index), zoo.page(pool, index))


def test_detach_and_attach_again_keep_what_was_stored(
    store: dict[str, Any], group: Any
) -> None:
    pools = {"kv": zoo.mha_host()}
    token_ids = controllers.tokens(2 * zoo.PAGE)
    for attempt in range(2):
        with controllers.controller(pools, store, group=group) as made:
            storage = made.storage_backend
            if attempt == 0:
                slots = zoo.slots(pools["kv"], [0, 1])
                controllers.back_up(made, slots, token_ids, [])
            hashes = controllers.page_hashes(made, token_ids)
            assert storage.batch_exists(hashes) == 2
        assert made.storage_backend is None
        assert storage.batch_exists(hashes) == 0


def test_the_engine_clears_no_more_than_its_own(
    store: dict[str, Any], group: Any
) -> None:
    pools = {"kv": zoo.mha_host()}
    token_ids = controllers.tokens(2 * zoo.PAGE)
    mine = store
    theirs = {**mine, "salt": "another tenant"}
    for extra in (mine, theirs):
        with controllers.controller(pools, dict(extra), group=group) as made:
            controllers.back_up(made, zoo.slots(pools["kv"], [0, 1]), token_ids, [])
            hashes = controllers.page_hashes(made, token_ids)
    with controllers.controller(pools, dict(mine), group=group) as made:
        assert made.clear_storage_backend() is True
        assert made.storage_backend.batch_exists(hashes) == 0
    with controllers.controller(pools, dict(theirs), group=group) as made:
        assert made.storage_backend.batch_exists(hashes) == 2

"""(1) SGLang's own factory and host pools of every family, byte by byte."""

from __future__ import annotations

import hashlib
import json
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
import zoo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.runtime_context import get_server_args
from sglang.srt.server_args import ServerArgs

from kvdock.errors import KvdockError
from kvdock_sglang import storage as storage_module

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock_sglang import KvdockStorage


def config(
    root: Path,
    *,
    tp: tuple[int, int] = (0, 1),
    replicated: bool = False,
    dcp: tuple[int, int] = (0, 1),
    **more: Any,
) -> HiCacheStorageConfig:
    extra = {
        "backend_name": "kvdock",
        "module_path": "kvdock_sglang",
        "class_name": "KvdockStorage",
        "plugin": "file",
        "root": str(root),
        **more.pop("extra", {}),
    }
    return HiCacheStorageConfig(
        tp_rank=tp[0],
        tp_size=tp[1],
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=replicated,
        enable_storage_metrics=True,
        is_page_first_layout=False,
        model_name="org/model",
        extra_config=extra,
        dcp_rank=dcp[0],
        dcp_size=dcp[1],
        logical_page_size=32 if dcp[1] > 1 else None,
        **more,
    )


def config_of(store: dict[str, Any], **more: Any) -> HiCacheStorageConfig:
    """Return a configuration for any backend; its settings bring their own root."""
    made = config(Path(), **more)
    del made.extra_config["root"]
    made.extra_config |= store
    return made


@contextmanager
def attached(
    cfg: HiCacheStorageConfig, pools: dict[str, Any], late: dict[str, Any] | None = None
) -> Iterator[KvdockStorage]:
    """A storage as the engine makes and registers it."""
    storage = StorageBackendFactory.create_backend("dynamic", cfg, pools["kv"])
    try:
        storage.register_mem_pool_host(pools["kv"])
        for name, pool in pools.items():
            storage.register_mem_host_pool_v2(pool, PoolName(name))
        storage.on_host_pools_registered()
        for name, pool in (late or {}).items():
            storage.register_mem_host_pool_v2(pool, PoolName(name))
        yield storage
    finally:
        storage.close()


def hashes(count: int, seed: str = "") -> list[str]:
    return [hashlib.sha256(f"{seed}{n}".encode()).hexdigest() for n in range(count)]


def settings_of(family: str, pool: Any) -> dict[str, Any]:
    if family.startswith("mla-dcp"):
        size = (pool.dcp_rank, pool.dcp_size)
        return {"tp": size, "dcp": size, "replicated": True}
    return {"replicated": family.startswith(("mla", "indexer"))}


def with_anchor(name: str, family: str, pool: Any) -> dict[str, Any]:
    if name == "kv":
        return {"kv": pool}
    if family.startswith("indexer"):
        return {"kv": zoo.mla_host(page=64), name: pool}
    return {"kv": zoo.mha_host(), name: pool}


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_pages_of_every_family_come_back_byte_for_byte_after_a_restart(
    family: str, tmp_path: Path
) -> None:
    name, build = zoo.FAMILIES[family]
    pool = build()
    zoo.fill(pool, seed=1)
    written, read = [1, 4, 2], [5, 0, 3]
    keys = hashes(3)
    move = PoolTransfer(PoolName(name), zoo.slots(pool, written), keys=keys)
    cfg = config(tmp_path, **settings_of(family, pool))
    expected = [zoo.page(pool, index) for index in written]
    with attached(cfg, with_anchor(name, family, pool)) as storage:
        assert storage.batch_set_v2([move]) == {name: [True] * 3}

    again = build()
    zoo.fill(again, seed=2)
    before = zoo.snapshot(again)
    cfg = config(tmp_path, **settings_of(family, again))
    with attached(cfg, with_anchor(name, family, again)) as storage:
        move = PoolTransfer(PoolName(name), zoo.slots(again, read), keys=keys)
        assert storage.batch_get_v2([move]) == {name: [True] * 3}
    assert all(
        torch.equal(zoo.page(again, index), page)
        for index, page in zip(read, expected, strict=True)
    )
    # Nothing but these pages was touched.
    nbytes = sum(len(page) for page in expected)
    changed = sum(
        int((one != other).sum())
        for one, other in zip(before, zoo.snapshot(again), strict=True)
    )
    assert nbytes * 0.9 < changed <= nbytes


def test_the_anchor_travels_by_address_and_sets_the_flag_itself(tmp_path: Path) -> None:
    pool = zoo.mha_host()
    zoo.fill(pool, 1)
    cfg = config(tmp_path)
    keys = hashes(4)
    with attached(cfg, {"kv": pool}) as storage:
        assert cfg.extra_config["interface_v1"] == 1
        assert storage.batch_set_v1(keys, zoo.slots(pool, [0, 1, 2, 3])) == [True] * 4
        assert storage.batch_exists([*keys, hashes(1, "other")[0]]) == 4
        assert storage.batch_get_v1(keys[:2], zoo.slots(pool, [6, 7])) == [True] * 2
        assert torch.equal(zoo.page(pool, 6), zoo.page(pool, 0))
        assert storage.exists(keys[3])
        record = storage.get_stats()
        assert record.backup_pgs == [4]
        assert record.prefetch_pgs == [2]
        assert record.prefetch_bandwidth[0] > 0


def test_flat_pages_are_a_miss_that_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = zoo.mha_host()
    flat, keys = pool.get_dummy_flat_data_page(), hashes(2)
    with attached(config(tmp_path), {"kv": pool}) as storage:
        assert all(storage.batch_set_v1(keys, zoo.slots(pool, [0, 1])))
        assert storage.batch_get(keys, [flat, flat]) == [None, None]
        assert storage.get(keys[0], flat) is None
        assert storage.batch_set(keys, [flat, flat]) is False
        assert storage.set(keys[0], flat) is False
    said = [line for line in caplog.messages if "flat pages are not supported" in line]
    assert len(said) == 2


def test_a_logical_anchor_takes_part_without_bytes(tmp_path: Path) -> None:
    pools = {"kv": zoo.logical_host(), "deepseek_v4_c4": zoo.compressed_host()}
    keys = hashes(3)
    with attached(config(tmp_path, replicated=True), pools) as storage:
        slots = zoo.slots(pools["kv"], [0, 1, 2])
        side = PoolTransfer(
            PoolName.DEEPSEEK_V4_C4,
            zoo.slots(pools["deepseek_v4_c4"], [0, 1]),
            keys=keys[:2],
        )
        asked = [PoolTransfer(PoolName.DEEPSEEK_V4_C4)]
        assert storage.batch_exists_v2(keys, asked).kv_hit_pages == 0
        assert all(storage.batch_set_v2([side])[PoolName.DEEPSEEK_V4_C4])
        assert storage.batch_set_v1(keys, slots) == [True] * 3
        found = storage.batch_exists_v2(keys, asked)
        assert found.kv_hit_pages == 2
        assert storage.batch_get_v1(keys, slots) == [True] * 3


def test_sparse_states_make_a_set_of_prefixes_and_no_minimum_of_maxima(
    tmp_path: Path,
) -> None:
    pools = {"kv": zoo.mha_host(), "mamba": zoo.mamba_host(), "swa": zoo.mha_host()}
    keys = hashes(6)
    with attached(config(tmp_path), pools) as storage:
        storage.batch_set_v1(keys, zoo.slots(pools["kv"], list(range(6))))
        states = PoolTransfer(
            PoolName.MAMBA,
            zoo.slots(pools["mamba"], [0, 1]),
            keys=[keys[1], keys[4]],
        )
        window = PoolTransfer(
            PoolName.SWA,
            zoo.slots(pools["swa"], [0, 1, 2, 3]),
            keys=keys[:4],
        )
        storage.batch_set_v2([states, window])
        trailing = PoolHitPolicy.TRAILING_PAGES
        mamba = PoolTransfer(PoolName.MAMBA, keys=["?"], hit_policy=trailing)
        swa = PoolTransfer(PoolName.SWA, keys=["?", "?"], hit_policy=trailing)
        found = storage.batch_exists_v2(keys, [mamba])
        assert found.restorable_prefix_pages == [2, 5]
        assert found.kv_hit_pages == 5
        assert found.extra_pool_hit_pages == {"kv": 6, "mamba": 5}
        found = storage.batch_exists_v2(keys, [mamba, swa])
        assert found.restorable_prefix_pages == [2]
        assert found.kv_hit_pages == 2


def test_a_late_draft_is_stored_beside_the_target_and_found_again(
    tmp_path: Path,
) -> None:
    keys = hashes(3)

    def trial(*, write: bool) -> list[bool]:
        target, draft = zoo.mha_host(), zoo.mha_host(layers=1)
        zoo.fill(draft, 3)
        with attached(config(tmp_path), {"kv": target}, {"draft": draft}) as storage:
            move = PoolTransfer(PoolName.DRAFT, zoo.slots(draft, [0, 1, 2]), keys=keys)
            if write:
                return list(storage.batch_set_v2([move])["draft"])
            expected = [zoo.page(draft, n) for n in range(3)]
            zoo.fill(draft, 9)
            moved = list(storage.batch_get_v2([move])["draft"])
            assert all(
                torch.equal(zoo.page(draft, n), page) for n, page in enumerate(expected)
            )
            asked = [PoolTransfer(PoolName.DRAFT)]
            assert storage.batch_exists_v2(keys, asked).kv_hit_pages == 0
            storage.batch_set_v1(keys[:2], zoo.slots(target, [0, 1]))
            assert storage.batch_exists_v2(keys, asked).kv_hit_pages == 2
            return moved

    assert trial(write=True) == [True] * 3
    assert trial(write=False) == [True] * 3


def test_a_draft_is_found_again_whether_it_came_with_the_others_or_late(
    tmp_path: Path,
) -> None:
    """The engine starts with the one, and attaches at run time with the other."""
    keys = hashes(2)
    pools = {"kv": zoo.mha_host(), "mamba": zoo.mamba_host()}
    drafts = {"draft": zoo.mha_host(layers=1), "draft_swa": zoo.mha_host(layers=2)}
    digests = set()
    for start, late in (
        (pools, drafts),
        ({"kv": pools["kv"], **drafts, "mamba": pools["mamba"]}, {}),
    ):
        with attached(config(tmp_path), start, late) as storage:
            moves = [
                PoolTransfer(PoolName(name), zoo.slots(pool, [0, 1]), keys=keys)
                for name, pool in drafts.items()
            ]
            if late:
                assert all(map(all, storage.batch_set_v2(moves).values()))
                storage.batch_set_v1(keys, zoo.slots(pools["kv"], [0, 1]))
            asked = [PoolTransfer(PoolName(name)) for name in drafts]
            assert storage.batch_exists_v2(keys, asked).kv_hit_pages == 2
            assert all(map(all, storage.batch_get_v2(moves).values()))
            digests.add(storage._attachments.digest)
    assert len(digests) == 1


def test_another_layout_type_or_geometry_is_a_miss_and_never_other_bytes(
    tmp_path: Path,
) -> None:
    keys = hashes(1)
    stored = zoo.mha_host("page_first", heads=2, width=8)
    with attached(config(tmp_path), {"kv": stored}) as storage:
        assert storage.batch_set_v1(keys, zoo.slots(stored, [0])) == [True]
    others = [
        zoo.mha_host("page_first_direct", heads=2, width=8),
        zoo.mha_host("page_head", heads=2, width=8),
        zoo.mha_host("page_first", heads=4, width=4),
        zoo.mha_host("page_first", heads=2, width=8, dtype=torch.float16),
        zoo.mha_host("page_first", heads=2, width=8, layers=2, packed_drafts=1),
    ]
    for other in others:
        zoo.fill(other, 5)
        before = zoo.snapshot(other)
        with attached(config(tmp_path), {"kv": other}) as storage:
            assert storage.batch_exists(keys) == 0
            assert storage.batch_get_v1(keys, zoo.slots(other, [0])) == [False]
        assert all(map(torch.equal, before, zoo.snapshot(other)))


def test_slots_that_are_not_a_page_are_a_miss_whose_cause_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pool = zoo.mha_host()
    with attached(config(tmp_path), {"kv": pool}) as storage:
        crooked = zoo.slots(pool, [0, 1]) + 1
        assert storage.batch_set_v1(hashes(2), crooked) == [False, False]
        mixed = zoo.slots(pool, [0])
        mixed[[1, 2]] = mixed[[2, 1]]
        assert storage.batch_set_v1(hashes(1), mixed) == [False]
        assert storage.batch_get_v1(hashes(2), zoo.slots(pool, [0])) == [False, False]
        assert storage.batch_get_v2([PoolTransfer(PoolName.SWA, keys=["aa"])]) == {
            "swa": [False]
        }
        beyond = zoo.slots(pool, [10_000])
        assert storage.batch_get_v1(hashes(1), beyond) == [False]
    assert "set of kv failed, so its pages are a miss: host slots" in caplog.text


def test_clear_forgets_this_model_and_no_other(tmp_path: Path) -> None:
    pool, draft = zoo.mha_host(), zoo.mha_host(layers=1)
    keys = hashes(2)
    other = config(tmp_path)
    other.model_name = "org/other"
    with (
        attached(config(tmp_path), {"kv": pool}, {"draft": draft}) as mine,
        attached(other, {"kv": pool}) as theirs,
    ):
        move = PoolTransfer(PoolName.DRAFT, zoo.slots(draft, [0, 1]), keys=keys)
        mine.batch_set_v2([move])
        for storage in (mine, theirs):
            assert all(storage.batch_set_v1(keys, zoo.slots(pool, [0, 1])))
        assert mine.clear()
        assert mine.batch_exists(keys) == 0
        assert not any(mine.batch_get_v2([move])["draft"])
        assert theirs.batch_exists(keys) == 2


def test_after_close_everything_is_a_quiet_miss(tmp_path: Path) -> None:
    pool = zoo.mha_host()
    with attached(config(tmp_path), {"kv": pool}) as storage:
        pass
    storage.close()
    keys = hashes(2)
    assert storage.batch_exists(keys) == 0
    assert storage.batch_set_v1(keys, zoo.slots(pool, [0, 1])) == [False, False]
    assert storage.get_stats() is not None
    assert storage.clear() is True


def test_a_wrong_configuration_stops_the_engine_with_a_way_out(tmp_path: Path) -> None:
    pool = zoo.mha_host()
    cases = {
        "says which plugin|not say which plugin": {"plugin": None},
        "no backend 'fil'": {"plugin": "fil"},
        "unknown setting 'rot'": {"rot": "/x"},
    }
    for message, change in cases.items():
        cfg = config(tmp_path, extra=change)
        cfg.extra_config = {k: v for k, v in cfg.extra_config.items() if v is not None}
        with pytest.raises(KvdockError, match=message), attached(cfg, {"kv": pool}):
            pass


def test_ranks_of_one_latent_pool_store_it_once_and_all_read_it(tmp_path: Path) -> None:
    keys = hashes(2)
    pools = [zoo.mla_host() for _ in range(2)]
    for seed, pool in enumerate(pools):
        zoo.fill(pool, seed)
    for rank in (1, 0):
        cfg = config(tmp_path, tp=(rank, 2), replicated=True)
        with attached(cfg, {"kv": pools[rank]}) as storage:
            assert storage.batch_exists(keys) == 0
            moved = storage.batch_set_v1(keys, zoo.slots(pools[rank], [0, 1]))
            assert moved == [True, True]
    cfg = config(tmp_path, tp=(1, 2), replicated=True)
    with attached(cfg, {"kv": pools[1]}) as storage:
        assert storage.batch_get_v1(keys, zoo.slots(pools[1], [4, 5])) == [True, True]
    assert torch.equal(zoo.page(pools[1], 4), zoo.page(pools[0], 0))


def test_split_heads_let_two_and_four_ranks_share_their_objects(tmp_path: Path) -> None:
    keys = hashes(1)
    whole = torch.arange(8 * 8, dtype=torch.float32).to(torch.bfloat16)

    def pool_of(rank: int, ranks: int) -> Any:
        heads = 8 // ranks
        pool = zoo.mha_host("page_head", heads=heads, width=8)
        mine = whole.view(8, 1, 1, 8)[rank * heads : (rank + 1) * heads]
        pool.kv_buffer[:, 0] = mine.expand(heads, zoo.PAGE, 3, 8)
        return pool

    for rank in range(2):
        pool = pool_of(rank, 2)
        cfg = config(tmp_path, tp=(rank, 2), tp_lcm_size=4, should_split_heads=True)
        with attached(cfg, {"kv": pool}) as storage:
            assert storage.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]
    for rank in range(4):
        pool = pool_of(rank, 4)
        cfg = config(tmp_path, tp=(rank, 4), tp_lcm_size=4)
        with attached(cfg, {"kv": pool}) as storage:
            assert storage.batch_get_v1(keys, zoo.slots(pool, [7])) == [True]
        assert torch.equal(zoo.page(pool, 7), zoo.page(pool, 0))


def test_what_other_deployments_do_not_find_is_logged_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pools = {
        "kv": zoo.mha_host("page_head", heads=4, packed_drafts=1),
        "mamba": zoo.mamba_host(),
    }
    cfg = config(tmp_path, tp=(0, 2), tp_lcm_size=4, should_split_heads=True)
    cfg.pp_size = 2
    with caplog.at_level("INFO", logger="kvdock.sglang"), attached(cfg, pools):
        pass
    (line,) = [one for one in caplog.messages if "is not shared along" in one]
    assert "pool mamba is not shared along tp: every rank keeps a state" in line
    assert "pool kv is not shared along pp: an object holds the layers" in line
    assert "pool kv is not shared along draft: the last 1 layers" in line
    assert "pool kv is not shared along tp" not in line


def one_head(value: int, ranks: int) -> Any:
    """A pool of one head, which holds the same bytes wherever this is called."""
    pool = zoo.mha_host("page_head" if ranks > 1 else "page_first", heads=1)
    zoo.fill(pool, value)
    return pool


def test_ranks_with_the_same_head_store_it_once_and_share_it_with_fewer_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of two KV heads on four ranks, and then on two."""
    monkeypatch.setattr(storage_module, "target_kv_heads", lambda: 2)
    keys = hashes(1)
    for rank in range(4):
        pool = one_head(value=rank // 2, ranks=4)
        cfg = config(tmp_path, tp=(rank, 4), tp_lcm_size=4)
        with attached(cfg, {"kv": pool}) as storage:
            # The second one of two neighbours finds what the first one stored.
            assert storage.batch_exists(keys) == rank % 2
            assert storage.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]
    for rank in range(2):
        pool, again = one_head(rank, 2), one_head(9, 2)
        cfg = config(tmp_path, tp=(rank, 2), tp_lcm_size=4, should_split_heads=True)
        with attached(cfg, {"kv": again}) as storage:
            assert storage.batch_get_v1(keys, zoo.slots(again, [0])) == [True]
        assert torch.equal(zoo.page(again, 0), zoo.page(pool, 0))


@pytest.mark.parametrize("packed", [False, True])
def test_where_the_heads_are_not_known_each_rank_keeps_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, packed: bool
) -> None:
    """Packed draft layers may have other heads than the target."""
    known = 1 if packed else 0
    monkeypatch.setattr(storage_module, "target_kv_heads", lambda: known)
    keys = hashes(1)
    for rank in range(2):
        pool = zoo.mha_host(heads=1, packed_drafts=int(packed))
        with attached(config(tmp_path, tp=(rank, 2)), {"kv": pool}) as storage:
            assert storage.batch_exists(keys) == 0
            assert storage.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]


def test_what_the_store_keeps_says_what_it_belongs_to(tmp_path: Path) -> None:
    pool = zoo.mha_host()
    with attached(config(tmp_path, extra={"revision": "r7"}), {"kv": pool}) as storage:
        (attachment,) = storage._attachments._attachments
        record: Any = json.loads(json.dumps(attachment.namespace_record))
    assert record["revision"] == "named:r7"
    assert record["model"] == "named:r7", "a name of the weights goes before the folder"
    assert record["pools"]["kv"]["parts"][0]["dtype"] == "bf16"
    assert SimpleNamespace(**json.loads(record["page_format"])).engine == "sglang"


def started_with(monkeypatch: pytest.MonkeyPatch, **arguments: object) -> None:
    """Let the engine have other launch arguments."""
    given = {**get_server_args().resolved_dict(), **arguments}
    monkeypatch.setattr(ServerArgs, "resolved_dict", lambda _: given)


@pytest.mark.parametrize(
    ("other", "draft_found"),
    [
        ({"speculative_num_steps": 5, "speculative_num_draft_tokens": 8}, True),
        ({"speculative_draft_model_path": "another/draft"}, False),
        ({"speculative_draft_kv_cache_dtype": "fp8_e4m3"}, False),
    ],
)
def test_the_targets_pages_are_found_whatever_the_draft_and_the_drafts_with_it(
    other: dict[str, object],
    draft_found: bool,  # noqa: FBT001 - a case of a table
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys, pool, draft = hashes(1), zoo.mha_host(), zoo.mha_host(layers=1)
    asked = PoolTransfer(PoolName.DRAFT, zoo.slots(draft, [0]), keys=keys)
    eagle = {"speculative_algorithm": "EAGLE", "speculative_num_steps": 3}
    started_with(monkeypatch, **eagle)
    with attached(config(tmp_path), {"kv": pool}, {"draft": draft}) as storage:
        assert storage.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]
        assert storage.batch_set_v2([asked]) == {"draft": [True]}
    started_with(monkeypatch, **{**eagle, **other})
    with attached(config(tmp_path), {"kv": pool}, {"draft": draft}) as storage:
        assert storage.batch_get_v1(keys, zoo.slots(pool, [0])) == [True]
        assert storage.batch_get_v2([asked]) == {"draft": [draft_found]}


def test_a_draft_packed_into_the_targets_pages_is_a_part_of_their_identity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, pool = hashes(1), zoo.mha_host(packed_drafts=1)
    started_with(monkeypatch, speculative_algorithm="EAGLE")
    with attached(config(tmp_path), {"kv": pool}) as storage:
        assert storage.batch_set_v1(keys, zoo.slots(pool, [0])) == [True]
        assert storage.batch_exists(keys) == 1
    another = {"speculative_draft_model_path": "another/draft"}
    started_with(monkeypatch, speculative_algorithm="EAGLE", **another)
    with attached(config(tmp_path), {"kv": pool}) as storage:
        assert storage.batch_exists(keys) == 0

"""What the engine gets when storage declines, fails or hangs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import controllers
import odd
import pytest
import test_families as families
import torch
import zoo
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageFailureInjector,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.unified_cache.storage_attachment import StorageAttachment

from kvdock import Dock, Operation, PoolKind, Support
from kvdock.errors import KvdockError, NoRoute

if TYPE_CHECKING:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig

QUICK = {
    "core": {
        "deadlines": {"get": 0.3, "put": 0.3, "exists": 0.3, "close": 1.0},
        "negative_cache": {"absent_ttl": 0, "corrupt_ttl": 0},
    }
}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[odd.Odd], odd.Odd]:
    """Install a plugin in place of all others."""

    def install(plugin: odd.Odd) -> odd.Odd:
        monkeypatch.setattr(Dock, "load", lambda **_: odd.dock(plugin))
        return plugin

    return install


def config(tmp_path: Path, **extra: Any) -> HiCacheStorageConfig:
    made = families.config(tmp_path, extra={"plugin": "odd", **QUICK, **extra})
    del made.extra_config["root"]
    return made


def test_a_pool_that_no_plugin_takes_stops_the_engine_with_the_route_table(
    load: Callable[[odd.Odd], odd.Odd], tmp_path: Path
) -> None:
    load(odd.Odd(kinds=frozenset({PoolKind.MHA})))
    pools = {"kv": zoo.mha_host(), "mamba": zoo.mamba_host()}
    with pytest.raises(NoRoute) as rejected, families.attached(config(tmp_path), pools):
        pass
    shown = str(rejected.value)
    assert "no backend takes mamba" in shown
    assert "POOL" in shown
    assert "odd does not take mamba pools" in shown


def test_a_draft_that_no_plugin_takes_stops_a_strict_engine_late_or_not(
    load: Callable[[odd.Odd], odd.Odd], tmp_path: Path
) -> None:
    load(odd.Odd(draft=Support.NO))
    draft = {"draft": zoo.mha_host(layers=1)}
    for first, late in (({}, draft), (draft, {})):
        pools = {"kv": zoo.mha_host(), **first}
        with (
            pytest.raises(NoRoute, match="odd has no draft"),
            families.attached(config(tmp_path), pools, late),
        ):
            pass


@pytest.mark.parametrize("late", [True, False])
def test_a_lenient_engine_restores_the_target_beside_an_empty_draft(
    load: Callable[[odd.Odd], odd.Odd],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    late: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    load(odd.Odd(draft=Support.NO))
    target, draft = zoo.mha_host(), zoo.mha_host(layers=1)
    zoo.fill(target, 1)
    zoo.fill(draft, 2)
    keys = families.hashes(2)
    pools = {"kv": target} if late else {"kv": target, "draft": draft}
    with (
        caplog.at_level(logging.WARNING),
        families.attached(
            config(tmp_path, drafts="lenient"), pools, {"draft": draft} if late else {}
        ) as storage,
    ):
        move = PoolTransfer(PoolName.DRAFT, zoo.slots(draft, [0, 1]), keys=keys)
        assert storage.batch_set_v2([move]) == {"draft": [True, True]}
        storage.batch_set_v1(keys, zoo.slots(target, [0, 1]))
        found = storage.batch_exists_v2(keys, [PoolTransfer(PoolName.DRAFT)])
        assert found.kv_hit_pages == 2
        untouched = zoo.page(draft, 2)
        assert storage.batch_get_v2([move]) == {"draft": [True, True]}
        # Not what another prefix left there, but nothing.
        assert not zoo.page(draft, 0).any()
        assert not zoo.page(draft, 1).any()
        assert torch.equal(zoo.page(draft, 2), untouched)
    said = [line for line in caplog.messages if "pool draft is not stored" in line]
    assert len(said) == 1


def test_a_raising_plugin_is_a_miss_in_every_method(
    load: Callable[[odd.Odd], odd.Odd], tmp_path: Path
) -> None:
    plugin = load(odd.Odd())
    pool = zoo.mha_host()
    with families.attached(config(tmp_path), {"kv": pool}) as storage:
        plugin.raises = True
        slots = zoo.slots(pool, [0, 1])
        keys = families.hashes(2)
        assert storage.batch_exists(keys) == 0
        assert storage.batch_set_v1(keys, slots) == [False, False]
        assert storage.batch_get_v1(keys, slots) == [False, False]


def test_a_clear_that_failed_is_not_a_success_for_the_engine(
    load: Callable[[odd.Odd], odd.Odd],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    plugin = load(odd.Odd())
    group = controllers.become_rank(0, 1, tmp_path / "store")
    pool, token_ids = zoo.mha_host(), controllers.tokens(2 * zoo.PAGE)
    extra = {"plugin": "odd", **QUICK}
    with controllers.controller({"kv": pool}, extra, group=group) as made:
        controllers.back_up(made, zoo.slots(pool, [0, 1]), token_ids, [])
        attachment = StorageAttachment(SimpleNamespace(cache_controller=made))
        plugin.raises = True
        with caplog.at_level(logging.ERROR):
            assert attachment.clear() is False
        assert "not everything is cleared (odd: error)" in caplog.text
        plugin.raises = False
        assert attachment.clear() is True


def test_a_hanging_plugin_costs_a_deadline_and_then_nothing(
    load: Callable[[odd.Odd], odd.Odd], tmp_path: Path
) -> None:
    plugin = load(odd.Odd())
    pool = zoo.mha_host()
    zoo.fill(pool, 1)
    keys = families.hashes(3)
    # No probe: what reaches the plugin are the engine's own calls.
    extra = {"core": {**QUICK["core"], "breaker": {"backoff": "60 s"}}}
    with families.attached(config(tmp_path, **extra), {"kv": pool}) as storage:
        assert all(storage.batch_set_v1(keys, zoo.slots(pool, [0, 1, 2])))
        plugin.hangs = True
        target = zoo.slots(pool, [5, 6, 7])
        before = zoo.snapshot(pool)
        began = time.monotonic()
        for _ in range(4):
            assert storage.batch_get_v1(keys, target) == [False] * 3
        assert time.monotonic() - began < odd.HANGS_S / 2
        assert plugin.calls[Operation.GET] == 2, "the breaker is open after two"
        plugin.go_on.set()
        plugin.hangs = False
        began = time.monotonic()
        storage.close()
        assert time.monotonic() - began < 5
    # The calls have ended by now, and the engine may have used these pages
    # again: nothing of them came late.
    assert all(map(torch.equal, before, zoo.snapshot(pool)))


def test_one_call_over_several_pools_has_one_deadline(
    load: Callable[[odd.Odd], odd.Odd], tmp_path: Path
) -> None:
    plugin = load(odd.Odd())
    pools = {"kv": zoo.mha_host(), "swa": zoo.mha_host(), "mamba": zoo.mamba_host()}
    extra = {"core": {**QUICK["core"], "breaker": {"abandoned_calls": 100}}}
    with families.attached(config(tmp_path, **extra), pools) as storage:
        plugin.hangs = True
        moves = [
            PoolTransfer(PoolName(name), zoo.slots(pool, [0]), keys=families.hashes(1))
            for name, pool in pools.items()
        ]
        moved = storage.batch_set_v2(moves)
        assert moved == {name: [False] for name in pools}
        # The first pool took all of the time, so no call is made for the others.
        assert plugin.calls[Operation.PUT] == 1
        plugin.go_on.set()


def test_a_clear_of_target_and_drafts_has_one_deadline(
    load: Callable[[odd.Odd], odd.Odd], tmp_path: Path
) -> None:
    plugin = load(odd.Odd())
    late = {"draft": zoo.mha_host(layers=1), "draft_swa": zoo.mha_host(layers=1)}
    extra = {"core": {**QUICK["core"], "deadlines": {"clear": 0.4}}}
    pools = {"kv": zoo.mha_host()}
    with families.attached(config(tmp_path, **extra), pools, late) as storage:
        plugin.hangs = True
        with pytest.raises(KvdockError, match="odd: timeout"):
            storage.clear()
        # The scheduler waits for it, and with it every request: the drafts, which
        # are attached apart, get what the target has left of the time.
        assert plugin.calls[Operation.CLEAR] == 1
        plugin.hangs = False
        plugin.go_on.set()


def test_the_controller_detaches_in_time_from_a_hanging_plugin(
    load: Callable[[odd.Odd], odd.Odd], tmp_path: Path
) -> None:
    group = controllers.become_rank(0, 1, tmp_path / "store")
    plugin = load(odd.Odd())
    pool = zoo.mha_host()
    tokens = controllers.tokens(2 * zoo.PAGE)
    extra = {"plugin": "odd", **QUICK}
    with controllers.controller({"kv": pool}, extra, group=group) as made:
        plugin.hangs = True
        done = controllers.back_up(made, zoo.slots(pool, [0, 1]), tokens, [])
        assert done.completed_tokens == 0
        began = time.monotonic()
    # SGLang gives its threads ten seconds, and raises after that.
    assert time.monotonic() - began < 8
    plugin.go_on.set()


def test_sglangs_own_injector_changes_no_byte(tmp_path: Path) -> None:
    pool = zoo.mha_host()
    zoo.fill(pool, 1)
    keys = families.hashes(4)
    wanted = [zoo.page(pool, index) for index in range(4)]
    with families.attached(families.config(tmp_path), {"kv": pool}) as storage:
        unreliable = HiCacheStorageFailureInjector(storage, 0.0, 0.5)
        stored = 0
        while stored < 4:
            stored = storage.batch_exists(keys)
            unreliable.batch_set_v1(keys, zoo.slots(pool, [0, 1, 2, 3]))
        for _ in range(30):
            for index in range(8, 12):
                pool.kv_buffer[:, index] = 0
            targets = zoo.slots(pool, [8, 9, 10, 11])
            for n, good in enumerate(unreliable.batch_get_v1(keys, targets)):
                if good:
                    assert torch.equal(zoo.page(pool, 8 + n), wanted[n])
        unreliable.close()


def test_unknown_settings_are_rejected_by_name(tmp_path: Path) -> None:
    wrong = {
        "core: unknown setting 'deadline'": {"core": {"deadline": {}}},
        "'fil'": {"backends": {"fil": {}}, "routes": {"kv": "fil"}},
    }
    for message, extra in wrong.items():
        cfg = families.config(tmp_path, extra=extra)
        with (
            pytest.raises(KvdockError, match=message),
            families.attached(cfg, {"kv": zoo.mha_host()}),
        ):
            pass

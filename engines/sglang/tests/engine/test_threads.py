"""The engine's threads call one storage object at the same time."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import test_families as families
import torch
import zoo
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

ROUNDS = 60
WRITTEN, READ = [0, 1, 2, 3], [8, 9, 10, 11]


def test_backup_query_and_prefetch_go_on_while_the_scheduler_registers_a_draft(
    store: dict[str, Any],
) -> None:
    pool, draft = zoo.mha_host(), zoo.mha_host(layers=1)
    zoo.fill(pool, 1)
    zoo.fill(draft, 2)
    expected = [zoo.page(pool, index) for index in WRITTEN]
    stored: queue.Queue[list[str] | None] = queue.Queue()
    found: queue.Queue[list[str] | None] = queue.Queue()

    with families.attached(families.config_of(store), {"kv": pool}) as storage:

        def backup() -> None:
            slots = zoo.slots(pool, WRITTEN)
            for number in range(ROUNDS):
                keys = families.hashes(4, f"{number}.")
                assert storage.batch_set_v1(keys, slots) == [True] * 4
                stored.put(keys)
            stored.put(None)

        def query() -> None:
            while (keys := stored.get(timeout=30)) is not None:
                assert storage.batch_exists(keys) == 4
                found.put(keys)
            found.put(None)

        def prefetch() -> int:
            loaded = 0
            while (keys := found.get(timeout=30)) is not None:
                for index in READ:
                    pool.kv_buffer[:, index] = 0
                assert storage.batch_get_v1(keys, zoo.slots(pool, READ)) == [True] * 4
                got = [zoo.page(pool, index) for index in READ]
                assert all(map(torch.equal, got, expected))
                loaded += len(keys)
            return loaded

        with ThreadPoolExecutor(3) as threads:
            running = [threads.submit(one) for one in (backup, query, prefetch)]
            storage.register_mem_host_pool_v2(draft, PoolName.DRAFT)
            keys = families.hashes(2, "draft")
            move = PoolTransfer(PoolName.DRAFT, zoo.slots(draft, [0, 1]), keys=keys)
            for _ in range(10):
                assert storage.batch_set_v2([move]) == {"draft": [True] * 2}
                storage.get_stats()
            results = [one.result(timeout=60) for one in running]
        assert results[-1] == 4 * ROUNDS


@pytest.mark.parametrize("what", ["set", "get", "exists"])
def test_calls_that_meet_a_close_are_answered_and_miss_after_it(
    what: str, store: dict[str, Any]
) -> None:
    pool = zoo.mha_host()
    zoo.fill(pool, 1)
    keys, slots = families.hashes(2), zoo.slots(pool, [0, 1])
    under_way, closed = threading.Event(), threading.Event()
    with families.attached(families.config_of(store), {"kv": pool}) as storage:
        calls: dict[str, Any] = {
            "set": lambda: sum(storage.batch_set_v1(keys, slots)),
            "get": lambda: sum(storage.batch_get_v1(keys, slots)),
            "exists": lambda: storage.batch_exists(keys),
        }
        assert storage.batch_set_v1(keys, slots) == [True] * 2

        def storm() -> int:
            while not closed.is_set():
                assert calls[what]() in (0, 1, 2)
                under_way.set()
            return int(calls[what]())

        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(storm)
            assert under_way.wait(60)
            storage.close()
            closed.set()
            assert running.result(timeout=20) == 0

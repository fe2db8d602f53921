"""(16) What routers are told of storage: an index of the events equals the store."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import controllers
import pytest
import tamper
from router_index import WORD, DynamoIndex, LlmdIndex, finish, published, replay
from sglang.srt.disaggregation.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    StorageMedium,
)
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.utils import hash_str_to_int64
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from test_radix_cache import fill
from test_radix_cache import kit as kit  # noqa: PLC0414 - a fixture

from kvdock_segments.directory_store import DirectoryStore

DISK = StorageMedium.DISK
PAGE = 16
LOAD = Path(__file__).with_name("router_load.py")


@pytest.fixture(autouse=True)
def patched() -> Iterator[None]:
    controllers.close_name_branches()
    yield
    controllers.open_name_branches()


@pytest.fixture
def store(tmp_path: Path) -> dict[str, Any]:
    return {
        "plugin": "file",
        "root": str(tmp_path / "store"),
        "core": {"page_events": 1024},
    }


class Index:
    """What a router knows of one worker's storage."""

    def __init__(self) -> None:
        self.blocks: dict[int, list[int]] = {}
        self.parents: dict[int, int | None] = {}
        self.routers = DynamoIndex(PAGE), LlmdIndex()

    def replay(self, events: list[Any]) -> None:
        for router in self.routers:
            router.feed(published(events))
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
            elif event.medium != DISK:
                continue
            elif isinstance(event, BlockStored):
                assert len(event.block_hashes) * event.block_size == len(
                    event.token_ids
                )
                parent = event.parent_block_hash
                for at, one in enumerate(event.block_hashes):
                    first = at * event.block_size
                    self.blocks[one] = list(
                        event.token_ids[first : first + event.block_size]
                    )
                    self.parents[one] = parent
                    parent = one
            elif isinstance(event, BlockRemoved):
                for one in event.block_hashes:
                    del self.blocks[one]


def opened(kit: Any, folder: Path) -> tuple[Any, Any, Any]:
    cache, allocator, requests = build_fixture(kit.cfg)
    kit._init_hicache(
        cache, storage_backend="file", storage_dir=str(folder), prefetch_threshold=1
    )
    cache.tree_core.kv_events.enabled = True
    return cache, allocator, requests


def write(kit: Any, opened: tuple[Any, Any, Any], tokens: Any) -> Any:
    cache, allocator, requests = opened
    kit._insert(cache, allocator, requests, tokens)
    fill(allocator, requests, 1)
    leaf = match_prefix(cache, tokens).last_device_node
    kit._backup_node(cache, leaf)
    kit._write_path_to_l3(cache, leaf)
    kit._flush_l3_backups(cache)
    return cache.tree_core.node_by_id(leaf) if isinstance(leaf, int) else leaf


def in_store(cache: Any, root: Path, hashes: list[str]) -> set[int]:
    """Return the event hashes of those pages of kv that a store has on disk."""
    attached = cache.cache_controller.storage_backend._attachments.attached_pool("kv")
    placement = attached.attachment["kv"].placements[0]
    holds = DirectoryStore(root).finder(placement.namespace)
    return {
        hash_str_to_int64(one) for one in hashes if all(holds(placement.keys([one])))
    }


def hashes_of(cache: Any) -> list[str]:
    nodes = cache.tree_core._node_arena.values()
    return [one for node in nodes for one in node.hash_value or ()]


def until_equal(index: Index, cache: Any, root: Path) -> None:
    """Replay events until the index has what the store has, or fail."""
    end_s = time.monotonic() + 60
    while True:
        index.replay(cache.take_events())
        stored = in_store(cache, root, hashes_of(cache))
        if index.blocks.keys() == stored:
            dynamo, llmd = index.routers
            words = {one % WORD for one in stored}
            assert dynamo.tiers["disk"] == llmd.holds("disk") == words
            assert not dynamo.dropped, dynamo.dropped
            return
        assert time.monotonic() < end_s, (index.blocks.keys(), stored)
        time.sleep(0.01)


@pytest.mark.parametrize("kit", ["full", "full-swa"], indirect=True)
def test_an_index_of_the_events_equals_the_store(kit: Any, tmp_path: Path) -> None:
    index, root = Index(), tmp_path / "store"
    engine = opened(kit, tmp_path)
    cache = engine[0]
    index.replay(cache.take_events())
    assert not index.blocks
    tokens = kit._make_seq(1, 4)
    write(kit, engine, tokens)
    until_equal(index, cache, root)
    assert len(index.blocks) == 4
    # The tokens and the parents are those of the prefix.
    first = next(one for one, parent in index.parents.items() if parent is None)
    page = cache.page_size
    chain = [first]
    while following := [one for one, up in index.parents.items() if up == chain[-1]]:
        chain += following
    assert [token for one in chain for token in index.blocks[one]] == list(tokens)
    assert all(len(index.blocks[one]) == page for one in chain)
    # A second prefix, and damage that a load finds: it deletes the page.
    write(kit, engine, kit._make_seq(9000, 4))
    until_equal(index, cache, root)
    assert len(index.blocks) == 8
    assert tamper.damage(root)
    other = opened(kit, tmp_path)[0]
    kit._consume_prefetch(other, tokens, CacheRequestHandle("r", 0))
    other.cache_controller.detach_storage_backend()
    cache.cache_controller.storage_backend.clear()
    until_equal(index, cache, root)
    assert not index.blocks
    cache.cache_controller.detach_storage_backend()


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_a_restarted_engine_tells_of_what_it_stores_itself(
    kit: Any, tmp_path: Path
) -> None:
    root, tokens = tmp_path / "store", kit._make_seq(1, 4)
    for first in (5000, 9000):
        # A router forgets a worker that is gone, and begins with nothing.
        index, engine = Index(), opened(kit, tmp_path)
        cache = engine[0]
        kit._consume_prefetch(cache, tokens, CacheRequestHandle("r", 0))
        write(kit, engine, kit._make_seq(first, 4))
        end_s = time.monotonic() + 60
        while len(index.blocks) < 4 and time.monotonic() < end_s:
            index.replay(cache.take_events())
        assert len(index.blocks) == 4
        assert set(index.blocks) <= in_store(cache, root, hashes_of(cache))
        cache.cache_controller.detach_storage_backend()
        if first == 5000:
            other = opened(kit, tmp_path)
            write(kit, other, tokens)
            other[0].cache_controller.detach_storage_backend()


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_nothing_is_noted_where_kv_events_are_off(kit: Any, tmp_path: Path) -> None:
    engine = opened(kit, tmp_path)
    engine[0].tree_core.kv_events.enabled = False
    write(kit, engine, kit._make_seq(1, 4))
    assert engine[0].take_events() == []
    assert not engine[0].cache_controller.storage_backend.events._noted
    engine[0].cache_controller.detach_storage_backend()


# --- A load in a process of its own, recorded and replayed ------------------------


def start(folder: Path, pages: int, first: int, *more: str) -> subprocess.Popen[bytes]:
    words = [sys.executable, str(LOAD), str(folder), str(pages), str(first), *more]
    with (folder / "log").open("a") as log:
        return subprocess.Popen(words, stdout=log, stderr=log)


def left(folder: Path) -> set[int]:
    """Return the event hashes of what the store still has of the last load."""
    return {one % WORD for one in json.loads((folder / "left").read_text())}


@pytest.mark.slow
@pytest.mark.long
def test_indexes_equal_the_store_after_an_hour_of_evictions(tmp_path: Path) -> None:
    pages = 20_000  # 5.5 a second
    finish(start(tmp_path, pages, 0), tmp_path, 1800)
    dynamo, llmd = replay(tmp_path, PAGE)
    stored = left(tmp_path)
    assert 0 < len(stored) < pages / 2, "the store has evicted"
    assert dynamo.tiers["disk"] == llmd.holds("disk") == stored


def test_indexes_equal_the_store_after_a_kill_a_restart_and_evictions(
    tmp_path: Path,
) -> None:
    killed = start(tmp_path, 40_000, 1 << 20, "killed")
    events, end_s = tmp_path / "events", time.monotonic() + 300
    while not events.exists() or events.stat().st_size < 50_000:
        assert killed.poll() is None, (tmp_path / "log").read_text()[-4000:]
        assert time.monotonic() < end_s
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    assert replay(tmp_path, PAGE)[0].tiers["disk"]
    # A router forgets a worker that is gone; its successor begins with nothing.
    events.unlink()
    finish(start(tmp_path, pages := 1200, 0), tmp_path, 300)
    dynamo, llmd = replay(tmp_path, PAGE)
    stored = left(tmp_path)
    assert 0 < len(stored) < pages / 2, "the store has evicted"
    assert dynamo.tiers["disk"] == llmd.holds("disk") == stored

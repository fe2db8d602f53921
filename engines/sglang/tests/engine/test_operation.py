"""A storage call can tell which request, or which node, it belongs to."""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import controllers
import pytest
import tamper
import test_families as families
import torch
import zoo
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    PrefetchOperation,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    StorageOperation as EngineOperation,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.test.kits.unified_radix_cache.fixtures import build_fixture, match_prefix
from test_radix_cache import kit as kit  # noqa: PLC0414 - a fixture

from kvdock_sglang import KvdockStorage, engine_patches
from kvdock_sglang.operation import (
    OperationKind,
    StorageOperation,
    current,
    note_write,
    run_operation,
)

if TYPE_CHECKING:
    from pathlib import Path

CALLS = ("batch_exists", "batch_exists_v2", "batch_get_v1", "batch_set_v1")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """Collect which operation each storage call belongs to."""
    found: list[tuple[str, Any]] = []
    for name in CALLS:
        original = getattr(KvdockStorage, name)

        def called(
            self: Any, *args: Any, _of: Any = original, _name: str = name, **more: Any
        ) -> Any:
            found.append((_name, self.operation))
            return _of(self, *args, **more)

        monkeypatch.setattr(KvdockStorage, name, called)
    return found


@pytest.fixture
def patched() -> Iterator[None]:
    controllers.close_name_branches()
    yield
    controllers.open_name_branches()


def run(kit: Any, folder: Path) -> None:
    """Write a prefix, forget it, and prefetch it for a request."""
    tokens = kit._make_seq(1, 4)
    cache, allocator, requests = build_fixture(kit.cfg)
    storage = {"storage_backend": "file", "storage_dir": str(folder)}
    kit._init_hicache(cache, **storage, prefetch_threshold=1)
    kit._insert(cache, allocator, requests, tokens)
    leaf = match_prefix(cache, tokens).last_device_node
    kit._backup_node(cache, leaf)
    kit._write_path_to_l3(cache, leaf)
    kit._flush_l3_backups(cache)
    cache.cache_controller.detach_storage_backend()
    other, *_ = build_fixture(kit.cfg)
    kit._init_hicache(other, **storage, prefetch_threshold=1)
    kit.addCleanup(other.cache_controller.detach_storage_backend)
    kit._consume_prefetch(other, tokens, CacheRequestHandle("request-7", 0))
    assert match_prefix(other, tokens).host_hit_length == len(tokens)


@pytest.mark.usefixtures("patched")
@pytest.mark.parametrize("kit", ["full", "full-swa"], indirect=True)
def test_every_storage_call_has_its_operation(
    kit: Any, tmp_path: Path, seen: list[tuple[str, Any]]
) -> None:
    run(kit, tmp_path)
    writes = [found for name, found in seen if "set" in name]
    reads = [found for name, found in seen if "set" not in name]
    assert writes
    assert all(one == StorageOperation(kind=OperationKind.WRITE) for one in writes)
    prefetch = StorageOperation(kind=OperationKind.PREFETCH, request="request-7")
    assert {name for name, found in seen if found == prefetch} >= {"batch_get_v1"}
    assert all(one == prefetch for one in reads)
    assert current() is None


@pytest.mark.parametrize("kit", ["full"], indirect=True)
def test_without_the_patch_everything_works_and_no_call_has_one(
    kit: Any, tmp_path: Path, seen: list[tuple[str, Any]]
) -> None:
    run(kit, tmp_path)
    assert seen
    assert all(found is None for _, found in seen)


def test_the_salt_of_a_tenant_is_not_printed() -> None:
    one = StorageOperation(kind=OperationKind.WRITE, salt="secret")
    assert "secret" not in repr(one)


def test_the_patches_have_a_place_here() -> None:
    assert engine_patches.skipped_patches() == ()


@pytest.mark.usefixtures("patched")
def test_extra_key_and_salt_come_with_a_prefetch_and_with_a_write() -> None:
    key = RadixKey(array("q", range(16)), extra_key="adapter", cache_salt="tenant")
    prefetch = PrefetchOperation(CacheRequestHandle("request-8", 0), key)
    written: list[Any] = []

    class Cache:
        """A tree with one node, and what SGLang's own does with it."""

        tree_core = SimpleNamespace(prefetch_anchor_info=lambda _: ("adapter", None))

    def write(_: Cache, __: int) -> None:
        written.append(EngineOperation(torch.zeros(0), [1]))

    note_write(write, Cache(), 1)
    run = partial(run_operation, lambda *_: current())
    assert run(None, prefetch) == StorageOperation(
        kind=OperationKind.PREFETCH,
        request="request-8",
        extra_key="adapter",
        salt="tenant",
    )
    assert run(None, written[0]) == StorageOperation(
        kind=OperationKind.WRITE, extra_key="adapter"
    )


@pytest.mark.parametrize("whole", [False, True], ids=["one batch", "its operation"])
def test_a_damaged_prefix_heals_at_once_where_its_operation_is_known(
    tmp_path: Path, *, whole: bool
) -> None:
    """The engine asks for no page after the first batch that fails."""
    pool = zoo.mha_host(page=1, width=64)
    keys = families.hashes(200)
    slots = zoo.slots(pool, list(range(200)))
    found = StorageOperation(kind=OperationKind.PREFETCH, request="r")
    operation = SimpleNamespace(hash_value=keys, host_indices=slots)
    if whole:
        operation._kvdock_operation = found
    with families.attached(families.config(tmp_path), {"kv": pool}) as storage:
        assert all(storage.batch_set_v1(keys, slots))
        assert storage.batch_exists(keys) == 200
        assert tamper.damage(tmp_path)
        one = partial(storage.batch_get_v1, keys[:128], slots[:128])
        loaded = run_operation(lambda *_: one(), None, operation)
        assert not any(loaded)
        assert storage.batch_exists(keys[:128]) == 0
        assert storage.batch_exists(keys[128:]) == (0 if whole else 72)


@pytest.mark.parametrize(("first", "kept"), [(0, 0), (50, 100)])
def test_a_damaged_sidecar_heals_at_once_where_it_has_the_slots_of_its_anchor(
    tmp_path: Path, first: int, kept: int
) -> None:
    pool, draft = (zoo.mha_host(page=1, width=64, layers=n) for n in (3, 1))
    keys = families.hashes(200)
    slots = zoo.slots(pool, list(range(200)))
    operation = SimpleNamespace(
        hash_value=keys,
        host_indices=slots,
        _kvdock_operation=StorageOperation(kind=OperationKind.PREFETCH, request="r"),
    )
    pools = {"kv": pool, "draft": draft}
    with families.attached(families.config(tmp_path), pools) as storage:
        attached = storage._attachments.attached_pool("draft")
        assert attached is not None

        def left() -> int:
            return int(attached.lookup(keys, time.monotonic() + 9).sum())

        move = PoolTransfer(PoolName.DRAFT, slots, keys=keys)
        assert all(storage.batch_set_v2([move])["draft"])
        assert left() == 200
        assert tamper.damage(tmp_path)
        where = slots[first : first + 100]
        move = PoolTransfer(PoolName.DRAFT, where, keys=keys[:100])
        run_operation(lambda *_: storage.batch_get_v2([move]), None, operation)
        assert left() == kept

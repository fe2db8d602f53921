"""SGLang's real `HybridCacheController` with its threads, over small pools."""

from __future__ import annotations

import pkgutil
import threading
import time
from array import array
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import zoo
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.hicache_storage import (
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import (
    HybridCacheController,
)
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

from kvdock_sglang import engine_patches

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path


def become_rank(rank: int, size: int, where: Path, *, dcp_size: int = 1) -> Any:
    """Make this process one rank of a deployment; return its group."""
    arguments = ServerArgs(model_path="dummy", device="cpu", page_size=zoo.PAGE)
    set_global_server_args_for_scheduler(arguments)
    get_parallel().override_permanently(
        tp_rank=rank,
        tp_size=size,
        attn_tp_rank=rank,
        attn_tp_size=size,
        moe_tp_size=size,
        pp_rank=0,
        pp_size=1,
        attn_dcp_size=dcp_size,
        attn_dcp_rank=rank % dcp_size,
    )
    if not dist.is_initialized():
        store = dist.FileStore(str(where), size)  # type: ignore[attr-defined]  # its own stubs leave it out
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return dist.group.WORLD


def close_name_branches() -> None:
    """Install the hooks as SGLang does when it finds the entry point."""
    engine_patches.install()
    HookRegistry.apply_hooks()


def open_name_branches() -> None:
    """Take the hooks back: SGLang as it is without kvdock's entry point."""
    for closed in engine_patches.PATCHES:
        owner, _, name = closed.target.rpartition(".")
        found = pkgutil.resolve_name(owner)
        original = getattr(getattr(found, name), "__wrapped__", None)
        if original is not None:
            setattr(found, name, original)
    HookRegistry.reset()


def entry(name: str, pool: Any, *, anchor: bool = False) -> PoolEntry:
    return PoolEntry(
        name=PoolName(name),
        host_pool=pool,
        device_pool=getattr(pool, "test_device_pool", None),
        layer_mapper=lambda layer: layer,
        is_primary_index_anchor=anchor,
    )


@contextmanager
def controller(
    pools: dict[str, Any],
    extra: dict[str, Any],
    *,
    group: Any,
    page: int = zoo.PAGE,
    late: dict[str, Any] | None = None,
    backend: str = "dynamic",
) -> Iterator[HybridCacheController]:
    """Run a controller over these pools, with kvdock as its backend."""
    anchor = pools["kv"]
    allocator = SimpleNamespace(get_kvcache=lambda: anchor.test_device_pool)
    host = HostPoolGroup(
        [entry(name, pool, anchor=name == "kv") for name, pool in pools.items()]
    )
    made = HybridCacheController(
        allocator,
        host,
        page,
        group,
        threading.Event(),
        write_policy="write_through",
        io_backend="direct",
        model_name="org/model",
        enable_storage_metrics=True,
    )
    made.attach_storage_backend(
        storage_backend=backend,
        prefetch_threshold=1,
        model_name="org/model",
        storage_backend_extra_config={
            "backend_name": "kvdock",
            "module_path": "kvdock_sglang",
            "class_name": "KvdockStorage",
            **extra,
        },
        host_pools=host.entries,
    )
    for name, pool in (late or {}).items():
        made.register_host_pool_entry(entry(name, pool))
    try:
        yield made
    finally:
        made.detach_storage_backend()


def until(what: str, ready: Any, timeout_s: float = 30.0) -> Any:
    """Poll until something is true, within a deadline."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = ready()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"{what} did not happen within {timeout_s} s")


def tokens(count: int, start: int = 1) -> list[int]:
    return list(range(start, start + count))


def page_hashes(made: HybridCacheController, token_ids: Sequence[int]) -> list[str]:
    return list(
        get_storage_hash_str(array("q", token_ids), None, page_size=made.page_size)
    )


def follows(name: str) -> PoolTransfer:
    """A sidecar whose pages are the anchor's."""
    return PoolTransfer(name=PoolName(name), indices_from_pool=PoolName.KV)


def states(
    name: str, slots: torch.Tensor, keys: list[str], *, window: bool = False
) -> PoolTransfer:
    """A sidecar with pages of its own, of which the last ones count."""
    given = ["__placeholder__"] * len(keys) if window else keys
    return PoolTransfer(
        name=PoolName(name),
        host_indices=slots,
        keys=given,
        hit_policy=PoolHitPolicy.TRAILING_PAGES,
    )


def back_up(
    made: HybridCacheController,
    slots: torch.Tensor,
    token_ids: list[int],
    extra: list[PoolTransfer],
) -> Any:
    """Store pages by the engine's own backup thread; return the operation."""
    made.write_storage(
        slots,
        array("q", token_ids),
        hash_value=page_hashes(made, token_ids),
        extra_pools=extra,
    )
    return until("the backup", lambda: taken(made.ack_backup_queue))


def taken(queue: Any) -> Any:
    return queue.get_nowait() if not queue.empty() else None


def fetch(
    made: HybridCacheController,
    token_ids: list[int],
    slots: torch.Tensor,
    extra: list[PoolTransfer],
) -> Any:
    """Query and load a prefix by the engine's own threads.

    The scheduler's part, which reserves host slots between the two, is played
    here: `slots` are those of as many pages as were found.
    """
    handle = CacheRequestHandle(f"request-{time.monotonic_ns()}", 0)
    operation = made.prefetch(handle, array("q", token_ids), extra_pools=extra)
    found = until("the query", lambda: taken(made.prefetch_hit_queue))
    assert found is operation
    if not operation.hash_value:
        return operation
    reserve = len(operation.hash_value) * made.page_size
    operation.host_indices = slots[:reserve]
    made.prefetch_buffer.put(operation)

    def completed() -> bool:
        ack = taken(made.ack_prefetch_queue)
        if ack is None:
            return False
        if ack.completed_tokens is not None:
            operation.completed_tokens = ack.completed_tokens
        if ack.pool_hits is not None:
            operation.pool_storage_result.update_extra_pool_hit_pages(ack.pool_hits)
        return bool(ack.completed_req)

    until("the prefetch", completed)
    return operation

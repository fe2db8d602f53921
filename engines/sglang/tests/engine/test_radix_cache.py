"""(3) SGLang's own radix tree over kvdock, by the kit in SGLang's wheel.

Device to host to storage, and in a second tree from storage to host to device.
"""

from __future__ import annotations

import json
import unittest
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.test.kits.unified_radix_cache import fixtures, mixins
from sglang.test.kits.unified_radix_cache.config import CacheConfig
from sglang.test.kits.unified_radix_cache.fixtures import (
    build_fixture,
    match_prefix,
    node_device_value,
)
from sglang.test.kits.unified_radix_cache.storage import (
    UnifiedRadixCacheStorageFixtures,
)

from kvdock_sglang import KvdockStorage

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

FULL, SWA, MAMBA = ComponentType.FULL, ComponentType.SWA, ComponentType.MAMBA
CONFIGS = {
    "full": CacheConfig(page_size=16, components=(FULL,)),
    "full-swa": CacheConfig(
        page_size=16, components=(FULL, SWA), sliding_window_size=32, kv_size=512
    ),
    "full-mamba": CacheConfig(page_size=1, components=(FULL, MAMBA)),
}


class Kit(UnifiedRadixCacheStorageFixtures, unittest.TestCase):  # type: ignore[misc] # SGLang is not typed
    """The kit's steps, without a test of its own."""

    __test__ = False

    def runTest(self) -> None:  # noqa: N802 - unittest's name
        """Hold the kit's clean-ups together; the steps are called one by one."""


def through_kvdock(store: dict[str, Any], **given: Any) -> Any:
    """Build the kit's launch arguments with kvdock in place of its file store."""
    real = REAL_ARGUMENTS
    given["device"] = "cpu"
    if "hicache_io_backend" in given:
        given |= {
            "hicache_io_backend": "direct",
            "hicache_mem_layout": "page_first_direct",
        }
    if given.get("hicache_storage_backend") == "file":
        own = json.loads(given["hicache_storage_backend_extra_config"] or "{}")
        given["hicache_storage_backend"] = "dynamic"
        given["hicache_storage_backend_extra_config"] = json.dumps(
            {
                "backend_name": "kvdock",
                "module_path": "kvdock_sglang",
                "class_name": "KvdockStorage",
                **store,
                **own,
            }
        )
    return real(**given)


REAL_ARGUMENTS = mixins.ServerArgs


@pytest.fixture
def kit(request: pytest.FixtureRequest, store: dict[str, Any]) -> Iterator[Kit]:
    made = Kit()
    made.cfg = CONFIGS[request.param]
    arguments = partial(through_kvdock, store)
    with (
        mock.patch.object(mixins, "ServerArgs", arguments),
        mock.patch.object(fixtures, "ServerArgs", arguments),
        mock.patch.object(fixtures, "get_device", return_value="cpu"),
    ):
        yield made
        made.doCleanups()


def fill(allocator: Any, requests: Any, seed: int) -> None:
    """Give every pool on the "device" bytes that differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in buffers(allocator, requests):
        buffer.copy_(torch.rand(buffer.shape, generator=generator))


def buffers(allocator: Any, requests: Any) -> list[torch.Tensor]:
    pool = allocator.get_kvcache()
    found: list[torch.Tensor] = []
    for name in ("full_kv_pool", "swa_kv_pool"):
        part = getattr(pool, name, None)
        if part is not None:
            found += [*part.k_buffer, *part.v_buffer]
    if not found:
        found = [*pool.k_buffer, *pool.v_buffer]
    mamba = getattr(requests, "mamba_pool", None)
    if mamba is not None:
        found += [mamba.mamba_cache.temporal, *mamba.mamba_cache.conv]
    return found


def seen(cache: Any, allocator: Any, requests: Any, node: Any) -> list[torch.Tensor]:
    """Copy what the device holds for a prefix, in every pool."""
    pool = allocator.get_kvcache()
    full = getattr(pool, "full_kv_pool", pool)
    path = cache.path_device_indices(node)
    found = [one[path] for one in (*full.k_buffer, *full.v_buffer)]
    window = node_device_value(cache, node, SWA) if cache_has(cache, SWA) else None
    if window is not None:
        slots = pool.translate_loc_from_full_to_swa(path[-len(window) :])
        part = pool.swa_kv_pool
        found += [one[slots] for one in (*part.k_buffer, *part.v_buffer)]
    state = node_device_value(cache, node, MAMBA) if cache_has(cache, MAMBA) else None
    if state is not None:
        held = requests.mamba_pool.mamba_cache
        found += [one[:, state] for one in (held.temporal, *held.conv)]
    return [one.clone() for one in found]


def cache_has(cache: Any, component: ComponentType) -> bool:
    return component in cache.tree_components


@pytest.mark.parametrize("kit", CONFIGS, indirect=True)
def test_a_prefix_goes_down_to_storage_and_comes_up_in_another_tree(
    kit: Any, tmp_path: Path
) -> None:
    tokens = kit._make_seq(1, 4)

    cache, allocator, requests = build_fixture(kit.cfg)
    kit._init_hicache(
        cache, storage_backend="file", storage_dir=str(tmp_path), prefetch_threshold=1
    )
    assert isinstance(cache.cache_controller.storage_backend, KvdockStorage)
    kit._insert(cache, allocator, requests, tokens)
    fill(allocator, requests, 1)
    leaf = match_prefix(cache, tokens).last_device_node
    before = seen(cache, allocator, requests, leaf)
    kit._backup_node(cache, leaf)
    kit._write_path_to_l3(cache, leaf)
    kit._flush_l3_backups(cache)
    cache.cache_controller.detach_storage_backend()

    other, allocator, requests = build_fixture(kit.cfg)
    kit._init_hicache(
        other, storage_backend="file", storage_dir=str(tmp_path), prefetch_threshold=1
    )
    # What is still attached has its memory registered when that is used again.
    kit.addCleanup(other.cache_controller.detach_storage_backend)
    fill(allocator, requests, 2)
    assert match_prefix(other, tokens).device_prefix_len == 0
    kit._consume_prefetch(other, tokens, CacheRequestHandle("second", 0))
    match = match_prefix(other, tokens)
    assert match.host_hit_length == len(tokens)
    request = kit._make_req(requests)
    kit._apply_match_to_req(request, match)
    kit._load_back_node(other, match.last_host_node, req=request)
    leaf = match_prefix(other, tokens).last_device_node
    after = seen(other, allocator, requests, leaf)
    assert len(after) == len(before)
    assert all(map(torch.equal, before, after))

"""LMCache itself over the adapter: its acceptance command, and its storage manager."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lmcache.v1.distributed.api import GroupedObjectKeys, PrefetchTaskSpec
from lmcache.v1.distributed.config import (
    EvictionConfig,
    L1ManagerConfig,
    L1MemoryManagerConfig,
    StorageManagerConfig,
)
from lmcache.v1.distributed.l2_adapters.config import L2AdaptersConfig
from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import PluginL2AdapterConfig
from lmcache.v1.distributed.storage_manager import StorageManager
from lmcache_rigs import PATIENT, keys, layout, on_files

from kvdock_s3.server import local_server


@contextmanager
def settings(backend: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the adapter's settings, with a server on this host for s3."""
    if backend == "file":
        yield on_files(folder)
        return
    with local_server({}) as (given, _):
        yield {
            "plugin": "s3",
            **given,
            "revision": "r",
            "core": {"deadlines": PATIENT},
        }


def plugin(given: dict[str, Any]) -> dict[str, Any]:
    """Return LMCache's own form of an adapter of another distribution."""
    return {
        "type": "plugin",
        "module_path": "kvdock_lmcache.adapter",
        "class_name": "KvdockL2Adapter",
        "adapter_params": given,
    }


@pytest.mark.parametrize("backend", ["file", "s3"])
def test_lmcaches_own_benchmark_verifies_the_bytes(
    backend: str, tmp_path: Path
) -> None:
    lmcache = Path(sys.executable).with_name("lmcache")
    with settings(backend, tmp_path / "store") as given:
        found = subprocess.run(
            [
                *(lmcache, "bench", "l2", "--l2-adapter", json.dumps(plugin(given))),
                *("--num-keys", "8", "--in-flight", "3", "--rounds", "4"),
                *("--lookup-max-hit-rate", "0.5", "--no-skip-verify"),
                *("--format", "json", "--output", tmp_path / "found.json"),
            ],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert not found.returncode, found.stdout + found.stderr
    assert "All 24 keys data verified OK" in found.stdout
    metrics = json.loads((tmp_path / "found.json").read_text())["metrics"]
    successes = [metrics[f"op_{at}"]["total_success"] for at in range(3)]
    assert successes == [96, 48, 96], "stores, lookups at a hit rate of a half, loads"


@contextmanager
def manager(given: dict[str, Any]) -> Iterator[StorageManager]:
    """Yield LMCache's storage manager, with this adapter as its second level."""
    memory = L1MemoryManagerConfig(16 << 20, False, shm_name="")
    adapter = PluginL2AdapterConfig.from_dict(plugin(given))
    made = StorageManager(
        StorageManagerConfig(
            L1ManagerConfig(memory),
            EvictionConfig("LRU"),
            L2AdaptersConfig([adapter]),
        )
    )
    try:
        yield made
    finally:
        made.close()


def prefetch(made: StorageManager, names: list[Any]) -> int:
    """Bring keys to the first level; return how many came from the second."""
    group = GroupedObjectKeys(names, 0, layout()[0])
    handle = made.submit_prefetch_task(PrefetchTaskSpec([group]))
    assert made.wait_prefetch_status(handle, 60)
    result = made.query_prefetch_status(handle)
    assert result is not None
    return int(result.l2_hit_count)


def test_lmcaches_storage_manager_restores_a_prefix_after_a_restart(
    tmp_path: Path,
) -> None:
    given, names = on_files(tmp_path / "store"), keys(6)
    with manager(given) as made:
        objects = made.reserve_write(names, layout()[0])
        for at, name in enumerate(names):
            objects[name].raw_data[:] = at + 1
        made.finish_write(names)
        ((_, adapter),) = made.l2_adapters()
        end_s = time.monotonic() + 60
        whole = sum(one.get_size() for one in objects.values())
        while adapter.get_usage().total_bytes_used < whole:
            assert time.monotonic() < end_s, "LMCache has not stored the objects"
            time.sleep(0.01)
    with manager(given) as made:
        assert prefetch(made, keys(8)) == 6
        with made.read_prefetched_results(names) as found:
            assert found is not None
            for at, one in enumerate(found):
                size = one.get_size()
                assert set(one.raw_data[:size].tolist()) == {at + 1}
        made.finish_read_prefetched(names)

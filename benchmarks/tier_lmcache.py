"""Measure tiers of memory and disk beside LMCache's, on the same keys and bytes.

Usage: python benchmarks/tier_lmcache.py [--trace FILE] [--requests N] [--dir DIR]

Run it with an interpreter that has kvdock, kvdock-file, kvdock-cli and lmcache. Both
have as much memory and disk, for pages of 64 KiB. Each request is a prefix of pages: it
is looked up, what is there is loaded into the engine's memory, and the rest is stored
from there. The two take turns, request by request, and what is written behind is
waited for, outside of the time. LMCache's own storage manager is used, with its CPU and
its disk backend; its copies to and from the engine are those of one thread, as its
connector for a GPU does them on a stream.

Half of the pages that are loaded are compared. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np
import numpy.typing as npt
import tier_replay
from eviction import SHARED_MEMORY
from eviction_loads import GENERATED

from kvdock_cli.simulation.traces import Trace, read_trace

if TYPE_CHECKING:
    from kvdock import Attachment

PAGE_BYTES = 64 << 10
MEMORY_PAGES, DISK_PAGES = 4096, 16384
REQUESTS = 150
PART = 256
"""Pages that LMCache is asked for at once: its memory must have room for them beside
those that are written to disk, or it waits for ever."""
WAIT_S = 600.0

Memory = npt.NDArray[np.uint8]


class Side(Protocol):
    """One of the two, with its own memory of an engine."""

    memory: Memory

    def lookup(self, blocks: list[int]) -> int:
        """Return how many of the first pages are there."""

    def load(self, blocks: list[int]) -> int:
        """Load pages to the first rows; return how many came."""

    def store(self, blocks: list[int], first: int) -> None:
        """Store pages from rows."""

    def wait(self) -> None:
        """Wait for what is written behind."""


@attrs.define(eq=False)
class Kvdock:
    """Two tiers of the file backend."""

    memory: Memory
    cache: Attachment

    def lookup(self, blocks: list[int]) -> int:
        """Ask for all at once."""
        return self.cache.exists([f"{one:016x}" for one in blocks]).best

    def load(self, blocks: list[int]) -> int:
        """Load them in one call."""
        hashes = [f"{one:016x}" for one in blocks]
        return self.cache.get(hashes, {"kv": np.arange(len(blocks))}).pages

    def store(self, blocks: list[int], first: int) -> None:
        """Store them in one call."""
        rows = np.arange(first, first + len(blocks))
        self.cache.put([f"{one:016x}" for one in blocks], {"kv": rows})

    def wait(self) -> None:
        """Wait for the copies."""
        self.cache.wait_idle(WAIT_S)


class LMCache:
    """LMCache's storage manager over its CPU and its disk backend."""

    def __init__(self, memory: Memory, folder: Path) -> None:
        self.memory = memory
        self.torch: Any = importlib.import_module("torch")
        utils: Any = importlib.import_module("lmcache.utils")
        memory_management: Any = importlib.import_module("lmcache.v1.memory_management")
        config: Any = importlib.import_module("lmcache.v1.config")
        metadata: Any = importlib.import_module("lmcache.v1.metadata")
        events: Any = importlib.import_module("lmcache.v1.event_manager")
        managers: Any = importlib.import_module(
            "lmcache.v1.storage_backend.storage_manager"
        )
        self._key, self._tokens = utils.CacheEngineKey, 16
        self._shape = self.torch.Size((1, 2, 16, PAGE_BYTES // 64))
        self._format = memory_management.MemoryFormat.KV_2LTD
        given = config.LMCacheEngineConfig.from_defaults(
            chunk_size=16,
            local_cpu=True,
            max_local_cpu_size=MEMORY_PAGES * PAGE_BYTES / 2**30,
            local_disk=str(folder),
            max_local_disk_size=DISK_PAGES * PAGE_BYTES / 2**30,
        )
        about = metadata.LMCacheMetadata(
            model_name="m", world_size=1, local_world_size=1, worker_id=0,
            local_worker_id=0, kv_dtype=self.torch.float16,
            kv_shape=(1, 2, 16, 1, PAGE_BYTES // 64), role="worker",
        )  # fmt: skip
        self.manager = managers.StorageManager(given, about, events.EventManager())
        self.backends = self.manager.storage_backends

    def _keys(self, blocks: list[int]) -> list[Any]:
        return [
            self._key(
                model_name="m", world_size=1, worker_id=0, chunk_hash=one,
                dtype=self.torch.float16,
            )
            for one in blocks
        ]  # fmt: skip

    def lookup(self, blocks: list[int]) -> int:
        """Ask for all at once."""
        return int(self.manager.batched_contains(self._keys(blocks))[0])

    def load(self, blocks: list[int]) -> int:
        """Load from memory, then from disk, and copy to the engine's rows."""
        keys = self._keys(blocks)
        _, mapping = self.manager.batched_contains(keys)
        row = 0
        parts = [
            (backend, some[start : start + PART])
            for backend, some in mapping.items()
            for start in range(0, len(some), PART)
        ]
        for backend, some in parts:
            objects = self.manager.batched_get(some, location=backend)
            whole = row + len(some)
            for found in objects:
                if found is None:
                    continue
                if row < whole:
                    flat = found.tensor.view(self.torch.uint8).reshape(-1).numpy()
                    self.memory[row] = flat
                    row += 1
                found.ref_count_down()
            if row < whole:
                break
        return row

    def store(self, blocks: list[int], first: int) -> None:
        """Copy the engine's rows to memory of its own, and hand them over."""
        for start in range(0, len(blocks), PART):
            some = blocks[start : start + PART]
            objects = []
            for at in range(first + start, first + start + len(some)):
                # As its engine does: in one call it evicts nothing but layers.
                one = self.manager.allocate(
                    self._shape, self.torch.float16, self._format
                )
                flat = one.tensor.view(self.torch.uint8).reshape(-1).numpy()
                flat[:] = self.memory[at]
                objects.append(one)
            self.manager.batched_put(self._keys(some), objects)

    def wait(self) -> None:
        """Wait until nothing waits to be written to disk."""
        end_s = time.monotonic() + WAIT_S
        worker = self.backends["LocalDiskBackend"].disk_worker
        while worker.put_tasks and time.monotonic() < end_s:
            time.sleep(0.001)


@attrs.define
class Times:
    """Pages that were loaded, those that were wrong, and seconds."""

    loaded: int = 0
    wrong: int = 0
    lookup_s: float = 0.0
    load_s: float = 0.0
    store_s: float = 0.0


def page(block: int) -> Memory:
    """Return the bytes of a page."""
    return np.random.default_rng(block).integers(0, 256, PAGE_BYTES, np.uint8)


def serve(side: Side, blocks: list[int], times: Times) -> None:
    """Look a request up, load what is there, and store the rest."""
    began_s = time.perf_counter()
    best = side.lookup(blocks)
    times.lookup_s += time.perf_counter() - began_s
    if best:
        began_s = time.perf_counter()
        best = side.load(blocks[:best])
        times.load_s += time.perf_counter() - began_s
    times.loaded += best
    for row in range(0, best, 2):
        times.wrong += not np.array_equal(side.memory[row], page(blocks[row]))
    for row in range(best, len(blocks)):  # the engine computes them
        side.memory[row] = page(blocks[row])
    if best < len(blocks):
        began_s = time.perf_counter()
        side.store(blocks[best:], best)
        times.store_s += time.perf_counter() - began_s
    side.memory[:] = 0
    side.wait()


def main() -> None:
    """Let both serve, in turns, and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSON lines; else generated")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--dir", type=Path, default=None, help="of the disks")
    args = parser.parse_args()
    if args.trace:
        load: Trace = read_trace(args.trace, args.requests)
    else:
        load = GENERATED["conversations"](args.requests)
    longest = max(map(len, load.requests))
    tier_replay.PAGE_BYTES = PAGE_BYTES
    shared = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    memory = np.zeros((longest, PAGE_BYTES), np.uint8)
    counts = tier_replay.Counts()
    with (
        tempfile.TemporaryDirectory(prefix="kvdock-lmcache-", dir=shared) as near,
        tempfile.TemporaryDirectory(prefix="kvdock-lmcache-", dir=args.dir) as disk,
    ):
        roots = {"memory": Path(near) / "memory", "disk": Path(disk) / "kvdock"}
        rooms = {"memory": MEMORY_PAGES, "disk": DISK_PAGES}
        settings = tier_replay.settings_of(roots, rooms)
        theirs = LMCache(np.zeros_like(memory), Path(disk) / "lmcache")
        with tier_replay.attached(settings, longest, counts, memory=memory) as cache:
            sides: dict[str, Side] = {
                "kvdock": Kvdock(memory, cache),
                "lmcache": theirs,
            }
            times = {name: Times() for name in sides}
            for number, request in enumerate(load.requests):
                for name in list(sides)[:: 1 if number % 2 else -1]:
                    serve(sides[name], request.tolist(), times[name])
        theirs.manager.close()
    print(f"{load.name}: {len(load.requests)} requests, {load.blocks} pages asked for")
    for name, one in times.items():
        loaded_s = one.loaded * PAGE_BYTES / max(one.load_s, 1e-9) / 1e9
        print(
            f"{name:8s} loaded {one.loaded:7d} pages in {one.load_s:6.2f} s, "
            f"{loaded_s:5.2f} GB/s, {one.wrong} wrong; lookups {one.lookup_s:6.2f} s, "
            f"stores {one.store_s:6.2f} s"
        )
    found = {name: attrs.asdict(one) for name, one in times.items()}
    print(json.dumps({"load": load.name, "page_bytes": PAGE_BYTES, **found}))


if __name__ == "__main__":
    main()

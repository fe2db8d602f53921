"""What a call on an attachment costs over the system calls that it makes.

Usage: python benchmarks/attach.py [--quick]

Layer: `Attachment` and everything below it, over the file backend in memory
(/dev/shm), with pages of 64 KiB in a store that is full. Beside it, in turn within
one process: the same pages moved by one `preadv` or `pwritev` each ("raw"), in a
file as large as the store, each put at the next place of it: memory that was written
a moment ago is still in the processor's cache, and a store's next slot never is. The
figures of 128 pages compare with raw calls that hash each page as well, because
the backend hashes what it moves; those of one page with the system call alone. A
figure is the lower quartile of all calls minus that of the raw ones: a machine that
others use as well only adds. The last line is one JSON object.

Four attachments take part: plain zero copy, staged through memory of the core,
with trailers, and with metrics. Each stores keys that it looked up before, as an
engine does.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import attrs
import numpy as np
import numpy.typing as npt
import xxhash
from machine import describe

from kvdock import (
    Attachment,
    Dock,
    Namespace,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
)
from kvdock.config import CoreSettings, structure
from kvdock.observers.metrics import Metrics
from kvdock.pools import Part

PAGE_BYTES = 64 << 10
PAGES = 512
BATCH = 128
QUOTA_BYTES = 256 << 20
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only for a folder of our own in it
KINDS: dict[str, dict[str, object]] = {
    "": {},
    "_staged": {"calls": {"staging": "always"}},
    "_trailers": {"integrity": "always"},
    "_metrics": {},
}
"""Suffix of the figures, and the core's settings."""
CALLS = {"get1": 30, "put1": 15, "exists128": 15, "get128": 6, "put128": 6}
"""Calls of each kind in a round."""

Call = Callable[[], object]


@attrs.define(eq=False)
class Cache:
    """An attachment over a full store, and the next new prefix."""

    attachment: Attachment
    turn: int = 0
    stored: list[str] = attrs.field(factory=list)

    def fresh(self, count: int) -> list[str]:
        """Look up pages that were never stored; return their hashes."""
        self.turn += 1
        names = [f"{self.turn:032x}{page:032x}" for page in range(count)]
        self.attachment.exists(names)
        return names

    def put(self, names: list[str]) -> None:
        """Store pages, all of them."""
        pages = {"kv": np.arange(len(names))}
        assert self.attachment.put(names, pages).pages == len(names)  # noqa: S101 - else it measures nothing

    def get(self, names: list[str]) -> None:
        """Load pages, all of them."""
        pages = {"kv": np.arange(len(names))}
        assert self.attachment.get(names, pages).pages == len(names)  # noqa: S101 - same

    def keep(self) -> None:
        """Store the pages that are loaded again: others may have pushed them out."""
        self.stored = self.fresh(BATCH)
        self.put(self.stored)

    def call(self, name: str) -> Call:
        """Prepare one call, of which the time is taken."""
        one, every = self.stored[:1], self.stored
        match name:
            case "get1":
                return lambda: self.get(one)
            case "get128":
                return lambda: self.get(every)
            case "exists128":
                return lambda: self.attachment.exists(every)
        names = self.fresh(1 if name == "put1" else BATCH)
        return lambda: self.put(names)


def attached(root: Path, memory: npt.NDArray[np.uint8], kind: str) -> Cache:
    """Attach one pool over a file store, and fill the store."""
    pool = PoolSpec(
        name="kv", kind="k_only", parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
        layers=[0], page_tokens=16, anchor=True,
    )  # fmt: skip
    core = structure(CoreSettings, KINDS[kind], where="benchmark")
    dock = Dock.load(require=["file"])
    if kind == "_metrics":
        from prometheus_client import CollectorRegistry  # noqa: PLC0415 - an extra

        dock.add_observer("metrics", Metrics(CollectorRegistry()))
    plan = dock.plan(
        [pool],
        Shard(),
        prefer=["file"],
        needs=RouteRequirements(integrity=core.integrity),
    )
    regions = {"kv": Region.of(pool, Shard(), [memory], PAGES)}
    settings = {"file": {"root": root, "quota": QUOTA_BYTES, "free_space": 0}}
    cache = Cache(
        Attachment.open(dock, plan, Namespace(model="m"), regions, settings, core=core)
    )
    for _ in range(QUOTA_BYTES // (BATCH * PAGE_BYTES) + 4):
        cache.keep()
    return cache


class Raw:
    """The same pages in one file, a system call for each."""

    def __init__(self, file: Path, memory: npt.NDArray[np.uint8]) -> None:
        self.fd = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        for _ in range(QUOTA_BYTES // memory.nbytes):
            os.write(self.fd, memory.reshape(-1).data)
        self.views = [memoryview(row) for row in memory[:BATCH]]
        self.at = 0

    def call(self, name: str) -> Call:
        """Return one call beside that of an attachment."""
        if name == "exists128":
            return lambda: None
        write, views = name.startswith("put"), self.views
        if name.endswith("128"):
            return lambda: self.hashed(write=write)
        move = os.pwritev if write else os.preadv
        return lambda: move(self.fd, views[:1], 0)

    def hashed(self, *, write: bool) -> None:
        """Move 128 pages, and hash each while it lies in the cache."""
        if write:
            self.at = (self.at + BATCH * PAGE_BYTES) % QUOTA_BYTES
        for at, view in enumerate(self.views):
            place = self.at + at * PAGE_BYTES
            if write:
                xxhash.xxh3_64_intdigest(view)
                os.pwritev(self.fd, [view], place)
            else:
                os.preadv(self.fd, [view], place)
                xxhash.xxh3_64_intdigest(view)


def rotated(
    ways: Mapping[str, Callable[[str], Call]], turn: int
) -> list[tuple[str, Callable[[str], Call]]]:
    """Return all ways, beginning with another one in each round."""
    every = list(ways.items())
    first = turn % len(every)
    return every[first:] + every[:first]


def measure(root: Path, rounds: int) -> dict[str, dict[str, float]]:
    """Let all take turns; the lower quartile of each call in microseconds."""
    chance = np.random.default_rng(7)
    memory = chance.integers(0, 256, (PAGES, PAGE_BYTES), np.uint8)
    raw = Raw(root / "raw", memory)
    caches = {kind: attached(root / f"store{kind}", memory, kind) for kind in KINDS}
    ways = {"raw": raw.call} | {kind: cache.call for kind, cache in caches.items()}
    took: dict[str, dict[str, list[float]]] = {
        name: {way: [] for way in ways} for name in CALLS
    }
    for number in range(rounds + 1):
        for name, times in CALLS.items():
            # Each begins in turn: what comes first after another pays for its caches.
            for way, prepare in rotated(ways, number):
                for _ in range(times):
                    call = prepare(name)
                    began = time.perf_counter()
                    call()
                    if number:  # the first round only warms up
                        took[name][way].append(time.perf_counter() - began)
        for cache in caches.values():
            cache.keep()
    for cache in caches.values():
        cache.attachment.close()
    return {
        name: {way: sorted(each)[len(each) // 4] * 1e6 for way, each in ways.items()}
        for name, ways in took.items()
    }


def figures_of(times: dict[str, dict[str, float]]) -> dict[str, float]:
    """Name the figures."""
    figures: dict[str, float] = {}
    for kind in KINDS:
        over = {name: each[kind] - each["raw"] for name, each in times.items()}
        figures |= {
            f"attach_get1{kind}_over_raw_us": over["get1"],
            f"attach_put1{kind}_over_raw_us": over["put1"],
            f"attach_exists128{kind}_us": over["exists128"],
            f"attach_get128{kind}_overhead_us": over["get128"],
            f"attach_put128{kind}_overhead_us": over["put128"],
        }
        if kind:
            figures |= {
                f"attach_{name}{kind}_share": each[kind] / each[""] - 1
                for name, each in times.items()
            }
    return figures


def main(arguments: list[str]) -> None:
    """Measure, print a table, and one line of JSON."""
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    root = Path(tempfile.mkdtemp(prefix="kvdock-attach-", dir=folder))
    try:
        times = measure(root, 4 if "--quick" in arguments else 20)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    for name, each in times.items():
        cells = "  ".join(
            f"{way.strip('_') or 'plain'} {us:7.0f}" for way, us in each.items()
        )
        print(f"{name:10} us: {cells}")
    machine = describe(folder)
    figures = {name: round(value, 3) for name, value in figures_of(times).items()}
    print(json.dumps({"attach_load_average": machine["load_average"]} | figures))


if __name__ == "__main__":
    main(sys.argv[1:])

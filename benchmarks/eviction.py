"""Count the blocks that a full store still restores, beside other policies.

Usage: python benchmarks/eviction.py [--trace FILE ...] [--loads NAME ...] [--full]

Each request is a prefix of blocks. It is looked up, what is restorable is loaded
and the rest is stored, all of it through an `Attachment` over the file backend.
Beside it stand the store's own policy without a store, a page-wise LRU that evicts
the tail of a prefix first, ARC, S3-FIFO and the optimum, which knows all later
requests. Quotas are shares of the load's different blocks.

By default the loads are generated, and of a trace the first requests are taken: a
sample that takes minutes. `--full` replays more of the generated loads and whole
traces. Traces are JSON lines with `hash_ids` or `ranges` (see `kvdock_cli.simulation`).
Progress goes to stderr; the last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from eviction_loads import GENERATED
from eviction_policies import POLICIES, Replayed

from kvdock import Attachment, Dock, Namespace, PoolSpec, Region, Shard
from kvdock.config import CoreSettings, Deadlines
from kvdock.pools import Part
from kvdock_cli.simulation.traces import Trace, read_trace

QUOTAS = (0.02, 0.05, 0.1, 0.25, 0.5)
SAMPLE_REQUESTS = 1500
FULL_REQUESTS = 6000
PAGE_BYTES = 512
LEAST_SLOTS = 8
"""Pages in a segment of the smallest store."""
SEGMENTS = 12
"""Segments that a store of a quota has at least."""
SEGMENT_BYTES = 64 << 10
RECORD_BYTES = 72
"""What the index file of a segment has for each page."""
HEADER_BYTES = 128
"""And for itself."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only for a folder of our own in it
_PROGRESS_S = 2.0
_METADATA_CALLS = ("open", "pread", "pwrite", "rename", "unlink", "stat", "fstat")


@attrs.frozen
class Case:
    """One store to replay a load through.

    Args:
        capacity: Pages that the quota has room for.
        longest: Pages of the longest request.
        root: Where the store is.
    """

    capacity: int
    longest: int
    root: Path

    def settings(self) -> dict[str, object]:
        """Return the backend's settings: room for just so many pages."""
        slots = max(LEAST_SLOTS, self.capacity // SEGMENTS)
        slots = min(slots, SEGMENT_BYTES // PAGE_BYTES)
        headers_bytes = -(-self.capacity // slots) * HEADER_BYTES
        return {
            "root": self.root,
            "quota": self.capacity * (PAGE_BYTES + RECORD_BYTES) + headers_bytes,
            "segment_bytes": SEGMENT_BYTES,
            "free_space": 0,
        }

    def attach(self) -> Attachment:
        """Attach one pool over the file backend."""
        pool = PoolSpec(
            name="kv", kind="k_only", parts=[Part("k", "u8", (PAGE_BYTES // 16,))],
            layers=[0], page_tokens=16, anchor=True,
        )  # fmt: skip
        memory = np.ones((self.longest, PAGE_BYTES), np.uint8)
        dock = Dock.load(require=["file"])
        plan = dock.plan([pool], Shard(), prefer=["file"])
        regions = {"kv": Region.of(pool, Shard(), [memory], self.longest)}
        settings = {"file": self.settings()}
        # What a busy machine delays is not a miss.
        deadlines = Deadlines(exists=600, get=600, put=600)
        core = CoreSettings(deadlines=deadlines)
        namespace = Namespace(model="m")
        return Attachment.open(dock, plan, namespace, regions, settings, core=core)


@contextmanager
def counted_metadata() -> Iterator[Counter[str]]:
    """Count the system calls for index files and folders, and their bytes.

    Pages are moved with other calls (`preadv`, `pwritev`).
    """
    counts: Counter[str] = Counter()
    real = {name: getattr(os, name) for name in _METADATA_CALLS}

    def counting(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **named: Any) -> Any:  # noqa: ANN401 - any call of os
            counts["calls"] += 1
            result = call(*args, **named)
            if name == "pwrite":
                counts["written"] += int(result)
            elif name == "pread":
                counts["read"] += len(result)
            return result

        return run

    for name, call in real.items():
        setattr(os, name, counting(name, call))
    try:
        yield counts
    finally:
        for name, call in real.items():
            setattr(os, name, call)


def replay_store(load: Trace, case: Case, label: str) -> Replayed:
    """Replay a load through an attachment.

    Args:
        load: The requests.
        case: The store.
        label: What progress is reported under.
    """
    restored = stored = 0
    pages = np.arange(case.longest)
    reported_s = time.monotonic()
    with case.attach() as attachment:
        for number, request in enumerate(load.requests):
            hashes = [f"{block:016x}" for block in request.tolist()]
            best = attachment.exists(hashes).best
            if best:
                best = attachment.get(hashes[:best], {"kv": pages[:best]}).pages
            restored += best
            if best < len(hashes):
                rest = hashes[best:]
                attachment.put(rest, {"kv": pages[best : len(hashes)]})
                stored += len(rest)
            if time.monotonic() - reported_s > _PROGRESS_S:
                reported_s = time.monotonic()
                share = (number + 1) / len(load.requests)
                print(f"\r{label} {share:6.1%} ", end="", file=sys.stderr, flush=True)
    return Replayed(restored, stored)


def measure(load: Trace, quota: float, folder: Path | None, policies: list[str]) -> Any:  # noqa: ANN401 - a row of JSON
    """Replay one load at one quota; print and return what was restored."""
    capacity = max(LEAST_SLOTS * SEGMENTS, int(quota * load.unique))
    label = f"{load.name}, quota {quota:.0%}"
    root = Path(tempfile.mkdtemp(prefix="kvdock-eviction-", dir=folder))
    began_s = time.monotonic()
    longest = max(map(len, load.requests))
    try:
        with counted_metadata() as metadata:
            case = Case(capacity, longest, root / "store")
            ours = replay_store(load, case, label)
    finally:
        shutil.rmtree(root, ignore_errors=True)
    restored = {"kvdock": ours.restored / load.blocks}
    for name in policies:
        replayed = POLICIES[name](load.requests, capacity)
        restored[name] = replayed.restored / load.blocks
    row = {
        "load": load.name,
        "quota": quota,
        "pages": capacity,
        "restored": {name: round(value, 4) for name, value in restored.items()},
        "stored_bytes": ours.stored * PAGE_BYTES,
        "metadata_bytes": metadata["written"],
        "metadata_read_bytes": metadata["read"],
        "metadata_calls": metadata["calls"],
        "seconds": round(time.monotonic() - began_s, 1),
    }
    print("\r" + " " * 60 + "\r", end="", file=sys.stderr, flush=True)
    columns = "  ".join(f"{value:6.3f}" for value in restored.values())
    print(
        f"{load.name[:20]:20s} {quota:4.0%} {capacity:7d}  {columns}  "
        f"{ours.stored:8d} {metadata['written'] / max(1, ours.stored):7.0f} "
        f"{metadata['calls'] / max(1, ours.stored):7.2f}",
        flush=True,
    )
    return row


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, nargs="*", default=[])
    parser.add_argument("--loads", nargs="*", choices=GENERATED, default=None)
    parser.add_argument("--full", action="store_true", help="all of every load")
    parser.add_argument("--requests", type=int, default=0, help="only so many")
    parser.add_argument("--quotas", type=float, nargs="*", default=QUOTAS)
    parser.add_argument(
        "--policies", nargs="*", choices=POLICIES, default=list(POLICIES)
    )
    parser.add_argument(
        "--dir", type=Path, default=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    )
    args = parser.parse_args()
    most = args.requests or (FULL_REQUESTS if args.full else SAMPLE_REQUESTS)
    of_trace = args.requests or (0 if args.full else SAMPLE_REQUESTS)
    names = args.loads
    if names is None:
        names = [] if args.trace else list(GENERATED)
    loads = [read_trace(path, of_trace) for path in args.trace]
    loads += [GENERATED[name](most) for name in names]
    print("restored blocks of all blocks asked for; metadata for each stored page")
    columns = "  ".join(f"{name[:7]:>6s}" for name in ("kvdock", *args.policies))
    print(f"{'load':20s} quota  pages  {columns}    stored   bytes   calls")
    rows = [
        measure(load, quota, args.dir, args.policies)
        for load in loads
        for quota in args.quotas
    ]
    print(json.dumps({"full": args.full, "page_bytes": PAGE_BYTES, "rows": rows}))


if __name__ == "__main__":
    main()

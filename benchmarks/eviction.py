"""Replay prefix loads and count the blocks that a full store still restores.

Usage: python benchmarks/eviction.py [--trace FILE] [--requests N] [--quick]

Each request is a prefix of blocks. It is looked up, what is restorable is loaded
and the rest is stored, all of it through an `Attachment` over the file backend.
Beside it stands an LRU of single pages that touches the pages of each request
tail first, so that the head of a prefix is the last to go. Quotas are shares of
the load's unique blocks; pages are sized so that a segment has 4 or 200 of them.

The default load is generated: conversations of several turns over shared system
prompts. `--trace` reads JSON lines with `hash_ids`, the blocks of a request in
order, as traces of serving systems are published. Progress goes to stderr; the
last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np

from kvdock import Attachment, Dock, Namespace, Part, PoolSpec, Region, Shard
from kvdock.config import CoreSettings, Deadlines

QUOTAS = (0.05, 0.1, 0.25, 0.5)
PAGE_BYTES = {4: 16 << 10, 200: 512}
"""Pages in a segment, and the size of a page that makes a segment of 64 KiB or a
little more; a slot is a multiple of 512 bytes."""
RECORD_BYTES = 72
"""What the index file of a segment has for each page."""
HEADER_BYTES = 128
"""And for itself."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only for a folder of our own in it
_PROGRESS_S = 2.0

Requests = Sequence[Sequence[int]]
"""The blocks of each request, in the order of its prefix."""


@attrs.frozen
class Load:
    """Requests to replay, and what they add up to."""

    name: str
    requests: Requests

    @property
    def blocks(self) -> int:
        """Blocks of all requests together."""
        return sum(map(len, self.requests))

    @property
    def unique(self) -> int:
        """Different blocks among them."""
        return len({block for request in self.requests for block in request})


def generated(requests: int, seed: int = 7) -> Load:
    """Generate conversations of several turns over shared system prompts.

    Few system prompts are common and many are rare; a conversation begins with
    one of them, and each turn repeats all that came before it. Some 200
    conversations are in progress at any time, and each may take its next turn.

    Args:
        requests: How many requests to generate.
        seed: Of the random numbers.
    """
    rng = np.random.default_rng(seed)
    numbers = iter(range(1 << 62))

    def fresh(count: int) -> list[int]:
        return [next(numbers) for _ in range(count)]

    prompts = [fresh(int(n)) for n in rng.integers(2, 40, 50)]
    weights = 1 / np.arange(1, len(prompts) + 1)
    weights /= weights.sum()
    open_ones: list[list[int]] = []
    made: list[list[int]] = []
    for _ in range(requests):
        if len(open_ones) < 200 or rng.random() < 0.35:
            prompt = prompts[int(rng.choice(len(prompts), p=weights))]
            open_ones.append([*prompt])
            at = len(open_ones) - 1
        else:
            at = int(rng.integers(len(open_ones)))
        talk = open_ones[at]
        talk += fresh(1 + int(rng.geometric(0.08)))
        made.append([*talk])
        if len(open_ones) > 200 or len(talk) > 200:
            del open_ones[int(rng.integers(len(open_ones)))]
    return Load("generated", made)


def read_trace(path: Path) -> Load:
    """Read the requests of a trace: JSON lines with `hash_ids`."""
    with path.open() as lines:
        requests = [json.loads(line)["hash_ids"] for line in lines if line.strip()]
    return Load("trace", requests)


def restored_by_lru(requests: Iterable[Sequence[int]], capacity: int) -> int:
    """Return how many blocks an LRU of single pages restores.

    Args:
        requests: The blocks of each request.
        capacity: Pages that it keeps.
    """
    kept: OrderedDict[int, None] = OrderedDict()
    restored = 0
    for request in requests:
        restored += next(
            (at for at, block in enumerate(request) if block not in kept), len(request)
        )
        for block in reversed(request):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > capacity:
            kept.popitem(last=False)
    return restored


@attrs.frozen
class Case:
    """One store to replay a load through.

    Args:
        slots: Pages in a segment.
        capacity: Pages that the quota has room for.
        longest: Pages of the longest request.
        root: Where the store is.
    """

    slots: int
    capacity: int
    longest: int
    root: Path

    def settings(self) -> dict[str, object]:
        """Return the backend's settings: room for just so many pages."""
        page_bytes = PAGE_BYTES[self.slots]
        headers_bytes = -(-self.capacity // self.slots) * HEADER_BYTES
        return {
            "root": self.root,
            "quota": self.capacity * (page_bytes + RECORD_BYTES) + headers_bytes,
            "segment_bytes": self.slots * page_bytes,
            "free_space": 0,
        }

    def attach(self) -> Attachment:
        """Attach one pool over the file backend."""
        page_bytes = PAGE_BYTES[self.slots]
        pool = PoolSpec(
            name="kv", kind="k_only", parts=[Part("k", "u8", (page_bytes // 16,))],
            layers=[0], page_tokens=16, anchor=True,
        )  # fmt: skip
        memory = np.ones((self.longest, page_bytes), np.uint8)
        dock = Dock.load(require=["file"])
        plan = dock.plan([pool], Shard(), prefer=["file"])
        regions = {"kv": Region.of(pool, Shard(), [memory], self.longest)}
        settings = {"file": self.settings()}
        # What a busy machine delays is not a miss.
        deadlines = Deadlines(exists=600, get=600, put=600)
        core = CoreSettings(deadlines=deadlines)
        namespace = Namespace(model="m")
        return Attachment.open(dock, plan, namespace, regions, settings, core=core)


def restored_by_kvdock(requests: Requests, case: Case, label: str) -> int:
    """Return how many blocks an attachment restores.

    Args:
        requests: The blocks of each request.
        case: The store.
        label: What progress is reported under.
    """
    restored = 0
    pages = np.arange(case.longest)
    reported_s = time.monotonic()
    with case.attach() as attachment:
        for number, request in enumerate(requests):
            hashes = [f"{block:016x}" for block in request]
            best = attachment.exists(hashes).best
            if best:
                best = attachment.get(hashes[:best], {"kv": pages[:best]}).pages
            restored += best
            if best < len(hashes):
                rest = hashes[best:]
                attachment.put(rest, {"kv": pages[best : len(hashes)]})
            if time.monotonic() - reported_s > _PROGRESS_S:
                reported_s = time.monotonic()
                share = (number + 1) / len(requests)
                print(f"\r{label} {share:6.1%} ", end="", file=sys.stderr, flush=True)
    return restored


def measure(load: Load, slots: int, quota: float, folder: Path | None) -> Any:  # noqa: ANN401 - a row of JSON
    """Replay one load at one quota; return what was restored."""
    capacity = int(quota * load.unique)
    label = f"{slots} pages a segment, quota {quota:.0%}"
    root = Path(tempfile.mkdtemp(prefix="kvdock-eviction-", dir=folder))
    began = time.monotonic()
    try:
        longest = max(map(len, load.requests))
        case = Case(slots, capacity, longest, root / "store")
        ours = restored_by_kvdock(load.requests, case, label) / load.blocks
    finally:
        shutil.rmtree(root, ignore_errors=True)
    seconds = time.monotonic() - began
    lru = restored_by_lru(load.requests, capacity) / load.blocks
    ratio = ours / lru if lru else 1.0
    print(f"\r{label} in {seconds:.0f} s", file=sys.stderr, flush=True)
    print(
        f"  {slots:3d} pages a segment  quota {quota:4.0%} ({capacity} pages)  "
        f"kvdock {ours:.4f}  LRU {lru:.4f}  ratio {ratio:.3f}",
        flush=True,
    )
    return {
        "slots": slots,
        "quota": quota,
        "kvdock": round(ours, 4),
        "lru": round(lru, 4),
        "ratio": round(ratio, 3),
    }


def main() -> None:
    """Replay and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSON lines with hash_ids")
    parser.add_argument("--requests", type=int, default=0, help="only so many")
    parser.add_argument("--quotas", type=float, nargs="*", default=QUOTAS)
    parser.add_argument(
        "--slots", type=int, nargs="*", default=list(PAGE_BYTES), choices=PAGE_BYTES
    )
    parser.add_argument(
        "--dir", type=Path, default=SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    )
    args = parser.parse_args()
    load = read_trace(args.trace) if args.trace else generated(args.requests or 4000)
    if args.requests:
        load = Load(load.name, load.requests[: args.requests])
    print(
        f"{load.name}: {len(load.requests)} requests, {load.blocks} blocks, "
        f"{load.unique} of them different; restored blocks over all blocks"
    )
    rows = [
        measure(load, slots, quota, args.dir)
        for slots in args.slots
        for quota in args.quotas
    ]
    figures = {
        "load": load.name,
        "requests": len(load.requests),
        "blocks": load.blocks,
        "unique": load.unique,
        "worst_ratio": min(row["ratio"] for row in rows),
        "rows": rows,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()

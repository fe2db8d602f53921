"""A chain of tiers without stores: what hosts load from where, and what is written.

Usage: python benchmarks/tier_model.py --trace FILE [--hosts N ...] [--sizes A:B:C ...]

Each host has a memory and a disk of its own, and all share one far tier. A request
is a prefix of blocks: what some tier has from its beginning on is loaded, each block
from the nearest tier that has it, and the rest is computed and stored. Policies are
the store's own code (`kvdock_segments.reuse`, `kvdock.tiers.uses`) and the rules those
of `kvdock.config.Tier`; copies are made at once. Sizes are shares of the different
blocks of the trace, memory:disk:far, and 0 is a tier without a limit.

The table has a line for each number of hosts and each size; the last line is one JSON
object. Held against real stores by tests/test_tier_model.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

import attrs
import numpy as np
import numpy.typing as npt
from eviction_loads import GENERATED, Load, read_trace

from kvdock.config import Promote, Tier, Write, read_tiers
from kvdock.tiers.uses import Uses
from kvdock.units import format_bytes
from kvdock_segments import EvictionPolicy
from kvdock_segments.reuse import ReuseHistory

Blocks = npt.NDArray[np.int64]

TIERS = ("memory", "disk", "far")
SIZES = ("0.02:0.1:1", "0.02:0.2:1", "0.05:0.2:1", "0.1:0.5:1")
HOSTS = (1, 4)
BLOCK_NS = 50_000
"""What a block takes: engines load some 20,000 a second."""
USES = 1 << 16
"""As `core.tiers.uses`."""
_SHARE = 12  # of how many pages one goes at a time: a store has so many segments


class ModelStore:
    """One store of so many pages; 0 for no limit.

    Args:
        blocks: Different blocks of the load.
        capacity: Pages that it has room for.
    """

    def __init__(self, blocks: int, capacity: int) -> None:
        self.kept = np.zeros(blocks, np.bool_)
        self._capacity = capacity
        self._used_ns = np.zeros(blocks, np.int64)
        self._stored_ns = np.zeros(blocks, np.int64)
        self._live = np.zeros(0, np.int64)
        self._history = ReuseHistory(EvictionPolicy.REUSE)
        draw = np.random.default_rng(1)
        self._digests = draw.integers(1, 2**63, (blocks, 2)).astype(np.uint64)

    def use(self, blocks: Blocks, times_ns: Blocks, now_ns: int) -> None:
        """Note that blocks are used that are kept."""
        self._history.note(self._stored_ns[blocks], self._used_ns[blocks], now_ns)
        self._used_ns[blocks] = times_ns

    def put(self, blocks: Blocks, times_ns: Blocks, now_ns: int) -> int:
        """Store those that are not kept, evict others; return how many were stored."""
        new = ~self.kept[blocks]
        fresh = blocks[new]
        if not len(fresh):
            return 0
        self._used_ns[fresh] = times_ns[new]
        self._stored_ns[fresh] = self._history.begin(
            self._digests[fresh], self._used_ns[fresh]
        )
        self.kept[fresh] = True
        self._live = np.concatenate([self._live, fresh])
        over = len(self._live) - self._capacity
        if self._capacity and over > 0:
            self._evict(max(over, self._capacity // _SHARE), now_ns)
        return len(fresh)

    def _evict(self, wanted: int, now_ns: int) -> None:
        live, history = self._live, self._history
        stored_ns, used_ns = self._stored_ns[live], self._used_ns[live]
        every = np.ones(len(live), np.bool_)
        cold = history.find_cold(stored_ns, used_ns, every, wanted, now_ns)
        going = cold.find(stored_ns, used_ns, now_ns + 1)
        gone, self._live = live[going], live[~going]
        history.note_evicted(
            self._digests[gone], self._stored_ns[gone], self._used_ns[gone], now_ns
        )
        self.kept[gone] = False


@attrs.define
class Moved:
    """Blocks that a tier was asked for, over all hosts.

    Args:
        loaded: Loaded from it.
        stored: Stored in it by requests, copies behind included.
        promoted: Copied to it because they were used.
    """

    loaded: int = 0
    stored: int = 0
    promoted: int = 0

    @property
    def written(self) -> int:
        """Blocks that were written to it."""
        return self.stored + self.promoted


@attrs.define(eq=False)
class TierModel:
    """Hosts with tiers of their own, and a last tier that they share.

    Args:
        tiers: The rules, near first.
        capacities: Pages of each tier; 0 for no limit.
        blocks: Different blocks of the load.
        hosts: How many.
    """

    tiers: Sequence[Tier]
    capacities: Sequence[int]
    blocks: int
    hosts: int = 1
    moved: list[Moved] = attrs.field(init=False)
    computed: int = 0
    asked: int = 0
    _now_ns: int = 10**12
    _stores: list[list[ModelStore]] = attrs.field(init=False)
    _uses: list[Uses] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.moved = [Moved() for _ in self.tiers]
        far = ModelStore(self.blocks, self.capacities[-1])
        own = self.capacities[:-1]
        self._stores = [
            [*(ModelStore(self.blocks, one) for one in own), far]
            for _ in range(self.hosts)
        ]
        self._uses = [Uses(USES) for _ in range(self.hosts)]

    def request(self, host: int, blocks: Blocks) -> None:
        """Load what a host's tiers have of a request, and store the rest."""
        self._now_ns += BLOCK_NS * (len(blocks) + 1)
        times_ns = self._now_ns - np.arange(len(blocks))
        stores = self._stores[host]
        where = np.full(len(blocks), -1)
        for at in range(len(stores) - 1, -1, -1):
            where[stores[at].kept[blocks]] = at
        best = len(blocks) if (where >= 0).all() else int((where < 0).argmax())
        self.asked += len(blocks)
        self.computed += len(blocks) - best
        for at, store in enumerate(stores):
            mine = np.flatnonzero(where[:best] == at)
            if len(mine):
                self.moved[at].loaded += len(mine)
                store.use(blocks[mine], times_ns[mine], self._now_ns)
                self._promote(host, at, blocks[mine], times_ns[mine])
        self._store(stores, blocks[best:], times_ns[best:])

    def _promote(self, host: int, at: int, blocks: Blocks, times_ns: Blocks) -> None:
        if not at:
            return
        again = np.array(self._uses[host].note([str(one) for one in blocks.tolist()]))
        for near in range(at):
            rule = self.tiers[near].promote
            chosen = again if rule is Promote.SECOND else np.ones_like(again)
            if rule is not Promote.NEVER and chosen.any():
                store = self._stores[host][near]
                self.moved[near].promoted += store.put(
                    blocks[chosen], times_ns[chosen], self._now_ns
                )

    def _store(
        self, stores: Sequence[ModelStore], blocks: Blocks, times_ns: Blocks
    ) -> None:
        for tier, store, moved in zip(self.tiers, stores, self.moved, strict=True):
            if tier.write is Write.NEVER:
                continue
            there = store.kept[blocks]
            if tier.write is Write.THROUGH:
                store.use(blocks[there], times_ns[there], self._now_ns)
            moved.stored += store.put(blocks, times_ns, self._now_ns)

    @property
    def hits(self) -> float:
        """Share of the blocks that were loaded."""
        return 1 - self.computed / max(1, self.asked)


def simulate(
    load: Load, model: TierModel, spread: str = "round", prefix_blocks: int = 16
) -> TierModel:
    """Let the hosts of a model serve a load.

    Args:
        load: The requests.
        model: The hosts.
        spread: "round" for one host after the other, or "prefix": requests with
            the same first blocks go to the same host.
        prefix_blocks: How many first blocks those are.
    """
    for number, request in enumerate(load.requests):
        key = number if spread == "round" else crc32(request[:prefix_blocks].tobytes())
        model.request(key % model.hosts, request)
    return model


def capacities_of(load: Load, size: str) -> list[int]:
    """Return the pages of each tier, from shares such as "0.02:0.1:1"."""
    shares = [float(one) for one in size.split(":")]
    return [int(share * load.unique) for share in shares]


def row_of(
    load: Load, model: TierModel, size: str, block_bytes: int
) -> dict[str, object]:
    """Return what a model has counted, a row of JSON."""
    requests = len(load.requests)
    return {
        "hosts": model.hosts,
        "sizes": size,
        "hits": round(model.hits, 4),
        "computed_blocks": model.computed,
        "tiers": {
            name: {
                "share": round(moved.loaded / max(1, model.asked), 4),
                "loaded_bytes": moved.loaded * block_bytes,
                "written_bytes": moved.written * block_bytes,
                "read_per_request": moved.loaded * block_bytes // requests,
                "written_per_request": moved.written * block_bytes // requests,
            }
            for name, moved in zip(TIERS, model.moved, strict=True)
        },
    }


def main() -> None:
    """Simulate and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trace", type=Path, help="JSON lines; else generated")
    parser.add_argument("--requests", type=int, default=0, help="only so many")
    parser.add_argument("--hosts", type=int, nargs="*", default=HOSTS)
    parser.add_argument("--sizes", nargs="*", default=SIZES)
    parser.add_argument("--spread", choices=("round", "prefix"), default="prefix")
    parser.add_argument("--block-bytes", type=int, default=4096)
    parser.add_argument("--tiers", default=",".join(TIERS), help="as in kvdock.toml")
    args = parser.parse_args()
    if args.trace:
        load = read_trace(args.trace, args.requests)
    else:
        load = GENERATED["conversations"](args.requests or 1500)
    tiers = read_tiers(args.tiers)
    rows = []
    shown = "  ".join(f"{name:>6s} read    written" for name in TIERS)
    print(f"hosts  sizes             hits  {shown}")
    for hosts in args.hosts:
        for size in args.sizes:
            model = TierModel(tiers, capacities_of(load, size), load.unique, hosts)
            row = row_of(
                load, simulate(load, model, args.spread), size, args.block_bytes
            )
            rows.append(row)
            cells = "  ".join(
                f"{moved.loaded / model.asked:6.1%} "
                f"{format_bytes(moved.loaded * args.block_bytes):>10s} "
                f"{format_bytes(moved.written * args.block_bytes):>10s}"
                for moved in model.moved
            )
            print(f"{hosts:5d}  {size:15s} {model.hits:6.1%}  {cells}", flush=True)
    sys.stdout.write(json.dumps({"load": load.name, "rows": rows}) + "\n")


if __name__ == "__main__":
    main()

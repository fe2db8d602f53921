"""Hosts with tiers: what they load from where, and what is written.

Each host has tiers of its own, and all share the last one. A request is a prefix of
blocks: what some tier has from its beginning on is loaded, each block from the nearest
tier that has it, and the rest is computed and stored. Which blocks a full tier evicts
and which are promoted is the store's own code; copies are made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING
from zlib import crc32

import attrs
import numpy as np

from kvdock.config import Promote, Tier, Write
from kvdock.tiers.uses import Uses
from kvdock_segments.reuse import ReuseHistory

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, UInt64Array
    from kvdock_cli.simulation.traces import Trace

BLOCK_NS = 50_000
"""What a block takes: engines load some 20,000 a second."""
USES = 1 << 16
"""As `core.tiers.uses`."""
PREFIX_BLOCKS = 16
"""First blocks by which requests are spread."""
_SHARE = 12  # of how many pages one goes at a time: a store has so many segments


class ModelStore:
    """One store of so many pages.

    Its arrays take memory only where they are written, so a thousand of them fit.

    Args:
        digests: uint64 (blocks, 2), of the different blocks of a trace.
        capacity: Pages that it has room for; 0 for no limit.
    """

    def __init__(self, digests: UInt64Array, capacity: int) -> None:
        self.kept = np.zeros(len(digests), np.bool_)
        self._capacity = capacity
        self._used_ns = np.zeros(len(digests), np.int64)
        self._stored_ns = np.zeros(len(digests), np.int64)
        self._live: list[Int64Array] = []
        self._pages = 0
        self._history = ReuseHistory()
        self._digests = digests

    def use(self, blocks: Int64Array, times_ns: Int64Array, now_ns: int) -> None:
        """Note that blocks are used that are kept."""
        self._history.note(self._stored_ns[blocks], self._used_ns[blocks], now_ns)
        self._used_ns[blocks] = times_ns

    def put(self, blocks: Int64Array, times_ns: Int64Array, now_ns: int) -> int:
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
        if self._capacity:
            self._live.append(fresh)
            self._pages += len(fresh)
            over = self._pages - self._capacity
            if over > 0:
                self._evict(max(over, self._capacity // _SHARE), now_ns)
        return len(fresh)

    def _evict(self, wanted: int, now_ns: int) -> None:
        live, history = np.concatenate(self._live), self._history
        stored_ns, used_ns = self._stored_ns[live], self._used_ns[live]
        every = np.ones(len(live), np.bool_)
        cold = history.find_cold(stored_ns, used_ns, every, wanted, now_ns)
        going = cold.find(stored_ns, used_ns)
        gone = live[going]
        self._live = [live[~going]]
        self._pages -= len(gone)
        history.note_evicted(
            self._digests[gone], self._stored_ns[gone], self._used_ns[gone], now_ns
        )
        self.kept[gone] = False


@attrs.define
class Moved:
    """Blocks that a tier was asked for, over all hosts.

    Args:
        written: Stored in it, copies behind and promotions included.
    """

    loaded: int = 0
    written: int = 0


@attrs.define(eq=False)
class Hosts:
    """Hosts with tiers of their own, and a last tier that they share.

    Args:
        capacities: Pages of each tier; 0 for no limit.
    """

    tiers: Sequence[Tier]
    capacities: Sequence[int]
    blocks: int
    count: int = 1
    moved: list[Moved] = attrs.field(init=False)
    computed: int = 0
    asked: int = 0
    _now_ns: int = 10**12
    _stores: list[list[ModelStore]] = attrs.field(init=False)
    _uses: list[Uses] = attrs.field(init=False)
    _names: list[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.moved = [Moved() for _ in self.tiers]
        draw = np.random.default_rng(1)
        digests = draw.integers(1, 2**63, (self.blocks, 2)).astype(np.uint64)
        *own, shared = self.capacities
        far = ModelStore(digests, shared)
        self._stores = [
            [*(ModelStore(digests, one) for one in own), far] for _ in range(self.count)
        ]
        self._uses = [Uses(USES) for _ in range(self.count)]
        self._names = [str(block) for block in range(self.blocks)]

    @property
    def hits(self) -> float:
        """Share of the blocks that were loaded."""
        return 1 - self.computed / max(1, self.asked)

    def request(self, host: int, blocks: Int64Array) -> None:
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

    def _promote(
        self, host: int, at: int, blocks: Int64Array, times_ns: Int64Array
    ) -> None:
        if not at:
            return
        names = [self._names[one] for one in blocks.tolist()]
        again = np.array(self._uses[host].note(names))
        for near in range(at):
            rule = self.tiers[near].promote
            chosen = again if rule is Promote.SECOND else np.ones_like(again)
            if rule is not Promote.NEVER and chosen.any():
                store = self._stores[host][near]
                self.moved[near].written += store.put(
                    blocks[chosen], times_ns[chosen], self._now_ns
                )

    def _store(
        self, stores: Sequence[ModelStore], blocks: Int64Array, times_ns: Int64Array
    ) -> None:
        for tier, store, moved in zip(self.tiers, stores, self.moved, strict=True):
            if tier.write is Write.NEVER:
                continue
            there = store.kept[blocks]
            if tier.write is Write.THROUGH:
                store.use(blocks[there], times_ns[there], self._now_ns)
            moved.written += store.put(blocks, times_ns, self._now_ns)


def serve(
    trace: Trace,
    hosts: Hosts,
    *,
    by_prefix: bool = False,
    served: Callable[[], object] = lambda: None,
) -> Hosts:
    """Let hosts serve a trace.

    With `by_prefix`, requests with the same first blocks go to the same host, else to
    one host after the other. `served` is called after each.
    """
    for number, request in enumerate(trace.requests):
        key = crc32(request[:PREFIX_BLOCKS].tobytes()) if by_prefix else number
        hosts.request(key % hosts.count, request)
        served()
    return hosts

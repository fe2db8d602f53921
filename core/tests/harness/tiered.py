"""An engine whose pools are kept in shelves, near first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
from shelf import PAGES, Shelf, attention, hashes, patient

from kvdock.batch import Batch, Outcome
from kvdock.dock import Dock
from kvdock.events import PagesCopied
from kvdock.geometry.region import Region
from kvdock.namespace import Namespace
from kvdock.plugin.hookspecs import hookimpl
from kvdock.pools.shard import Shard
from kvdock.transfer.attachment import Attachment

if TYPE_CHECKING:
    from kvdock.arrays import ByteArray
    from kvdock.config.core import CoreSettings
    from kvdock.pools.spec import PoolSpec

NAMES = hashes(6)
WHERE = list(range(6))


def held_by(gate: threading.Event, *operations: str) -> Callable[[Batch], None]:
    """A trouble: calls wait for a gate, those of some operations or all."""

    def wait(batch: Batch) -> None:
        if not operations or batch.operation in operations:
            assert gate.wait(60)

    return wait


class Listener:
    """Keeps what became of copies."""

    def __init__(self) -> None:
        self.copies: list[PagesCopied] = []

    @hookimpl
    def kvdock_observe(self, event: object) -> None:
        if isinstance(event, PagesCopied):
            self.copies.append(event)

    def count(self, outcome: str) -> int:
        return sum(one.outcomes.get(outcome, 0) for one in self.copies)


@attrs.define(eq=False)
class Tiers:
    """An engine whose pools are kept in shelves, near first."""

    shelves: Sequence[Shelf]
    rules: Sequence[str | Mapping[str, object]] = ()
    pools: Sequence[PoolSpec] = attrs.field(factory=lambda: (attention(),))
    core: CoreSettings = attrs.field(factory=patient)
    observers: Sequence[object] = ()
    listener: Listener = attrs.field(factory=Listener)
    memory: dict[str, ByteArray] = attrs.field(init=False)
    cache: Attachment = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        backends = {shelf.name: shelf.backend() for shelf in self.shelves}
        for backend in backends.values():
            for at, observer in enumerate((self.listener, *self.observers)):
                backend.add_observer(f"observer-{at}", observer)
        dock = Dock(backends)
        rules = self.rules or [shelf.name for shelf in self.shelves]
        plan = dock.plan(self.pools, Shard(), tiers=rules)
        self.memory = {
            pool.name: np.zeros((PAGES, pool.page_bytes(Shard())), np.uint8)
            for pool in self.pools
        }
        regions = {
            pool.name: Region.of(pool, Shard(), [self.memory[pool.name]], PAGES)
            for pool in self.pools
        }
        self.cache = Attachment.open(
            dock, plan, Namespace(model="m"), regions, core=self.core
        )

    def content(self, pool: str, name: str) -> ByteArray:
        size = int(self.memory[pool].shape[1])
        seed = [int(name, 16), *pool.encode()]
        generator = np.random.default_rng(seed)
        return generator.integers(0, 256, size, np.uint8)

    def put(self, names: Sequence[str] = NAMES, pages: Sequence[int] = WHERE) -> int:
        for pool in self.pools:
            rows = np.stack([self.content(pool.name, name) for name in names])
            self.cache[pool.name].region.scatter(np.array(pages), rows)
        stored = self.cache.put(names, {pool.name: pages for pool in self.pools})
        for pool in self.pools:  # the engine reuses its pages at once
            self.memory[pool.name][:] = 0xEE
        return stored.pages

    def get(self, names: Sequence[str] = NAMES, pages: Sequence[int] = WHERE) -> int:
        found = self.cache.get(names, {pool.name: pages for pool in self.pools})
        for pool in self.pools:
            ok = found.outcomes[pool.name] == Outcome.OK
            for at in np.flatnonzero(ok).tolist():
                self.check(pool.name, names[at], pages[at])
        return found.pages

    def check(self, pool: str, name: str, page: int) -> None:
        row = np.zeros((1, self.memory[pool].shape[1]), np.uint8)
        self.cache[pool].region.gather(np.array([page]), row)
        assert np.array_equal(row[0], self.content(pool, name)), "wrong bytes"

    def settle(self) -> None:
        assert self.cache.wait_idle(60)

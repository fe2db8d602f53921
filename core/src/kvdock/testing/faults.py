"""A drill: the core over a backend, with faults injected between them.

Not a part of the contract, since it tests what the core makes of a backend
that fails: no wrong byte, no call over its deadline, nothing left behind.
Behind `kvdock check NAME --faults`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import attrs
import pytest

from kvdock.batches import Outcome
from kvdock.core_settings import CoreSettings
from kvdock.dock import Backend, Dock
from kvdock.keys import Namespace
from kvdock.observers import put_around
from kvdock.observers.faults import Fault, FaultInjector, FaultSettings
from kvdock.routing import Needs
from kvdock.sessions import Attachment, Moved
from kvdock.settings import structure
from kvdock.shards import Shard
from kvdock.testing.memory import PageMemory
from kvdock.testing.rigs import load_backend
from kvdock.testing.samples import Sample
from kvdock.vocabulary import HitPolicy, PoolKind

if TYPE_CHECKING:
    from kvdock.pools import PoolSpec

T = TypeVar("T")

DEADLINE_S = 0.5
"""Deadline of each call of the drill."""

ALLOWED_S = DEADLINE_S + 0.1
"""How long a call may take, whatever happens below it."""

PAGES = 8


def drill_pool(backend: Backend) -> PoolSpec:
    """Return an anchor of a kind and layout that the backend takes."""
    for kind, support in backend.manifest.kinds.items():
        if kind is PoolKind.LOGICAL or HitPolicy.ALL_PAGES not in support.hit_policies:
            continue
        layout = min(support.layouts)
        pool = Sample(kind=kind, layout=layout).pool()
        return attrs.evolve(pool, anchor=True, required=True, indices_from=None)
    pytest.skip("the backend takes no pool that could be an anchor with bytes")


@attrs.define(eq=False)
class Drill:
    """A backend behind faults, attached, with pages to move."""

    faults: FaultInjector
    memory: PageMemory
    cache: Attachment

    hashes: ClassVar[list[str]] = [f"{page:064x}" for page in range(PAGES // 2)]

    def timed(self, call: Callable[[], T]) -> T:
        """Make a call that must come back in time."""
        began = time.monotonic()
        result = call()
        took_s = time.monotonic() - began
        assert took_s <= ALLOWED_S, f"a call took {took_s:.3f} s"
        return result

    def check(self, moved: Moved) -> None:
        """Assert that every page that is called loaded is right."""
        [name] = moved.outcomes
        where = moved.places[name].tolist()
        for page_hash, page, code in zip(
            self.hashes, where, moved.outcomes[name].tolist(), strict=False
        ):
            for stored in self.memory.region().objects:
                assert code != Outcome.OK or self.memory.holds(page, page_hash, stored)


class FaultTests:
    """Inherit, name the plugin and give it settings."""

    plugin: ClassVar[str]

    @pytest.fixture
    def config(self) -> Mapping[str, object]:
        """Return the settings of a store."""
        return {}

    @pytest.fixture
    def drill(self, config: Mapping[str, object]) -> Iterator[Drill]:
        """Attach the backend behind a fault injector, and see it off."""
        before = threading.active_count()
        backend = load_backend(self.plugin)
        faults = FaultInjector(FaultSettings(delay=0.05))
        dock = Dock({backend.name: backend})
        put_around(dock, "drill", faults)
        pool, shard = drill_pool(backend), Shard()
        memory = PageMemory.of(pool, shard, PAGES)
        # Faults alter bytes behind the backend's own checks.
        plan = dock.plan([pool], shard, needs=Needs(checks="always"))
        given = dict.fromkeys(("exists", "get", "put", "delete", "clear"), DEADLINE_S)
        core: Any = {"deadlines": given, "breaker": {"backoff": "50 ms"}}
        cache = Attachment.open(
            dock,
            plan,
            Namespace(model="kvdock drill", salt=str(time.monotonic_ns())),
            {pool.name: memory.region()},
            {backend.name: config} if backend.manifest.settings else None,
            core=structure(CoreSettings, core, where="drill"),
        )
        yield Drill(faults, memory, cache)
        faults.release()
        assert cache.settle(30), "a call never ended"
        assert not cache.leases(pool.name).busy(range(PAGES)).any(), "a lease is left"
        cache.clear()
        assert cache.close(), "it did not close in time"
        end = time.monotonic() + 30
        while threading.active_count() > before and time.monotonic() < end:
            time.sleep(0.01)
        assert threading.active_count() <= before, "a thread is left"

    @pytest.mark.parametrize("rate", [0.5, 1.0])
    @pytest.mark.parametrize("fault", list(Fault))
    def test_a_fault_is_a_miss_in_time(
        self, drill: Drill, fault: Fault, rate: float
    ) -> None:
        """Store, find and load with a fault, and then without it."""
        name = drill.memory.pool.name
        half = range(PAGES // 2)
        for page, page_hash in zip(half, drill.hashes, strict=True):
            drill.memory.write(page, page_hash)
        drill.faults.inject(kinds=(fault,), rate=rate)
        drill.timed(lambda: drill.cache.put(drill.hashes, {name: half}))
        best = drill.timed(lambda: drill.cache.exists(drill.hashes)).best
        places = range(PAGES // 2, PAGES // 2 + best)
        moved = drill.timed(
            lambda: drill.cache.get(drill.hashes[:best], {name: places})
        )
        drill.check(moved)

    def test_without_a_fault_every_page_comes_back(self, drill: Drill) -> None:
        """Guard the others: a core that moves nothing would pass them."""
        name, half = drill.memory.pool.name, range(PAGES // 2)
        for page, page_hash in zip(half, drill.hashes, strict=True):
            drill.memory.write(page, page_hash)
        assert drill.cache.put(drill.hashes, {name: half}).pages == PAGES // 2
        places = range(PAGES // 2, PAGES)
        moved = drill.cache.get(drill.hashes, {name: places})
        assert moved.pages == PAGES // 2
        drill.check(moved)

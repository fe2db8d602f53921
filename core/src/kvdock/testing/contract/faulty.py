"""The core over the backend while faults are injected between the two."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs

from kvdock.batches import Outcome
from kvdock.core_settings import CoreSettings, Deadlines, Integrity
from kvdock.dock import Dock
from kvdock.keys import Namespace
from kvdock.observers import put_around
from kvdock.observers.faults import Fault, FaultInjector, FaultSettings
from kvdock.pools import HitPolicy, Shard
from kvdock.sessions import Attachment
from kvdock.testing.cases import Case, contract_test, one_sample
from kvdock.testing.memory import PageMemory
from kvdock.testing.rigs import Harness, load_backend
from kvdock.testing.samples import Sample, page_hashes
from kvdock.verdicts import Needs

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from kvdock.manifest import Manifest
    from kvdock.sessions import Moved

PAGES = page_hashes(8)
DEADLINE_S = 0.5
LATE_S = 1.0
"""How much later than its deadline a call may end on a busy machine."""

SETTLE_S = 30.0


def every_fault(manifest: Manifest) -> Iterable[Case]:
    """Run for each fault, with a pool that can be an anchor."""
    (plain,) = one_sample(manifest)
    skip = plain.skip
    if not skip and plain.value.hit_policy is not HitPolicy.ALL_PAGES:
        skip = "none of its pools can be an anchor"
    for fault in Fault:
        yield Case(str(fault), (fault, plain.value), skip)


@attrs.frozen(eq=False)
class _Engine:
    """An engine of one pool, over the backend and an injector of faults."""

    cache: Attachment
    memory: PageMemory
    faults: FaultInjector

    def fill(self) -> dict[str, list[int]]:
        """Compute the pages of a prefix; return where they lie."""
        places = list(range(len(PAGES)))
        for place, page in zip(places, PAGES, strict=True):
            self.memory.write(place, page)
        return {self.memory.pool.name: places}

    def load(self, count: int) -> Moved:
        """Load a prefix into blank memory; assert that what is OK is right."""
        name, pool, shard = self.memory.pool.name, self.memory.pool, self.memory.shard
        places = list(range(len(PAGES), len(PAGES) + count))
        self.memory.blank(len(PAGES), 2 * len(PAGES))
        moved = self.cache.get(PAGES[:count], {name: places})
        for place, page, outcome in zip(
            places, PAGES, moved.outcomes[name].tolist(), strict=False
        ):
            for stored in pool.objects(shard) if outcome == Outcome.OK else ():
                assert self.memory.holds(place, page, stored), (
                    f"wrong bytes: page {place} was called loaded and is not"
                )
        return moved


@contextmanager
def engine(harness: Harness, sample: Sample, *faults: Fault) -> Iterator[_Engine]:
    """Attach the backend to an engine, with faults that are not yet injected."""
    # Loaded anew: observers belong to a plugin manager for good.
    backend = load_backend(harness.plugin)
    injector = FaultInjector(FaultSettings(kinds=faults, rate=0.0, delay=0.05))
    dock = Dock({backend.name: backend})
    put_around(dock, "faults", injector)
    core = CoreSettings(
        integrity=Integrity.ALWAYS,
        deadlines=Deadlines(
            exists=DEADLINE_S, get=DEADLINE_S, put=DEADLINE_S, clear=DEADLINE_S
        ),
    )
    pool = attrs.evolve(sample.pool(), anchor=True)
    plan = dock.plan([pool], Shard(), needs=Needs(checks=core.integrity))
    memory = PageMemory.of(plan.anchor.pool, Shard(), 2 * len(PAGES))
    namespace = Namespace(model="faulty", salt=harness.salt)
    cache = Attachment.open(
        dock,
        plan,
        namespace,
        {pool.name: memory.region()},
        {backend.name: harness.settings},
        core=core,
    )
    try:
        yield _Engine(cache, memory, injector)
    finally:
        injector.release()
        assert cache.settle(SETTLE_S), "a call is still running"
        cache.clear()
        cache.close()


class FaultTests:
    """Whatever fails on the way, no wrong byte reaches the engine."""

    @contract_test(every_fault)
    def test_a_fault_is_a_miss_in_time(
        self, harness: Harness, case: tuple[Fault, Sample]
    ) -> None:
        fault, sample = case
        with engine(harness, sample, fault) as trial:
            places = trial.fill()
            for rate in (0.0, 1.0):
                trial.faults.inject(rate=rate)
                for call in (
                    lambda: trial.cache.put(PAGES, places),
                    lambda: trial.cache.exists(PAGES),
                    lambda: trial.load(len(PAGES)),
                ):
                    began = time.monotonic()
                    call()
                    took = time.monotonic() - began
                    assert took < DEADLINE_S + LATE_S, f"a call took {took:.1f} s"
            # Late bytes land before the memory is looked at again.
            trial.faults.release()
            assert trial.cache.settle(SETTLE_S)
            trial.load(len(PAGES))

    @contract_test(every_fault)
    def test_what_was_stored_before_a_fault_is_there_after_it(
        self, harness: Harness, case: tuple[Fault, Sample]
    ) -> None:
        fault, sample = case
        with engine(harness, sample, fault) as trial:
            stored = trial.cache.put(PAGES, trial.fill())
            assert stored.pages == len(PAGES), "not stored, although nothing failed"
            trial.faults.inject(rate=1.0)
            trial.cache.exists(PAGES)
        with engine(harness, sample, fault) as trial:
            found = trial.cache.exists(PAGES)
            assert trial.load(found.best).pages == found.best

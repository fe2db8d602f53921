"""A pool that is stored in several places, near first."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import attrs
import numpy as np
import pytest
from shelf import Engine, Shelf, attention, draft, hashes, patient, until

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.config.core import CoreSettings
from kvdock.dock import Dock
from kvdock.namespace import Namespace
from kvdock.pools.shard import Shard
from kvdock.routing.plan import Plan
from kvdock.transfer.attachment import Attachment
from kvdock.transfer.manager import TransferManager

NAMES, PAGES = hashes(6), list(range(6))


def in_turn(engine: Engine) -> Attachment:
    """Attach the engine's pools once more, each to all shelves in their order."""
    backends = {shelf.name: shelf.backend() for shelf in engine.shelves}
    dock = Dock(backends)
    plans = [
        dock.plan(engine.pools, Shard(), prefer=[shelf.name])
        for shelf in engine.shelves
    ]
    routes = tuple(
        attrs.evolve(
            same[0], placements=tuple(p for one in same for p in one.placements)
        )
        for same in zip(*(plan.routes for plan in plans), strict=True)
    )
    regions = {pool.name: engine.attachment[pool.name].region for pool in engine.pools}
    plan = Plan(Shard(), routes)
    return Attachment.open(dock, plan, Namespace(model="m"), regions, core=engine.core)


@attrs.define
class Two:
    """Two shelves, and an attachment whose pools are stored in both."""

    near: Shelf
    far: Shelf
    engine: Engine
    cache: Attachment

    def store(self) -> None:
        self.engine.fill(NAMES, PAGES)
        assert self.cache.put(NAMES, self.where()).pages == len(NAMES)
        self.engine.memory["kv"][:] = 0

    def where(self) -> dict[str, list[int]]:
        return {pool.name: PAGES for pool in self.engine.pools}

    def load(self) -> int:
        found = self.cache.get(NAMES, self.where())
        for page in range(found.pages):
            for pool in self.engine.pools:
                assert self.engine.holds(pool.name, NAMES[page], page)
        return found.pages


@pytest.fixture
def two() -> Iterator[Two]:
    shelves = Shelf("near"), Shelf("far")
    engine = Engine(shelves, (attention(), draft()), CoreSettings())
    cache = in_turn(engine)
    yield Two(*shelves, engine, cache)
    cache.close()
    engine.attachment.close()


def test_a_page_is_stored_in_each_place_and_loaded_from_the_nearest(two: Two) -> None:
    two.store()
    assert two.near.objects.keys() == two.far.objects.keys()
    two.far.calls.clear()
    assert two.load() == len(NAMES)
    assert two.far.calls == [], "the far one was asked for what is near"
    assert two.cache.exists(NAMES).best == len(NAMES)
    assert two.far.calls == []


def test_what_the_nearest_lost_comes_from_the_next(two: Two) -> None:
    two.store()
    for key in [key for key in two.near.objects if NAMES[2] in key]:
        del two.near.objects[key]
    two.far.calls.clear()
    assert two.cache.exists(NAMES).best == len(NAMES)
    assert two.load() == len(NAMES)
    asked = {key for batch in two.far.calls for key in batch.keys}
    assert asked
    assert all(NAMES[2] in key for key in asked)


def test_wrong_bytes_near_are_deleted_there_and_loaded_from_the_next(two: Two) -> None:
    two.store()
    (bad,) = [key for key in two.near.objects if NAMES[1] in key and "kv" in key][:1]
    two.near.objects[bad] = bytes(len(two.near.objects[bad]))
    assert two.load() == len(NAMES)
    assert two.cache.wait_idle(10)
    assert bad not in two.near.objects
    assert bad in two.far.objects


@pytest.mark.parametrize("which", ["near", "far"])
def test_one_place_that_fails_does_not_matter(two: Two, which: str) -> None:
    shelf: Shelf = getattr(two, which)
    shelf.trouble = lambda batch: BatchResult.all(batch, Outcome.ERROR)
    two.store()
    assert two.load() == len(NAMES)
    assert two.cache.exists(NAMES).best == len(NAMES)
    breakers = two.cache.breakers()
    assert set(breakers) == {"near", "far"}, "each has breakers of its own"


def test_a_place_that_hangs_takes_its_share_of_the_time_only(two: Two) -> None:
    two.store()
    hangs: list[float] = []

    def hang(batch: Batch) -> BatchResult | None:
        if batch.operation is Operation.GET:
            hangs.append(batch.remaining_s())
        return BatchResult.all(batch, Outcome.TIMEOUT)

    two.near.trouble = hang
    assert two.load() == len(NAMES)
    whole = two.cache.core.deadlines.get
    assert hangs
    assert max(hangs) <= whole / 2


def test_a_page_given_twice_is_loaded_once(two: Two) -> None:
    two.store()
    pool = two.cache["kv"]
    outcomes = pool.get(NAMES[:2], [3, 3])
    assert sorted(outcomes.tolist()) == [Outcome.OK, Outcome.REFUSED]
    (first,) = np.flatnonzero(outcomes == Outcome.OK)
    assert two.engine.holds("kv", NAMES[first], 3)


def test_clearing_and_testing_reach_each_place(two: Two) -> None:
    two.store()
    findings = two.cache.self_test()
    assert len(findings) == 2 * 2 * 4
    assert all(one.ok for one in findings)
    assert two.cache.clear() == {"near": Outcome.OK, "far": Outcome.OK}
    assert not two.near.objects
    assert not two.far.objects


def test_pages_are_deleted_in_one_place(two: Two) -> None:
    two.store()
    far = two.cache["kv"].placements[1]
    deadline_s = two.cache.core.deadlines.until(Operation.DELETE)
    assert (far.delete(NAMES[:2], deadline_s) == Outcome.OK).all()
    assert far.find(NAMES, deadline_s).tolist() == [False] * 2 + [True] * 4
    assert two.cache["kv"].exists(NAMES).all()


def test_a_background_load_goes_on_to_the_next_place_when_the_nearest_hangs(
    two: Two,
) -> None:
    two.store()
    release = threading.Event()

    def hang(batch: Batch) -> None:
        if batch.operation is Operation.GET:
            assert release.wait(60)

    # Staged, so that the load that hangs keeps no page.
    engine = attrs.evolve(two.engine, core=patient(calls={"staging": "always"}))
    with TransferManager(in_turn(engine)) as manager:
        two.near.trouble = hang
        future = manager.read("kv", NAMES, PAGES, timeout_s=2.0)
        until(lambda: future.ended)
        loaded = future.outcomes.tolist()
        release.set()
        assert manager.drain(60)
    assert loaded == [Outcome.OK] * len(NAMES)
    assert all(engine.holds("kv", name, at) for at, name in enumerate(NAMES))
    engine.attachment.close()

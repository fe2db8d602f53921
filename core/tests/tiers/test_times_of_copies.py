"""Times and clears hold for copies, and for pages that a far tier has already."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from shelf import Shelf, attention, patient, until
from tiered import NAMES, WHERE, Tiers, held_by
from timed import TimedShelf

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.retention import RetentionAnswer

NAME = attention().name
WHERES = {NAME: np.array(WHERE)}
ACCEPTED = [RetentionAnswer.ACCEPTED] * len(NAMES)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Return what sets the clock of the host ahead."""
    real, ahead = time.time, [0.0]
    monkeypatch.setattr("time.time", lambda: real() + ahead[0])

    def skip(seconds: float) -> None:
        ahead[0] += seconds

    return skip


@pytest.fixture
def tiers() -> Iterator[Tiers]:
    made = Tiers([TimedShelf("near"), TimedShelf("far")])
    yield made
    for shelf in made.shelves:
        shelf.trouble = None
    made.cache.close()


def test_a_page_that_a_far_tier_has_expires_there_too(
    tiers: Tiers, later: Callable[[float], None]
) -> None:
    near = tiers.shelves[0]
    assert tiers.put() == len(NAMES)
    tiers.settle()
    near.objects.clear()
    rows = np.stack([tiers.content(NAME, name) for name in NAMES])
    tiers.cache[NAME].region.scatter(np.array(WHERE), rows)
    stored = tiers.cache.put(NAMES, WHERES, expire_s=60)
    assert stored.retained is not None
    assert stored.retained.tolist() == ACCEPTED
    tiers.settle()
    assert tiers.get() == len(NAMES)
    later(61)
    assert not tiers.cache.exists(NAMES).best
    assert tiers.get() == 0


def test_an_expiry_that_a_tier_does_not_take_is_not_said_to_hold(
    tiers: Tiers,
) -> None:
    tiers.put()
    tiers.settle()
    far = tiers.shelves[1]

    def fails(batch: Batch) -> BatchResult | None:
        retains = batch.operation is Operation.RETAIN
        return BatchResult.all(batch, Outcome.ERROR) if retains else None

    far.trouble = fails
    stored = tiers.cache.put(NAMES, WHERES, expire_s=60)
    assert stored.retained is not None
    assert not (stored.retained == RetentionAnswer.ACCEPTED).any()


@pytest.mark.parametrize("held", [Operation.GET, Operation.PUT])
def test_an_expiry_during_a_copy_holds_for_the_copy(
    tiers: Tiers, later: Callable[[float], None], held: Operation
) -> None:
    near, far = tiers.shelves
    gate = threading.Event()
    shelf = near if held is Operation.GET else far
    shelf.trouble = held_by(gate, held)
    assert tiers.put() == len(NAMES)
    until(lambda: any(one.operation is held for one in shelf.calls))
    assert tiers.cache.expire(NAMES, 60).tolist() == ACCEPTED
    gate.set()
    tiers.settle()
    near.objects.clear()
    assert tiers.get() == len(NAMES)
    later(61)
    assert tiers.get() == 0


def test_an_expiry_reaches_a_copy_that_waits(
    tiers: Tiers, later: Callable[[float], None]
) -> None:
    near, far = tiers.shelves
    gate = threading.Event()
    far.trouble = held_by(gate, Operation.PUT)
    tiers.put(NAMES[:1], WHERE[:1])
    until(lambda: any(one.operation is Operation.PUT for one in far.calls))
    tiers.put(NAMES[1:], WHERE[1:])
    assert tiers.cache.expire(NAMES, 60).tolist() == ACCEPTED
    gate.set()
    tiers.settle()
    assert len(far.objects) == len(NAMES)
    near.objects.clear()
    later(61)
    assert tiers.get() == 0


def test_what_a_backend_serves_after_its_time_is_a_miss(
    tiers: Tiers, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = tiers.shelves
    tiers.put()
    tiers.settle()
    assert tiers.cache.expire(NAMES, 60).tolist() == ACCEPTED
    # It tells the times, and does not look at them.
    monkeypatch.setattr(TimedShelf, "over", lambda *_: False)
    assert tiers.get() == len(NAMES)
    later(61)
    assert tiers.get() == 0
    until(lambda: not near.objects and not far.objects)


def test_what_is_stored_after_a_clear_outlasts_the_copy_of_before() -> None:
    core = patient(deadlines={"clear": "200 ms", "put": "60 s"})
    rules: list[Any] = [{"backend": "near", "promote": "always"}, "far"]
    tiers = Tiers([Shelf("near"), Shelf("far")], rules, core=core)
    near, gate, stuck = tiers.shelves[0], threading.Event(), threading.Event()

    def first_waits(batch: Batch) -> None:
        if batch.operation is Operation.PUT and not stuck.is_set():
            stuck.set()
            assert gate.wait(60)

    try:
        tiers.put()
        tiers.settle()
        near.objects.clear()
        near.trouble = first_waits
        assert tiers.get() == len(NAMES)  # and they are copied nearer
        assert stuck.wait(60)
        tiers.cache.clear()
        assert tiers.put(NAMES[:2], WHERE[:2]) == 2
        gate.set()
        tiers.settle()
        assert len(near.objects) == 2
    finally:
        gate.set()
        tiers.cache.close()


@pytest.mark.parametrize("kind", [Shelf, TimedShelf])
def test_a_copy_that_outlasts_a_clear_brings_nothing_back(
    kind: type[Shelf],
) -> None:
    core = patient(deadlines={"clear": "200 ms", "put": "60 s"})
    tiers = Tiers([kind("near"), kind("far")], core=core)
    near, far = tiers.shelves
    gate = threading.Event()
    try:
        far.trouble = held_by(gate, Operation.PUT)
        tiers.put()
        until(lambda: any(one.operation is Operation.PUT for one in far.calls))
        assert set(tiers.cache.clear().values()) == {Outcome.OK}
        # Stored again while the copy of before is still under way.
        tiers.put(NAMES[:2], WHERE[:2])
        gate.set()
        tiers.settle()
        assert len(near.objects) == 2
        assert far.objects.keys() == near.objects.keys()
        assert tiers.get() == 2
    finally:
        gate.set()
        tiers.cache.close()

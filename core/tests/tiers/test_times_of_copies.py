"""Times and clears hold for copies, and for pages that a far tier has already."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from shelf import Shelf, attention, held_by, patient, until
from tiered import NAMES, WHERE, Tiers
from timed import TimedShelf

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.retention import RetentionAnswer

NAME = attention().name
WHERES = {NAME: np.array(WHERE)}
ACCEPTED = [RetentionAnswer.ACCEPTED] * len(NAMES)


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
    tiers.stored()
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
    tiers.stored()
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


def test_what_a_backend_serves_after_its_time_is_a_miss(
    tiers: Tiers, later: Callable[[float], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = tiers.shelves
    tiers.stored()
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
    tiers = Tiers([Shelf("near"), Shelf("far")], tiers=rules, core=core)
    near, gate, stuck = tiers.shelves[0], threading.Event(), threading.Event()

    def first_waits(batch: Batch) -> None:
        if batch.operation is Operation.PUT and not stuck.is_set():
            stuck.set()
            assert gate.wait(60)

    try:
        tiers.stored()
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


def test_deleted_pages_are_gone_from_every_tier_and_others_stay(tiers: Tiers) -> None:
    near, far = tiers.shelves
    tiers.stored()
    assert tiers.cache.delete(NAMES[1:]).tolist() == [Outcome.OK] * (len(NAMES) - 1)
    assert len(near.objects) == len(far.objects) == 1
    assert tiers.get() == 1
    # What is not there is deleted as well.
    assert tiers.cache.delete(NAMES[1:]).tolist() == [Outcome.OK] * (len(NAMES) - 1)
    tiers.stored()
    assert far.objects.keys() == near.objects.keys()


def test_a_tier_that_does_not_delete_is_told_page_by_page(tiers: Tiers) -> None:
    tiers.stored()

    def fails(batch: Batch) -> BatchResult | None:
        deletes = batch.operation is Operation.DELETE
        return BatchResult.all(batch, Outcome.ERROR) if deletes else None

    tiers.shelves[1].trouble = fails
    assert tiers.cache.delete(NAMES).tolist() == [Outcome.ERROR] * len(NAMES)


@pytest.mark.parametrize("deleted", [slice(0, 1), slice(1, None)])
def test_a_copy_brings_no_deleted_page_back(deleted: slice) -> None:
    """Neither the one under way, nor those that wait behind it."""
    core = patient(deadlines={"delete": "200 ms", "put": "60 s"})
    tiers = Tiers([Shelf("near"), Shelf("far")], core=core)
    near, far = tiers.shelves
    gate = threading.Event()
    try:
        far.trouble = held_by(gate, Operation.PUT)
        tiers.put(NAMES[:1], WHERE[:1])
        until(lambda: any(one.operation is Operation.PUT for one in far.calls))
        tiers.put(NAMES[1:], WHERE[1:])
        left = [name for name in NAMES if name not in NAMES[deleted]]
        assert not tiers.cache.delete(NAMES[deleted]).any()
        gate.set()
        tiers.settle()
        assert len(near.objects) == len(left)
        assert far.objects.keys() == near.objects.keys()
        assert tiers.cache[NAME].exists(NAMES).tolist() == [
            name in left for name in NAMES
        ]
    finally:
        gate.set()
        tiers.cache.close()


def test_a_page_that_is_read_while_it_is_deleted_is_promoted_to_no_tier() -> None:
    """The near tier is empty already when the far one answers once more."""
    rules: list[Any] = [{"backend": "near", "promote": "always"}, "far"]
    tiers = Tiers([Shelf("near"), Shelf("far")], tiers=rules)
    near, far = tiers.shelves

    def reads(batch: Batch) -> None:
        if batch.operation is Operation.DELETE:
            far.trouble = None
            assert tiers.get() == len(NAMES)

    try:
        tiers.stored()
        near.objects.clear()
        far.trouble = reads
        assert not tiers.cache.delete(NAMES).any()
        tiers.settle()
        assert not near.objects
        assert not far.objects
    finally:
        tiers.cache.close()


def test_a_copy_that_begins_while_its_pages_are_deleted_copies_none() -> None:
    tiers = Tiers(
        [Shelf("near"), Shelf("far")], core=patient(deadlines={"put": "60 s"})
    )
    copier = tiers.cache._backends.copier  # waits for no other calls
    assert copier is not None
    near, far = tiers.shelves
    first, second = threading.Event(), threading.Event()
    puts: list[threading.Event] = []

    def waits(batch: Batch) -> None:
        if batch.operation is Operation.PUT:
            puts.append(second if puts else first)
            assert puts[-1].wait(60)

    def lets_the_next_begin(batch: Batch) -> None:
        if batch.operation is Operation.DELETE:
            first.set()
            until(lambda: len(puts) == 2 or copier.wait_idle(0))

    far.trouble, near.trouble = waits, lets_the_next_begin
    try:
        tiers.put(NAMES[:1], WHERE[:1])
        until(lambda: len(puts) == 1)
        tiers.put(NAMES[1:], WHERE[1:])
        assert not tiers.cache.delete(NAMES[1:]).any()
        second.set()
        tiers.settle()
        assert far.objects.keys() == near.objects.keys()
        assert len(near.objects) == 1
    finally:
        first.set()
        second.set()
        tiers.cache.close()

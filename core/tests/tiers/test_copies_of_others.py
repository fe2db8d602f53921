"""Deletions, expiries and clears hold for a copy that another process has under way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from shelf import Shelf, attention, held_by, until
from tiered import NAMES, WHERE, Tiers
from timed import TimedShelf

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.retention import RetentionAnswer

END_S = 600
ACCEPTED = [RetentionAnswer.ACCEPTED] * len(NAMES)


class Pair:
    """Two engines on the same two tiers: one copies, the other changes."""

    def __init__(self, kind: Callable[..., Shelf]) -> None:
        rules: list[Any] = [{"backend": "near", "promote": "always"}, "far"]
        fields = ("objects", "ends", "promised")[: 3 if kind is TimedShelf else 1]
        near: dict[str, Any] = {name: {} for name in fields}
        far: dict[str, Any] = {name: {} for name in fields}
        self.copying, self.changing = [
            Tiers([kind("near", **near), kind("far", **far)], tiers=rules)
            for _ in range(2)
        ]
        self.near, self.far = self.copying.shelves
        self.gate = threading.Event()

    def copy(self, *, nearer: bool) -> None:
        """Begin a copy that waits where it stores."""
        target = self.near if nearer else self.far
        if nearer:
            assert self.copying.put() == len(NAMES)
            self.copying.settle()
            self.near.objects.clear()
        calls = len(target.calls)
        target.trouble = held_by(self.gate, Operation.PUT)
        begin = self.copying.get if nearer else self.copying.put
        assert begin() == len(NAMES)
        until(lambda: any(one.operation == "put" for one in target.calls[calls:]))

    def end(self) -> None:
        self.gate.set()
        self.copying.settle()

    def close(self) -> None:
        self.gate.set()
        for one in (self.copying, self.changing):
            one.cache.close()


@pytest.fixture(params=[Shelf, TimedShelf])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.close()


@pytest.fixture
def timed() -> Iterator[Pair]:
    made = Pair(TimedShelf)
    yield made
    made.close()


def delete(tiers: Tiers) -> None:
    assert not tiers.cache.delete(NAMES).any()


def clear(tiers: Tiers) -> None:
    assert set(tiers.cache.clear().values()) == {Outcome.OK}


def expire(tiers: Tiers) -> None:
    assert tiers.cache.expire(NAMES, END_S).tolist() == ACCEPTED


@pytest.mark.parametrize("nearer", [False, True])
@pytest.mark.parametrize("change", [delete, clear])
def test_what_is_deleted_during_a_copy_does_not_come_back(
    pair: Pair, change: Callable[[Tiers], None], *, nearer: bool
) -> None:
    pair.copy(nearer=nearer)
    change(pair.changing)
    pair.end()
    assert not pair.near.objects
    assert not pair.far.objects


@pytest.mark.parametrize("change", [delete, clear])
def test_a_copy_that_ends_between_the_deletions_of_two_tiers_is_deleted(
    pair: Pair, change: Callable[[Tiers], None]
) -> None:
    """It finds its source as it was, and the near tier is deleted already."""
    pair.copy(nearer=True)

    def ends_first(batch: Batch) -> None:
        if batch.operation in (Operation.DELETE, Operation.CLEAR):
            pair.end()

    pair.changing.shelves[1].trouble = ends_first
    change(pair.changing)
    assert not pair.near.objects
    assert not pair.far.objects


@pytest.mark.parametrize("nearer", [False, True])
def test_an_expiry_during_a_copy_holds_for_it(timed: Pair, *, nearer: bool) -> None:
    timed.copy(nearer=nearer)
    expire(timed.changing)
    timed.end()
    expect_times(timed)


def test_an_expiry_holds_for_a_copy_that_ends_between_two_tiers(timed: Pair) -> None:
    timed.copy(nearer=True)

    def ends_first(batch: Batch) -> None:
        if batch.operation is Operation.RETAIN and batch.expire_at is not None:
            timed.end()

    timed.changing.shelves[1].trouble = ends_first
    expire(timed.changing)
    expect_times(timed)


def expect_times(pair: Pair) -> None:
    latest = time.time() + END_S
    for shelf in (pair.near, pair.far):
        assert isinstance(shelf, TimedShelf)
        assert len(shelf.objects) == len(NAMES)
        ends = np.array([shelf.ends.get(key, 0) for key in shelf.objects])
        assert np.all((ends > 0) & (ends <= latest))


def test_what_is_stored_after_a_deletion_stays_during_a_copy(pair: Pair) -> None:
    pair.copy(nearer=False)
    delete(pair.changing)
    pair.changing.shelves[1].trouble = held_by(pair.gate, Operation.PUT)
    assert pair.changing.put() == len(NAMES)
    pair.end()
    pair.changing.settle()
    assert len(pair.near.objects) == len(pair.far.objects) == len(NAMES)
    assert pair.changing.get() == len(NAMES)


def test_a_copy_does_not_take_back_what_was_promised_since(timed: Pair) -> None:
    """Stored anew and promised, before its copy has come to the far tier."""
    timed.copy(nearer=True)
    delete(timed.changing)
    held = threading.Event()
    timed.changing.shelves[1].trouble = held_by(held, Operation.PUT)
    kept = NAMES[:2]
    stored = timed.changing.cache.put(kept, {attention().name: WHERE[:2]}, keep_s=END_S)
    assert stored.retained is not None
    assert stored.retained.tolist() == ACCEPTED[:2]
    timed.end()
    assert len(timed.near.objects) == len(kept)
    held.set()


def test_a_copy_whose_tier_takes_no_time_is_deleted(timed: Pair) -> None:
    timed.copy(nearer=False)
    expire(timed.changing)

    def refuses(batch: Batch) -> BatchResult | None:
        if batch.operation is Operation.RETAIN:
            return BatchResult.all(batch, Outcome.REFUSED)
        return None

    timed.far.trouble = refuses
    timed.end()
    assert not timed.far.objects
    assert len(timed.near.objects) == len(NAMES)


def test_a_deletion_waits_for_a_copy_of_its_own_process(pair: Pair) -> None:
    """Until the copy ends what it stores can be loaded."""
    pair.copy(nearer=False)
    deleted = threading.Event()

    def deletes(batch: Batch) -> None:
        if batch.operation is Operation.DELETE:
            deleted.set()

    pair.near.trouble = deletes
    with ThreadPoolExecutor(1) as other:
        call = other.submit(delete, pair.copying)
        assert not deleted.wait(0.2)
        pair.end()
        call.result(60)
    assert deleted.is_set()

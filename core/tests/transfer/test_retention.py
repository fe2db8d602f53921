"""Promises and expiry of an attachment: over pools, tiers and kinds of backends."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shelf import Engine, Shelf, attention, draft, hashes, patient, until
from tiered import NAMES, WHERE, Tiers

from kvdock.batch import Operation
from kvdock.errors import KvdockError
from kvdock.plugin.manifest import Support
from kvdock.retention import LATEST, Retention, RetentionAnswer, combined

if TYPE_CHECKING:
    from kvdock import TransferResult

ACCEPTED, CLIPPED, ABSENT, UNSUPPORTED = (int(one) for one in RetentionAnswer)
NAME = attention().name
answers = st.lists(st.sampled_from(list(RetentionAnswer)), min_size=5, max_size=5)


def answered(stored: TransferResult) -> list[int]:
    assert stored.retained is not None
    found: list[int] = stored.retained.tolist()
    return found


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    made: list[Engine] = []

    def build(**more: Any) -> Engine:
        made.append(Engine(**more))
        return made[-1]

    yield build
    for one in made:
        one.attachment.close()


@given(keep_s=st.none() | st.floats(0, 1e11), expire_s=st.none() | st.floats(0, 1e11))
def test_times_are_whole_seconds_that_promise_no_less(
    keep_s: float | None, expire_s: float | None
) -> None:
    before = time.time()
    found = Retention.lasting(keep_s, expire_s)
    after = time.time()
    assert found.keep_until <= LATEST
    assert found.expire_at <= LATEST
    assert bool(found.expire_at) == (expire_s is not None)
    if expire_s is not None:
        assert found.expire_at <= max(1, after + expire_s)
    if keep_s and expire_s is None:
        assert found.keep_until >= min(LATEST, math.floor(before + keep_s))
    if found.expire_at:
        assert found.keep_until <= found.expire_at


@pytest.mark.parametrize("wrong", [-1, float("nan")])
def test_a_duration_below_nothing_is_an_error(
    engine: Callable[..., Engine], wrong: float
) -> None:
    cache = engine().attachment
    for call in (cache.retain, cache.expire):
        with pytest.raises(KvdockError, match="Give seconds, 0 or more"):
            call(NAMES, wrong)
    with pytest.raises(KvdockError, match="keep_s"):
        cache.put(NAMES, {NAME: WHERE}, keep_s=wrong)


@given(one=answers, two=answers)
def test_the_worst_answer_of_those_that_have_a_page_counts(
    one: list[int], two: list[int]
) -> None:
    found = combined([np.array(one, np.uint8), np.array(two, np.uint8)], 5).tolist()
    for at, pair in enumerate(zip(one, two, strict=True)):
        there = [answer for answer in pair if answer != ABSENT]
        assert found[at] == max(there, default=ABSENT)


def test_a_backend_without_times_expires_by_trailers(
    engine: Callable[..., Engine], later: Callable[[float], None]
) -> None:
    one = engine()
    cache, names = one.attachment, hashes(6)
    one.fill(names, WHERE)
    stored = cache.put(names[:4], {NAME: WHERE[:4]}, expire_s=60)
    assert answered(stored) == [ACCEPTED] * 4
    cache.put(names[4:], {NAME: WHERE[4:]})
    assert cache.get(names, {NAME: WHERE}).pages == 6
    later(61)
    found = cache.get(names, {NAME: WHERE})
    assert found.pages == 0
    assert (found.outcomes[NAME] == 0).tolist() == [False] * 4 + [True] * 2
    # What has expired is deleted, so that it can be stored again.
    until(lambda: not cache.exists(names[:4]).best)
    assert cache.put(names[:4], {NAME: WHERE[:4]}).pages == 4
    assert cache.get(names, {NAME: WHERE}).pages == 6


def test_what_no_backend_can_do_is_answered_so(engine: Callable[..., Engine]) -> None:
    one = engine()
    cache, names = one.attachment, hashes(6)
    one.fill(names, WHERE)
    stored = cache.put(names[:3], {NAME: WHERE[:3]}, keep_s=60)
    assert stored.pages == 3
    assert answered(stored) == [UNSUPPORTED] * 3
    assert cache.retain(names[:3], 60).tolist() == [UNSUPPORTED] * 3
    assert cache.expire(names[:3], 60).tolist() == [UNSUPPORTED] * 3
    # A page that is there keeps its own time.
    stored = cache.put(names, {NAME: WHERE}, expire_s=60)
    assert answered(stored) == [UNSUPPORTED] * 3 + [ACCEPTED] * 3


@pytest.mark.parametrize("grade", [Support.EMULATED, Support.NO])
def test_an_emulated_retention_gets_a_wish_and_no_time_to_expire(
    engine: Callable[..., Engine], later: Callable[[float], None], grade: Support
) -> None:
    shelf = Shelf(retention=grade)
    # What it says about promises is not believed.
    shelf.trouble = lambda batch: (
        attrs.evolve(
            shelf.serve(NAME, batch),
            kept=np.ones(len(batch), np.bool_),
        )
        if batch.operation is Operation.PUT
        else None
    )
    one = engine(shelves=(shelf,))
    cache, names = one.attachment, hashes(4)
    one.fill(names, WHERE[:4])
    stored = cache.put(names, {NAME: WHERE[:4]}, keep_s=600, expire_s=60)
    assert answered(stored) == [UNSUPPORTED] * 4
    assert cache.retain(names, 60).tolist() == [UNSUPPORTED] * 4
    assert cache.expire(names, 60).tolist() == [UNSUPPORTED] * 4
    assert {one.operation for one in shelf.calls} == {Operation.EXISTS, Operation.PUT}
    (put,) = (one for one in shelf.calls if one.operation is Operation.PUT)
    assert bool(put.keep_until) is bool(grade)
    assert put.expire_at is None
    assert cache.get(names, {NAME: WHERE[:4]}).pages == 4
    later(61)
    assert cache.get(names, {NAME: WHERE[:4]}).pages == 0


def test_a_page_that_cannot_expire_is_not_stored(
    engine: Callable[..., Engine],
) -> None:
    one = engine(core=patient(integrity="off"))
    one.fill(NAMES, WHERE)
    stored = one.attachment.put(NAMES, {NAME: WHERE}, expire_s=60)
    assert stored.pages == 0
    assert answered(stored) == [UNSUPPORTED] * len(NAMES)
    assert not one.shelf.objects


def test_the_maximal_age_holds_for_every_put(
    engine: Callable[..., Engine], later: Callable[[float], None]
) -> None:
    one = engine(core=patient(retention={"max_age": "60 s"}))
    one.fill(NAMES, WHERE)
    stored = one.attachment.put(NAMES, {NAME: WHERE})
    assert stored.pages == len(NAMES)
    assert stored.retained is None
    later(59)
    assert one.attachment.get(NAMES, {NAME: WHERE}).pages == len(NAMES)
    later(2)
    assert one.attachment.get(NAMES, {NAME: WHERE}).pages == 0


def test_copies_in_other_tiers_expire_when_the_page_does(
    later: Callable[[float], None],
) -> None:
    tiers = Tiers([Shelf("near"), Shelf("far")], pools=(attention(), draft()))
    try:
        for pool in tiers.pools:
            rows = np.stack([tiers.content(pool.name, name) for name in NAMES])
            tiers.cache[pool.name].region.scatter(np.array(WHERE), rows)
        where = {pool.name: WHERE for pool in tiers.pools}
        stored = tiers.cache.put(NAMES, where, expire_s=60)
        assert answered(stored) == [ACCEPTED] * len(NAMES)
        tiers.settle()
        near, far = tiers.shelves
        assert near.objects == far.objects
        near.objects.clear()
        assert tiers.get() == len(NAMES)
        assert tiers.get() == len(NAMES)  # the second use copies them nearer
        tiers.settle()
        assert near.objects == far.objects
        later(61)
        assert tiers.get() == 0
        near.objects.clear()
        assert tiers.get() == 0
    finally:
        tiers.cache.close()

"""Which pages make way: the tail of a prefix before its head, and cold ones first."""

import os
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import until

from kvdock.batch import Outcome
from kvdock_segments.directory_store import DirectoryStore
from kvdock_segments.eviction import (
    _SHARE,
    cold_slots,
    mean_last_used_ns,
    plan_eviction,
)
from kvdock_segments.format import RECORD, index_bytes, uses_at
from kvdock_segments.index import Index
from kvdock_segments.walk import segments

OpenDepot = Callable[..., Any]

SLOTS = pytest.mark.parametrize(
    ("slots", "room"),
    [pytest.param(4, 240, id="4-a-segment"), pytest.param(200, 2600, id="200")],
)


def limits(room: int, slots: int, *, pools: int = 1) -> dict[str, int]:
    """Return limits with room for so many pages of 512 bytes in each pool."""
    each = 512 + index_bytes(1) - index_bytes(0)
    fixed = -(-room // slots) * index_bytes(0)
    return {
        "quota": pools * (room * each + fixed),
        "segment_bytes": slots * 512,
    }


def chunks(numbers: Sequence[int], size: int = 32) -> list[Sequence[int]]:
    return [numbers[at : at + size] for at in range(0, len(numbers), size)]


@SLOTS
def test_one_write_of_more_than_fits_keeps_the_head_and_refuses_the_rest(
    open_depot: OpenDepot, slots: int, room: int
) -> None:
    depot = open_depot(page_bytes=512, **limits(room, slots))
    pages = range(8 * room)
    depot.there(pages[:1])  # as engines do: a process that never looks is another case
    ok = depot.put(pages).ok
    stored = int(ok.sum())
    assert stored >= 0.9 * room
    assert ok[:stored].all()
    assert set(depot.put(pages[stored:]).outcomes.tolist()) == {int(Outcome.REFUSED)}
    assert depot.there(pages) == ok.tolist()
    assert depot.get(pages[:stored]) == [0] * stored


@SLOTS
def test_a_prefix_longer_than_the_quota_that_comes_in_calls_keeps_its_head(
    open_depot: OpenDepot, slots: int, room: int
) -> None:
    depot = open_depot(page_bytes=512, **limits(room, slots))
    depot.there(range(1))
    for chunk in chunks(range(room + room // 6)):
        depot.put(chunk)
    assert depot.restorable(range(2 * room)) >= 0.9 * room


@SLOTS
def test_a_full_store_makes_way_for_a_prefix_until_that_fills_it(
    open_depot: OpenDepot, slots: int, room: int
) -> None:
    depot = open_depot(page_bytes=512, **limits(room, slots))
    for start in range(100_000, 100_000 + 2 * room, 20):
        depot.request(range(start, start + 20))
    for chunk in chunks(range(room + room // 6)):
        depot.put(chunk)
    assert depot.restorable(range(2 * room)) >= 0.9 * room


@SLOTS
def test_prefixes_that_were_looked_up_may_come_in_turns(
    open_depot: OpenDepot, slots: int, room: int
) -> None:
    depot = open_depot(page_bytes=512, **limits(room, slots))
    first, second = range(room), range(10**6, 10**6 + room)
    depot.there(first)
    depot.there(second)
    for one, other in zip(chunks(first), chunks(second), strict=True):
        depot.put(one)
        depot.there([2 * 10**6 + one[0]])
        depot.put(other)
    kept = depot.restorable(first) + depot.restorable(second)
    assert kept >= 0.8 * room


@SLOTS
def test_a_prefix_that_grows_with_each_request_keeps_its_head(
    open_depot: OpenDepot, slots: int, room: int
) -> None:
    depot = open_depot(page_bytes=512, **limits(room, slots))
    pages = range(room + room // 6)
    for chunk in chunks(pages):
        depot.there(pages[: chunk[-1] + 1])
        depot.put(chunk)
        depot.request([10**6 + chunk[0]])
    assert depot.restorable(pages) >= 0.9 * room


@SLOTS
def test_the_tail_of_a_prefix_goes_before_its_head(
    open_depot: OpenDepot, slots: int, room: int
) -> None:
    depot = open_depot(page_bytes=512, **limits(room, slots))
    old = range(room)
    depot.there(old)
    for chunk in chunks(old):
        depot.put(chunk)
    for start in range(10**6, 10**6 + room // 2, 20):
        depot.request(range(start, start + 20))
    left = sum(depot.there(old))
    assert left < 0.6 * room
    assert depot.restorable(old) >= 0.8 * left


@SLOTS
def test_pools_of_a_prefix_that_is_longer_than_the_quota_share_it(
    open_depot: OpenDepot, slots: int, room: int
) -> None:
    quota = limits(room, slots, pools=2)
    target = open_depot(page_bytes=512, **quota)
    draft = open_depot(pool="draft", page_bytes=512, **quota)
    pages = range(room + room // 6)
    for each in (target, draft):
        each.there(pages[:1])
    for chunk in chunks(pages):
        stored = draft.put(chunk).ok
        target.put([page for page, ok in zip(chunk, stored, strict=True) if ok])
    both = min(target.restorable(pages), draft.restorable(pages))
    assert both >= 0.8 * room


def test_a_write_of_one_pool_that_takes_all_leaves_room_for_the_other(
    open_depot: OpenDepot,
) -> None:
    quota = limits(240, 20, pools=2)
    draft = open_depot(pool="draft", page_bytes=512, **quota)
    target = open_depot(page_bytes=512, **quota)
    pages = range(1000)
    draft.put(pages)
    target.put(pages)
    assert min(target.restorable(pages), draft.restorable(pages)) >= 0.8 * 240


def test_two_stores_on_one_root_each_keep_the_head_of_a_prefix(
    open_depot: OpenDepot,
) -> None:
    quota = limits(240, 20)
    one, other = (open_depot(page_bytes=512, **quota) for _ in range(2))
    for start in range(10**6, 10**6 + 240, 20):
        one.request(range(start, start + 20))
    one.store._catalog.flush_uses()  # as it does every ten seconds
    other.there(range(1))
    for chunk in chunks(range(1000)):
        other.put(chunk)
    assert other.restorable(range(1000)) >= 0.9 * (240 - 20)  # of which one has some
    # The one sees what the other has stored last at its next look at the folder.
    until(lambda: one.restorable(range(1000)) == other.restorable(range(1000)))


def test_a_clock_that_is_set_back_stops_no_eviction(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    quota = limits(240, 20)
    depot = open_depot(page_bytes=512, **quota)
    for start in range(0, 480, 20):
        depot.request(range(start, start + 20))
    now_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() - 1800 * 10**9)
    for each in (depot, open_depot(page_bytes=512, **quota)):
        for start in range(1000, 1480, 20):
            assert each.request(range(start, start + 20)).ok.all()
        assert each.restorable(range(1460, 1480)) == 20


def test_damaged_times_of_use_stop_no_eviction(open_depot: OpenDepot) -> None:
    quota = limits(240, 20)
    depot = open_depot(page_bytes=512, **quota)
    for start in range(0, 240, 20):
        depot.request(range(start, start + 20))
    depot.store.close()
    for path in depot.root.glob("*/*/*.idx"):
        raw = bytearray(path.read_bytes())
        raw[uses_at(20) :] = b"\xff" * 7 + b"\x7f" + b"\xff" * (20 * 8 - 8)
        path.write_bytes(raw)
    again = open_depot(page_bytes=512, **quota)
    for start in range(1000, 1480, 20):
        assert again.request(range(start, start + 20)).ok.all()
    assert again.restorable(range(1460, 1480)) == 20


def lru_restores(requests: list[list[int]], room: int) -> int:
    kept: OrderedDict[int, None] = OrderedDict()
    restored = 0
    for request in requests:
        there = [page in kept for page in request]
        restored += [*there, False].index(False)
        for page in reversed(request):
            kept[page] = None
            kept.move_to_end(page)
        while len(kept) > room:
            kept.popitem(last=False)
    return restored


@pytest.mark.parametrize("slots", [pytest.param(4, marks=pytest.mark.slow), 30])
def test_conversations_restore_what_a_pagewise_lru_restores(
    open_depot: OpenDepot, slots: int
) -> None:
    rng = np.random.default_rng(3)
    talks = [[1000 * talk] for talk in range(40)]
    requests = []
    for _ in range(300):
        talk = talks[int(len(talks) * rng.random() ** 3)]
        talk += [talk[-1] + 1 + n for n in range(int(rng.integers(1, 9)))]
        requests.append([*talk])
    room = 13 * slots if slots > 4 else 400
    depot = open_depot(page_bytes=512, **limits(room, slots))
    restored = 0
    for request in requests:
        best = depot.restorable(request)
        if best:
            assert depot.get(request[:best]) == [0] * best
        restored += best
        depot.put(request[best:])
    assert restored >= 0.98 * lru_restores(requests, room)


def test_a_smaller_store_keeps_its_warmest_segments(open_depot: OpenDepot) -> None:
    depot = open_depot(page_bytes=512, segment_bytes=20 * 512)
    for start in range(0, 400, 20):
        depot.request(range(start, start + 20))
    depot.get(range(100))
    depot.store.close()
    namespace = depot.store.place.namespace
    warmth = {
        str(one.name): mean_last_used_ns(one.contents.used_ns[one.live])
        for one in segments(depot.root, namespace)
    }
    DirectoryStore(depot.root).collect(namespace, to_bytes=12 * 20 * 600)
    left = {str(one.name) for one in segments(depot.root, namespace)}
    gone = warmth.keys() - left
    assert gone
    assert max(warmth[name] for name in gone) < min(warmth[name] for name in left)
    assert all(open_depot(page_bytes=512).there(range(100)))


MOMENT_NS = 10**6


@st.composite
def indexes(draw: st.DrawFn) -> tuple[Index, list[Any]]:
    index = Index()
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=12))
    every = [index.open_rows(slots) for slots in sizes]
    key = 0
    for rows in every:
        slots = draw(st.lists(st.integers(0, rows.slots - 1), unique=True))
        records = np.zeros(len(slots), RECORD)
        records["key_low"] = np.arange(key, key + len(slots))
        records["check"] = 1
        key += len(slots)
        moments = st.integers(1, 60).map(lambda moment: moment * MOMENT_NS)
        used = draw(st.lists(moments, min_size=len(slots), max_size=len(slots)))
        records["stored_ns"] = used  # used once, all of them: pages of one class
        index.put(np.array(slots, np.int64) + rows.first, records, used)
    return index, every


@given(
    built=indexes(),
    wanted=st.integers(0, 30),
    before_ns=st.integers(0, 70).map(lambda moment: moment * MOMENT_NS),
    choice=st.randoms(use_true_random=False),
)
def test_a_plan_frees_the_coldest_pages_and_none_that_is_protected(
    built: tuple[Index, list[Any]], wanted: int, before_ns: int, choice: Any
) -> None:
    index, every = built
    writable = np.array([choice.random() < 0.8 for _ in range(len(index.slots_in))])
    plan = plan_eviction(index, writable, wanted, before_ns)
    live = {
        rows.number: index.used_ns[rows.span][index.live(rows)].tolist()
        for rows in every
        if writable[rows.number]
    }
    may_go = [used for some in live.values() for used in some if used < before_ns]
    assert (plan is None) is (not may_go)
    if plan is None:
        return
    assert plan.numbers
    used_ns = np.array(may_go)
    going = used_ns[plan.cold.find(used_ns, used_ns)].tolist()
    cold_ns = max(going)
    assert sorted(going) == sorted(used for used in may_go if used <= cold_ns)
    wanted = min(len(may_go), max(wanted, len(may_go) // _SHARE, 1))
    # One more than were wanted, but for pages that were used at the same moment.
    assert sum(used < cold_ns for used in going) <= wanted <= len(going)
    assert plan.coldest_ns <= cold_ns < before_ns
    for rows in every:
        gone = cold_slots(index, rows, plan, before_ns)
        if rows.number in plan.numbers:
            assert writable[rows.number]
            assert len(gone)
        assert (index.used_ns[rows.span][gone] <= cold_ns).all()


@SLOTS
def test_pages_that_an_engine_serves_from_its_own_memory_stay(
    open_depot: OpenDepot, slots: int, room: int
) -> None:
    depot = open_depot(page_bytes=512, **limits(room, slots))
    kept, other = range(20), range(100, 120)
    depot.request(kept)
    depot.request(other)
    for start in range(1000, 1000 + 3 * room, 20):
        depot.request(range(start, start + 20))
        depot.store.touch(depot.keys([*kept, 10**9]))
    assert all(depot.there(kept))
    assert not any(depot.there(other))
    assert depot.get(kept) == [0] * 20


def test_noting_the_use_of_pages_reads_and_writes_no_file(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    depot.put(range(3))
    for name in ("open", "pread", "pwrite", "preadv", "pwritev", "stat", "fstat"):
        monkeypatch.setattr(os, name, None)
    depot.store.touch(depot.keys(range(3)))
    monkeypatch.undo()
    assert depot.get(range(3)) == [0, 0, 0]

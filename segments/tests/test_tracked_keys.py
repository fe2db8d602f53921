"""Stored keys that are no longer there are found, however they went."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdock_segments.format import index_bytes
from kvdock_segments.tracked_keys import TrackedKeys

OpenDepot = Callable[..., Any]


def digests(numbers: list[int]) -> Any:
    return np.array([(n, n + 1) for n in numbers], np.uint64).reshape(-1, 2)


@given(
    st.lists(st.lists(st.integers(0, 20), max_size=5), max_size=8),
    st.sets(st.integers(0, 20)),
    st.integers(1, 9),
)
def test_each_key_that_is_gone_is_returned_once(
    puts: list[list[int]], there: set[int], limit: int
) -> None:
    tracked = TrackedKeys()
    tracked.limit = limit
    last: dict[int, None] = {}
    for numbers in puts:
        tracked.add(digests(numbers), [f"k{n}" for n in numbers])
        for number in numbers:
            last.pop(number, None)
            last[number] = None
    expected = [n for n in list(last)[-limit:] if n not in there]

    def find(asked: Any) -> Any:
        return np.isin(asked[:, 0], list(there))

    assert tracked.take_removed(find) == [f"k{n}" for n in expected]
    assert tracked.take_removed(find) == []


def test_what_makes_way_is_returned_and_what_stays_is_not(
    open_depot: OpenDepot,
) -> None:
    each = 512 + index_bytes(1) - index_bytes(0)
    quota = 200 * each + 10 * index_bytes(0)
    depot = open_depot(page_bytes=512, quota=quota, segment_bytes=20 * 512)
    assert depot.store.removed(1000) == []
    first, later = range(100), range(1000, 1180)
    for numbers in (first, later):
        for start in numbers[::20]:
            depot.request(range(start, start + 20))
    gone = {number for number in first if not depot.there([number])[0]}
    assert gone
    assert set(depot.store.removed(1000)) == set(depot.keys(sorted(gone)))
    assert depot.store.removed(1000) == []


def test_deletions_and_the_clear_of_another_process_are_noticed(
    open_depot: OpenDepot,
) -> None:
    depot, other = open_depot(), open_depot()
    depot.store.removed(100)
    depot.put(range(4))
    other.put(range(50, 52))
    assert depot.store.removed(100) == []
    depot.delete([1])
    assert depot.store.removed(100) == depot.keys([1])
    other.clear()
    depot.store._catalog.refresh(missed=True, always=True)
    assert depot.store.removed(100) == depot.keys([0, 2, 3])


def test_a_page_that_is_stored_again_is_tracked_again(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.store.removed(10)
    for _ in range(2):
        depot.put([7])
        depot.delete([7])
        assert depot.store.removed(10) == depot.keys([7])


def test_a_forked_child_reports_nothing_of_its_parent(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.store.removed(10)
    depot.put(range(2))
    child = os.fork()
    if not child:
        depot.store.removed(10)
        depot.delete([0])
        os._exit(len(depot.store.removed(10)))
    assert os.waitpid(child, 0)[1] == 0
    depot.delete([0])
    assert depot.store.removed(10) == depot.keys([0])

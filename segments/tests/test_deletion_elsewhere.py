"""A page that one process deletes by name is served by no other."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdock.batch import Outcome
from kvdock_segments import SegmentStore

OpenDepot = Callable[..., Any]
PAGE_BYTES = 2048
SEGMENT_BYTES = 16 << 10
FEW = list(range(3))
MANY = list(range(40))
OK = int(Outcome.OK)


@pytest.fixture
def depots(open_depot: OpenDepot) -> list[Any]:
    """Three processes on one root."""
    return [
        open_depot(page_bytes=PAGE_BYTES, segment_bytes=SEGMENT_BYTES) for _ in range(3)
    ]


def refreshed(store: SegmentStore) -> None:
    """See what others changed, as a process does within 50 ms."""
    store._catalog.refresh(missed=True, always=True)


@pytest.mark.parametrize("deleter", [0, 1])
@pytest.mark.parametrize("numbers", [FEW, MANY], ids=["filled", "full"])
def test_a_page_that_is_deleted_is_served_by_no_process(
    depots: list[Any], deleter: int, numbers: list[int]
) -> None:
    assert depots[0].put(numbers).ok.all()
    for depot in depots:
        assert depot.get(numbers) == [OK] * len(numbers)  # all of them know it
    depots[deleter].delete(numbers[:2])
    for which, depot in enumerate(depots):
        refreshed(depot.store)
        got = depot.get(numbers)
        assert OK not in got[:2], which
        assert got[2:] == [OK] * (len(numbers) - 2), which
    # Their places are used again, and nothing is counted that is not there.
    assert depots[0].put(numbers).ok.all()
    for depot in depots:
        refreshed(depot.store)
        assert depot.get(numbers) == [OK] * len(numbers)


@pytest.mark.parametrize("set_back", ["before", "after"])
@pytest.mark.parametrize("deleter", [0, 1])
@pytest.mark.parametrize("numbers", [FEW, MANY], ids=["filled", "full"])
def test_what_had_expired_when_it_was_deleted_stays_deleted_whatever_the_clock_says(
    depots: list[Any],
    numbers: list[int],
    deleter: int,
    set_back: str,
    open_depot: OpenDepot,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, ahead = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: real() + ahead[0])
    ends = np.full(len(numbers), int(time.time()) + 3600, np.int64)
    depots[0].put(numbers, expire_at=ends)
    ahead[0] += 4000
    for depot in depots:
        assert OK not in depot.get(numbers)
    for moment in ["set back", "delete"][:: 1 if set_back == "before" else -1]:
        if moment == "delete":
            depots[deleter].delete(numbers)
        else:
            ahead[0] -= 4000
        for depot in depots:
            refreshed(depot.store)
            assert OK not in depot.get(numbers)
    # A process that starts now knows nothing of the clock of before.
    assert OK not in open_depot(page_bytes=PAGE_BYTES).get(numbers)


def test_two_deletions_at_once_are_both_seen(depots: list[Any]) -> None:
    assert depots[0].put(FEW).ok.all()
    for depot in depots:
        depot.get(FEW)
    depots[1].delete(FEW[:1])
    depots[2].delete(FEW[1:2])
    refreshed(depots[0].store)
    assert [one == OK for one in depots[0].get(FEW)] == [False, False, True]


def test_what_is_stored_again_stays(depots: list[Any], tmp_path: Path) -> None:
    del tmp_path
    depots[0].put(FEW)
    depots[1].get(FEW)
    depots[1].delete(FEW)
    assert depots[0].put(FEW).ok.all()
    for depot in depots:
        refreshed(depot.store)
        assert depot.get(FEW) == [OK] * len(FEW)

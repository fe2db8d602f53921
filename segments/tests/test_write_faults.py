"""No write fault is for ever: what fails is set aside, and the rest is used."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvdock.batch import Outcome
from kvdock_segments import DirectoryStore, PosixIOEngine, check_root, segment
from kvdock_segments.format import RECORD_BYTES, RECORDS_AT, index_bytes

if TYPE_CHECKING:
    from kvdock_segments.io import IORequest, IOResult

OpenDepot = Callable[..., Any]
OK, ERROR, REFUSED = int(Outcome.OK), int(Outcome.ERROR), int(Outcome.REFUSED)
SLOTS, SEGMENTS, PAGE_BYTES = 16, 12, 512
ROOM = SLOTS * SEGMENTS
LIMITS = {
    "quota": SEGMENTS * (SLOTS * PAGE_BYTES + index_bytes(SLOTS)),
    "segment_bytes": SLOTS * PAGE_BYTES,
    "page_bytes": PAGE_BYTES,
}
Fault = Callable[[str, int], int]
"""From the name of a file and a slot to the error of writing there, or 0."""


class Disk(PosixIOEngine):
    """An engine whose disk cannot be written at some places."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(1)
        self.fault = fault

    def move(self, request: IORequest) -> IOResult:
        result = super().move(request)
        if request.write:
            for row, (file, offset) in enumerate(
                zip(request.file_of.tolist(), request.offsets.tolist(), strict=True)
            ):
                path = Path(f"/proc/self/fd/{request.files[file]}").readlink()
                error = self.fault(path.name, offset // PAGE_BYTES)
                if error:
                    result.errors[row] = error
                    result.nbytes[row] = 0
        return result


def first_name() -> Callable[[str], bool]:
    """Return whether a file of pages is the first one that was asked about."""
    seen: list[str] = []

    def is_first(name: str) -> bool:
        seen.append(name)
        return name == seen[0]

    return is_first


@pytest.fixture
def index_fault(monkeypatch: pytest.MonkeyPatch) -> Callable[[Fault], None]:
    """Return what makes records fail to be written: by segment file and slot."""
    write = os.pwrite

    def begin(fault: Fault) -> None:
        def fail(fd: int, data: Any, at: int) -> int:
            name = Path(f"/proc/self/fd/{fd}").readlink().name
            first = (at - RECORDS_AT) // RECORD_BYTES
            for slot in range(first, first + len(data) // RECORD_BYTES):
                error = first >= 0 and fault(name.split(".")[0], slot)
                if error:
                    raise OSError(error, os.strerror(error))
            return write(fd, data, at)

        monkeypatch.setattr(os, "pwrite", fail)

    return begin


def later(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + seconds)


def put_rounds(depot: Any, rounds: int, first: int = 0) -> list[int]:
    """Put eight pages so many times; return how many each put stored."""
    return [
        int(depot.request(range(at, at + 8)).ok.sum())
        for at in range(first, first + 8 * rounds, 8)
    ]


@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC, errno.EUCLEAN])
@pytest.mark.parametrize("again", [False, True])
def test_slots_that_cannot_be_written_stop_no_put(
    open_depot: OpenDepot, *, error: int, again: bool
) -> None:
    is_first = first_name()

    def fault(name: str, slot: int) -> int:
        return error if is_first(name) and slot in (2, 5) else 0

    depot = open_depot(engine=Disk(fault), **LIMITS)
    stored = put_rounds(depot, 4 * SEGMENTS)
    assert stored[0] == 6
    assert set(stored[1:]) == {8}
    assert depot.store.usage().failed_slots == 2
    assert depot.store.capacity().failed_bytes == 2 * PAGE_BYTES
    assert depot.store.counts["slots_failed"] == 2
    if again:
        depot.store.close()
        depot = open_depot(engine=Disk(fault), **LIMITS)
        assert depot.store.usage().failed_slots == 2
        assert set(put_rounds(depot, 4 * SEGMENTS, 10**6)) == {8}
        assert not depot.store.counts["slots_failed"]


def test_a_slot_that_failed_is_tried_again_and_serves_again(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [True]
    is_first = first_name()
    depot = open_depot(
        engine=Disk(
            lambda name, slot: (
                errno.EIO if bad[0] and is_first(name) and slot == 2 else 0
            )
        ),
        **LIMITS,
    )
    put_rounds(depot, 4)
    assert depot.store.usage().failed_slots == 1
    clock, ahead_s = time.time_ns, [61]
    monkeypatch.setattr(time, "time_ns", lambda: clock() + ahead_s[0] * 10**9)
    # It fails again: the pause is longer.
    put_rounds(depot, 4 * SEGMENTS, 10**3)
    segments = depot.store._catalog.segments.values()
    (failed,) = [one for it in segments for one in it.failed.values()]
    assert failed.failures == 2
    ahead_s[0] = 61 + 481
    bad[0] = False
    assert set(put_rounds(depot, 4 * SEGMENTS, 10**6)) == {8}
    assert depot.store.usage().failed_slots == 0
    depot.store.close()
    assert open_depot(**LIMITS).store.usage().failed_slots == 0


def test_pauses_grow_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time_ns", lambda: 0)
    failed, pauses = None, []
    for _ in range(8):
        failed = segment.FailedSlot.after(failed)
        pauses.append(failed.retry_ns // 10**9)
    assert pauses[:3] == [60, 480, 3840]
    assert pauses[-1] == 24 * 3600


def test_a_disk_that_fails_everywhere_costs_few_pages_and_serves_again(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = [False]
    depot = open_depot(
        engine=Disk(lambda _name, _slot: errno.EIO if bad[0] else 0), **LIMITS
    )
    put_rounds(depot, 4 * SEGMENTS)
    before = depot.store.usage().pages
    bad[0] = True
    for turn in range(8 * SEGMENTS):
        assert not sum(put_rounds(depot, 1, 10**6 + 8 * turn))
    # Pages that can still be read are not evicted for ones that cannot be stored.
    assert depot.store.usage().pages >= before // 2
    bad[0] = False
    later(monkeypatch, 1.1)
    stored = put_rounds(depot, 4 * SEGMENTS, 10**7)
    assert set(stored) == {8}


def test_one_record_that_cannot_be_written_stops_no_put(
    open_depot: OpenDepot, index_fault: Callable[[Fault], None]
) -> None:
    is_first = first_name()
    depot = open_depot(**LIMITS)
    index_fault(lambda name, slot: errno.EIO if is_first(name) and slot == 3 else 0)
    stored = put_rounds(depot, 4 * SEGMENTS)
    assert stored[0] == 7
    assert set(stored[1:]) == {8}


def test_an_index_that_cannot_be_written_stops_no_put(
    open_depot: OpenDepot, index_fault: Callable[[Fault], None]
) -> None:
    is_first = first_name()
    depot = open_depot(**LIMITS)
    index_fault(lambda name, _slot: errno.EIO if is_first(name) else 0)
    stored = put_rounds(depot, 4 * SEGMENTS)
    assert stored[0] == 0
    assert set(stored[1:]) == {8}
    depot.store.close()
    again = open_depot(**LIMITS)
    stored = put_rounds(again, 4 * SEGMENTS, 10**6)
    assert sum(count != 8 for count in stored) <= 1


def test_failed_index_writes_during_eviction_leave_no_segment_claimed(
    open_depot: OpenDepot, index_fault: Callable[[Fault], None]
) -> None:
    depot = open_depot(**LIMITS)
    put_rounds(depot, 4 * SEGMENTS)
    bad = [True]
    index_fault(lambda _name, _slot: errno.EIO if bad[0] else 0)
    for first in range(10**6, 10**6 + 8 * 20, 8):
        depot.request(range(first, first + 8))
    owned = [one for one in depot.store._catalog.segments.values() if one.owned]
    assert len(owned) <= 1
    bad[0] = False
    other = open_depot(**LIMITS)
    assert set(put_rounds(other, 4 * SEGMENTS, 10**7)) == {8}
    other.store.close()


def test_a_process_that_could_not_make_room_stores_once_writes_succeed(
    open_depot: OpenDepot,
    index_fault: Callable[[Fault], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depot = open_depot(**LIMITS)
    put_rounds(depot, 4 * SEGMENTS)
    bad = [True]
    index_fault(lambda _name, _slot: errno.EIO if bad[0] else 0)
    assert not sum(put_rounds(depot, 20, 10**6))
    bad[0] = False
    later(monkeypatch, 1.1)
    assert set(put_rounds(depot, 4 * SEGMENTS, 10**7)) == {8}
    # All of its segments are used again, not only the one that was tried.
    assert depot.store.usage().pages == ROOM
    assert sum(depot.there(range(10**7 + 8, 10**7 + 32 * SEGMENTS))) > ROOM - 2 * SLOTS


def test_a_store_that_is_cleared_after_its_disk_failed_stores_again(
    open_depot: OpenDepot,
) -> None:
    bad = [False]
    depot = open_depot(
        engine=Disk(lambda _name, _slot: errno.EIO if bad[0] else 0), **LIMITS
    )
    put_rounds(depot, 4 * SEGMENTS)
    bad[0] = True
    put_rounds(depot, 8 * SEGMENTS, 10**6)
    assert len(depot.store._allocator.faulty) >= 3
    open_depot(page_bytes=PAGE_BYTES).clear()
    bad[0] = False
    assert set(put_rounds(depot, 4 * SEGMENTS, 10**7)) == {8}


def test_no_other_pool_makes_way_for_pages_of_a_disk_that_fails(
    open_depot: OpenDepot,
) -> None:
    bad = [False]
    disk = Disk(lambda _name, _slot: errno.EIO if bad[0] else 0)
    depot = open_depot(engine=disk, **LIMITS)
    put_rounds(depot, SEGMENTS)
    other = open_depot(pool="draft", **LIMITS)
    put_rounds(other, 4 * SEGMENTS)
    before = other.store.usage().pages
    bad[0] = True
    put_rounds(depot, 16 * SEGMENTS, 10**6)
    # Until it is known that no place alone has failed, some did.
    assert other.store.usage().pages >= before - 4 * SLOTS


def test_faults_now_and_then_end_with_the_last_one(open_depot: OpenDepot) -> None:
    chance = np.random.default_rng(3)
    rate = [1 / 4]
    depot = open_depot(
        engine=Disk(lambda _name, _slot: errno.EIO if chance.random() < rate[0] else 0),
        **LIMITS,
    )
    stored = put_rounds(depot, 6 * SEGMENTS)
    assert 0 < sum(stored) < 8 * len(stored)
    rate[0] = 0
    put_rounds(depot, 2, 10**6)
    assert set(put_rounds(depot, 4 * SEGMENTS, 10**7)) == {8}


def test_verify_reports_slots_that_failed(open_depot: OpenDepot) -> None:
    is_first = first_name()
    depot = open_depot(
        engine=Disk(
            lambda name, slot: errno.EIO if is_first(name) and slot == 2 else 0
        ),
        **LIMITS,
    )
    put_rounds(depot, 4)
    report = DirectoryStore(depot.root).verify(depot.store.place.namespace)
    assert report.failed_slots == 1
    assert report.ok
    assert report.corrupt_records == 0
    findings = [one for one in check_root(depot.root) if not one.ok]
    assert "1 place" in findings[0].what
    assert "disk" in findings[0].hint


@pytest.mark.parametrize("what", ["stat", "read"])
def test_a_read_error_while_claiming_deletes_nothing(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    open_depot(**LIMITS).store.close()
    depot = open_depot(**LIMITS)
    put_rounds(depot, 4 * SEGMENTS)
    before = depot.store.usage().pages
    files = len(list(depot.root.glob("*/*/*.dat")))
    look = os.stat

    def broken(name: Any, *more: Any, **words: Any) -> Any:
        if str(name).endswith(".dat"):
            raise OSError(errno.EIO, "Input/output error")
        return look(name, *more, **words)

    def unread(*_: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, *(("stat", broken) if what == "stat" else ("pread", unread)))
        for first in range(10**6, 10**6 + 8 * 30, 8):
            depot.request(range(first, first + 8))
    assert len(list(depot.root.glob("*/*/*.dat"))) == files
    assert not [one for one in depot.store._catalog.segments.values() if one.owned]
    assert depot.store.usage().pages >= before - SLOTS
    other = open_depot(**LIMITS)
    assert set(put_rounds(other, 4 * SEGMENTS, 10**7)) == {8}
    other.store.close()
    later(monkeypatch, 1.1)
    put_rounds(depot, 1, 10**8)
    assert set(put_rounds(depot, 4 * SEGMENTS, 10**9)) == {8}


def test_promises_of_records_that_are_not_written_cost_no_budget(
    open_depot: OpenDepot, index_fault: Callable[[Fault], None]
) -> None:
    is_first = first_name()
    depot = open_depot(**LIMITS)
    index_fault(lambda name, slot: errno.EIO if is_first(name) and slot == 3 else 0)
    kept = depot.put(range(8), keep_until=int(time.time()) + 3600).kept
    assert kept.sum() == 7
    promised = depot.store.capacity().promised_bytes
    assert promised == 7 * depot.where(0).slot_bytes
    assert promised < depot.store.capacity().promise_limit_bytes <= ROOM * PAGE_BYTES

"""Segment ownership, with kernel locks and without."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvdock_segments import WriterLiveness, ownership
from kvdock_segments.cleanup import collect_garbage
from kvdock_segments.directory_store import DirectoryStore
from kvdock_segments.paths import open_file

OpenDepot = Callable[..., Any]
QUOTA = 2 << 20


@pytest.fixture(params=list(WriterLiveness))
def kept_by(request: pytest.FixtureRequest) -> WriterLiveness:
    return WriterLiveness(request.param)


def index_files(depot: Any) -> list[str]:
    return sorted(
        path.name for path in depot.root.glob("*/*/*") if path.suffix != ".dat"
    )


def test_two_writers_never_share_a_segment(
    open_depot: OpenDepot, kept_by: WriterLiveness
) -> None:
    depots = [open_depot(liveness=kept_by, quota=QUOTA) for _ in range(2)]
    for start in range(0, 600, 10):
        for number, depot in enumerate(depots):
            first = 10_000 * number + start
            numbers = range(first, first + 10)
            assert depot.put(numbers).ok.all()
            assert depot.get(numbers) == [0] * 10
    for depot in depots:
        assert "get_corrupt" not in depot.store.counts
        assert "get_short" not in depot.store.counts


def test_a_partly_filled_segment_of_a_closed_store_is_filled_up(
    open_depot: OpenDepot, kept_by: WriterLiveness
) -> None:
    for start in range(0, 40, 10):
        depot = open_depot(liveness=kept_by)
        depot.put(range(start, start + 10))
        depot.store.close()
    assert len(index_files(depot)) <= 2
    assert open_depot(liveness=kept_by).get(range(40)) == [0] * 40


def test_without_locks_a_silent_writer_loses_its_segment_and_goes_on(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = open_depot(liveness=WriterLiveness.TIMEOUT)
    slow.put(range(10))
    other = open_depot(liveness=WriterLiveness.TIMEOUT)
    other.put(range(10, 20))
    assert len(index_files(slow)) == 2  # it is not silent for long enough
    monkeypatch.setattr(ownership, "SILENCE_S", 0.0)
    taker = open_depot(liveness=WriterLiveness.TIMEOUT)
    taker.there([99])
    for start in range(100, 160, 10):
        taker.put(range(start, start + 10))
    assert taker.store.counts["segments_adopted"] >= 1
    assert slow.put(range(20, 30)).ok.all()
    everything = [*range(30), *range(100, 160)]
    fresh = open_depot(liveness=WriterLiveness.TIMEOUT)
    assert fresh.get(everything) == [0] * len(everything)
    assert "get_corrupt" not in fresh.store.counts


def test_without_locks_unfinished_segments_are_swept_when_they_are_old(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot(liveness=WriterLiveness.TIMEOUT)
    depot.put(range(3))
    folder = depot.where(0).path.parent
    half: Path = folder / "00000000000000aa.00000001.new"
    half.write_bytes(b"half made")
    open_depot(liveness=WriterLiveness.TIMEOUT)
    assert half.exists()
    monkeypatch.setattr(ownership, "ABANDONED_S", -1.0)
    open_depot(liveness=WriterLiveness.TIMEOUT)
    assert not half.exists()


def test_without_locks_a_clock_that_is_ahead_makes_no_segment_old(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot(liveness=WriterLiveness.TIMEOUT)
    depot.put(range(3))
    pool = depot.where(0).path.parent
    half = pool / "00000000000000aa.00000001.new"
    aside = pool.parent / f".{ownership.FILE_NAME}.{1:016x}"
    for file in (half, aside):
        file.write_bytes(b"half made")
    real, real_ns = time.time, time.time_ns
    ahead_s = 2 * int(ownership.ABANDONED_S)
    monkeypatch.setattr("time.time", lambda: real() + ahead_s)
    monkeypatch.setattr("time.time_ns", lambda: real_ns() + ahead_s * 10**9)
    DirectoryStore(depot.root).collect(depot.store.place.namespace)
    assert half.exists()
    assert aside.exists()


def test_a_segment_with_a_living_writer_is_not_collected(
    open_depot: OpenDepot, kept_by: WriterLiveness
) -> None:
    depot = open_depot(liveness=kept_by)
    depot.put(range(40))
    filled = [name for name in index_files(depot) if name.endswith(".open")]
    assert filled
    DirectoryStore(depot.root).collect(depot.store.place.namespace, to_bytes=0)
    assert index_files(depot) == filled
    assert 0 in depot.get(range(40))


def test_without_a_note_a_segment_that_may_have_a_writer_is_not_collected(
    open_depot: OpenDepot, kept_by: WriterLiveness, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot(liveness=kept_by)
    depot.put(range(3))
    (folder,) = depot.root.glob("*/kv.*")
    (folder.parent / ownership.FILE_NAME).unlink()
    half = folder / "00000000000000aa.00000001.new"
    half.write_bytes(b"half made")
    namespace = depot.store.place.namespace
    DirectoryStore(depot.root).collect(namespace, to_bytes=0)
    assert len(index_files(depot)) == 2
    monkeypatch.setattr(ownership, "ABANDONED_S", -1.0)
    DirectoryStore(depot.root).collect(namespace, to_bytes=0)
    left = (
        1 if kept_by is WriterLiveness.LOCKS else 0
    )  # its lock shows that it is alive
    assert len(index_files(depot)) == left


def test_one_writer_without_locks_makes_locks_unreliable(
    open_depot: OpenDepot,
) -> None:
    namespace = open_depot().store.place.namespace
    for kept_by in (WriterLiveness.LOCKS, WriterLiveness.TIMEOUT, WriterLiveness.LOCKS):
        depot = open_depot(liveness=kept_by)
    noted = (depot.root / namespace / ownership.FILE_NAME).read_text()
    assert noted == WriterLiveness.TIMEOUT


def test_a_segment_swept_before_it_is_claimed_is_created_again(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    swept: list[str] = []

    def make(folder: int, name: str, flags: int) -> int:
        made = open_file(folder, name, flags)
        if name.endswith(".new") and not swept:
            swept.append(name)
            collect_garbage(folder, WriterLiveness.LOCKS)
        return made

    monkeypatch.setattr("kvdock_segments.index_file.open_file", make)
    assert depot.put(range(20)).ok.all()
    assert len(swept) == 1
    assert depot.store.counts["segments_failed"] == 0


def test_a_segment_finished_during_a_sweep_keeps_its_pages(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    depot.put(range(32))
    depot.store.close()
    (index,) = depot.root.glob("*/kv.*/*.idx")
    half_made = index.rename(index.with_suffix(".new"))
    folder = os.open(index.parent, os.O_RDONLY)

    def finish(*_: object) -> bool:
        half_made.rename(index)  # its writer, between the check and the lock
        return True

    monkeypatch.setattr("kvdock_segments.cleanup._is_abandoned", finish)
    assert collect_garbage(folder, WriterLiveness.LOCKS) == 0
    os.close(folder)
    assert open_depot().get(range(32)) == [0] * 32

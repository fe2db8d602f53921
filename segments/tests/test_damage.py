"""Every kind of damage is a miss, is counted, and heals by a rewrite."""

import errno
import os
import resource
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvdock.batch import Operation, Outcome
from kvdock_segments import PosixIOEngine
from kvdock_segments.directory_store import DirectoryStore

OpenDepot = Callable[..., Any]

OK, ABSENT, CORRUPT = int(Outcome.OK), int(Outcome.ABSENT), int(Outcome.CORRUPT)


def overwrite(path: Path, offset: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(content)


def test_a_flipped_byte_is_a_miss_and_heals(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(20))
    spot = depot.where(7)
    overwrite(spot.path, spot.offset + 100, b"\xff")
    expected = [CORRUPT if number == 7 else OK for number in range(20)]
    assert depot.get(range(20)) == expected
    assert depot.store.counts["get_corrupt"] == 1
    assert depot.there([7]) == [False]
    assert depot.put([7]).ok.all()
    assert depot.get(range(20)) == [OK] * 20


def test_damage_found_by_one_process_is_forgotten_by_the_next(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(3))
    spot = depot.where(1)
    overwrite(spot.path, spot.offset, b"\0" * 64)
    assert depot.get([1]) == [CORRUPT]
    assert open_depot().there(range(3)) == [True, False, True]


def test_swapped_slots_are_two_misses(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(4))
    one, two = depot.where(1), depot.where(2)
    first = depot.pages([1]).tobytes()
    second = depot.pages([2]).tobytes()
    overwrite(one.path, one.offset, second)
    overwrite(two.path, two.offset, first)
    assert depot.get(range(4)) == [OK, CORRUPT, CORRUPT, OK]


def test_swapped_records_are_two_misses_for_the_next_process(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(4))
    one, two = depot.where(1), depot.where(2)
    raw = one.record_path.read_bytes()
    depot.store.close()
    index = two.record_path.with_name(open_index_name(two.record_path.parent))
    first = raw[one.record_offset : one.record_offset + 64]
    second = raw[two.record_offset : two.record_offset + 64]
    overwrite(index, one.record_offset, second)
    overwrite(index, two.record_offset, first)
    assert open_depot().get(range(4)) == [OK, ABSENT, ABSENT, OK]


def open_index_name(folder: Path) -> str:
    (found,) = (path.name for path in folder.iterdir() if path.suffix != ".dat")
    return found


@pytest.mark.parametrize("left", [0, 5000, 3 * 8192])
def test_a_truncated_file_loses_only_the_pages_that_were_cut_off(
    open_depot: OpenDepot, left: int
) -> None:
    depot = open_depot()
    depot.put(range(6))
    spot = depot.where(0)
    os.truncate(spot.path, left)
    whole = left // 8192
    outcomes = depot.get(range(6))
    assert outcomes[:whole] == [OK] * whole
    assert OK not in outcomes[whole:]
    assert depot.put(range(6)).ok.all()
    assert depot.get(range(6)) == [OK] * 6


def test_an_extended_file_of_pages_changes_nothing(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(6))
    with depot.where(0).path.open("ab") as file:
        file.write(b"more" * 5000)
    assert depot.get(range(6)) == [OK] * 6
    assert open_depot().get(range(6)) == [OK] * 6


def test_a_deleted_file_of_pages_is_a_miss_and_heals(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(6))
    path = depot.where(0).path
    depot.store.close()
    path.unlink()
    again = open_depot()
    assert again.there(range(6)) == [False] * 6
    assert again.get(range(6)) == [ABSENT] * 6
    assert again.put(range(6)).ok.all()
    assert again.get(range(6)) == [OK] * 6


def test_a_file_of_pages_deleted_under_an_open_store_never_serves_wrong_bytes(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(6))
    depot.where(0).path.unlink()
    depot.get(range(6))
    assert depot.put(range(6, 12)).ok.all()
    assert depot.get(range(6, 12)) == [OK] * 6


@pytest.mark.parametrize("error", [errno.EMFILE, errno.EINVAL, errno.EROFS])
def test_pages_whose_file_cannot_be_opened_are_not_dropped(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    open_depot().put(range(8))
    shut = open_depot()

    def refuse(*_: object, **__: object) -> int:
        raise OSError(error, os.strerror(error))

    with monkeypatch.context() as patched:
        patched.setattr(PosixIOEngine, "open_file", refuse)
        assert shut.get(range(8)) == [Outcome.ERROR] * 8
    assert shut.get(range(8)) == [Outcome.OK] * 8
    assert open_depot().get(range(8)) == [Outcome.OK] * 8


def test_a_damaged_page_that_is_asked_for_twice_is_counted_once(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(96))
    found = depot.where(3)
    overwrite(found.path, found.offset, b"xx")
    assert depot.get([3] * 20) == [CORRUPT] * 20
    assert depot.store.counts["pages_retired"] == 1
    # A segment with room in the index and none on disk would be tried forever.
    assert depot.put(range(200, 264), deadline_s=time.monotonic() + 20).ok.all()
    assert depot.store.usage().pages == 96 - 1 + 64


def test_a_stale_index_is_a_miss_and_heals(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=1 << 20)
    depot.put(range(20))
    folder = depot.where(0).record_path.parent
    stale = {
        path.name.partition(".")[0]: path.read_bytes()
        for path in folder.iterdir()
        if path.suffix != ".dat"
    }
    for start in range(100, 600, 20):
        depot.request(range(start, start + 20))  # everything is recycled
    depot.store.close()
    for path in folder.iterdir():
        old = stale.get(path.name.partition(".")[0])
        if old and path.suffix != ".dat":
            path.write_bytes(old)
    again = open_depot(quota=1 << 20)
    outcomes = again.get(range(20))
    assert OK not in outcomes
    assert again.put(range(20)).ok.all()
    assert again.get(range(20)) == [OK] * 20


@pytest.mark.parametrize(
    ("offset", "content"),
    [
        pytest.param(0, b"SOMEBODY", id="foreign"),
        pytest.param(8, b"\x63\0\0\0", id="another-version"),
        pytest.param(24, b"\xff" * 8, id="torn"),
    ],
)
def test_a_foreign_index_is_left_alone(
    open_depot: OpenDepot, offset: int, content: bytes
) -> None:
    depot = open_depot()
    depot.put(range(6))
    depot.store.close()
    folder = next(depot.root.glob("*/kv.*"))
    index = folder / open_index_name(folder)
    overwrite(index, offset, content)
    before = index.read_bytes()
    again = open_depot()
    assert again.get(range(6)) == [ABSENT] * 6
    assert again.put(range(6)).ok.all()
    assert again.get(range(6)) == [OK] * 6
    assert index.read_bytes() == before


@pytest.mark.parametrize(
    ("offset", "content", "stays"),
    [
        pytest.param(0, b"SOMEBODY", False, id="foreign"),
        pytest.param(8, b"\0\0\0\0", False, id="earlier-version"),
        pytest.param(8, b"\x63\0\0\0", True, id="later-version"),
        pytest.param(24, b"\xff" * 8, False, id="torn"),
    ],
)
def test_a_foreign_index_is_deleted_before_a_put_is_refused(
    open_depot: OpenDepot, offset: int, content: bytes, *, stays: bool
) -> None:
    quota = 1 << 20
    depot = open_depot(quota=quota)
    depot.put(range(200))
    depot.store.close()
    folder = next(depot.root.glob("*/kv.*"))
    foreign = [path for path in folder.iterdir() if path.suffix != ".dat"]
    for path in foreign:
        overwrite(path, offset, content)
    again = open_depot(quota=quota)
    results = [again.put(range(first, first + 10)) for first in range(1000, 1400, 10)]
    assert any(result.ok.all() for result in results) is not stays
    assert any(path.exists() for path in foreign) is stays
    assert sum(path.stat().st_size for path in folder.iterdir()) <= quota


def test_lost_segments_count_for_the_quota_and_their_space_comes_back(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(100))
    depot.store.close()
    folder = next(depot.root.glob("*/kv.*"))
    torn, bare, later = sorted(p for p in folder.iterdir() if p.suffix != ".dat")[:3]
    overwrite(torn, 0, b"SOMEBODY")
    folder.joinpath(bare.name.partition(".")[0] + ".dat").unlink()
    overwrite(later, 8, b"\x63")
    before = sum(path.stat().st_size for path in folder.iterdir())
    living = open_depot()
    assert living.store.capacity().used_bytes == before
    namespace = depot.store.place.namespace
    freed = DirectoryStore(depot.root).collect(namespace)
    assert freed == before - sum(path.stat().st_size for path in folder.iterdir())
    assert [torn.exists(), bare.exists(), later.exists()] == [False, False, True]
    left = living.get(range(100)).count(OK)
    assert 0 < left < 100
    assert DirectoryStore(depot.root).collect(namespace, newer=True) > 0
    assert not later.exists()
    assert living.get(range(100)).count(OK) == left
    assert living.put(range(100)).ok.all()


@pytest.mark.parametrize("left", [0, 63, 64, 66, 127, 128, 200, 1000])
def test_a_truncated_index_is_a_miss_for_what_it_lost(
    open_depot: OpenDepot, left: int
) -> None:
    depot = open_depot()
    depot.put(range(20))
    depot.store.close()
    folder = next(depot.root.glob("*/kv.*"))
    os.truncate(folder / open_index_name(folder), left)
    again = open_depot()
    found = again.get(range(20))
    whole = max(0, left - 128) // 64
    assert found == [OK] * whole + [ABSENT] * (20 - whole)
    assert again.put(range(20)).ok.all()
    assert again.get(range(20)) == [OK] * 20


def test_an_object_of_another_length_is_a_miss_and_heals(
    open_depot: OpenDepot,
) -> None:
    small, large = open_depot(page_bytes=4096), open_depot(page_bytes=8192)
    small.put([1])
    both = open_depot(page_bytes=4096)
    memory = np.zeros((1, 8192), np.uint8)
    assert large.there([1]) == [False]
    longer = both.batch(Operation.GET, [1], memory)
    assert int(both.store.run(longer).outcomes[0]) == Outcome.SHORT
    assert both.put([1]).ok.all()
    assert both.get([1]) == [OK]


@pytest.mark.parametrize(
    ("whose", "count"), [("ours", 1), ("foreign", 1), ("foreign", 1500)]
)
def test_index_files_of_any_size_cost_no_memory(
    open_depot: OpenDepot, whose: str, count: int
) -> None:
    depot = open_depot()
    depot.put(range(64))
    depot.store.close()
    file = depot.where(7).record_path
    for number in range(count):
        if whose == "foreign":
            file = file.with_name(f"{number:016x}.00000001.idx")
            file.write_bytes(b"x")
            file.with_name(f"{number:016x}.dat").write_bytes(b"x")
        os.truncate(file, 1 << 42)
    # The limit of the address space leaves no room for those files.
    before = resource.getrlimit(resource.RLIMIT_AS)
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (4 << 30), before[1]))
    try:
        fresh = open_depot()
        assert fresh.get(range(64)) == [OK] * 64
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def test_a_disk_that_has_become_read_only_is_still_read(
    open_depot: OpenDepot, read_only: Callable[[], None]
) -> None:
    depot = open_depot()
    depot.put(range(20))
    spot = depot.where(7)
    overwrite(spot.path, spot.offset + 100, b"\xff")
    depot.store.close()
    read_only()
    fresh = open_depot()
    assert fresh.get(range(20)) == [CORRUPT if n == 7 else OK for n in range(20)]
    assert set(fresh.put(range(20, 30)).outcomes.tolist()) == {int(Outcome.REFUSED)}


def test_pages_whose_file_was_just_deleted_are_refused_and_not_timed_out(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    depot.put(range(4))
    depot.store._catalog.files.close_idle()
    depot.where(0).path.unlink()
    # The deleted file has not been noticed yet.
    monkeypatch.setattr(depot.store._catalog, "refresh", lambda **_: False)
    refused = {int(Outcome.REFUSED)}
    assert set(depot.put(range(4, 8)).outcomes.tolist()) == refused


def test_a_segment_that_was_dropped_can_still_be_released(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(4))
    (folder,) = depot.store._catalog.folders.values()
    (segment,) = folder.segments.values()
    folder.drop(segment)  # as a thread does that saw it cleared
    segment.release(full=True)


def test_a_segment_renamed_during_a_clear_is_deleted_with_both_files(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    depot.put(range(32))  # a full segment
    (folder,) = depot.root.glob("*/kv.*")
    look = os.stat

    def recycled_first(path: Any, **words: Any) -> os.stat_result:
        if str(path).endswith(".00000001.idx"):
            with suppress(FileNotFoundError):
                (folder / path).rename(folder / str(path).replace("1.idx", "2.open"))
        return look(path, **words)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", recycled_first)
        depot.clear()
    assert not list(folder.iterdir())


def test_a_disk_that_is_writable_again_is_written(
    open_depot: OpenDepot,
    read_only: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    depot = open_depot()
    depot.put(range(20))
    depot.store.close()
    read_only()
    fresh = open_depot()
    assert fresh.get(range(20)) == [OK] * 20
    monkeypatch.undo()
    assert set(fresh.put(range(20, 30)).outcomes.tolist()) == {OK}
    assert fresh.get(range(30)) == [OK] * 30


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffixes", "size"),
    [
        pytest.param([".txt"], 0, id="foreign"),
        pytest.param([".dat"], 0, id="without-an-index"),
        pytest.param([".00000001.new"], 0, id="half-made"),
        pytest.param([".00000001.idx", ".dat"], 300, id="torn"),
    ],
)
def test_many_files_that_are_no_use_do_not_slow_down_opening(
    open_depot: OpenDepot, suffixes: list[str], size: int
) -> None:
    depot = open_depot()
    depot.put(range(40))
    depot.store.close()
    folder = depot.where(0).path.parent
    for number in range(20_000 // len(suffixes)):
        for suffix in suffixes:
            (folder / f"{number:016x}{suffix}").write_bytes(bytes(size))
    # The time that other processes take on this machine is none of ours.
    begun_s = time.process_time()
    again = open_depot()
    assert time.process_time() - begun_s < 1
    assert again.get(range(40)) == [OK] * 40
    assert again.put(range(40, 80)).ok.all()


@pytest.mark.parametrize(
    "stamp_ns",
    [
        pytest.param(4_102_444_800 * 10**9, id="2100"),
        pytest.param(2**63 - 1, id="most"),
        pytest.param(-(2**63), id="least"),
    ],
)
def test_times_of_use_that_cannot_be_keep_no_page_for_ever(
    open_depot: OpenDepot, stamp_ns: int
) -> None:
    quota = 1 << 20
    depot = open_depot(quota=quota)
    depot.put(range(100))
    depot.store.close()
    for path in depot.root.glob("*/*/*.*.*"):  # as a clock that was wrong left them
        slots = (path.stat().st_size - 128) // 72
        overwrite(
            path, 128 + 64 * slots, stamp_ns.to_bytes(8, "little", signed=True) * slots
        )
    again = open_depot(quota=quota)
    recent = range(0)
    for first in range(1000, 1600, 50):
        recent = range(first, first + 50)
        assert again.request(recent).ok.all()
    assert again.there(recent).count(True) == 50
    assert again.there(range(100)).count(True) == 0
    assert again.there(range(1500, 1600)).count(True) > 80


@pytest.mark.parametrize("same_process", [True, False])
def test_a_clock_that_is_set_back_keeps_no_page_for_ever(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch, *, same_process: bool
) -> None:
    quota = 1 << 20
    now_ns = time.time_ns
    with monkeypatch.context() as ahead:
        ahead.setattr(time, "time_ns", lambda: now_ns() + 10**18)
        depot = open_depot(quota=quota)
        depot.put(range(100))
        assert depot.get(range(100)).count(OK) > 80
        depot.store._catalog.flush_uses()
    if same_process:
        again = depot
        again.store._catalog.flush_uses()  # as it does every ten seconds
    else:
        depot.store.close()
        again = open_depot(quota=quota)
    for first in range(1000, 1600, 50):
        assert again.request(range(first, first + 50)).ok.all()
    assert again.there(range(100)).count(True) == 0
    assert again.there(range(1500, 1600)).count(True) > 80


def test_a_pool_whose_files_are_from_the_future_makes_way(
    open_depot: OpenDepot,
) -> None:
    quota = 1 << 20
    old = open_depot(quota=quota)
    old.put(range(100))
    old.store.close()
    for path in old.root.glob("*/*/*"):
        os.utime(path, (4_102_444_800, 4_102_444_800))
    young = open_depot(pool="draft", quota=quota)
    for first in range(0, 400, 20):
        assert young.request(range(first, first + 20)).ok.all()
    # It does not recycle its own pages alone.
    assert young.there(range(320, 400)).count(True) > 50


@pytest.mark.parametrize("what", ["folder", "link", "pipe"])
def test_what_took_the_place_of_a_file_of_pages_costs_its_pages_once(
    open_depot: OpenDepot, what: str
) -> None:
    small = {"segment_bytes": 64 << 10, "quota": 2 << 20}
    open_depot(**small).put(range(8))
    depot = open_depot(**small)
    (path,) = depot.root.glob("*/*/*.dat")
    path.rename(path.with_name("elsewhere"))
    match what:
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(path.with_name("elsewhere"))
        case "pipe":
            os.mkfifo(path)
    assert not any(outcome == OK for outcome in depot.get(range(8)))
    for _ in range(3):
        assert depot.put(range(8)).ok.all()
        assert depot.get(range(8)) == [OK] * 8
    assert not depot.store.counts["claims_failed"]

"""Several processes on one store: crashes, races, forks."""

import errno
import importlib.util
import os
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from waiting import until

from kvdock.batch import Batch, Operation, Outcome
from kvdock_segments import WriterLiveness
from kvdock_segments.directory import SegmentDirectory
from kvdock_segments.segment import Segment

WORKER = Path(__file__).with_name("crash_worker.py")
OpenDepot = Callable[..., Any]
TORTURE = os.environ.get("TESTS_OF_KVDOCK_TORTURE") == "1"
"""`make torture` asks for the long forms."""


def load_worker() -> Any:
    spec = importlib.util.spec_from_file_location("crash_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


worker = load_worker()


def all_there(depot: Any, numbers: range) -> bool:
    return all(depot.there(numbers))


class Process:
    """A worker that is past its first rounds."""

    def __init__(self, root: Path, role: str, seed: int) -> None:
        command = [sys.executable, str(WORKER), str(root), role, str(seed)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def wait_going(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "going\n"

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def files_bytes(root: Path) -> int:
    """Add up sizes of files, some of which may be renamed in the background."""
    known = -1
    while True:
        with suppress(FileNotFoundError):
            every = [path.stat() for path in root.rglob("*.*/*")]
            found = sum({one.st_ino: one.st_size for one in every}.values())
            if found == known:
                return found
            known = found


def crash(root: Path, kills: int) -> None:
    """Kill two writers repeatedly while readers and eviction run."""
    rng = np.random.default_rng(5)
    writers = [Process(root, "write", seed) for seed in (1, 2)]
    reader = Process(root, "read", 3)
    for process in (*writers, reader):
        process.wait_going()
    for number in range(kills):
        victim = number % 2
        # How long it has been going is left to chance.
        writers[victim].process.poll()
        threading.Event().wait(float(rng.random()) * 0.02)
        writers[victim].kill()
        writers[victim] = Process(root, "write", 10 + number)
        writers[victim].wait_going()
        assert reader.process.poll() is None, "a reader has ended"
    for process in (*writers, reader):
        process.kill()


def check_after_crash(root: Path) -> None:
    assert not Path(f"{root}.wrong").exists()
    with worker.open_store(root) as store:
        found, wrong = worker.check(store, np.arange(worker.KEYS))
        assert not wrong
        assert found > worker.QUOTA // worker.PAGE_BYTES // 2
        usage = store.usage()
        assert usage.namespace_bytes == files_bytes(root) <= worker.QUOTA
        # Every slot that a dead writer left can be filled again.
        fresh = np.arange(10**6, 10**6 + worker.QUOTA // worker.PAGE_BYTES)
        for start in range(0, len(fresh), 50):
            numbers = fresh[start : start + 50]
            memory = worker.pages_of(numbers)  # held: a batch only has addresses
            batch = worker.batch("put", numbers, memory)
            # Asked for first, as engines do: a prefix of its own, and not more of
            # the one before, whose pages would not make room for it.
            store.run(Batch(Operation.EXISTS, batch.keys))
            assert store.run(batch).ok.all()
        found, wrong = worker.check(store, fresh)
        assert not wrong
        capacity = usage.namespace_bytes // (worker.PAGE_BYTES + 72)
        assert found > 0.9 * capacity
        assert files_bytes(root) <= worker.QUOTA
    leftovers = [path.name for path in root.rglob("*.new")]
    assert not leftovers


def test_what_another_handle_deleted_is_stored_again(open_depot: OpenDepot) -> None:
    """Otherwise puts of this handle would skip the page as long as it runs."""
    one, two = open_depot(), open_depot()
    one.put(range(40))
    until(lambda: all_there(two, range(40)))
    two.delete(range(3, 20, 2))
    # This handle still finds the page; a batch may name a key twice.
    assert one.put([*range(40), 5, 5]).ok.all()
    assert all_there(open_depot(), range(40))
    until(lambda: all_there(two, range(40)))
    assert not any(one.get(range(40)))


def test_pages_of_a_segment_that_became_full_can_be_deleted(
    open_depot: OpenDepot,
) -> None:
    writer, other = open_depot(), open_depot()
    writer.put(range(8))
    assert all(other.there(range(8)))
    # The other handle has just refreshed, so it does not refresh by itself.
    other.store._catalog._next_sync_s = float("inf")
    writer.put(range(8, 64))
    other.delete([0])
    assert open_depot().there([0, 1]) == [False, True]


def test_two_threads_that_see_a_deleted_segment_forget_it_once(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    depot.put(range(8))
    open_depot().clear()
    (folder,) = depot.store._catalog.folders.values()
    meet, drop_if_gone = (
        threading.Barrier(2, timeout=60),
        SegmentDirectory._drop_if_gone,
    )

    def gone(self: SegmentDirectory, segment: Segment) -> bool:
        meet.wait()
        return drop_if_gone(self, segment)

    monkeypatch.setattr(SegmentDirectory, "_drop_if_gone", gone)
    with ThreadPoolExecutor(2) as pool:
        scans = [pool.submit(folder.scan) for _ in range(2)]
        assert [scan.result(60) for scan in scans]
    # Rows freed twice would be allocated to two segments.
    assert depot.store._catalog.index._gaps.ranges == [(0, 32)]


def test_a_scan_that_began_before_a_segment_was_created_leaves_it_to_its_writer(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its rows, its writer would reject every put from then on."""
    depot = open_depot()
    (folder,) = depot.store._catalog.folders.values()
    listed, add = folder._listing(), SegmentDirectory.add

    def added(self: SegmentDirectory, *of_segment: Any) -> Segment:
        segment = add(self, *of_segment)
        with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
            patch.setattr(SegmentDirectory, "_listing", lambda _: listed)
            pool.submit(self.scan).result(60)
        return segment

    monkeypatch.setattr(SegmentDirectory, "add", added)
    assert depot.put(range(8)).ok.all()
    assert depot.put(range(8, 16)).ok.all()
    assert not any(depot.get(range(16)))


def test_a_segment_that_a_scan_has_dropped_is_not_claimed(
    open_depot: OpenDepot,
) -> None:
    first = open_depot()
    first.put(range(8))
    first.store.close()
    depot = open_depot()
    (folder,) = depot.store._catalog.folders.values()
    (segment,) = folder.segments.values()
    # As after a listing that missed it while another process renamed it.
    folder.drop(segment)
    assert not depot.store._allocator.claim(folder, segment)
    assert depot.put(range(8, 16)).ok.all()
    assert not any(depot.get(range(16)))


@pytest.mark.parametrize("full", [False, True])
def test_what_was_cleared_under_a_handle_is_stored_again(
    open_depot: OpenDepot, *, full: bool
) -> None:
    one, two = open_depot(), open_depot()
    numbers = range(32 if full else 20)  # of 32 in a segment
    one.put(numbers)
    until(lambda: all_there(two, numbers))
    two.clear()
    assert one.put(numbers).ok.all()
    assert all_there(open_depot(), numbers)
    assert not any(one.get(numbers))


@pytest.mark.usefixtures("never_read_again")
@pytest.mark.parametrize("same_time", [False, True])
@pytest.mark.parametrize("liveness", list(WriterLiveness))
def test_nothing_is_stored_in_a_segment_that_another_handle_has_cleared(
    open_depot: OpenDepot,
    liveness: WriterLiveness,
    *,
    same_time: bool,
) -> None:
    first = open_depot(liveness=liveness)
    first.put(range(2))
    first.store.close()
    writer, other = (open_depot(liveness=liveness) for _ in range(2))
    writer.put(range(2, 4))  # into the same segment, which it claims
    (folder,) = writer.root.glob("*/kv.*")
    before = folder.stat()
    other.clear()
    if same_time:  # as the change of its own, where clocks of files are coarse
        os.utime(folder, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert writer.put(range(4, 8)).ok.all()
    assert writer.get(range(4, 8)) == [0] * 4
    assert open_depot(liveness=liveness).get(range(4, 8)) == [0] * 4


@pytest.mark.usefixtures("never_read_again")
def test_what_another_handle_stored_just_now_is_deleted(open_depot: OpenDepot) -> None:
    writer, other = open_depot(), open_depot()
    assert not any(other.there(range(4)))
    writer.put(range(4))
    other.delete(range(2))
    assert not any(open_depot().there(range(2)))
    assert all_there(open_depot(), range(2, 4))


@pytest.mark.usefixtures("never_read_again")
def test_pages_that_are_there_twice_are_deleted(open_depot: OpenDepot) -> None:
    depots = open_depot(), open_depot()
    for depot in depots:
        assert not any(depot.there(range(4)))
    for depot in depots:
        depot.put(range(4))
    assert len(list(depots[0].root.glob("*/kv.*/*.dat"))) == 2
    depots[0].delete(range(4))
    assert not any(open_depot().there(range(4)))


@pytest.mark.parametrize("depth", ["root", "*", "*/kv.*"])
def test_a_store_deleted_under_a_handle_is_created_again(
    open_depot: OpenDepot, caplog: pytest.LogCaptureFixture, depth: str
) -> None:
    depot = open_depot()
    assert depot.put(range(20)).ok.all()
    for path in [depot.root] if depth == "root" else list(depot.root.glob(depth)):
        shutil.rmtree(path)
    for first in (0, 20, 40):
        assert depot.put(range(first, first + 20)).ok.all()
    assert depot.store.counts["reopened"] == 1
    assert str(depot.root) in caplog.text
    assert depot.get(range(60)) == [0] * 60
    fresh = open_depot()
    assert fresh.get(range(60)) == [0] * 60
    assert depot.store.usage().pages == 60


def test_a_reader_finds_what_is_stored_after_everything_was_deleted(
    open_depot: OpenDepot,
) -> None:
    reader = open_depot()
    shutil.rmtree(reader.root)
    assert open_depot().put(range(20)).ok.all()
    until(partial(all_there, reader, range(20)))
    assert reader.get(range(20)) == [0] * 20


def test_a_store_deleted_by_another_host_is_created_again(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    assert depot.put(range(20)).ok.all()
    look = os.fstat

    def as_over_nfs(fd: int) -> os.stat_result:
        found = look(fd)
        if stat.S_ISDIR(found.st_mode) and not found.st_nlink:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return found

    monkeypatch.setattr(os, "fstat", as_over_nfs)
    shutil.rmtree(depot.root)
    assert depot.put(range(20)).ok.all()
    assert open_depot().get(range(20)) == [0] * 20


def test_a_store_that_cannot_be_created_again_refuses_until_it_can(
    open_depot: OpenDepot, caplog: pytest.LogCaptureFixture
) -> None:
    depot = open_depot()
    assert depot.put(range(20)).ok.all()
    shutil.rmtree(depot.root)
    depot.root.write_bytes(b"in its place")
    for _ in range(9):
        assert set(depot.put(range(5)).outcomes.tolist()) == {int(Outcome.REFUSED)}
    failed = [line for line in caplog.messages if "cannot be created" in line]
    assert len(failed) == 4
    depot.root.unlink()
    assert depot.put(range(20)).ok.all()
    assert depot.get(range(20)) == [0] * 20


def test_pages_of_a_segment_that_became_full_are_not_stored_twice(
    open_depot: OpenDepot,
) -> None:
    one, two = open_depot(), open_depot()
    one.put(range(20))
    until(lambda: all_there(two, range(20)))
    one.put(range(20, 64))  # its segment is full, and has another name
    before = two.store.usage().pages
    assert two.put(range(20)).ok.all()
    assert two.store.counts["put_ok"] == 20
    assert before <= two.store.usage().pages == 64
    assert two.store.counts["segments_created"] == 0


@pytest.mark.slow
def test_killed_writers_cause_no_wrong_page_and_leak_no_space(tmp_path: Path) -> None:
    kills = 200 if TORTURE else 8
    crash(tmp_path / "store", kills)
    check_after_crash(tmp_path / "store")


def test_two_processes_start_on_an_empty_root(tmp_path: Path) -> None:
    processes = [Process(tmp_path / "a" / "store", "write", seed) for seed in (1, 2)]
    for process in processes:
        process.wait_going()
    for process in processes:
        process.kill()
    assert not Path(f"{tmp_path / 'a' / 'store'}.wrong").exists()


@pytest.mark.slow
def test_a_reader_survives_a_clear_of_its_store(open_depot: OpenDepot) -> None:
    writer, reader = open_depot(), open_depot()
    done = threading.Event()
    problems: list[BaseException] = []

    def read() -> None:
        rng = np.random.default_rng(1)
        try:
            while not done.is_set():
                reader.get(rng.choice(200, 20, replace=False).tolist())
        except BaseException as error:  # noqa: BLE001 - the test shows it
            problems.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    for _ in range(30):
        writer.put(range(200))
        writer.clear()
    done.set()
    thread.join()
    assert not problems
    until(lambda: not any(reader.there(range(200))))
    assert reader.get(range(200)) == [1] * 200
    assert not list(writer.root.rglob("*.dat"))


def test_what_one_process_stores_the_other_soon_finds(
    open_depot: OpenDepot,
) -> None:
    writer, reader = open_depot(), open_depot()
    for start in range(0, 400, 10):
        numbers = range(start, start + 10)
        assert reader.there(numbers) == [False] * 10
        writer.put(numbers)
        until(partial(all_there, reader, numbers))
        assert reader.get(numbers) == [0] * 10


def test_threads_of_one_process_share_a_store(open_depot: OpenDepot) -> None:
    depot = open_depot(quota=4 << 20)
    problems: list[BaseException] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(40):
                numbers = rng.choice(600, 30, replace=False).tolist()
                depot.put(numbers)
                depot.get(rng.choice(600, 30, replace=False).tolist())
        except BaseException as error:  # noqa: BLE001 - the test shows it
            problems.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems
    assert files_bytes(depot.root) <= 4 << 20


def test_the_same_keys_from_many_threads_are_stored_once_each(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    threads = [threading.Thread(target=depot.put, args=(range(100),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert depot.get(range(100)) == [0] * 100
    assert open_depot().get(range(100)) == [0] * 100


@pytest.mark.slow
def test_a_long_run_leaks_nothing(open_depot: OpenDepot) -> None:
    operations = 1_000_000 if TORTURE else 60_000
    depot = open_depot(quota=8 << 20)
    rng = np.random.default_rng(2)
    marks: list[tuple[int, int]] = []
    done = 0
    while done < operations:
        numbers = rng.choice(3000, 64, replace=False).tolist()
        depot.put(numbers)
        depot.get(numbers[:32])
        done += 96
        if done > operations // 3:
            resident = int(Path("/proc/self/statm").read_text().split()[1])
            marks.append((len(list(Path("/proc/self/fd").iterdir())), resident))
    files, pages = zip(*marks, strict=True)
    assert max(files) - min(files) <= 8
    third = len(pages) // 3
    grown = max(pages[-third:]) - max(pages[:third])
    assert grown * 4096 < 8 << 20

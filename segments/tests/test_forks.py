import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest

from kvdock.testing.open_files import open_files

OpenDepot = Callable[..., Any]


def test_a_forked_child_reads_and_writes_independently(open_depot: OpenDepot) -> None:
    depot = open_depot()
    depot.put(range(20))
    read_end, write_end = os.pipe()
    child = os.fork()
    if not child:
        good = depot.get(range(20)) == [0] * 20
        good = good and bool(depot.put(range(100, 120)).ok.all())
        os.write(write_end, b"1" if good else b"0")
        os._exit(0)
    os.close(write_end)
    answer = os.read(read_end, 1)
    os.close(read_end)
    os.waitpid(child, 0)
    assert answer == b"1"
    depot.put(range(20, 40))
    assert depot.get([*range(40), *range(100, 120)]) == [0] * 60


def targets() -> Counter[str]:
    """Return what is open, whatever the number of its descriptor."""
    return Counter(line.partition(" -> ")[2] for line in open_files())


def in_a_child(job: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Return whether a forked child exits in time with success."""
    child = os.fork()
    if not child:
        good = False
        with suppress(BaseException):
            good = job()
        os._exit(0 if good else 1)
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status == 0
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_a_child_does_not_wait_for_a_thread_of_its_parent(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(20))
    files = depot.store._catalog.files
    with files._lock:  # as of a thread that opens a file when another one forks
        assert in_a_child(lambda: depot.get(range(20)) == [0] * 20, seconds=5)


def test_threads_of_a_child_reopen_the_store_once(
    open_depot: OpenDepot, monkeypatch: pytest.MonkeyPatch
) -> None:
    depot = open_depot()
    depot.put(range(20))

    def job() -> bool:
        begin = depot.store._begin
        begun = []

        def slowly() -> None:
            begun.append(1)
            time.sleep(0.05)
            begin()

        monkeypatch.setattr(depot.store, "_begin", slowly)
        with ThreadPoolExecutor(4) as pool:
            loads = [pool.submit(depot.get, range(20)) for _ in range(4)]
            good = [load.result() == [0] * 20 for load in loads]
        return all(good) and len(begun) == 1

    assert in_a_child(job)


def test_a_child_leaves_no_descriptor_of_its_parent_open(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(20))
    before = targets()

    def job() -> bool:
        depot.get(range(20))
        now = targets()
        claim = [path for path in before - now if path.endswith(".open")]
        return not now - before and len(claim) == 1

    assert in_a_child(job)


def test_a_segment_released_by_a_parent_is_free_while_its_child_lives(
    open_depot: OpenDepot,
) -> None:
    depot = open_depot()
    depot.put(range(8))
    wait, go = os.pipe()
    child = os.fork()
    if not child:
        os.close(go)
        os.read(wait, 1)
        os._exit(0)
    try:
        depot.store.close()
        other = open_depot()
        other.put(range(8, 12))
        assert other.store.counts["segments_adopted"] == 1
    finally:
        os.close(go)
        os.close(wait)
        os.waitpid(child, 0)

"""Rows run at once, in turn, and never past the answer."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from kvdock_s3.threads import Job, RequestThreads


@pytest.fixture
def threads() -> RequestThreads:
    return RequestThreads(2, "s3-test")


def soon() -> float:
    return time.monotonic() + 20.0


def test_every_row_is_done_once(threads: RequestThreads) -> None:
    done: list[int] = []
    job = Job(lambda _, row: done.append(row), 100)
    threads.start(job)
    job.wait(soon(), for_active=False)
    assert sorted(done) == list(range(100))
    threads.close()


def test_a_batch_without_rows_ends_at_once(threads: RequestThreads) -> None:
    job = Job(lambda *_: None, 0)
    threads.start(job)
    job.wait(soon(), for_active=True)
    threads.close()


def test_a_short_batch_is_not_behind_all_rows_of_a_long_one(
    threads: RequestThreads,
) -> None:
    gate = threading.Semaphore(0)

    def wait(_: Job, __: int) -> None:
        gate.acquire(timeout=20.0)

    long = Job(wait, 50)
    short = Job(lambda *_: None, 2)
    threads.start(long)
    threads.start(short)
    gate.release(4)
    short.wait(soon(), for_active=False)
    assert short.step() is False
    gate.release(100)
    long.wait(soon(), for_active=False)
    threads.close()


def test_a_row_that_ends_late_may_not_copy(threads: RequestThreads) -> None:
    begun, go, said = threading.Event(), threading.Event(), list[bool]()

    def late(job: Job, _: int) -> None:
        begun.set()
        go.wait(20.0)
        with job.committing() as allowed:
            said.append(allowed)

    job = Job(late, 1)
    threads.start(job)
    assert begun.wait(20.0)
    job.wait(time.monotonic(), for_active=False)
    go.set()
    threads.close()
    job.wait(soon(), for_active=True)
    assert said == [False]


def test_the_answer_waits_for_a_copy_that_has_begun(threads: RequestThreads) -> None:
    copying, go, order = threading.Event(), threading.Event(), list[str]()

    def slow(job: Job, _: int) -> None:
        with job.committing() as allowed:
            assert allowed
            copying.set()
            go.wait(20.0)
            order.append("copied")

    def answer() -> None:
        job.wait(time.monotonic(), for_active=False)
        order.append("answered")

    job = Job(slow, 1)
    threads.start(job)
    assert copying.wait(20.0)
    waiting = threading.Thread(target=answer)
    waiting.start()
    assert waiting.is_alive()
    go.set()
    waiting.join(20.0)
    assert order == ["copied", "answered"]
    threads.close()


def test_no_row_begins_after_the_answer(threads: RequestThreads) -> None:
    job = Job(lambda *_: None, 3)
    job.wait(time.monotonic(), for_active=True)
    assert job.step() is False
    threads.close()


def test_what_a_row_raises_reaches_the_caller_and_ends_no_thread(
    threads: RequestThreads,
) -> None:
    def fail(_: Job, row: int) -> None:
        if row == 3:
            raise KeyError(row)

    job = Job(fail, 10)
    threads.start(job)
    with pytest.raises(KeyError):
        job.wait(soon(), for_active=True)
    names = [one.name for one in threading.enumerate()]
    assert {"s3-test-0", "s3-test-1"} <= set(names)
    threads.close()


def test_closing_does_not_wait_for_a_request_that_hangs(
    threads: RequestThreads,
) -> None:
    begun, go = threading.Event(), threading.Event()

    def hang(_: Job, __: int) -> None:
        begun.set()
        go.wait(20.0)

    job = Job(hang, 2)
    threads.start(job)
    assert begun.wait(20.0)
    mine = [one for one in threading.enumerate() if one.name.startswith("s3-test-")]
    threads.close()
    assert any(one.is_alive() for one in mine)
    go.set()
    for one in mine:
        one.join(20.0)
        assert not one.is_alive()


def test_closing_ends_the_threads(threads: RequestThreads) -> None:
    job = Job(lambda *_: None, 4)
    threads.start(job)
    job.wait(soon(), for_active=True)
    mine = [one for one in threading.enumerate() if one.name.startswith("s3-test-")]
    threads.close()
    for one in mine:
        one.join(20.0)
        assert not one.is_alive()


def test_a_row_that_ends_beside_the_end_starts_no_thread(
    threads: RequestThreads, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = threads._threads.submit
    asked, closing = threading.Event(), threading.Thread(target=threads.close)

    def submit(call: Callable[[], None], times: int = 1) -> None:
        if threading.current_thread().name.startswith("s3-test-"):
            closing.start()
            asked.set()
            # Were the end not held off, it would come before the call is queued.
            closing.join(0.2)
        queue(call, times)

    monkeypatch.setattr(threads._threads, "submit", submit)
    job = Job(lambda *_: None, 2)
    # One thread: the other would take the second row.
    monkeypatch.setattr(threads, "_number", 1)
    threads.start(job)
    assert asked.wait(20.0)
    closing.join(20.0)
    for one in threading.enumerate():
        if one.name.startswith("s3-test-"):
            one.join(20.0)
            assert not one.is_alive()

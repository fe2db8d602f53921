from __future__ import annotations

import contextvars
import os
import random
import signal
import threading
import time
from functools import partial

import pytest
from shelf import until
from stalls import timed

from kvdock.resilience.executor import (
    CallRejected,
    ConcurrencyQuota,
    DeadlineExecutor,
    Job,
    WorkerExit,
)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def rejected(ran: Job) -> bool:
    return isinstance(ran.error, CallRejected) and not ran.abandoned


def ended(executor: DeadlineExecutor) -> bool:
    return executor.shutdown(soon(), lambda: None)


def test_a_call_returns_what_the_work_returns_or_raises() -> None:
    executor = DeadlineExecutor("t", 2, 2)
    assert executor.run(lambda: 7, soon()).result == 7
    assert isinstance(executor.run(lambda: 1 // 0, soon()).error, ZeroDivisionError)
    assert ended(executor)


def test_what_would_end_a_thread_is_an_error_like_any_other() -> None:
    executor = DeadlineExecutor("t", 1, 1)

    def leave() -> None:
        raise SystemExit(3)

    error = executor.run(leave, soon()).error
    assert isinstance(error, WorkerExit)
    assert "SystemExit" in str(error)
    assert executor.run(lambda: 1, soon()).result == 1
    assert ended(executor)


def test_calls_one_after_the_other_share_a_thread() -> None:
    executor = DeadlineExecutor("t", 4, 4)
    names = {executor.run(threading.current_thread, soon()).result for _ in range(20)}
    assert len(names) == executor.threads == 1
    assert ended(executor)
    assert executor.threads == 0


def test_an_overrun_returns_in_time_and_is_told_when_it_ends() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    results: list[bool] = []
    go_on = threading.Event()

    def overrun() -> None:
        ran = executor.run(lambda: go_on.wait(60), soon(0.05), late=results.append)
        assert ran.abandoned

    timed(overrun, 0.15)
    assert executor.abandoned == 1
    assert results == []
    go_on.set()
    until(lambda: executor.abandoned == 0)
    assert results == [True]
    assert ended(executor)


def test_what_follows_a_late_end_is_done_before_the_books_say_so() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    go_on, seen = threading.Event(), []
    assert executor.run(
        lambda: go_on.wait(60),
        soon(0.01),
        late=lambda _: seen.append(executor.abandoned),
    ).abandoned
    go_on.set()
    assert executor.wait_idle(soon())
    assert seen == [1]
    assert ended(executor)


def test_so_many_calls_may_be_left_behind_and_no_more() -> None:
    executor = DeadlineExecutor("t", 2, 3)
    go_on = threading.Event()
    for _ in range(3):
        assert executor.run(lambda: go_on.wait(60), soon(0.01)).abandoned
    assert executor.at_capacity
    assert rejected(timed(lambda: executor.run(lambda: 1, soon(9)), 0.1))
    assert executor.threads == 3
    go_on.set()
    until(lambda: not executor.at_capacity)
    assert executor.run(lambda: 1, soon()).result == 1
    assert ended(executor)


def test_who_finds_all_hands_busy_waits_until_his_deadline() -> None:
    executor = DeadlineExecutor("t", 1, 4)
    go_on, inside = threading.Event(), threading.Event()

    def work() -> bool:
        inside.set()
        return go_on.wait(60)

    first = threading.Thread(target=lambda: executor.run(work, soon()))
    first.start()
    assert inside.wait(60)

    def second() -> None:
        assert rejected(executor.run(lambda: 1, soon(0.05)))

    timed(second, 0.15)
    go_on.set()
    first.join()
    assert executor.abandoned == 0
    assert ended(executor)


def test_background_tasks_of_one_kind_take_no_quota_from_others() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    go_on = threading.Event()
    for quota in (ConcurrencyQuota(2), ConcurrencyQuota(2)):
        started = [executor.spawn(quota, lambda: go_on.wait(60)) for _ in range(4)]
        assert started == [True, True, False, False]
    assert executor.abandoned == 4
    assert not executor.at_capacity
    assert executor.run(lambda: 1, soon()).result == 1
    go_on.set()
    assert ended(executor)


def test_a_sign_of_life_makes_room_beside_calls_that_hang_for_ever() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    go_on = threading.Event()
    hung = 0
    while not executor.exhausted:
        assert executor.run(lambda: go_on.wait(60), soon(0.01)).abandoned
        hung += 1
        assert executor.at_capacity
        executor.discount_abandoned()
    assert hung == executor.abandoned == executor.threads == 4
    assert rejected(executor.run(lambda: 1, soon()))
    go_on.set()
    until(lambda: not executor.abandoned)
    assert not executor.at_capacity
    assert executor.run(lambda: 1, soon()).result == 1
    assert ended(executor)


def test_who_listens_hears_of_every_call_left_behind_and_of_its_end() -> None:
    counts: list[int] = []
    executor = DeadlineExecutor("t", 1, 2, lambda: counts.append(executor.abandoned))
    go_on = threading.Event()
    assert executor.run(lambda: go_on.wait(60), soon(0.01)).abandoned
    executor.spawn(ConcurrencyQuota(1), lambda: go_on.wait(60))
    assert counts == [1, 2]
    go_on.set()
    assert executor.wait_idle(soon())
    assert counts[-1] == 0
    assert ended(executor)


def test_only_a_step_of_closing_is_done_although_it_begins_too_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, go_on, did = DeadlineExecutor("t", 2, 2), threading.Event(), list[str]()
    run = Job.run

    def late(job: Job) -> object:
        assert go_on.wait(60)
        return run(job)

    monkeypatch.setattr(Job, "run", late)
    assert executor.run(lambda: did.append("called"), soon(0.01)).abandoned
    step = executor.run(lambda: did.append("closed"), soon(0.01), closes=True)
    assert step.abandoned
    go_on.set()
    assert executor.wait_idle(soon())
    assert did == ["closed"]
    assert ended(executor)


def test_what_is_done_last_waits_for_a_call_that_hangs() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    go_on, last = threading.Event(), []
    assert executor.run(lambda: go_on.wait(60), soon(0.01)).abandoned
    assert not executor.shutdown(soon(0.02), lambda: last.append("done"))
    assert last == []
    go_on.set()
    until(lambda: last == ["done"])
    until(lambda: executor.threads == 0)
    assert executor.wait_idle(soon())
    assert rejected(executor.run(lambda: 1, soon()))


def test_who_waits_for_rest_waits_for_what_comes_last_too() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    go_on, inside, release = (threading.Event() for _ in range(3))
    last: list[str] = []

    def let_go() -> None:
        inside.set()
        assert release.wait(60)
        last.append("released")

    assert executor.run(lambda: go_on.wait(60), soon(0.01)).abandoned
    assert not executor.shutdown(soon(0.01), let_go)
    go_on.set()
    assert inside.wait(60)
    assert not executor.wait_idle(soon(0.05))
    release.set()
    assert executor.wait_idle(soon())
    assert last == ["released"]


def test_the_last_step_of_closing_may_fail_and_leaves_the_executor_idle() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    go_on = threading.Event()
    assert executor.run(lambda: go_on.wait(60), soon(0.01)).abandoned
    assert not executor.shutdown(soon(0.01), lambda: 1 // 0)  # type: ignore[arg-type]  # it raises
    go_on.set()
    assert executor.wait_idle(soon())


def test_a_thread_that_cannot_be_started_is_not_booked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor = DeadlineExecutor("test", 1, 2)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            ran = executor.run(lambda: 1, soon())
            assert rejected(ran)
            assert "can't start" in str(ran.error)
            assert not executor.spawn(ConcurrencyQuota(1), lambda: None)
    assert executor.run(lambda: 1, soon()).result == 1
    assert executor.shutdown(soon(), lambda: None)


def test_the_callers_context_goes_with_the_call() -> None:
    word: contextvars.ContextVar[str] = contextvars.ContextVar("word")
    word.set("traced")
    executor = DeadlineExecutor("t", 1, 1)
    assert executor.run(word.get, soon()).result == "traced"
    assert ended(executor)


def test_a_forked_child_does_not_wait_for_threads_that_it_has_not() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    executor.run(lambda: 1, soon())
    executor.guard._pid = os.getpid() + 1
    assert rejected(timed(lambda: executor.run(lambda: 1, soon()), 0.1))
    executor.guard._pid = os.getpid()
    assert ended(executor)


def test_many_threads_at_once_lose_no_call() -> None:
    executor = DeadlineExecutor("t", 3, 3)
    found: list[int] = []

    def client(number: int) -> None:
        found.extend(
            executor.run(partial(int, at), soon()).result
            for at in range(number, number + 50)
        )

    clients = [threading.Thread(target=client, args=(at * 50,)) for at in range(6)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    assert sorted(found) == list(range(300))
    assert executor.threads <= 3
    assert ended(executor)


class Alarm(Exception):  # noqa: N818 - what a host's handler of signals raises
    pass


def test_a_signal_while_a_call_is_booked_as_late_loses_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, go_on, results = (
        DeadlineExecutor("t", 1, 1),
        threading.Event(),
        list[bool](),
    )
    book = DeadlineExecutor._abandon

    def ring(*_: object, **__: object) -> bool:
        monkeypatch.setattr(DeadlineExecutor, "_abandon", book)
        raise Alarm

    monkeypatch.setattr(DeadlineExecutor, "_abandon", ring)
    with pytest.raises(Alarm):
        executor.run(lambda: go_on.wait(60), soon(0.05), late=results.append)
    assert executor.abandoned == 1
    go_on.set()
    assert executor.wait_idle(soon())
    assert results == [True]
    assert ended(executor)


def test_signals_at_any_moment_leave_an_executor_that_works() -> None:
    draw, armed = random.Random(0), False  # noqa: S311 - spreads signals
    executor, results, rings = DeadlineExecutor("t", 2, 2), list[int](), 0
    end = time.monotonic() + 0.5

    def ring(*_: object) -> None:
        if armed or time.monotonic() > end + 10:  # or the test would hang
            raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        while time.monotonic() < end:
            # With a thread at hand: one that is interrupted while it starts
            # another leaves a traceback of the interpreter's.
            assert executor.run(lambda: 1, soon()).result == 1
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 6e-5), 0.1)
                executor.run(lambda: 2, soon(), late=results.append)
                armed = False
            except Alarm:
                rings += 1
            armed = False
            assert executor.wait_idle(soon())
            assert executor.abandoned == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert 0 < len(results) <= rings
    assert ended(executor)
    assert executor.threads == 0

from __future__ import annotations

import math
import random
import signal
import threading
import time

import pytest
from shelf import until
from stalls import timed

from kvdock.errors import KvdockError
from kvdock.resilience import LateError, run_within
from kvdock.resilience.executor import (
    Abandoned,
    ConcurrencyQuota,
    DeadlineExecutor,
    Job,
    WorkerExit,
)
from kvdock.resilience.workers import CallRejected, Inbox, Workers


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def rejected(ran: Job) -> bool:
    return isinstance(ran.error, CallRejected) and not ran.abandoned


def ended(executor: DeadlineExecutor) -> bool:
    return executor.shutdown(soon(), lambda: None)


def leave_behind(
    executor: DeadlineExecutor, go_on: threading.Event, calls: int
) -> None:
    """Let calls hang: on a busy machine one may be given up before it begins.

    Until its thread has skipped it, it takes the room of the next one.
    """
    more = calls - executor.abandoned
    while more:
        more -= executor.run(lambda: go_on.wait(60), soon(0.01)).begun


def test_what_would_end_a_thread_is_an_error_like_any_other() -> None:
    executor = DeadlineExecutor("t", 1, 1)

    def leave() -> None:
        raise SystemExit(3)

    error = executor.run(leave, soon()).error
    assert isinstance(error, WorkerExit)
    assert "SystemExit" in str(error)
    assert executor.run(lambda: 1, soon()).result == 1
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
        started = [executor.spawn(quota, lambda _: go_on.wait(60)) for _ in range(4)]
        assert started == [True, True, False, False]
    assert executor.abandoned == 4
    assert not executor.at_capacity
    assert executor.run(lambda: 1, soon()).result == 1
    go_on.set()
    assert ended(executor)


def test_a_sign_of_life_makes_room_beside_calls_that_hang_for_ever() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    go_on = threading.Event()
    for hung in range(1, 5):
        assert not executor.exhausted
        leave_behind(executor, go_on, hung)
        assert executor.at_capacity
        executor.discount_abandoned()
    assert executor.exhausted
    assert executor.threads == 4
    assert rejected(executor.run(lambda: 1, soon()))
    go_on.set()
    until(lambda: not executor.abandoned)
    assert not executor.at_capacity
    assert executor.run(lambda: 1, soon()).result == 1
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


def test_who_waits_for_rest_waits_for_what_comes_last_too() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    go_on, inside, release = (threading.Event() for _ in range(3))
    last: list[str] = []

    def let_go() -> None:
        inside.set()
        assert release.wait(60)
        last.append("released")

    leave_behind(executor, go_on, 1)
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
    leave_behind(executor, go_on, 1)
    assert not executor.shutdown(soon(0.01), lambda: 1 // 0)  # type: ignore[arg-type]  # it raises
    go_on.set()
    assert executor.wait_idle(soon())


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


def test_a_signal_while_a_late_call_is_told_leaves_no_record_out() -> None:
    rings, lost = list[int](), list[bool]()

    def ring() -> None:
        rings.append(executor.abandoned)
        if len(rings) == 1:
            raise Alarm

    executor, go_on = DeadlineExecutor("t", 1, 1, ring), threading.Event()

    def work(job: Job) -> None:
        job.leave(soon(0.05), lost.append)
        go_on.wait(60)
        job.resume()

    with pytest.raises(Alarm):
        executor.work(work, soon(0.05))
    assert lost == [True]
    go_on.set()
    assert executor.wait_idle(soon())
    assert rings == [1, 0]
    assert ended(executor)


def test_a_signal_before_a_call_has_its_thread_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, results = DeadlineExecutor("t", 1, 1), list[object]()

    def ring(*_: object) -> None:
        raise Alarm

    with monkeypatch.context() as patched:
        patched.setattr(Workers, "take", ring)
        with pytest.raises(Alarm):
            executor.run(lambda: 1, soon(), late=results.append)
    assert results == [None]
    assert ended(executor)


class Hosted:
    """A job on the thread of a background task; its backend hangs until `end`."""

    def __init__(self, executor: DeadlineExecutor, job: type[Job] = Job) -> None:
        self.begun, self.go_on, self.left, self.over = (
            threading.Event() for _ in range(4)
        )
        self.lost: list[bool] = []
        self.job = job(lambda job: executor.work(self._work, soon(), job), soon(0.01))
        self.thread = threading.Thread(target=self.job.run)

    def begin(self) -> None:
        self.thread.start()
        assert self.begun.wait(60)

    def end(self) -> None:
        self.over.set()
        self.thread.join(60)

    def _work(self, job: Job) -> None:
        self.begun.set()
        assert self.go_on.wait(60)
        job.leave(soon(0.05), self.lost.append)
        self.left.set()
        self.over.wait(60)
        if not job.resume():
            raise Abandoned


def test_a_deadline_that_is_set_while_the_watcher_looks_is_watched() -> None:
    executor, looks = DeadlineExecutor("t", 2, 2), list[float]()

    class Seen(Job):
        """Lets the call begin after the watcher's last look at its deadline."""

        __slots__ = ("until",)

        @property
        def until_s(self) -> float:
            until_s = self.until
            if time.monotonic() > early and threading.get_ident() in watchers:
                looks.append(until_s)
                if len(looks) == 2:  # for what is late, and for how long to sleep
                    slow.go_on.set()
                    slow.left.wait(0.3)
            return until_s

        @until_s.setter
        def until_s(self, until_s: float) -> None:
            self.until = until_s

    watchers = set[int]()
    early = soon(60)
    slow = Hosted(executor, Seen)
    slow.job.until_s = math.inf
    slow.begin()
    watch = executor._watch_until_s
    assert watch > time.monotonic()
    watchers |= {one.ident or 0 for one in executor._workers._inboxes}
    early = soon(0.1)

    def work(job: Job) -> None:
        job.leave(early)
        until(lambda: executor._watch_until_s == early)
        job.resume()

    Job(lambda job: executor.work(work, soon(), job)).run()
    try:
        until(lambda: slow.lost == [True])
    finally:
        slow.go_on.set()
        slow.end()
    assert ended(executor)


def test_a_late_call_is_abandoned_although_its_executor_is_shut_down_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executor, take = DeadlineExecutor("t", 2, 2), Workers.take
    closing = threading.Thread(target=lambda: executor.shutdown(soon(0), lambda: None))

    def slowly(workers: Workers) -> Inbox:
        inbox = take(workers)
        if slow.left.is_set() and not closing.ident:
            closing.start()
            closing.join(0.3)
        return inbox

    monkeypatch.setattr(Workers, "take", slowly)
    slow = Hosted(executor)
    slow.job.until_s = soon()
    slow.go_on.set()
    slow.begin()
    try:
        until(lambda: slow.lost == [True])
    finally:
        slow.end()
        closing.join(60)
    assert executor.wait_idle(soon())


def test_a_call_that_goes_on_is_watched_although_its_executor_is_shut_down() -> None:
    executor = DeadlineExecutor("t", 2, 2)
    slow = Hosted(executor)  # which seems late, and prepares its batch
    slow.begin()
    until(lambda: slow.job.until_s == -math.inf)
    until(lambda: executor.threads == 2)
    assert not executor.shutdown(soon(0), lambda: None)
    slow.go_on.set()
    try:
        until(lambda: slow.lost == [True])
    finally:
        slow.end()
    assert executor.wait_idle(soon())
    until(lambda: executor.threads == 0)


def test_the_watcher_ends_with_a_job_that_seemed_late_when_its_executor_closed() -> (
    None
):
    executor, begun, go_on = (
        DeadlineExecutor("t", 2, 2),
        threading.Event(),
        threading.Event(),
    )

    def prepare(_: Job) -> None:
        begun.set()
        assert go_on.wait(60)

    job = Job(lambda job: executor.work(prepare, soon(), job), soon(0.01))
    thread = threading.Thread(target=job.run)
    thread.start()
    assert begun.wait(60)
    until(lambda: job.until_s == -math.inf)
    assert not executor.shutdown(soon(0), lambda: None)
    go_on.set()
    thread.join(60)
    until(lambda: executor.threads == 0)


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


LONG_S = 20.0


def threads() -> set[threading.Thread]:
    every = threading.enumerate()
    return {one for one in every if one.name.startswith("kvdock-within")}


def test_a_result_and_an_error_come_through_and_no_thread_is_left() -> None:
    def fails() -> None:
        raise KvdockError("no")

    others = threads()  # of calls that hang in other tests of this process
    assert run_within(time.monotonic() + LONG_S, lambda: 7, "counting") == 7
    with pytest.raises(KvdockError, match="no"):
        run_within(time.monotonic() + LONG_S, fails, "counting")
    end_s = time.monotonic() + LONG_S
    while threads() - others:
        assert time.monotonic() < end_s, "a thread is left"
        threading.Event().wait(0.001)


def test_a_late_call_is_an_error_and_its_result_is_discarded() -> None:
    go_on, begun, discarded = (threading.Event() for _ in range(3))
    found: list[int] = []

    def discard(result: int) -> None:
        found.append(result)
        discarded.set()

    def work() -> int:
        begun.set()
        assert go_on.wait(LONG_S)
        return 7

    # What a busy machine has not begun by the deadline is never done.
    while not begun.is_set():
        with pytest.raises(LateError, match="counting took longer than"):
            run_within(time.monotonic() + 0.05, work, "counting", discard)
    assert not found
    go_on.set()
    assert discarded.wait(LONG_S)
    assert found == [7]


def test_an_error_that_comes_too_late_discards_nothing() -> None:
    others = threads()
    go_on = threading.Event()
    found: list[object] = []

    def work() -> int:
        assert go_on.wait(LONG_S)
        raise KvdockError("no")

    with pytest.raises(LateError):
        run_within(time.monotonic(), work, "counting", found.append)
    go_on.set()
    end_s = time.monotonic() + LONG_S
    while threads() - others:
        assert time.monotonic() < end_s, "a thread is left"
        threading.Event().wait(0.001)
    assert not found


def test_what_is_done_last_waits_for_a_call_that_hangs() -> None:
    executor = DeadlineExecutor("t", 1, 1)
    go_on, last = threading.Event(), []
    leave_behind(executor, go_on, 1)
    assert not executor.shutdown(soon(0.02), lambda: last.append("done"))
    assert last == []
    go_on.set()
    until(lambda: last == ["done"])
    until(lambda: executor.threads == 0)
    assert executor.wait_idle(soon())
    assert rejected(executor.run(lambda: 1, soon()))


def test_who_listens_hears_of_every_call_left_behind_and_of_its_end() -> None:
    counts: list[int] = []
    executor = DeadlineExecutor("t", 1, 2, lambda: counts.append(executor.abandoned))
    go_on = threading.Event()
    leave_behind(executor, go_on, 1)
    executor.spawn(ConcurrencyQuota(1), lambda _: go_on.wait(60))
    assert counts[-2:] == [1, 2]  # one may be given up before it begins
    go_on.set()
    assert executor.wait_idle(soon())
    assert counts[-1] == 0
    assert ended(executor)


def test_calls_one_after_the_other_share_a_thread() -> None:
    executor = DeadlineExecutor("t", 4, 4)
    names = {executor.run(threading.current_thread, soon()).result for _ in range(20)}
    assert len(names) == executor.threads == 1
    assert ended(executor)
    assert executor.threads == 0

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

from kvdock.resilience.executor import Crashed, Crew, NoHands, Overrun, Room


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def ended(crew: Crew) -> bool:
    return crew.finish(soon(), lambda: None)


def test_a_call_returns_what_the_work_returns_or_raises() -> None:
    crew = Crew("t", 2, 2)
    assert crew.call(lambda: 7, soon()) == 7
    with pytest.raises(ZeroDivisionError):
        crew.call(lambda: 1 // 0, soon())
    assert ended(crew)


def test_what_would_end_a_thread_is_an_error_like_any_other() -> None:
    crew = Crew("t", 1, 1)

    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(Crashed, match="SystemExit"):
        crew.call(leave, soon())
    assert crew.call(lambda: 1, soon()) == 1
    assert ended(crew)


def test_calls_one_after_the_other_share_a_thread() -> None:
    crew = Crew("t", 4, 4)
    names = {crew.call(threading.current_thread, soon()) for _ in range(20)}
    assert len(names) == crew.threads == 1
    assert ended(crew)
    assert crew.threads == 0


def test_an_overrun_returns_in_time_and_is_told_when_it_ends() -> None:
    crew = Crew("t", 1, 1)
    results: list[bool] = []
    go_on = threading.Event()

    def overrun() -> None:
        with pytest.raises(Overrun):
            crew.call(lambda: go_on.wait(10), soon(0.05), late=results.append)

    timed(overrun, 0.15)
    assert crew.behind == 1
    assert results == []
    go_on.set()
    until(lambda: crew.behind == 0)
    assert results == [True]
    assert ended(crew)


def test_what_follows_a_late_end_is_done_before_the_books_say_so() -> None:
    crew = Crew("t", 1, 1)
    go_on, seen = threading.Event(), []
    with pytest.raises(Overrun):
        crew.call(
            lambda: go_on.wait(10), soon(0.01), late=lambda _: seen.append(crew.behind)
        )
    go_on.set()
    assert crew.drain(soon())
    assert seen == [1]
    assert ended(crew)


def test_so_many_calls_may_be_left_behind_and_no_more() -> None:
    crew = Crew("t", 2, 3)
    go_on = threading.Event()
    for _ in range(3):
        with pytest.raises(Overrun):
            crew.call(lambda: go_on.wait(10), soon(0.01))
    assert crew.full
    with pytest.raises(NoHands):
        timed(lambda: crew.call(lambda: 1, soon(9)), 0.1)
    assert crew.threads == 3
    go_on.set()
    until(lambda: not crew.full)
    assert crew.call(lambda: 1, soon()) == 1
    assert ended(crew)


def test_who_finds_all_hands_busy_waits_until_his_deadline() -> None:
    crew = Crew("t", 1, 4)
    go_on, inside = threading.Event(), threading.Event()

    def work() -> bool:
        inside.set()
        return go_on.wait(10)

    first = threading.Thread(target=lambda: crew.call(work, soon()))
    first.start()
    assert inside.wait(5)

    def second() -> None:
        with pytest.raises(NoHands):
            crew.call(lambda: 1, soon(0.05))

    timed(second, 0.15)
    go_on.set()
    first.join()
    assert crew.behind == 0
    assert ended(crew)


def test_errands_of_one_kind_take_room_from_nothing_else() -> None:
    crew = Crew("t", 1, 1)
    go_on = threading.Event()
    for room in (Room(2), Room(2)):
        started = [crew.leave(room, lambda: go_on.wait(10)) for _ in range(4)]
        assert started == [True, True, False, False]
    assert crew.behind == 4
    assert not crew.full
    assert crew.call(lambda: 1, soon()) == 1
    go_on.set()
    assert ended(crew)


def test_a_sign_of_life_makes_room_beside_calls_that_hang_for_ever() -> None:
    crew = Crew("t", 1, 1)
    go_on = threading.Event()
    hung = 0
    while not crew.spent:
        with pytest.raises(Overrun):
            crew.call(lambda: go_on.wait(10), soon(0.01))
        hung += 1
        assert crew.full
        crew.forgive()
    assert hung == crew.behind == crew.threads == 4
    with pytest.raises(NoHands):
        crew.call(lambda: 1, soon())
    go_on.set()
    until(lambda: not crew.behind)
    assert not crew.full
    assert crew.call(lambda: 1, soon()) == 1
    assert ended(crew)


def test_who_listens_hears_of_every_call_left_behind_and_of_its_end() -> None:
    told: list[int] = []
    crew = Crew("t", 1, 2, lambda: told.append(crew.behind))
    go_on = threading.Event()
    with pytest.raises(Overrun):
        crew.call(lambda: go_on.wait(10), soon(0.01))
    crew.leave(Room(1), lambda: go_on.wait(10))
    assert told == [1, 2]
    go_on.set()
    assert crew.drain(soon())
    assert told[-1] == 0
    assert ended(crew)


def test_what_is_done_last_waits_for_a_call_that_hangs() -> None:
    crew = Crew("t", 1, 1)
    go_on, last = threading.Event(), []
    with pytest.raises(Overrun):
        crew.call(lambda: go_on.wait(10), soon(0.01))
    assert not crew.finish(soon(0.02), lambda: last.append("done"))
    assert last == []
    go_on.set()
    until(lambda: last == ["done"])
    until(lambda: crew.threads == 0)
    assert crew.drain(soon())
    with pytest.raises(NoHands):
        crew.call(lambda: 1, soon())


def test_who_waits_for_rest_waits_for_what_comes_last_too() -> None:
    crew = Crew("t", 1, 1)
    go_on, inside, release = (threading.Event() for _ in range(3))
    last: list[str] = []

    def let_go() -> None:
        inside.set()
        assert release.wait(10)
        last.append("released")

    with pytest.raises(Overrun):
        crew.call(lambda: go_on.wait(10), soon(0.01))
    assert not crew.finish(soon(0.01), let_go)
    go_on.set()
    assert inside.wait(5)
    assert not crew.drain(soon(0.05))
    release.set()
    assert crew.drain(soon())
    assert last == ["released"]


def test_what_comes_last_may_fail_and_leaves_the_crew_at_rest() -> None:
    crew = Crew("t", 1, 1)
    go_on = threading.Event()
    with pytest.raises(Overrun):
        crew.call(lambda: go_on.wait(10), soon(0.01))
    assert not crew.finish(soon(0.01), lambda: 1 // 0)  # type: ignore[arg-type]  # it raises
    go_on.set()
    assert crew.drain(soon())


def test_a_thread_that_cannot_be_started_is_not_booked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew = Crew("test", 1, 2)

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        for _ in range(3):
            with pytest.raises(NoHands, match="can't start"):
                crew.call(lambda: 1, soon())
            assert not crew.leave(Room(1), lambda: None)
    assert crew.call(lambda: 1, soon()) == 1
    assert crew.finish(soon(), lambda: None)


def test_the_callers_context_goes_with_the_call() -> None:
    word: contextvars.ContextVar[str] = contextvars.ContextVar("word")
    word.set("traced")
    crew = Crew("t", 1, 1)
    assert crew.call(word.get, soon()) == "traced"
    assert ended(crew)


def test_a_forked_child_does_not_wait_for_threads_that_it_has_not() -> None:
    crew = Crew("t", 1, 1)
    crew.call(lambda: 1, soon())
    crew._pid = os.getpid() + 1
    with pytest.raises(NoHands):
        timed(lambda: crew.call(lambda: 1, soon()), 0.1)
    crew._pid = os.getpid()
    assert ended(crew)


def test_many_threads_at_once_lose_no_call() -> None:
    crew = Crew("t", 3, 3)
    found: list[int] = []

    def client(number: int) -> None:
        found.extend(
            crew.call(partial(int, at), soon()) for at in range(number, number + 50)
        )

    clients = [threading.Thread(target=client, args=(at * 50,)) for at in range(6)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    assert sorted(found) == list(range(300))
    assert crew.threads <= 3
    assert ended(crew)


class Alarm(Exception):
    pass


def test_a_signal_while_a_call_is_booked_as_late_loses_neither(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    crew, go_on, results = Crew("t", 1, 1), threading.Event(), list[bool]()
    book = Crew._leave_behind

    def ring(*_: object) -> bool:
        monkeypatch.setattr(Crew, "_leave_behind", book)
        raise Alarm

    monkeypatch.setattr(Crew, "_leave_behind", ring)
    with pytest.raises(Alarm):
        crew.call(lambda: go_on.wait(10), soon(0.05), late=results.append)
    assert crew.behind == 1
    go_on.set()
    assert crew.drain(soon())
    assert results == [True]
    assert ended(crew)


def test_signals_at_any_moment_leave_a_crew_that_works() -> None:
    draw, armed = random.Random(0), False
    crew, results, rings = Crew("t", 2, 2), list[int](), 0
    end = time.monotonic() + 0.5

    def ring(*_: object) -> None:
        if armed or time.monotonic() > end + 10:  # or the test would hang
            raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        while time.monotonic() < end:
            # With a thread at hand: one that is interrupted while it starts
            # another leaves a traceback of the interpreter's.
            assert crew.call(lambda: 1, soon()) == 1
            try:
                armed = True
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-6, 6e-5), 0.1)
                crew.call(lambda: 2, soon(), late=results.append)
                armed = False
            except Alarm:
                rings += 1
            armed = False
            assert crew.drain(soon())
            assert crew.behind == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert 0 < len(results) <= rings
    assert ended(crew)
    assert crew.threads == 0

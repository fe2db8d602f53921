"""One call with a deadline: its result, its error, or that it is late."""

from __future__ import annotations

import threading
import time

import pytest

from kvdock.errors import KvdockError
from kvdock.resilience import LateError, run_within

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

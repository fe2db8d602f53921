"""Calls of a plugin that return, raise, or never come back."""

from __future__ import annotations

import os
import threading
import weakref
from functools import partial

import pytest

from kvdock.testing.watchdog import DidNotReturn, Watchdog

LONG_S = 30.0


def test_a_call_returns_what_it_returns_and_raises_what_it_raises() -> None:
    watchdog = Watchdog()
    assert watchdog.run(lambda: 7, LONG_S, "seven") == 7
    with pytest.raises(KeyError, match="no"):
        watchdog.run(partial(dict[str, int]().__getitem__, "no"), LONG_S, "a look-up")
    watchdog.close()


def test_a_call_that_never_returns_is_found_and_the_next_one_runs() -> None:
    watchdog = Watchdog()
    gate = threading.Event()
    with pytest.raises(DidNotReturn, match=r"a wait has not returned after 0\.1 s"):
        watchdog.run(gate.wait, 0.1, "a wait")
    assert watchdog.run(lambda: 7, LONG_S, "seven") == 7
    gate.set()
    watchdog.close()


def test_calls_that_follow_each_other_share_a_thread() -> None:
    watchdog = Watchdog()
    first = watchdog.run(threading.current_thread, LONG_S, "a call")
    assert watchdog.run(threading.current_thread, LONG_S, "a call") is first
    assert first is not threading.current_thread()
    watchdog.close()
    assert not first.is_alive()


def test_nothing_of_a_call_is_kept_after_it() -> None:
    class Thing:
        pass

    watchdog = Watchdog()
    for _ in range(100):
        thing = Thing()
        watched = weakref.ref(thing)
        watchdog.run(partial(id, thing), LONG_S, "a call")
        del thing
        assert watched() is None
    watchdog.close()


def test_a_forked_child_has_workers_of_its_own() -> None:
    watchdog = Watchdog()
    watchdog.run(lambda: 7, LONG_S, "seven")
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if watchdog.run(lambda: 8, LONG_S, "eight") == 8 else 1
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    watchdog.close()

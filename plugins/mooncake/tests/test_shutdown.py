"""Calls that nobody waits for, at the end of the process."""

from __future__ import annotations

import os
import threading
import time

from kvdock_mooncake.shutdown import BACKGROUND_CALLS, BackgroundCalls


def test_the_end_waits_for_what_runs_and_lets_nothing_begin() -> None:
    background = BackgroundCalls()
    inside, go = threading.Event(), threading.Event()

    def run() -> None:
        with background.call() as may:
            assert may
            inside.set()
            go.wait(10)

    caller = threading.Thread(target=run)
    caller.start()
    assert inside.wait(10)
    ending = threading.Thread(target=background.end)
    ending.start()
    ending.join(0.1)
    assert ending.is_alive()
    go.set()
    ending.join(10)
    caller.join(10)
    assert not ending.is_alive()
    with background.call() as may:
        assert not may
    background.end()


def test_a_forked_child_ends_without_waiting_for_its_parents_calls() -> None:
    inside, go = threading.Event(), threading.Event()

    def run() -> None:
        with BACKGROUND_CALLS.call():
            inside.set()
            go.wait(20)

    caller = threading.Thread(target=run)
    caller.start()
    assert inside.wait(10)
    child = os.fork()
    if not child:
        BACKGROUND_CALLS.end()  # as the interpreter would
        os._exit(0)
    until = time.monotonic() + 10
    while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < until:
        time.sleep(0.02)
    go.set()
    caller.join(10)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended

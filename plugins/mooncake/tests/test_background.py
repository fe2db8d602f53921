"""Calls that nobody waits for, at the end of the process."""

from __future__ import annotations

import threading

from kvdock_mooncake.background import Background


def test_the_end_waits_for_what_runs_and_lets_nothing_begin() -> None:
    background = Background()
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

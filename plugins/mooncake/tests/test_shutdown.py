"""Calls of the library at the end of the process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvdock_mooncake.server import start_owner
from kvdock_mooncake.shutdown import BACKGROUND_CALLS, BackgroundCalls

LEAVING = Path(__file__).with_name("leaving.py")


def test_the_end_waits_for_what_runs_and_lets_nothing_begin() -> None:
    background = BackgroundCalls()
    inside, go = threading.Event(), threading.Event()

    def run() -> None:
        with background.call() as may:
            assert may
            inside.set()
            go.wait(60)

    caller = threading.Thread(target=run)
    caller.start()
    assert inside.wait(60)
    ending = threading.Thread(target=background.end)
    ending.start()
    ending.join(0.1)
    assert ending.is_alive()
    go.set()
    ending.join(60)
    caller.join(60)
    assert not ending.is_alive()
    with background.call() as may:
        assert not may
    background.end()


def test_a_forked_child_ends_without_waiting_for_its_parents_calls() -> None:
    inside, go = threading.Event(), threading.Event()

    def run() -> None:
        with BACKGROUND_CALLS.call():
            inside.set()
            go.wait(60)

    caller = threading.Thread(target=run)
    caller.start()
    assert inside.wait(60)
    child = os.fork()
    if not child:
        BACKGROUND_CALLS.end()  # as the interpreter would
        os._exit(0)
    until = time.monotonic() + 10
    while not (ended := os.waitpid(child, os.WNOHANG)[0]) and time.monotonic() < until:
        time.sleep(0.02)
    go.set()
    caller.join(60)
    if not ended:
        os.kill(child, 9)
        os.waitpid(child, 0)
    assert ended


@pytest.mark.slow
@pytest.mark.mooncake
@pytest.mark.parametrize(
    ("how", "status"), [("exit", 3), ("terminate", 3), ("raise", 1), ("fork", 3)]
)
def test_a_process_ends_with_its_own_status_while_calls_run(
    how: str, status: int, serve: Any
) -> None:
    """Without the wait three of four such processes end with SIGABRT."""
    master = serve()
    owner = start_owner(master.address, 64 << 20)
    try:
        for _ in range(1 if how == "fork" else 3):
            done = subprocess.run(
                [sys.executable, str(LEAVING), master.address, how],
                capture_output=True,
                text=True,
                timeout=60,
                check=False,
            )
            assert done.returncode == status, done.stderr[-2000:]
            assert ("the child ends" in done.stdout) == (how == "fork")
    finally:
        owner.stop()


def test_the_end_reports_what_does_not_end_in_time() -> None:
    background = BackgroundCalls()
    assert background.begin()
    assert not background.end(0.01)
    assert not background.begin()
    background.finish()
    assert background.end(0.01)

"""The process whose forks load one plugin each; `kvdock.plugin.trial` starts it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import suppress
from typing import NoReturn

from kvdock.plugin.discovery import (
    BACKENDS_GROUP,
    BrokenPlugin,
    Candidate,
    import_entry_point,
)
from kvdock.plugin.loading import load_one


def serve(candidates: list[dict[str, str]], timeout_s: float) -> str:
    """Try each candidate in a fork; return how each ended and what it said, as JSON."""
    # Kills its forks on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    ended: list[tuple[int | None, str]] = [(1, "")] * len(candidates)
    waiting = list(enumerate(candidates))[::-1]
    running: dict[int, tuple[int, int, float]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                at, candidate = waiting.pop()
                told = os.memfd_create("answer")
                pid = os.fork() or _try(candidate, told)
                running[pid] = (at, told, time.monotonic() + timeout_s)
            soonest_s = min(end_s for _, _, end_s in running.values())
            left_s = max(0.0, soonest_s - time.monotonic())
            signal.sigtimedwait([signal.SIGCHLD], left_s)
            for pid, (at, told, end_s) in list(running.items()):
                gone, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if gone else None
                if gone or time.monotonic() >= end_s:
                    said = os.pread(told, os.fstat(told).st_size, 0).decode()
                    ended[at] = (code, said)
                    os.close(told)
                    del running[pid]
                    _kill(pid)
    finally:
        for pid in running:
            _kill(pid)
            os.waitpid(pid, 0)
    return json.dumps(ended)


def _try(candidate: dict[str, str], told: int) -> NoReturn:
    """Load one candidate in this process, a fork, and end it."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    code = 1
    try:
        os.write(told, _answer(Candidate(**candidate)).encode())
        code = 0
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    finally:
        os._exit(code)


def _kill(group: int) -> None:
    """Kill a fork with all that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def _answer(candidate: Candidate) -> str:
    """Load one candidate; return what is wrong with it as JSON, or "{}"."""
    try:
        if candidate.group == BACKENDS_GROUP:
            load_one(candidate)
        else:
            import_entry_point(candidate)
    except BrokenPlugin as broken:
        one = broken.problem
        return json.dumps({"stage": one.stage, "cause": one.cause, "fix": one.fix})
    return "{}"

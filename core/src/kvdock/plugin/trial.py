"""Load each plugin in a process of its own first: what it breaks is its own process.

An extension module that crashes, an import that hangs or one that ends the process
would take a command with it that only wants to name what is wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NoReturn

import attrs

from kvdock.plugin.discovery import (
    BACKENDS_GROUP,
    DENY_VARIABLE,
    BrokenPlugin,
    Candidate,
    LoadStage,
    import_entry_point,
)
from kvdock.plugin.loading import load_one

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.plugin.discovery import PluginProblem

TRIAL_S = 10.0
"""Time for one plugin to be imported and to say what it declares."""

_CHILD = """
import json, os, sys
answer = os.dup(1)
os.dup2(2, 1)
sys.path[:] = json.loads(sys.argv[1])
from kvdock.plugin.trial import _serve
os.write(answer, _serve(json.loads(sys.argv[2]), float(sys.argv[3])).encode())
"""


def try_each(
    candidates: Sequence[Candidate], timeout_s: float = TRIAL_S
) -> dict[Candidate, PluginProblem]:
    """Load each candidate in a process of its own; return those that fail, and why.

    They are forks of one process that has imported kvdock and nothing else.
    """
    if not candidates:
        return {}
    given = json.dumps([attrs.asdict(one) for one in candidates])
    with subprocess.Popen(  # noqa: S603 - this interpreter, and data
        [sys.executable, "-c", _CHILD, json.dumps(sys.path), given, str(timeout_s)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as server:
        try:
            answer, _ = server.communicate()
        except BaseException:
            # The user ends the command, and a trial may take its time.
            server.terminate()
            raise
    ended = json.loads(answer) if answer else [[1, ""]] * len(candidates)
    found = {
        one: _problem(one, code, said, timeout_s)
        for one, (code, said) in zip(candidates, ended, strict=True)
    }
    return {one: wrong for one, wrong in found.items() if wrong}


def _problem(
    candidate: Candidate, code: int | None, said: str, timeout_s: float
) -> PluginProblem | None:
    """Return what is wrong with one candidate, as its own process tells.

    `code` is a status, the negative number of a signal, or None if the process did not
    end in time; `said` is what it answered, as JSON.
    """
    if code is None:
        return _crashed(candidate, f"its import took more than {timeout_s:g} s")
    if code < 0:
        name = signal.Signals(-code).name
        return _crashed(candidate, f"its import crashed the process ({name})")
    if code or not said:
        return _crashed(candidate, f"its import ended the process (status {code})")
    told = json.loads(said)
    if not told:
        return None
    return candidate.problem(LoadStage(told["stage"]), told["cause"], told["fix"])


def _serve(candidates: list[dict[str, str]], timeout_s: float) -> str:
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


def _crashed(candidate: Candidate, cause: str) -> PluginProblem:
    return candidate.problem(
        LoadStage.IMPORT,
        cause,
        f"Reinstall {candidate.distribution}, or leave it out with "
        f"{DENY_VARIABLE}={candidate.distribution}.",
    )


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

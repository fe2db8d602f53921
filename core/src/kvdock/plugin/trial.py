"""Load each plugin in a process of its own first: what it breaks is its own process.

An extension module that crashes, an import that hangs or one that ends the process
would take a command with it that only wants to name what is wrong.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import SettingsError
from kvdock.plugin.discovery import DENY_VARIABLE, Candidate, LoadStage

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.plugin.discovery import PluginProblem

TRIAL_S = 10.0
"""Time for one plugin to be imported and to say what it declares."""

TRIAL_VARIABLE = "KVDOCK_IMPORT_S"
"""Seconds that replace it, for hosts that are slow or busy."""

_CHILD = """
import json, os, sys
answer = os.dup(1)
os.dup2(2, 1)
sys.path[:] = json.loads(sys.argv[1])
from kvdock.plugin.trial_server import serve
os.write(answer, serve(json.loads(sys.argv[2]), float(sys.argv[3])).encode())
"""


def try_each(
    candidates: Sequence[Candidate], timeout_s: float = 0.0
) -> dict[Candidate, PluginProblem]:
    """Load each candidate in a process of its own; return those that fail, and why.

    They are forks of one process. That is a fork of this one, which saves the start of
    an interpreter, or a new one where this one has threads: those do not survive.
    A time of 0 is that of the environment, or else `TRIAL_S`.

    Raises:
        SettingsError: If the environment's time is not a number of seconds.
    """
    timeout_s = timeout_s or _usual_s()
    if not candidates:
        return {}
    given = [attrs.asdict(one) for one in candidates]
    ask = _ask_fork if _has_one_thread() else _ask_interpreter
    answer = ask(given, timeout_s)
    ended = json.loads(answer) if answer else [[1, ""]] * len(candidates)
    found = {
        one: _problem(one, code, said, timeout_s)
        for one, (code, said) in zip(candidates, ended, strict=True)
    }
    return {one: wrong for one, wrong in found.items() if wrong}


def _has_one_thread() -> bool:
    """Return whether this process has one thread, those of libraries counted."""
    try:
        return len(list(Path("/proc/self/task").iterdir())) == 1
    except OSError:
        return False


def _ask_fork(candidates: list[dict[str, str]], timeout_s: float) -> bytes:
    """Try candidates from a fork of this process."""
    from kvdock.plugin.trial_server import serve  # noqa: PLC0415 - it imports the loader

    # Not one of the standard streams, which may be closed here.
    answer = fcntl.fcntl(os.memfd_create("answers"), fcntl.F_DUPFD_CLOEXEC, 3)
    pid = os.fork()
    if not pid:
        try:
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(null, stream)
            os.write(answer, serve(candidates, timeout_s).encode())
        finally:
            os._exit(0)
    try:
        # What the caller needs next; the forks take longer.
        importlib.import_module("kvdock.plugin.instances")
        os.waitpid(pid, 0)
    except BaseException:
        # The user ends the command, and a trial may take its time.
        os.kill(pid, signal.SIGTERM)
        os.waitpid(pid, 0)
        raise
    said = os.pread(answer, os.fstat(answer).st_size, 0)
    os.close(answer)
    return said


def _ask_interpreter(candidates: list[dict[str, str]], timeout_s: float) -> bytes:
    """Try candidates from a new interpreter."""
    import subprocess  # noqa: PLC0415 - the other way is the usual one

    given = json.dumps(sys.path), json.dumps(candidates), str(timeout_s)
    with subprocess.Popen(  # noqa: S603 - this interpreter, and data
        [sys.executable, "-c", _CHILD, *given],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as server:
        try:
            return server.communicate()[0]
        except BaseException:
            server.terminate()
            raise


def _problem(
    candidate: Candidate, code: int | None, said: str, timeout_s: float
) -> PluginProblem | None:
    """Return what is wrong with one candidate, as its own process tells.

    `code` is a status, the negative number of a signal, or None if the process did not
    end in time; `said` is what it answered, as JSON.
    """
    if code is None:
        return candidate.problem(
            LoadStage.IMPORT,
            f"its import took more than {timeout_s:g} s",
            f"On a busy host give it more time with {TRIAL_VARIABLE}=60, or leave it "
            f"out with {DENY_VARIABLE}={candidate.distribution}.",
        )
    if code < 0:
        name = signal.Signals(-code).name
        return _crashed(candidate, f"its import crashed the process ({name})")
    if code or not said:
        return _crashed(candidate, f"its import ended the process (status {code})")
    told = json.loads(said)
    if not told:
        return None
    return candidate.problem(LoadStage(told["stage"]), told["cause"], told["fix"])


def _usual_s() -> float:
    given = os.environ.get(TRIAL_VARIABLE, "")
    try:
        found = float(given or TRIAL_S)
    except ValueError:
        found = 0.0
    if not 0 < found < math.inf:
        raise SettingsError(
            f"{TRIAL_VARIABLE}={given!r} is not a time", fix="Give seconds, such as 60."
        )
    return found


def _crashed(candidate: Candidate, cause: str) -> PluginProblem:
    return candidate.problem(
        LoadStage.IMPORT,
        cause,
        f"Reinstall {candidate.distribution}, or leave it out with "
        f"{DENY_VARIABLE}={candidate.distribution}.",
    )

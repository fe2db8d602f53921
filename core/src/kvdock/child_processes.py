"""Programs that a process starts and that must not outlive it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from kvdock.errors import KvdockError

LOOPBACK = "127.0.0.1"

_STOP_S = 5.0
_AGAIN_S = 0.01
_DEATH_SIGNAL = 1
"""PR_SET_PDEATHSIG of Linux: it lasts through `exec`."""

_BIND = f"""
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl({_DEATH_SIGNAL}, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def ended_with_parent(command: Sequence[str]) -> list[str]:
    """Return a command whose process ends when this process does.

    Also when this process is killed and can stop nothing itself. The process is the
    program's own: a few milliseconds of Python come first and are replaced by it.

    On Linux, and for the main thread alone: the kernel counts the end of the thread
    that has started a process as the end of its parent. Elsewhere the command
    is returned as it is.
    """
    main = threading.current_thread() is threading.main_thread()
    if sys.platform != "linux" or not main:
        return list(command)
    return [sys.executable, "-ISc", _BIND, str(os.getpid()), *command]


class ServerError(KvdockError):
    """A local server did not start."""


def free_port() -> int:
    """Return a free port of loopback."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def start_server(
    command: Sequence[str],
    greet: Callable[[], object],
    *,
    environ: Mapping[str, str],
    output: IO[bytes] | int = subprocess.DEVNULL,
    within_s: float,
) -> subprocess.Popen[bytes] | None:
    """Start a server and wait until it answers; None if it ends or does not.

    It ends with this process, as `ended_with_parent` says.

    Args:
        command: The program itself, not a wrapper, and its arguments.
        greet: Asks it for an answer; raises OSError where there is none.
        environ: Its environment.
        output: Where its output goes.
        within_s: How long it may take.
    """
    process = subprocess.Popen(  # noqa: S603 - a program of an installed wheel
        ended_with_parent(command),
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=environ,
    )
    answers = False
    until_s = time.monotonic() + within_s
    try:
        while not answers and time.monotonic() < until_s and process.poll() is None:
            try:
                greet()
                answers = True
            except OSError:
                time.sleep(_AGAIN_S)
    finally:
        if not answers:
            stop_server(process)
    return process if answers else None


def stop_server(process: subprocess.Popen[bytes]) -> None:
    """End a server and wait until it has ended."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()

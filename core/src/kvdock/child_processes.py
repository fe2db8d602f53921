"""Programs that a process starts and that must not outlive it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence

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

    Args:
        command: A program and its arguments.
    """
    main = threading.current_thread() is threading.main_thread()
    if sys.platform != "linux" or not main:
        return list(command)
    return [sys.executable, "-ISc", _BIND, str(os.getpid()), *command]

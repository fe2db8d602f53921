"""Waiting: for how long, under which lock, and in which process."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable

from kvdock.errors import KvdockError

MAX_WAIT_S = threading.TIMEOUT_MAX / 2
"""Longest wait that a lock takes, with room for rounding: 146 years."""


class ProcessGuard:
    """Detects that a forked child uses an object of its parent.

    A child has the object's state but none of the threads behind it, and one
    of those may have held a lock when the process was forked: it stays locked.
    So the guard is asked before any lock is taken. It needs no hook at forks,
    which could not be undone and would miss a fork in C.
    """

    __slots__ = ("pid",)

    def __init__(self) -> None:
        self.pid = os.getpid()

    @property
    def forked(self) -> bool:
        """Return whether this is a child of the object's process."""
        return os.getpid() != self.pid


def new_condition() -> tuple[threading.Lock, QuietCondition]:
    """Return a lock and what waits under it; to be entered by the lock.

    The lock itself is entered in C. A condition's own way in and out is
    Python, where a handler of signals may raise while it is held, and then it
    would never be released.
    """
    lock = threading.Lock()
    return lock, QuietCondition(lock)


def held_lock() -> threading.Lock:
    """Return a lock that is held until something has happened."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def wait_for_release(lock: threading.Lock, until_s: float) -> None:
    """Wait until a lock is released, or until then, on `time.monotonic()`'s clock."""
    if lock.acquire(timeout=remaining_s(until_s)):
        lock.release()


class QuietCondition(threading.Condition):
    """A condition that knows whether a thread waits, which is nearly never so.

    Attributes:
        waiting: How many threads wait; read with the lock held.
    """

    waiting = 0

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until another thread notifies, or for so many seconds."""
        self.waiting += 1
        try:
            return super().wait(timeout)
        finally:
            self.waiting -= 1


def check_deadline(deadline_s: float) -> None:
    """Reject what is not a time: it would be neither before nor after any other."""
    try:
        wrong = math.isnan(deadline_s)
    except TypeError:
        wrong = True
    if wrong:
        raise KvdockError(
            f"a deadline is a number, not {deadline_s!r}",
            fix="Give seconds on time.monotonic()'s clock; math.inf is never.",
        )


def remaining_s(deadline_s: float) -> float:
    """Return how long to wait, also where the deadline is never.

    Args:
        deadline_s: Until when, on `time.monotonic()`'s clock; may be infinite.
    """
    return min(max(0.0, deadline_s - time.monotonic()), MAX_WAIT_S)


class SharedTime:
    """Time that calls under way share: of each second, each gets its part."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._running = 0
        self._shared_s = 0.0
        self._at_s = clock()

    def advance(self, running: int) -> tuple[float, float]:
        """Change the number of calls; return the shared time and the clock's."""
        with self._lock:
            now_s = self._clock()
            self._shared_s += (now_s - self._at_s) / max(1, self._running)
            self._at_s = now_s
            self._running += running
            return self._shared_s, now_s

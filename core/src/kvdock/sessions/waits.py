"""Waiting: for how long, and under which lock."""

from __future__ import annotations

import threading
import time

LONGEST_S = threading.TIMEOUT_MAX / 2
"""Longest wait that a lock takes, with room for rounding: 146 years."""


def lock_and_condition() -> tuple[threading.Lock, threading.Condition]:
    """Return a lock and what waits under it; to be entered by the lock.

    The lock itself is entered in C. A condition's own way in and out is
    Python, where a handler of signals may raise while it is held, and nobody
    would ever let it go.
    """
    lock = threading.Lock()
    return lock, threading.Condition(lock)


def seconds_until(deadline_s: float) -> float:
    """Return how long to wait, also where the deadline is never.

    Args:
        deadline_s: Until when, on `time.monotonic()`'s clock; may be infinite.
    """
    return min(max(0.0, deadline_s - time.monotonic()), LONGEST_S)

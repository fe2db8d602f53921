"""Time a call, without the time that the machine had no processor for it.

A deadline is a promise about our waiting, not about the scheduler. Linux says
for each thread how long it stood in a queue for a processor; on an idle
machine that is nothing, and the promise is held to the millisecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


def queued_s() -> float:
    """Return how long the threads of this process waited for a processor."""
    total_ns = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total_ns += int(file.read_text().split()[1])
        except (OSError, ValueError, IndexError):
            continue  # the thread has just ended
    return total_ns / 1e9


def timed(call: Callable[[], T], allowed_s: float) -> T:
    """Make a call, and assert that it took no longer than it may."""
    queued, began = queued_s(), time.monotonic()
    result = call()
    took_s = time.monotonic() - began
    if took_s > allowed_s:
        took_s -= queued_s() - queued
    assert took_s <= allowed_s
    return result

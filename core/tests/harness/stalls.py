"""Time a call, without the time that the machine had no processor for it.

A deadline is a promise about our waiting, not about the scheduler. Linux says
for each thread how long it stood in a queue for a processor, and how much
time the host of a virtual machine took away. On an idle machine both are
nothing, and the promise is held to the millisecond.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

_STEAL = 8
"""Where `steal` stands in the first line of /proc/stat."""


def without_processor_s() -> float:
    """Return how long this process waited for a processor so far."""
    ticks = int(Path("/proc/stat").read_text().split(maxsplit=_STEAL + 1)[_STEAL])
    total_s = ticks / os.sysconf("SC_CLK_TCK")
    for file in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total_s += int(file.read_text().split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            continue  # the thread has just ended
    return total_s


class Taken:
    """A lock whose owner did not come along into a forked child."""

    def __enter__(self) -> None:
        raise AssertionError("it would wait for ever")

    def __exit__(self, *_: object) -> None:
        pass


class LateError(AssertionError):
    """A call took longer than it may."""


def timed(call: Callable[[], T], allowed_s: float) -> T:
    """Make a call, and assert that it took no longer than it may."""
    before_s, began = without_processor_s(), time.monotonic()
    result = call()
    took_s = time.monotonic() - began
    waited_s = without_processor_s() - before_s
    if took_s - waited_s > allowed_s:
        raise LateError(f"{took_s:.3f} s, {waited_s:.3f} s of them without a processor")
    return result

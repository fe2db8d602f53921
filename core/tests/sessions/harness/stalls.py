"""How long the machine itself stood still, so that a busy one fails no test.

A deadline is a promise about our waiting, not about the scheduler: what a
sleeping thread overslept meanwhile is taken off the time that a call took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_STEP_S = 0.004


class _Watch:
    """A thread that does nothing but sleep, and notes how late it wakes."""

    def __init__(self) -> None:
        self.stalled_s = 0.0
        self._ending = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> float:
        self._ending = True
        self._thread.join()
        return self.stalled_s

    def _run(self) -> None:
        while not self._ending:
            began = time.monotonic()
            time.sleep(_STEP_S)
            self.stalled_s += max(0.0, time.monotonic() - began - 2 * _STEP_S)


def timed(call: Callable[[], T], allowed_s: float) -> T:
    """Make a call, and assert that it took no longer than it may."""
    watch, began = _Watch(), time.monotonic()
    result = call()
    took_s = time.monotonic() - began
    assert took_s - watch.end() <= allowed_s
    return result

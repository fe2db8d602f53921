"""Wait until something comes true: the one loop of the tests that polls."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_PAUSE_S = 0.002


def until(condition: Callable[[], T], within_s: float = 60.0) -> T:
    """Return what a condition gives once that is true, or fail."""
    end_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end_s, f"not true within {within_s} s"
        time.sleep(_PAUSE_S)
    return found

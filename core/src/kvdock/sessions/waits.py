"""How long to wait for something that has a deadline."""

from __future__ import annotations

import threading
import time

LONGEST_S = threading.TIMEOUT_MAX / 2
"""Longest wait that a lock takes, with room for rounding: 146 years."""


def seconds_until(deadline_s: float) -> float:
    """Return how long to wait, also where the deadline is never.

    Args:
        deadline_s: Until when, on `time.monotonic()`'s clock; may be infinite.
    """
    return min(max(0.0, deadline_s - time.monotonic()), LONGEST_S)

"""Say once what went wrong, and then only how often.

A store that is down fails a thousand calls a second. The log names the first
of each kind, and after that one line for all that came in between.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

log = logging.getLogger("kvdock")

EVERY_S = 30.0
"""Seconds between two lines of the same kind."""


def describe_error(error: BaseException) -> str:
    """Return what an error is and says; a stranger's may fail to say it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001 - a stranger's code
        return type(error).__name__


class ThrottledLog:
    """The log of one backend's failures, limited by kind."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._last: dict[str, float] = {}
        self._held: dict[str, int] = {}

    def warning(
        self, kind: str, message: str, error: BaseException | None = None
    ) -> None:
        """Log a failure unless one of its kind was logged a moment ago."""
        now = self._clock()
        with self._lock:
            last = self._last.get(kind)
            if last is not None and now - last < EVERY_S:
                self._held[kind] = self._held.get(kind, 0) + 1
                return
            self._last[kind] = now
            held = self._held.pop(kind, 0)
        more = f" ({held} more since the last line of this kind)" if held else ""
        # The traceback of a stranger's code helps the first time only.
        log.warning("%s%s", message, more, exc_info=error if last is None else None)

"""Events of pages, for an engine that reports them to others.

A router that sends requests to the engine with the longest cached prefix wants to
know which pages are stored, and when they are evicted.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from kvdock.events import PageEvent
from kvdock.throttled_log import ThrottledLog

_POLL_S = 1.0
"""Least time between two questions to a backend what it has removed."""


class PageEvents:
    """Events of all pools of an attachment, until the engine takes them.

    Args:
        limit: Most hashes that wait, and most pages of each pool that a backend
            keeps track of.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._waiting: deque[PageEvent] = deque()
        self._hashes = 0
        self._poll_at_s = 0.0
        self._log = ThrottledLog()

    def add(
        self, pool: str, hashes: Iterable[str], *, stored: bool, backend: str
    ) -> None:
        """Add an event of a backend; the oldest are lost if the engine takes none."""
        event = PageEvent(
            pool=pool, stored=stored, hashes=tuple(hashes), backend=backend
        )
        if not event.hashes:
            return
        lost = 0
        with self._lock:
            self._waiting.append(event)
            self._hashes += len(event.hashes)
            while self._hashes > self.limit and len(self._waiting) > 1:
                lost += len(self._waiting[0].hashes)
                self._hashes -= len(self._waiting.popleft().hashes)
        if lost:
            self._log.warning(
                "page events",
                f"events of {lost} pages are lost: the engine does not take them "
                "(core.page_events)",
            )

    def take(self, polls: Iterable[Callable[[], None]]) -> tuple[PageEvent, ...]:
        """Return the events since the last call, and ask backends for the next.

        Args:
            polls: Start to ask, for each pool; called once a second at most.
        """
        now_s = time.monotonic()
        if now_s >= self._poll_at_s:
            self._poll_at_s = now_s + _POLL_S
            for poll in polls:
                poll()
        with self._lock:
            taken, self._waiting = self._waiting, deque()
            self._hashes = 0
        return tuple(taken)

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
        tiers: Whether pages are kept in several backends: then a page is stored
            once, and is gone when no backend has it any more.
    """

    def __init__(self, limit: int, *, tiers: bool = False) -> None:
        self.limit = limit
        self._kept_in: dict[tuple[str, str], set[str]] | None = {} if tiers else None
        self._lock = threading.Lock()
        self._waiting: deque[PageEvent] = deque()
        self._hashes = 0
        self._poll_at_s = 0.0
        self._log = ThrottledLog()

    def add(
        self, pool: str, hashes: Iterable[str], *, stored: bool, backend: str = ""
    ) -> None:
        """Add an event of a backend; the oldest are lost if the engine takes none."""
        if self._kept_in is not None:
            with self._lock:
                hashes = self._of_all(self._kept_in, pool, hashes, backend, stored)
        event = PageEvent(pool=pool, stored=stored, hashes=tuple(hashes))
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

    def _of_all(
        self,
        kept_in: dict[tuple[str, str], set[str]],
        pool: str,
        hashes: Iterable[str],
        backend: str,
        stored: bool,  # noqa: FBT001 - as `add`
    ) -> list[str]:
        """Return the pages that are the first in any tier, or the last ones."""
        found = []
        for one in hashes:
            kept = kept_in.pop((pool, one), set())
            if not (kept - {backend}):
                found.append(one)
            (kept.add if stored else kept.discard)(backend)
            if kept:
                kept_in[pool, one] = kept
        while len(kept_in) > self.limit:
            del kept_in[next(iter(kept_in))]
        return found

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

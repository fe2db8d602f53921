"""Transferred pages and bandwidth for the engine's metrics; failures for the log.

The engine polls a record of its own kind, which knows pages and bandwidth of
the anchor. Everything else is counted by observers, by pool and outcome; what
fails before the core sees it is logged here, with a count.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from typing import Any

import attrs

from kvdock.observers.metrics import MANY_PAGES

log = logging.getLogger("kvdock.sglang")

_QUIET_S = 10.0


@attrs.define(eq=False)
class Stats:
    """Counters of one storage object, for any thread.

    Args:
        metrics: Whether the engine asks for its own record.
        watches: Whether it logs a pool that is never restored: no observer does.
    """

    metrics: bool = False
    watches: bool = True
    _pages: dict[str, Counter[str]] = attrs.field(factory=dict, init=False)
    _moved: dict[str, list[tuple[int, float]]] = attrs.field(factory=dict, init=False)
    _failed: Counter[str] = attrs.field(factory=Counter, init=False)
    _said: dict[str, float] = attrs.field(factory=dict, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def record(self, what: str, pages: int, nbytes: int, seconds: float) -> None:
        """Record a call that transferred pages of the anchor."""
        if self.metrics:
            record = (pages, nbytes / 2**30 / max(seconds, 1e-9))
            with self._lock:
                self._moved.setdefault(what, []).append(record)

    def watch(self, pool: str, what: str, pages: int) -> None:
        """Say once of a pool that it is stored and found, and never restored."""
        if not (self.watches and pages):
            return
        with self._lock:
            seen = self._pages.setdefault(pool, Counter())
            seen[what] += pages
            stored_and_found = min(seen["set"], seen["exists"]) >= MANY_PAGES
            if seen["get"] or seen["said"] or not stored_and_found:
                return
            seen["said"] = 1
        log.warning(
            "%d pages of pool %s were stored and %d found again, and none was ever "
            "restored: another pool of the same prefixes lacks its pages, or prompts "
            "are shorter than prefetch_threshold",
            seen["set"],
            pool,
            seen["exists"],
        )

    def record_error(self, what: str, error: Exception) -> None:
        """Count a call that failed as a whole; log it every 10 s."""
        with self._lock:
            self._failed[what] += 1
            times = self._failed[what]
            now = time.monotonic()
            quiet = now - self._said.get(what, -_QUIET_S) < _QUIET_S
            if not quiet:
                self._said[what] = now
        if not quiet:
            again = f" ({times} times by now)" if times > 1 else ""
            log.error("%s failed, so its pages are a miss%s: %s", what, again, error)
            log.debug("where it failed", exc_info=error)

    def drain(self) -> Any:  # noqa: ANN401 - the engine's StorageMetrics
        """Return the engine's record since the last call; None if not asked."""
        if not self.metrics:
            return None
        from sglang.srt.observability.metrics_collector import (  # noqa: PLC0415 - heavy
            StorageMetrics,
        )

        with self._lock:
            moved, self._moved = self._moved, {}
        record = StorageMetrics()
        for pages, speed in moved.get("get", ()):
            record.prefetch_pgs.append(pages)
            record.prefetch_bandwidth.append(speed)
        for pages, speed in moved.get("set", ()):
            record.backup_pgs.append(pages)
            record.backup_bandwidth.append(speed)
        return record

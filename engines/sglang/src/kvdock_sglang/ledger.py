"""What was moved, how fast, and what failed: counted for the engine and people.

The engine polls its own kind of record, which knows pages and bandwidth. What
went wrong, it does not ask; that is kept here by cause.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock.batches import Outcome, Outcomes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock.pools import PoolSpec, Shard

log = logging.getLogger("kvdock.sglang")

_QUIET_S = 10.0


@attrs.define(eq=False)
class Entry:
    """One call in progress; its outcomes are filled in when it ends."""

    outcomes: Outcomes = attrs.field(factory=lambda: np.zeros(0, np.uint8))


@attrs.define(eq=False)
class Ledger:
    """Counters of one storage object, for any thread.

    Args:
        metrics: Whether the engine asks for its own record.
        causes: (operation, pool, outcome) to pages.
    """

    metrics: bool = False
    causes: Counter[tuple[str, str, str]] = attrs.field(factory=Counter, init=False)
    _moved: dict[str, list[tuple[int, float]]] = attrs.field(factory=dict, init=False)
    _said: dict[str, float] = attrs.field(factory=dict, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @contextmanager
    def timed(self, what: str, pool: PoolSpec, shard: Shard) -> Iterator[Entry]:
        """Count one call, whose outcomes the caller fills in."""
        entry = Entry()
        started = time.perf_counter()
        yield entry
        seconds = time.perf_counter() - started
        codes = np.bincount(entry.outcomes, minlength=max(Outcome) + 1)
        with self._lock:
            for code in np.flatnonzero(codes):
                name = Outcome(int(code)).name.lower()
                self.causes[what, pool.name, name] += int(codes[code])
            if self.metrics and pool.anchor:
                pages = int(codes[Outcome.OK])
                nbytes = pages * pool.page_bytes(shard)
                record = (pages, nbytes / 2**30 / max(seconds, 1e-9))
                self._moved.setdefault(what, []).append(record)

    def complain(self, what: str, error: Exception) -> None:
        """Count something that failed as a whole; log it now and then."""
        with self._lock:
            self.causes[what, "", type(error).__name__] += 1
            now = time.monotonic()
            quiet = now - self._said.get(what, -_QUIET_S) < _QUIET_S
            if not quiet:
                self._said[what] = now
        if not quiet:
            log.error("%s failed, so its pages are a miss: %s", what, error)
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

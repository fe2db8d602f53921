"""The futures of background transfers."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import numpy as np

from kvdock.errors import KvdockError
from kvdock.resilience.background_executor import DeadlineFuture
from kvdock.synchronization import MAX_WAIT_S, remaining_s

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvdock.arrays import Int64Array, OutcomeArray
    from kvdock.batch import Operation, Outcome
    from kvdock.transfer.leases import PageLeases


def _nothing() -> None:
    """Do nothing."""


class TransferFuture(DeadlineFuture):
    """A read or a write of pages of one pool.

    Args:
        pages: int64 (n,), page indices, `NO_PAGE` among them.
        held: int64 (m,), those in memory.
        deadline_s: On `time.monotonic()`'s clock.
        leases: Of the pool, to see whether an abandoned call still has a page.
    """

    def __init__(
        self,
        operation: Operation,
        pool: str,
        pages: Int64Array,
        held: Int64Array,
        deadline_s: float,
        leases: PageLeases,
    ) -> None:
        self.operation = operation
        self.pool = pool
        self.pages = pages
        super().__init__(deadline_s, threading.Lock())
        self._held = held
        self._leases = leases
        self.hashes: list[str] = []
        """Of a load, those of its pages."""
        self.on_rejected: Callable[[OutcomeArray], None] | None = None
        """Called with the outcomes if it ends without having run."""
        self.on_ended: Callable[[], None] = _nothing
        """Called once its outcomes are known, with its lock held."""
        # Held until the end: waiting for a lock costs a tenth of an event.
        self._over = threading.Lock()
        self._over.acquire()
        self._began_s = time.monotonic()
        self._seconds = 0.0

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self.pages)

    @property
    def done(self) -> bool:
        """Return whether it has ended and no call can touch its pages any more.

        An abandoned call keeps the pages of a zero-copy transfer after its end.
        """
        return self.ended and not self._leases.in_use(self._held).any()

    @property
    def outcomes(self) -> OutcomeArray:
        """An `Outcome` for each page, uint8 (n,).

        Raises:
            KvdockError: If it has not ended.
        """
        if not self.ended or self._outcomes is None:
            raise KvdockError(
                f"the transfer of {len(self.pages)} pages of pool {self.pool!r} has "
                "not ended",
                fix="Wait until `ended` or `done`.",
            )
        return self._outcomes

    @property
    def seconds(self) -> float:
        """Time from its submission to its end; 0 before."""
        return self._seconds

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done; return whether it is."""
        end_s = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        return self._wait_ended(end_s) and self._leases.wait_free(self._held, end_s)

    def _wait_until(self, until_s: float) -> None:
        if self._over.acquire(timeout=remaining_s(until_s)):
            self._over.release()

    def finish(self, outcomes: OutcomeArray) -> None:
        """End with the outcomes, uint8 (n,)."""
        with self._lock:
            self._finish(outcomes)

    def _finish(self, outcomes: OutcomeArray) -> None:
        if self._outcomes is None:
            self._seconds = time.monotonic() - self._began_s
            self._outcomes = outcomes
            self.on_ended()
            self._over.release()

    def reject(self, outcome: Outcome) -> None:
        """End with one outcome for every page, unless it runs."""
        rejected = np.full(len(self.pages), outcome, np.uint8)
        with self._lock:
            # A transfer that runs may still copy into its pages.
            if self._running or self._outcomes is not None:
                return
            self._finish(rejected)
        if self.on_rejected is not None:
            self.on_rejected(rejected)

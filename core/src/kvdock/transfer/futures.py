"""The futures of background transfers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvdock.errors import KvdockError
from kvdock.resilience.background_executor import DeadlineFuture
from kvdock.synchronization import MAX_WAIT_S

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray
    from kvdock.batch import Operation
    from kvdock.transfer.leases import PageLeases


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
        super().__init__(len(pages), deadline_s)
        self._held = held
        self._leases = leases
        self.hashes: list[str] = []
        """Those of its pages."""

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
        return self._ended_s - self._began_s

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done; return whether it is."""
        end_s = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        return self._wait_ended(end_s) and self._leases.wait_free(self._held, end_s)

"""One batch of pages on its way between memory and a backend."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from kvdock.arrays import any_of
from kvdock.batch import Batch, MemoryGate, Operation, Outcome
from kvdock.events import TENANT
from kvdock.resilience.channel import BackendChannel, MemoryUse

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdock.arrays import Int64Array, OutcomeArray
    from kvdock.plugin.manifest import Support
    from kvdock.plugin.store import PoolStore
    from kvdock.resilience.executor import Job
    from kvdock.retention import CallTimes
    from kvdock.transfer.host_memory import HostBuffer
    from kvdock.transfer.leases import Lease
    from kvdock.transfer.staging import StagingBuffer, StagingBuffers

log = logging.getLogger("kvdock")

GATE_CLOSE_S = 5.0
"""How long to wait for a copy in memory, which takes about 100 microseconds."""
_OK = int(Outcome.OK)
_LATE = np.uint8(Outcome.TIMEOUT)
_ABSENT = np.uint8(Outcome.ABSENT)


class Place(Protocol):
    """What a batch knows of the placement that its pages are stored in."""

    @property
    def name(self) -> str:
        """The pool's name."""

    @property
    def backend(self) -> str:
        """The name of the backend."""

    @property
    def channel(self) -> BackendChannel:
        """The channel of the backend."""

    @property
    def handle(self) -> PoolStore:
        """The pool's store."""

    @property
    def retention(self) -> Support:
        """What the backend declares."""

    @property
    def retains(self) -> bool:
        """Whether it keeps times itself."""

    def record_abandoned(self, call: PageCall) -> None:
        """Record a batch whose call was abandoned."""

    def delete_wrong(self, keys: Sequence[str]) -> None:
        """Delete objects, so that they can be stored again."""


class PageCall(MemoryUse):
    """Pages of one batch, from their lease to the last byte that may land.

    Steps (see `kvdock.transfer.steps`) add what they use; all of it is released here,
    where the backend has returned, or when it releases its hold.

    Args:
        job: On whose thread the batch moves.
        placement: Where the pages are stored.
        operation: PUT or GET.
        hashes: The n page hashes.
        pages: int64 (n,), page indices in the engine's memory.
        deadline_s: Until when, on `time.monotonic()`'s clock.
        lease: Of the pages; None where no memory is leased.
        times: How long the pages are kept and served; None where nothing is asked.

    Attributes:
        keys: The n * objects keys, page-major.
        rows: int64 (n,), page indices in the memory that the backend gets.
        began_s: When the batch began.
        rest: Hashes of the same call that come in later batches.
        on_late: Called when the number of leased pages may have changed: a call was
            abandoned, or such a call has ended.
        gate: Closed where the call is abandoned.
        buffer: The staging buffer that the backend moves.
        loan: Memory of trailers.
        cause: What the store says of why, as `BatchResult` has it.
        expire_at: int64 (n * objects,), when loaded objects expire; None for never.
    """

    __slots__ = (
        "began_s",
        "buffer",
        "cause",
        "deadline_s",
        "expire_at",
        "gate",
        "hashes",
        "job",
        "keys",
        "lease",
        "loan",
        "on_late",
        "operation",
        "pages",
        "placement",
        "rest",
        "rows",
        "times",
    )

    def __init__(
        self,
        job: Job,
        placement: Place,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        lease: Lease | None = None,
        times: CallTimes | None = None,
    ) -> None:
        self.held = self.ended = False
        self.began_s = time.monotonic()
        self.job = job
        self.placement = placement
        self.operation = operation
        self.hashes = hashes
        self.keys: Sequence[str] = ()
        self.pages = self.rows = pages
        self.deadline_s = deadline_s
        self.lease = lease
        self.times = times
        self.rest: Sequence[str] = ()
        self.on_late: Callable[[], None] | None = None
        self.gate: MemoryGate | None = None
        self.buffer: StagingBuffer | None = None
        self.loan: HostBuffer | None = None
        self.expire_at: Int64Array | None = None
        self.cause = ""

    @property
    def trailer_expiry(self) -> int:
        """When the objects expire by their trailers, seconds since 1970; 0 for never.

        Where the backend keeps the time it can be changed later, and no trailer may
        say another.
        """
        if self.times is None or self.placement.retains:
            return 0
        return self.times.asked.expire_at

    def run(self, addresses: Int64Array, sizes: Int64Array) -> OutcomeArray:
        """Move the bytes of these pages; an outcome for each object.

        Raises:
            Abandoned: At the end of a call that was abandoned.
        """
        placement, operation = self.placement, self.operation
        asked = self._asked() if self.times is not None or TENANT.get() else {}
        batch = Batch(
            operation, self.keys, addresses, sizes, self.deadline_s, placement.name,
            self.gate, **asked,
        )  # fmt: skip
        result = placement.channel.io(self.job, placement.handle, batch, self)
        outcomes, self.cause = result.outcomes, result.cause
        if self.held:
            # Pages that it read are neither verified nor copied, so they are misses,
            # whatever the call returned.
            loads = operation is Operation.GET
            return np.where(outcomes == _OK, _LATE, outcomes) if loads else outcomes
        self.expire_at = result.expire_at
        if self.expire_at is not None and operation is Operation.GET:
            outcomes = self._without_expired(outcomes, self.expire_at)
        if self.times is not None and placement.retains:
            self.times.note_kept(self.hashes, result.kept)
        return outcomes

    def _asked(self) -> dict[str, Any]:
        """Return what is asked besides moving the bytes."""
        asked: dict[str, Any] = {}
        if self.operation is Operation.PUT:
            asked["tenant"] = TENANT.get()
        if self.times is not None and self.placement.retention:
            times = self.times.asked
            asked["keep_until"] = times.keep_until
            if times.expire_at and self.placement.retains:
                asked["expire_at"] = np.full(len(self.keys), times.expire_at, np.int64)
        return asked

    def _without_expired(
        self, outcomes: OutcomeArray, expire_at: Int64Array
    ) -> OutcomeArray:
        """Miss objects that a backend serves after their time, and delete them."""
        over = (outcomes == _OK) & (expire_at > 0) & (expire_at <= time.time())
        if not any_of(over):
            return outcomes
        gone = [self.keys[row] for row in np.flatnonzero(over).tolist()]
        self.placement.delete_wrong(gone)
        return np.where(over, _ABSENT, outcomes)

    def take_buffer(self, staging: StagingBuffers) -> StagingBuffer | None:
        """Take a buffer for the pages, in time; None if there is none."""
        self.buffer = buffer = staging.acquire(self.deadline_s)
        if buffer is not None:
            self.rows = buffer.numbers(len(self.pages))
        return buffer

    def all(self, outcome: Outcome) -> OutcomeArray:
        """Return the same outcome for every object."""
        return np.full(len(self.keys), outcome, np.uint8)

    def end(self) -> None:
        """Release all memory; what a backend holds stays with it."""
        if not self.held:
            self.release()
        elif self.buffer is not None:  # the engine's pages are not what it holds
            self.buffer.mark_abandoned()
            self._end_lease()

    def release(self) -> None:
        """Release all memory of the call, once."""
        if self.ended:
            return
        self.ended = True
        if self.lease is not None:
            self.lease.table.end(self.lease)
        if self.buffer is not None:
            self.buffer.release()
        elif self.loan is not None:
            self.loan.release()

    def abandon(self) -> None:
        """Give back what the abandoned call cannot touch any more, and record it."""
        if self.buffer is not None:
            self.buffer.mark_abandoned()
            self._end_lease()
        elif self.gate is not None:
            if self.gate.close(time.monotonic() + GATE_CLOSE_S):
                self._end_lease()
            else:
                log.warning(
                    "backend %s: an abandoned call stays in the gate of its pages of "
                    "pool %s, against gated_get and gated_put: they stay leased until "
                    "it ends",
                    self.placement.backend,
                    self.placement.name,
                )
        self.placement.record_abandoned(self)

    def _end_lease(self) -> None:
        if self.lease is not None:
            self.lease.table.end(self.lease)

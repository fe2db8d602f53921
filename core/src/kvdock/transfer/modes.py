"""Transfer modes: move the bytes of one batch between pages and a backend.

Zero copy from the engine's memory, staged through a buffer, or markers without
bytes for a pool that only counts pages. Each mode prepares the memory, runs
the batch, verifies the result, and releases the memory when no call can touch
it any more: after the call, or when an abandoned one ends. A gate ends that
earlier, where the backend promises to respect it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np

from kvdock.batch import Batch, MemoryGate, Operation, Outcome
from kvdock.events import TENANT
from kvdock.plugin.manifest import Support
from kvdock.resilience.channel import MemoryUse

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray
    from kvdock.batch import BatchResult
    from kvdock.geometry.region import Region
    from kvdock.resilience.channel import BackendChannel
    from kvdock.resilience.executor import Job
    from kvdock.retention import CallTimes
    from kvdock.transfer.integrity import TrailerBuffers
    from kvdock.transfer.leases import Lease
    from kvdock.transfer.staging import StagingBuffer, StagingBuffers


log = logging.getLogger("kvdock")

GATE_CLOSE_S = 5.0
"""How long to wait for a copy in memory, which takes about 100 microseconds."""
_OK, _ABSENT = int(Outcome.OK), int(Outcome.ABSENT)


@attrs.frozen(eq=False)
class BatchTransfer:
    """Pages of one batch: leased, with their keys and a deadline.

    Args:
        keys: The n * objects keys, page-major.
        pages: int64 (n,), page indices in the engine's memory.
        deadline_s: Until when, on `time.monotonic()`'s clock.
        lease: The pages' lease; ended by the mode.
        record_abandoned: Records that its call was abandoned: the worker that has it
            does not come back to it.
        times: How long the pages are kept and served; None where nothing is asked.
        retention: What the backend declares: whether it takes these times itself.
    """

    operation: Operation
    pool: str
    keys: Sequence[str]
    pages: Int64Array = attrs.field(repr=False)
    deadline_s: float
    lease: Lease
    record_abandoned: Callable[[BatchTransfer], None] = attrs.field(repr=False)
    times: CallTimes | None = attrs.field(default=None, repr=False)
    retention: Support = Support.NO

    @property
    def timed(self) -> bool:
        """Whether the backend takes the times itself."""
        return self.retention is Support.NATIVE

    @property
    def trailer_expiry(self) -> int:
        """When the objects expire by their trailers, seconds since 1970; 0 for never.

        Where the backend keeps the time it can be changed later, and no trailer may
        say another.
        """
        return 0 if self.times is None or self.timed else self.times.asked.expire_at

    def note_times(
        self,
        result: BatchResult,
        trailers: TrailerBuffers | None = None,
        pages: Int64Array | None = None,
    ) -> None:
        """Note what was promised, or when loaded objects expire."""
        if self.times is None:
            return
        expire_at = result.expire_at
        if trailers is not None and pages is not None and expire_at is None:
            expire_at = trailers.expiries(pages)
        self.times.note(result.kept if self.timed else None, expire_at)

    def abandon(self) -> None:
        """End the lease of an abandoned call that cannot touch the pages; record it."""
        self.lease.end()
        self.record_abandoned(self)

    def batch(
        self, addresses: Int64Array, sizes: Int64Array, gate: MemoryGate | None = None
    ) -> Batch:
        """Return the batch that moves these pages from or to memory."""
        batch = (self.operation, self.keys, addresses, sizes, self.deadline_s)
        asked = self.times.asked if self.times is not None and self.retention else None
        tenant = TENANT.get() if self.operation is Operation.PUT else 0
        if not asked:
            return Batch(*batch, self.pool, gate, tenant=tenant)
        ends = np.full(len(self.keys), asked.expire_at, np.int64)
        return Batch(
            *batch,
            self.pool,
            gate,
            keep_until=asked.keep_until,
            expire_at=ends if asked.expire_at and self.timed else None,
            tenant=tenant,
        )

    def all(self, outcome: Outcome) -> OutcomeArray:
        """Return the same outcome for every key."""
        return np.full(len(self.keys), outcome, np.uint8)


class Transfer(Protocol):
    """One of the modes."""

    @property
    def region(self) -> Region:
        """The memory that the backend gets."""

    @property
    def verifies(self) -> bool:
        """Return whether objects have trailers of the core."""

    def execute(
        self,
        job: Job,
        channel: BackendChannel,
        handle: object,
        transfer: BatchTransfer,
    ) -> OutcomeArray:
        """Move a batch on the thread of a job; uint8 (n * objects,), verified.

        Raises:
            Abandoned: At the end of a call that was abandoned.
        """


@attrs.frozen(eq=False)
class MarkerTransfer:
    """Move no bytes: only the presence of a key counts."""

    region: Region
    verifies: bool = False

    def execute(
        self,
        job: Job,
        channel: BackendChannel,
        handle: object,
        transfer: BatchTransfer,
    ) -> OutcomeArray:
        """Store or look for the keys."""
        nothing = np.zeros((len(transfer.keys), 0), np.int64)
        use = MemoryUse(transfer.lease.end, transfer.abandon)
        try:
            batch = transfer.batch(nothing, nothing)
            result = channel.io(job, handle, batch, use)
            transfer.note_times(result)
        finally:
            use.end()
        return result.outcomes


@attrs.frozen(eq=False)
class ZeroCopyTransfer:
    """Move pages from and to the engine's memory, without a copy.

    An abandoned call keeps its pages' lease until it ends. With a gate the lease
    ends when the gate is closed, before the caller gets its result.

    Args:
        region: The engine's memory, with trailers if there are any.
        trailers: Where they lie, or None.
        gated: Whether batches have a gate: the backend must promise it.
    """

    region: Region
    trailers: TrailerBuffers | None = None
    gated: bool = False

    @property
    def verifies(self) -> bool:
        """Return whether objects have trailers of the core."""
        return self.trailers is not None

    def execute(
        self,
        job: Job,
        channel: BackendChannel,
        handle: object,
        transfer: BatchTransfer,
    ) -> OutcomeArray:
        """Move pages with their trailers, if they have any."""
        trailers = self.trailers
        if trailers is not None and not trailers.loan.acquire():
            transfer.lease.end()
            return transfer.all(Outcome.UNAVAILABLE)
        gate = MemoryGate() if self.gated else None

        def end() -> None:
            transfer.lease.end()
            if trailers is not None:
                trailers.loan.release()

        def abandon() -> None:
            if gate is not None:
                _close(gate, channel, transfer)
            transfer.record_abandoned(transfer)

        use = MemoryUse(end, abandon)
        try:
            if trailers is not None and transfer.operation is Operation.PUT:
                ends = transfer.trailer_expiry
                trailers.write(transfer.keys, transfer.pages, ends)
            elif trailers is not None:
                trailers.clear(transfer.pages)
            batch = transfer.batch(*self.region.locate(transfer.pages), gate)
            result = channel.io(job, handle, batch, use)
            outcomes = result.outcomes
            if use.held:
                return _unproven(transfer.operation, outcomes)
            if trailers is not None and transfer.operation is Operation.GET:
                pages, answered = transfer.pages, outcomes
                outcomes = trailers.verify(transfer.keys, pages, answered)
                _drop_expired(channel, handle, transfer, answered, outcomes)
            transfer.note_times(result, trailers, transfer.pages)
        finally:
            use.end()
        return outcomes


def _close(gate: MemoryGate, channel: BackendChannel, transfer: BatchTransfer) -> None:
    """End the lease of an abandoned call, once it cannot touch the pages."""
    if gate.close(time.monotonic() + GATE_CLOSE_S):
        transfer.lease.end()
    else:
        log.warning(
            "backend %s: an abandoned call stays in the gate of its pages of pool %s, "
            "against gated_get and gated_put: they stay leased until it ends",
            channel.name,
            transfer.pool,
        )


def _drop_expired(
    channel: BackendChannel,
    handle: object,
    transfer: BatchTransfer,
    answered: OutcomeArray,
    verified: OutcomeArray,
) -> None:
    """Delete objects whose trailers say that their time is over.

    The backend does not know it, and would keep them where they are stored again.
    """
    if verified is answered:
        return
    over = verified == _ABSENT
    if over.any():
        over &= answered == _OK
        keys = [transfer.keys[at] for at in np.flatnonzero(over).tolist()]
        channel.background.delete_corrupt(handle, transfer.pool, keys)


def _unproven(operation: Operation, outcomes: OutcomeArray) -> OutcomeArray:
    """Return the outcomes of a call whose memory is still in use.

    Pages that it read are neither verified nor copied, so they are misses,
    whatever the call returned.
    """
    if operation is not Operation.GET:
        return outcomes
    late = np.uint8(Outcome.TIMEOUT)
    return np.where(outcomes == _OK, late, outcomes)


@attrs.frozen(eq=False)
class StagedTransfer:
    """Move pages through a contiguous staging buffer.

    An abandoned call keeps its buffer, never the engine's pages. Bytes that
    were read are verified before they are copied, so wrong ones stay there.
    """

    source: tuple[Region, ...] = attrs.field(repr=False)
    staging: StagingBuffers

    @classmethod
    def through(cls, staging: StagingBuffers, source: Region) -> StagedTransfer:
        """Cut the engine's region into one for each object of a page."""
        return cls(
            tuple(
                attrs.evolve(
                    source,
                    objects=source.objects[at : at + 1],
                    bases=source.bases[at : at + 1],
                    strides=source.strides[at : at + 1],
                    sizes=source.sizes[at : at + 1],
                )
                for at in range(len(source.objects))
            ),
            staging,
        )

    @property
    def region(self) -> Region:
        """The staging memory."""
        return self.staging.region

    @property
    def verifies(self) -> bool:
        """Return whether objects have trailers of the core."""
        return self.staging.trailers is not None

    def execute(
        self,
        job: Job,
        channel: BackendChannel,
        handle: object,
        transfer: BatchTransfer,
    ) -> OutcomeArray:
        """Copy out and store, or load, verify and copy in."""
        try:
            buffer = self.staging.acquire(transfer.deadline_s)
            if buffer is not None:
                return self._through(buffer, job, channel, handle, transfer)
        finally:
            transfer.lease.end()
        if self.staging.exhausted:
            channel.log_staging_exhausted(transfer.pool)
            return transfer.all(Outcome.UNAVAILABLE)
        return transfer.all(Outcome.TIMEOUT)

    def _through(
        self,
        buffer: StagingBuffer,
        job: Job,
        channel: BackendChannel,
        handle: object,
        transfer: BatchTransfer,
    ) -> OutcomeArray:
        def abandon() -> None:
            self.staging.mark_abandoned(buffer)
            transfer.abandon()

        use = MemoryUse(buffer.release, abandon)
        try:
            numbers = buffer.numbers(len(transfer.pages))
            self._prepare(buffer, numbers, transfer)
            batch = transfer.batch(*self.region.locate(numbers))
            result = channel.io(job, handle, batch, use)
            outcomes = result.outcomes
            if use.held:
                self.staging.mark_abandoned(buffer)
                return _unproven(transfer.operation, outcomes)
            if transfer.operation is Operation.GET:
                answered = outcomes
                outcomes = self._unload(buffer, numbers, transfer, answered)
                _drop_expired(channel, handle, transfer, answered, outcomes)
            transfer.note_times(result, self.staging.trailers, numbers)
        finally:
            use.end()
        return outcomes

    def _prepare(
        self, buffer: StagingBuffer, numbers: Int64Array, transfer: BatchTransfer
    ) -> None:
        """Copy out what is stored, or erase what would prove a load."""
        trailers = self.staging.trailers
        if transfer.operation is Operation.PUT:
            for at, source in enumerate(self.source):
                source.gather(transfer.pages, buffer.payload(at, len(numbers)))
            if trailers is not None:
                trailers.write(transfer.keys, numbers, transfer.trailer_expiry)
        elif trailers is not None:
            trailers.clear(numbers)

    def _unload(
        self,
        buffer: StagingBuffer,
        numbers: Int64Array,
        transfer: BatchTransfer,
        outcomes: OutcomeArray,
    ) -> OutcomeArray:
        """Verify what was loaded, and copy in what is right."""
        if self.staging.trailers is not None:
            outcomes = self.staging.trailers.verify(transfer.keys, numbers, outcomes)
        count = len(numbers)
        good = (outcomes == _OK).reshape(count, -1).all(axis=1)
        for at, source in enumerate(self.source):
            source.scatter(transfer.pages[good], buffer.payload(at, count)[good])
        return outcomes


@attrs.frozen(eq=False)
class StagedLoads:
    """Load through a staging buffer, and store from the engine's memory.

    A load that is abandoned keeps its buffer, a store keeps its pages' lease.

    Args:
        region: The engine's memory, and the staging memory with its blocks.
    """

    loads: StagedTransfer
    stores: ZeroCopyTransfer
    region: Region

    @classmethod
    def of(cls, loads: StagedTransfer, stores: ZeroCopyTransfer) -> StagedLoads:
        """Combine two modes of one pool."""
        region = attrs.evolve(
            stores.region,
            blocks=(*stores.region.blocks, *loads.region.blocks),
            owners=(*stores.region.owners, *loads.region.owners),
        )
        return cls(loads, stores, region)

    @property
    def verifies(self) -> bool:
        """Return whether objects have trailers of the core."""
        return self.stores.verifies

    def execute(
        self,
        job: Job,
        channel: BackendChannel,
        handle: object,
        transfer: BatchTransfer,
    ) -> OutcomeArray:
        """Load or store by the mode of the operation."""
        loading = transfer.operation is Operation.GET
        mode = self.loads if loading else self.stores
        return mode.execute(job, channel, handle, transfer)

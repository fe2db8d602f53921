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
from contextvars import copy_context
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np

from kvdock.batch import Batch, MemoryGate, Operation, Outcome
from kvdock.events import TENANT
from kvdock.plugin.manifest import Support
from kvdock.resilience.executor import TaskAbandoned

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray
    from kvdock.batch import BatchResult
    from kvdock.geometry.region import Region
    from kvdock.resilience.channel import BackendChannel
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
        on_late: Called after the end of an abandoned call has ended it.
        record: Records the outcomes, uint8 (n * objects,), of a batch that a
            background task will not come back to; None if the task goes on after
            this batch, with another placement.
        times: How long the pages are kept and served; None where nothing is asked.
        retention: What the backend declares: whether it takes these times itself.
    """

    operation: Operation
    pool: str
    keys: Sequence[str]
    pages: Int64Array = attrs.field(repr=False)
    deadline_s: float
    lease: Lease
    on_late: Callable[[], None] = attrs.field(repr=False)
    record: Callable[[BatchTransfer, OutcomeArray], object] | None = attrs.field(
        repr=False
    )
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

    def settling(self, release: Callable[[], None]) -> Callable[[], None] | None:
        """Return what ends an abandoned batch of a background task, if it may end."""
        record = self.record
        if record is None:
            return None

        context = copy_context()  # another thread settles it, for the same request

        def settle() -> None:
            try:
                release()
            finally:
                context.run(record, self, self.all(Outcome.TIMEOUT))

        return settle

    def finish_late(self) -> None:
        """Release the pages at the end of an abandoned call."""
        self.lease.end()
        self.on_late()

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
        self, channel: BackendChannel, handle: object, transfer: BatchTransfer
    ) -> OutcomeArray:
        """Move a batch; uint8 (n * objects,), verified."""


@attrs.frozen(eq=False)
class MarkerTransfer:
    """Move no bytes: only the presence of a key counts."""

    region: Region
    verifies: bool = False

    def execute(
        self, channel: BackendChannel, handle: object, transfer: BatchTransfer
    ) -> OutcomeArray:
        """Store or look for the keys."""
        nothing = np.zeros((len(transfer.keys), 0), np.int64)
        answer = channel.call(
            handle,
            transfer.batch(nothing, nothing),
            settle=transfer.settling(transfer.lease.end),
        )
        transfer.lease.end()
        transfer.note_times(answer.result)
        return answer.result.outcomes


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
        self, channel: BackendChannel, handle: object, transfer: BatchTransfer
    ) -> OutcomeArray:
        """Move pages with their trailers, if they have any."""
        if self.trailers is not None and not self.trailers.loan.acquire():
            transfer.lease.end()
            return transfer.all(Outcome.UNAVAILABLE)
        try:
            if self.trailers is not None:
                if transfer.operation is Operation.PUT:
                    ends = transfer.trailer_expiry
                    self.trailers.write(transfer.keys, transfer.pages, ends)
                else:
                    self.trailers.clear(transfer.pages)
            gate = MemoryGate() if self.gated else None
            batch = transfer.batch(*self.region.locate(transfer.pages), gate)
        except BaseException:  # hashing takes long enough to be interrupted
            self._end(transfer)
            raise
        try:
            answer = channel.call(
                handle,
                batch,
                late=lambda: self._finish_late(transfer),
                settle=transfer.settling(lambda: _close(gate, channel, transfer)),
            )
        except TaskAbandoned:  # and settled
            raise
        except BaseException:  # a signal: the call goes on without its caller
            _close(gate, channel, transfer)
            raise
        outcomes = answer.result.outcomes
        if answer.abandoned:
            if answer.result.hold is None:
                _close(gate, channel, transfer)
            return _unproven(transfer.operation, outcomes)
        try:
            if self.trailers is not None and transfer.operation is Operation.GET:
                pages, answered = transfer.pages, outcomes
                outcomes = self.trailers.verify(transfer.keys, pages, answered)
                _drop_expired(channel, handle, transfer, answered, outcomes)
            transfer.note_times(answer.result, self.trailers, transfer.pages)
        finally:
            self._end(transfer)
        return outcomes

    def _end(self, transfer: BatchTransfer) -> None:
        transfer.lease.end()
        self._release_trailers()

    def _finish_late(self, transfer: BatchTransfer) -> None:
        transfer.finish_late()
        self._release_trailers()

    def _release_trailers(self) -> None:
        if self.trailers is not None:
            self.trailers.loan.release()


def _close(
    gate: MemoryGate | None, channel: BackendChannel, transfer: BatchTransfer
) -> None:
    """End the lease of an abandoned call, once it cannot touch the pages."""
    if gate is None:
        return
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
        self, channel: BackendChannel, handle: object, transfer: BatchTransfer
    ) -> OutcomeArray:
        """Copy out and store, or load, verify and copy in."""
        try:
            return self._execute(channel, handle, transfer)
        finally:
            transfer.lease.end()

    def _execute(
        self, channel: BackendChannel, handle: object, transfer: BatchTransfer
    ) -> OutcomeArray:
        buffer = self.staging.acquire(transfer.deadline_s)
        if buffer is None and self.staging.exhausted:
            channel.log_staging_exhausted(transfer.pool)
            return transfer.all(Outcome.UNAVAILABLE)
        if buffer is None:
            return transfer.all(Outcome.TIMEOUT)
        numbers = buffer.numbers(len(transfer.pages))
        try:
            self._prepare(buffer, numbers, transfer)
            batch = transfer.batch(*self.region.locate(numbers))
        except BaseException:  # copying takes long as well
            buffer.release()
            raise

        def release() -> None:
            self.staging.mark_abandoned(buffer)
            transfer.lease.end()

        answer = channel.call(
            handle, batch, late=buffer.release, settle=transfer.settling(release)
        )
        outcomes = answer.result.outcomes
        if answer.abandoned:
            self.staging.mark_abandoned(buffer)
            return _unproven(transfer.operation, outcomes)
        try:
            if transfer.operation is Operation.GET:
                answered = outcomes
                outcomes = self._unload(buffer, numbers, transfer, answered)
                _drop_expired(channel, handle, transfer, answered, outcomes)
            transfer.note_times(answer.result, self.staging.trailers, numbers)
        finally:
            buffer.release()
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
        self, channel: BackendChannel, handle: object, transfer: BatchTransfer
    ) -> OutcomeArray:
        """Load or store by the mode of the operation."""
        loading = transfer.operation is Operation.GET
        mode = self.loads if loading else self.stores
        return mode.execute(channel, handle, transfer)

"""Steps: how the bytes of a pool's pages move, put together once, at attach.

A step takes a `PageCall` and returns an outcome for each object. Each of the functions
here makes one, around another step or around the call of the backend; what a pool does
not need is not there. `PageSteps` has those of one pool and backend.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Self

import attrs
import numpy as np

from kvdock.batch import NO_MEMORY, MemoryGate, Outcome
from kvdock.transfer.page_call import PageCall

if TYPE_CHECKING:
    from kvdock.arrays import OutcomeArray
    from kvdock.geometry.region import Region
    from kvdock.transfer.integrity import TrailerBuffers
    from kvdock.transfer.staging import StagingBuffers

Step = Callable[[PageCall], "OutcomeArray"]
"""Moves the pages of a batch on the thread of its job; uint8 (n * objects,).

Raises `Abandoned` at the end of a call that was abandoned."""

_OK = int(Outcome.OK)
_ABSENT = int(Outcome.ABSENT)


@attrs.frozen(eq=False)
class PageSteps:
    """How one backend stores and loads the pages of a pool.

    Args:
        region: The memory that the backend gets.
        put: Stores a batch.
        get: Loads a batch, and verifies it.
        verifies: Whether objects have trailers of the core.
        staging: The core's memory that pages pass through; None for none.
    """

    region: Region
    put: Step = attrs.field(repr=False)
    get: Step = attrs.field(repr=False)
    verifies: bool = False
    staging: StagingBuffers | None = attrs.field(default=None, repr=False)

    @classmethod
    def of_markers(cls, region: Region) -> Self:
        """Move no bytes: only the presence of a key counts."""
        return cls(region, _without_bytes, _without_bytes)

    @classmethod
    def direct(
        cls, region: Region, trailers: TrailerBuffers | None = None, *, gated: bool
    ) -> Self:
        """Move pages from and to the engine's memory, without a copy.

        An abandoned call keeps its pages' lease until it ends. With a gate the lease
        ends when the gate is closed, before the caller gets its result.

        Args:
            region: The engine's memory.
            trailers: Those of its pages, or None.
            gated: Whether batches have a gate: the backend must promise it.
        """
        memory = region if trailers is None else trailers.region
        move: Step = partial(_through_gate if gated else _direct, memory)
        if trailers is None:
            return cls(memory, move, move)
        put = partial(_with_loan, partial(_put_trailers, move, trailers), trailers)
        get = partial(_with_loan, partial(_get_trailers, move, trailers), trailers)
        return cls(memory, put, get, verifies=True)

    @classmethod
    def staged(cls, staging: StagingBuffers, source: Region) -> Self:
        """Move pages through a contiguous staging buffer.

        An abandoned call keeps its buffer, never the engine's pages. Bytes that were
        read are verified before they are copied, so wrong ones stay there.
        """
        # One region for each object of a page.
        sources = [
            attrs.evolve(
                source,
                objects=source.objects[at : at + 1],
                bases=source.bases[at : at + 1],
                strides=source.strides[at : at + 1],
                sizes=source.sizes[at : at + 1],
            )
            for at in range(len(source.objects))
        ]
        put = get = partial(_direct, staging.region)
        trailers = staging.trailers
        if trailers is not None:
            put = partial(_put_trailers, put, trailers)
            get = partial(_get_trailers, get, trailers)
        return cls(
            staging.region,
            partial(_put_staged, put, staging, sources),
            partial(_get_staged, get, staging, sources),
            verifies=trailers is not None,
            staging=staging,
        )

    def with_loads_of(self, staged: Self) -> Self:
        """Load as `staged` does, and store as these steps do.

        A load that is abandoned keeps its buffer, a store keeps its pages' lease.
        """
        region = attrs.evolve(
            self.region,
            blocks=(*self.region.blocks, *staged.region.blocks),
            owners=(*self.region.owners, *staged.region.owners),
        )
        return attrs.evolve(self, region=region, get=staged.get, staging=staged.staging)


def _without_bytes(call: PageCall) -> OutcomeArray:
    nothing = NO_MEMORY[: len(call.keys)]
    return call.run(nothing, nothing)


def _direct(region: Region, call: PageCall) -> OutcomeArray:
    return call.run(*region.locate(call.rows))


def _through_gate(region: Region, call: PageCall) -> OutcomeArray:
    call.gate = MemoryGate()
    return call.run(*region.locate(call.rows))


def _with_loan(step: Step, trailers: TrailerBuffers, call: PageCall) -> OutcomeArray:
    """Hold the memory of trailers while a batch moves."""
    if not trailers.loan.acquire():
        return call.all(Outcome.UNAVAILABLE)
    call.loan = trailers.loan
    return step(call)


def _put_trailers(step: Step, trailers: TrailerBuffers, call: PageCall) -> OutcomeArray:
    trailers.write(call.keys, call.rows, call.trailer_expiry)
    return step(call)


def _get_trailers(step: Step, trailers: TrailerBuffers, call: PageCall) -> OutcomeArray:
    """Verify what was loaded; one that was left from before proves nothing."""
    trailers.clear(call.rows)
    answered = step(call)
    if call.held:
        return answered
    outcomes = trailers.verify(call.keys, call.rows, answered)
    if outcomes is not answered:
        # The backend does not know which trailers say that their time is over, and
        # would keep those objects where they are stored again.
        over = (outcomes == _ABSENT) & (answered == _OK)
        call.placement.delete_wrong(
            [call.keys[row] for row in np.flatnonzero(over).tolist()]
        )
    if call.times is not None and call.expire_at is None:
        call.expire_at = trailers.expiries(call.rows)
    return outcomes


def _put_staged(
    step: Step, staging: StagingBuffers, sources: list[Region], call: PageCall
) -> OutcomeArray:
    """Copy pages out, and store the copies."""
    buffer = call.take_buffer(staging)
    if buffer is None:
        return _without_buffer(staging, call)
    for number, source in enumerate(sources):
        source.gather(call.pages, buffer.payload(number, len(call.pages)))
    return step(call)


def _get_staged(
    step: Step, staging: StagingBuffers, sources: list[Region], call: PageCall
) -> OutcomeArray:
    """Load copies, and copy in those that are right."""
    buffer = call.take_buffer(staging)
    if buffer is None:
        return _without_buffer(staging, call)
    outcomes = step(call)
    if call.held:
        return outcomes
    count = len(call.pages)
    good = (outcomes == _OK).reshape(count, -1).all(axis=1)
    for number, source in enumerate(sources):
        source.scatter(call.pages[good], buffer.payload(number, count)[good])
    return outcomes


def _without_buffer(staging: StagingBuffers, call: PageCall) -> OutcomeArray:
    if not staging.exhausted:
        return call.all(Outcome.TIMEOUT)
    call.placement.channel.log_staging_exhausted(call.placement.name)
    return call.all(Outcome.UNAVAILABLE)

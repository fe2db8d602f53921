"""How the bytes of one batch get from a pool's pages to a backend and back.

Three ways: straight from the engine's memory, through an area of staging
memory, or none at all for a pool that only counts pages. Each prepares the
memory, runs the batch, verifies what came back, and lets go of the memory when
nobody can touch it any more: after the call, or when a late one ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np

from kvdock.batch import Batch, Operation, Outcome

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray
    from kvdock.region import Region
    from kvdock.resilience.channel import Line
    from kvdock.transfer.integrity import Trailers
    from kvdock.transfer.leases import Lease
    from kvdock.transfer.staging import Staging


@attrs.frozen(eq=False)
class Cargo:
    """Pages of one batch: leased, with their keys and a deadline.

    Args:
        operation: PUT or GET.
        pool: The pool's name.
        keys: The n * objects keys, page-major.
        pages: int64 (n,), page indices in the engine's memory.
        deadline_s: Until when, on `time.monotonic()`'s clock.
        lease: The pages' lease; ended by the way.
        let_go: Called after a call that was left behind has ended it.
    """

    operation: Operation
    pool: str
    keys: Sequence[str]
    pages: Int64Array = attrs.field(repr=False)
    deadline_s: float
    lease: Lease
    let_go: Callable[[], None] = attrs.field(repr=False)

    def ended_late(self) -> None:
        """Let the pages go at the end of a call that was left behind."""
        self.lease.end()
        self.let_go()

    def batch(self, addresses: Int64Array, sizes: Int64Array) -> Batch:
        """Return the batch that moves these pages from or to memory."""
        return Batch(
            self.operation, self.keys, addresses, sizes, self.deadline_s, self.pool
        )

    def all(self, outcome: Outcome) -> OutcomeArray:
        """Return the same outcome for every key."""
        return np.full(len(self.keys), outcome, np.uint8)


class Way(Protocol):
    """One of the three ways."""

    @property
    def region(self) -> Region:
        """The memory that the backend is told about."""

    def carry(self, line: Line, handle: object, cargo: Cargo) -> OutcomeArray:
        """Move a batch; uint8 (n * objects,), verified."""


@attrs.frozen(eq=False)
class Marks:
    """No bytes: only the presence of a key counts."""

    region: Region

    def carry(self, line: Line, handle: object, cargo: Cargo) -> OutcomeArray:
        """Store or look for the keys."""
        nothing = np.zeros((len(cargo.keys), 0), np.int64)
        answer = line.run(handle, cargo.batch(nothing, nothing))
        cargo.lease.end()
        return answer.result.outcomes


@attrs.frozen(eq=False)
class Direct:
    """Straight from and to the engine's memory.

    A call that was left behind keeps its pages' lease until it ends.
    """

    region: Region
    trailers: Trailers | None = None

    def carry(self, line: Line, handle: object, cargo: Cargo) -> OutcomeArray:
        """Move pages with their trailers, if they have any."""
        if self.trailers is not None and not self.trailers.loan.enter():
            cargo.lease.end()
            return cargo.all(Outcome.UNAVAILABLE)
        try:
            if self.trailers is not None:
                if cargo.operation is Operation.PUT:
                    self.trailers.seal(cargo.keys, cargo.pages)
                else:
                    self.trailers.blank(cargo.pages)
            batch = cargo.batch(*self.region.addresses(cargo.pages))
        except BaseException:  # hashing takes long enough to be interrupted
            self._end(cargo)
            raise
        answer = line.run(handle, batch, late=lambda: self._ended_late(cargo))
        outcomes = answer.result.outcomes
        if answer.late:
            return _unproven(cargo.operation, outcomes)
        try:
            if self.trailers is not None and cargo.operation is Operation.GET:
                outcomes = self.trailers.check(cargo.keys, cargo.pages, outcomes)
        finally:
            self._end(cargo)
        return outcomes

    def _end(self, cargo: Cargo) -> None:
        cargo.lease.end()
        self._leave()

    def _ended_late(self, cargo: Cargo) -> None:
        cargo.ended_late()
        self._leave()

    def _leave(self) -> None:
        if self.trailers is not None:
            self.trailers.loan.leave()


def _unproven(operation: Operation, outcomes: OutcomeArray) -> OutcomeArray:
    """Return what counts of a batch of which a later piece was left behind.

    Pieces before that one came back in time. What they read lies in memory
    that the late one still holds: neither verified nor copied, so a miss.
    """
    if operation is not Operation.GET:
        return outcomes
    late = np.uint8(Outcome.TIMEOUT)
    return np.where(outcomes == Outcome.OK, late, outcomes)


@attrs.frozen(eq=False)
class Staged:
    """Through one contiguous copy.

    A call that was left behind keeps its area, never the engine's pages. What
    was read is verified before it is copied, so wrong bytes get no further.
    """

    source: tuple[Region, ...] = attrs.field(repr=False)
    staging: Staging

    @classmethod
    def through(cls, staging: Staging, source: Region) -> Staged:
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

    def carry(self, line: Line, handle: object, cargo: Cargo) -> OutcomeArray:
        """Copy out and store, or load, verify and copy in."""
        try:
            return self._carry(line, handle, cargo)
        finally:
            cargo.lease.end()

    def _carry(self, line: Line, handle: object, cargo: Cargo) -> OutcomeArray:
        area = self.staging.take(cargo.deadline_s)
        if area is None and self.staging.held:
            line.report_held(cargo.pool)
            return cargo.all(Outcome.UNAVAILABLE)
        if area is None:
            return cargo.all(Outcome.TIMEOUT)
        count = len(cargo.pages)
        try:
            if cargo.operation is Operation.PUT:
                for at, source in enumerate(self.source):
                    source.gather(cargo.pages, area.payload(at, count))
                self.staging.seal(area, cargo.keys, count)
            else:
                self.staging.blank(area, count)
            batch = cargo.batch(*self.region.addresses(area.numbers(count)))
        except BaseException:  # so does copying
            area.give_back()
            raise
        answer = line.run(handle, batch, late=area.give_back)
        outcomes = answer.result.outcomes
        if answer.late:
            self.staging.left_behind(area)
            return _unproven(cargo.operation, outcomes)
        try:
            if cargo.operation is Operation.GET:
                outcomes = self.staging.check(area, cargo.keys, outcomes)
                good = (outcomes == Outcome.OK).reshape(count, -1).all(axis=1)
                for at, source in enumerate(self.source):
                    source.scatter(cargo.pages[good], area.payload(at, count)[good])
        finally:
            area.give_back()
        return outcomes

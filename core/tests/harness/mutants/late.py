"""Mutants that touch the memory of a call that was abandoned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.batch import Batch, Outcome
from mutants.mutant import FolderMutant, MemoryMutant, entered, ungated

if TYPE_CHECKING:
    from reference import Handle


class GateThatDoesNotClose(MemoryMutant):
    """Asks whether the memory is still its own, and fills it in any case."""

    image_of = "a cancelled read whose result is copied although its future is done"
    caught_by = "test_an_abandoned_get_leaves_memory_alone"

    def landed(self, batch: Batch, row: int, data: bytes) -> Outcome:
        with entered(batch):
            return ungated(batch).land(row, data)


class CopiesOutsideTheGate(MemoryMutant):
    """Asks whether the memory is still its own, and fills it a moment later."""

    image_of = "check, then act: a flag is read before the copy, not around it"
    caught_by = "test_an_abandoned_get_leaves_memory_alone"

    def landed(self, batch: Batch, row: int, data: bytes) -> Outcome:
        with entered(batch) as free:
            pass
        return ungated(batch).land(row, data) if free else Outcome.TIMEOUT


class LandsBeforeItAsks(MemoryMutant):
    """Fills memory as bytes come, and asks afterwards whether it was still its own."""

    image_of = "preadv into SGLang's page, which another request has by then"
    caught_by = "test_an_abandoned_get_leaves_memory_alone"

    def landed(self, batch: Batch, row: int, data: bytes) -> Outcome:
        ungated(batch).land(row, data)
        with entered(batch) as free:
            return Outcome.OK if free else Outcome.TIMEOUT


class HashedAfterTheWrite(MemoryMutant):
    """Takes and hashes the memory of a put after it asked for it."""

    image_of = "a late write keeps another prefix's bytes with a checksum that fits"
    caught_by = "test_an_abandoned_put_keeps_nothing_of_what_came_later"

    def taken(self, batch: Batch, row: int) -> bytes | None:
        with entered(batch) as free:
            pass
        return ungated(batch).take(row) if free else None


class GateHeldDuringReads(FolderMutant):
    """Keeps an engine that abandons a call waiting for the disk."""

    image_of = "a lock around copy and I/O: a disk that hangs takes the engine along"
    caught_by = "test_a_read_that_ends_after_its_call_was_abandoned_fills_no_page"

    def move(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        with entered(batch):
            return super().move(handle, batch, row)

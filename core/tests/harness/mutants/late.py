"""Mutants that touch the memory of a call that was abandoned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference import (
    Handle,
    entered,
    load_segments,
    store_segments,
)

from mutants.mutant import FolderMutant, MemoryMutant

if TYPE_CHECKING:
    from kvdock.batch import Batch, Outcome


class GateThatDoesNotClose(MemoryMutant):
    """Asks whether the memory is still its own, and fills it in any case."""

    image_of = "a cancelled read whose result is copied although its future is done"
    caught_by = "test_an_abandoned_get_leaves_memory_alone"

    def landed(self, batch: Batch, row: int, data: bytes) -> bool:
        with entered(batch):
            store_segments(batch, row, data)
        return True


class CopiesOutsideTheGate(MemoryMutant):
    """Asks whether the memory is still its own, and fills it a moment later."""

    image_of = "check, then act: a flag is read before the copy, not around it"
    caught_by = "test_an_abandoned_get_leaves_memory_alone"

    def landed(self, batch: Batch, row: int, data: bytes) -> bool:
        with entered(batch) as free:
            pass
        if free:
            store_segments(batch, row, data)
        return free


class LandsBeforeItAsks(MemoryMutant):
    """Fills memory as bytes come, and asks afterwards whether it was still its own."""

    image_of = "preadv into SGLang's page, which another request has by then"
    caught_by = "test_an_abandoned_get_leaves_memory_alone"

    def landed(self, batch: Batch, row: int, data: bytes) -> bool:
        store_segments(batch, row, data)
        with entered(batch) as free:
            return free


class HashedAfterTheWrite(MemoryMutant):
    """Takes and hashes the memory of a put after it asked for it."""

    image_of = "a late write keeps another prefix's bytes with a checksum that fits"
    caught_by = "test_an_abandoned_put_keeps_nothing_of_what_came_later"

    def taken(self, batch: Batch, row: int) -> bytes | None:
        with entered(batch) as free:
            pass
        return load_segments(batch, row) if free else None


class GateHeldDuringReads(FolderMutant):
    """Keeps an engine that abandons a call waiting for the disk."""

    image_of = "a lock around copy and I/O: a disk that hangs takes the engine along"
    caught_by = "test_a_read_that_ends_after_its_call_was_abandoned_fills_no_page"

    def move(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        with entered(batch):
            return super().move(handle, batch, row)

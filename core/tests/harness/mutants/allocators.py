"""Mutants that bring memory, or touch that of a call that was abandoned."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allocating_reference import WIPED, OwnMemoryReference, Piece

from kvdock.batch import Batch, Outcome
from kvdock.plugin.hookspecs import AttachConfig, HostMemory, hookimpl
from mutants.mutant import FolderMutant, MemoryMutant, entered, ungated

if TYPE_CHECKING:
    from reference import Handle


class MemoryNeverBrought(OwnMemoryReference, MemoryMutant):
    """Declares an allocator and has none."""

    image_of = "a lying capability: host_allocator"
    caught_by = "test_memory_is_brought_where_no_other_will_do"

    @hookimpl
    def kvdock_allocate(self, nbytes: int, config: AttachConfig) -> HostMemory | None:
        del nbytes, config
        return None


class MemoryOutOfReach(OwnMemoryReference, MemoryMutant):
    """Brings memory that it then does not know."""

    image_of = (
        "mooncake: a client process rejects memory that other processes share with it"
    )
    caught_by = "test_memory_is_brought_where_no_other_will_do"
    raises = "KvdockError"

    def new_piece(self, nbytes: int) -> Piece:
        piece = super().new_piece(nbytes)
        self.pieces.remove(piece)
        return piece


class MemoryTakenFromUnderAPool(OwnMemoryReference, MemoryMutant):
    """Frees memory as soon as it is given back."""

    image_of = "a client process that unmaps memory in which a pool still lies"
    caught_by = "test_memory_that_was_given_back_stays_until_its_pool_is_released"

    def take_back(self, piece: Piece) -> None:
        super().take_back(piece)
        piece.array[:] = WIPED


class MemoryLentTwice(OwnMemoryReference, MemoryMutant):
    """Hands out what was given back although a pool lies in it."""

    image_of = "a free list that knows who allocated, and not who registered"
    caught_by = "test_memory_that_was_given_back_stays_until_its_pool_is_released"

    def new_piece(self, nbytes: int) -> Piece:
        for piece in self.pieces:
            if not piece.lent and len(piece.array) == nbytes:
                piece.lent = True
                return piece
        return super().new_piece(nbytes)


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

"""Mutants that bring memory, and the wrong one, or for too short a time."""

from __future__ import annotations

from allocating_reference import WIPED, OwnMemoryReference, Piece

from kvdock.plugin.hookspecs import AttachConfig, HostMemory, hookimpl
from mutants.mutant import MemoryMutant


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

"""Memory of this process that its client processes share.

The library gets each piece as a file in memory, never frees it, and lets every
store of the process register it, whole and from its beginning. So pieces are kept
here, and an unused one is handed out again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import attrs

from kvdock import Block
from kvdock.errors import RegionError
from kvdock.units import format_bytes


@attrs.define(eq=False)
class SharedSegments:
    """Pieces of shared memory, each with its users."""

    _users: dict[Block, set[object]] = attrs.field(factory=dict, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def take(self, nbytes: int, user: object, fresh: Callable[[int], int]) -> Block:
        """Give a piece to a user: a spare one, or a new one.

        `fresh` gets a new one: its address, or 0.
        """
        with self._lock:
            for piece, users in self._users.items():
                if piece.nbytes == nbytes and not users:
                    users.add(user)
                    return piece
            address = fresh(nbytes)
            if not address:
                raise RegionError(
                    f"the Mooncake library shares no {format_bytes(nbytes)} more",
                    fix="Each pool takes a few files in memory: raise the limits of "
                    "open files (ulimit -n) and of memory.",
                )
            piece = Block(address, nbytes)
            self._users[piece] = {user}
            return piece

    def whole(self, block: Block) -> Block:
        """Return the piece that a block lies in; the block if there is none."""
        with self._lock:
            for piece in self._users:
                ends = piece.address + piece.nbytes
                if piece.address <= block.address and (
                    block.address + block.nbytes <= ends
                ):
                    return piece
        return block

    def enter(self, piece: Block, user: object) -> None:
        """Add a user of a piece; other memory is ignored."""
        with self._lock:
            if piece in self._users:
                self._users[piece].add(user)

    def leave(self, piece: Block, user: object) -> None:
        """Remove a user of a piece."""
        with self._lock:
            if piece in self._users:
                self._users[piece].discard(user)


SHARED_SEGMENTS = SharedSegments()
"""All pieces: the library, too, keeps one list of them for the process."""

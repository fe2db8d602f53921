"""An I/O engine for any mounted file system, with the slots of the USRBIO engine."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvdock_hf3fs.chunks import LEAST_BYTES, slot_bytes
from kvdock_hf3fs.reach import move_within
from kvdock_segments import PosixIOEngine

if TYPE_CHECKING:
    from kvdock.geometry import AddressRanges
    from kvdock_segments import IORequest, IOResult

_BLOCK = 4096  # of direct I/O


class MountedIOEngine(PosixIOEngine):
    """Positional I/O on a shared file system.

    Args:
        direct: Bypass the page cache (O_DIRECT).
        chunk: Chunk size of the files; 0 where they have none.
        memory: The memory of the pool. The manifest declares registration for both
            modes, so other memory is rejected here as well.
    """

    def __init__(
        self, threads: int, *, direct: bool, chunk: int, memory: AddressRanges
    ) -> None:
        super().__init__(threads, direct=direct)
        self._chunk = chunk
        self._memory = memory
        self._least = _BLOCK if direct else LEAST_BYTES

    def slot_bytes(self, object_bytes: int) -> int:
        """Fit slots to chunks; see `IOEngine.slot_bytes`."""
        if not self._chunk:
            return super().slot_bytes(object_bytes)
        return slot_bytes(object_bytes, self._chunk, self._least)

    def preallocate(self, token: int, nbytes: int) -> None:
        """Set a file's length, so that no host sees it grow.

        Space is not reserved: where a file system cannot do that, `posix_fallocate`
        writes a byte into every block.
        """
        os.ftruncate(token, nbytes)

    def move(self, request: IORequest) -> IOResult:
        """Move objects that lie in the pool's memory; see `IOEngine.move`."""
        return move_within(self._memory, request, super().move)

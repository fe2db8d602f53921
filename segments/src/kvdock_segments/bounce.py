"""Bounce buffers: reads land in memory of the thread, and are copied from there.

A late read then finds memory of its own, never an engine's page. The buffer is
small enough to stay in the processor's cache, so the copy reads no memory.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from typing import TYPE_CHECKING

import numpy as np

from kvdock.native import checksums

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock.batch import MemoryGate

BLOCK = 4096
"""Lengths and offsets of direct I/O."""


class BounceBuffer(threading.local):
    """One buffer for each thread that uses it, at the start of a memory page.

    Args:
        nbytes: Size, a multiple of `BLOCK`.
    """

    def __init__(self, nbytes: int) -> None:
        # Private: the buffer of a thread that forks must not be shared with the child.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, nbytes, flags=flags)
        self.view = memoryview(memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))

    def read(self, file: int, offset: int, wanted: int, *, direct: bool) -> int:
        """Read from a file; return the bytes, fewer at its end.

        `wanted` is at most the size of the buffer. If `direct`, only whole blocks can
        be read.
        """
        length = -(-wanted // BLOCK) * BLOCK if direct else wanted
        got = 0
        while got < wanted:
            more = os.preadv(file, [self.view[got:length]], offset + got)
            got += more
            if not more or (direct and more % BLOCK):
                break
        return min(got, wanted)

    def write(self, file: int, offset: int, wanted: int) -> int:
        """Write whole blocks to a file; return the bytes that are not padding."""
        length = -(-wanted // BLOCK) * BLOCK
        self.view[wanted:length] = bytes(length - wanted)
        return min(wanted, os.pwrite(file, self.view[:length], offset))

    def digests(self, sizes: Iterable[int]) -> list[int]:
        """Return the xxh3 of consecutive objects from the start of the buffer."""
        each = np.array(list(sizes), np.int64)
        starts = self.address + np.cumsum(each) - each
        found: list[int] = checksums(starts[:, None], each[:, None]).tolist()
        return found

    def gather(self, pieces: Iterable[tuple[int, int]]) -> None:
        """Copy pieces of host memory into the buffer, one behind the other."""
        target = self.address
        for at, size in pieces:
            ctypes.memmove(target, at, size)
            target += size

    def scatter(
        self, gate: MemoryGate | None, start: int, pieces: Iterable[tuple[int, int]]
    ) -> bool:
        """Copy bytes into host memory while its gate is open.

        Args:
            gate: Of the memory; None where it has none.
            start: Where the bytes begin in the buffer.
            pieces: Host address and bytes of each piece, in the order of the bytes.

        Returns:
            Whether they were copied; False once the gate is closed.
        """
        if gate is not None and not gate.enter():
            return False
        try:
            source = self.address + start
            begin = length = 0
            for at, size in pieces:
                # Adjacent pieces in one go: a call costs as much as 8 KiB.
                if at == begin + length:
                    length += size
                    continue
                # It releases the interpreter's lock, unlike a slice of a view.
                ctypes.memmove(begin, source, length)
                source += length
                begin, length = at, size
            ctypes.memmove(begin, source, length)
        finally:
            if gate is not None:
                gate.leave()
        return True

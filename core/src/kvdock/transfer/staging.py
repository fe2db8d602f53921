"""Staging buffers: memory of the core that pages pass through.

A staged backend gets this memory and never the engine's. The buffer of an
abandoned call is not reused until the call ends, so late bytes never reach a
page. Buffers are small enough that their bytes are still in the processor's cache
when they are copied the second time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from kvdock.geometry.region import Block, Region
from kvdock.pools.objects import TRAILER_BYTES
from kvdock.synchronization import new_condition, remaining_s
from kvdock.transfer.host_memory import ALIGN_BYTES, Allocator, allocate_host
from kvdock.transfer.integrity import TRAILER, Hasher, TrailerBuffers, with_trailer

if TYPE_CHECKING:
    from kvdock.arrays import ByteArray, Int64Array

OBJECT_ALIGN_BYTES = 64
"""Where each object of a row begins."""


def _up(number: int, step: int) -> int:
    return -(-number // step) * step


@attrs.frozen(eq=False)
class StagingBuffer:
    """Some rows, each of which takes one page as contiguous objects."""

    staging: StagingBuffers
    first: int
    rows: ByteArray = attrs.field(repr=False)

    def numbers(self, pages: int) -> Int64Array:
        """Return the page indices of the first rows in the staging region."""
        return np.arange(self.first, self.first + pages)

    def payload(self, at: int, pages: int) -> ByteArray:
        """Return object `at` of the first pages without its trailer."""
        start, size = self.staging.starts[at], self.staging.payload[at]
        return self.rows[:pages, start : start + size]

    def mark_abandoned(self) -> None:
        """Leave it to an abandoned call, or to a backend that holds it."""
        self.staging.mark_abandoned(self)

    def release(self) -> None:
        """Release it for the next batch."""
        self.staging.release(self)


class StagingBuffers:
    """Staging buffers for the pages of one pool.

    Args:
        count: How many batches may be under way, late ones included.
        pages: Rows of a buffer.
        trailers: Whether each object is followed by a trailer.
        pieces: Whether a row is described in the same pieces as a page, so
            that a probe moves its bytes like a page.
    """

    def __init__(
        self,
        source: Region,
        count: int,
        pages: int,
        *,
        trailers: bool,
        pieces: bool = False,
        lend: Allocator = allocate_host,
    ) -> None:
        self.payload = cast("list[int]", source.object_bytes.tolist())
        tail = TRAILER_BYTES if trailers else 0
        ends = [_up(size + tail, OBJECT_ALIGN_BYTES) for size in self.payload]
        self.starts = [sum(ends[:at]) for at in range(len(ends))]
        self.row_bytes = _up(sum(ends), ALIGN_BYTES)
        self._loan = lend(count * pages * self.row_bytes)
        memory = self._loan.memory
        rows = memory.reshape(count * pages, self.row_bytes)
        sizes = [
            ([n for n in row if n] or [0]) if pieces else [sum(row)]
            for row in source.sizes.tolist()
        ]
        self.region = _region(source, memory, self, sizes, tail)
        self.trailers = self._trailers(source, rows) if trailers else None
        self._free = [
            StagingBuffer(self, at * pages, rows[at * pages : (at + 1) * pages])
            for at in range(count)
        ]
        self._count = count
        self._abandoned: set[StagingBuffer] = set()
        self._lock, self._changed = new_condition()

    def _trailers(self, source: Region, rows: ByteArray) -> TrailerBuffers:
        """Return the trailers at the ends of the objects of all rows."""
        plain = _region(source, self._loan.memory, self, [[n] for n in self.payload], 0)
        slots = [
            rows[:, end : end + TRAILER_BYTES].view(TRAILER)[:, 0]
            for end in map(sum, zip(self.starts, self.payload, strict=True))
        ]
        return TrailerBuffers(self.region, Hasher.of(plain), tuple(slots), self._loan)

    @property
    def exhausted(self) -> bool:
        """Return whether abandoned calls have all of the buffers."""
        return len(self._abandoned) >= self._count

    def acquire(self, deadline_s: float) -> StagingBuffer | None:
        """Wait for a free buffer; None if there is none in time.

        Abandoned calls may never end; if they have all of the buffers, it
        returns at once.
        """
        if not self.enter():
            return None
        with self._lock:
            self._changed.wait_for(
                lambda: self._free or self.exhausted, remaining_s(deadline_s)
            )
            buffer = self._free.pop() if self._free else None
        if buffer is None:
            self.leave()
        return buffer

    def reserve(self) -> StagingBuffer:
        """Reserve a buffer permanently; use it between `enter` and `leave`."""
        return self._free.pop()

    def enter(self) -> bool:
        """Begin to use the memory; False once it is being released."""
        return self._loan.acquire()

    def leave(self) -> None:
        """End one use of the memory."""
        self._loan.release()

    def mark_abandoned(self, buffer: StagingBuffer) -> None:
        """Mark the buffer of an abandoned call."""
        with self._lock:
            # It may have ended already.
            if buffer not in self._free:
                self._abandoned.add(buffer)
                self._changed.notify_all()

    def release(self, buffer: StagingBuffer) -> None:
        """Release a buffer for the next batch."""
        with self._lock:
            self._free.append(buffer)
            self._abandoned.discard(buffer)
            self._changed.notify()
        self.leave()


def _region(
    source: Region,
    memory: ByteArray,
    staging: StagingBuffers,
    sizes: list[list[int]],
    tail: int,
) -> Region:
    """Describe staging memory as a pool's, trailers in the objects."""
    if tail and any(len(row) > 1 for row in sizes):
        sizes = [[*row, tail] for row in sizes]
    else:
        sizes = [[*row[:-1], row[-1] + tail] for row in sizes]
    width = max(map(len, sizes))
    tables = np.zeros((3, len(sizes), width), np.int64)
    for at, row in enumerate(sizes):
        offsets = np.cumsum([0, *row[:-1]])
        tables[0, at, : len(row)] = memory.ctypes.data + staging.starts[at] + offsets
        tables[1, at, : len(row)] = staging.row_bytes
        tables[2, at, : len(row)] = row
    return Region(
        pool=source.pool,
        pages=len(memory) // staging.row_bytes,
        objects=tuple(map(with_trailer, source.objects)) if tail else source.objects,
        bases=tables[0],
        strides=tables[1],
        sizes=tables[2],
        layout=source.layout,
        blocks=(Block(memory.ctypes.data, memory.nbytes),),
        owners=(memory,),
    )

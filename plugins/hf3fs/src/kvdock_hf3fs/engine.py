"""An I/O engine over USRBIO: pages move between rings' memory and 3FS."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdock_hf3fs import chunks
from kvdock_hf3fs.reach import move_within
from kvdock_hf3fs.rings import IDLE
from kvdock_hf3fs.shared_memory import IOVS, ranges_of
from kvdock_segments import IOEngine, IOResult, checksums, open_file

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdock_hf3fs.library import Usrbio
    from kvdock_hf3fs.rings import Ring, Rings
    from kvdock_hf3fs.shared_memory import Iov
    from kvdock_segments import IORequest

_POLL_S = 0.25
"""How long one wait takes at most; the daemon is woken again after it."""

_LOST = (errno.ENOENT,)
_ELSEWHERE = (errno.EIO, errno.EFAULT)

Operation = tuple[int, int, int, int, int, int]
"""Row, iov, offset in it, bytes, descriptor, offset in the file."""


class UsrbioEngine(IOEngine):
    """Moves objects through rings.

    Args:
        chunk: Chunk size of the files.
        block: Bytes of an iov that one operation must stay within; 0 for all.
    """

    def __init__(
        self,
        usrbio: Usrbio,
        rings: Rings,
        iovs: Sequence[Iov],
        *,
        chunk: int,
        block: int = 0,
    ) -> None:
        self._usrbio = usrbio
        self._rings = rings
        self._iovs = sorted(iovs, key=lambda iov: iov.address)
        self._ranges = ranges_of(iovs)
        self._starts = np.array([iov.address for iov in self._iovs], np.int64)
        self._chunk = chunk
        self._block = block
        self._pid = os.getpid()

    @property
    def _forked(self) -> bool:
        """Return whether this is a child, which has no rings of its own."""
        return os.getpid() != self._pid

    def slot_bytes(self, object_bytes: int) -> int:
        """Fit slots to chunks; see `IOEngine.slot_bytes`."""
        return chunks.slot_bytes(object_bytes, self._chunk)

    def open_file(self, name: str, folder: int, *, create: bool) -> int:
        """Open a file and register its descriptor; see `IOEngine.open_file`."""
        flags = os.O_RDWR | (os.O_CREAT | os.O_EXCL if create else 0)
        fd = open_file(folder, name, flags)
        try:
            self._usrbio.register_fd(fd)
        except BaseException:
            os.close(fd)
            if create:
                with suppress(OSError):
                    os.unlink(name, dir_fd=folder)
            raise
        return fd

    def preallocate(self, token: int, nbytes: int) -> None:
        """Set a file's length, so that no host sees it grow."""
        os.ftruncate(token, nbytes)

    def close_file(self, token: int) -> None:
        """Deregister a descriptor, then close it.

        In the other order, the next file of this number would be the old one.
        """
        if not self._forked:
            self._usrbio.deregister_fd(token)
        os.close(token)

    def close(self) -> None:
        """Release the memory, and the rings if this was their last user."""
        if self._forked:
            return
        iovs, self._iovs = self._iovs, []
        self._rings.leave()
        IOVS.leave(iovs)

    def move(self, request: IORequest) -> IOResult:
        """Sum and write objects, or read and sum them."""
        if self._forked:
            result = IOResult.of(len(request))
            result.errors[:] = errno.ECHILD
            return result
        return move_within(self._ranges, request, self._move)

    def _move(self, request: IORequest) -> IOResult:
        result = IOResult.of(len(request))
        if not len(request):
            return result
        pool = self._rings.write if request.write else self._rings.read
        try:
            ring = pool.take(request.deadline_s)
        except OSError as error:
            result.errors[:] = error.errno or errno.EIO
            return result
        if ring is None:
            return result
        try:
            if request.write:
                result.checksums[:] = checksums(request.addresses, request.sizes)
            transfer = _Transfer(ring, request)
            transfer.run(self._operations(request), self._iovs)
        finally:
            pool.give_back(ring)
        _judge(request, transfer, result)
        return result

    def _operations(self, request: IORequest) -> list[Operation]:
        """Cut objects into operations: one for each piece, within a block.

        Writes are ordered by their place in the file: servers fill chunk by chunk.
        """
        addresses, sizes, offsets = request.addresses, request.sizes, request.offsets
        rows, file_of = np.arange(len(request)), request.file_of
        if request.write:
            rows = np.lexsort((offsets, file_of))
            addresses, sizes, offsets = addresses[rows], sizes[rows], offsets[rows]
            file_of = file_of[rows]
        files = np.asarray(request.files, np.int64)[file_of]
        pieces = sizes.shape[1]
        if pieces > 1:
            offsets = (offsets[:, None] + np.cumsum(sizes, axis=1) - sizes).ravel()
            rows, files = np.repeat(rows, pieces), np.repeat(files, pieces)
        addresses = addresses.ravel()
        at = np.searchsorted(self._starts, addresses, "right") - 1
        found = (rows, at, addresses - self._starts[at], sizes.ravel(), files, offsets)
        operations: list[Operation] = list(
            zip(*(column.tolist() for column in found), strict=True)
        )
        return list(self._cut(operations)) if self._block else operations

    def _cut(self, operations: list[Operation]) -> Iterator[Operation]:
        """Cut operations where blocks of registered memory end."""
        for row, iov, start, nbytes, fd, offset in operations:
            done = 0
            while done < nbytes:
                begin = start + done
                size = min(nbytes - done, self._block - begin % self._block)
                yield row, iov, begin, size, fd, offset + done
                done += size


def _judge(request: IORequest, transfer: _Transfer, result: IOResult) -> None:
    """Fill in what became of each object."""
    sizes = request.sizes
    result.nbytes[:] = transfer.moved
    whole = result.nbytes == (sizes.sum(axis=1) if sizes.shape[1] > 1 else sizes[:, 0])
    result.errors[whole] = 0
    for row, error in transfer.failed.items():
        result.errors[row] = error
    if request.write:
        return
    if transfer.failed or not whole.all():
        good = np.flatnonzero(whole & (result.errors == 0))
        result.checksums[good] = checksums(request.addresses[good], sizes[good])
    else:
        result.checksums[:] = checksums(request.addresses, sizes)


class _Transfer:
    """The operations of one call on its ring."""

    def __init__(self, ring: Ring, request: IORequest) -> None:
        self._ring = ring
        self._write = request.write
        self._deadline_s = request.deadline_s
        self.moved = [0] * len(request)
        self.failed: dict[int, int] = {}

    def run(self, operations: list[Operation], iovs: Sequence[Iov]) -> None:
        """Begin operations until the deadline; wait for all that were begun.

        However long that takes: until then the daemon may write into the memory of
        this call. A caller with a deadline leaves the call behind, and its memory
        stays leased (decision 15).
        """
        ring = self._ring
        slices = [iov.kept.inner for iov in iovs]
        done, count = 0, len(operations)
        while True:
            if done < count and time.monotonic() >= self._deadline_s:
                done = count
            if done < count:
                done = self._begin(operations, done, slices)
            flying = ring.in_flight
            if flying:
                # With more to begin, half of the ring; otherwise all of it.
                least = max(1, flying // 2) if done < count else flying
                for row, result in ring.collect(least, _POLL_S, self.moved):
                    self._fall_short(row, result)
            elif done >= count:
                return

    def _begin(
        self, operations: list[Operation], done: int, slices: Sequence[Any]
    ) -> int:
        """Fill the ring; return how many operations were begun or given up."""
        ring, failed, read = self._ring, self.failed, not self._write
        free, prepare = ring.free, ring.raw.prepare
        for operation in operations[done : done + len(free)]:
            row, iov, start, nbytes, fd, offset = operation
            if nbytes and row not in failed:
                ticket = free.pop()
                ticket.row, ticket.nbytes = row, nbytes
                try:
                    memory = slices[iov][start : start + nbytes]
                    prepare(memory, read, fd, offset, ticket)
                except OSError as error:
                    ticket.row = IDLE
                    free.append(ticket)
                    if error.errno == errno.EAGAIN and ring.in_flight:
                        break  # it takes fewer than it was made for
                    failed[row] = error.errno or errno.EIO
            done += 1
        if ring.in_flight:
            ring.submit()
        return done

    def _fall_short(self, row: int, result: int) -> None:
        """Note an operation that failed, or moved less than it was asked to."""
        if result >= 0:
            self.moved[row] += result
            # A read may be short at the end of a file; a write has no room.
            self.failed.setdefault(row, errno.ENOSPC if self._write else 0)
        else:
            self.failed[row] = _errno_of(-result)


def _errno_of(code: int) -> int:
    """Translate what the daemon says of an operation.

    An unreachable storage server is EIO as well, and to the store EIO means that the
    bytes are lost: it would drop pages that are there. An inode without a file is
    lost. EFAULT stands for memory of this process, which was checked before.
    """
    if code in _LOST:
        return errno.ESTALE
    if code in _ELSEWHERE or code not in errno.errorcode:
        return errno.EREMOTEIO
    return code

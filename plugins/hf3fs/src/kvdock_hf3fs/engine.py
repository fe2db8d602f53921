"""An I/O engine over USRBIO: pages move between rings' memory and 3FS."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.segments import UNREGISTERED, IOEngine, IOResult, checksums, open_file
from kvdock_hf3fs import chunks
from kvdock_hf3fs.shared_memory import IOVS, ranges_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdock.arrays import Int64Array
    from kvdock.segments import IORequest
    from kvdock_hf3fs.library import Usrbio
    from kvdock_hf3fs.rings import Ring, Rings
    from kvdock_hf3fs.shared_memory import Iov

_POLL_S = 0.25
"""How long one wait takes at most; the daemon is woken again after it."""

_LOST = (errno.ENOENT,)
_ELSEWHERE = (errno.EIO, errno.EFAULT)

Operation = tuple[int, int, int, int, int, int]
"""Row, iov, offset in it, bytes, descriptor, offset in the file."""


class UsrbioEngine(IOEngine):
    """Moves objects through rings.

    Args:
        usrbio: The library.
        rings: The rings, joined for this engine.
        iovs: The memory of the pool, held for this engine.
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
        """Whether this is a child, which has no rings of its own."""
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
        result = IOResult.of(len(request))
        if not len(request):
            return result
        if self._forked:
            result.errors[:] = errno.ECHILD
            return result
        known = self._ranges.covered_rows(request.addresses, request.sizes)
        whole = bool(known.all())
        rows = np.arange(len(request)) if whole else np.flatnonzero(known)
        if not whole:
            result.errors[~known] = UNREGISTERED
            if not len(rows):
                return result
        pool = self._rings.write if request.write else self._rings.read
        try:
            ring = pool.take(request.deadline_s)
        except OSError as error:
            result.errors[rows] = error.errno or errno.EIO
            return result
        if ring is None:
            return result
        if request.write:
            result.checksums[rows] = checksums(
                request.addresses[rows], request.sizes[rows]
            )
        try:
            outcome = _Transfer(ring, request.write, request.deadline_s, len(request))
            outcome.run(self._operations(request, rows), self._iovs)
        finally:
            pool.give_back(ring)
        self._judge(request, rows, outcome, result)
        return result

    def _operations(self, request: IORequest, rows: Int64Array) -> Iterator[Operation]:
        """Cut objects into operations: one for each piece, within a block.

        Writes are ordered by their place in the file: servers fill chunk by chunk.
        """
        if request.write:
            rows = rows[np.lexsort((request.offsets[rows], request.file_of[rows]))]
        addresses, sizes = request.addresses[rows], request.sizes[rows]
        pieces = sizes.shape[1]
        files = np.asarray(request.files, np.int64)[request.file_of[rows]]
        offsets = request.offsets[rows][:, None]
        if pieces > 1:
            offsets = offsets + np.cumsum(sizes, axis=1) - sizes
            rows, files = np.repeat(rows, pieces), np.repeat(files, pieces)
        addresses, sizes, offsets = addresses.ravel(), sizes.ravel(), offsets.ravel()
        at = np.searchsorted(self._starts, addresses, "right") - 1
        found = (rows, at, addresses - self._starts[at], sizes, files, offsets)
        operations: Iterator[Operation] = zip(
            *(column.tolist() for column in found), strict=True
        )
        return self._cut(operations) if self._block else operations

    def _cut(self, operations: Iterator[Operation]) -> Iterator[Operation]:
        """Cut operations where blocks of registered memory end."""
        for row, iov, start, nbytes, fd, offset in operations:
            done = 0
            while done < nbytes:
                begin = start + done
                size = min(nbytes - done, self._block - begin % self._block)
                yield row, iov, begin, size, fd, offset + done
                done += size

    def _judge(
        self,
        request: IORequest,
        rows: Int64Array,
        outcome: _Transfer,
        result: IOResult,
    ) -> None:
        """Fill in what became of each object."""
        moved = np.array(outcome.moved, np.int64)
        whole = rows[moved[rows] == request.sizes[rows].sum(axis=1)]
        result.nbytes[:] = moved
        result.errors[whole] = 0
        for row, error in outcome.failed.items():
            result.errors[row] = error
        if not request.write:
            good = whole[result.errors[whole] == 0]
            if len(good):
                result.checksums[good] = checksums(
                    request.addresses[good], request.sizes[good]
                )


@attrs.define(eq=False)
class _Transfer:
    """The operations of one call on its ring.

    Args:
        ring: The ring, for this call alone.
        write: The direction.
        deadline_s: When to begin nothing more.
        count: Number of objects.
    """

    ring: Ring
    write: bool
    deadline_s: float
    count: int
    moved: list[int] = attrs.field(init=False)
    failed: dict[int, int] = attrs.field(factory=dict, init=False)

    def __attrs_post_init__(self) -> None:
        self.moved = [0] * self.count

    def run(self, operations: Iterator[Operation], iovs: Sequence[Iov]) -> None:
        """Begin operations until the deadline; wait for all that were begun.

        However long that takes: until then the daemon may write into the memory of
        this call. A caller with a deadline leaves the call behind, and its memory
        stays leased (decision 15).
        """
        ring = self.ring
        left: Operation | None = next(operations, None)
        while True:
            if left and time.monotonic() >= self.deadline_s:
                left = None
            if left:
                left = self._begin(left, operations, iovs)
            if not ring.in_flight:
                if left is None:
                    return
                continue
            # With more to begin, half of the ring; otherwise all that is under way.
            least = ring.in_flight // 2 if left else ring.in_flight
            self._collect(max(1, least))

    def _begin(
        self,
        operation: Operation | None,
        more: Iterator[Operation],
        iovs: Sequence[Iov],
    ) -> Operation | None:
        """Fill the ring; return the first operation that did not fit."""
        free, prepare = self.ring.free, self.ring.raw.prepare
        slices = [iov.kept.inner for iov in iovs]
        read = not self.write
        while operation and free:
            row, iov, start, nbytes, fd, offset = operation
            if nbytes and row not in self.failed:
                ticket = free.pop()
                ticket.row, ticket.nbytes = row, nbytes
                try:
                    memory = slices[iov][start : start + nbytes]
                    prepare(memory, read, fd, offset, ticket)
                except OSError as error:
                    ticket.row = -1
                    free.append(ticket)
                    if error.errno == errno.EAGAIN and self.ring.in_flight:
                        break  # it takes fewer than it was made for
                    self.failed[row] = error.errno or errno.EIO
            operation = next(more, None)
        if self.ring.in_flight:
            self.ring.submit()
        return operation

    def _collect(self, least: int) -> None:
        moved = self.moved
        for row, wanted, result in self.ring.collect(least, _POLL_S):
            if result == wanted:
                moved[row] += result
            elif row >= 0:
                self._fall_short(row, result)

    def _fall_short(self, row: int, result: int) -> None:
        """Note an operation that failed, or moved less than it was asked to."""
        if result >= 0:
            self.moved[row] += result
            # A read may be short at the end of a file; a write has no room.
            self.failed.setdefault(row, errno.ENOSPC if self.write else 0)
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

"""The interface between the index and the I/O that moves bytes.

The store decides which slot an object gets; an I/O engine moves its bytes. One call
carries many objects as arrays, so that an engine can sort, merge and overlap them
as its library does best. Engines see files of pages only: index files are plain
files of the store. `PosixIOEngine` moves bytes with `preadv` and `pwritev`; others
use USRBIO rings or NIXL transfers.

An engine with positional I/O plans a request here: which objects share a system
call, and which calls a thread takes at once.
"""

from __future__ import annotations

import errno
import os
from abc import abstractmethod
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import attrs
import numpy as np
import xxhash

from kvdock.errors import KvdockError

if TYPE_CHECKING:
    from kvdock.arrays import Int32Array, Int64Array, UInt64Array
    from kvdock.batch import MemoryGate
    from kvdock.native import Movement
    from kvdock_segments.io_threads import Tasks

Token = Any
"""What `IOEngine.open_file` returns; the store keeps it and never looks into it."""

DEADLINE = errno.ETIMEDOUT
"""Error of an object that was not moved before the deadline, or before its call was
abandoned."""

UNREGISTERED = errno.EFAULT
"""Error of an object whose memory the engine cannot reach, because it was not
registered or is not mapped. The store answers REFUSED and keeps the page."""

EMPTY_CHECKSUM = xxhash.xxh3_64_intdigest(b"")
"""Checksum of an object without bytes."""


GRANULE = 512 << 10  # bytes of one call; half an L2 cache
MOST_GRANULE = 4 << 20  # bytes between two checks of the deadline
MOST_BUFFERS = 1024  # IOV_MAX of Linux
TASK = 1 << 20
"""Bytes that a thread takes at once."""


def granule_of(object_bytes: int) -> int:
    """Return the bytes that share a call: two large objects, or several small ones."""
    return max(GRANULE, min(2 * object_bytes, MOST_GRANULE))


@attrs.frozen(eq=False, kw_only=True)
class IORequest:
    """Objects to move between host memory and segments.

    Args:
        write: Whether they go from host memory to their segments, or back.
        files: What `IOEngine.open_file` returned, one for each segment.
        file_of: int64 (n,), index into `files` for each object.
        offsets: int64 (n,), where each object begins in its file.
        addresses: int64 (n, segments), host byte addresses.
        sizes: int64 (n, segments), bytes; 0 pads a row.
        deadline_s: When to begin nothing more, on `time.monotonic()`'s clock.
        gate: Says when host memory may be touched; None for as long as the call
            lasts. An engine whose backend promises nothing never gets one.
        expected: uint64 (n,), the checksums of what is read, or None. An engine
            that has an object elsewhere first does not copy one that differs, and
            one with a gate leaves no byte of it, as far as a call takes it whole.
        movement: The same places in the arrays of compiled code, in the order in which
            they are moved; None where none were prepared. Only `PosixIOEngine` knows
            what to do with it.
    """

    write: bool
    files: tuple[Token, ...]
    file_of: Int64Array = attrs.field(repr=False)
    offsets: Int64Array = attrs.field(repr=False)
    addresses: Int64Array = attrs.field(repr=False)
    sizes: Int64Array = attrs.field(repr=False)
    deadline_s: float = float("inf")
    gate: MemoryGate | None = None
    expected: UInt64Array | None = attrs.field(default=None, repr=False)
    movement: Movement | None = attrs.field(default=None, repr=False)

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self.offsets)

    def rows(self, which: Int64Array) -> IORequest:
        """Return the request for some of the objects."""
        return attrs.evolve(
            self,
            file_of=self.file_of[which],
            offsets=self.offsets[which],
            addresses=self.addresses[which],
            sizes=self.sizes[which],
            expected=None if self.expected is None else self.expected[which],
            movement=None,
        )


@attrs.frozen(eq=False)
class IOResult:
    """The result for each object of a request, at its position.

    Args:
        errors: int32 (n,), 0 or an errno; `DEADLINE` for too late,
            `UNREGISTERED` for memory that the engine cannot reach.
        nbytes: int64 (n,), bytes that moved; fewer at the end of a file.
        checksums: uint64 (n,), xxh3 of the object's bytes in host memory;
            meaningful only where all bytes moved.
    """

    errors: Int32Array
    nbytes: Int64Array
    checksums: UInt64Array

    @classmethod
    def of(cls, count: int) -> IOResult:
        """Return a result in which nothing has moved."""
        return cls(
            np.full(count, DEADLINE, np.int32),
            np.zeros(count, np.int64),
            np.zeros(count, np.uint64),
        )


class IOEngine(Protocol):
    """Moves bytes between host memory and files.

    Called from any thread, several at a time. An engine bounds its own
    parallelism, and does not let a short call wait behind a long one. It
    keeps no reference to host memory once a call has returned. What fails
    for an object is that object's errno; nothing else is raised.

    Inherit from it to get `preallocate` for tokens that are descriptors.
    """

    @abstractmethod
    def slot_bytes(self, object_bytes: int) -> int:
        """Return the bytes from one slot to the next; called at any time.

        Slots begin at multiples of it. An engine over blocks rounds up to a block;
        one over chunks returns a divisor or a multiple of a chunk. It must keep
        what it has returned: `slot_bytes(slot_bytes(n)) == slot_bytes(n)`. The
        store uses that to see whether this engine can fill a segment that another
        one made.

        Args:
            object_bytes: Size of the objects, at least 1.
        """

    @abstractmethod
    def open_file(self, name: str, folder: int, *, create: bool) -> Token:
        """Open a segment's data for reading and, where that can be, writing.

        Args:
            name: File name within the folder; never a link. See `open_file`
                in `kvdock_segments` for opening it safely.
            folder: Descriptor of the folder.
            create: Make the file; it must not be there yet.

        Returns:
            A token of any kind for `IORequest.files`.

        Raises:
            OSError: If it cannot be opened.
        """

    def preallocate(self, token: Token, nbytes: int) -> None:
        """Give a file all its space, before anything is written to it.

        Called once for a file that was created, and for one that is too short.
        The size that `os.stat` reports must be right afterwards.

        Args:
            token: What `open_file` returned: a descriptor, or override this.
            nbytes: Size of the file, a multiple of its slots.

        Raises:
            OSError: If there is no space.
        """
        preallocate_file(token, nbytes)

    @abstractmethod
    def close_file(self, token: Token) -> None:
        """Close a file; no request uses its token any more."""

    @abstractmethod
    def move(self, request: IORequest) -> IOResult:
        """Move objects from host memory to their segments, or back.

        Memory that was never registered must not be touched, not even to sum it.
        """

    @abstractmethod
    def close(self) -> None:
        """End threads and connections; the engine is not used again."""


def preallocate_file(fd: int, nbytes: int) -> None:
    """Give a file all its space at once, where the file system can.

    Raises:
        OSError: If there is no space.
    """
    if not nbytes:
        return
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as error:
        if error.errno != errno.EOPNOTSUPP:
            raise
        os.ftruncate(fd, nbytes)


def slot_bytes_of(engine: IOEngine, object_bytes: int) -> int:
    """Return the bytes from one slot to the next; 0 for objects without bytes.

    Args:
        engine: The engine.
        object_bytes: Size of the objects.

    Raises:
        KvdockError: If such slots could not hold the objects.
    """
    if not object_bytes:
        return 0
    slot_bytes = engine.slot_bytes(object_bytes)
    if slot_bytes < object_bytes or engine.slot_bytes(slot_bytes) != slot_bytes:
        raise KvdockError(
            f"{type(engine).__name__} gives objects of {object_bytes} bytes slots of "
            f"{slot_bytes} bytes, and those slots of {engine.slot_bytes(slot_bytes)}",
            fix="Its slot_bytes(n) must be at least n, and stay what it is when it "
            "is asked for again.",
        )
    return slot_bytes


def fits(engine: IOEngine, slot_bytes: int, object_bytes: int) -> bool:
    """Return whether an engine can write objects into slots that are there."""
    if not object_bytes:
        return not slot_bytes
    return slot_bytes >= object_bytes and engine.slot_bytes(slot_bytes) == slot_bytes


@attrs.frozen(eq=False)
class IOPlan:
    """A request sorted by file and offset, as lists for the inner loop."""

    write: bool
    order: Int64Array
    files: list[int]
    offsets: list[int]
    addresses: list[list[int]]
    sizes: list[list[int]]
    pieces: int
    totals: Int64Array
    runs: list[int]  # first object of each run, and the number of objects
    granule: int  # most bytes of a run
    deadline_s: float
    gate: MemoryGate | None
    expected: list[int] | None
    result: IOResult

    def abandoned(self) -> bool:
        """Return whether the memory has another use by now."""
        return self.gate is not None and self.gate.closed

    def enter(self) -> bool:
        """Begin to touch host memory; False if that is too late."""
        return self.gate is None or self.gate.enter()

    def leave(self) -> None:
        """End what `enter` began."""
        if self.gate is not None:
            self.gate.leave()

    def pieces_of(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Return host address and bytes of each piece of some objects."""
        rows = zip(self.addresses[start:stop], self.sizes[start:stop], strict=True)
        for addresses, sizes in rows:
            for at, size in zip(addresses, sizes, strict=True):
                if size:
                    yield at, size


def tasks_of(count: int, most_bytes: int) -> Tasks:
    """Cut rows into tasks of about a megabyte, given the bytes of the largest."""
    step = max(1, TASK // max(1, most_bytes))
    edges = [*range(0, count, step), count]
    return list(pairwise(edges))


def plan_request(request: IORequest, result: IOResult) -> tuple[IOPlan, Tasks]:
    """Sort objects by offset, join adjacent ones into runs, runs into tasks."""
    count = len(request)
    sizes = request.sizes
    if sizes.strides[0] == 0:
        totals = np.full(count, sizes[0].sum())  # one repeated row
    else:
        totals = sizes.sum(axis=1)
    files, offsets = request.file_of, request.offsets
    one_file = len(request.files) == 1
    order = np.argsort(offsets) if one_file else np.lexsort((offsets, files))
    files, offsets, ordered = files[order], offsets[order], totals[order]
    before = np.cumsum(ordered) - ordered
    most_bytes = int(ordered.max())
    granule_bytes = granule_of(most_bytes)
    most = max(1, MOST_BUFFERS // max(1, sizes.shape[1]))
    cut = np.ones(count, np.bool_)
    inner = cut[1:]
    np.not_equal(offsets[1:], (offsets + ordered)[:-1], out=inner)
    if 0 < most_bytes <= granule_bytes and most_bytes == ordered.min():
        most = min(most, granule_bytes // most_bytes)  # whole objects
    else:
        granule = before // granule_bytes
        inner |= granule[1:] != granule[:-1]
    if not one_file:
        inner |= files[1:] != files[:-1]
    if most_bytes > granule_bytes:
        # An object of several granules does not share a call with others.
        inner |= (ordered[1:] > granule_bytes) | (ordered[:-1] > granule_bytes)
    cut[::most] = True
    starts = np.flatnonzero(cut)
    task = before[starts] // max(TASK, granule_bytes)
    edges = [0, *(np.flatnonzero(task[1:] != task[:-1]) + 1).tolist(), len(starts)]
    handles = np.asarray(request.files, np.int64)
    expected = request.expected
    plan = IOPlan(
        write=request.write,
        order=order,
        files=handles[files].tolist(),
        offsets=offsets.tolist(),
        addresses=request.addresses[order].tolist(),
        sizes=request.sizes[order].tolist(),
        pieces=sizes.shape[1],
        totals=ordered,
        runs=[*starts.tolist(), len(order)],
        granule=granule_bytes,
        deadline_s=request.deadline_s,
        gate=request.gate,
        expected=None if expected is None else expected[order].tolist(),
        result=result,
    )
    return plan, list(pairwise(edges))

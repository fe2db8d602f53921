"""An I/O engine with positional I/O: `preadv` and `pwritev` on a few threads.

Bytes move directly between the pool's memory and the segment. The calling
thread works itself, and idle helper threads take tasks from it. So a small call
never queues behind a long one, and parallelism is bounded.

Tasks are cut so that the bytes are in the processor's cache for the checksum:
it is computed just before they are written, or just after they were read.

Where memory has a gate, compiled code reads and hashes bytes in the page cache while
it is open; all others are read into a bounce buffer of the thread first and copied from
there. What is written is hashed while it is open, before it is written: an object of
memory that changed meanwhile is not reported, and its checksum would not fit.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import xxhash

from kvdock import native
from kvdock.arrays import any_of
from kvdock.daemon_threads import DaemonThreads
from kvdock.synchronization import ProcessGuard
from kvdock_segments import paths
from kvdock_segments.bounce import BLOCK, BounceBuffer
from kvdock_segments.io import (
    DEADLINE,
    EMPTY_CHECKSUM,
    GRANULE,
    MOST_BUFFERS,
    MOST_GRANULE,
    TASK,
    IOEngine,
    IOPlan,
    IORequest,
    IOResult,
    granule_of,
    plan_request,
    tasks_of,
)
from kvdock_segments.io_threads import Tasks, Work, share

if TYPE_CHECKING:
    from kvdock.batch import MemoryGate

_FEW = 3  # views that are hashed one by one
_MEMORY_BLOCK = 512  # memory addresses of direct I/O
_CACHED: int = getattr(os, "RWF_NOWAIT", 0)
"""Reads what is in the page cache, and waits for no disk."""
_Move = Callable[[int, list[memoryview], int], int]
_Pieces = list[tuple[int, int]]
"""Host address and bytes of each piece of memory."""
_Hash = xxhash.xxh3_64


class PosixIOEngine(IOEngine):
    """Positional I/O on the calling thread and a few helper threads.

    Args:
        threads: Maximum number of threads that work on one call, the caller's included.
        direct: Bypass the page cache (O_DIRECT).
    """

    def __init__(self, threads: int = 2, *, direct: bool = False) -> None:
        self._direct = direct
        self._threads = max(1, threads)
        self._space = native.address_space()
        self._bounce = BounceBuffer(MOST_GRANULE)
        # One entry for each call under way: a list is changed without a lock.
        self._calls: list[None] = []
        self._helpers = DaemonThreads(self._threads - 1)
        self._guard = ProcessGuard()

    def slot_bytes(self, object_bytes: int) -> int:
        """Round up to a block; see `IOEngine.slot_bytes`."""
        block = BLOCK if self._direct else _MEMORY_BLOCK
        return -(-object_bytes // block) * block

    def open_file(self, name: str, folder: int, *, create: bool) -> int:
        """Open a file; see `IOEngine.open_file`."""
        return paths.open_data(folder, name, create=create, direct=self._direct)

    def close_file(self, token: int) -> None:
        """Close a file."""
        os.close(token)

    def close(self) -> None:
        """End the helper threads."""
        if not self._guard.forked:
            self._helpers.close()

    def move(self, request: IORequest) -> IOResult:
        """Sum and write objects, or read and sum them."""
        count, movement = len(request.offsets), request.movement
        if not count or movement is None:
            result = IOResult.of(count)
        else:
            errors, nbytes, sums = movement.errors, movement.nbytes, movement.sums
            result = IOResult(errors[:count], nbytes[:count], sums[:count])
        if not count:
            return result
        self._calls.append(None)
        try:
            compiled = native.library()
            gated = request.gate is not None and not request.write
            if compiled is None or (gated and self._leaves(request)):
                self._move_in_python(request, result)
            else:
                movement = movement or self._prepared(compiled, request, result)
                self._move_compiled(movement, request, result)
        finally:
            self._calls.pop()
        return result

    def _prepared(
        self, compiled: native.Library, request: IORequest, result: IOResult
    ) -> native.Movement:
        """Write down where the objects of a request lie, in the order of the places."""
        return native.Movement(
            compiled=compiled,
            order=np.lexsort((request.offsets, request.file_of)),
            files=np.asarray(request.files, np.int64)[request.file_of],
            offsets=request.offsets,
            sums=result.checksums,
            nbytes=result.nbytes,
            errors=result.errors,
        )

    def _move_compiled(
        self, movement: native.Movement, request: IORequest, result: IOResult
    ) -> None:
        """Move objects in compiled code; what it leaves is moved in Python."""
        gate, write, sizes = request.gate, request.write, request.sizes
        count = len(request.offsets)
        if len(sizes) == 1 or not sizes.strides[0]:
            most = sum(sizes[0].tolist())
        else:
            most = int(sizes.sum(axis=1).max())
        movement.begin(
            request.addresses,
            sizes,
            write=0 if not write else 1 if gate is None else 2,
            granule=granule_of(most),
            block=BLOCK if self._direct else 0,
            flags=0 if write or gate is None else _CACHED,
            deadline_s=request.deadline_s,
            expected=None if gate is None else request.expected,
        )
        work: Work = movement.move
        if gate is not None:
            work = partial(_write_gated if write else _read_gated, movement, gate)
        if count * most <= TASK:
            work(0, count)
        else:
            self._share(work, tasks_of(count, most))
        if not any_of(result.errors):
            return
        left = np.flatnonzero(result.errors == native.LEFT)
        if len(left):
            rest = IOResult.of(len(left))
            self._move_in_python(request.rows(left), rest)
            result.errors[left] = rest.errors
            result.nbytes[left] = rest.nbytes
            result.checksums[left] = rest.checksums

    def _leaves(self, request: IORequest) -> bool:
        """Return whether a read through a gate is left to Python as a whole."""
        # Nothing may wait for a disk while a gate is open.
        return self._direct or not _CACHED or request.expected is None

    def _move_in_python(self, request: IORequest, result: IOResult) -> None:
        plan, tasks = plan_request(request, result)
        self._share(partial(self._work, plan), tasks)

    def _share(self, work: Work, tasks: Tasks) -> None:
        """Do tasks on this thread and on helpers, unless other calls use those."""
        alone = not self._direct and len(self._calls) >= self._threads
        if len(tasks) == 1 or self._threads == 1 or alone:
            work(tasks[0][0], tasks[-1][1])
        else:
            share(self._pool(), work, tasks)

    def _pool(self) -> DaemonThreads:
        if self._guard.forked:
            # A child inherits the object of the pool and none of its threads.
            self._helpers = DaemonThreads(self._threads - 1)
            self._guard = ProcessGuard()
        return self._helpers

    def _work(self, plan: IOPlan, first: int, last: int) -> None:
        """Move the runs from first up to, not including, last."""
        rows: list[int] = []
        sums: list[int] = []
        for number in range(first, last):
            if time.monotonic() >= plan.deadline_s or plan.abandoned():
                break
            start, stop = plan.runs[number], plan.runs[number + 1]
            found = self._together(plan, start, stop)
            if found is None:
                for one in range(start, stop):
                    self._single(plan, one)
            else:
                rows += range(start, stop)
                sums += found
        if rows:
            at = plan.order[rows]
            plan.result.checksums[at] = sums
            plan.result.nbytes[at] = plan.totals[rows]
            plan.result.errors[at] = 0

    def _together(self, plan: IOPlan, start: int, stop: int) -> list[int] | None:
        """Move adjacent objects in one call; return their checksums.

        Returns:
            None if they are too large for one call, or the call fails.
        """
        if plan.gate is not None and not plan.write:
            return self._together_gated(plan, start, stop)
        views = self._views(plan, start, stop)
        wanted = sum(map(len, views))
        if wanted > plan.granule or len(views) > MOST_BUFFERS:
            return None
        if (self._direct and not _aligned(views, wanted)) or not plan.enter():
            return None
        try:
            sums = self._sums(plan, start, stop, views) if plan.write else []
        finally:
            plan.leave()
        call: _Move = os.pwritev if plan.write else os.preadv
        try:
            done = call(plan.files[start], views, plan.offsets[start])
        except OSError:
            return None
        if done != wanted or plan.abandoned():
            return None
        return sums if plan.write else self._sums(plan, start, stop, views)

    def _views(self, plan: IOPlan, start: int, stop: int) -> list[memoryview]:
        space = self._space
        addresses, sizes = plan.addresses[start:stop], plan.sizes[start:stop]
        if plan.pieces == 1:
            return [
                space[at : at + size]
                for (at,), (size,) in zip(addresses, sizes, strict=True)
            ]
        return [
            space[at : at + size]
            for row, each in zip(addresses, sizes, strict=True)
            for at, size in zip(row, each, strict=True)
            if size
        ]

    def _together_gated(self, plan: IOPlan, start: int, stop: int) -> list[int] | None:
        """Read adjacent objects into the bounce buffer, and copy those that are right.

        Returns:
            As `_together`; also None once the gate is closed.
        """
        totals = plan.totals[start:stop].tolist()
        wanted = sum(totals)
        if wanted > plan.granule:
            return None
        gate = plan.gate
        bounce, file, offset = self._bounce, plan.files[start], plan.offsets[start]
        try:
            if bounce.read(file, offset, wanted, direct=self._direct) != wanted:
                return None
        except OSError:
            return None
        sums = bounce.digests(totals)
        if plan.expected is None or sums == plan.expected[start:stop]:
            open_ = bounce.scatter(gate, 0, plan.pieces_of(start, stop))
            return sums if open_ else None
        begin = 0
        for row, size in enumerate(totals):
            right = sums[row] == plan.expected[start + row]
            pieces = plan.pieces_of(start + row, start + row + 1)
            if right and not bounce.scatter(gate, begin, pieces):
                return None
            begin += size
        return sums

    def _sums(
        self, plan: IOPlan, start: int, stop: int, views: list[memoryview]
    ) -> list[int]:
        if plan.pieces == 1 and len(views) <= _FEW:
            return [xxhash.xxh3_64_intdigest(view) for view in views]
        addresses, sizes = plan.addresses[start:stop], plan.sizes[start:stop]
        found = native.checksums(np.array(addresses), np.array(sizes))
        sums: list[int] = found.tolist()
        return sums

    def _single(self, plan: IOPlan, row: int) -> None:
        """Move one object in granules; an error is the outcome of this object."""
        if plan.abandoned():
            return
        at = plan.order[row]
        state = xxhash.xxh3_64()
        done = 0
        error = 0
        move = self._write if plan.write else self._read
        # What passes through the bounce buffer may have any number of pieces, and has
        # to be cut at whole blocks for direct I/O.
        gated = plan.gate is not None and not plan.write
        most = len(plan.sizes[row]) if gated or self._direct else MOST_BUFFERS
        room = plan.granule if gated else GRANULE
        try:
            for pieces in _granules(plan.addresses[row], plan.sizes[row], room, most):
                got = move(plan, row, done, pieces, state)
                done += got
                if got != sum(size for _, size in pieces):
                    error = errno.ENOSPC if plan.write else 0
                    break
            if plan.abandoned():
                error = DEADLINE
        except OSError as failure:
            error = failure.errno or errno.EIO
        plan.result.nbytes[at] = done
        plan.result.errors[at] = error
        plan.result.checksums[at] = state.intdigest() if done else EMPTY_CHECKSUM

    def _write(
        self, plan: IOPlan, row: int, done: int, pieces: _Pieces, state: _Hash
    ) -> int:
        """Hash a granule, `done` bytes into its object, then write it."""
        file, offset = plan.files[row], plan.offsets[row] + done
        views = [self._space[at : at + size] for at, size in pieces]
        wanted = sum(map(len, views))
        aligned = not self._direct or _aligned(views, wanted)
        if not plan.enter():
            return 0
        try:
            if aligned:
                for view in views:
                    state.update(view)
            else:
                self._bounce.gather(pieces)
        finally:
            plan.leave()
        if aligned:
            return _move_all(os.pwritev, file, views, offset, wanted)
        state.update(self._bounce.view[:wanted])
        return self._bounce.write(file, offset, wanted)

    def _read(
        self, plan: IOPlan, row: int, done: int, pieces: _Pieces, state: _Hash
    ) -> int:
        """Read a granule, then hash it; return the bytes, fewer at a file's end.

        Memory with a gate gets nothing of an object of one granule that is wrong.
        """
        file, offset = plan.files[row], plan.offsets[row] + done
        views = [self._space[at : at + size] for at, size in pieces]
        wanted = sum(map(len, views))
        if plan.gate is None and (not self._direct or _aligned(views, wanted)):
            got = _move_all(os.preadv, file, views, offset, wanted)
            for view in views:
                state.update(view)
            return got
        got = self._bounce.read(file, offset, wanted, direct=self._direct)
        state.update(self._bounce.view[:got])
        right = plan.expected[row] if plan.expected else None
        if wanted == plan.totals[row] and right not in (None, state.intdigest()):
            return got
        if got == wanted and not self._bounce.scatter(plan.gate, 0, pieces):
            return 0
        return got


def _read_gated(
    movement: native.Movement, gate: MemoryGate, first: int, stop: int
) -> None:
    """Read rows from the page cache while a gate is open; leave all others."""
    if gate.closed:
        return
    # Asked before the gate is entered: nothing waits for a disk while it is open.
    movement.leave_uncached(first, stop)
    if gate.enter():
        try:
            movement.move(first, stop)
        finally:
            gate.leave()


def _write_gated(
    movement: native.Movement, gate: MemoryGate, first: int, stop: int
) -> None:
    """Write rows as they were while a gate was open; report none if it is closed."""
    if not gate.enter():
        return
    try:
        movement.hash_rows(first, stop)
    finally:
        gate.leave()
    movement.move(first, stop)
    if gate.closed:
        movement.errors[movement.order[first:stop]] = DEADLINE


def _granules(
    addresses: list[int], sizes: list[int], granule: int, most: int
) -> list[_Pieces]:
    """Cut an object's pieces into groups of so many bytes and `most` pieces."""
    groups: list[_Pieces] = [[]]
    room = granule
    for start, size in zip(addresses, sizes, strict=True):
        at, end = start, start + size
        while at < end:
            if not room or len(groups[-1]) == most:
                groups.append([])
                room = granule
            step = min(end - at, room)
            groups[-1].append((at, step))
            at += step
            room -= step
    return groups


def _move_all(
    call: _Move, file: int, views: list[memoryview], offset: int, wanted: int
) -> int:
    """Move a group of pieces; return the bytes, fewer at a file's end."""
    got = 0
    while got < wanted:
        more = call(file, views, offset + got)
        if not more:
            break
        got += more
        if got < wanted:
            views = _after(views, more)
    return got


def _aligned(views: list[memoryview], wanted: int) -> bool:
    if wanted % BLOCK or len(views) > MOST_BUFFERS:
        return False
    return all(
        not (np.frombuffer(view, np.uint8).ctypes.data | len(view)) % _MEMORY_BLOCK
        for view in views
    )


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """Return what is left of pieces after so many bytes."""
    left = []
    for view in views:
        skip = min(done, len(view))
        done -= skip
        if skip < len(view):
            left.append(view[skip:])
    return left

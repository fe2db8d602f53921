"""An I/O engine with positional I/O: `preadv` and `pwritev` on a few threads.

Bytes move directly between the pool's memory and the segment. The calling
thread works itself, and idle helper threads take tasks from it. So a small call
never queues behind a long one, and parallelism is bounded.

Tasks are cut so that the bytes are in the processor's cache for the checksum:
it is computed just before they are written, or just after they were read.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from itertools import accumulate, pairwise
from queue import SimpleQueue
from typing import TYPE_CHECKING

import attrs
import numpy as np
import xxhash

from kvdock.segments import paths
from kvdock.segments.io import (
    EMPTY_CHECKSUM,
    IOEngine,
    IORequest,
    IOResult,
    address_space,
)
from kvdock.synchronization import ProcessGuard

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array

_GRANULE = 512 << 10  # bytes between two checks of the deadline; half an L2 cache
_TASK = 1 << 20  # bytes that a helper takes at once
_MOST_BUFFERS = 1024  # IOV_MAX of Linux
_BLOCK = 4096  # file offsets of direct I/O
_MEMORY_BLOCK = 512  # memory addresses of direct I/O
_Move = Callable[[int, list[memoryview], int], int]
_Calls = SimpleQueue[tuple[Future[None], Callable[[], None]] | None]


class DaemonThreads:
    """Daemon threads, each started when it is first needed.

    Args:
        most: Maximum number of threads.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._calls: _Calls = SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()

    def submit(self, call: Callable[[], None]) -> Future[None]:
        """Queue a call; the threads run calls in order of submission.

        Raises:
            RuntimeError: If no thread can be started.
        """
        with self._lock:
            if len(self._threads) < self._most:
                thread = threading.Thread(
                    target=_serve, args=(self._calls,), name="kvdock-io", daemon=True
                )
                thread.start()
                self._threads.append(thread)
        future: Future[None] = Future()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """End the threads and wait for them; a later call starts new ones."""
        with self._lock:
            ending, self._threads = self._threads, []
        for _ in ending:
            self._calls.put(None)
        for thread in ending:
            thread.join()


def _serve(calls: _Calls) -> None:
    while asked := calls.get():
        future, call = asked
        if future.set_running_or_notify_cancel():
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                future.set_exception(error)
            else:
                future.set_result(None)
        # A call references a batch and its memory.
        del asked, future, call


@attrs.frozen(eq=False)
class _IOPlan:
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
    deadline_s: float
    result: IOResult


class PosixIOEngine(IOEngine):
    """Positional I/O on the calling thread and a few helper threads.

    Args:
        threads: Maximum number of threads that work on one call, the caller's included.
        direct: Bypass the page cache (O_DIRECT).
    """

    def __init__(self, threads: int = 2, *, direct: bool = False) -> None:
        self._direct = direct
        self._threads = max(1, threads)
        self._space = address_space()
        self._helpers = DaemonThreads(self._threads - 1)
        self._guard = ProcessGuard()

    def slot_bytes(self, object_bytes: int) -> int:
        """Round up to a block; see `IOEngine.slot_bytes`."""
        block = _BLOCK if self._direct else _MEMORY_BLOCK
        return -(-object_bytes // block) * block

    def open_file(self, name: str, folder: int, *, create: bool) -> int:
        """Open a file; see `IOEngine.open_file`."""
        flags = os.O_RDWR
        flags |= os.O_CREAT | os.O_EXCL if create else 0
        flags |= os.O_DIRECT if self._direct else 0
        try:
            return paths.open_file(folder, name, flags)
        except OSError as error:
            if error.errno != errno.EROFS or create:
                raise
        # A disk with errors is often remounted read-only; its pages are still good.
        return paths.open_file(folder, name, flags & ~os.O_RDWR)

    def close_file(self, token: int) -> None:
        """Close a file."""
        os.close(token)

    def close(self) -> None:
        """End the helper threads."""
        if not self._guard.forked:
            self._helpers.close()

    def move(self, request: IORequest) -> IOResult:
        """Sum and write objects, or read and sum them."""
        result = IOResult.of(len(request))
        if not len(request):
            return result
        plan, tasks = _plan(request, result)
        if len(tasks) == 1 or self._threads == 1:
            for first, last in tasks:
                self._work(plan, first, last)
            return result
        todo = deque(tasks)
        helpers = self._pool()
        futures: list[Future[None]] = []
        try:
            with suppress(RuntimeError):  # no thread can be started: do it all here
                for _ in range(min(self._threads, len(tasks)) - 1):
                    # Not in one expression: helpers that began before a failure count.
                    help_out = partial(self._drain, plan, todo)
                    futures.append(helpers.submit(help_out))
            self._drain(plan, todo)
        finally:
            # A helper that begins late must not find a task on the caller's memory.
            todo.clear()
            wait([future for future in futures if not future.cancel()])
        for future in futures:
            if not future.cancelled():
                future.result()
        return result

    def _pool(self) -> DaemonThreads:
        if self._guard.forked:
            # A child inherits the object of the pool and none of its threads.
            self._helpers = DaemonThreads(self._threads - 1)
            self._guard = ProcessGuard()
        return self._helpers

    def _drain(self, plan: _IOPlan, todo: deque[tuple[int, int]]) -> None:
        while True:
            try:
                first, last = todo.popleft()
            except IndexError:
                return
            self._work(plan, first, last)

    def _work(self, plan: _IOPlan, first: int, last: int) -> None:
        """Move the runs from first up to, not including, last."""
        rows: list[int] = []
        sums: list[int] = []
        for number in range(first, last):
            if time.monotonic() >= plan.deadline_s:
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

    def _together(self, plan: _IOPlan, start: int, stop: int) -> list[int] | None:
        """Move adjacent objects in one call; return their checksums.

        Returns:
            None if they are too large for one call, or the call fails.
        """
        space = self._space
        addresses, sizes = plan.addresses[start:stop], plan.sizes[start:stop]
        if plan.pieces == 1:
            views = [
                space[at : at + size]
                for (at,), (size,) in zip(addresses, sizes, strict=True)
            ]
        else:
            views = [
                space[at : at + size]
                for row, each in zip(addresses, sizes, strict=True)
                for at, size in zip(row, each, strict=True)
                if size
            ]
        wanted = sum(map(len, views))
        if wanted > _GRANULE or len(views) > _MOST_BUFFERS:
            return None
        if self._direct and not _aligned(views, wanted):
            return None
        sums = self._sums(plan, start, stop, views) if plan.write else []
        call: _Move = os.pwritev if plan.write else os.preadv
        try:
            done = call(plan.files[start], views, plan.offsets[start])
        except OSError:
            return None
        if done != wanted:
            return None
        return sums if plan.write else self._sums(plan, start, stop, views)

    def _sums(
        self, plan: _IOPlan, start: int, stop: int, views: list[memoryview]
    ) -> list[int]:
        if plan.pieces == 1:
            return [xxhash.xxh3_64_intdigest(view) for view in views]
        sums = []
        pieces = iter(views)
        for row in range(start, stop):
            state = xxhash.xxh3_64()
            for size in plan.sizes[row]:
                if size:
                    state.update(next(pieces))
            sums.append(state.intdigest())
        return sums

    def _single(self, plan: _IOPlan, row: int) -> None:
        """Move one object in granules; an error is the outcome of this object."""
        at = plan.order[row]
        state = xxhash.xxh3_64()
        done = 0
        error = 0
        try:
            for views in self._granules(plan.addresses[row], plan.sizes[row]):
                wanted = sum(map(len, views))
                if plan.write:
                    for view in views:
                        state.update(view)
                got = self._move(plan, row, views, done, wanted)
                done += got
                if got != wanted:
                    error = errno.ENOSPC if plan.write else 0
                    break
                if not plan.write:
                    for view in views:
                        state.update(view)
        except OSError as failure:
            error = failure.errno or errno.EIO
        plan.result.nbytes[at] = done
        plan.result.errors[at] = error
        plan.result.checksums[at] = state.intdigest() if done else EMPTY_CHECKSUM

    def _granules(
        self, addresses: list[int], sizes: list[int]
    ) -> list[list[memoryview]]:
        """Cut an object's pieces into groups for one system call each."""
        groups: list[list[memoryview]] = [[]]
        room = _GRANULE
        for start, size in zip(addresses, sizes, strict=True):
            at, end = start, start + size
            while at < end:
                if not room or len(groups[-1]) == _MOST_BUFFERS:
                    groups.append([])
                    room = _GRANULE
                step = min(end - at, room)
                groups[-1].append(self._space[at : at + step])
                at += step
                room -= step
        return groups

    def _move(
        self, plan: _IOPlan, row: int, views: list[memoryview], done: int, wanted: int
    ) -> int:
        """Move a group of pieces; return the bytes, fewer at a file's end."""
        file, offset = plan.files[row], plan.offsets[row] + done
        if self._direct and not _aligned(views, wanted):
            return self._bounce(plan, file, views, offset, wanted)
        call: _Move = os.pwritev if plan.write else os.preadv
        got = 0
        while got < wanted:
            more = call(file, views, offset + got)
            if not more:
                break
            got += more
            if got < wanted:
                views = _after(views, more)
        return got

    def _bounce(
        self,
        plan: _IOPlan,
        file: int,
        views: list[memoryview],
        offset: int,
        wanted: int,
    ) -> int:
        """Move through aligned memory, in whole blocks of the file."""
        length = -(-wanted // _BLOCK) * _BLOCK
        # Anonymous memory begins at a page and is freed with the array.
        aligned = np.frombuffer(mmap.mmap(-1, length), np.uint8)
        ends = list(accumulate(map(len, views)))
        if plan.write:
            for view, end in zip(views, ends, strict=True):
                aligned[end - len(view) : end] = np.frombuffer(view, np.uint8)
            return min(wanted, os.pwrite(file, aligned.data, offset))
        got = min(wanted, os.preadv(file, [aligned.data], offset))
        for view, end in zip(views, ends, strict=True):
            np.frombuffer(view, np.uint8)[:] = aligned[end - len(view) : end]
        return got


def _aligned(views: list[memoryview], wanted: int) -> bool:
    if wanted % _BLOCK:
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


def _plan(
    request: IORequest, result: IOResult
) -> tuple[_IOPlan, list[tuple[int, int]]]:
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
    granule = before // _GRANULE
    cut = np.ones(count, np.bool_)
    inner = cut[1:]
    np.not_equal(offsets[1:], (offsets + ordered)[:-1], out=inner)
    inner |= granule[1:] != granule[:-1]
    if not one_file:
        inner |= files[1:] != files[:-1]
    if ordered.max() > _GRANULE:
        # An object of several granules does not share a call with others.
        inner |= (ordered[1:] > _GRANULE) | (ordered[:-1] > _GRANULE)
    most = max(1, _MOST_BUFFERS // max(1, sizes.shape[1]))
    cut[::most] = True
    starts = np.flatnonzero(cut)
    task = before[starts] // _TASK
    edges = [0, *(np.flatnonzero(task[1:] != task[:-1]) + 1).tolist(), len(starts)]
    handles = np.asarray(request.files, np.int64)
    plan = _IOPlan(
        write=request.write,
        order=order,
        files=handles[files].tolist(),
        offsets=offsets.tolist(),
        addresses=request.addresses[order].tolist(),
        sizes=request.sizes[order].tolist(),
        pieces=sizes.shape[1],
        totals=ordered,
        runs=[*starts.tolist(), len(order)],
        deadline_s=request.deadline_s,
        result=result,
    )
    return plan, list(pairwise(edges))

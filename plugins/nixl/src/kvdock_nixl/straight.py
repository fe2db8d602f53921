"""Move objects between their own memory and their files.

A request is cut into parts, and two are under way at a time, so that the device
has work while a part is summed. NIXL fails a transfer as a whole and does not say
which object failed: then its objects move again one by one, and for one that
fails again the kernel says how, and after how many bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import attrs
import numpy as np

from kvdock.arrays import BoolArray, Int64Array, UInt64Array
from kvdock_nixl.agents import MOST_DESCRIPTORS, TransferError
from kvdock_nixl.call import BLOCK, Call

_MEMORY_BLOCK = 512  # memory addresses of direct I/O


def reachable(call: Call) -> BoolArray:
    """Return which objects need no bounce buffer, bool (n,)."""
    request = call.request
    count, pieces = request.sizes.shape
    if pieces > MOST_DESCRIPTORS:
        return np.zeros(count, np.bool_)
    if not call.direct:
        return np.ones(count, np.bool_)
    odd = (request.addresses % _MEMORY_BLOCK) | (request.sizes % BLOCK)
    odd[request.sizes == 0] = 0
    aligned: BoolArray = ~odd.any(axis=1) & (request.offsets % BLOCK == 0)
    return aligned


def move_straight(call: Call, rows: Int64Array) -> None:
    """Move objects that lie as the device needs it."""
    for failed in _move(call, rows):
        for row in failed.tolist():
            if call.late:
                return
            one, offset = np.array([row], np.int64), int(call.request.offsets[row])
            if len(failed) > 1 and not _move(call, one):
                continue
            if call.ask_kernel(row, call.pieces(row), offset):
                call.sum(one)


@attrs.frozen(eq=False)
class _Part:
    """Objects that move in one transfer.

    Args:
        rows: int64 (n,), their positions in the request.
        memory: uint64 (m, 3), as for `Agent.begin`.
        file: uint64 (m, 3), the same.
    """

    rows: Int64Array
    memory: UInt64Array
    file: UInt64Array


def _move(call: Call, rows: Int64Array) -> list[Int64Array]:
    """Move objects; return those of each transfer that failed."""
    pipeline = _Pipeline(call, under_way=2 if call.direct else 1)
    try:
        for part in _parts(call, rows):
            if not pipeline.begin(part):
                break
    finally:
        pipeline.drain()
    return pipeline.failed


@attrs.define(eq=False)
class _Pipeline:
    """Transfers of one request that are under way, oldest first."""

    call: Call
    under_way: int
    failed: list[Int64Array] = attrs.field(factory=list)
    _running: deque[tuple[_Part, Any]] = attrs.field(factory=deque)

    def begin(self, part: _Part) -> bool:
        """Begin one more transfer; return False if it is too late for that."""
        if len(self._running) == self.under_way:
            self._finish()
        if self.call.late:
            return False
        try:
            # With a transfer under way, do not wait for others to end theirs: they
            # may wait for this one.
            handle = self._try(part, 0.0) if self._running else None
            if handle is None:
                self.drain()
                handle = self._try(part, self.call.request.deadline_s)
        except TransferError:
            self.failed.append(part.rows)
            return True
        if handle is None:
            return False
        self._running.append((part, handle))
        if self.call.request.write:
            self.call.sum(part.rows)  # while they are written
        return True

    def _try(self, part: _Part, until_s: float) -> Any | None:  # noqa: ANN401 - NIXL's own
        write = self.call.request.write
        return self.call.agent.begin(part.memory, part.file, until_s, write=write)

    def drain(self) -> None:
        """Wait for all transfers."""
        while self._running:
            self._finish()

    def _finish(self) -> None:
        part, handle = self._running.popleft()
        try:
            self.call.agent.finish(handle)
        except TransferError:
            self.failed.append(part.rows)
        else:
            self.call.moved(part.rows)
            if not self.call.request.write:
                self.call.sum(part.rows)


def _parts(call: Call, rows: Int64Array) -> Iterator[_Part]:
    """Cut objects into parts, in the order of the request."""
    if not len(rows):
        return
    totals = call.totals[rows]
    number = (np.cumsum(totals) - totals) // call.part_bytes
    cut = np.ones(len(rows), np.bool_)
    np.not_equal(number[1:], number[:-1], out=cut[1:])
    cut[:: max(1, MOST_DESCRIPTORS // call.request.sizes.shape[1])] = True
    for first, last in pairwise([*np.flatnonzero(cut).tolist(), len(rows)]):
        yield _part(call, rows[first:last])


def _part(call: Call, rows: Int64Array) -> _Part:
    request = call.request
    sizes, addresses = request.sizes[rows], request.addresses[rows]
    offsets, fds = request.offsets[rows, None], call.fds[rows, None]
    if sizes.shape[1] > 1:
        offsets = offsets + np.cumsum(sizes, axis=1) - sizes
        there = sizes > 0
        fds = np.broadcast_to(fds, sizes.shape)[there]
        sizes, addresses, offsets = sizes[there], addresses[there], offsets[there]
    return _Part(
        rows,
        descriptors(addresses.ravel(), sizes.ravel(), 0),
        descriptors(offsets.ravel(), sizes.ravel(), fds.ravel()),
    )


def descriptors(
    starts: Int64Array, sizes: Int64Array, devices: Int64Array | int
) -> UInt64Array:
    """Return what NIXL wants of memory or files, uint64 (n, 3)."""
    found = np.empty((len(starts), 3), np.uint64)
    found[:, 0], found[:, 1], found[:, 2] = starts, sizes, devices
    return found

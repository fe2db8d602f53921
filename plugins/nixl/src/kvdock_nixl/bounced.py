"""Move objects through aligned, registered memory, where O_DIRECT needs that."""

from __future__ import annotations

import ctypes
import errno
from itertools import pairwise

import attrs
import numpy as np

from kvdock.arrays import Int64Array
from kvdock_nixl.agents import TransferError
from kvdock_nixl.call import BLOCK, PART_BYTES, Call
from kvdock_nixl.straight import descriptors


@attrs.frozen
class _Lane:
    """The place of one object in a buffer.

    Args:
        row: Its position in the request.
        address: Where its blocks begin in the buffer.
        nbytes: Bytes of its blocks.
        offset: Where they begin in its file.
        skip: Bytes of its first block that lie before it.
    """

    row: int
    address: int
    nbytes: int
    offset: int
    skip: int


def move_bounced(call: Call, rows: Int64Array) -> None:
    """Move objects through buffers, many small ones at a time."""
    block = BLOCK if call.direct else 1
    skips = call.request.offsets[rows] % block
    if call.request.write and skips.any():
        # Whole blocks would replace the end of the slot before.
        call.result.errors[rows[skips > 0]] = errno.EINVAL
        rows = rows[skips == 0]
        skips = skips[skips == 0]
    if not len(rows):
        return
    offsets = call.request.offsets[rows] - skips
    lengths = -(-(skips + call.totals[rows]) // block) * block
    ends = np.cumsum(lengths)
    number = (ends - lengths) // PART_BYTES
    edges = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), len(rows)]
    for first, last in pairwise(edges):
        if call.late:
            return
        starts = ends[first:last] - lengths[first:last]
        begin, end = int(starts[0]), int(ends[last - 1])
        with call.pair.bounce.borrow(end - begin, call.request.deadline_s) as buffer:
            if buffer is None:
                return
            columns = (
                rows[first:last],
                starts - begin + buffer.address,
                lengths[first:last],
                offsets[first:last],
                skips[first:last],
            )
            lists = (column.tolist() for column in columns)
            _move(call, [_Lane(*lane) for lane in zip(*lists, strict=True)])


def _move(call: Call, lanes: list[_Lane]) -> None:
    write = call.request.write
    if write:
        for lane in lanes:
            _gather(call, lane)
    done = lanes
    if not _transfer(call, lanes):
        done = [lane for lane in lanes if not call.late and _alone(call, lane, lanes)]
    if not write:
        for lane in done:
            _scatter(call, lane)
    if done:
        moved = np.array([lane.row for lane in done], np.int64)
        call.moved(moved)
        call.sum(moved)


def _alone(call: Call, lane: _Lane, lanes: list[_Lane]) -> bool:
    """Move one object of a failed transfer; return whether NIXL could."""
    if len(lanes) > 1 and _transfer(call, [lane]):
        return True
    blocks = [(lane.address, lane.nbytes)]
    if call.ask_kernel(lane.row, blocks, lane.offset, lane.skip):
        if not call.request.write:
            _scatter(call, lane)
        call.sum(np.array([lane.row], np.int64))
    return False


def _transfer(call: Call, lanes: list[_Lane]) -> bool:
    """Move blocks between a buffer and files; return whether all of them moved."""
    addresses, sizes, offsets = (
        np.array(column, np.int64)
        for column in zip(
            *((lane.address, lane.nbytes, lane.offset) for lane in lanes), strict=True
        )
    )
    fds = call.fds[[lane.row for lane in lanes]]
    memory, file = descriptors(addresses, sizes, 0), descriptors(offsets, sizes, fds)
    try:
        handle = call.agent.begin(
            memory, file, call.request.deadline_s, write=call.request.write
        )
        if handle is None:
            return False
        call.agent.finish(handle)
    except TransferError:
        return False
    return True


def _gather(call: Call, lane: _Lane) -> None:
    """Copy an object into its lane, and zeros behind it."""
    at = lane.address
    for address, size in call.pieces(lane.row):
        ctypes.memmove(at, address, size)
        at += size
    ctypes.memset(at, 0, lane.address + lane.nbytes - at)


def _scatter(call: Call, lane: _Lane) -> None:
    """Copy an object out of its lane."""
    at = lane.address + lane.skip
    for address, size in call.pieces(lane.row):
        ctypes.memmove(address, at, size)
        at += size

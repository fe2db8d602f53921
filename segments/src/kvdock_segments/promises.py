"""How many bytes of a namespace are promised until when, over all its processes.

A promise is given only while the bytes of all promises are within a budget. What a
record says is what is kept; this file says how much that may be. It has one page, with
a lock of its own, and is written before the records: a process that is killed in
between leaves bytes counted that no record has, until their time. The budget is then
smaller for a while, and never exceeded.

    0    8  magic and version
    8    8  xxh3 of what follows
    16  16  a time, seconds since 1970, and the bytes promised until then; and so on
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import attrs
import numpy as np
import xxhash

from kvdock.arrays import Int64Array
from kvdock_segments.index_file import open_index, read_contents
from kvdock_segments.namespace_files import PROMISES
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import IndexName, listing, open_file, open_folder
from kvdock_segments.walk import pool_folders

_MAGIC = b"KVPROM\0\1"
_HEAD = 16
_MOST_ROWS = 250
"""So that the file has one page: a process that is killed writes it whole or not."""
_LEAST_STEP_S = 8
_STEPS = 16
"""Of how many parts of its time one is added to a promise in the count, so that many
promises share a row."""
_WAIT_S = 0.1
_PAUSE_S = 0.001


@attrs.frozen
class PromiseBudget:
    """The bytes that may be promised in one namespace.

    Args:
        liveness: How living writers are detected. Where kernel locks do not reach all
            of them nothing is promised, because nothing would bound it.
    """

    namespace_fd: int
    liveness: WriterLiveness

    def take(self, each_bytes: int, count: int, until: int, most_bytes: int) -> int:
        """Count the bytes of new promises; return for how many of them there is room.

        They are of `each_bytes` each, and last until `until`, seconds since 1970.
        """
        if self.liveness is not WriterLiveness.LOCKS or not count:
            return 0
        with suppress(OSError), self._opened() as fd:
            rows = self._read(fd)
            left = most_bytes - int(rows[:, 1].sum())
            fit = min(count, left // each_bytes if each_bytes else count)
            if fit > 0:
                row = np.array([[_rounded(until), fit * each_bytes]])
                _write(fd, np.concatenate([rows, row]))
                return fit
        return 0

    def extend(
        self, each_bytes: int, before: Int64Array, until: int, most_bytes: int
    ) -> int:
        """Count promises of pages that may have one; return how many of the first hold.

        Args:
            each_bytes: Bytes of a page.
            before: int64 (n,), until when each is promised now; 0 for no promise.
            until: Until when they are to be, seconds since 1970.
            most_bytes: The budget. A page that has a promise takes no more of it.
        """
        if self.liveness is not WriterLiveness.LOCKS or not len(before):
            return 0
        with suppress(OSError), self._opened() as fd:
            rows = self._read(fd)
            counted = before > int(time.time())
            cost = np.cumsum(np.where(counted, 0, each_bytes))
            left = most_bytes - int(rows[:, 1].sum())
            fit = int(np.searchsorted(cost, left, "right")) if left > 0 else 0
            fit = max(fit, int(np.argmin(counted)) if not counted.all() else len(cost))
            for end, pages in _counts(before[:fit][counted[:fit]]):
                _give_back(rows, pages * each_bytes, end)
            if fit:
                row = np.array([[_rounded(until), fit * each_bytes]])
                _write(fd, np.concatenate([rows, row]))
            return fit
        return 0

    def shorten(self, each_bytes: int, before: Int64Array, until: Int64Array) -> None:
        """Count promises until an earlier time, each as given; as `give_back`."""
        with suppress(OSError), self._opened() as fd:
            rows, now = self._read(fd), int(time.time())
            for end, pages in _counts(before[before > now]):
                _give_back(rows, pages * each_bytes, end)
            ends = [
                [_rounded(end), pages * each_bytes]
                for end, pages in _counts(until[until > now])
            ]
            _write(fd, np.concatenate([rows, np.array(ends, np.int64).reshape(-1, 2)]))

    def give_back(self, each_bytes: int, until: Int64Array) -> None:
        """Count pages no longer that are promised no more, each until its time."""
        self.shorten(each_bytes, until, np.zeros(0, np.int64))

    def promised_bytes(self) -> int:
        """Return the bytes that are promised now."""
        with suppress(OSError), self._opened() as fd:
            return int(self._read(fd)[:, 1].sum())
        return 0

    @contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the file with its lock, which no living process holds for long."""
        fd = open_file(self.namespace_fd, PROMISES, os.O_RDWR | os.O_CREAT)
        try:
            end_s = time.monotonic() + _WAIT_S
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(_PAUSE_S)
            yield fd
        finally:
            os.close(fd)

    def _read(self, fd: int) -> Int64Array:
        """Return times and bytes of promises that have not ended, int64 (n, 2)."""
        raw = os.pread(fd, _HEAD + 16 * _MOST_ROWS, 0)
        rows = np.zeros((0, 2), np.int64)
        if raw:
            body = raw[_HEAD:]
            whole = raw[:8] == _MAGIC and raw[8:_HEAD] == _check(body)
            if whole and len(body) % 16 == 0:
                rows = np.frombuffer(body, "<i8").reshape(-1, 2).astype(np.int64)
            else:
                rows = self._recount()
        return rows[(rows[:, 0] > int(time.time())) & (rows[:, 1] > 0)]

    def _recount(self) -> Int64Array:
        """Count what the records say, where the file is damaged."""
        found: list[Int64Array] = [np.zeros((0, 2), np.int64)]
        for pool in pool_folders(self.namespace_fd):
            folder = open_folder(self.namespace_fd, pool)
            try:
                with listing(folder) as entries:
                    names = [name for e in entries if (name := IndexName.parse(e.name))]
                for name in names:
                    with suppress(OSError):
                        found.append(_promises_in(folder, name))
            finally:
                os.close(folder)
        return np.concatenate(found)


def _counts(until: Int64Array) -> Iterator[tuple[int, int]]:
    ends, pages = np.unique(until, return_counts=True)
    return zip(ends.tolist(), pages.tolist(), strict=True)


def _give_back(rows: Int64Array, nbytes: int, until: int) -> None:
    # The count of a later time holds a promise whose row was merged into it.
    for at in np.flatnonzero(rows[:, 0] >= until).tolist():
        taken = min(nbytes, int(rows[at, 1]))
        rows[at, 1] -= taken
        nbytes -= taken


def _promises_in(folder: int, name: IndexName) -> Int64Array:
    fd = open_index(folder, str(name))
    try:
        contents = read_contents(fd, name, 2**62)
    finally:
        os.close(fd)
    if contents is None:
        return np.zeros((0, 2), np.int64)
    until = contents.records["keep_until"].astype(np.int64)
    ends, counts = np.unique(until[until > int(time.time())], return_counts=True)
    return np.stack([ends, counts * contents.slot_bytes], axis=1)


def _rounded(until: int) -> int:
    step = max(_LEAST_STEP_S, (until - int(time.time())) // _STEPS)
    step = 1 << step.bit_length() - 1
    return -(-until // step) * step


def _check(body: bytes) -> bytes:
    return xxhash.xxh3_64_digest(body)


def _write(fd: int, rows: Int64Array) -> None:
    rows = rows[rows[:, 1] > 0]
    ends = np.unique(rows[:, 0])
    sums = np.array([rows[rows[:, 0] == end, 1].sum() for end in ends], np.int64)
    rows = np.stack([ends, sums], axis=1)
    while len(rows) > _MOST_ROWS:
        # Of two neighbours the later time counts for both.
        near = int(np.diff(rows[:, 0]).argmin())
        rows[near + 1, 1] += rows[near, 1]
        rows = np.delete(rows, near, axis=0)
    body = rows.astype("<i8").tobytes()
    raw = _MAGIC + _check(body) + body
    if os.pwrite(fd, raw, 0) != len(raw):
        raise OSError(errno.ENOSPC, "the count of promises could not be written whole")
    os.ftruncate(fd, len(raw))

"""A hash table from key digests to slots, whose every step is numpy.

A bucket is one cache line of eight lanes; a lane is a tag of 32 bits and a
row number of 32 bits. Looking up a batch is one gather of lines, and rows
whose tag matches are compared in full by the caller's digests.

A lane becomes empty only in a bucket that has an empty lane; in a full one it
becomes a tombstone. So a bucket with an empty lane was never full, and a key
that is not in it has not moved on to the next one.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ABSENT = -1
"""Row number of a key that is not there."""

_LANES = 8
_ROW = np.uint64(0xFFFFFFFF)
_TAG = np.uint64(32)
_EMPTY = np.uint64(0)
_TOMB = _ROW  # row number 2**32 - 2: one that no caller has
_FULLEST = 0.5  # share of lanes in use; above it, too many buckets overflow
_ROOMY = 0.35  # share at most after making room, so that it lasts
_SMALLEST = 64  # buckets
_STEP = 1 << 16  # rows handled at once, so that temporaries stay in the cache


class Table:
    """Row numbers by digest. Not thread-safe; digests belong to the caller."""

    def __init__(self) -> None:
        self._lanes = np.zeros((_SMALLEST, _LANES), np.uint64)
        self._used = 0  # lanes that are not empty, tombstones included

    @property
    def nbytes(self) -> int:
        """Memory of the table, bytes."""
        return self._lanes.nbytes

    def find(self, digests: UInt64s, known: UInt64s) -> Int64s:
        """Return the row of each key, int64 (n,), or `ABSENT`.

        Args:
            digests: uint64 (n, 2), what to look for.
            known: uint64 (rows, 2), the digest of each row.
        """
        found = np.full(len(digests), ABSENT, np.int64)
        asked = np.arange(len(digests))
        buckets = self._home(digests)
        tags = digests[:, 1] >> _TAG
        while len(asked):
            lines = self._lanes.take(buckets, axis=0)
            which, lane = np.nonzero((lines >> _TAG) == tags[:, None])
            rows = (lines[which, lane] & _ROW).astype(np.int64) - 1
            real = (rows >= 0) & (rows < len(known))
            which, rows = which[real], rows[real]
            who = asked[which]
            # Not `take`: it would copy all of an array that is a view.
            stored, wanted = known[rows], digests[who]
            same = (stored[:, 0] == wanted[:, 0]) & (stored[:, 1] == wanted[:, 1])
            found[who[same]] = rows[same]
            left = np.flatnonzero(found[asked] == ABSENT)
            onward = left[(lines[left] != _EMPTY).all(axis=1)]
            asked, tags = asked[onward], tags[onward]
            buckets = self._next(buckets[onward])
        return found

    def add(self, digests: UInt64s, rows: Int64s, known: UInt64s) -> None:
        """Map digests to rows; none of them may be in the table already.

        Args:
            digests: uint64 (n, 2), all different.
            rows: int64 (n,).
            known: uint64 (rows, 2), the digest of each row, for growing.
        """
        self._make_room(len(rows), known)
        for start in range(0, len(rows), _STEP):
            part = slice(start, start + _STEP)
            self._place(digests[part], rows[part])

    def reserve(self, more: int, known: UInt64s) -> None:
        """Make room for many keys at once."""
        self._make_room(more, known)

    def remove(self, digests: UInt64s, rows: Int64s) -> None:
        """Forget those keys that are mapped to just these rows."""
        asked = np.arange(len(rows))
        buckets = self._home(digests)
        wanted = (rows + 1).astype(np.uint64)
        while len(asked):
            lines = self._lanes.take(buckets, axis=0)
            match = (lines & _ROW) == wanted[asked][:, None]
            which, lane = np.nonzero(match)
            full = (lines != _EMPTY).all(axis=1)
            gone = full[which]
            self._lanes[buckets[which], lane] = np.where(gone, _TOMB, _EMPTY)
            self._used -= int((~gone).sum())
            onward = full & ~match.any(axis=1)
            asked, buckets = asked[onward], self._next(buckets[onward])

    def _home(self, digests: UInt64s) -> Int64s:
        mask = np.uint64(len(self._lanes) - 1)
        return cast("Int64s", (digests[:, 0] & mask).astype(np.int64))

    def _next(self, buckets: Int64s) -> Int64s:
        return (buckets + 1) & (len(self._lanes) - 1)

    def _make_room(self, more: int, known: UInt64s) -> None:
        limit = _FULLEST * self._lanes.size
        if self._used + more <= limit:
            return
        lanes = self._lanes.ravel()
        old = lanes[(lanes != _EMPTY) & (lanes != _TOMB)]
        buckets = len(self._lanes)
        while len(old) + more > _ROOMY * buckets * _LANES:
            buckets *= 2
        rows = (old & _ROW).astype(np.int64) - 1
        self._lanes = np.zeros((buckets, _LANES), np.uint64)
        self._used = 0
        for start in range(0, len(rows), _STEP):
            part = rows[start : start + _STEP]
            self._place(known[part], part)

    def _place(self, digests: UInt64s, rows: Int64s) -> None:
        entries = (digests[:, 1] >> _TAG) << _TAG
        entries |= (rows + 1).astype(np.uint64)
        buckets = self._home(digests)
        while len(entries):
            order = np.argsort(buckets, kind="stable")
            buckets, entries = buckets[order], entries[order]
            lines = self._lanes.take(buckets, axis=0)
            free = (lines == _EMPTY) | (lines == _TOMB)
            first = np.ones(len(buckets), np.bool_)
            np.not_equal(buckets[1:], buckets[:-1], out=first[1:])
            if not first.all():
                # How many before it in this batch want the same bucket.
                starts = np.flatnonzero(first)
                nth = np.arange(len(buckets)) - starts[np.cumsum(first) - 1]
                free = np.cumsum(free, axis=1) == (nth + 1)[:, None]
            lane = np.argmax(free, axis=1)
            fits = free[np.arange(len(lane)), lane]
            at, where = buckets[fits], lane[fits]
            self._used += int((self._lanes[at, where] == _EMPTY).sum())
            self._lanes[at, where] = entries[fits]
            buckets, entries = self._next(buckets[~fits]), entries[~fits]

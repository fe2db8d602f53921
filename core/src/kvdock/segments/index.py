"""What is stored where: every record of a pool, resident, found by digest.

One array of records as they are on disk, one hash table over it, the time of
last use and the segment of each row. About 100 bytes per page, no Python
object among them. Not thread-safe: the store holds a lock around each call.
"""

from __future__ import annotations

import bisect
from typing import TypeVar, cast

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.segments.format import (RECORD, Records, UInt64s)
from kvdock.segments.table import ABSENT, Table

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

T = TypeVar("T", bound=np.generic)

_GROWTH = 1.25
_WORDS = RECORD.itemsize // 8


@attrs.frozen
class Rows:
    """The rows of one segment: slot n is row `first` + n."""

    number: int
    first: int
    slots: int

    @property
    def span(self) -> slice:
        """All of its rows."""
        return slice(self.first, self.first + self.slots)


class Index:
    """Records by digest and by slot."""

    def __init__(self) -> None:
        self.records: Records = np.zeros(0, RECORD)
        self.used_ns: Int64s = np.zeros(0, np.int64)
        self.segment_of: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.live_in: Int64s = np.zeros(0, np.int64)  # records of each segment
        self.version = 0  # of the set of keys
        self._table = Table()
        self._end = 0  # rows handed out, free ones among them
        self._gaps: list[tuple[int, int]] = []  # first row and number, ascending
        self._numbers = 0
        self._free_numbers: list[int] = []

    @property
    def nbytes(self) -> int:
        """Memory of the index, bytes."""
        arrays = (self.records, self.used_ns, self.segment_of)
        return self._table.nbytes + sum(array.nbytes for array in arrays)

    def open_rows(self, slots: int) -> Rows:
        """Make rows for a segment, all of them empty."""
        first = self._take(slots)
        number = self._free_numbers.pop() if self._free_numbers else self._numbers
        self._numbers = max(self._numbers, number + 1)
        if number >= len(self.live_in):
            self.live_in = _longer(self.live_in, 2 * number + 16)
        rows = Rows(number, first, slots)
        self.segment_of[rows.span] = number
        return rows

    def reserve(self, rows: int) -> None:
        """Make room for many rows at once, so that loading them is quick."""
        self._grow(self._end + rows)
        self._table.reserve(rows, self._digests())

    def close_rows(self, rows: Rows) -> None:
        """Forget a segment with everything in it."""
        self.forget(np.arange(rows.first, rows.first + rows.slots))
        self.segment_of[rows.span] = ABSENT
        self._give_back(rows.first, rows.slots)
        self._free_numbers.append(rows.number)

    def _take(self, slots: int) -> int:
        """Return the first of so many rows, in the tightest gap that has them."""
        gaps = [(size, first) for first, size in self._gaps if size >= slots]
        if not gaps:
            first, self._end = self._end, self._end + slots
            self._grow(self._end)
            return first
        size, first = min(gaps)
        self._gaps.remove((first, size))
        if size > slots:
            bisect.insort(self._gaps, (first + slots, size - slots))
        return first

    def _give_back(self, first: int, slots: int) -> None:
        """Make a gap one with those beside it: segments are of any size."""
        at = bisect.bisect(self._gaps, (first, slots))
        if at < len(self._gaps) and self._gaps[at][0] == first + slots:
            slots += self._gaps.pop(at)[1]
        if at and sum(self._gaps[at - 1]) == first:
            first, before = self._gaps.pop(at - 1)
            slots += before
        bisect.insort(self._gaps, (first, slots))

    def find(self, digests: UInt64s) -> Int64s:
        """Return the row of each key, int64 (n,), or `ABSENT`."""
        return self._table.find(digests, self._digests())

    def live(self, rows: Rows) -> Bools:
        """Return which slots of a segment hold a record, bool (slots,)."""
        return cast("Bools", self.records["check"][rows.span] != 0)

    def put(
        self,
        rows: Int64s,
        records: Records,
        used_ns: npt.ArrayLike,
        *,
        absent_at: int = -1,
    ) -> None:
        """Fill empty rows; a key that was elsewhere is from now on here.

        Args:
            rows: int64 (n,), all different.
            records: (n,), keys may repeat: the last one counts.
            used_ns: int64, when they were last used.
            absent_at: A version at which the keys were different and none
                of them was there; saves looking again.
        """
        self.records[rows] = records
        self.used_ns[rows] = used_ns
        np.add.at(self.live_in, self.segment_of[rows], 1)
        digests = self._digests()[rows]
        if absent_at == self.version:
            self._table.add(digests, rows, self._digests())
        else:
            last = _last_of_equals(digests)
            self._map(digests[last], rows[last])
        self.version += 1

    def load(self, rows: Rows, records: Records, used_ns: Int64s) -> None:
        """Replace all that is known of a segment by what was read from it."""
        old = self.records[rows.span]
        changed = np.flatnonzero(old["check"] != records["check"])
        at = changed + rows.first
        self.forget(at[self.records["check"][at] != 0])
        fresh = changed[records["check"][changed] != 0]
        self.used_ns[rows.span] = np.maximum(self.used_ns[rows.span], used_ns)
        if len(fresh):
            self.put(fresh + rows.first, records[fresh], used_ns[fresh])

    def forget(self, rows: Int64s) -> None:
        """Empty these rows."""
        there = rows[self.records["check"][rows] != 0]
        if not len(there):
            return
        self._table.remove(self._digests()[there], there)
        np.subtract.at(self.live_in, self.segment_of[there], 1)
        self.records[there] = np.zeros((), RECORD)
        self.used_ns[there] = 0

    def touch(self, rows: Int64s, now_ns: int) -> None:
        """Note that these rows were used."""
        self.used_ns[rows] = now_ns

    def _digests(self) -> UInt64s:
        words = self.records.view(np.uint64).reshape(-1, _WORDS)
        return words[:, :2]

    def _map(self, digests: UInt64s, rows: Int64s) -> None:
        there = self._table.find(digests, self._digests())
        known = there != ABSENT
        if known.any():
            moved = known & (there != rows)
            self._table.remove(digests[moved], there[moved])
            fresh = ~known | moved
            digests, rows = digests[fresh], rows[fresh]
        self._table.add(digests, rows, self._digests())

    def _grow(self, rows: int) -> None:
        if rows <= len(self.records):
            return
        wanted = max(rows, int(len(self.records) * _GROWTH))
        self.records = _longer(self.records, wanted)
        self.used_ns = _longer(self.used_ns, wanted)
        self.segment_of = _longer(self.segment_of, wanted)


def _last_of_equals(digests: UInt64s) -> Int64s:
    low = np.sort(digests[:, 0])
    if not (low[1:] == low[:-1]).any():
        return np.arange(len(digests))
    # np.unique keeps the first of equals, so look backwards.
    _, last = np.unique(digests[::-1], axis=0, return_index=True)
    return len(digests) - 1 - last


def _longer(array: npt.NDArray[T], length: int) -> npt.NDArray[T]:
    grown = np.zeros(length, array.dtype)
    grown[: len(array)] = array
    return grown

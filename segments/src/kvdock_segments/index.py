"""The resident index: every record of a pool, found by digest.

An array of records as they are on disk, a hash table over it, and the time of last
use and the segment of each row. About 100 bytes per page and not one Python object.
Not thread-safe: the store holds a lock around each call.
"""

from __future__ import annotations

import bisect
import time
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvdock import native
from kvdock_segments.format import (
    RECORD,
    Records,
    expired,
    records_in_words,
)
from kvdock_segments.reuse import ReuseHistory
from kvdock_segments.segment import RowRange

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, UInt64Array
    from kvdock.native import Library
    from kvdock_segments.call_arrays import CallArrays
    from kvdock_segments.tenant_count import TenantCount

T = TypeVar("T", bound=np.generic)

ABSENT = -1
"""Row number of a key that was not found."""
_GROWTH = 1.25
_STORED = 4  # word of a record that says when it was stored
_LANES = 8
_ROW = np.uint64(0xFFFFFFFF)
_TAG = np.uint64(32)
_EMPTY = np.uint64(0)
_TOMB = _ROW  # row number 2**32 - 2, which is never used
_FULLEST = 0.5  # maximum share of lanes in use; above it, too many buckets overflow
_ROOMY = 0.35  # maximum share after growing
_SMALLEST = 64  # buckets
_STEP = 1 << 16  # rows handled at once, so that temporaries stay in the cache


class RowGaps:
    """Ranges of free rows. Not thread-safe."""

    def __init__(self) -> None:
        self.ranges: list[tuple[int, int]] = []  # first row and number, ascending

    def take(self, slots: int) -> int | None:
        """Return the first of `slots` free rows of the smallest range with so many.

        Returns:
            None if no range has so many.
        """
        gaps = [(size, first) for first, size in self.ranges if size >= slots]
        if not gaps:
            return None
        size, first = min(gaps)
        self.ranges.remove((first, size))
        if size > slots:
            bisect.insort(self.ranges, (first + slots, size - slots))
        return first

    def give_back(self, first: int, slots: int) -> None:
        """Add a free range and merge it with adjacent ones: segments differ in size."""
        at = bisect.bisect(self.ranges, (first, slots))
        if at < len(self.ranges) and self.ranges[at][0] == first + slots:
            slots += self.ranges.pop(at)[1]
        if at and sum(self.ranges[at - 1]) == first:
            first, before = self.ranges.pop(at - 1)
            slots += before
        bisect.insort(self.ranges, (first, slots))


class HashTable:
    """Row numbers by digest. Not thread-safe; digests belong to the caller."""

    def __init__(self) -> None:
        # Where it is, and behind that the rows of its index, for compiled code.
        self.where = np.zeros(6, np.int64)
        self.address = native.address_of(self.where)
        self._renew(_SMALLEST)

    def _renew(self, buckets: int) -> None:
        self._lanes = np.zeros((buckets, _LANES), np.uint64)
        self.used = 0  # lanes that are not empty, tombstones included
        self.where[:2] = [native.address_of(self._lanes), buckets]

    @property
    def nbytes(self) -> int:
        """Memory of the table, bytes."""
        return self._lanes.nbytes

    def find(self, digests: UInt64Array, known: UInt64Array) -> Int64Array:
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

    def add(self, digests: UInt64Array, rows: Int64Array, known: UInt64Array) -> None:
        """Map digests to rows; none of them may be in the table already.

        Args:
            digests: uint64 (n, 2), all different.
            rows: int64 (n,).
            known: uint64 (rows, 2), the digest of each row, for growing.
        """
        self.reserve(len(rows), known)
        for start in range(0, len(rows), _STEP):
            part = slice(start, start + _STEP)
            self._place(digests[part], rows[part])

    def remove(self, digests: UInt64Array, rows: Int64Array) -> None:
        """Remove keys that are mapped to exactly these rows."""
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
            self.used -= int((~gone).sum())
            onward = full & ~match.any(axis=1)
            asked, buckets = asked[onward], self._next(buckets[onward])

    def _home(self, digests: UInt64Array) -> Int64Array:
        mask = np.uint64(len(self._lanes) - 1)
        return cast("Int64Array", (digests[:, 0] & mask).astype(np.int64))

    def _next(self, buckets: Int64Array) -> Int64Array:
        return (buckets + 1) & (len(self._lanes) - 1)

    def reserve(self, more: int, known: UInt64Array) -> None:
        """Make room for many keys at once."""
        if self.used + more <= _FULLEST * self._lanes.size:
            return
        lanes = self._lanes.ravel()
        old = lanes[(lanes != _EMPTY) & (lanes != _TOMB)]
        buckets = len(self._lanes)
        while len(old) + more > _ROOMY * buckets * _LANES:
            buckets *= 2
        rows = (old & _ROW).astype(np.int64) - 1
        self._renew(buckets)
        for start in range(0, len(rows), _STEP):
            part = rows[start : start + _STEP]
            self._place(known[part], part)

    def _place(self, digests: UInt64Array, rows: Int64Array) -> None:
        entries = (digests[:, 1] >> _TAG << _TAG) | (rows + 1).astype(np.uint64)
        buckets = self._home(digests)
        lanes = self._lanes.reshape(-1)
        while len(rows):
            lines = self._lanes.take(buckets, axis=0)
            free = (lines == _EMPTY) | (lines == _TOMB)
            lane = free.argmax(axis=1)
            first = np.arange(0, lines.size, _LANES) + lane
            fits = free.take(first)
            at = buckets * _LANES + lane
            if np.count_nonzero(fits) == len(fits):
                lanes[at] = entries
            else:
                lanes[at[fits]] = entries[fits]
            # Of keys that chose the same lane one has it; the others choose again.
            placed = lanes.take(at) == entries
            self.used += int(np.count_nonzero(placed & (lines.take(first) == _EMPTY)))
            left = np.flatnonzero(~placed)
            buckets = np.where(fits, buckets, self._next(buckets))[left]
            entries, rows = entries[left], rows[left]


_RUN_S = 30.0
"""How long after a lookup or a read the writes that follow each other count as one
prefix. Without a bound a process that only writes would store ever older pages, and
nothing at all once the store is full: each of its calls is a prefix of its own."""
_CALLS = 16  # whose batches may come in turns


class UseClock:
    """Times of use for the keys of each batch: descending, the head of a prefix last.

    See `kvdock_segments.recency` for what a prefix is.
    """

    def __init__(self) -> None:
        self.newest_ns = 0  # of any page
        self._next_ns: dict[float, int] = {}  # by deadline; negative for reads
        self._run_ns: dict[int, int] = {}  # by tenant: time of its next write of a run
        self._looked_s = -np.inf  # when a lookup or a read was last made

    def now_ns(self) -> int:
        """Return a time that is later than all times of use.

        A clock that is set back, or behind another host's, would make everything
        that is stored warmer than what comes, and nothing would be evicted.
        """
        self.newest_ns = max(time.time_ns(), self.newest_ns + 1)
        return self.newest_ns

    def keep_up(self, used_ns: Int64Array) -> None:
        """Go on from times of use that others have noted."""
        self.newest_ns = max(self.newest_ns, int(used_ns.max(initial=0)))

    def end_run(self) -> None:
        """Take the next write for the beginning of another prefix."""
        self._run_ns.clear()
        self._looked_s = time.monotonic()

    def read(self, count: int, deadline_s: float) -> int:
        """Return the time of use of the first of so many pages that are loaded.

        Each further one counts as used a nanosecond before the one in front of it.
        """
        self.end_run()
        first_ns = self._next_ns.get(-deadline_s) or self.now_ns()
        self._note(-deadline_s, first_ns - count)
        return first_ns

    def written(
        self, count: int, deadline_s: float, first_ns: int | None, tenant: int = 0
    ) -> Int64Array:
        """Return the times of use of pages that are stored, int64 (count,).

        Args:
            count: How many.
            deadline_s: Of the call.
            first_ns: Time of use of the first, where a lookup tells.
            tenant: For whom: no prefix is of two tenants.
        """
        first_ns = first_ns or self._next_ns.get(deadline_s)
        if first_ns is None and time.monotonic() - self._looked_s < _RUN_S:
            first_ns = self._run_ns.get(tenant)
        first_ns = first_ns or self.now_ns()
        self._note(deadline_s, first_ns - count)
        self._run_ns[tenant] = first_ns - count if count else 0
        return first_ns - np.arange(count)

    def _note(self, call: float, next_ns: int) -> None:
        if abs(call) < np.inf:
            self._next_ns[call] = next_ns
            if len(self._next_ns) > _CALLS:
                del self._next_ns[next(iter(self._next_ns))]


class Index:
    """Records by digest and by slot."""

    def __init__(self) -> None:
        self.history = ReuseHistory()
        self.records: Records = np.zeros(0, RECORD)
        self.words = records_in_words(self.records)
        self.used_ns: Int64Array = np.zeros(0, np.int64)
        self.segment_of: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        self.live_in: Int64Array = np.zeros(0, np.int64)  # records of each segment
        # Slots of each segment, without those that could not be written.
        self.slots_in: Int64Array = np.zeros(0, np.int64)
        # Size of the objects of each segment.
        self.object_bytes_in: Int64Array = np.zeros(0, np.int64)
        self.timed = False  # whether any record may have a promise, or expire
        self.doubled = False  # whether any key may be in two rows
        self._latest_s = 0.0
        self.tenants: TenantCount | None = None  # where one has a quota
        self.max_age_s = 0.0  # of records that say no time; 0 for any age
        self.version = 0  # of the set of keys
        self.clock = UseClock()
        self.table = HashTable()
        self._end = 0  # rows handed out, free ones among them
        self._gaps = RowGaps()
        self._numbers = 0
        self._free_numbers: list[int] = []

    @property
    def nbytes(self) -> int:
        """Memory of the index, bytes."""
        arrays = (self.records, self.used_ns, self.segment_of)
        fixed = self.table.nbytes + self.history.ghosts.nbytes
        return fixed + sum(array.nbytes for array in arrays)

    def open_rows(self, slots: int, object_bytes: int = 0) -> RowRange:
        """Allocate empty rows for a segment."""
        first = self._gaps.take(slots)
        if first is None:
            first, self._end = self._end, self._end + slots
            self._grow(self._end)
        number = self._free_numbers.pop() if self._free_numbers else self._numbers
        self._numbers = max(self._numbers, number + 1)
        if number >= len(self.live_in):
            self.live_in = _longer(self.live_in, 2 * number + 16)
            self.slots_in = _longer(self.slots_in, 2 * number + 16)
            self.object_bytes_in = _longer(self.object_bytes_in, 2 * number + 16)
        self.slots_in[number] = slots
        self.object_bytes_in[number] = object_bytes
        rows = RowRange(number, first, slots)
        self.segment_of[rows.span] = number
        return rows

    def clear(self) -> None:
        """Free the memory of all records; the index is not used again.

        What holds the index may be a cycle, which Python collects much later.
        """
        self._grow_to(0)
        self.table = HashTable()
        self.version += 1

    def reserve(self, rows: int) -> None:
        """Grow for many rows at once, so that loading them is fast."""
        self._grow(self._end + rows)
        self.table.reserve(rows, self._digests())

    def close_rows(self, rows: RowRange) -> None:
        """Remove a segment with all its records."""
        self.forget(np.arange(rows.first, rows.first + rows.slots))
        self.segment_of[rows.span] = ABSENT
        self.slots_in[rows.number] = 0
        self._gaps.give_back(rows.first, rows.slots)
        self._free_numbers.append(rows.number)

    def find(self, digests: UInt64Array) -> Int64Array:
        """Return the row of each key, int64 (n,), or `ABSENT`.

        A key whose record has expired is absent.
        """
        rows = self._rows(digests)
        if self.timed and len(rows):
            there = np.flatnonzero(rows != ABSENT)
            rows[there[self.are_expired(rows[there])]] = ABSENT
        return rows

    def _rows(self, digests: UInt64Array) -> Int64Array:
        """Return the row of each key, int64 (n,), expired or not, or `ABSENT`."""
        compiled = native.library()
        if compiled is None:
            return self.table.find(digests, self._digests())
        digests = np.ascontiguousarray(digests)
        rows = np.empty(len(digests), np.int64)
        asked, answer = native.address_of(digests), native.address_of(rows)
        compiled.find(self.table.address, asked, len(rows), answer)
        return rows

    def are_expired(self, rows: Int64Array, grace_s: int = 0) -> BoolArray:
        """Return which rows hold a record whose time is over, for some seconds."""
        now_s = self._now_s() - grace_s
        return expired(self.words[rows], now_s, self.max_age_s)

    def _now_s(self) -> float:
        """Return the time; where the clock was set back, mark what had expired.

        No such page comes back. Those that are stored from now on live by the clock, so
        it is looked at before they are in the index.
        """
        latest_s, self._latest_s = self._latest_s, time.time()
        if int(self._latest_s) < int(latest_s):
            rows = np.flatnonzero(self.records["check"])
            over = rows[expired(self.words[rows], latest_s, self.max_age_s)]
            self.records["expire_at"][over] = 1
        return self._latest_s

    def rows_of(self, digests: UInt64Array) -> Int64Array:
        """Return every row that holds one of some keys, by reading all of them.

        Those that have expired and those that are there twice are among them, which no
        look-up finds.
        """
        words, wanted = self.words, {*map(tuple, digests.tolist())}
        rows = np.flatnonzero(np.isin(words[:, 0], digests[:, 0]))
        rows = rows[self.records["check"][rows] != 0]
        held = [*map(tuple, words[rows, :2].tolist())]
        return np.array(
            [
                row
                for row, one in zip(rows.tolist(), held, strict=True)
                if one in wanted
            ],
            np.int64,
        )

    def expired_rows(self, grace_s: int) -> Int64Array:
        """Return rows whose time has been over for some seconds, int64 (n,)."""
        if not self.timed:
            return np.zeros(0, np.int64)
        rows = np.flatnonzero(self.records["check"])
        return rows[self.are_expired(rows, grace_s)]

    def is_expired(self, row: int, grace_s: int) -> bool:
        """Return whether a row holds a record whose time has been over for so long."""
        there = bool(self.records["check"][row])
        return there and bool(self.are_expired(np.array([row]), grace_s)[0])

    def live(self, rows: RowRange) -> BoolArray:
        """Return which slots of a segment hold a record, bool (slots,)."""
        return cast("BoolArray", self.records["check"][rows.span] != 0)

    def put(
        self,
        rows: Int64Array,
        records: Records,
        used_ns: npt.ArrayLike,
        *,
        absent_at: int = -1,
    ) -> None:
        """Fill empty rows; keys in other rows are moved to these.

        Args:
            rows: int64 (n,), all different.
            records: (n,), keys may repeat: the last one counts.
            used_ns: int64, when they were last used.
            absent_at: A version at which the keys were distinct and absent; saves
                a lookup.
        """
        words = records_in_words(records)
        self.timed = self.timed or bool(np.count_nonzero(words[:, 3]))
        if self.timed:
            self._now_s()
        self.words[rows] = words
        self.used_ns[rows] = used_ns
        numbers = self.segment_of[rows]
        if np.count_nonzero(numbers != numbers[:1]):
            np.add.at(self.live_in, numbers, 1)
        elif len(numbers):
            self.live_in[numbers[0]] += len(numbers)
        if self.tenants is not None:
            self.tenants.add(records, self.object_bytes_in[numbers])
        digests = words[:, :2]
        # A key that has expired counts as absent and is still in the table.
        if absent_at == self.version and not self.timed:
            self.table.add(digests, rows, self._digests())
        else:
            if self.timed:  # what has expired counts less than what is still served
                order = np.argsort(~self.are_expired(rows), kind="stable")
                digests, rows = digests[order], rows[order]
            last = _last_of_equals(digests)
            self._map(digests[last], rows[last])
        self.version += 1

    def insert(
        self,
        compiled: Library,
        call: CallArrays,
        first: int,
        count: int,
        rows: RowRange,
    ) -> None:
        """Fill rows of one segment with a call's records of keys that are absent.

        As `put` does, for records without times.

        Args:
            compiled: The library.
            call: Has the records, and the slot of each.
            first: The page of the call that the first record is of.
            count: How many records.
            rows: The rows of the segment.
        """
        table, live = self.table, self.live_in
        table.reserve(count, self._digests())
        table.used += compiled.insert(
            table.address, call.address, first, count, rows.first
        )
        live[rows.number] += count
        self.version += 1

    def load(self, rows: RowRange, records: Records, used_ns: Int64Array) -> None:
        """Replace the records of a segment by those that were read from it."""
        old = self.records[rows.span]
        changed = np.flatnonzero(old["check"] != records["check"])
        self.forget(changed + rows.first)
        fresh = changed[records["check"][changed] != 0]
        self.used_ns[rows.span] = np.maximum(self.used_ns[rows.span], used_ns)
        self.clock.keep_up(used_ns)
        if len(fresh):
            self.put(fresh + rows.first, records[fresh], used_ns[fresh])

    def forget(self, rows: Int64Array) -> None:
        """Empty these rows."""
        there = rows[self.records["check"][rows] != 0]
        if len(there):
            np.subtract.at(self.live_in, self.segment_of[there], 1)
            self._empty(there)

    def _empty(self, there: Int64Array) -> None:
        if self.tenants is not None:
            each = self.object_bytes_in[self.segment_of[there]]
            self.tenants.remove(self.records[there], each)
        self.table.remove(self.words[there, :2], there)
        self.words[there] = 0
        self.used_ns[there] = 0

    def forget_in(self, rows: RowRange, slots: Int64Array) -> None:
        """Empty slots of one segment, all of which hold a record."""
        if len(slots):
            self.live_in[rows.number] -= len(slots)
            self._empty(slots + rows.first)

    def evict_from(self, rows: RowRange, slots: Int64Array) -> None:
        """Empty slots of one segment, and remember their pages as evicted."""
        gone = slots + rows.first
        self.history.note_evicted(
            self.words[gone, :2],
            self.records["stored_ns"][gone].astype(np.int64),
            self.used_ns[gone],
            self.clock.newest_ns,
        )
        self.forget_in(rows, slots)

    def touch(self, rows: Int64Array, used_ns: npt.ArrayLike) -> None:
        """Note that these rows are used, and when."""
        stored_ns = self.words[rows, _STORED].astype(np.int64)
        self.history.note(stored_ns, self.used_ns[rows], self.clock.newest_ns)
        self.used_ns[rows] = used_ns

    def _digests(self) -> UInt64Array:
        return self.words[:, :2]

    def _map(self, digests: UInt64Array, rows: Int64Array) -> None:
        there = self._rows(digests)
        known = there != ABSENT
        if known.any():
            self.doubled = True
            moved = known & (there != rows)
            if self.timed:  # of two records the one that is still served counts
                both = np.flatnonzero(moved)
                stale = self.are_expired(rows[both]) & ~self.are_expired(there[both])
                moved[both[stale]] = False
            self.table.remove(digests[moved], there[moved])
            fresh = ~known | moved
            digests, rows = digests[fresh], rows[fresh]
        self.table.add(digests, rows, self._digests())

    def _grow(self, rows: int) -> None:
        if rows <= len(self.records):
            return
        self._grow_to(max(rows, int(len(self.records) * _GROWTH)))

    def _grow_to(self, rows: int) -> None:
        self.records = _longer(self.records, rows)
        self.words = records_in_words(self.records)
        self.used_ns = _longer(self.used_ns, rows)
        self.segment_of = _longer(self.segment_of, rows)
        of, table = native.address_of, self.table
        table.where[2:] = [of(self.words), rows, of(self.used_ns), of(self.segment_of)]


def _last_of_equals(digests: UInt64Array) -> Int64Array:
    low = np.sort(digests[:, 0])
    if not (low[1:] == low[:-1]).any():
        return np.arange(len(digests))
    # np.unique keeps the first of equals, so it gets them in reverse.
    _, last = np.unique(digests[::-1], axis=0, return_index=True)
    return len(digests) - 1 - last


def _longer(array: npt.NDArray[T], length: int) -> npt.NDArray[T]:
    grown = np.zeros(length, array.dtype)
    grown[: len(array)] = array[:length]
    return grown

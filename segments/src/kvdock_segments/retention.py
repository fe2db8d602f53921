"""Promise stored pages, let them expire, and overwrite them then or on request.

The times stand in the record of a page, so only the writer of its segment may change
them: this process, for a segment that it is filling, or after it has claimed one that
no process is. Pages that another process is writing beside get no promise.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Batch, BatchResult, Outcome
from kvdock_segments.erasing import wipe
from kvdock_segments.format import RECORD, records_in_words, with_checksums
from kvdock_segments.index_file import erase_records, read_records
from kvdock_segments.paths import closing_fd, open_file

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray, UInt64Array
    from kvdock_segments.allocator import SegmentAllocator
    from kvdock_segments.catalog import Catalog, LookupResult
    from kvdock_segments.format import Records
    from kvdock_segments.segment import Segment

log = logging.getLogger("kvdock_segments")

_OK = int(Outcome.OK)
_REFUSED = int(Outcome.REFUSED)
GRACE_S = 5
"""Seconds for which a read that began in time may still find the bytes."""


class Retainer:
    """Changes the times of stored pages, and erases those whose time is over."""

    def __init__(self, catalog: Catalog, allocator: SegmentAllocator) -> None:
        self._catalog = catalog
        self._allocator = allocator
        self._index = catalog.index

    def retain(self, batch: Batch) -> BatchResult:
        """Run a RETAIN."""
        outcomes = np.full(len(batch), Outcome.ABSENT, np.uint8)
        expires = batch.expire_at is not None
        found = self._catalog.lookup_durable(batch.keys, newest=expires)
        if not (expires or batch.keep_until):
            outcomes[found.there] = _OK
            kept, ends = np.zeros(len(batch), np.bool_), np.zeros(len(batch), np.int64)
            kept[found.there] = found.records["keep_until"] > time.time()
            ends[found.there] = found.records["expire_at"]
            answer = BatchResult.of(batch, outcomes)
            return attrs.evolve(answer, kept=kept, expire_at=ends)
        outcomes[found.there] = self.retain_found(batch, found)
        return BatchResult.of(batch, outcomes)

    def retain_found(self, batch: Batch, found: LookupResult) -> OutcomeArray:
        """Change the times of pages that were found; return their outcomes."""
        outcomes = self._retain_rows(batch, found)
        if batch.expire_at is not None and self._index.doubled:
            copies = self._catalog.copies_of(found)
            expiry = attrs.evolve(batch, keep_until=0)
            late = copies.there[self._retain_rows(expiry, copies) != _OK]
            outcomes[np.isin(found.there, late)] = _REFUSED
        return outcomes

    def _retain_rows(self, batch: Batch, found: LookupResult) -> OutcomeArray:
        outcomes = np.full(len(found.there), _REFUSED, np.uint8)
        # The head of a prefix has the budget first.
        for number in dict.fromkeys(found.numbers.tolist()):
            mine = np.flatnonzero(found.numbers == number)
            segment = self._catalog.segments.get(number)
            if segment is None:
                continue
            with self.writing(segment) as writes:
                if writes and time.monotonic() < batch.deadline_s:
                    outcomes[mine] = self._change(batch, found, mine, segment)
        return outcomes

    @contextmanager
    def writing(self, segment: Segment) -> Iterator[bool]:
        """Be the writer of a segment for a while; the value says whether it is so."""
        if segment.owned:
            yield True
            return
        folder = self._catalog.folder_of(segment)
        full = segment.name.state == "idx"
        allocator = self._allocator
        if not (
            allocator.may_claim(folder, segment) and allocator.claim(folder, segment)
        ):
            yield False
            return
        try:
            yield True
        finally:
            with self._catalog.lock, suppress(OSError), folder.own_change():
                segment.release(full=full)

    def _change(
        self, batch: Batch, found: LookupResult, mine: Int64Array, segment: Segment
    ) -> OutcomeArray:
        """Change the times of some pages of a segment that this process writes."""
        index, ledger = self._index, self._catalog.ledger
        outcomes = np.full(len(mine), _OK, np.uint8)
        with self._catalog.lock:
            if not segment.owned:
                return np.full(len(mine), _REFUSED, np.uint8)
            rows, each = found.rows[mine], segment.slot_bytes
            digests = found.digests[found.there[mine]]
            same = (index.words[rows, :2] == digests).all(axis=1)
            # A page that is given twice is changed and counted once.
            _, first, which = np.unique(rows, return_index=True, return_inverse=True)
            leader = first[which]
            same &= leader == np.arange(len(rows))
            outcomes[~same] = _REFUSED  # replaced since it was looked up
            before = index.records[rows].copy()
            records = before.copy()
            ends = _ends_of(batch, found.there[mine], records)
            until = np.full(len(mine), batch.keep_until, np.int64)
            until = np.where(ends > 0, np.minimum(until, ends), until)
            asked = np.flatnonzero(same & (records["keep_until"] < until))
            if len(asked):
                may = self._allocator.promise(each, before[asked], until[asked])
                outcomes[asked[~may]] = _REFUSED
                records["keep_until"][asked[may]] = until[asked[may]]
            counted = records.copy()
            cut = same & (ends > 0) & (records["keep_until"] > ends)
            records["keep_until"][cut] = ends[cut]
            records["expire_at"] = ends
            with_checksums(records)
            changed = np.flatnonzero(same & (records["check"] != before["check"]))
            order = changed[np.argsort(rows[changed])]
            try:
                slots = rows[order] - segment.rows.first
                segment.commit(slots, records[order])
            except OSError as error:
                log.warning("times of %d pages are not written: %s", len(order), error)
                outcomes[changed] = _REFUSED
                # What was promised before still is; more is counted than that.
                return outcomes[leader]
            index.words[rows[order]] = records_in_words(records[order])
            index.timed = True
            ledger.move(each, counted[cut], records[cut])
            if batch.expire_at is not None and segment.name.state == "open":
                self._tell_others(segment)
        return outcomes[leader]

    def _tell_others(self, segment: Segment) -> None:
        """Have other processes read the records again of a segment that is filled."""
        with suppress(OSError), self._catalog.folder_of(segment).own_change():
            os.utime(segment.folder)

    # --- Erasing -------------------------------------------------------------

    def erase_expired(self, stopped: threading.Event | None = None) -> int:
        """Overwrite pages whose time is over, and forget them; return how many.

        Those in segments that another process fills are left to that process.
        """
        with suppress(OSError):
            self._catalog.refresh(missed=True)
        with self._catalog.lock:
            rows = self._index.expired_rows(GRACE_S)
            numbers = self._index.segment_of[rows]
        over, erased = partial(self._index.is_expired, grace_s=GRACE_S), 0
        for number in np.unique(numbers).tolist():
            # Another process may delete it in this moment.
            with suppress(FileNotFoundError):
                if not (stopped and stopped.is_set()):
                    erased += self._erase_in(number, lambda: rows, over)
        self._catalog.counts["pages_expired"] += erased
        return erased

    def erase(self, digests: UInt64Array, deadline_s: float) -> BoolArray:
        """Overwrite pages, and forget them in all processes.

        Returns:
            bool (n,): which are gone. The others are in segments that another process
            fills: it would find and load them all the same.
        """
        index, lock = self._index, self._catalog.lock
        self._catalog.refresh(missed=True, always=True)
        wanted = {*map(tuple, digests.tolist())}
        with lock:
            numbers = index.segment_of[index.rows_of(digests)]
        for number in np.unique(numbers).tolist():
            # Its new name makes all others read it again, without these pages.
            with suppress(OSError):
                if time.monotonic() <= deadline_s:
                    self._erase_in(
                        number,
                        lambda: index.rows_of(digests),
                        lambda row: (*index.words[row, :2].tolist(),) in wanted,
                    )
        with lock:
            left = {*map(tuple, index.words[index.rows_of(digests), :2].tolist())}
        return np.array([one not in left for one in map(tuple, digests.tolist())])

    def erase_timed(self, found: LookupResult) -> None:
        """Overwrite those of some pages that go before their time.

        Those in segments that another process fills are left to their deletion.
        """
        timed = found.records["expire_at"] > 0
        timed |= self._index.max_age_s > 0
        rows, records = found.rows[timed], self._index.records
        believed = dict(zip(rows.tolist(), found.records[timed], strict=True))
        for number in np.unique(found.numbers[timed]).tolist():
            with suppress(OSError):
                self._erase_in(
                    number, lambda: rows, lambda row: records[row] == believed[row]
                )

    def _erase_in(
        self,
        number: int,
        candidates: Callable[[], Int64Array],
        still: Callable[[int], bool],
    ) -> int:
        """Overwrite pages of one segment, unless another process fills it.

        Args:
            number: Of the segment in the index.
            candidates: Return rows that may hold such a page, of any segment: asked
                once the segment was read again.
            still: Say of a row whether it holds such a page.
        """
        segment = self._catalog.segments.get(number)
        if segment is None:
            return 0
        with self.writing(segment) as writes:
            if not writes:
                return 0
            with self._catalog.lock:
                rows = candidates()
                rows = np.unique(rows[self._index.segment_of[rows] == number])
            return self._erase(segment, rows, still)

    def _erase(
        self, segment: Segment, rows: Int64Array, still: Callable[[int], bool]
    ) -> int:
        """Overwrite the slots of some pages, then their records."""
        erased, size = [], segment.slot_bytes
        fd = open_file(segment.folder, segment.name.data, os.O_WRONLY)
        try:
            with closing_fd(fd):
                for row in rows.tolist():
                    # Under the lock no other thread evicts the page and fills its slot.
                    with self._catalog.lock:
                        if not (segment.owned and still(row)):
                            continue
                        slots = np.array([row - segment.rows.first])
                        wipe(fd, int(slots[0]) * size, size)
                        erased.append(read_records(segment.index_fd, slots)[0])
                        erase_records(segment.index_fd, slots)
                        self._index.forget_in(segment.rows, slots)
                os.fdatasync(fd)
        finally:
            self._catalog.ledger.give_back(size, np.array(erased, RECORD))
        return len(erased)


def _ends_of(batch: Batch, positions: Int64Array, records: Records) -> Int64Array:
    """Return when pages are to expire, asked now or before; 0 for never."""
    ends = records["expire_at"].astype(np.int64)
    if batch.expire_at is None:
        return ends
    asked = batch.expire_at[positions]
    return np.where(asked > 0, asked, ends)

"""The arrays of one call, written down once for compiled code.

A call of up to `MOST_PAGES` pages takes a `CallArrays` and gives it back when it has
ended: so no call makes arrays, or asks each of them for its address.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvdock.native import Movement, address_of
from kvdock_segments.format import RECORD

if TYPE_CHECKING:
    from kvdock.native import Library

MOST_PAGES = 512


class CallArrays:
    """Arrays of one call, each of `MOST_PAGES` pages.

    Attributes:
        stored_ns: int64, since when each page counts as stored.
        used_ns: int64, when each page was used.
        segments: int64, numbers of the segments that hold the pages.
        file_of: int64, the place in `segments` of each page's.
        offsets: int64, where each page begins in its file.
        slot_bytes: int64, of those segments.
        tokens: int64, of their files, where those are descriptors; else the engine
            goes by the request alone.
        slots: int64, of pages that are stored.
        expected: uint64, checksums of the records.
        records: of pages that were written.
        movement: Of their bytes, over the same arrays.
        address: Of the words that say where the arrays are.
    """

    def __init__(self, compiled: Library) -> None:
        # In the order of the words, as the library reads them.
        rows, stored_ns, used_ns, segments, slot_bytes, slots, *moved = (
            np.zeros(MOST_PAGES, np.int64) for _ in range(11)
        )
        order, file_of, offsets, tokens, files = moved
        expected, sums = np.zeros((2, MOST_PAGES), np.uint64)
        records = np.zeros(MOST_PAGES, RECORD)
        errors = np.zeros(MOST_PAGES, np.int32)
        self.stored_ns, self.used_ns, self.segments = stored_ns, used_ns, segments
        self.file_of, self.offsets, self.slots = file_of, offsets, slots
        self.expected, self.records = expected, records
        self.slot_bytes, self.tokens = slot_bytes, tokens
        self.movement = Movement(
            compiled=compiled,
            order=order,
            files=files,
            offsets=offsets,
            sums=sums,
            nbytes=np.zeros(MOST_PAGES, np.int64),
            errors=errors,
        )
        numbers = (rows, stored_ns, used_ns, segments, slot_bytes, slots, *moved)
        every = (*numbers, expected, sums, records, errors)
        self._words = np.array([*map(address_of, every)], np.int64)
        self._kept = every
        self.address = address_of(self._words)

"""Rows: memory of the core that pages of one pool pass through between tiers."""

from __future__ import annotations

import threading

import numpy as np

from kvdock.arrays import Int64Array


class RowChunks:
    """Rows in chunks of equal size, each used by one load or copy at a time.

    Args:
        chunks: How many.
        chunk_rows: Rows of a chunk, each for one page.
        first: The number of the first row.
    """

    def __init__(self, chunks: int, chunk_rows: int, first: int = 0) -> None:
        self.chunk_rows = chunk_rows
        starts = [first + at * chunk_rows for at in range(chunks)]
        self._free = [np.arange(at, at + chunk_rows) for at in starts]
        self._lock = threading.Lock()

    def take(self) -> Int64Array | None:
        """Return the rows of a free chunk, int64 (chunk_rows,), or None."""
        with self._lock:
            return self._free.pop() if self._free else None

    def release(self, rows: Int64Array) -> None:
        """Release what `take` returned."""
        with self._lock:
            self._free.append(rows)

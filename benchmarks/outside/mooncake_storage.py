"""Mooncake's storage benchmark, its interface: kvdock and one file of slots.

Written anew from the documentation of `storage_benchmark_v1`, which no package brings:
a `Storage` has `read` and `write`, which return milliseconds, `exists` and `delete`;
pages have numbers, those of the blocks of a trace. `SlotFile` does what Mooncake's own
class does: a file that is allocated before, a page in the place of its number, nothing
verified, and what is in the place before is overwritten. `KvdockPages` can stand in for
it. A part of a page is not read or written on its own.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvdock_store import attach


class SlotFile:
    """One file; a page's number is its place."""

    def __init__(self, folder: Path, page_bytes: int, max_pages: int) -> None:
        self._page_bytes = page_bytes
        self._max_pages = max_pages
        self._fd = os.open(folder / "data.bin", os.O_RDWR | os.O_CREAT, 0o600)
        os.posix_fallocate(self._fd, 0, page_bytes * max_pages)
        self._buffer = np.random.default_rng(7).bytes(page_bytes)
        self._into = bytearray(page_bytes)
        self._written: set[int] = set()

    def read(self, page_id: int) -> float:
        """Read a page."""
        begun = time.perf_counter()
        place = page_id % self._max_pages * self._page_bytes
        os.preadv(self._fd, [self._into], place)
        return 1e3 * (time.perf_counter() - begun)

    def write(self, page_id: int) -> float:
        """Write a page."""
        begun = time.perf_counter()
        place = page_id % self._max_pages * self._page_bytes
        os.pwrite(self._fd, self._buffer, place)
        self._written.add(page_id)
        return 1e3 * (time.perf_counter() - begun)

    def exists(self, page_id: int) -> bool:
        """Return whether a page was written, by this process."""
        return page_id in self._written

    def delete(self, page_id: int) -> bool:
        """Forget a page."""
        self._written.discard(page_id)
        return True

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class KvdockPages:
    """Pages in kvdock's file backend, from one row of memory, to another."""

    def __init__(self, folder: Path, page_bytes: int, max_pages: int) -> None:
        memory = np.ones((2, page_bytes), np.uint8)
        memory[0] = np.random.default_rng(7).integers(0, 256, page_bytes, np.uint8)
        # Pages of the turn before are evicted, but not within a turn.
        self._cache = attach(folder, memory, 2 * page_bytes * max_pages)

    def _hashes(self, page_id: int) -> list[str]:
        return [f"{page_id:064x}"]

    def read(self, page_id: int) -> float:
        """Load a page and verify it."""
        begun = time.perf_counter()
        if not self._cache.get(self._hashes(page_id), {"kv": [1]}).pages:
            raise KeyError(page_id)
        return 1e3 * (time.perf_counter() - begun)

    def write(self, page_id: int) -> float:
        """Store a page."""
        begun = time.perf_counter()
        if not self._cache.put(self._hashes(page_id), {"kv": [0]}).pages:
            raise RuntimeError(f"page {page_id} was not stored")
        return 1e3 * (time.perf_counter() - begun)

    def exists(self, page_id: int) -> bool:
        """Return whether a page is stored, by whichever process."""
        return self._cache.exists(self._hashes(page_id)).best == 1

    def delete(self, page_id: int) -> bool:
        """Delete a page."""
        return not self._cache.delete(self._hashes(page_id)).any()

    def close(self) -> None:
        """Release the attachment."""
        self._cache.close()


def replay(
    storage: SlotFile | KvdockPages, requests: Sequence[Sequence[int]]
) -> tuple[list[float], list[float]]:
    """Read what is stored of each request and write the rest; return milliseconds."""
    reads: list[float] = []
    writes: list[float] = []
    for request in requests:
        for page_id in request:
            if storage.exists(page_id):
                reads.append(storage.read(page_id))
            else:
                writes.append(storage.write(page_id))
    return reads, writes

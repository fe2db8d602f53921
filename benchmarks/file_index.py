"""How the resident index behaves: rebuilding it, its memory, its lookups."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from kvdock import Batch, Operation
from kvdock_segments import PosixIOEngine, SegmentStore, StoreLocation

sys.path.append(str(Path(__file__).parent.parent / "tests" / "harness"))

from index_files import write_index_files

PAGE_BYTES = 65536
SLOTS = 4096
NAMESPACE = hashlib.sha256(b"index").hexdigest()
ASKED = 1024
POOL = "kv"


def keys_of(first: int, count: int) -> list[str]:
    """Return the keys of consecutive pages."""
    return [f"{NAMESPACE}/{n:064x}.kv.L0-32" for n in range(first, first + count)]


def resident_bytes() -> int:
    """Return the memory that this process has."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def measure(folder: Path, pages: int) -> dict[str, float]:
    """Open a store of so many pages and look keys up in it.

    Returns:
        rebuild_s, bytes_per_page (what the process grew by), and
        exists_us_per_key (the quickest of many batches of 1024).
    """
    root = folder / f"index-{pages}"
    place = StoreLocation(
        root=root, namespace=NAMESPACE, pool=POOL, object_bytes=(PAGE_BYTES,)
    )
    write_index_files(place, pages, keys_of, segment_slots=SLOTS)
    before = resident_bytes()
    begun = time.perf_counter()
    store = SegmentStore(place, PosixIOEngine())
    rebuild_s = time.perf_counter() - begun
    grown = resident_bytes() - before
    rng = np.random.default_rng(1)
    took = []
    for _ in range(100):
        chosen = rng.integers(0, pages, ASKED).tolist()
        keys = [f"{NAMESPACE}/{n:064x}.kv.L0-32" for n in chosen]
        begun = time.perf_counter()
        found = store.run(Batch(Operation.EXISTS, keys))
        took.append(time.perf_counter() - begun)
        if not found.ok.all():
            raise RuntimeError("a stored page was not found")
    per_page = store.usage().index_bytes / pages
    store.close()
    shutil.rmtree(root)
    return {
        "rebuild_s": rebuild_s,
        "bytes_per_page": per_page,
        "resident_per_page": grown / pages,
        "exists_us_per_key": min(took) / ASKED * 1e6,
        "exists_us_per_key_median": statistics.median(took) / ASKED * 1e6,
    }

"""How the resident index behaves: rebuilding it, its memory, its lookups."""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import time
from pathlib import Path

import numpy as np

from kvdock.batch import Batch, Operation
from kvdock.segments import PosixIOEngine, SegmentStore, StoreLocation
from kvdock.segments.format import (
    RECORD,
    header_of,
    key_digests,
    key_seed,
    uses_at,
    with_checksums,
)
from kvdock.segments.paths import IndexName

PAGE_BYTES = 65536
SLOTS = 4096
NAMESPACE = hashlib.sha256(b"index").hexdigest()
ASKED = 1024
POOL = "kv"


def keys_of(first: int, count: int) -> list[str]:
    """Return the keys of consecutive pages."""
    return [f"{NAMESPACE}/{n:064x}.kv.L0-32" for n in range(first, first + count)]


def write_segments(root: Path, pages: int) -> None:
    """Write the index files of a store that holds so many pages, and no pages."""
    folder = root / NAMESPACE / f"{POOL}.{PAGE_BYTES}"
    folder.mkdir(mode=0o700, parents=True)
    for parent in (root, root / NAMESPACE):
        parent.chmod(0o700)
    seed = key_seed(NAMESPACE)
    for segment, first in enumerate(range(0, pages, SLOTS)):
        count = min(SLOTS, pages - first)
        records = np.zeros(count, RECORD)
        records["key_low"], records["key_high"] = key_digests(
            keys_of(first, count), seed
        ).T
        records["nbytes"] = PAGE_BYTES
        records["stored_ns"] = 1
        records["segment"] = segment
        records["generation"] = 1
        records["slot"] = np.arange(count)
        name = IndexName(segment, 1, "idx")
        with (folder / str(name)).open("wb") as file:
            file.write(header_of(segment, 1, SLOTS, PAGE_BYTES, PAGE_BYTES))
            file.seek(128)
            file.write(with_checksums(records).tobytes())
            file.truncate(uses_at(SLOTS) + 8 * SLOTS)
        with (folder / name.data).open("wb") as file:
            file.truncate(SLOTS * PAGE_BYTES)


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
    write_segments(root, pages)
    place = StoreLocation(
        root=root, namespace=NAMESPACE, pool=POOL, object_bytes=(PAGE_BYTES,)
    )
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

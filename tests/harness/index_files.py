"""Index files of stores that were never filled: for tests and benchmarks of size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvdock_segments.format import (
    RECORD,
    RECORDS_AT,
    USE_BYTES,
    header_of,
    key_digests,
    key_seed,
    uses_at,
    with_checksums,
)
from kvdock_segments.paths import IndexName

if TYPE_CHECKING:
    from kvdock_segments.limits import StoreLocation


def write_index_files(
    where: StoreLocation,
    pages: int,
    keys_of: Callable[[int, int], Sequence[str]],
    *,
    segment_slots: int = 4096,
) -> None:
    """Write the index files of a store that holds so many pages.

    The files of pages have their size and no content: opening the store and
    looking up keys is the same as with pages, loading them is not.

    Args:
        where: The store; its pool has one size of objects.
        pages: How many pages it is to hold.
        keys_of: From the number of a page and a count to that many keys.
        segment_slots: Pages in each segment.
    """
    (page_bytes,) = where.object_bytes
    folder = where.root / where.namespace / f"{where.pool}.{page_bytes}"
    folder.mkdir(mode=0o700, parents=True)
    for parent in (where.root, where.root / where.namespace):
        parent.chmod(0o700)
    seed = key_seed(where.namespace)
    for segment, first in enumerate(range(0, pages, segment_slots)):
        count = min(segment_slots, pages - first)
        records = np.zeros(count, RECORD)
        digests = key_digests(keys_of(first, count), seed)
        records["key_low"], records["key_high"] = digests.T
        records["stored_ns"] = 1
        records["segment"] = segment
        records["slot"] = np.arange(count)
        name = IndexName(segment, 1, "idx")
        with (folder / str(name)).open("wb") as file:
            file.write(header_of(segment, 1, segment_slots, page_bytes, page_bytes))
            file.seek(RECORDS_AT)
            file.write(with_checksums(records).tobytes())
            file.truncate(uses_at(segment_slots) + USE_BYTES * segment_slots)
        with (folder / name.data).open("wb") as file:
            file.truncate(segment_slots * page_bytes)

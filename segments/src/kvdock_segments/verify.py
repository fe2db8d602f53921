"""Verify every page of a namespace on disk.

Reads files only; processes may use the store meanwhile.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import xxhash

from kvdock.errors import KvdockError, NamespaceError
from kvdock.stores import Verified
from kvdock_segments.cleanup import linked_segments
from kvdock_segments.format import are_same, expired, records_in_words
from kvdock_segments.index_file import read_records, retire_records
from kvdock_segments.namespace_files import damaged_files
from kvdock_segments.paths import data_name
from kvdock_segments.walk import Location, StoredSegment, namespace_of, segments

_PIECE_BYTES = 4 << 20
_NOT_FOR_US = (errno.EROFS, errno.EACCES, errno.EPERM)


def verify_namespace(
    root: Path,
    namespace: str,
    progress: Callable[[int], None] | None = None,
    *,
    heal: bool = False,
    shared: bool = False,
) -> Verified:
    """Read every page of a namespace and compare its checksum.

    `progress` is called with the bytes that were read since its last call. With `heal`,
    the records of wrong pages are erased, as a read of them does: the next write in any
    process stores them again.

    Raises:
        KvdockError: If `heal` is set and other users own the root or can write it.
    """
    home = root / namespace
    damaged: list[str] = []
    unreadable: list[Path] = []
    bad: list[Location] = []
    good = lost = failed = forgotten = 0

    def broken(path: Path, error: OSError | None) -> None:
        if error is not None and error.errno in _NOT_FOR_US:
            raise KvdockError(
                f"{home} cannot be {'healed' if heal else 'read'}: "
                f"{error.strerror} ({error.filename})",
                fix="Run this as the user who owns the store, and with --heal where "
                "its file system can be written.",
            ) from error
        unreadable.append(path)

    shared = shared or not heal
    with suppress(NamespaceError), namespace_of(root, namespace, shared=shared) as fd:
        damaged += damaged_files(fd, namespace)
        linked = [one for group in linked_segments(fd) for one in group]
        damaged += sorted(f"{pool}/{data_name(number)}" for pool, number in linked)
    walk = segments(root, namespace, shared=shared, write=heal, broken=broken)
    for segment in walk:
        contents = segment.contents
        lost += len(contents.corrupt_slots)
        failed += len(contents.failed)
        wrong: list[int] = []
        for slot, right in _checked(segment, progress):
            if right:
                good += 1
            elif _stands(segment, slot):  # else it was recycled while it was read
                wrong.append(slot)
        bad += map(segment.location, wrong)
        if heal:
            slots = np.array([*wrong, *contents.corrupt_slots.tolist()], np.int64)
            believed = contents.records[np.array(wrong, np.int64)]
            believed = np.concatenate([believed, contents.corrupt_records])
            forgotten += int(retire_records(segment.index_fd, slots, believed).sum())
    return Verified(
        namespace=namespace,
        good=good,
        bad=tuple(bad),
        corrupt_records=lost,
        unreadable_segments=tuple(unreadable),
        damaged_files=tuple(home / name for name in damaged),
        forgotten=forgotten,
        failed_slots=failed,
    )


def _checked(
    segment: StoredSegment, progress: Callable[[int], None] | None
) -> Iterator[tuple[int, bool]]:
    """Yield the slots of a segment, and whether their bytes are right."""
    # What has expired may be overwritten already.
    over = expired(records_in_words(segment.contents.records), time.time())
    for slot in np.flatnonzero(segment.live & ~over).tolist():
        spot = segment.location(slot)
        yield slot, checksum(segment.data_fd, spot) == spot.checksum
        if progress:
            progress(spot.nbytes)


def _stands(segment: StoredSegment, slot: int) -> bool:
    """Return whether a record is on disk as it was read."""
    stored = read_records(segment.index_fd, np.array([slot]))
    return bool(are_same(stored, segment.contents.records[slot : slot + 1])[0])


def checksum(fd: int, spot: Location) -> int | None:
    """Return the checksum of an object's bytes; None if they are missing."""
    state = xxhash.xxh3_64()
    done = 0
    while done < spot.nbytes:
        try:
            piece = os.pread(
                fd, min(_PIECE_BYTES, spot.nbytes - done), spot.offset + done
            )
        except OSError:
            return None  # the disk cannot read it: as bad as wrong bytes
        if not piece:
            return None
        state.update(piece)
        done += len(piece)
    return state.intdigest()

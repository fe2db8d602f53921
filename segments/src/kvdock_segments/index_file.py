"""The index file of a segment: its header, records and times of use."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise

import attrs
import numpy as np

from kvdock.arrays import BoolArray, Int64Array
from kvdock_segments import ownership
from kvdock_segments.format import (
    COMMITS_AT,
    DELETIONS_AT,
    HEADER_BYTES,
    MOST_SLOTS,
    RECORD,
    RECORD_BYTES,
    RECORDS_AT,
    USE_BYTES,
    Records,
    are_failed,
    credible_uses,
    index_bytes,
    parse_header,
    uses_at,
    valid,
)
from kvdock_segments.io import preallocate_file
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import IndexName, open_file


@attrs.frozen(eq=False)
class IndexContents:
    """Contents of an index file when it was read.

    Args:
        slots: Number of slots.
        slot_bytes: Bytes from one slot to the next.
        object_bytes: Size of the objects.
        commits: Number of commits; changes whenever records are added.
        deletions: Changes whenever another process than its writer deletes records.
        records: (slots,); invalid ones are zero.
        used_ns: int64 (slots,).
        corrupt_slots: int64 (n,), slots with an invalid record.
        corrupt_records: (n,), those records as they are.
        failed: (n,), records of slots that could not be written.
    """

    slots: int
    slot_bytes: int
    object_bytes: int
    commits: int
    deletions: bytes
    records: Records
    used_ns: Int64Array
    corrupt_slots: Int64Array
    corrupt_records: Records
    failed: Records


def open_index(folder: int, name: str, *, write: bool = False) -> int:
    """Open an index file."""
    return open_file(folder, name, os.O_RDWR if write else os.O_RDONLY)


def read_header(fd: int, name: IndexName) -> Records | None:
    """Read a header; None if it is torn, another segment's, or of another version."""
    header = parse_header(os.pread(fd, HEADER_BYTES, 0))
    if header is None or int(header["segment"][0]) != name.segment:
        return None
    if int(header["slots"][0]) > MOST_SLOTS or int(header["slot_bytes"][0]) >= 2**47:
        return None  # beyond what kvdock writes
    return header


def read_contents(fd: int, name: IndexName, data_bytes: int) -> IndexContents | None:
    """Read an index file whole; None if its head is torn or of another version.

    Records of other segments are ignored, and slots beyond the `data_bytes` of the file
    of pages are lost.
    """
    header = read_header(fd, name)
    if header is None:
        return None
    slots, slot_bytes = int(header["slots"][0]), int(header["slot_bytes"][0])
    raw = b""
    # Bytes beyond the last time of use are not read, however many there are.
    while chunk := os.pread(fd, index_bytes(slots) - len(raw), len(raw)):
        raw += chunk
    whole = min(slots, max(0, len(raw) - RECORDS_AT) // RECORD_BYTES)
    records = np.zeros(slots, RECORD)
    if whole:  # a file may end before its first record
        records[:whole] = np.frombuffer(raw, RECORD, whole, RECORDS_AT)
    there = records["check"] != 0
    numbers = np.arange(slots)
    good = valid(records, header, numbers)
    if slot_bytes:
        good &= (numbers + 1) * slot_bytes <= data_bytes
        good &= int(header["object_bytes"][0]) <= slot_bytes
    wrong = np.flatnonzero(there & ~good)
    corrupt_slots, failed_slots = wrong, records[:0].copy()
    if len(wrong):
        failed = are_failed(records[wrong], name.segment, wrong)
        failed_slots, corrupt_slots = records[wrong[failed]], wrong[~failed]
    corrupt_records = records[corrupt_slots]
    records[~good] = np.zeros((), RECORD)
    used_ns = records["stored_ns"].astype(np.int64)
    if len(raw) >= index_bytes(slots):
        used_ns = np.maximum(used_ns, np.frombuffer(raw, "<i8", slots, uses_at(slots)))
    # No checksum covers the times of use: a damaged one would be the latest for ever.
    return IndexContents(
        slots=slots,
        slot_bytes=slot_bytes,
        object_bytes=int(header["object_bytes"][0]),
        commits=int.from_bytes(raw[COMMITS_AT:DELETIONS_AT], "little"),
        deletions=raw[DELETIONS_AT : DELETIONS_AT + 8],
        records=records,
        used_ns=credible_uses(used_ns),
        corrupt_slots=corrupt_slots,
        corrupt_records=corrupt_records,
        failed=failed_slots,
    )


def read_commits(fd: int) -> int:
    """Return the number that changes whenever records are added."""
    return int.from_bytes(os.pread(fd, 8, COMMITS_AT), "little")


def read_deletions(fd: int) -> bytes:
    """Return what changes whenever records are deleted, 8 bytes."""
    return os.pread(fd, 8, DELETIONS_AT)


def note_deletion(fd: int) -> None:
    """Have others that know these records read them again.

    A number that is drawn, as two processes may delete at the same moment.
    """
    os.pwrite(fd, secrets.token_bytes(8), DELETIONS_AT)


def read_uses(fd: int, slots: int, *, most: int = MOST_SLOTS) -> Int64Array:
    """Return when each slot was last used, int64 (slots,); 0 where unknown.

    No more than the first `most` are read.
    """
    size = min(slots, most) * USE_BYTES
    raw = os.pread(fd, size, uses_at(slots)).ljust(size, b"\0")
    return credible_uses(np.frombuffer(raw, "<i8").astype(np.int64))


def _runs(slots: Int64Array) -> Iterator[tuple[int, int]]:
    """Divide slots into ascending runs of neighbours: (first, last + 1)."""
    if not len(slots):
        return iter(())
    edges = (slots[1:] - slots[:-1] != 1).nonzero()[0] + 1
    return pairwise([0, *edges.tolist(), len(slots)])


def read_records(fd: int, slots: Int64Array) -> Records:
    """Read records; neighbours in one call.

    Args:
        fd: The open index file.
        slots: int64 (n,).

    Returns:
        (n,), as they are; zeros beyond the end of the file.
    """
    raw = bytearray()
    for first, last in _runs(slots):
        at = RECORDS_AT + int(slots[first]) * RECORD_BYTES
        size = (last - first) * RECORD_BYTES
        raw += os.pread(fd, size, at).ljust(size, b"\0")
    return np.frombuffer(raw, RECORD)


def write_records(fd: int, slots: Int64Array, records: Records) -> None:
    """Write records; neighbours in one call.

    Args:
        fd: The open index file.
        slots: int64 (n,), ascending.
        records: (n,).
    """
    raw = memoryview(records.tobytes())
    for first, last in _runs(slots):
        part = raw[first * RECORD_BYTES : last * RECORD_BYTES]
        at = RECORDS_AT + int(slots[first]) * RECORD_BYTES
        if os.pwrite(fd, part, at) != len(part):
            raise OSError(errno.ENOSPC, "an index file could not be written whole")


def erase_records(fd: int, slots: Int64Array) -> None:
    """Overwrite records with zeros: these slots hold nothing."""
    if len(slots):
        ordered = np.sort(slots)
        write_records(fd, ordered, np.zeros(len(ordered), RECORD))


def retire_records(fd: int, slots: Int64Array, believed: Records) -> BoolArray:
    """Erase records that are still the expected ones.

    Args:
        fd: The index file, open for writing.
        slots: int64 (n,), all different.
        believed: (n,).

    Returns:
        bool (n,): which of them were erased; the others had been replaced.
    """
    # Not by all of a record: one that expired before the clock was set back is marked
    # in memory, and its checksum is not.
    same: BoolArray = read_records(fd, slots)["check"] == believed["check"]
    erase_records(fd, slots[same])
    return same


def make_index(
    folder: int, name: IndexName, header: bytes, slots: int, kept_by: WriterLiveness
) -> int:
    """Create and claim the index file of a new segment in state "new".

    Raises:
        OSError: If there is no space; EAGAIN if it was swept away before it was
            claimed.
    """
    fd = open_file(folder, str(name), os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        _begin(fd, kept_by)
        preallocate_file(fd, index_bytes(slots))
        os.pwrite(fd, header, 0)
    except OSError:
        os.close(fd)
        with suppress(FileNotFoundError):
            os.unlink(str(name), dir_fd=folder)
        raise
    return fd


def _begin(fd: int, kept_by: WriterLiveness) -> None:
    swept = kept_by is WriterLiveness.LOCKS and not ownership.acquire(fd)
    if swept or not os.fstat(fd).st_nlink:
        raise OSError(errno.EAGAIN, "swept away as a leftover of a dead writer")

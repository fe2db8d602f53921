"""One segment: a file of equal slots and the index file that describes it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock_segments import ownership
from kvdock_segments.format import (
    COMMITS_AT,
    FORMAT_VERSION,
    HEADER_BYTES,
    RECORD,
    RECORD_BYTES,
    RECORDS_AT,
    USE_BYTES,
    Records,
    are_failed,
    are_same,
    as_current,
    credible_uses,
    failed_records,
    header_of,
    index_bytes,
    parse_header,
    promised,
    records_in_words,
    uses_at,
    valid,
    with_checksums,
)
from kvdock_segments.io import preallocate_file
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import IndexName, open_and_look, open_file

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array
    from kvdock_segments.index import RowRange


_MOST_SLOTS = 1 << 16
"""Maximum number of slots of an index file: the number of a slot has 16 bits."""
_RETRY_S = 60.0
"""Seconds before a slot that could not be written is tried again; eight times as long
after each further failure."""
_LONGEST_RETRY_S = 24 * 3600.0


@attrs.frozen(eq=False)
class IndexContents:
    """Contents of an index file when it was read.

    Args:
        version: Version of its layout.
        slots: Number of slots.
        slot_bytes: Bytes from one slot to the next.
        object_bytes: Size of the objects.
        commits: Number of commits; changes whenever records are added.
        records: (slots,), in the layout that is written; invalid ones are zero.
        used_ns: int64 (slots,).
        corrupt_slots: int64 (n,), slots with an invalid record.
        corrupt_records: (n,), those records as they are.
        failed: (n,), records of slots that could not be written.
    """

    version: int
    slots: int
    slot_bytes: int
    object_bytes: int
    commits: int
    records: Records
    used_ns: Int64Array
    corrupt_slots: Int64Array
    corrupt_records: Records
    failed: Records


def open_index(folder: int, name: str, *, write: bool = False) -> int:
    """Open an index file."""
    return open_file(folder, name, os.O_RDWR if write else os.O_RDONLY)


def read_header(fd: int, name: IndexName) -> Records | None:
    """Read a header; None if it is torn, another segment's, or of a later version."""
    header = parse_header(os.pread(fd, HEADER_BYTES, 0))
    if header is None or int(header["segment"][0]) != name.segment:
        return None
    if int(header["slots"][0]) > _MOST_SLOTS or int(header["slot_bytes"][0]) >= 2**47:
        return None  # beyond what kvdock writes
    return header


def read_contents(fd: int, name: IndexName, data_bytes: int) -> IndexContents | None:
    """Read an index file whole; None if its head is torn or of a later version.

    Records of other segments are ignored, and slots beyond the `data_bytes` of the file
    of pages are lost.
    """
    header = read_header(fd, name)
    if header is None:
        return None
    version = int(header["version"][0])
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
    records = as_current(records, version)
    used_ns = records["stored_ns"].astype(np.int64)
    if len(raw) >= index_bytes(slots):
        used_ns = np.maximum(used_ns, np.frombuffer(raw, "<i8", slots, uses_at(slots)))
    # No checksum covers the times of use: a damaged one would be the latest for ever.
    return IndexContents(
        version=version,
        slots=slots,
        slot_bytes=slot_bytes,
        object_bytes=int(header["object_bytes"][0]),
        commits=int.from_bytes(raw[COMMITS_AT : COMMITS_AT + 8], "little"),
        records=records,
        used_ns=credible_uses(used_ns),
        corrupt_slots=corrupt_slots,
        corrupt_records=corrupt_records,
        failed=failed_slots,
    )


def holds_promises(fd: int, name: IndexName) -> bool:
    """Return whether a page of a segment may not be evicted now."""
    contents = read_contents(fd, name, 2**62)
    if contents is None:
        return False
    return bool(promised(records_in_words(contents.records)).any())


def read_commits(fd: int) -> int:
    """Return the number that changes whenever records are added."""
    return int.from_bytes(os.pread(fd, 8, COMMITS_AT), "little")


def read_uses(fd: int, slots: int, *, most: int = _MOST_SLOTS) -> Int64Array:
    """Return when each slot was last used, int64 (slots,); 0 where unknown.

    No more than the first `most` are read.
    """
    size = min(slots, most) * USE_BYTES
    raw = os.pread(fd, size, uses_at(slots)).ljust(size, b"\0")
    return credible_uses(np.frombuffer(raw, "<i8").astype(np.int64))


def read_record(fd: int, slot: int) -> bytes:
    """Return the bytes of one record."""
    return os.pread(fd, RECORD_BYTES, RECORDS_AT + slot * RECORD_BYTES)


def credible_retries(retry_ns: Int64Array) -> Int64Array:
    """Return times of a next try, cut where a clock was ahead when they were noted."""
    return np.minimum(retry_ns, time.time_ns() + int(_LONGEST_RETRY_S * 1e9))


def _runs(slots: Int64Array) -> Iterator[tuple[int, int]]:
    """Divide ascending slots into runs of neighbours: (first, last + 1)."""
    if not len(slots):
        return iter(())
    edges = np.flatnonzero(slots[1:] - slots[:-1] != 1) + 1
    return pairwise([0, *edges.tolist(), len(slots)])


def read_records(fd: int, slots: Int64Array) -> Records:
    """Read records; neighbours in one call.

    Args:
        fd: The open index file.
        slots: int64 (n,), ascending.

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


def retire_records(
    fd: int, slots: Int64Array, believed: Records, version: int = FORMAT_VERSION
) -> BoolArray:
    """Erase records that are still the expected ones.

    Args:
        fd: The index file, open for writing.
        slots: int64 (n,), all different.
        believed: (n,).
        version: Version of the file.

    Returns:
        bool (n,): which of them were erased; the others had been replaced.
    """
    stored = b"".join(
        read_record(fd, slot).ljust(RECORD_BYTES, b"\0") for slot in slots.tolist()
    )
    same = are_same(np.frombuffer(stored, RECORD), believed, version)
    erase_records(fd, slots[same])
    return same


def convert_index(
    folder: int, name: IndexName, contents: IndexContents, kept_by: WriterLiveness
) -> int:
    """Replace a claimed index file by one of the version that is written.

    A process that is killed meanwhile leaves the old file or the new one, whole.

    Returns:
        The descriptor of the new file, claimed.

    Raises:
        OSError: If it cannot be written; the old one stays.
    """
    fresh = IndexName(name.segment, name.generation, "new")
    header = header_of(
        name.segment,
        name.generation,
        contents.slots,
        contents.slot_bytes,
        contents.object_bytes,
    )
    with suppress(FileNotFoundError):  # of a process that was killed
        os.unlink(str(fresh), dir_fd=folder)
    fd = make_index(folder, fresh, header, contents.slots, kept_by)
    try:
        there = np.flatnonzero(contents.records["check"] != 0)
        records = contents.records[there]
        with_checksums(records)
        write_records(fd, there, records)
        os.pwrite(fd, contents.used_ns.astype("<i8").tobytes(), uses_at(contents.slots))
        commits = contents.commits + 1
        os.pwrite(fd, commits.to_bytes(8, "little"), COMMITS_AT)
        os.rename(str(fresh), str(name), src_dir_fd=folder, dst_dir_fd=folder)
    except OSError:
        os.close(fd)
        with suppress(OSError):
            os.unlink(str(fresh), dir_fd=folder)
        raise
    return fd


@attrs.frozen
class FailedSlot:
    """A slot that could not be written.

    Args:
        failures: How often in a row.
        retry_ns: Time before which it is not tried again, ns since 1970.
    """

    failures: int
    retry_ns: int

    @classmethod
    def after(cls, known: FailedSlot | None) -> FailedSlot:
        """Return what is known of a slot that failed just now."""
        failures = known.failures + 1 if known else 1
        pause_s = min(_RETRY_S * 8.0 ** min(failures - 1, 9), _LONGEST_RETRY_S)
        return cls(failures, time.time_ns() + int(pause_s * 1e9))


@attrs.define(eq=False)
class Segment:
    """State of one segment in this process.

    Args:
        rows: Its rows in the index.
        commits: As last seen.
        index_fd: The index file held open while this process is its writer,
            else -1.
        links: Names of the index file when it was claimed.
        touched: Whether times of use are newer than on disk.
        liveness: How living writers are detected.
        last_seen: Name and commits of an open segment as last seen.
        unchanged_since_s: Since when they have not changed.
        failed: Slots that could not be written and are not used until they are due.
        retry_s: Time on the monotonic clock before which it is not claimed, because
            its index file could not be written.
        pause_s: How long it was not claimed for that reason.
        probed_s: When it was last tried because nothing else was left.
    """

    folder: int
    name: IndexName
    rows: RowRange
    slot_bytes: int
    version: int = FORMAT_VERSION
    commits: int = 0
    index_fd: int = -1
    links: int = 1
    touched: bool = False
    liveness: WriterLiveness = WriterLiveness.LOCKS
    last_seen: tuple[IndexName, int] | None = None
    unchanged_since_s: float = 0.0
    failed: dict[int, FailedSlot] = attrs.Factory(dict)
    retry_s: float = 0.0
    pause_s: float = 0.0
    probed_s: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes that both of its files take."""
        return self.rows.slots * self.slot_bytes + index_bytes(self.rows.slots)

    @property
    def owned(self) -> bool:
        """Return whether this process is its writer."""
        return self.index_fd >= 0

    def slots_aside(self) -> list[int]:
        """Return the slots that failed and are not due to be tried again."""
        now_ns = time.time_ns()
        return [slot for slot, one in self.failed.items() if one.retry_ns > now_ns]

    def free_slots(self, live: BoolArray) -> Int64Array:
        """Return the slots that may be written, int64 (n,), ascending.

        Args:
            live: bool (slots,), which hold an object.
        """
        free = ~live
        if self.failed:
            free[self.slots_aside()] = False
        return np.flatnonzero(free)

    def learn_failed(self, contents: IndexContents) -> None:
        """Take over which slots failed from what was read; called under the lock."""
        live = contents.records["check"] != 0
        # What could not be noted on disk is known here alone.
        kept = {slot: one for slot, one in self.failed.items() if not live[slot]}
        rows = contents.failed
        slots, counts = rows["slot"].tolist(), rows["key_low"].tolist()
        times = credible_retries(rows["stored_ns"].astype(np.int64)).tolist()
        for slot, failures, retry_ns in zip(slots, counts, times, strict=True):
            kept[slot] = FailedSlot(failures, retry_ns)
        self.failed = kept

    def set_aside(self, slots: Int64Array) -> None:
        """Note slots that could not be written, on disk too if that can be done."""
        known = self.failed
        fresh = {slot: FailedSlot.after(known.get(slot)) for slot in slots.tolist()}
        self.failed |= fresh
        if not self.owned or not fresh:
            return
        slots = np.array(sorted(fresh))
        rows = failed_records(
            self.name.segment,
            slots,
            np.array([fresh[slot].failures for slot in slots.tolist()]),
            np.array([fresh[slot].retry_ns for slot in slots.tolist()]),
        )
        with suppress(OSError):
            write_records(self.index_fd, slots, rows)

    def rest(self) -> None:
        """Do not claim it for a while: its index file cannot be written or read."""
        self.pause_s = min(max(_RETRY_S, 8 * self.pause_s), _LONGEST_RETRY_S)
        self.retry_s = time.monotonic() + self.pause_s

    def try_again(self) -> None:
        """Count everything of it that failed as due."""
        self.retry_s = 0.0
        self.failed = {
            slot: attrs.evolve(one, retry_ns=0) for slot, one in self.failed.items()
        }

    def acquire(self) -> bool:
        """Become its writer under a new generation; False if it has a writer.

        Other processes see the new name and read the index again.
        """
        try:
            fd, status = open_and_look(self.folder, str(self.name), os.O_RDWR)
        except OSError:
            return False
        taken = self.name
        fresh = IndexName(taken.segment, taken.generation + 1, "open")
        try:
            if self._abandoned(fd):
                here = os.stat(str(taken), dir_fd=self.folder, follow_symlinks=False)
                if here.st_ino == status.st_ino:
                    self._rename(fresh)
                    self.index_fd, self.links = fd, here.st_nlink
                    return True
        except OSError:
            pass
        os.close(fd)
        return False

    def _abandoned(self, fd: int) -> bool:
        """Return whether it has no writer and is not pinned."""
        if self.liveness is WriterLiveness.LOCKS:
            return ownership.acquire(fd) and ownership.is_unpinned(fd)
        if self.name.state != "open":
            return True
        now_s = time.monotonic()
        seen = (self.name, read_commits(fd))
        if seen != self.last_seen:
            self.last_seen, self.unchanged_since_s = seen, now_s
        return now_s - self.unchanged_since_s > ownership.SILENCE_S

    def was_taken_over(self) -> bool:
        """Return whether another writer took it over, which locks prevent."""
        if self.liveness is WriterLiveness.LOCKS:
            return False
        try:
            os.stat(str(self.name), dir_fd=self.folder, follow_symlinks=False)
        except FileNotFoundError:
            return True
        return False

    def commit(self, slots: Int64Array, records: Records) -> None:
        """Publish records whose pages are written.

        Args:
            slots: int64 (n,), ascending.
            records: (n,).
        """
        if self.was_taken_over():
            raise OSError(errno.ESTALE, "another writer took this segment")
        write_records(self.index_fd, slots, records)
        self._count_commit()
        self.pause_s = 0.0
        if self.failed:
            for slot in slots.tolist():
                self.failed.pop(slot, None)

    def commit_each(self, slots: Int64Array, records: Records) -> BoolArray:
        """Publish records one by one, after `commit` has failed.

        Args:
            slots: int64 (n,).
            records: (n,).

        Returns:
            bool (n,): which of them are on disk.
        """
        done = np.zeros(len(slots), np.bool_)
        for at in range(len(slots)):
            with suppress(OSError):
                self.commit(slots[at : at + 1], records[at : at + 1])
                done[at] = True
        return done

    def _count_commit(self) -> None:
        self.commits += 1
        count = self.commits.to_bytes(8, "little")
        if os.pwrite(self.index_fd, count, COMMITS_AT) != len(count):
            raise OSError(errno.ENOSPC, "an index file could not be written whole")

    def _rename(self, name: IndexName) -> None:
        os.rename(
            str(self.name), str(name), src_dir_fd=self.folder, dst_dir_fd=self.folder
        )
        self.name = name

    def write_uses(self, used_ns: Int64Array) -> None:
        """Write the times of use to disk, for other processes and the next start."""
        with suppress(OSError):
            fd = open_index(self.folder, str(self.name), write=True)
            try:
                self.touched = False
                os.pwrite(fd, used_ns.astype("<i8").tobytes(), uses_at(self.rows.slots))
            finally:
                os.close(fd)

    def release(self, *, full: bool) -> None:
        """Stop being its writer; called under the lock.

        Unless it is full, another writer may fill it up.
        """
        fd, self.index_fd = self.index_fd, -1
        if fd < 0:
            return  # another thread dropped it after it was deleted
        if full:
            with suppress(OSError):
                self._rename(attrs.evolve(self.name, state="idx"))
        ownership.release(fd)


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

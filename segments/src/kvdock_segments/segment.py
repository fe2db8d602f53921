"""One segment: a file of equal slots and the index file that describes it."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress

import attrs
import numpy as np

from kvdock.arrays import BoolArray, Int64Array
from kvdock_segments import ownership
from kvdock_segments.format import (
    COMMITS_AT,
    Records,
    failed_records,
    index_bytes,
    uses_at,
)
from kvdock_segments.index_file import (
    IndexContents,
    open_index,
    read_commits,
    write_records,
)
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import IndexName, closing_fd, open_and_look, status_of

_RETRY_S = 60.0
"""Seconds before a slot that could not be written is tried again; eight times as long
after each further failure."""
_LONGEST_RETRY_S = 24 * 3600.0


@attrs.frozen
class RowRange:
    """The rows of one segment: slot n is row `first` + n."""

    number: int
    first: int
    slots: int

    @property
    def span(self) -> slice:
        """All of its rows."""
        return slice(self.first, self.first + self.slots)


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
        deletions: The same; see `IndexContents`.
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
    commits: int = 0
    deletions: bytes = bytes(8)
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
        # Cut where a clock was ahead when they were noted.
        latest_ns = time.time_ns() + int(_LONGEST_RETRY_S * 1e9)
        times = np.minimum(rows["stored_ns"].astype(np.int64), latest_ns).tolist()
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
        """Return whether another process took over or deleted what this one fills."""
        return status_of(self.folder, str(self.name)) is None

    def commit(self, slots: Int64Array, records: Records) -> None:
        """Publish records whose pages are written.

        Args:
            slots: int64 (n,), ascending.
            records: (n,).
        """
        if self.liveness is WriterLiveness.TIMEOUT and self.was_taken_over():
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
        with (
            suppress(OSError),
            closing_fd(open_index(self.folder, str(self.name), write=True)) as fd,
        ):
            self.touched = False
            os.pwrite(fd, used_ns.astype("<i8").tobytes(), uses_at(self.rows.slots))

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

"""The segments of one folder, kept up to date with other writers."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import numpy as np

from kvdock_segments.format import MOST_SLOTS, RECORD_BYTES, index_bytes, slots_of
from kvdock_segments.index_file import (
    IndexContents,
    open_index,
    read_commits,
    read_contents,
    read_deletions,
    read_header,
    read_records,
)
from kvdock_segments.paths import (
    OUT_OF_FILES,
    SETTLED_NS,
    IndexName,
    closing_fd,
    data_segment,
    listing,
    status_of,
)
from kvdock_segments.segment import Segment

if TYPE_CHECKING:
    from kvdock_segments.index import Index
from kvdock_segments.ownership import WriterLiveness

_SCAN_AFTER_S = 0.05
"""Seconds after which a folder is read again for changes of its own: as long as two
refreshes may lie apart at most."""


class SegmentDirectory:
    """The segments of one pool with one size of objects.

    Args:
        fd: Descriptor of the folder; closed with it.
        name: Name of the folder.
        numbers: Segment by its number in the index, of all folders.
        lock: Held around every use of the index.
    """

    def __init__(
        self,
        fd: int,
        name: str,
        object_bytes: int,
        index: Index,
        numbers: dict[int, Segment],
        lock: threading.RLock,
        liveness: WriterLiveness,
    ) -> None:
        self.fd = fd
        self.name = name
        self.object_bytes = object_bytes
        self.liveness = liveness
        self.segments: dict[int, Segment] = {}
        self.leftover_bytes = 0  # of files that belong to no known segment
        self.filling: list[Segment] = []  # open ones that are not ours
        self.failing: set[Segment] = set()  # those with places that failed
        self.grown_bytes = 0  # of segments that were added since the last scan
        self._segment_bytes = 0
        self._names: dict[str, tuple[IndexName | None, int]] = {}
        self._index = index
        self._numbers = numbers
        self._lock = lock
        self._seen_ns = -1
        self._read_ns = -1  # time of change when it was read
        self._own_ns = -1  # time of the last change of our own
        self._stamp_ns = 0  # time of change when it was last looked at
        self.unread = True  # whether it had changed by then
        self.settled = False  # whether it had certainly not changed by then
        self._scan_at_s = math.inf  # when it is read again for changes of its own
        self._refused: set[str] = set()  # names of index files that are not usable

    @property
    def nbytes(self) -> int:
        """Bytes of all segments and of all other files."""
        return self._segment_bytes + self.leftover_bytes

    def mark_stale(self) -> None:
        """Read the folder at the next refresh, even if its stamp is the same."""
        self._seen_ns = self._read_ns = -1

    def look(self) -> bool:
        """Note what `unread` and `settled` say; return whether it was deleted."""
        try:
            status = os.fstat(self.fd)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            return True  # by another host of a shared file system
        stamp_ns = self._stamp_ns = status.st_mtime_ns
        due_s = self._scan_at_s
        self.settled = stamp_ns == self._seen_ns and due_s == math.inf
        self.unread = stamp_ns != self._seen_ns or (
            due_s < math.inf and time.monotonic() >= due_s
        )
        return not status.st_nlink

    def changed(self, *, missed: bool = False) -> bool:
        """Return whether files were added, deleted or renamed since `scan`.

        Args:
            missed: Whether a change that shares its time with one of our own counts.
        """
        self.look()
        return self.unread or (missed and not self.settled)

    @contextmanager
    def own_change(self) -> Iterator[None]:
        """Rename files of this folder without reading it again at once.

        What another process changes meanwhile may have the same time of change, so
        the folder is read a moment later: once for many changes of our own. Before,
        nine of ten puts into a full store read it, for 166 us each.
        """
        known = self._stamp_ns == self._read_ns
        try:
            yield
        finally:
            if known:
                stamp = os.fstat(self.fd).st_mtime_ns
                self._seen_ns = self._read_ns = self._own_ns = self._stamp_ns = stamp
                due_s = time.monotonic() + _SCAN_AFTER_S
                self._scan_at_s = min(self._scan_at_s, due_s)

    def scan(self) -> bool:
        """Bring the index in line with the files; return whether it changed.

        Raises:
            OSError: If the folder cannot be read; the next scan reads it again.
        """
        try:
            return self._scan()
        except OSError:
            self.mark_stale()
            raise

    def _scan(self) -> bool:
        now_ns = time.time_ns()
        stamp = os.fstat(self.fd).st_mtime_ns
        self._scan_at_s = math.inf
        # A stamp that a later change may share is not kept: the folder is read again.
        self._read_ns = self._stamp_ns = stamp
        settled = now_ns - stamp > SETTLED_NS
        self._seen_ns = stamp if settled or stamp == self._own_ns else -1
        if not settled and stamp == self._own_ns:
            self._scan_at_s = time.monotonic() + _SCAN_AFTER_S
        listed, data, files = self._listing()
        self._refused &= {str(name) for name in listed.values()}
        changed = False
        for segment in list(self.segments.values()):
            if segment.name.segment not in listed or segment.name.segment not in data:
                changed |= self._drop_if_gone(segment)
        fresh = []
        for number, name in listed.items():
            known = self.segments.get(number)
            if number not in data or str(name) in self._refused:
                continue
            if not (known and (known.owned or known.name == name)):
                fresh.append(name)
        if len(fresh) > 1:
            most = {name: self._most_slots(name) for name in fresh}
            with self._lock:
                self._index.reserve(sum(filter(None, most.values())))
            fresh = [name for name in fresh if most[name] is not None]
        for name in fresh:
            changed |= self._load(name)
        self.leftover_bytes = self._bytes_beside_segments(files)
        self.grown_bytes = 0
        # The state of a segment is in its name, so only a scan can change it.
        self.filling = [
            segment
            for segment in list(self.segments.values())
            if segment.name.state == "open" and not segment.owned
        ]
        for segment in list(self.segments.values()):
            changed |= segment.owned and self._forget_deleted(segment)
        # Who lets pages expire there touches the folder, as no name changes.
        return self.poll() or changed

    def _forget_deleted(self, segment: Segment) -> bool:
        """Forget what others deleted from a segment of this process."""
        with self._lock, suppress(OSError):
            deletions = read_deletions(segment.index_fd)
            if segment.owned and deletions != segment.deletions:
                segment.deletions = deletions
                span = segment.rows.span
                live = np.flatnonzero(self._index.records["check"][span])
                stored = read_records(segment.index_fd, live)
                self._index.forget_in(segment.rows, live[stored["check"] == 0])
                return True
        return False

    def _most_slots(self, name: IndexName) -> int | None:
        """Return how many slots an index file could describe; None if it has none."""
        if name.segment in self.segments:
            return 0
        status = status_of(self.fd, str(name))
        if status is None:
            return None
        if status.st_size < index_bytes(0) + RECORD_BYTES:
            self._refused.add(str(name))
            return None
        # A foreign file may be of any size, and takes only what it has.
        size = min(status.st_size, status.st_blocks * 512)
        return min(slots_of(size), MOST_SLOTS)

    def poll(self) -> bool:
        """Read records that others added; return whether there were any."""
        changed = False
        for segment in self.filling:
            if segment.owned:
                continue
            with suppress(OSError):
                with closing_fd(open_index(self.fd, str(segment.name))) as fd:
                    fresh = read_commits(fd), read_deletions(fd)
                if fresh != (segment.commits, segment.deletions):
                    changed |= self._load(segment.name)
        return changed

    def _drop_if_gone(self, segment: Segment) -> bool:
        # A listing may miss a file that is renamed meanwhile. Those of this process
        # are renamed under the lock; others are found again by the next scan.
        with self._lock:
            names = str(segment.name), segment.name.data
            if segment.owned and all(status_of(self.fd, name) for name in names):
                return False
            self.drop(segment)
        return True

    def drop(self, segment: Segment) -> None:
        """Drop a segment whose files are gone; a second call does nothing."""
        with self._lock:
            if self.segments.get(segment.name.segment) is not segment:
                return
            self._index.close_rows(segment.rows)
            del self.segments[segment.name.segment]
            self._segment_bytes -= segment.nbytes
            self.failing.discard(segment)
            del self._numbers[segment.rows.number]
            if segment.owned:
                fd, segment.index_fd = segment.index_fd, -1
                os.close(fd)

    def look_at(self, segment: Segment) -> tuple[bool, int]:
        """Return whether a segment claimed just now is linked, and its bytes of pages.

        It is if one of its files has another name as well. What is written to it would
        change what lies under that name: pages of another segment, or a copy of the
        store that was made of links.
        """
        data = os.stat(segment.name.data, dir_fd=self.fd, follow_symlinks=False)
        return max(data.st_nlink, segment.links) > 1, data.st_size

    def add(
        self, name: IndexName, contents: IndexContents, index_fd: int = -1
    ) -> Segment:
        """Add a segment that was read to the index, or update it.

        Args:
            name: Its index file.
            contents: What was read there.
            index_fd: The claimed index file of a segment that this process has just
                created. It is owned from the start: a scan that listed the folder
                before would drop it, and leave its writer with rows that were freed.
        """
        with self._lock:
            known = self.segments.get(name.segment)
            if known and known.rows.slots != contents.slots:
                self.drop(known)
                known = None
            if known is None:
                rows = self._index.open_rows(contents.slots, contents.object_bytes)
                known = Segment(
                    self.fd, name, rows, contents.slot_bytes, liveness=self.liveness
                )
                self.segments[name.segment] = known
                self._numbers[rows.number] = known
                self._segment_bytes += known.nbytes
                self.grown_bytes += known.nbytes
            known.name, known.commits = name, contents.commits
            known.deletions = contents.deletions
            if index_fd >= 0:
                known.index_fd = index_fd
            self._index.load(known.rows, contents.records, contents.used_ns)
            if known.failed or len(contents.failed):
                known.learn_failed(contents)
                self.count_failed(known)
        return known

    def count_failed(self, segment: Segment) -> None:
        """Leave slots that failed out of a segment's count; called under the lock."""
        aside = segment.slots_aside()
        self._index.slots_in[segment.rows.number] = segment.rows.slots - len(aside)
        if segment.failed or segment.retry_s:
            self.failing.add(segment)
        else:
            self.failing.discard(segment)

    def _load(self, name: IndexName) -> bool:
        try:
            fd = open_index(self.fd, str(name))
        except OSError as error:
            if error.errno in OUT_OF_FILES:
                raise  # it is there: the next scan has to look again
            if error.errno in (errno.ENXIO, errno.ELOOP):
                self._refused.add(str(name))
            return False
        contents = None
        with closing_fd(fd), suppress(OSError):
            # Of many foreign files this one read is all that is done.
            if read_header(fd, name) is None:
                self._refused.add(str(name))
            else:
                data = status_of(self.fd, name.data)
                contents = read_contents(fd, name, data.st_size if data else 0)
        if contents is None:
            return False
        with self._lock:
            known = self.segments.get(name.segment)
            if known and (
                known.owned
                or (known.name.generation, known.commits)
                > (name.generation, contents.commits)
            ):
                return False  # another thread has read it meanwhile
            self.add(name, contents)
        return True

    def _bytes_beside_segments(self, files: dict[str, int]) -> int:
        """Return the size of files that are torn, foreign or in creation."""
        beside = [file for file, one in files.items() if one not in self.segments]
        every = (status_of(self.fd, file) for file in beside)
        return sum(status.st_size for status in every if status)

    def _listing(self) -> tuple[dict[int, IndexName], set[int], dict[str, int]]:
        """List the folder.

        Returns:
            The newest index file of each segment, segments with a file of pages,
            and the segment that each file belongs to.
        """
        listed: dict[int, IndexName] = {}
        data: set[int] = set()
        files: dict[str, int] = {}
        before, self._names = self._names, {}
        with listing(self.fd) as entries:
            for entry in entries:
                file = entry.name
                # Most have been there before, and reading a name takes longest.
                name, segment = self._names[file] = before.get(file) or _parsed(file)
                files[file] = segment
                if name is None:
                    if segment >= 0:
                        data.add(segment)
                elif name.state != "new":
                    other = listed.get(segment)
                    if other is None or other.generation < name.generation:
                        listed[segment] = name
        return listed, data, files

    def flush_uses(self) -> None:
        """Write times of use to disk that are newer than those there."""
        for segment in list(self.segments.values()):
            if segment.touched:
                with self._lock:
                    used = np.array(self._index.used_ns[segment.rows.span])
                segment.write_uses(used)

    def close(self) -> None:
        """Release every segment and close the folder."""
        self.flush_uses()
        for segment in self.segments.values():
            if segment.owned:
                # Without locks it would count as being written for another minute.
                segment.release(full=self.liveness is WriterLiveness.TIMEOUT)
        os.close(self.fd)


def _parsed(file: str) -> tuple[IndexName | None, int]:
    """Return what index file a name is, and of which segment a file is, or -1."""
    name = IndexName.parse(file)
    if name is not None:
        return name, name.segment
    segment = data_segment(file)
    return None, -1 if segment is None else segment

"""Allocate segments for new pages: new ones while there is room, then old ones.

A namespace has a quota and its file system a floor of free space. Within both, a
writer creates a segment. Otherwise it recycles the least recently used one, because
extents that were written before are several times faster than new ones. Other
namespaces are never touched.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections import Counter
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.segments.cleanup import collect_garbage
from kvdock.segments.fd_cache import OUT_OF_FILES
from kvdock.segments.format import header_of, index_bytes
from kvdock.segments.io import fits, slot_bytes_of
from kvdock.segments.limits import (
    LEAST_SEGMENTS,
    MOST_SLOTS,
    least_bytes,
)
from kvdock.segments.paths import IndexName
from kvdock.segments.segment import (
    Segment,
    erase_records,
    make_index,
    read_commits,
    read_contents,
    read_uses,
)
from kvdock.segments.usage import describe_full
from kvdock.units import format_bytes

if TYPE_CHECKING:
    from kvdock.segments.directory import SegmentDirectory
    from kvdock.segments.index import Index
    from kvdock.segments.io import IOEngine
    from kvdock.segments.limits import StoreLimits, StoreLocation
    from kvdock.segments.usage import NamespaceUsage
    from kvdock.throttled_log import ThrottledLog

_FIRST_BYTES = 16 << 20  # size of a pool's first segment
_MOST_EMPTIED = 8  # segments emptied beyond the one that is needed
_SAMPLE = 1 << 14  # pages of which the median time of use is taken
_SMALLER = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN)
"""Errors after which a smaller segment under another name may succeed."""
_MARK_SLOTS = 4096  # of a segment whose objects have no bytes


@attrs.frozen
class SegmentAllocator:
    """Allocates segments for one writer in one namespace.

    Args:
        place: Location of the store.
        namespace_fd: Descriptor of the namespace's folder.
        limits: Limits of the space that it takes.
        neighbours: The namespace's folders, this one among them.
        engine: Creates the files of pages.
        index: Of the pool that writes.
        lock: Held around every use of the index.
        counts: Counters of events, by name.
        failures: Limits how often a full or broken disk is logged.
    """

    place: StoreLocation
    namespace_fd: int
    limits: StoreLimits
    neighbours: NamespaceUsage
    engine: IOEngine
    index: Index
    lock: threading.RLock
    counts: Counter[str]
    failures: ThrottledLog

    def acquire(self, folder: SegmentDirectory) -> Segment | None:
        """Return a segment of this folder with free slots, owned by this process.

        Returns:
            None if there is no space at all.
        """
        folder.scan()
        failed = self.counts["segments_failed"]
        found = self.adopt(folder) or self.create(folder) or self.recycle(folder)
        if found is None and self.counts["segments_failed"] == failed:
            self.counts["segments_refused"] += 1
            self.failures.warning("no room", partial(self._describe_full, folder))
        return found

    def _describe_full(self, folder: SegmentDirectory) -> str:
        place = self.place
        return describe_full(place.root, place.namespace, self._bound(folder))

    def _bound(self, folder: SegmentDirectory) -> str:
        """Name the limit that leaves no room for a segment of this folder."""
        floor, quota = self.limits.free_bytes, self.limits.quota_bytes
        free = self.free_bytes()
        if quota and self._room(folder) < free - floor:
            return f"its quota is {format_bytes(quota)}, all pools together"
        return (
            f"its file system has {format_bytes(free)} left, of which "
            f"{format_bytes(floor)} stay free (free_space)"
        )

    def usage_bytes(self) -> int:
        """Return the bytes that all pools of the namespace take."""
        return self.neighbours.usage_bytes()

    def adopt(self, folder: SegmentDirectory) -> Segment | None:
        """Take over a segment with free slots that has no writer."""
        choice = []
        for segment in list(folder.segments.values()):
            slots = segment.rows.slots
            free = slots - self._live(segment)
            wanted = 1 if segment.name.state == "open" else -(-slots // 4)
            if free >= wanted and not segment.owned and self._fits(folder, segment):
                choice.append((free, segment))
        choice.sort(key=lambda pair: -pair[0])
        for _, segment in choice:
            if self._claim(folder, segment):
                if self._live(segment) < segment.rows.slots:
                    self.counts["segments_adopted"] += 1
                    return segment
                with self.lock:
                    segment.release(full=True)
        return None

    def _fits(self, folder: SegmentDirectory, segment: Segment) -> bool:
        """Return whether the engine can write this segment's slots."""
        return fits(self.engine, segment.slot_bytes, folder.object_bytes)

    def _live(self, segment: Segment) -> int:
        return int(self.index.live_in[segment.rows.number])

    def _claim(self, folder: SegmentDirectory, segment: Segment) -> bool:
        """Become a segment's writer and read what it holds."""
        with self.lock:
            if not segment.acquire():
                return False
        try:
            if folder.is_linked(segment):
                self.counts["segments_linked"] += 1
                self.delete(folder, segment)
                return False
            size = folder.data_bytes(segment.name)
            wanted = segment.rows.slots * segment.slot_bytes
            if size < wanted:
                self._restore_size(folder, segment, wanted)
            elif read_commits(segment.index_fd) == segment.commits:
                # No commit since it was read; its pages may have been used.
                self._learn_uses(segment)
                return True
            contents = read_contents(segment.index_fd, segment.name, size)
        except OSError:
            contents = None
        if contents is None or contents.slots != segment.rows.slots:
            self.delete(folder, segment)
            return False
        folder.add(segment.name, contents)
        return True

    def _learn_uses(self, segment: Segment) -> None:
        uses = read_uses(segment.index_fd, segment.rows.slots)
        with self.lock:
            span = segment.rows.span
            live = self.index.live(segment.rows)
            known = self.index.used_ns[span]
            known[live] = np.maximum(known, uses)[live]

    def _restore_size(
        self, folder: SegmentDirectory, segment: Segment, wanted: int
    ) -> None:
        token = self.engine.open_file(segment.name.data, folder.fd, create=False)
        try:
            self.engine.preallocate(token, wanted)
        finally:
            self.engine.close_file(token)

    def create(self, folder: SegmentDirectory, *, least: float = 0.5) -> Segment | None:
        """Create a segment, as large as there is room for.

        Args:
            folder: Where it goes.
            least: Minimum share of the usual size.
        """
        slot_bytes = slot_bytes_of(self.engine, folder.object_bytes)
        usual = self._slots(folder, slot_bytes)
        fixed, each = index_bytes(0), slot_bytes + index_bytes(1) - index_bytes(0)
        slots = min(usual, (self._room(folder) - fixed) // each)
        while slots >= max(1, usual * least):
            try:
                made = self._create_files(folder, slots, slot_bytes)
            except OSError as error:
                if error.errno in OUT_OF_FILES:
                    raise  # there may be files to close
                if error.errno not in _SMALLER:
                    self.counts["segments_failed"] += 1
                    root = self.place.root
                    self.failures.warning(
                        "no segment", f"no new segment in store {root}: {error}"
                    )
                    return None
                slots //= 2
                continue
            folder.scan()
            if self._room(folder) >= 0:
                return made
            # Another writer created one at the same time: one of the two has to go.
            self.delete(folder, made)
            return None
        return None

    def _slots(self, folder: SegmentDirectory, slot_bytes: int) -> int:
        """Return the usual number of slots of the next segment."""
        if not slot_bytes:
            return _MARK_SLOTS
        most = self.limits.segment_bytes
        if self.limits.quota_bytes:
            most = min(most, self.limits.quota_bytes // LEAST_SEGMENTS)
        # Segments grow with the pool, so that a small pool takes little space.
        most = min(most, max(_FIRST_BYTES, folder.nbytes))
        return max(1, min(MOST_SLOTS, most // slot_bytes))

    def _room(self, folder: SegmentDirectory) -> int:
        """Return how many bytes the namespace may still grow by."""
        limits = self.limits
        room = self.free_bytes() - limits.free_bytes
        if limits.quota_bytes:
            others = self.neighbours.usage_bytes(but_fd=folder.fd)
            room = min(room, limits.high_bytes - others - folder.nbytes)
        return room

    def free_bytes(self) -> int:
        """Return the free space of the file system, bytes."""
        status = os.fstatvfs(self.namespace_fd)
        return status.f_bavail * status.f_frsize

    def _create_files(
        self, folder: SegmentDirectory, slots: int, slot_bytes: int
    ) -> Segment:
        name = IndexName(secrets.randbits(64), 1, "new")
        header = header_of(
            name.segment, name.generation, slots, slot_bytes, folder.object_bytes
        )
        index_fd = make_index(folder.fd, name, header, slots, folder.tenure)
        fresh = attrs.evolve(name, state="open")
        try:
            token = self.engine.open_file(name.data, folder.fd, create=True)
            try:
                self.engine.preallocate(token, slots * slot_bytes)
            finally:
                self.engine.close_file(token)
            contents = read_contents(index_fd, name, slots * slot_bytes)
            os.rename(str(name), str(fresh), src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        except OSError:
            os.close(index_fd)
            for leftover in (str(name), name.data):
                with suppress(FileNotFoundError):
                    os.unlink(leftover, dir_fd=folder.fd)
            raise
        if contents is None:
            raise OSError(errno.EIO, "a new index file does not read back")
        segment = folder.add(fresh, contents)
        segment.index_fd = index_fd
        self.counts["segments_created"] += 1
        return segment

    def recycle(self, folder: SegmentDirectory) -> Segment | None:
        """Recycle the coldest segment, or delete colder ones elsewhere.

        Unreadable segments are deleted first.
        """
        if folder.leftover_bytes and collect_garbage(
            folder.fd, folder.tenure, lost=True
        ):
            self.counts["leftovers_swept"] += 1
            folder.scan()
            made = self.create(folder)
            if made:
                return made
        passed: set[Segment] = set()
        while segment := self._coldest(folder, passed):
            if self.neighbours.evict_segment(
                folder.fd, colder_than_ns=segment.last_used_ns
            ):
                self.counts["segments_deleted"] += 1
                made = self.create(folder)
                if made:
                    return made
            recycled = self._recycle(folder, segment)
            if recycled:
                return recycled
            passed.add(segment)
        while True:
            made = self.create(folder, least=0.0)
            if made or not self.could_recycle(folder):
                return made
            if not self.neighbours.evict_segment(folder.fd):
                return None
            self.counts["segments_deleted"] += 1

    def _recycle(self, folder: SegmentDirectory, segment: Segment) -> Segment | None:
        """Empty a cold segment; where it had to be deleted, make another one."""
        if self._claim(folder, segment):
            self.evict_slots(segment)
            self.counts["segments_recycled"] += 1
            self.evict_to_low_watermark(folder)
            return segment
        deleted = segment.name.segment not in folder.segments
        return self.create(folder) if deleted else None

    def could_recycle(self, folder: SegmentDirectory) -> bool:
        """Return whether one slot would fit if all other folders were empty."""
        least = least_bytes(slot_bytes_of(self.engine, folder.object_bytes))
        others = self.neighbours.usage_bytes(but_fd=folder.fd)
        return self._room(folder) + others >= least

    def evict_to_low_watermark(self, folder: SegmentDirectory) -> None:
        """Empty cold segments as well, until pages are at the low watermark.

        Writers adopt them later. A few at a time, because a caller is waiting.
        """
        every = list(folder.segments.values())
        slots = sum(segment.rows.slots for segment in every)
        share = self.limits.low_watermark / self.limits.high_watermark
        for _ in range(_MOST_EMPTIED):
            if sum(map(self._live, every)) <= share * slots:
                return
            roomy = {s for s in every if 4 * self._live(s) <= 3 * s.rows.slots}
            segment = self._coldest(folder, roomy)
            if segment is None or not self._claim(folder, segment):
                return
            self.evict_slots(segment)
            with self.lock:
                segment.release(full=True)

    def _coldest(
        self, folder: SegmentDirectory, passed: set[Segment]
    ) -> Segment | None:
        """Return the segment whose pages were used the longest time ago.

        A segment's pages only grow warmer, so a mean that was taken once is
        a lower bound, and few have to be taken again.
        """
        with self.lock:
            choice = [
                segment
                for segment in folder.segments.values()
                if not segment.owned
                and segment not in passed
                and self._fits(folder, segment)
            ]
            while choice:
                coldest = min(choice, key=lambda segment: segment.last_used_ns)
                heat_ns = self.mean_last_used_ns(coldest)
                if heat_ns <= coldest.last_used_ns:
                    return coldest
                coldest.last_used_ns = heat_ns
        return None

    def mean_last_used_ns(self, segment: Segment) -> float:
        """Return when a segment's pages were last used, their mean."""
        used = self.index.used_ns[segment.rows.span]
        live = self._live(segment)
        return float(used.sum(dtype=np.float64)) / live if live else 0.0

    def evict_slots(self, segment: Segment) -> None:
        """Empty the cold slots of a claimed segment, at least half of them."""
        with self.lock:
            rows = segment.rows
            live = np.flatnonzero(self.index.live(rows))
            used = self.index.used_ns[rows.span][live]
            order = np.argsort(used, kind="stable")
            least = max(0, (rows.slots + 1) // 2 - (rows.slots - len(live)))
            cold = max(least, int((used <= self.median_last_used_ns()).sum()))
            gone = np.sort(live[order[:cold]])
            self.index.forget(gone + rows.first)
            segment.last_used_ns = 0.0
            # The descriptor is closed under the lock if it was deleted meanwhile.
            erase_records(segment.index_fd, gone)
        self.counts["pages_evicted"] += len(gone)

    def median_last_used_ns(self) -> float:
        """Return when half of all pages were last used before, by a sample."""
        used = self.index.used_ns[:: 1 + len(self.index.used_ns) // _SAMPLE]
        used = used[used != 0]
        return float(np.median(used)) if len(used) else 0.0

    def delete(self, folder: SegmentDirectory, segment: Segment) -> None:
        """Delete a segment's files; the index first, so nothing is found."""
        for name in (str(segment.name), segment.name.data):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder.fd)
        folder.drop(segment)

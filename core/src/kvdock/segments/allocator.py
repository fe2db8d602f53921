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
from kvdock.segments.eviction import (
    EvictionPlan,
    OtherPools,
    cold_slots,
    plan_eviction,
)
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
_SMALLER = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN)
"""Errors after which a smaller segment under another name may succeed."""
_GROWTH = 64
"""How many times the bytes that a writer has added must still fit before it lists the
folder again. A scan for each of thousands of segments takes the square of their
number."""
_MOST_PLANS = 8  # for one segment
_MARK_SLOTS = 4096  # of a segment whose objects have no bytes


@attrs.frozen
class SegmentAllocator:
    """Allocates segments for one writer in one namespace.

    Args:
        place: Location of the store.
        namespace_fd: Descriptor of the namespace's folder.
        limits: Limits of the space that it takes.
        neighbours: The namespace's folders, this one among them.
        others: The segments of the other folders.
        engine: Creates the files of pages.
        index: Of the pool that writes.
        segments: Its segments, by their number in the index.
        lock: Held around every use of the index.
        counts: Counters of events, by name.
        failures: Limits how often a full or broken disk is logged.
        plans: What is evicted next in each folder.
    """

    place: StoreLocation
    namespace_fd: int
    limits: StoreLimits
    neighbours: NamespaceUsage
    others: OtherPools
    engine: IOEngine
    index: Index
    segments: dict[int, Segment]
    lock: threading.RLock
    counts: Counter[str]
    failures: ThrottledLog
    plans: dict[SegmentDirectory, EvictionPlan] = attrs.field(factory=dict)

    def acquire(self, folder: SegmentDirectory, before_ns: int) -> Segment | None:
        """Return a segment of this folder with free slots, owned by this process.

        Args:
            folder: Where it lies.
            before_ns: Pages that were used then, or later, stay.

        Returns:
            None if there is no space at all.
        """
        failed = self.counts["segments_failed"]
        found = self._find(folder, before_ns)
        if found is None and folder.changed():
            # What is known of other writers may be out of date.
            folder.scan()
            found = self._find(folder, before_ns)
        found = found or self._displace(folder)
        if found is None and self.counts["segments_failed"] == failed:
            self.counts["segments_refused"] += 1
            self.failures.warning("no room", partial(self._describe_full, folder))
        return found

    def _find(self, folder: SegmentDirectory, before_ns: int) -> Segment | None:
        """Return a segment that this process may write, or None."""
        plan = self.plans.get(folder)
        return (
            self.adopt(folder)
            # Looking for room takes as long as the rest: once for each plan.
            or (self._evict(folder, plan, before_ns, set()) if plan else None)
            or self.create(folder)
            or self._sweep(folder)
            or self.recycle(folder, before_ns)
        )

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
        with self.lock:
            free = self.index.slots_in - self.index.live_in
            roomy = (4 * free >= self.index.slots_in) & (free > 0)
            choice = [self.segments[n] for n in np.flatnonzero(roomy).tolist()]
            choice += [one for one in folder.filling if free[one.rows.number]]
        usable = {segment for segment in choice if self.may_claim(folder, segment)}
        for segment in sorted(usable, key=lambda one: -free[one.rows.number]):
            if self.claim(folder, segment):
                if self._live(segment) < segment.rows.slots:
                    self.counts["segments_adopted"] += 1
                    return segment
                self.release_full(folder, segment)
        return None

    def may_claim(self, folder: SegmentDirectory, segment: Segment) -> bool:
        """Return whether a segment is this folder's and not ours already."""
        return (
            segment.folder == folder.fd
            and not segment.owned
            and self._fits(folder, segment)
        )

    def _fits(self, folder: SegmentDirectory, segment: Segment) -> bool:
        """Return whether the engine can write this segment's slots."""
        return fits(self.engine, segment.slot_bytes, folder.object_bytes)

    def _live(self, segment: Segment) -> int:
        return int(self.index.live_in[segment.rows.number])

    def claim(self, folder: SegmentDirectory, segment: Segment) -> bool:
        """Become a segment's writer and read what it holds."""
        with self.lock, folder.own_change():
            # A scan may have dropped it meanwhile, and its rows are another's then.
            known = self.segments.get(segment.rows.number) is segment
            if not known or not segment.acquire():
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
                self.learn_uses(segment)
                return True
            contents = read_contents(segment.index_fd, segment.name, size)
        except OSError:
            contents = None
        if contents is None or contents.slots != segment.rows.slots:
            self.delete(folder, segment)
            return False
        folder.add(segment.name, contents)
        return True

    def learn_uses(self, segment: Segment) -> None:
        """Read when other processes used the pages of a claimed segment."""
        uses = read_uses(segment.index_fd, segment.rows.slots)
        with self.lock:
            span = segment.rows.span
            live = self.index.live(segment.rows)
            known = self.index.used_ns[span]
            known[live] = np.maximum(known, uses)[live]
            self.index.clock.keep_up(known)

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
            room = self._room(folder)
            if room < _GROWTH * folder.grown_bytes:
                folder.scan()
                room = self._room(folder)
            if room >= 0:
                return made
            # Another writer created one at the same time: one of the two has to go.
            self.delete(folder, made)
            return None
        return None

    def has_room(self, folder: SegmentDirectory) -> bool:
        """Return whether a new segment might be created before one is recycled."""
        slot_bytes = slot_bytes_of(self.engine, folder.object_bytes)
        return 2 * self._room(folder) >= self._slots(folder, slot_bytes) * slot_bytes

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
        index_fd = make_index(folder.fd, name, header, slots, folder.liveness)
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
        segment = folder.add(fresh, contents, index_fd)
        self.counts["segments_created"] += 1
        return segment

    def _sweep(self, folder: SegmentDirectory) -> Segment | None:
        """Delete unreadable files, and make a segment in their place."""
        if not folder.leftover_bytes:
            return None
        if not collect_garbage(folder.fd, folder.liveness, lost=True):
            return None
        self.counts["leftovers_swept"] += 1
        folder.scan()
        return self.create(folder)

    def recycle(self, folder: SegmentDirectory, before_ns: int) -> Segment | None:
        """Plan evictions and return what comes of them."""
        # A plan may come to nothing: other processes write some of its segments, and
        # what they used shows when a segment is claimed.
        passed: set[Segment] = set()
        for _ in range(_MOST_PLANS):
            plan = self.plan(folder, before_ns, passed)
            if plan is None:
                return None
            while self.others.evict_segment(
                folder.fd, colder_than_ns=min(plan.coldest_ns, before_ns)
            ):
                made = self.create(folder)
                if made:
                    return made
            found = self._evict(folder, plan, before_ns, passed)
            if found:
                return found
        return None

    def _evict(
        self,
        folder: SegmentDirectory,
        plan: EvictionPlan,
        before_ns: int,
        passed: set[Segment],
    ) -> Segment | None:
        """Evict the cold pages of the next segment of a plan.

        Args:
            folder: Where it lies.
            plan: What is to go.
            before_ns: Pages that were used then, or later, stay.
            passed: Learns the segments that came to nothing.
        """
        while plan.numbers:
            segment = self.segments.get(plan.numbers.pop())
            if segment is None:
                continue
            if self._evict_from(folder, segment, plan, before_ns):
                self.counts["segments_recycled"] += 1
                self.evict_to_low_watermark(folder, plan, before_ns)
                return segment
            if segment.name.segment not in folder.segments:
                # It had to be deleted, and leaves room for another one.
                made = self.create(folder)
                if made:
                    return made
            passed.add(segment)
        return None

    def plan(
        self, folder: SegmentDirectory, before_ns: int, passed: set[Segment] | None
    ) -> EvictionPlan | None:
        """Plan the next evictions of a folder, without segments passed over.

        With None the plan is ahead of need: segments that are filled will be full.
        """
        ahead = passed is None
        slots, live = self._fill(folder)
        share = self.limits.low_watermark / self.limits.high_watermark
        every = set(folder.segments.values()) - (passed or set())
        mine = [m for m in every if (ahead and m.owned) or self.may_claim(folder, m)]
        wanted = max((one.rows.slots for one in mine), default=0)
        wanted = max(wanted, live - int(share * slots))
        writable = np.zeros(len(self.index.slots_in), np.bool_)
        writable[[one.rows.number for one in mine]] = True
        # Not under the lock: with ten million pages it takes a quarter of a second.
        plan = plan_eviction(self.index, writable, wanted, before_ns)
        if plan:
            self.plans[folder] = plan
        else:
            self.plans.pop(folder, None)
        return plan

    def _fill(self, folder: SegmentDirectory) -> tuple[int, int]:
        """Return how many slots a folder has, and how many pages in them."""
        every = list(folder.segments.values())
        slots = sum(segment.rows.slots for segment in every)
        return slots, sum(map(self._live, every))

    def _evict_from(
        self,
        folder: SegmentDirectory,
        segment: Segment,
        plan: EvictionPlan,
        before_ns: int,
    ) -> bool:
        """Claim a segment without its cold pages; False if that frees no slot."""
        if not (self.may_claim(folder, segment) and self.claim(folder, segment)):
            return False
        return self.evict_cold(folder, segment, min(plan.cold_ns, before_ns - 1))

    def evict_cold(
        self, folder: SegmentDirectory, segment: Segment, cold_ns: int
    ) -> bool:
        """Forget the cold pages of a claimed segment; False if that frees no slot."""
        with self.lock:
            rows = segment.rows
            gone = cold_slots(self.index, rows, cold_ns)
            self.index.forget_in(rows, gone)
            # Its descriptor is closed under the lock where it was deleted meanwhile.
            erase_records(segment.index_fd, gone)
            roomy = self._live(segment) < rows.slots
        if not roomy:
            self.release_full(folder, segment)
        self.counts["pages_evicted"] += len(gone)
        return roomy

    def release_full(self, folder: SegmentDirectory, segment: Segment) -> None:
        """Stop being a segment's writer: it stays as it is until it is recycled."""
        with self.lock, folder.own_change():
            segment.release(full=True)

    def _displace(self, folder: SegmentDirectory) -> Segment | None:
        """Make a small segment, and room for it where another pool has more pages.

        Called where all pages of a folder are warmer than what is to be stored:
        so the pools of a prefix that is longer than the quota share the quota.
        """
        while True:
            made = self.create(folder, least=0.0)
            if made or not self.could_recycle(folder):
                return made
            slots, _ = self._fill(folder)
            if not self.others.evict_segment(folder.fd, least_slots=slots):
                return None

    def could_recycle(self, folder: SegmentDirectory) -> bool:
        """Return whether one slot would fit if all other folders were empty."""
        least = least_bytes(slot_bytes_of(self.engine, folder.object_bytes))
        others = self.neighbours.usage_bytes(but_fd=folder.fd)
        return self._room(folder) + others >= least

    def evict_to_low_watermark(
        self, folder: SegmentDirectory, plan: EvictionPlan, before_ns: int
    ) -> None:
        """Evict from more segments, until pages are at the low watermark.

        Writers adopt them later. A few at a time, because a caller is waiting.
        """
        share = self.limits.low_watermark / self.limits.high_watermark
        if share >= 1:
            return
        for _ in range(_MOST_EMPTIED):
            slots, live = self._fill(folder)
            if live <= share * slots or not plan.numbers:
                return
            segment = self.segments.get(plan.numbers.pop())
            if segment and self._evict_from(folder, segment, plan, before_ns):
                self.release_full(folder, segment)

    def delete(self, folder: SegmentDirectory, segment: Segment) -> None:
        """Delete a segment's files; the index first, so nothing is found."""
        for name in (str(segment.name), segment.name.data):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder.fd)
        folder.drop(segment)

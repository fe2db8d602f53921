"""Claim the segment that is recycled next, before a put needs it.

To claim one takes a dozen system calls, and every few segments a plan of what is
evicted next: a third of a millisecond that a put of a full store waited for. A
thread of the store does that once puts have paused, for the put that follows. Which
pages go is decided by that put, as if it had claimed the segment itself: pages that
are used meanwhile stay, and nothing is evicted that no page takes the place of.

A claimed segment is whole and keeps its pages. A process that dies has lost nothing;
its lock ends with it, and the next writer claims the segment as any other.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs

from kvdock.daemon_threads import DaemonThreads
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import NO_FILE

if TYPE_CHECKING:
    from kvdock_segments.allocator import SegmentAllocator
    from kvdock_segments.directory import SegmentDirectory
    from kvdock_segments.eviction import EvictionPlan
    from kvdock_segments.segment import Segment

_QUIET_S = 0.02
"""Seconds without a put before a claim begins. Threads of Python get into each other's
way: beside puts that follow each other, a claim costs them more than it saves."""
_LEAST_SEGMENTS = 8
"""Of a folder: a claimed one is kept from other writers."""
_MOST_OPEN = 3
"""One of so many segments may be open, for the same reason."""
_LATEST_NS = 2**63 - 1  # the put that comes spares its own pages


@attrs.frozen(eq=False)
class _Claimed:
    """A segment that is owned and not yet written."""

    segment: Segment
    plan: EvictionPlan


class SegmentRecycler:
    """Keeps one claimed segment for each folder of a full store.

    Args:
        reserving: Held around every allocation.
    """

    def __init__(self, allocator: SegmentAllocator, reserving: threading.Lock) -> None:
        self._allocator = allocator
        self._reserving = reserving
        self._claimed: dict[SegmentDirectory, _Claimed] = {}
        self._asked: set[SegmentDirectory] = set()
        self._threads = DaemonThreads(1)
        self._put_s = 0.0  # when the last put has ended
        self._closed = False

    def ask(self, folder: SegmentDirectory) -> None:
        """Claim the next segment of a folder once puts pause; returns at once."""
        limits = self._allocator.limits
        self._put_s = time.monotonic()
        if folder not in self._allocator.plans or folder in self._claimed:
            return
        if folder in self._asked or folder.liveness is not WriterLiveness.LOCKS:
            return  # without locks, a silent writer counts as dead
        if self._closed or limits.low_watermark < limits.high_watermark:
            return  # a plan of that store evicts from several segments at once
        self._asked.add(folder)
        with suppress(RuntimeError):  # no thread can be started
            self._threads.submit(partial(self._claim_soon, folder))

    def take(self, folder: SegmentDirectory, before_ns: int) -> Segment | None:
        """Return the claimed segment without its cold pages; with the lock held.

        Pages that were used at `before_ns` or later stay.

        Returns:
            None if there is none, or it frees no slot.
        """
        claimed = self._claimed.get(folder)
        if claimed is None or self._allocator.disk_fails(folder):
            return None  # nothing is evicted for pages that cannot be written
        # Free slots come first, and nothing is evicted while there are some.
        adopted = self._allocator.adopt(folder)
        if adopted is not None:
            return adopted
        del self._claimed[folder]
        if self._allocator.is_outdated(folder, claimed.plan):
            self._allocator.release_full(folder, claimed.segment)
            return None
        if not self._evict(folder, claimed, before_ns):
            return None
        self._allocator.counts["segments_recycled"] += 1
        return claimed.segment

    def close(self) -> None:
        """End the thread, and release what is claimed as it was found."""
        self._closed = True
        self._threads.close()
        for folder, claimed in self._claimed.items():
            self._allocator.release_full(folder, claimed.segment)
        self._claimed.clear()

    def _claim_soon(self, folder: SegmentDirectory) -> None:
        while not self._closed and time.monotonic() < self._put_s + _QUIET_S:
            time.sleep(_QUIET_S)
        try:
            self.claim(folder)
        except OSError as error:
            # The next put meets the same, and its caller is told.
            self._allocator.counts["claims_failed"] += 1
            self._allocator.failures.warning(
                "no claim", f"no segment is claimed ahead: {error}"
            )
        finally:
            self._asked.discard(folder)

    def claim(self, folder: SegmentDirectory) -> None:
        """Claim the next segment that a put would claim, if it would recycle one."""
        allocator = self._allocator
        every = len(folder.segments)
        open_ones = sum(one.owned for one in list(folder.segments.values()))
        open_ones += len(folder.filling) + 1
        if every < _LEAST_SEGMENTS or _MOST_OPEN * open_ones > every:
            return
        # Not with the lock: of many pages it takes long, and a put may need it.
        if not self._plan(folder):
            return
        with self._reserving:
            plan = allocator.plans.get(folder)
            if plan is None or self._closed or folder in self._claimed:
                return
            for number in reversed(plan.numbers.copy()):
                segment = allocator.segments.get(number)
                if segment is not None and segment.owned:
                    continue  # it is being filled: its turn comes later
                plan.numbers.remove(number)
                if (
                    segment is not None
                    and allocator.may_claim(folder, segment)
                    and allocator.claim(folder, segment)
                ):
                    self._claimed[folder] = _Claimed(segment, plan)
                    return

    def _plan(self, folder: SegmentDirectory) -> bool:
        """Plan the next evictions; False if a put would make room otherwise."""
        allocator = self._allocator
        plan = allocator.plans.get(folder)
        if plan is not None and plan.numbers:
            return True
        if folder.leftover_bytes or allocator.has_room(folder):
            return False
        plan = allocator.plan(folder, _LATEST_NS, None)
        if plan is None or allocator.others.has_colder(folder.fd, plan.coldest_ns):
            allocator.plans.pop(folder, None)
            return False
        return True

    def _evict(
        self, folder: SegmentDirectory, claimed: _Claimed, before_ns: int
    ) -> bool:
        """Evict the cold pages of a claimed segment; False if that frees no slot."""
        allocator, segment = self._allocator, claimed.segment
        known = folder.segments.get(segment.name.segment) is segment
        if not known or not segment.owned:
            return False  # cleared meanwhile
        with allocator.releasing(folder, segment):
            try:
                # A copy that was made of links since then must not change.
                linked = folder.is_linked(segment)
                allocator.learn_uses(segment)
            except OSError as error:
                linked = error.errno in NO_FILE
                if not linked:
                    allocator.release_unread(folder, segment, error)
                    return False
            if linked:
                allocator.counts["segments_linked"] += 1
                allocator.delete(folder, segment)
                return False
            return allocator.evict_cold(folder, segment, claimed.plan, before_ns)

"""Allocate segments for new pages: new ones while there is room, then old ones.

A namespace has a quota, its root another one, and its file system a floor of free
space. Within all of them a writer creates a segment. Where the root or the file system
has no room, namespaces that no process has open make way. Otherwise it recycles the
least recently used segment, because extents that were written before are several times
faster than new ones. Other namespaces that are open are not touched.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.units import format_bytes
from kvdock_segments.cleanup import collect_garbage
from kvdock_segments.erasing import wipe
from kvdock_segments.eviction import (
    EvictionPlan,
    OtherPools,
    Shares,
    cold_slots,
    plan_eviction,
)
from kvdock_segments.format import (
    MOST_SLOTS,
    RECORD,
    header_of,
    index_bytes,
    promised,
    with_checksums,
)
from kvdock_segments.index_file import (
    erase_records,
    make_index,
    open_index,
    read_commits,
    read_contents,
    read_records,
    read_uses,
    write_records,
)
from kvdock_segments.io import fits, slot_bytes_of
from kvdock_segments.limits import LEAST_SEGMENTS, least_bytes
from kvdock_segments.ownership import release
from kvdock_segments.paths import (
    NO_FILE,
    OUT_OF_FILES,
    IndexName,
    closing_fd,
    open_file,
)
from kvdock_segments.usage import cleanup_hint

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array
    from kvdock.throttled_log import ThrottledLog
    from kvdock_segments.catalog import Catalog
    from kvdock_segments.directory import SegmentDirectory
    from kvdock_segments.elsewhere import Elsewhere
    from kvdock_segments.format import Records
    from kvdock_segments.io import IOEngine
    from kvdock_segments.limits import StoreLocation
    from kvdock_segments.room import Room
    from kvdock_segments.segment import Segment
    from kvdock_segments.settings import SegmentSettings
    from kvdock_segments.usage import NamespaceUsage

log = logging.getLogger("kvdock_segments")

_FIRST_BYTES = 16 << 20  # size of a pool's first segment
_SMALLER = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EAGAIN)
"""Errors after which a smaller segment under another name may succeed."""
_GROWTH = 64
"""How many times the bytes that a writer has added must still fit before it lists the
folder again. A scan for each of thousands of segments takes the square of their
number."""
_MOST_PLANS = 8  # for one segment
_MARK_SLOTS = 4096  # of a segment whose objects have no bytes
_FAULTY = 3
"""Segments that fail one after the other before the disk counts as failing: then
nothing is evicted for pages that could not be written either."""
_PROBE_S = 1.0
"""Seconds between two tries of places that failed, where nothing else is left."""


@attrs.frozen
class SegmentAllocator:
    """Allocates segments for one writer in one namespace.

    Args:
        place: Location of the store.
        namespace_fd: Descriptor of the namespace's folder.
        settings: Of the space that it takes.
        catalog: Of the pool that writes.
        neighbours: The namespace's folders, this one among them.
        others: The segments of the other folders.
        engine: Creates the files of pages.
        failures: Limits how often a full or broken disk is logged.
        elsewhere: The other namespaces of the root.
        room: The room of tenants; None where none has a quota.
        plans: What is evicted next in each folder.
        faulty: Segments with a failed write since the last one that succeeded.
        above_quota: Set while the namespace takes more than its quota allows, as after
            a start with a smaller one: nothing is stored until it is below.
    """

    place: StoreLocation
    namespace_fd: int
    settings: SegmentSettings
    catalog: Catalog
    neighbours: NamespaceUsage
    others: OtherPools
    engine: IOEngine
    failures: ThrottledLog
    elsewhere: Elsewhere
    room: Room | None = None
    plans: dict[SegmentDirectory, EvictionPlan] = attrs.field(factory=dict)
    faulty: set[Segment] = attrs.field(factory=set)
    above_quota: threading.Event = attrs.field(factory=threading.Event)
    _probed_s: dict[SegmentDirectory, float] = attrs.field(factory=dict)

    def note_fault(self, segment: Segment, slots: int) -> None:
        """Note that slots of a segment could not be written."""
        self.faulty.add(segment)
        self.catalog.counts["slots_failed"] += slots
        self.failures.warning(
            "failed slots",
            f"{slots} pages could not be written to segment {segment.name.data} of "
            f"store {self.place.root}: its disk may be failing; these places are set "
            "aside and tried again later",
        )

    def note_stored(self) -> None:
        """Note that a page was stored: if the disk failed, it works again."""
        if len(self.faulty) >= _FAULTY:
            # What failed with the disk says nothing about its places.
            with self.catalog.lock:
                for segment in self.faulty:
                    segment.try_again()
        self.faulty.clear()

    def disk_fails(self, folder: SegmentDirectory) -> bool:
        """Return whether so much failed in a row that it is no matter of places."""
        # Where all that failed is gone, as after a clear, nothing is left to probe.
        return len(self.faulty) >= _FAULTY and bool(folder.failing)

    @contextmanager
    def releasing(self, folder: SegmentDirectory, segment: Segment) -> Iterator[None]:
        """Release a claimed segment if the block raises."""
        try:
            yield
        except BaseException:
            self.release_full(folder, segment)
            raise

    def acquire(self, folder: SegmentDirectory, before_ns: int) -> Segment | None:
        """Return a segment of this folder with free slots, owned by this process.

        Args:
            folder: Where it lies.
            before_ns: Pages that were used then, or later, stay.

        Returns:
            None if there is no space at all.
        """
        failed = self.catalog.counts["segments_failed"]
        found = None
        if not self.above_quota.is_set():
            found = self._find(folder, before_ns)
            if found is None and folder.changed():
                # What is known of other writers may be out of date.
                folder.scan()
                found = self._find(folder, before_ns)
            if found is None and not self.disk_fails(folder):
                found = self._displace(folder)
        if found is None and self.catalog.counts["segments_failed"] == failed:
            self.catalog.counts["segments_refused"] += 1
            self.failures.warning("no room", partial(self._describe_full, folder))
        return found

    def _find(self, folder: SegmentDirectory, before_ns: int) -> Segment | None:
        """Return a segment that this process may write, or None."""
        plan = self._plan_of(folder)
        if folder.failing:
            with self.catalog.lock:
                for segment in list(folder.failing):  # some may be due by now
                    folder.count_failed(segment)
        if self.disk_fails(folder):
            return self.adopt(folder) or self._probe(folder, before_ns)
        return (
            self.adopt(folder)
            # Looking for room takes as long as the rest: once for each plan.
            or (self._evict(folder, plan, before_ns, set()) if plan else None)
            or self.create(folder)
            or (self.create(folder) if self._sweep_leftovers(folder) else None)
            or self._make_way(folder)
            or self._recycle(folder, before_ns)
            or self._probe(folder, before_ns)
        )

    def _probe(self, folder: SegmentDirectory, before_ns: int) -> Segment | None:
        """Try one segment with places that failed, where nothing else is left."""
        now_s = time.monotonic()
        if not folder.failing or now_s < self._probed_s.get(folder, 0.0) + _PROBE_S:
            return None
        self._probed_s[folder] = now_s
        with self.catalog.lock:
            segment = min(folder.failing, key=lambda one: one.probed_s)
            segment.probed_s = now_s
            segment.try_again()
            folder.count_failed(segment)
        found = self.adopt(folder)
        if found:
            return found
        # No slot is free where writes failed: what failed is to make room.
        plan = self._plan(folder, before_ns, set())
        if plan is None:
            return None
        plan.numbers = plan.numbers[-1:]
        return self._evict(folder, plan, before_ns, set())

    def _describe_full(self, folder: SegmentDirectory) -> str:
        """Name the limit that leaves no room for a segment of this folder."""
        place, settings = self.place, self.settings
        free, shared = self.free_bytes(), self._shared_room()
        left = free - settings.free_space
        # Looked at once: others may delete pages meanwhile.
        quota_left = self._quota_left(folder) if settings.quota else left
        said = (
            f"store {str(place.root)!r} has no room for pages of namespace "
            f"{place.namespace[:12]}, which takes {format_bytes(self.usage_bytes())}"
        )
        if quota_left <= shared and quota_left < left:
            return (
                f"{said}: its quota is {format_bytes(settings.quota)}, "
                "all pools together"
            )
        if settings.root_quota and shared < left:
            quota = format_bytes(settings.root_quota)
            said += f": all namespaces together have {quota} (root_quota)"
        else:
            said += (
                f": its file system has {format_bytes(free)} left, of which "
                f"{format_bytes(settings.free_space)} stay free (free_space)"
            )
        more = cleanup_hint(place.root, self.elsewhere.look().nbytes)
        return f"{said}. Besides it, {more}" if more else said

    def usage_bytes(self) -> int:
        """Return the bytes that all pools of the namespace take."""
        return self.neighbours.usage_bytes()

    def promise(self, each_bytes: int, before: Records, until: Int64Array) -> BoolArray:
        """Count promises within all budgets; see `Ledger.promise`."""
        most, room = self.promise_bytes(), self.room
        shares = None if room is None else room.promisable
        return self.catalog.ledger.promise(each_bytes, before, until, most, shares)

    def promise_bytes(self) -> int:
        """Return how many bytes of the namespace may be promised."""
        settings = self.settings
        whole = settings.quota or self.usage_bytes() + self.growth_bytes()
        return int(whole * settings.retained_share)

    def adopt(self, folder: SegmentDirectory) -> Segment | None:
        """Take over a segment with free slots that has no writer."""
        with self.catalog.lock:
            free = self.catalog.index.slots_in - self.catalog.index.live_in
            roomy = (4 * free >= self.catalog.index.slots_in) & (free > 0)
            choice = [self.catalog.segments[n] for n in np.flatnonzero(roomy).tolist()]
            choice += [
                one
                for one in (*folder.filling, *folder.failing)
                if free[one.rows.number]
            ]
        usable = {segment for segment in choice if self.may_claim(folder, segment)}
        for segment in sorted(usable, key=lambda one: -free[one.rows.number]):
            if self.claim(folder, segment):
                if self._is_roomy(segment):
                    self.catalog.counts["segments_adopted"] += 1
                    return segment
                self.release_full(folder, segment)
        return None

    def may_claim(self, folder: SegmentDirectory, segment: Segment) -> bool:
        """Return whether a segment is this folder's and not ours already."""
        return (
            segment.folder == folder.fd
            and not segment.owned
            and fits(self.engine, segment.slot_bytes, folder.object_bytes)
            and (not segment.retry_s or segment.retry_s <= time.monotonic())
        )

    def _is_roomy(self, segment: Segment) -> bool:
        """Return whether a segment has a free slot that may be written."""
        number = segment.rows.number
        return bool(
            self.catalog.index.live_in[number] < self.catalog.index.slots_in[number]
        )

    def claim(self, folder: SegmentDirectory, segment: Segment) -> bool:
        """Become a segment's writer and read what it holds.

        Returns:
            False if another process is, or if its files cannot be read now: then
            it is released as it was. It is deleted only where its files say that
            its pages are lost.
        """
        with self.releasing(folder, segment):
            with self.catalog.lock, folder.own_change():
                # A scan may have dropped it meanwhile, and its rows are another's then.
                known = self.catalog.segments.get(segment.rows.number) is segment
                if not known or not segment.acquire():
                    return False
            try:
                lost = not self._read_claimed(folder, segment)
            except OSError as error:
                lost = error.errno in NO_FILE
                if not lost:
                    self.release_unread(folder, segment, error)
                    return False
            if lost:
                self.delete(folder, segment)
                return False
            if segment.retry_s:
                with self.catalog.lock:
                    segment.retry_s = 0.0
                    folder.count_failed(segment)
        return True

    def release_unread(
        self, folder: SegmentDirectory, segment: Segment, error: OSError
    ) -> None:
        """Release a claimed segment whose files could not be read or written."""
        self.catalog.counts["claims_failed"] += 1
        with self.catalog.lock:
            if error.errno not in OUT_OF_FILES:
                segment.rest()
                folder.count_failed(segment)
            self.release_full(folder, segment)
        self.failures.warning(
            "unread",
            f"segment {segment.name.data} of store {self.place.root} cannot be reused "
            f"now, its pages stay: {error}",
        )

    def _read_claimed(self, folder: SegmentDirectory, segment: Segment) -> bool:
        """Read a segment that was claimed; False if its pages are lost.

        Raises:
            OSError: If its files cannot be read or written now.
        """
        linked, size = folder.look_at(segment)
        if linked:
            self.catalog.counts["segments_linked"] += 1
            if promised(self.catalog.index.words[segment.rows.span]).any():
                raise OSError(errno.EMLINK, "it has other names, and promised pages")
            return False
        wanted = segment.rows.slots * segment.slot_bytes
        if size < wanted:
            self._preallocate(folder, segment.name, wanted)
        elif read_commits(segment.index_fd) == segment.commits:
            # No commit since it was read; its pages may have been used.
            self.learn_uses(segment)
            return True
        contents = read_contents(segment.index_fd, segment.name, size)
        if contents is None or contents.slots != segment.rows.slots:
            return False
        folder.add(segment.name, contents)
        return True

    def learn_uses(self, segment: Segment) -> None:
        """Read when other processes used the pages of a claimed segment."""
        uses = read_uses(segment.index_fd, segment.rows.slots)
        with self.catalog.lock:
            span = segment.rows.span
            live = self.catalog.index.live(segment.rows)
            known = self.catalog.index.used_ns[span]
            known[live] = np.maximum(known, uses)[live]
            self.catalog.index.clock.keep_up(known)

    def _preallocate(
        self,
        folder: SegmentDirectory,
        name: IndexName,
        nbytes: int,
        *,
        create: bool = False,
    ) -> None:
        """Give a segment's file of pages its size."""
        token = self.engine.open_file(name.data, folder.fd, create=create)
        try:
            self.engine.preallocate(token, nbytes)
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
                made = self.create_files(folder, slots, slot_bytes)
            except OSError as error:
                if error.errno in OUT_OF_FILES:
                    raise  # there may be files to close
                if error.errno not in _SMALLER:
                    self.catalog.counts["segments_failed"] += 1
                    root = self.place.root
                    self.failures.warning(
                        "no segment", f"no new segment in store {root}: {error}"
                    )
                    return None
                slots //= 2
                continue
            with self.releasing(folder, made):
                room = self._room(folder)
                if room < _GROWTH * folder.grown_bytes:
                    folder.scan()
                    room = self._room(folder)
                if room >= 0:
                    return made
                # Another writer created one at the same time: one of them has to go.
                self.delete(folder, made)
            return None
        return None

    def _slots(self, folder: SegmentDirectory, slot_bytes: int) -> int:
        """Return the usual number of slots of the next segment."""
        if not slot_bytes:
            return _MARK_SLOTS
        most = self.settings.segment_bytes
        for quota in (self.settings.quota, self.settings.root_quota):
            most = min(most, quota // LEAST_SEGMENTS if quota else most)
        # Segments grow with the pool, so that a small pool takes little space.
        most = min(most, max(_FIRST_BYTES, folder.nbytes))
        return max(1, min(MOST_SLOTS, most // slot_bytes))

    def _room(self, folder: SegmentDirectory) -> int:
        """Return how many bytes the namespace may still grow by."""
        room = self._shared_room()
        return min(room, self._quota_left(folder)) if self.settings.quota else room

    def _quota_left(self, folder: SegmentDirectory) -> int:
        """Return what a namespace has left of its own quota, which it must have."""
        return self.settings.quota - self._taken_bytes(folder)

    def _shared_room(self) -> int:
        """Return what the file system and the root's quota leave to all namespaces."""
        room = self.free_bytes() - self.settings.free_space
        if not self.settings.root_quota:
            return room
        taken = self.usage_bytes() + self.elsewhere.look().nbytes.total()
        return min(room, self.settings.root_quota - taken)

    def growth_bytes(self) -> int:
        """Return what a namespace may grow by, its own quota aside.

        Namespaces that no process has open would make way for that.
        """
        return max(0, self._shared_room() + self.elsewhere.look().unused_bytes())

    def _make_way(self, folder: SegmentDirectory) -> Segment | None:
        """Make a segment in the place of those of namespaces that are not open."""
        slot_bytes = slot_bytes_of(self.engine, folder.object_bytes)
        least = index_bytes(0) + self._slots(folder, slot_bytes) * slot_bytes
        made = None
        while not made and self._shared_room() < least:
            # Within its own quota a namespace gains nothing by what others lose.
            if self.settings.quota and self._quota_left(folder) < least:
                return None
            may_go = self.room.may_lose() if self.room else None
            if not self.elsewhere.evict_segment(may_go):
                return None
            made = self.create(folder)
        return made

    def _taken_bytes(self, folder: SegmentDirectory) -> int:
        """Return the bytes of the namespace, without a listing of this folder."""
        return self.neighbours.usage_bytes(but=folder.name) + folder.nbytes

    def check_quota(self, folder: SegmentDirectory) -> bool:
        """Return whether the namespace takes more than its quota; then stop puts."""
        quota = self.settings.quota
        if not quota or self._taken_bytes(folder) <= quota:
            return False
        self._sweep_leftovers(folder)
        taken = self._taken_bytes(folder)
        if taken <= quota:
            return False
        self.above_quota.set()
        log.warning(
            "namespace %s of store %s takes %s, more than its quota of %s: its coldest "
            "pages are deleted, and nothing is stored until it is below",
            self.place.namespace[:12],
            self.place.root,
            format_bytes(taken),
            format_bytes(quota),
        )
        return True

    def free_bytes(self) -> int:
        """Return the free space of the file system, bytes."""
        status = os.fstatvfs(self.namespace_fd)
        return status.f_bavail * status.f_frsize

    def create_files(
        self, folder: SegmentDirectory, slots: int, slot_bytes: int
    ) -> Segment:
        """Create the files of a segment, which this process owns from the start."""
        name = IndexName(secrets.randbits(64), 1, "new")
        header = header_of(
            name.segment, name.generation, slots, slot_bytes, folder.object_bytes
        )
        index_fd = make_index(folder.fd, name, header, slots, folder.liveness)
        fresh = attrs.evolve(name, state="open")
        try:
            self._preallocate(folder, name, slots * slot_bytes, create=True)
            contents = read_contents(index_fd, name, slots * slot_bytes)
            if contents is None:
                raise OSError(errno.EIO, "a new index file does not read back")  # noqa: TRY301 - as if reading had failed
            here = folder.fd
            os.rename(str(name), str(fresh), src_dir_fd=here, dst_dir_fd=here)
        except OSError:
            release(index_fd)
            for leftover in (str(name), name.data):
                with suppress(OSError):
                    os.unlink(leftover, dir_fd=folder.fd)
            raise
        segment = folder.add(fresh, contents, index_fd)
        self.catalog.counts["segments_created"] += 1
        return segment

    def _sweep_leftovers(self, folder: SegmentDirectory) -> bool:
        """Delete unreadable files; return whether there were any."""
        if not folder.leftover_bytes:
            return False
        if not collect_garbage(folder.fd, folder.liveness, lost=True):
            return False
        self.catalog.counts["leftovers_swept"] += 1
        folder.scan()
        return True

    def _recycle(self, folder: SegmentDirectory, before_ns: int) -> Segment | None:
        """Plan evictions and return what comes of them."""
        # A plan may come to nothing: other processes write some of its segments, and
        # what they used shows when a segment is claimed.
        passed: set[Segment] = set()
        for _ in range(_MOST_PLANS):
            plan = self._plan(folder, before_ns, passed)
            # Then pages of tenants within their quotas, of this pool, come after those
            # above theirs, of any other.
            made = None if plan and plan.spares else self._reclaim(folder)
            if made:
                return made
            if plan is None:
                return None
            while not plan.spares and self.others.evict_segment(
                folder.name, colder_than_ns=min(plan.coldest_ns, before_ns)
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
            segment = self.catalog.segments.get(plan.numbers.pop())
            if segment is None:
                continue
            if self._evict_from(folder, segment, plan, before_ns):
                self.catalog.counts["segments_recycled"] += 1
                return segment
            if segment.name.segment not in folder.segments:
                # It had to be deleted, and leaves room for another one.
                made = self.create(folder)
                if made:
                    return made
            passed.add(segment)
        return None

    def _plan(
        self, folder: SegmentDirectory, before_ns: int, passed: set[Segment]
    ) -> EvictionPlan | None:
        """Plan the next evictions of a folder, without segments passed over."""
        every = set(folder.segments.values()) - passed
        claimable = [segment for segment in every if self.may_claim(folder, segment)]
        most = max((segment.rows.slots for segment in claimable), default=0)
        writable = np.zeros(len(self.catalog.index.slots_in), np.bool_)
        writable[[segment.rows.number for segment in claimable]] = True
        # Not under the lock: with ten million pages it takes a quarter of a second.
        shares = self._shares(folder)
        plan = plan_eviction(self.catalog.index, writable, most, before_ns, shares)
        if plan:
            self.plans[folder] = plan
        else:
            self.plans.pop(folder, None)
        return plan

    def _plan_of(self, folder: SegmentDirectory) -> EvictionPlan | None:
        """Return what is evicted next, unless other tenants are to pay by now."""
        plan = self.plans.get(folder)
        if plan is None:
            return None
        shares = self._shares(folder)
        if plan.over != (shares.over.keys() if shares else frozenset()):
            del self.plans[folder]
            return None
        return plan

    def ask(self, folder: SegmentDirectory, tenant: int, count: int) -> None:
        """Note which tenant is about to fill a segment: beyond its quota it pays."""
        slots = self._slots(folder, slot_bytes_of(self.engine, folder.object_bytes))
        if self.room is not None:
            self.room.ask(tenant, min(count, slots) * folder.object_bytes)

    def _shares(self, folder: SegmentDirectory) -> Shares | None:
        """Return whose pages may go now; None where no tenant has a quota."""
        each = folder.object_bytes
        if self.room is None or not each:
            return None
        over = {one: -(-nbytes // each) for one, nbytes in self.room.over().items()}
        return Shares(over, self.room.writer)

    def _reclaim(self, folder: SegmentDirectory) -> Segment | None:
        """Make a segment in the place of one of a tenant above its quota."""
        if self.room is None or not folder.object_bytes:
            return None
        while True:
            # Within its own quota a namespace gains nothing by what others lose.
            left = self.free_bytes() - self.settings.free_space
            bound_by_disk = self._room(folder) >= left
            if not self.room.evict_segment(everywhere=bound_by_disk):
                return None
            made = self.create(folder)
            if made:
                return made

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
        with self.releasing(folder, segment):
            shares = self._shares(folder)
            with self.catalog.lock:
                rows = segment.rows
                gone = cold_slots(self.catalog.index, rows, plan, before_ns, shares)
                try:
                    # What another process has deleted, it has given back itself.
                    # Under the lock: where it was deleted, its descriptor is closed.
                    records = read_records(segment.index_fd, gone)
                    self._wipe(segment, gone, records)
                    erase_records(segment.index_fd, gone)
                except OSError as error:
                    self.faulty.add(segment)
                    self.release_unread(folder, segment, error)
                    return False
                self.catalog.index.evict_from(rows, gone)
                roomy = self._is_roomy(segment)
            if not roomy:
                self.release_full(folder, segment)
        self.catalog.ledger.give_back(segment.slot_bytes, records)
        self.catalog.counts["pages_evicted"] += len(gone)
        return roomy

    def _wipe(self, segment: Segment, slots: Int64Array, records: Records) -> None:
        """Make the bytes unreadable of evicted pages that were to be erased."""
        timed = records["expire_at"] > 0
        if self.catalog.index.max_age_s:
            timed[:] = True
        if timed.any():
            # A process that is killed now leaves records that are erased as expired.
            over = records[timed].copy()
            over["expire_at"], over["keep_until"] = 1, 0
            write_records(segment.index_fd, slots[timed], with_checksums(over))
            size, data = segment.slot_bytes, segment.name.data
            with closing_fd(open_file(segment.folder, data, os.O_WRONLY)) as fd:
                for slot in slots[timed].tolist():
                    wipe(fd, slot * size, size, punch=True)

    def release_full(self, folder: SegmentDirectory, segment: Segment) -> None:
        """Stop being a segment's writer: it stays as it is until it is recycled."""
        with self.catalog.lock:
            with suppress(OSError), folder.own_change():
                segment.release(full=True)
            segment.release(full=True)  # if the folder cannot be read

    def _displace(self, folder: SegmentDirectory) -> Segment | None:
        """Make a small segment, and room for it where another pool has more pages.

        Called where all pages of a folder are warmer than what is to be stored:
        so the pools of a prefix that is longer than the quota share the quota.
        """
        while True:
            made = self.create(folder, least=0.0)
            if made or not self._could_recycle(folder):
                return made
            slots = sum(one.rows.slots for one in list(folder.segments.values()))
            if not self.others.evict_segment(folder.name, least_slots=slots):
                return None

    def _could_recycle(self, folder: SegmentDirectory) -> bool:
        """Return whether one slot would fit if all other folders were empty."""
        least = least_bytes(slot_bytes_of(self.engine, folder.object_bytes))
        others = self.neighbours.usage_bytes(but=folder.name)
        return self._room(folder) + others >= least

    def delete(self, folder: SegmentDirectory, segment: Segment) -> None:
        """Delete a segment's files; the index first, so nothing is found."""
        # As they are on disk: what another process has deleted, it has given back.
        records = np.zeros(0, RECORD)
        with (
            suppress(OSError),
            closing_fd(open_index(folder.fd, str(segment.name))) as fd,
        ):
            contents = read_contents(fd, segment.name, 2**62)
            records = records if contents is None else contents.records
        for name in (str(segment.name), segment.name.data):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder.fd)
        with self.catalog.lock:
            folder.drop(segment)
        self.catalog.ledger.give_back(segment.slot_bytes, records)

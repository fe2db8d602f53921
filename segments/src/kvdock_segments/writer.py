"""Store pages: reserve slots, write bytes, then publish their records."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock import native
from kvdock.arrays import any_of, least_of
from kvdock.batch import Batch, BatchResult, Outcome
from kvdock_segments.format import RECORD, Records, records_of, times_of
from kvdock_segments.io import (
    DEADLINE,
    EMPTY_CHECKSUM,
    UNREGISTERED,
    IOEngine,
    IORequest,
    IOResult,
)
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import NO_FILE, OUT_OF_FILES

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray, UInt64Array
    from kvdock_segments.allocator import SegmentAllocator
    from kvdock_segments.call_arrays import CallArrays
    from kvdock_segments.catalog import Catalog
    from kvdock_segments.directory import SegmentDirectory
    from kvdock_segments.retention import Retainer
    from kvdock_segments.segment import Segment

_OK = int(Outcome.OK)
_REFUSED_PAGE = int(Outcome.REFUSED)
_REFUSED = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ESTALE, UNREGISTERED)
"""Errors for lack of space or unreachable memory, as opposed to a broken disk."""
_NOT_THE_SLOT = (0, DEADLINE, UNREGISTERED, errno.ESTALE, *OUT_OF_FILES)
"""Errors that say nothing about the place that was to be written."""


@attrs.define(eq=False)
class ActiveSegment:
    """A segment that this process fills.

    Args:
        free: int64, its empty slots, ascending.
        pending: Slots that were handed out and not yet returned.
    """

    folder: SegmentDirectory
    segment: Segment
    free: Int64Array
    pending: int = 0


@attrs.frozen(eq=False)
class SlotReservation:
    """Slots of one segment that are reserved for a batch."""

    active: ActiveSegment
    slots: Int64Array


@attrs.define(eq=False)
class PutBatch:
    """A batch of objects to store.

    Args:
        digests: uint64 (n, 2), of its keys.
        used_ns: int64 (n,), the time of use of each.
        stored_ns: int64 (n,), since when each counts as stored.
        absent_at: Version of the index at which they were absent, or -1.
        kept: bool (n,), which are stored with the promise that was asked for.
        call: For compiled code, with the times of them; None for the thorough way.
    """

    batch: Batch
    digests: UInt64Array
    used_ns: Int64Array
    stored_ns: Int64Array
    absent_at: int
    kept: BoolArray
    call: CallArrays | None = None


class Writer:
    """Stores objects in segments that this process owns."""

    def __init__(
        self,
        catalog: Catalog,
        allocator: SegmentAllocator,
        engine: IOEngine,
        retainer: Retainer,
    ) -> None:
        self._retainer = retainer
        self._catalog = catalog
        self._allocator = allocator
        self._engine = engine
        self._tenant = allocator.place.tenant
        self._lock = catalog.lock
        self._index = catalog.index
        self._reserving = threading.Lock()
        self._active: dict[SegmentDirectory, ActiveSegment] = {}

    def put(self, batch: Batch) -> BatchResult:
        """Store the objects of a batch that are absent."""
        outcomes, kept = self._put(batch)
        self._catalog.count("put", outcomes)
        result = BatchResult.of(batch, outcomes)
        return attrs.evolve(result, kept=kept) if batch.keep_until else result

    def _put(self, batch: Batch) -> tuple[OutcomeArray, BoolArray]:
        """Return an outcome for each object, and which of them are promised."""
        found = self._catalog.lookup_durable(
            batch.keys, newest=batch.expire_at is not None
        )
        wanted = batch.object_bytes
        # An object of another length under this key can only be damaged.
        right = found.nbytes == wanted[found.there]
        there = np.zeros(len(batch), np.bool_)
        there[found.there[right]] = True
        used_ns, stored_ns = self._catalog.write_times(
            found.digests, batch.deadline_s, batch.tenant
        )
        self._catalog.touch(found, right, used_ns)
        absent_at = found.version if right.all() else -1
        outcomes = np.where(there, Outcome.OK, Outcome.REFUSED).astype(np.uint8)
        kept = np.zeros(len(batch), np.bool_)
        if right.any() and (batch.keep_until or batch.expire_at is not None):
            changed = self._retainer.retain_found(batch, found)
            kept[found.there] = right & (changed == _OK)
            if batch.expire_at is not None:
                outcomes[found.there[right]] = changed[right]
        missing = np.flatnonzero(~there)
        if len(missing):
            first, copy_of = _without_repeats(found.digests[missing])
            todo = missing[first]
            fresh = PutBatch(batch, found.digests, used_ns, stored_ns, absent_at, kept)
            sizes = wanted[todo]
            if (sizes == sizes[0]).all():
                outcomes[todo] = self.store(fresh, todo, int(sizes[0]))
            else:
                for size in np.unique(sizes).tolist():
                    same = todo[sizes == size]
                    outcomes[same] = self.store(fresh, same, size)
            outcomes[missing] = outcomes[todo][copy_of]
            kept[missing] = kept[todo][copy_of]
        return outcomes, kept

    def store(self, fresh: PutBatch, todo: Int64Array, size: int) -> OutcomeArray:
        """Store objects of one size; return an outcome for each."""
        outcomes = np.zeros(len(todo), np.uint8) + _REFUSED_PAGE
        folder = self._catalog.folder(size)
        done = 0
        # No object is evicted for one that was used before it: so a batch, and a
        # prefix that is stored in several, never evicts what it stored itself.
        before_ns = int(least_of(fresh.used_ns[todo]))
        # One segment after the other, so that a batch never reserves slots that it
        # would have to recycle itself.
        tenant = fresh.batch.tenant
        while done < len(todo):
            reserved = self.reserve(folder, len(todo) - done, before_ns, tenant)
            if reserved is None:
                break
            rows = todo[done : done + len(reserved.slots)]
            try:
                result = self._move(fresh, rows, reserved, size)
                outcomes[done : done + len(rows)] = self._publish(
                    fresh, rows, reserved, result, size
                )
            except BaseException:
                self.commit_reservation(reserved, reserved.slots)
                raise
            done += len(rows)
        return outcomes

    def _move(
        self, fresh: PutBatch, rows: Int64Array, reserved: SlotReservation, size: int
    ) -> IOResult:
        """Write objects of one size into reserved slots."""
        if not size:
            return _not_moved(len(rows), 0)
        batch, call, segment = fresh.batch, fresh.call, reserved.active.segment
        count, whole = len(rows), len(rows) == len(batch)
        try:
            token = self._catalog.open_one(segment)
        except OSError as error:
            gone = error.errno in NO_FILE
            return _not_moved(count, errno.ESTALE if gone else errno.EMFILE)
        compiled = native.library() if call is not None else None
        try:
            if call is not None and compiled is not None:
                call.slots[:count] = reserved.slots
                call.slot_bytes[0] = segment.slot_bytes
                if type(token) is int:
                    call.tokens[0] = token
                compiled.place_in_slots(call.address, count)
                file_of, offsets = call.file_of[:count], call.offsets[:count]
            else:
                file_of = np.zeros(count, np.int64)
                offsets = reserved.slots * segment.slot_bytes
            return self._engine.move(
                IORequest(
                    write=True,
                    files=(token,),
                    file_of=file_of,
                    offsets=offsets,
                    addresses=batch.addresses if whole else batch.addresses[rows],
                    sizes=batch.sizes if whole else _chosen(batch.sizes, rows),
                    deadline_s=batch.deadline_s,
                    gate=batch.gate,
                    movement=None if call is None else call.movement,
                )
            )
        finally:
            self._catalog.release_all((segment,))

    def _publish(
        self,
        fresh: PutBatch,
        rows: Int64Array,
        reserved: SlotReservation,
        result: IOResult,
        size: int,
    ) -> OutcomeArray:
        """Make objects visible that were written whole; return their outcomes."""
        segment, tenant = reserved.active.segment, fresh.batch.tenant or self._tenant
        outcomes = _judged(result, size)
        slots, sums = reserved.slots, result.checksums
        good = np.arange(len(slots))
        if any_of(outcomes):
            fresh.call = None
            good = np.flatnonzero(outcomes == _OK)
            wrong = ~np.isin(result.errors, _NOT_THE_SLOT)
            self._set_aside(reserved.active, slots[wrong])
            rows, sums = rows[good], sums[good]
        promised = 0
        records = self._made_records(fresh, rows, sums, segment.name.segment, tenant)
        if records is None:
            times, promised = self._times_of(fresh, rows, segment, tenant)
            records = records_of(
                fresh.digests[rows],
                sums,
                segment=segment.name.segment,
                slots=slots[good],
                stored_ns=fresh.stored_ns[rows],
                times=times,
                tenant=tenant,
            )
        if len(good):
            done = self._commit(fresh, reserved.active, slots[good], records, rows)
            if done is not None:
                outcomes[good[~done]] = _REFUSED_PAGE
            fresh.kept[rows[:promised]] = True if done is None else done[:promised]
            if done is not None and promised:
                lost = records[:promised][~done[:promised]]
                self._catalog.ledger.give_back(segment.slot_bytes, lost)
        stored = outcomes == _OK
        if self._allocator.faulty and stored.any():
            self._allocator.note_stored()
        self.commit_reservation(reserved, slots[~stored])
        return outcomes

    def _made_records(
        self,
        fresh: PutBatch,
        rows: Int64Array,
        sums: UInt64Array,
        segment: int,
        tenant: int,
    ) -> Records | None:
        """Make the records of what was written in compiled code; None without it."""
        call, compiled, count = fresh.call, native.library(), len(rows)
        if call is None or compiled is None:
            return None
        call.movement.sums[:count] = sums  # an engine may have arrays of its own
        digests = native.address_of(fresh.digests)
        compiled.record(call.address, digests, int(rows[0]), count, segment, tenant)
        return call.records[:count]

    def _times_of(
        self, fresh: PutBatch, rows: Int64Array, segment: Segment, tenant: int
    ) -> tuple[UInt64Array | int, int]:
        """Return the times of records, and how many of them have a promise."""
        batch, promised = fresh.batch, 0
        if not batch.keep_until and batch.expire_at is None:
            return 0, 0
        ends = np.zeros(len(rows), np.int64)
        if batch.expire_at is not None:
            ends = batch.expire_at[rows]
        until = np.zeros(len(rows), np.int64)
        if batch.keep_until:
            blank = np.zeros(len(rows), RECORD)
            blank["tenant"] = tenant
            until[:] = batch.keep_until
            may = self._allocator.promise(segment.slot_bytes, blank, until)
            promised = int(np.count_nonzero(may))  # the first ones
            until[promised:] = 0
        return times_of(until, ends), promised

    def _set_aside(self, active: ActiveSegment, slots: Int64Array) -> None:
        """Use no slot that could not be written until it is due."""
        if len(slots):
            with self._lock:
                active.segment.set_aside(slots)
                active.folder.count_failed(active.segment)
            self._allocator.note_fault(active.segment, len(slots))

    def _commit(
        self,
        fresh: PutBatch,
        active: ActiveSegment,
        slots: Int64Array,
        records: Records,
        rows: Int64Array,
    ) -> BoolArray | None:
        """Write records to disk and into the index.

        Args:
            fresh: What they are part of.
            active: Where the objects were written.
            slots: int64 (n,), ascending.
            records: (n,).
            rows: int64 (n,), their places in the batch.

        Returns:
            bool (n,): which of them are stored; None for all of them.
        """
        segment, done, call = active.segment, None, fresh.call
        known_failed = bool(segment.failed)
        with self._lock:
            if not segment.owned:  # cleared by another process meanwhile
                return np.zeros(len(slots), np.bool_)
            try:
                segment.commit(slots, records)
            except OSError:
                if segment.was_taken_over():
                    self._catalog.disown(segment)
                    return np.zeros(len(slots), np.bool_)
                done = segment.commit_each(slots, records)
                self._set_aside(active, slots[~done])
                if not done.any():
                    segment.rest()
                slots, records, rows = slots[done], records[done], rows[done]
                call = None
            if known_failed:
                active.folder.count_failed(segment)
            known = fresh.absent_at == self._index.version
            compiled = native.library()
            if known and call is not None and compiled is not None:
                place = segment.rows
                self._index.insert(compiled, call, int(rows[0]), len(rows), place)
            else:
                self._index.put(
                    slots + segment.rows.first,
                    records,
                    fresh.used_ns[rows],
                    absent_at=fresh.absent_at,
                )
            fresh.absent_at = self._index.version if known else -1
        return done

    def reserve(
        self, folder: SegmentDirectory, count: int, before_ns: int, tenant: int = 0
    ) -> SlotReservation | None:
        """Reserve up to `count` slots of one segment, at least one.

        Objects that were used at `before_ns` or later are not evicted.

        Returns:
            None if there is no space.
        """
        with self._reserving:
            active = self._active.get(folder)
            # A folder that has changed is read a moment later. Until then pages would
            # be stored, and lost, in a segment that another process has deleted.
            doubtful = not folder.settled or folder.liveness is WriterLiveness.TIMEOUT
            if active is not None and doubtful and active.segment.was_taken_over():
                self._catalog.disown(active.segment)
            if active is None or not active.segment.owned:
                if self._allocator.room is not None:
                    self._allocator.ask(folder, tenant, count)
                active = self._open(folder, before_ns)
            if active is None:
                return None
            take = active.free[:count]
            active.free = active.free[len(take) :]
            active.pending += len(take)
            if not len(active.free):
                del self._active[folder]
            return SlotReservation(active, take)

    def commit_reservation(self, reserved: SlotReservation, unused: Int64Array) -> None:
        """End a reservation; slots that were not filled are free again."""
        active = reserved.active
        with self._reserving:
            active.pending -= len(reserved.slots)
            if active.segment.retry_s:
                active.free = unused = active.free[:0]
            elif active.segment.failed:
                unused = np.setdiff1d(unused, active.segment.slots_aside())
            if len(unused) and self._active.setdefault(active.folder, active) is active:
                active.free = np.sort(np.concatenate([active.free, unused]))
            self._release_full(active)

    def _open(self, folder: SegmentDirectory, before_ns: int) -> ActiveSegment | None:
        segment = self._allocator.acquire(folder, before_ns)
        if segment is None:
            self._active.pop(folder, None)
            return None
        with self._allocator.releasing(folder, segment):
            # It was opened read-only if its disk was read-only then.
            self._catalog.files.reopen(segment)
            with self._lock:
                free = segment.free_slots(self._index.live(segment.rows))
        if not len(free):  # the last one failed just now
            self._allocator.release_full(folder, segment)
            return None
        active = self._active[folder] = ActiveSegment(folder, segment, free)
        return active

    def _release_full(self, active: ActiveSegment) -> None:
        """Release a segment that is full and has no reserved slots."""
        if active.pending or len(active.free) or not active.segment.owned:
            return
        if self._active.get(active.folder) is active:
            del self._active[active.folder]
        # Its times of use are written with those of other segments: pages that were
        # just stored have theirs in their records.
        active.segment.touched = True
        self._allocator.release_full(active.folder, active.segment)


def _chosen(sizes: Int64Array, rows: Int64Array) -> Int64Array:
    """Return sizes of some rows; a row that is repeated stays a view."""
    return sizes[: len(rows)] if sizes.strides[0] == 0 else sizes[rows]


def _not_moved(count: int, error: int) -> IOResult:
    """Answer without an engine: an error, or 0 for objects without bytes."""
    result = IOResult.of(count)
    result.errors[:] = error
    result.checksums[:] = EMPTY_CHECKSUM
    return result


def _judged(result: IOResult, size: int) -> OutcomeArray:
    """Return the outcome of each object that an engine wrote."""
    outcomes = np.zeros(len(result.errors), np.uint8)  # OK
    outcomes[result.nbytes != size] = _REFUSED_PAGE
    if any_of(result.errors):
        outcomes[result.errors != 0] = Outcome.ERROR
        outcomes[np.isin(result.errors, _REFUSED)] = Outcome.REFUSED
        outcomes[result.errors == DEADLINE] = Outcome.TIMEOUT
    return outcomes


def _without_repeats(digests: UInt64Array) -> tuple[Int64Array, Int64Array]:
    """Return the first of equal keys, and for each key the position of its first."""
    every = np.arange(len(digests))
    low = np.sort(digests[:, 0])
    if not (low[1:] == low[:-1]).any():
        return every, every
    _, first, inverse = np.unique(
        digests, axis=0, return_index=True, return_inverse=True
    )
    # In the order of the keys, so that the head of a prefix is stored first.
    order = np.argsort(first)
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    return first[order], rank[inverse.reshape(-1)]

"""Storing pages: slots, bytes, then the records that make them visible."""

from __future__ import annotations

import errno
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batches import Batch, BatchResult, Outcome, Outcomes
from kvdock.segments.engine import DEADLINE, Engine, Moved, Transfer
from kvdock.segments.memory import EMPTY_CHECKSUM
from kvdock.segments.records import RECORD, Records, UInt64s, sealed
from kvdock.segments.table import ABSENT

if TYPE_CHECKING:
    from kvdock.segments.catalogue import Catalogue
    from kvdock.segments.folder import Folder
    from kvdock.segments.index import Int64s
    from kvdock.segments.segment import Segment
    from kvdock.segments.space import Space

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@attrs.define(eq=False)
class Active:
    """A segment that this process fills.

    Args:
        folder: Where it lies.
        segment: The segment, claimed.
        free: int64, its empty slots, ascending.
        pending: Slots that were handed out and not yet returned.
    """

    folder: Folder
    segment: Segment
    free: Int64s
    pending: int = 0


@attrs.frozen(eq=False)
class Reserved:
    """Slots of one segment that a batch may write."""

    active: Active
    slots: Int64s


class Writer:
    """Stores objects in segments that this process owns.

    Args:
        catalogue: Learns what was stored.
        space: Finds segments.
        engine: Moves the bytes.
    """

    def __init__(self, catalogue: Catalogue, space: Space, engine: Engine) -> None:
        self._catalogue = catalogue
        self._space = space
        self._engine = engine
        self._lock = catalogue.lock
        self._index = catalogue.index
        self._reserving = threading.Lock()
        self._active: dict[Folder, Active] = {}

    def put(self, batch: Batch) -> BatchResult:
        """Store the objects of a batch that are not there yet."""
        digests, rows = self._catalogue.find(batch.keys)
        wanted = batch.object_bytes
        with self._lock:
            there = rows != ABSENT
            # One of another length under this key can only be damage.
            stored = self._index.records["nbytes"][rows[there]]
            there[there] = stored == wanted[there].astype(np.uint64)
        outcomes = np.where(there, Outcome.OK, Outcome.REFUSED).astype(np.uint8)
        self._catalogue.counts["put_present"] += int(there.sum())
        missing = np.flatnonzero(~there)
        first, copy_of = _without_repeats(digests[missing])
        for size in np.unique(wanted[missing]).tolist():
            todo = missing[first]
            todo = todo[wanted[todo] == size]
            outcomes[todo] = self._store(batch, digests, todo, size)
        outcomes[missing] = outcomes[missing[first]][copy_of]
        self._count(outcomes)
        return BatchResult.of(batch, outcomes)

    def _store(
        self, batch: Batch, digests: UInt64s, todo: Int64s, size: int
    ) -> Outcomes:
        """Store objects of one size; return an outcome for each."""
        outcomes = np.full(len(todo), Outcome.REFUSED, np.uint8)
        done = 0
        for reserved in self.reserve(self._catalogue.folder(size), len(todo)):
            rows = todo[done : done + len(reserved.slots)]
            try:
                found = self._write(batch, digests, rows, reserved, size)
            except BaseException:
                self.settle(reserved, reserved.slots)
                raise
            outcomes[done : done + len(rows)] = found
            done += len(rows)
        return outcomes

    def _write(
        self,
        batch: Batch,
        digests: UInt64s,
        rows: Int64s,
        reserved: Reserved,
        size: int,
    ) -> Outcomes:
        """Write objects into reserved slots and publish those that are whole."""
        segment = reserved.active.segment
        sums = np.full(len(rows), EMPTY_CHECKSUM, np.uint64)
        outcomes = np.full(len(rows), Outcome.OK, np.uint8)
        if size:
            moved = self._move(batch, rows, reserved, segment)
            outcomes, sums = _judged(moved, size), moved.checksums
        good = outcomes == Outcome.OK
        now_ns = time.time_ns()
        slots = reserved.slots[good]
        records = np.zeros(len(slots), RECORD)
        records["key_low"], records["key_high"] = digests[rows[good]].T
        records["checksum"] = sums[good]
        records["nbytes"] = size
        records["stored_ns"] = now_ns
        records["segment"] = segment.name.segment
        records["generation"] = segment.name.generation
        records["slot"] = slots
        published = attrs.evolve(reserved, slots=slots)
        if len(slots) and not self.publish(published, sealed(records), now_ns):
            outcomes[good] = Outcome.REFUSED
            good[:] = False
        self.settle(reserved, reserved.slots[~good])
        return outcomes

    def _move(
        self, batch: Batch, rows: Int64s, reserved: Reserved, segment: Segment
    ) -> Moved:
        held = self._catalogue.hold(np.array([segment.rows.number]))
        try:
            if not held.tokens:
                return Moved.of(len(rows))
            return self._engine.write(
                Transfer(
                    files=held.tokens,
                    file_of=np.zeros(len(rows), np.int64),
                    offsets=reserved.slots * segment.slot_bytes,
                    addresses=batch.addresses[rows],
                    sizes=batch.sizes[rows],
                    deadline_s=batch.deadline_s,
                )
            )
        finally:
            self._catalogue.release(held)

    def _count(self, outcomes: Outcomes) -> None:
        for outcome, number in zip(
            *np.unique(outcomes, return_counts=True), strict=True
        ):
            name = Outcome(outcome).name.lower()
            self._catalogue.counts[f"put_{name}"] += int(number)

    def reserve(self, folder: Folder, count: int) -> list[Reserved]:
        """Hand out slots; fewer than asked for where there is no space."""
        found: list[Reserved] = []
        with self._reserving:
            while count:
                active = self._active.get(folder)
                if active is None or not active.segment.owned:
                    active = self._open(folder)
                if active is None:
                    break
                take = active.free[:count]
                active.free = active.free[len(take) :]
                active.pending += len(take)
                count -= len(take)
                if len(take):
                    found.append(Reserved(active, take))
                if not len(active.free):
                    del self._active[folder]
                    self._seal(active)
        return found

    def publish(self, reserved: Reserved, records: Records, now_ns: int) -> bool:
        """Write records of pages that are written; False if that failed.

        Args:
            reserved: Which of the reserved slots, ascending.
            records: (n,).
            now_ns: When they were stored.
        """
        active, slots = reserved.active, reserved.slots
        segment = active.segment
        with self._lock:
            if not segment.owned:
                return False  # cleared by somebody meanwhile
            try:
                segment.commit(slots, records)
            except OSError:
                return False
            self._index.put(slots + segment.rows.first, records, now_ns)
        return True

    def settle(self, reserved: Reserved, unused: Int64s) -> None:
        """Return reserved slots, all of them; some of them were not filled."""
        active = reserved.active
        with self._reserving:
            active.pending -= len(reserved.slots)
            if len(unused) and self._active.setdefault(active.folder, active) is active:
                active.free = np.sort(np.concatenate([active.free, unused]))
            self._seal(active)

    def _open(self, folder: Folder) -> Active | None:
        segment = self._space.acquire(folder)
        if segment is None:
            self._active.pop(folder, None)
            return None
        with self._lock:
            free = np.flatnonzero(~self._index.live(segment.rows))
        active = self._active[folder] = Active(folder, segment, free)
        return active

    def _seal(self, active: Active) -> None:
        """Let a segment go once it is full and nobody writes to it."""
        if active.pending or len(active.free) or not active.segment.owned:
            return
        if self._active.get(active.folder) is active:
            del self._active[active.folder]
        with self._lock, suppress(OSError):
            used = np.array(self._index.used_ns[active.segment.rows.span])
            active.segment.write_uses(used)
            active.segment.let_go(full=True)


def _judged(moved: Moved, size: int) -> Outcomes:
    """Return the outcome of each object that an engine wrote."""
    outcomes = np.full(len(moved.errors), Outcome.OK, np.uint8)
    outcomes[moved.nbytes != size] = Outcome.REFUSED
    outcomes[moved.errors != 0] = Outcome.ERROR
    outcomes[np.isin(moved.errors, _FULL)] = Outcome.REFUSED
    outcomes[moved.errors == DEADLINE] = Outcome.TIMEOUT
    return outcomes


def _without_repeats(digests: UInt64s) -> tuple[Int64s, Int64s]:
    """Return the first of equal keys, and for each key which of those it is."""
    every = np.arange(len(digests))
    low = np.sort(digests[:, 0])
    if not (low[1:] == low[:-1]).any():
        return every, every
    _, first, inverse = np.unique(
        digests, axis=0, return_index=True, return_inverse=True
    )
    return first, inverse.reshape(-1)

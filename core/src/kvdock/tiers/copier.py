"""Copier: copies pages from one tier to another, later and on workers of its own.

A copy reads pages from a tier that has them, verified as in any load, into memory of
the core, and stores them from there. What waits is bounded in bytes; what finds the
queue full is dropped and counted. Copies into one tier are made one after the other,
in the order in which they came, so that an anchor follows its sidecars.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Operation, Outcome
from kvdock.events import TENANT, PagesCopied, stored_for
from kvdock.resilience.workers import Workers
from kvdock.retention import CallTimes, Retention, RetentionAnswer
from kvdock.synchronization import ProcessGuard, new_condition, remaining_s

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.config.core import CoreSettings
    from kvdock.tiers.placed import RowMover
    from kvdock.tiers.rows import RowChunks

log = logging.getLogger("kvdock")

_OK = int(Outcome.OK)
_MOST_LACKING = 1 << 16
"""Hashes of each tier that are remembered for a sidecar that was not copied."""
_Place = tuple[str, str, str]
"""A page in a tier: names of the pool and the tier, and the page hash."""
_HASH_BYTES = 128
"""About what a hash takes: pages of a logical pool have no bytes of their own."""


@attrs.frozen(eq=False)
class CopiedPool:
    """What copies of one pool have in common.

    Args:
        required: Whether an anchor's page is worth nothing without its page.
        chunks: The memory that pages pass through, a chunk for each thread.
    """

    name: str
    anchor: bool
    required: bool
    page_bytes: int
    chunks: RowChunks = attrs.field(repr=False)


@attrs.frozen(eq=False)
class Copy:
    """Pages that are to be copied.

    Args:
        promoted: Whether they are copied nearer, since they were used.
        others: Further tiers, for pages that the source has lost meanwhile.
        keep_until: Until when they are promised there, seconds since 1970; 0 for no
            promise.
        stored_since: Pages that the engine stored there itself meanwhile.
    """

    pool: CopiedPool
    source: RowMover
    target: RowMover
    hashes: Sequence[str] = attrs.field(repr=False)
    promoted: bool = False
    others: Sequence[RowMover] = ()
    keep_until: int = 0
    tenant: int = attrs.field(factory=TENANT.get)
    stored_since: set[str] = attrs.field(factory=set)

    def place(self, page_hash: str) -> _Place:
        """Return where it copies a page to."""
        return self.pool.name, self.target.backend, page_hash

    @property
    def nbytes(self) -> int:
        """Bytes that it counts for in the queue: pages, or at least their hashes."""
        return len(self.hashes) * max(self.pool.page_bytes, _HASH_BYTES)


class Copier:
    """The copies of an attachment."""

    def __init__(
        self, core: CoreSettings, notify: Callable[[PagesCopied], None]
    ) -> None:
        self._core = core
        self._notify = notify
        self._lock, self._changed = new_condition()
        self._lanes: dict[str, deque[Copy]] = {}
        self._under_way: dict[str, Copy] = {}  # by lane
        self._waiting: dict[_Place, Copy] = {}  # those under way as well
        self._queued_bytes = 0
        self._queued_to: Counter[str] = Counter()  # the same by tier
        self._lacking: dict[str, dict[str, None]] = {}
        self._workers = Workers("kvdock-copy", core.tiers.threads)
        self._closed = False
        self._paused = 0
        self._guard = ProcessGuard()

    def submit(self, copy: Copy) -> None:
        """Queue a copy, or drop it; returns at once.

        Pages that wait to be copied to the same tier already are left out.
        """
        if self._guard.forked:
            return
        with self._lock:
            lane = copy.pool.name, copy.target.backend
            new = [one for one in copy.hashes if (*lane, one) not in self._waiting]
            if not new:
                return
            copy = attrs.evolve(copy, hashes=new)
            full = self._queued_bytes + copy.nbytes > self._core.tiers.queue_bytes
            dropped = self._closed or full or self._paused > 0
            if not dropped:
                self._queued_bytes += copy.nbytes
                self._queued_to[copy.target.backend] += copy.nbytes
                self._waiting.update(((*lane, one), copy) for one in new)
                self._lanes.setdefault(copy.target.backend, deque()).append(copy)
                self._begin()
        if dropped:
            self._note_lacking(copy, copy.hashes)
            self._report(copy, Counter(dropped=len(new)))

    @contextmanager
    def paused(self, deadline_s: float) -> Iterator[None]:
        """Make no copy while a block runs: it clears the tiers.

        Drops the copies that wait and those that are asked for meanwhile, and waits
        for those under way. One that takes longer finds at its end that its source
        is empty, and deletes what it stored.
        """
        if self._guard.forked:
            yield
            return
        with self._lock:
            self._paused += 1
            dropped = self._drop_all()
        try:
            for copy in dropped:
                self._report(copy, Counter(dropped=len(copy.hashes)))
            self.wait_idle(deadline_s)
            yield
        finally:
            with self._lock:
                self._paused -= 1

    def wait_for(self, pool: str, hashes: Sequence[str], deadline_s: float) -> None:
        """Wait for the copies of some pages that are under way."""
        if self._guard.forked:
            return
        with self._lock:
            began = [
                copy
                for copy in self._under_way.values()
                if copy.pool.name == pool and not set(copy.hashes).isdisjoint(hashes)
            ]
            self._changed.wait_for(
                lambda: not any(copy in self._under_way.values() for copy in began),
                remaining_s(deadline_s),
            )

    def spare(self, pool: str, tier: str, hashes: Sequence[str]) -> None:
        """Let pages stay that an engine is about to store in a tier.

        A copy into it whose source has lost them would delete them at its end.
        """
        if tier not in self._under_way or self._guard.forked:
            return
        with self._lock:
            copy = self._under_way.get(tier)
            if copy is not None and copy.pool.name == pool:
                copy.stored_since.update(hashes)

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until no copy waits or is under way; return whether that is so."""
        if self._guard.forked:
            return True
        with self._lock:
            return self._changed.wait_for(
                lambda: not self._under_way and not any(self._lanes.values()),
                remaining_s(deadline_s),
            )

    def close(self, drain_until_s: float, deadline_s: float) -> bool:
        """Make the copies that wait, drop late ones; return whether all threads ended.

        Copies are made until `drain_until_s`; the one under way has until `deadline_s`.
        """
        if self._guard.forked:
            return True
        self.wait_idle(drain_until_s)
        with self._lock:
            self._closed = True
            dropped = self._drop_all()
        self._workers.close()
        for copy in dropped:
            self._report(copy, Counter(dropped=len(copy.hashes)))
        return self._workers.join(deadline_s)

    def _drop_all(self) -> list[Copy]:
        """Empty the queue; with the lock held."""
        dropped = [copy for lane in self._lanes.values() for copy in lane]
        for copy in dropped:
            self._forget(copy)
        self._lanes.clear()
        self._changed.notify_all()
        return dropped

    def _forget(self, copy: Copy) -> None:
        """Take a copy off the books; with the lock held."""
        for one in copy.hashes:
            place = copy.place(one)
            if self._waiting.get(place) is copy:
                del self._waiting[place]
        self._queued_bytes -= copy.nbytes
        self._queued_to[copy.target.backend] -= copy.nbytes

    def _begin(self) -> None:
        """Begin copies into tiers that wait for some; with the lock held."""
        for lane, waiting in self._lanes.items():
            if len(self._under_way) >= self._core.tiers.threads:
                return
            if not waiting or lane in self._under_way:
                continue
            try:
                inbox = self._workers.take()
            except RuntimeError as error:  # a limit of the system
                log.warning("copies between tiers: %s", error)
                return
            copy = self._under_way[lane] = waiting.popleft()
            inbox.put(partial(self._work, lane, copy))

    def _work(self, lane: str, copy: Copy) -> Callable[[], None]:
        """Make a copy; return what begins the next one once the worker is free."""
        counts: Counter[str] = Counter(failed=len(copy.hashes))
        try:
            counts = self._make(copy)
        except Exception:
            # A defect of ours: storage answers with outcomes.
            log.exception("a copy between tiers failed")
            self._note_lacking(copy, copy.hashes)
        finally:
            with self._lock:
                self._forget(copy)
            self._report(copy, counts)
        return partial(self._end, lane)

    def _end(self, lane: str) -> None:
        with self._lock:
            del self._under_way[lane]
            self._begin()
            self._changed.notify_all()

    def _make(self, copy: Copy) -> Counter[str]:
        """Copy pages chunk by chunk; return how many ended how."""
        counts: Counter[str] = Counter()
        chunks = copy.pool.chunks
        rows = chunks.take()
        if rows is None:  # there is one for each thread
            return Counter(failed=len(copy.hashes))
        try:
            for start in range(0, len(copy.hashes), chunks.chunk_rows):
                if self._closed or self._paused:
                    counts["dropped"] += len(copy.hashes) - start
                    break
                part = copy.hashes[start : start + chunks.chunk_rows]
                counts += self._copy(copy, self._complete(copy, part, counts), rows)
        finally:
            chunks.release(rows)
        return counts

    def _complete(
        self, copy: Copy, hashes: Sequence[str], counts: Counter[str]
    ) -> Sequence[str]:
        """Leave out pages of an anchor that lack a sidecar in that tier."""
        lacking = self._lacking.get(copy.target.backend)
        if not copy.pool.anchor or not lacking:
            return hashes
        with self._lock:
            whole = [one for one in hashes if one not in lacking]
        counts["incomplete"] += len(hashes) - len(whole)
        return whole

    def _copy(
        self, copy: Copy, hashes: Sequence[str], rows: Int64Array
    ) -> Counter[str]:
        counts: Counter[str] = Counter()
        if not hashes:
            return counts
        if copy.target.rejects(Operation.PUT, hashes):
            return self._failed(copy, hashes, counts)
        there = copy.target.find(hashes, self._core.deadlines.until("exists"))
        counts["present"] += int(np.count_nonzero(there))
        rest = [one for one, had in zip(hashes, there.tolist(), strict=True) if not had]
        ready = copy.target.ready_to_store(rest, self._core.deadlines.until("put"))
        self._failed(copy, _at(rest, ~ready), counts)
        rest = _at(rest, ready)
        times = CallTimes()
        codes, sources = self._load(copy, rest, rows, times)
        counts["gone"] += int(np.count_nonzero(codes != _OK))
        self._note_lacking(copy, _at(rest, codes != _OK))
        good = codes == _OK
        rest, sources = _at(rest, good), sources[good]
        codes = self._store(copy, rest, rows[: len(good)][good], times.expire_at)
        self._failed(copy, _at(rest, codes != _OK), counts)
        good = codes == _OK
        stored = self._unchanged(copy, _at(rest, good), sources[good], times.expire_at)
        counts["gone"] += int(np.count_nonzero(good)) - len(stored)
        counts["copied"] += len(stored)
        with self._lock:
            lacking = self._lacking.get(copy.target.backend)
            if lacking and not copy.pool.anchor:
                for one in (*stored, *_at(hashes, there)):
                    lacking.pop(one, None)
        return counts

    def _unchanged(
        self,
        copy: Copy,
        hashes: Sequence[str],
        sources: Int64Array,
        expire_at: Mapping[str, int],
    ) -> Sequence[str]:
        """Do to stored pages what was done to their sources since; return the rest.

        What deletes pages, or lets them expire, goes from tier to tier, here or in
        another process. It came to the target before this copy did, or comes to the
        source after this look.
        """
        gone: list[str] = []
        late: dict[int, list[str]] = {}
        for at in np.unique(sources).tolist():
            names = _at(hashes, sources == at)
            found = self._tiers_of(copy)[at].times(
                names, self._core.deadlines.until("retain")
            )
            for name, there, end in zip(
                names, found.there.tolist(), found.expire_at.tolist(), strict=True
            ):
                if not there:
                    gone.append(name)
                elif end and end != expire_at.get(name):
                    late.setdefault(end, []).append(name)
        with self._lock:
            gone = [name for name in gone if name not in copy.stored_since]
        if gone and not copy.keep_until:
            # A promise was given since: another process has stored them there.
            kept = copy.target.times(gone, self._core.deadlines.until("retain")).kept
            gone = _at(gone, ~kept)
        for end, names in late.items():
            asked = Retention(expire_at=end)
            answers = copy.target.retain(
                names, asked, self._core.deadlines.until("retain")
            )
            # Without its time the page must not stay.
            held = np.isin(answers, (RetentionAnswer.ACCEPTED, RetentionAnswer.ABSENT))
            gone += _at(names, ~held)
        if gone:
            copy.target.delete(gone, self._core.deadlines.until("delete"))
        left = set(hashes).difference(gone)
        return [name for name in hashes if name in left]

    def _tiers_of(self, copy: Copy) -> list[RowMover]:
        return [copy.source, *copy.others]

    def _load(
        self, copy: Copy, hashes: Sequence[str], rows: Int64Array, found: CallTimes
    ) -> tuple[OutcomeArray, Int64Array]:
        """Load pages to rows; the outcome of each, and the tier that was asked last."""
        codes = np.full(len(hashes), Outcome.ABSENT, np.uint8)
        sources = np.zeros(len(hashes), np.int64)
        for at, tier in enumerate(self._tiers_of(copy)):
            lost = np.flatnonzero(codes != _OK)
            if not len(lost):
                break
            names = [hashes[at] for at in lost.tolist()]
            codes[lost] = self._move(tier, Operation.GET, names, rows[lost], found)
            sources[lost] = at
        return codes, sources

    def _failed(
        self, copy: Copy, hashes: Sequence[str], counts: Counter[str]
    ) -> Counter[str]:
        counts["failed"] += len(hashes)
        self._note_lacking(copy, hashes)
        return counts

    def _store(
        self,
        copy: Copy,
        hashes: Sequence[str],
        rows: Int64Array,
        expire_at: Mapping[str, int],
    ) -> OutcomeArray:
        """Store pages that expire when they do where they come from."""
        outcomes = np.full(len(hashes), Outcome.ERROR, np.uint8)
        ends = np.array([expire_at.get(one, 0) for one in hashes], np.int64)
        for end in np.unique(ends).tolist():
            which = np.flatnonzero(ends == end)
            names = [hashes[at] for at in which.tolist()]
            times = CallTimes(Retention(copy.keep_until, end))
            with stored_for(copy.tenant):
                outcomes[which] = self._move(
                    copy.target,
                    Operation.PUT,
                    names,
                    rows[which],
                    times if times.asked else None,
                )
        return outcomes

    def _move(
        self,
        tier: RowMover,
        operation: Operation,
        hashes: Sequence[str],
        rows: Int64Array,
        times: CallTimes | None,
    ) -> OutcomeArray:
        deadline_s = self._core.deadlines.until(operation)
        outcomes = np.full(len(hashes), Outcome.TIMEOUT, np.uint8)
        for start in range(0, len(hashes), tier.batch_pages):
            if start and remaining_s(deadline_s) <= 0:
                break
            part = slice(start, start + tier.batch_pages)
            if tier.rejects(operation, hashes[part]):
                outcomes[part] = Outcome.UNAVAILABLE
                continue
            batch = hashes[part]
            outcomes[part] = tier.move_rows(
                operation, batch, rows[start : start + len(batch)], deadline_s, times
            )
        return outcomes

    def _note_lacking(self, copy: Copy, hashes: Sequence[str]) -> None:
        """Note that a tier lacks pages of a required sidecar."""
        if not copy.pool.required or copy.pool.anchor or copy.promoted:
            return
        with self._lock:
            lacking = self._lacking.setdefault(copy.target.backend, {})
            lacking.update(dict.fromkeys(hashes))
            while len(lacking) > _MOST_LACKING:
                del lacking[next(iter(lacking))]

    def _report(self, copy: Copy, counts: Counter[str]) -> None:
        self._notify(
            PagesCopied(
                pool=copy.pool.name,
                source=copy.source.backend,
                target=copy.target.backend,
                promoted=copy.promoted,
                outcomes={one: pages for one, pages in counts.items() if pages},
                nbytes=counts["copied"] * copy.pool.page_bytes,
                queued_bytes=self._queued_to[copy.target.backend],
            )
        )


def _at(hashes: Sequence[str], which: BoolArray) -> list[str]:
    return [hashes[at] for at in np.flatnonzero(which).tolist()]

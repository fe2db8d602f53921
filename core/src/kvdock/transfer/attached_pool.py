"""One pool of an attachment: its memory, its leases, and where its pages go."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.arrays import least_of
from kvdock.batch import Operation, Outcome
from kvdock.events import PagesHeld
from kvdock.keys import check_hashes
from kvdock.pays.policy import LIMIT
from kvdock.retention import CallTimes, Retention, RetentionAnswer, combined
from kvdock.synchronization import check_deadline, remaining_s
from kvdock.tiers.chain import Chain, EnginePages
from kvdock.transfer.leases import Lease, PageLeases
from kvdock.transfer.page_call import PageCall
from kvdock.transfer.page_indices import (
    as_page_indices,
    check_pages,
    duplicate_positions,
    unanswered,
)
from kvdock.transfer.result import NO_PAGE

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, FloatArray, Int64Array, OutcomeArray
    from kvdock.geometry.region import Region
    from kvdock.pays.curves import LoadCurve
    from kvdock.plugin.manifest import Scope
    from kvdock.plugin.store import WholeStore
    from kvdock.pools.spec import PoolSpec
    from kvdock.resilience.channel import BackendChannel
    from kvdock.resilience.executor import Job, Work
    from kvdock.transfer.host_memory import HostBuffer
    from kvdock.transfer.placement import Placement

_OK = int(Outcome.OK)
"""A plain number: comparing an array with a member takes numpy microseconds."""
_ABSENT = int(Outcome.ABSENT)
_TIMEOUT = int(Outcome.TIMEOUT)


class Transfer(Protocol):
    """Stores or loads pages of a pool."""

    def __call__(
        self,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        times: CallTimes | None = None,
        job: Job | None = None,
    ) -> OutcomeArray:
        """Store or load pages in batches; uint8 (n,), an outcome for each.

        Args:
            operation: PUT or GET.
            hashes: The n page hashes.
            pages: int64 (n,), their page indices, checked; the position of a
                `NO_PAGE` is ABSENT.
            deadline_s: Until when, over all batches.
            times: For PUT: how long the pages are kept and served.
            job: Where it is one of several pools of a call, or a background task; see
                `DeadlineExecutor.work`.

        Raises:
            Abandoned: If such a job was abandoned meanwhile.
        """


@attrs.frozen(eq=False)
class AttachedPool:
    """One pool of an attachment, with all that its batches need.

    Args:
        leases: Pages under a storage call.
        placements: Where its pages are stored, near first; at least one.
        chain: What moves pages over several placements; None for one.
        landing: Registered memory where pages of peers may arrive before they are
            copied to their slots; None where there is none.
    """

    pool: PoolSpec
    region: Region = attrs.field(repr=False)
    leases: PageLeases = attrs.field(repr=False)
    writes: bool
    placements: tuple[Placement, ...]
    _chain: Chain | None = attrs.field(default=None, repr=False)
    landing: HostBuffer | None = attrs.field(default=None, repr=False)
    _notifying: threading.Lock = attrs.field(factory=threading.Lock, repr=False)
    _physical: bool = attrs.field(init=False, repr=False)
    """Whether a page has bytes."""
    _max_age_s: float = attrs.field(init=False, repr=False)
    transfer: Transfer = attrs.field(init=False, repr=False)
    """Stores or loads pages of the pool, over all its placements."""

    @_physical.default
    def _of_region(self) -> bool:
        return self.region.physical

    @_max_age_s.default
    def _of_settings(self) -> float:
        return self.placements[0].channel.core.retention.max_age

    @transfer.default
    def _composed(self) -> Transfer:
        transfer: Transfer = partial(self.transfer_in, self.placements[0])
        if self._chain is not None:
            transfer = partial(self._transfer_in_turn, self._chain)
        return partial(self._with_max_age, transfer) if self._max_age_s else transfer

    @property
    def nearest(self) -> Placement:
        """The first placement: what peers and messages mean by the pool's backend."""
        return self.placements[0]

    @property
    def backend(self) -> str:
        """The name of the nearest backend that stores it."""
        return self.nearest.backend

    @property
    def channel(self) -> BackendChannel:
        """The channel of the nearest backend."""
        return self.nearest.channel

    @property
    def handle(self) -> WholeStore:
        """The store that the nearest backend returned for the pool."""
        return self.nearest.handle

    @property
    def reach(self) -> Scope:
        """How far what it stores is found: as far as its farthest placement's."""
        return max(one.channel.backend.manifest.sharing for one in self.placements)

    @property
    def object_bytes(self) -> Int64Array:
        """Bytes of each object of a page in the nearest backend, with trailers."""
        return self.nearest.object_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, without trailers."""
        return self.region.page_bytes

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys of pages in the nearest backend, page-major."""
        keys: list[str] = self.nearest.keys(hashes)
        return keys

    def exists(
        self, hashes: Sequence[str], deadline_s: float | None = None
    ) -> BoolArray:
        """Find out which pages of this pool are stored, bool (n,).

        For engines that combine the answers of their pools themselves, as `put`
        and `get` are for those that order their pools themselves.

        Args:
            hashes: Page hashes.
            deadline_s: Until when, on `time.monotonic()`'s clock; None for the
                deadline of the settings.

        Raises:
            KvdockError: On bad input.
        """
        check_hashes(hashes)
        return self.find(hashes, self._deadline(Operation.EXISTS, deadline_s))

    def load_seconds(
        self, hashes: Sequence[str], curves: dict[tuple[str, str], LoadCurve]
    ) -> FloatArray:
        """Return what loading the first p pages should take, float64 (n + 1,).

        Args:
            hashes: n page hashes, after a lookup has found them.
            curves: Takes what that rests on, by backend and pool.
        """
        tiers = np.zeros(len(hashes), np.int64)
        if self._chain is not None:
            tiers = self._chain.found_in(hashes)
        seconds = np.zeros(len(hashes) + 1)
        for at, placement in enumerate(self.placements):
            mine = tiers == at
            if self._physical and mine.any():
                pages = np.concatenate([[0], np.cumsum(mine)])
                curve = placement.channel.loads.curve(self.pool.name)
                curves[placement.backend, self.pool.name] = curve
                calls = -(-pages // placement.batch_pages)
                nbytes = pages * int(placement.object_bytes.sum())
                seconds += curve.seconds(nbytes, calls)
        return seconds

    def put(
        self,
        hashes: Sequence[str],
        pages: npt.ArrayLike,
        deadline_s: float | None = None,
    ) -> OutcomeArray:
        """Store pages; uint8 (n,), an `Outcome` for each.

        Args:
            hashes: Page hashes.
            pages: int64 (n,), the page index of each hash; `NO_PAGE` for none.
            deadline_s: As for `exists`.

        Raises:
            KvdockError: On bad input.
        """
        return self._checked_transfer(Operation.PUT, hashes, pages, deadline_s)

    def get(
        self,
        hashes: Sequence[str],
        pages: npt.ArrayLike,
        deadline_s: float | None = None,
    ) -> OutcomeArray:
        """Load pages; as `put`."""
        return self._checked_transfer(Operation.GET, hashes, pages, deadline_s)

    def touch(self, hashes: Sequence[str]) -> bool:
        """Note that the engine serves pages from memory of its own.

        What is loaded counts as used anyway; without this the pages that an
        engine uses most, and so never loads, would be evicted first. Returns at
        once: the backend is called in the background.

        Args:
            hashes: Page hashes, in the order of the prefix.

        Returns:
            Whether it is passed on; False where the backend does not order its
            objects by use, or too many notes wait.

        Raises:
            KvdockError: On bad input.
        """
        check_hashes(hashes)
        # Each backend is told, also after the first one took the note.
        taken = [one.touch(hashes) for one in self.placements]
        return any(taken)

    def poll_removed(self) -> None:
        """Ask its backends, in the background, which stored pages are gone."""
        for placement in self.placements:
            placement.poll_removed()

    def _checked_transfer(
        self,
        operation: Operation,
        hashes: Sequence[str],
        pages: npt.ArrayLike,
        deadline_s: float | None,
    ) -> OutcomeArray:
        own = self.checked_pages(hashes, pages)
        end_s = self._deadline(operation, deadline_s)
        return self.transfer(operation, hashes, own, end_s)

    def checked_pages(self, hashes: Sequence[str], pages: npt.ArrayLike) -> Int64Array:
        """Return the page index of each hash, int64 (n,), for `transfer`.

        Raises:
            KvdockError: On bad input.
        """
        check_hashes(hashes)
        own = as_page_indices(self.pool.name, pages, len(hashes))
        check_pages(self.region, own)
        return own

    def _deadline(self, operation: Operation, deadline_s: float | None) -> float:
        if deadline_s is None:
            return self.channel.core.deadlines.until(operation)
        check_deadline(deadline_s)
        return deadline_s

    def find(
        self, hashes: Sequence[str], deadline_s: float, job: Job | None = None
    ) -> BoolArray:
        """Return which pages are stored with all their objects; trusts its input.

        The nearest backend is asked first, and each further one for the rest.
        """
        if self._chain is not None:
            return self._chain.find(hashes, deadline_s)
        return self.placements[0].find(hashes, deadline_s, job)

    def _with_max_age(
        self,
        transfer: Transfer,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        times: CallTimes | None = None,
        job: Job | None = None,
    ) -> OutcomeArray:
        """Transfer pages that are not served after an age."""
        if times is None and operation is Operation.PUT:
            times = CallTimes(Retention.lasting(max_age_s=self._max_age_s))
        return transfer(operation, hashes, pages, deadline_s, times, job)

    def transfer_in(
        self,
        placement: Placement,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        times: CallTimes | None = None,
        job: Job | None = None,
    ) -> OutcomeArray:
        """Store pages in one placement or load them from there; as `transfer`."""
        loads, chosen = operation is Operation.GET, None
        answers = np.empty(len(pages), np.uint8)
        if (
            len(pages)
            and least_of(pages) >= 0
            and (len(pages) <= placement.batch_pages if loads else self.writes)
        ):
            answers.fill(_TIMEOUT)
        else:
            chosen, answers = unanswered(pages)
            if not (loads or self.writes):
                # Another rank stores these very bytes.
                answers[chosen] = _OK
                return answers
            if loads and len(chosen) > placement.batch_pages:
                chosen = self._once(pages, chosen, answers)
            if not len(chosen):
                return answers
            hashes, pages = _at(hashes, chosen), pages[chosen]
        outcomes = answers if chosen is None else answers[chosen]
        channel = placement.channel
        if channel.rejects(operation):
            outcomes = placement.reject(
                operation, hashes, Outcome.UNAVAILABLE, "breaker"
            )
        else:
            batches = _Batches(placement, operation, hashes, pages, outcomes, times)
            work: Work = (
                partial(self._move_batch, batches, 0, len(pages), deadline_s)
                if len(pages) <= placement.batch_pages
                else partial(self._move_batches, batches, deadline_s)
            )
            ran = channel.executor.work(work, channel.latest(deadline_s), job)
            if ran.abandoned:
                if not ran.begun:
                    placement.give_up(operation, hashes, Outcome.TIMEOUT)
            elif ran.error is not None:
                outcomes = placement.give_up_rejected(operation, hashes, ran.error)
        if chosen is None:
            return outcomes
        answers[chosen] = outcomes
        return answers

    def retain(
        self, hashes: Sequence[str], asked: Retention, deadline_s: float
    ) -> OutcomeArray:
        """Promise stored pages, or let them expire; a `RetentionAnswer` for each.

        A promise is asked of one tier that has the page: of those, the one that
        declares the longest life. Expiry is asked of all of them.
        """
        if asked.expire_at:
            given = self._expire(self.placements, hashes, asked, deadline_s)
            return combined(given, len(hashes))
        # Of equals the farthest comes first: it is the largest, and no near room is
        # taken.
        order = [one for one in reversed(self.placements) if one.retains]
        nothing = RetentionAnswer.ABSENT if order else RetentionAnswer.UNSUPPORTED
        answers = np.full(len(hashes), nothing, np.uint8)
        for placement in sorted(order, key=lambda one: one.life, reverse=True):
            left = np.flatnonzero(
                np.isin(answers, (RetentionAnswer.ABSENT, RetentionAnswer.CLIPPED))
            )
            if len(left):
                found = placement.retain(_at(hashes, left), asked, deadline_s)
                there = found != RetentionAnswer.ABSENT
                answers[left[there]] = found[there]
        return answers

    def _expire(
        self,
        tiers: Sequence[Placement],
        hashes: Sequence[str],
        asked: Retention,
        deadline_s: float,
    ) -> list[OutcomeArray]:
        """Let pages expire in tiers; what each answers.

        A tier that lacks what one behind it has is asked again: a copy that another
        process has under way may have come from there, and found the old time.
        """
        answers = [tier.retain(hashes, asked, deadline_s) for tier in tiers]
        behind = np.zeros(len(hashes), np.bool_)
        for tier, found in reversed([*zip(tiers, answers, strict=True)]):
            again = np.flatnonzero(behind & (found == RetentionAnswer.ABSENT))
            if len(again):
                found[again] = tier.retain(_at(hashes, again), asked, deadline_s)
            behind |= found == RetentionAnswer.ACCEPTED
        return answers

    def delete(self, hashes: Sequence[str], deadline_s: float) -> OutcomeArray:
        """Delete pages from every tier; the worst `Outcome` for each, uint8 (n,)."""
        check_hashes(hashes)
        outcomes: OutcomeArray = np.zeros(len(hashes), np.uint8)
        if self._chain is not None:
            half_s = time.monotonic() + remaining_s(deadline_s) / 2
            self._chain.copier.wait_for(self.pool.name, hashes, half_s)
        # All but the last one twice: a copy from a tier behind, that another process
        # has under way, may have found its source as it was.
        for placement in (*self.placements, *self.placements[:-1]):
            np.maximum(outcomes, placement.delete(hashes, deadline_s), out=outcomes)
        return outcomes

    def prefetch(self, hashes: Sequence[str], deadline_s: float) -> dict[str, int]:
        """Bring pages of far tiers to the nearest one, in the background.

        Returns:
            How many pages are "queued" to be copied, "present" there, or "absent"
            everywhere; "unsupported" where there is one tier.

        Raises:
            KvdockError: On bad input.
        """
        check_hashes(hashes)
        if self._chain is None:
            return {"unsupported": len(hashes)}
        return self._chain.prefetch(hashes, deadline_s)

    def store(
        self,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        asked: Retention,
        answered: Callable[[OutcomeArray], None],
        job: Job | None = None,
    ) -> OutcomeArray:
        """Store pages with times, as `transfer`; trusts its input.

        Args:
            hashes: The n page hashes.
            pages: int64 (n,), their page indices.
            deadline_s: Until when, over all batches.
            asked: How long they are kept and served. What would expire at once is
                not stored.
            answered: Called with a `RetentionAnswer` for each page.
            job: As for `transfer`.
        """
        if 0 < asked.expire_at <= time.time():
            answered(np.full(len(hashes), RetentionAnswer.ACCEPTED, np.uint8))
            near, why = self.placements[0], (Outcome.REFUSED, "expired")
            return near.give_up(Operation.PUT, hashes, *why)
        times = CallTimes(asked.no_longer_than(self._max_age_s))
        outcomes = self.transfer(Operation.PUT, hashes, pages, deadline_s, times, job)
        stored = outcomes == _OK
        answered(self.answers_of_put(hashes, pages, stored, times, deadline_s))
        return outcomes

    def answers_of_put(
        self,
        hashes: Sequence[str],
        pages: Int64Array,
        stored: BoolArray,
        times: CallTimes,
        deadline_s: float,
    ) -> OutcomeArray:
        """Return what became of the times of pages that were given to be stored.

        A tier that had a page already is told of its time here.
        """
        answers = np.full(len(hashes), RetentionAnswer.ABSENT, np.uint8)
        answers[stored] = RetentionAnswer.ACCEPTED
        if times.asked.keep_until:
            kept = np.array([one in times.kept for one in hashes], np.bool_)
            able = any(one.retains for one in self.placements)
            lacks = RetentionAnswer.CLIPPED if able else RetentionAnswer.UNSUPPORTED
            answers[stored & ~kept] = lacks
        if times.asked.expire_at and not any(one.expires for one in self.placements):
            answers[pages != NO_PAGE] = RetentionAnswer.UNSUPPORTED
        elif times.asked.expire_at and self._chain is not None:
            asked = Retention(expire_at=times.asked.expire_at)
            able_tiers = [one for one in self.placements if one.retains]
            for found in self._expire(able_tiers, hashes, asked, deadline_s):
                known = (RetentionAnswer.ACCEPTED, RetentionAnswer.ABSENT)
                answers[stored & ~np.isin(found, known)] = RetentionAnswer.CLIPPED
        return answers

    def _transfer_in_turn(
        self,
        chain: Chain,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        times: CallTimes | None = None,
        job: Job | None = None,  # noqa: ARG002 - each placement takes a worker
    ) -> OutcomeArray:
        """Store or load pages over several placements; see `Chain`."""
        if operation is Operation.PUT:
            move = partial(self._move, times=times)
            keep_until = times.asked.keep_until if times is not None else 0
            engine = EnginePages(move, self._deliver, keep_until)
            return chain.store(hashes, pages, deadline_s, engine)
        engine = EnginePages(self._move, self._deliver)
        # What one placement loads, no other one may overwrite.
        refused = np.full(len(hashes), _ABSENT, np.uint8)
        once = self._once(pages, np.flatnonzero(pages != NO_PAGE), refused)
        if len(once) < len(pages):
            pages = np.where(np.isin(np.arange(len(pages)), once), pages, NO_PAGE)
        outcomes = chain.load(hashes, pages, deadline_s, engine)
        return np.where(refused == _ABSENT, outcomes, refused)

    def _move(
        self,
        at: int,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        times: CallTimes | None = None,
    ) -> OutcomeArray:
        """Store pages in the placement at a position, or load them from there."""
        return self.transfer_in(
            self.placements[at], operation, hashes, pages, deadline_s, times
        )

    def _deliver(
        self, pages: Int64Array, rows: Int64Array, deadline_s: float
    ) -> OutcomeArray:
        """Copy rows of the core's memory to pages, unless it is too late."""
        free, lease = self._lease(pages)
        try:
            # Under the lease: later the engine may have reused the pages.
            if time.monotonic() >= deadline_s:
                return np.full(len(pages), Outcome.TIMEOUT, np.uint8)
            source = self.nearest.loads
            assert source is not None  # noqa: S101 - of each placement of a chain
            content = np.empty((int(free.sum()), self.region.page_bytes), np.uint8)
            source.region.gather(rows[free], content)
            self.region.scatter(pages[free], content)
        finally:
            lease.end()
        return np.where(free, np.uint8(_OK), np.uint8(Outcome.REFUSED))

    def _move_batches(self, batches: _Batches, deadline_s: float, job: Job) -> None:
        """Store or load the batches of a call, on the thread of its job."""
        placement, operation = batches.placement, batches.operation
        size, count = placement.batch_pages, len(batches.pages)
        limit = LIMIT.get() if operation is Operation.GET else None
        for start in range(0, count, size):
            if start and limit is not None:
                if limit.reached(start / count):
                    deadline_s = 0.0
                elif placement.share >= 1:
                    deadline_s = limit.deadline_s
            if start and time.monotonic() >= deadline_s:
                why = "" if limit is None else "pays"
                left = batches.hashes[start:]
                placement.give_up(operation, left, Outcome.TIMEOUT, why)
                return
            stop = min(start + size, count)
            if start and placement.rejects(operation, batches.hashes[start:stop]):
                batches.outcomes[start:stop] = Outcome.UNAVAILABLE
            else:
                self._move_batch(batches, start, stop, deadline_s, job)

    def _move_batch(
        self, batches: _Batches, start: int, stop: int, deadline_s: float, job: Job
    ) -> None:
        """Store or load pages of one batch."""
        placement, hashes, pages = batches.placement, batches.hashes, batches.pages
        if stop - start < len(pages):
            hashes, pages = hashes[start:stop], pages[start:stop]
        call = PageCall(
            job, placement, batches.operation, hashes, pages, deadline_s,
            times=batches.times,
        )  # fmt: skip
        if placement.channel.listening:
            call.on_late = self.notify_held
            call.rest = batches.hashes[stop:]
        whole = batches.operation is Operation.GET or not placement.deletes
        if whole and self._physical:
            call.lease = self.leases.take_all(pages)
            whole = call.lease is not None
        outcomes = (
            placement.move(call) if whole else self._move_in_turns(placement, call)
        )
        batches.outcomes[start:stop] = outcomes

    def _once(
        self, pages: Int64Array, chosen: Int64Array, outcomes: OutcomeArray
    ) -> Int64Array:
        """Keep one position of each page: a later batch must not overwrite it."""
        if not self._physical:
            return chosen
        again = duplicate_positions(pages[chosen])
        outcomes[chosen[again]] = Outcome.REFUSED
        return chosen[~again]

    def _move_in_turns(self, placement: Placement, batch: PageCall) -> OutcomeArray:
        """Store or load pages that cannot all be moved at once.

        Those under a call are refused. A page that is given twice is stored again
        afterwards, and loaded once: it can hold only one of them. What is being
        deleted is stored last.
        """
        operation, hashes = batch.operation, batch.hashes
        outcomes = np.full(len(hashes), Outcome.REFUSED, np.uint8)
        deleting = np.zeros(len(hashes), np.bool_)
        if operation is Operation.PUT and placement.deletes:
            deleting = placement.being_deleted(hashes)
        rest, late = np.flatnonzero(~deleting), np.flatnonzero(deleting)
        while len(rest) or len(late):
            if not len(rest):
                placement.wait_deleted(_at(hashes, late), batch.deadline_s)
                gone = ~placement.being_deleted(_at(hashes, late))
                rest, late = late[gone], late[:0]
                continue
            free, lease = self._lease(batch.pages[rest])
            chosen = rest[free]
            names = _at(hashes, chosen)
            if not names:
                placement.give_up(operation, _at(hashes, rest), Outcome.REFUSED)
            else:
                call = PageCall(
                    batch.job, placement, operation, names, batch.pages[chosen],
                    batch.deadline_s, lease, batch.times,
                )  # fmt: skip
                call.on_late, call.rest = batch.on_late, batch.rest
                outcomes[chosen] = placement.move(call)
            loaded_once = operation is Operation.GET or not names
            rest = rest[:0] if loaded_once else rest[~free]
        return outcomes

    def _lease(self, pages: Int64Array) -> tuple[BoolArray, Lease]:
        if self._physical:
            return self.leases.take(pages)
        return np.ones(len(pages), np.bool_), Lease(self.leases, pages[:0])

    def notify_held(self) -> None:
        """Notify observers how many pages are under calls, late ones too."""
        if not self.channel.observed:
            return
        # Under a lock, so that the last event has the last number.
        with self._notifying:
            self.channel.notify(
                PagesHeld(
                    pool=self.pool.name,
                    pages=self.region.pages,
                    leased=self.leases.leased_pages,
                )
            )


@attrs.define(eq=False)
class _Batches:
    """What a call moves between a pool and one placement.

    Args:
        hashes: Those of the n pages.
        pages: int64 (n,), page indices.
        outcomes: uint8 (n,), filled batch by batch.
    """

    placement: Placement
    operation: Operation
    hashes: Sequence[str]
    pages: Int64Array
    outcomes: OutcomeArray
    times: CallTimes | None


def _at(hashes: Sequence[str], positions: Int64Array) -> Sequence[str]:
    """Return the hashes at some positions, ascending, each at most once."""
    if len(positions) == len(hashes):
        return hashes
    return [hashes[at] for at in positions.tolist()]

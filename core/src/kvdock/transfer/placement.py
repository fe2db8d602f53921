"""Placement: what one backend is to one pool.

It has the keys, the transfer mode and the limits with which the pool's pages are
found, moved and deleted there. Whatever comes back is verified; what is wrong is
a miss, and is deleted. A pool has one placement or several, near first.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from kvdock.arrays import any_of
from kvdock.batch import NO_MEMORY, Batch, Operation, Outcome
from kvdock.config.tiers import Locality
from kvdock.events import BatchEnded, PagesAnswered
from kvdock.keys import key_builder
from kvdock.pays.policy import LIMIT
from kvdock.plugin.manifest import Scope, Support
from kvdock.pools.objects import slice_name
from kvdock.resilience.executor import Abandoned
from kvdock.retention import LATEST, RetentionAnswer, StoredTimes
from kvdock.transfer.page_call import PageCall

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.config.tiers import Tier
    from kvdock.geometry.region import Region
    from kvdock.plugin.store import WholeStore
    from kvdock.pools.spec import PoolSpec
    from kvdock.resilience.channel import BackendChannel
    from kvdock.resilience.executor import Job
    from kvdock.retention import CallTimes, Retention
    from kvdock.transfer.health_check import HealthCheck
    from kvdock.transfer.page_events import PageEvents
    from kvdock.transfer.steps import PageSteps

_OK = int(Outcome.OK)
_REFUSED = int(Outcome.REFUSED)
"""A plain number: comparing an array with a member takes numpy microseconds."""
_ABSENT = int(Outcome.ABSENT)
_TIMEOUT = int(Outcome.TIMEOUT)
_DELETED = "deleted"
_WRONG = (Outcome.SHORT, Outcome.LONG, Outcome.CORRUPT)
_HASH = re.compile(r"[0-9A-Za-z]+")
"""A page hash in a key; a suffix never begins with a letter or a digit."""
_FAILED = (*_WRONG, Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.ERROR)


@attrs.frozen(eq=False)
class Placement:
    """One backend's part in storing a pool.

    Args:
        pool: The pool, in objects of the unit that was chosen for this backend.
        namespace: The digest that begins every key.
        suffixes: How the keys of a page's objects end.
        region: The engine's memory, cut into these objects.
        steps: How bytes are moved.
        batch_pages: Most pages of a batch that moves bytes.
        batch_keys: Most keys of a lookup.
        health_check: A test page of its own.
        share: How much of a call's time it may take: 1 for the last placement of a
            pool, less where others wait for their turn.
        page_events: What the engine reports to others; None where it does not.
        tier: What comes into it when, where the pool is kept in tiers.
        loads: The same with rows of the core's memory in place of the engine's, for
            loads that several calls share; None for the only placement of a pool.
        copies: The same, for copies: no call of the engine's is counted.
        alone: Whether the pool has no other placement.
        counted: Whether its calls are the engine's.
    """

    pool: PoolSpec
    channel: BackendChannel
    handle: WholeStore = attrs.field(repr=False)
    namespace: str
    suffixes: tuple[str, ...]
    region: Region = attrs.field(repr=False)
    steps: PageSteps = attrs.field(repr=False)
    batch_pages: int
    batch_keys: int
    health_check: HealthCheck = attrs.field(repr=False)
    share: float = 1.0
    page_events: PageEvents | None = attrs.field(default=None, repr=False)
    tier: Tier | None = None
    loads: Placement | None = attrs.field(default=None, repr=False)
    copies: Placement | None = attrs.field(default=None, repr=False)
    alone: bool = True
    counted: bool = True

    slice_name: str = attrs.field(init=False)
    """The part of each page that this process has, as a coordinate."""
    name: str = attrs.field(init=False)
    """The pool's name."""
    retention: Support = attrs.field(init=False)
    """What its backend declares."""
    retains: bool = attrs.field(init=False)
    """Whether its backend gives promises, and lets stored pages expire."""
    keys: Callable[[Sequence[str]], list[str]] = attrs.field(init=False, repr=False)
    """Returns the keys of pages by their hashes, page-major."""

    @name.default
    def _of_pool(self) -> str:
        return self.pool.name

    @retention.default
    def _of_manifest(self) -> Support:
        return self.channel.backend.manifest.retention

    @retains.default
    def _of_retention(self) -> bool:
        return self.retention is Support.NATIVE

    @keys.default
    def _of_namespace(self) -> Callable[[Sequence[str]], list[str]]:
        return key_builder(self.namespace, self.suffixes)

    @slice_name.default
    def _of_region(self) -> str:
        return slice_name(self.region.objects)

    @property
    def backend(self) -> str:
        """The name of the backend, or of the instance of one."""
        return self.channel.name

    @property
    def remote(self) -> bool:
        """Return whether other hosts see its pages, by its tier or manifest."""
        said = self.tier.locality if self.tier else Locality.AUTO
        if said is not Locality.AUTO:
            return said is Locality.REMOTE
        return self.channel.backend.manifest.sharing is Scope.CLUSTER

    @property
    def reports_removal(self) -> bool:
        """Return whether its backend reports which stored pages are gone."""
        return bool(self.channel.backend.manifest.removed)

    @property
    def object_bytes(self) -> Int64Array:
        """Bytes of each stored object of a page, with a trailer if it has one."""
        return self.steps.region.object_bytes

    def until(self, deadline_s: float) -> float:
        """Return its own deadline within that of a call."""
        if self.share >= 1.0:
            return deadline_s
        now_s = time.monotonic()
        return now_s + max(0.0, deadline_s - now_s) * self.share

    def find(
        self, hashes: Sequence[str], deadline_s: float, job: Job | None = None
    ) -> BoolArray:
        """Return which pages are stored with all their objects; trusts its input.

        Args:
            hashes: Page hashes.
            deadline_s: Until when, on `time.monotonic()`'s clock.
            job: See `DeadlineExecutor.work`.
        """
        if self.channel.rejects(Operation.EXISTS):
            self.reject(Operation.EXISTS, hashes, Outcome.UNAVAILABLE, "breaker")
            return np.zeros(len(hashes), np.bool_)
        keys = self.keys(hashes)
        known = self.channel.negative_cache.lookup(keys)
        if known is None and 0 < len(keys) <= self.batch_keys:
            outcomes = self._find_keys(keys, deadline_s, job)
        else:
            outcomes = np.full(len(keys), _ABSENT, np.uint8)
            asked = np.arange(len(keys)) if known is None else np.flatnonzero(~known)
            for start in range(0, len(asked), self.batch_keys):
                part = asked[start : start + self.batch_keys]
                names = [keys[at] for at in part.tolist()]
                outcomes[part] = self._find_keys(names, deadline_s, job)
        several = len(self.suffixes) > 1
        pages = _by_page(outcomes, len(self.suffixes)) if several else outcomes
        if self.channel.observes_pages:
            self.notify_pages(Operation.EXISTS, hashes, pages)
        there: BoolArray = pages == _OK
        return there

    def _find_keys(
        self, keys: Sequence[str], deadline_s: float, job: Job | None
    ) -> OutcomeArray:
        """Look up keys in one batch; uint8 (n,)."""
        began = time.monotonic()
        nothing = NO_MEMORY[: len(keys)]
        batch = Batch(Operation.EXISTS, keys, nothing, nothing, deadline_s, self.name)
        result = self.channel.call(self.handle, batch, job)
        found = result.outcomes
        if result.cause == _DELETED:
            self._notify_deleted()
        if any_of(found) and self.channel.negative_cache.keeps_absent:
            self.channel.negative_cache.add_absent(_chosen(keys, found == _ABSENT))
        if self.channel.listening:
            self._notify(Operation.EXISTS, found, 0, began)
        return found

    def rejects(self, operation: Operation, hashes: Sequence[str]) -> bool:
        """Return whether a call would be rejected, before preparing one."""
        if not self.channel.rejects(operation):
            return False
        self.reject(operation, hashes, Outcome.UNAVAILABLE, "breaker")
        return True

    def reject(
        self,
        operation: Operation,
        hashes: Sequence[str],
        outcome: Outcome,
        held_back: str = "",
    ) -> OutcomeArray:
        """Return and tell the outcome of a call that is not made."""
        if self.channel.listening:
            keys = len(hashes) * len(self.suffixes)
            codes = np.full(keys, outcome, np.uint8)
            self._notify(operation, codes, 0, time.monotonic())
        return self.give_up(operation, hashes, outcome, held_back)

    def give_up(
        self,
        operation: Operation,
        hashes: Sequence[str],
        outcome: Outcome,
        held_back: str = "",
    ) -> OutcomeArray:
        """Return and tell the outcome of pages for which no backend is asked."""
        outcomes = np.full(len(hashes), outcome, np.uint8)
        if self.channel.observes_pages:
            self.notify_pages(operation, hashes, outcomes, held_back)
        return outcomes

    def move(self, call: PageCall) -> OutcomeArray:
        """Store or load leased pages in one batch; uint8 (n,), one for each page.

        The memory of the call is released here, or when a backend ends its hold.

        Raises:
            Abandoned: At the end of a call that was abandoned.
        """
        times = call.times
        try:
            if times is not None and times.asked.expire_at and not self.expires:
                return self.give_up(call.operation, call.hashes, Outcome.REFUSED)
            call.keys = self.keys(call.hashes)
            stores = call.operation is Operation.PUT
            codes = self.steps.put(call) if stores else self.steps.get(call)
        except Abandoned:
            call.end()
            self.notify_late(call)
            raise
        finally:
            call.end()
        if times is not None:
            times.note_expiry(call.hashes, call.expire_at)
        if self.channel.observed and (codes == _TIMEOUT).any():
            self.notify_late(call)  # more pages are held by now
        return self._recorded(call, codes)

    def move_rows(
        self,
        operation: Operation,
        hashes: Sequence[str],
        rows: Int64Array,
        deadline_s: float,
        times: CallTimes | None = None,
    ) -> OutcomeArray:
        """Store or load rows of the core's memory in one batch; as `move`."""

        def work(job: Job) -> OutcomeArray:
            # No lease: a staged call that is abandoned has a buffer, and no row.
            call = PageCall(job, self, operation, hashes, rows, deadline_s, times=times)
            return self.move(call)

        ran = self.channel.executor.work(work, self.channel.latest(deadline_s))
        if ran.abandoned:
            return np.full(len(hashes), Outcome.TIMEOUT, np.uint8)
        if ran.error is not None:
            return self.give_up_rejected(operation, hashes, ran.error)
        return cast("OutcomeArray", ran.result)

    def record_abandoned(self, call: PageCall) -> None:
        """Record a batch whose call was abandoned, and what was to come after it."""
        self._recorded(call, call.all(Outcome.TIMEOUT))
        if call.rest:
            self.give_up(call.operation, call.rest, Outcome.TIMEOUT)
        self.notify_late(call)

    def notify_late(self, call: PageCall) -> None:
        """Say that the number of leased pages may have changed."""
        if call.on_late is not None:
            call.on_late()

    def give_up_rejected(
        self, operation: Operation, hashes: Sequence[str], error: Exception
    ) -> OutcomeArray:
        """Return and tell the outcome of a call that the channel has not started."""
        keys = len(hashes) * len(self.suffixes)
        outcome = self.channel.rejected(operation, self.name, keys, error)
        return self.reject(operation, hashes, outcome)

    @property
    def life(self) -> int:
        """How long what is stored there lives, by what the backend declares."""
        return list(Scope).index(self.channel.backend.manifest.durability)

    @property
    def expires(self) -> bool:
        """Return whether pages can expire, by the backend or by trailers."""
        return self.retains or self.steps.verifies

    def retain(
        self, hashes: Sequence[str], asked: Retention, deadline_s: float
    ) -> OutcomeArray:
        """Promise stored pages, or let them expire; a `RetentionAnswer` for each."""
        if not self.retains:
            return np.full(len(hashes), RetentionAnswer.UNSUPPORTED, np.uint8)
        began, keys = time.monotonic(), self.keys(hashes)
        answers = np.empty(len(keys), np.uint8)
        for start in range(0, len(keys), self.batch_keys):
            part = slice(start, start + self.batch_keys)
            names = keys[part]
            ends = np.full(len(names), asked.expire_at, np.int64)
            batch = Batch(
                Operation.RETAIN,
                names,
                deadline_s=deadline_s,
                pool=self.name,
                keep_until=asked.keep_until,
                expire_at=ends if asked.expire_at else None,
            )
            answers[part] = self.channel.call(self.handle, batch).outcomes
        self._notify(Operation.RETAIN, answers, 0, began)
        # What could not be asked has no promise.
        known = np.isin(answers, (_OK, _ABSENT))
        codes = np.where(answers == _ABSENT, RetentionAnswer.ABSENT, _OK)
        codes = np.where(known, codes, RetentionAnswer.CLIPPED).astype(np.uint8)
        pages = codes.reshape(-1, len(self.suffixes))
        lacking = (pages == RetentionAnswer.ABSENT).any(axis=1)
        worst = np.where(lacking, RetentionAnswer.ABSENT, pages.max(axis=1))
        found = cast("OutcomeArray", worst.astype(np.uint8))
        if self.channel.observes_pages and asked.expire_at:
            taken = found == RetentionAnswer.ACCEPTED
            outcomes = np.where(taken, _OK, _ABSENT).astype(np.uint8)
            self.notify_pages(
                Operation.RETAIN, hashes, outcomes, expire_at=asked.expire_at
            )
        return found

    def times(self, hashes: Sequence[str], deadline_s: float) -> StoredTimes:
        """Ask the backend which pages are stored now, and with what times."""
        operation = Operation.RETAIN if self.retains else Operation.EXISTS
        keys = self.keys(hashes)
        there, kept = np.zeros(len(keys), np.bool_), np.zeros(len(keys), np.bool_)
        ends = np.zeros(len(keys), np.int64)
        for start in range(0, len(keys), self.batch_keys):
            part = slice(start, start + self.batch_keys)
            batch = Batch(operation, keys[part], deadline_s=deadline_s, pool=self.name)
            result = self.channel.call(self.handle, batch)
            there[part] = result.outcomes == _OK
            if result.kept is not None:
                kept[part] = result.kept
            if result.expire_at is not None:
                ends[part] = result.expire_at
        shape = -1, len(self.suffixes)
        ends = np.where(ends, ends, LATEST).reshape(shape).min(axis=1, initial=LATEST)
        return StoredTimes(
            np.logical_and.reduce(there.reshape(shape), axis=1),
            np.where(ends < LATEST, ends, 0),
            np.logical_or.reduce(kept.reshape(shape), axis=1),
        )

    def ready_to_store(self, hashes: Sequence[str], deadline_s: float) -> BoolArray:
        """Wait for the deletion of wrong objects; return which pages have none."""
        if not self.deletes or not hashes:
            return np.ones(len(hashes), np.bool_)
        self.wait_deleted(hashes, deadline_s)
        return ~self.being_deleted(hashes)

    def delete(self, hashes: Sequence[str], deadline_s: float) -> OutcomeArray:
        """Delete pages with all their objects; uint8 (n,), one for each page."""
        began, keys, found = time.monotonic(), self.keys(hashes), []
        for start in range(0, len(keys), self.batch_keys):
            part = keys[start : start + self.batch_keys]
            batch = Batch(Operation.DELETE, part, deadline_s=deadline_s, pool=self.name)
            found.append(self.channel.call(self.handle, batch).outcomes)
        gone = np.concatenate([np.zeros(0, np.uint8), *found])
        outcomes = _by_page(gone, len(self.suffixes))
        whole = np.repeat(outcomes == _OK, len(self.suffixes))
        self._record_events(_chosen(keys, whole), stored=False)
        if self.channel.observes_pages:
            self.notify_pages(Operation.DELETE, hashes, outcomes)
        self._notify(Operation.DELETE, gone, 0, began)
        return outcomes

    def clear(self, deadline_s: float) -> Outcome:
        """Delete everything of the namespace from the backend, other pools too."""
        self.channel.negative_cache.clear()
        batch = Batch(
            Operation.CLEAR,
            [f"{self.namespace}/"],
            deadline_s=deadline_s,
            pool=self.name,
        )
        cleared = self.channel.call(self.handle, batch).outcomes
        if self.channel.observes_pages:
            self.notify_pages(Operation.CLEAR, (), cleared)
        return Outcome(int(cleared[0]))

    def touch(self, hashes: Sequence[str]) -> bool:
        """Note that pages are in use; return whether that is passed on."""
        names = list(hashes)
        return self.channel.background.touch(
            self.handle, len(names), lambda: self.keys(names)
        )

    def poll_removed(self) -> None:
        """Ask the backend, in the background, which stored pages are gone."""
        events = self.page_events
        if events is not None and self.reports_removal:
            self.channel.background.poll_removed(
                self.handle,
                events.limit,
                lambda keys: self._record_events(keys, stored=False),
            )

    @property
    def deletes(self) -> bool:
        """Return whether deletions of wrong objects are under way."""
        return bool(self.channel.background.pending_deletes.by_key)

    def being_deleted(self, hashes: Sequence[str]) -> BoolArray:
        """Return the pages with an object that is being deleted, bool (n,)."""
        pending = self.channel.background.pending_deletes.pending(self.keys(hashes))
        found = pending.reshape(-1, len(self.suffixes))
        return cast("BoolArray", found.any(axis=1))

    def wait_deleted(self, hashes: Sequence[str], deadline_s: float) -> None:
        """Wait until no object of some pages is being deleted."""
        pending = self.channel.background.pending_deletes
        pending.wait(self.keys(hashes), deadline_s)

    def _record_events(self, keys: Iterable[str], *, stored: bool) -> None:
        """Add an event for the pages of some keys of this namespace."""
        if self.page_events is not None:
            start = len(self.namespace) + 1
            found = [_HASH.match(key, start) for key in keys]
            hashes = dict.fromkeys(one.group() for one in found if one)
            self.page_events.add(self.name, hashes, stored=stored, backend=self.backend)

    def _recorded(self, call: PageCall, codes: OutcomeArray) -> OutcomeArray:
        """Update the negative cache; return one outcome for each page."""
        several = len(self.suffixes) > 1
        outcomes = _by_page(codes, len(self.suffixes)) if several else codes
        lost = any_of(codes)
        if call.operation is Operation.PUT:
            self.channel.negative_cache.discard(
                _chosen(call.keys, codes == _OK) if lost else call.keys
            )
            if self.page_events is not None:
                complete = np.repeat(outcomes == _OK, len(self.suffixes))
                self._record_events(_chosen(call.keys, complete), stored=True)
        elif lost:
            self._discard_corrupt(call.keys, codes)
        if self.channel.listening:
            good = len(outcomes) - int(np.count_nonzero(outcomes))
            nbytes = good * self.region.page_bytes
            self._notify(call.operation, codes, nbytes, call.began_s)
        if self.channel.observes_pages:
            expire_at = call.times.asked.expire_at if call.times is not None else 0
            cause = call.cause
            if cause == _DELETED:
                self._notify_deleted()
                cause = ""
            self.notify_pages(call.operation, call.hashes, outcomes, cause, expire_at)
        return outcomes

    def _notify_deleted(self) -> None:
        """Say that all that was stored is gone: a clear that nothing asked for."""
        if self.channel.observes_pages:
            cleared = np.full(1, _OK, np.uint8)
            self.notify_pages(Operation.CLEAR, (), cleared, _DELETED)

    def delete_wrong(self, keys: Sequence[str]) -> None:
        """Delete objects in the background, so that they can be stored again."""
        if keys:
            self.channel.background.delete_corrupt(self.handle, self.name, keys)

    def _discard_corrupt(self, keys: Sequence[str], codes: OutcomeArray) -> None:
        """Delete wrong objects, and add those that failed to the negative cache."""
        failed = np.isin(codes, _FAILED)
        # If a whole batch is lost, the breaker decides, not the keys.
        if not failed.all() or np.isin(codes, _WRONG).any():
            self.channel.negative_cache.add_corrupt(_chosen(keys, failed))
        names = _chosen(keys, np.isin(codes, _WRONG))
        if names:
            self.channel.log_corrupt(self.name, len(names))
            self._record_events(names, stored=False)
            # Until it is gone, storing it again would keep the wrong bytes.
            self.delete_wrong(names)

    def notify_pages(
        self,
        operation: Operation,
        hashes: Sequence[str],
        outcomes: OutcomeArray,
        held_back: str = "",
        expire_at: int = 0,
    ) -> None:
        """Tell observers of pages what became of some; see `PagesAnswered`."""
        asks = operation in (Operation.EXISTS, Operation.GET)
        if asks and self.channel.backend.manifest.sealed and _REFUSED in outcomes:
            held_back = held_back or "key"
        limit = LIMIT.get() if operation is Operation.GET else None
        if limit is not None and limit.over and _TIMEOUT in outcomes:
            held_back = held_back or "pays"
        event = PagesAnswered(
            backend=self.backend,
            pool=self.name,
            operation=operation,
            hashes=hashes,
            outcomes=outcomes,
            held_back=held_back,
            slice_name=self.slice_name,
            expire_at=expire_at,
        )
        self.channel.notify_pages(event)

    def _notify(
        self, operation: Operation, codes: OutcomeArray, nbytes: int, began: float
    ) -> None:
        if not self.counted:
            return
        self.channel.background.poll_capacity(self.handle)
        if not self.channel.observed:
            return
        counts = {Outcome.OK: len(codes)}
        if np.count_nonzero(codes):
            found = np.bincount(codes).tolist()
            counts = {Outcome(at): n for at, n in enumerate(found) if n}
        self.channel.notify(
            BatchEnded(
                backend=self.channel.name,
                pool=self.name,
                operation=operation,
                outcomes=counts,
                nbytes=nbytes,
                seconds=time.monotonic() - began,
            )
        )


def _chosen(keys: Sequence[str], which: BoolArray) -> list[str]:
    return [key for key, one in zip(keys, which.tolist(), strict=True) if one]


def _by_page(outcomes: OutcomeArray, objects: int) -> OutcomeArray:
    """Fold the outcomes of a page's objects: the worst one counts."""
    if objects == 1:
        return outcomes
    return cast("OutcomeArray", outcomes.reshape(-1, objects).max(axis=1))

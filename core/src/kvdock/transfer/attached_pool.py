"""One pool of an attachment: its keys, its memory, and its backend."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.batch import Batch, Operation, Outcome
from kvdock.events import BatchEnded, PagesHeld
from kvdock.keys import build_keys, check_hashes
from kvdock.synchronization import check_deadline
from kvdock.transfer.leases import Lease, PageLeases
from kvdock.transfer.modes import BatchTransfer, Transfer
from kvdock.transfer.page_indices import (
    as_page_indices,
    check_pages,
    duplicate_positions,
)
from kvdock.transfer.result import NO_PAGE

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.pools.spec import PoolSpec
    from kvdock.region import Region
    from kvdock.resilience.channel import BackendChannel
    from kvdock.transfer.page_events import PageEvents

_OK = int(Outcome.OK)
"""A plain number: comparing an array with a member takes numpy microseconds."""
_ABSENT = int(Outcome.ABSENT)
_WRONG = (Outcome.SHORT, Outcome.LONG, Outcome.CORRUPT)
_HASH = re.compile(r"[0-9A-Za-z]+")
"""A page hash in a key; a suffix never begins with a letter or a digit."""
_FAILED = (*_WRONG, Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.ERROR)


@attrs.frozen(eq=False)
class AttachedPool:
    """One pool of an attachment, with all that its batches need.

    Args:
        pool: The pool as it was routed.
        channel: Calls its backend.
        handle: What the backend returned for it.
        namespace: The digest that begins every key.
        suffixes: How the keys of a page's objects end.
        region: The engine's memory.
        mode: How its bytes are moved.
        leases: Pages under a storage call.
        batch_pages: Most pages of a batch that moves bytes.
        batch_keys: Most keys of a lookup.
        writes: Whether this rank stores its pages.
        page_events: What the engine reports to others; None where it does not.
    """

    pool: PoolSpec
    channel: BackendChannel
    handle: object = attrs.field(repr=False)
    namespace: str
    suffixes: tuple[str, ...]
    region: Region = attrs.field(repr=False)
    mode: Transfer = attrs.field(repr=False)
    leases: PageLeases = attrs.field(repr=False)
    batch_pages: int
    batch_keys: int
    writes: bool
    page_events: PageEvents | None = attrs.field(default=None, repr=False)
    _notifying: threading.Lock = attrs.field(factory=threading.Lock, repr=False)

    @property
    def backend(self) -> str:
        """The name of the backend that stores it."""
        return self.channel.name

    @property
    def reports_removal(self) -> bool:
        """Whether its backend reports which stored pages are gone."""
        return self.channel.backend.tracks_removal

    @property
    def object_bytes(self) -> Int64Array:
        """Bytes of each stored object of a page, with a trailer if it has one."""
        return self.mode.region.object_bytes

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, without trailers."""
        return self.region.page_bytes

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys of pages, page-major."""
        return build_keys(self.namespace, hashes, self.suffixes)

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

    def _record_events(self, keys: Iterable[str], *, stored: bool) -> None:
        """Add an event for the pages of some keys of this namespace."""
        if self.page_events is not None:
            start = len(self.namespace) + 1
            found = [_HASH.match(key, start) for key in keys]
            hashes = dict.fromkeys(one.group() for one in found if one)
            self.page_events.add(self.pool.name, hashes, stored=stored)

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

    def find(self, hashes: Sequence[str], deadline_s: float) -> BoolArray:
        """Return which pages are stored with all their objects; trusts its input."""
        if self.channel.rejects(Operation.EXISTS):
            self._notify_rejected(Operation.EXISTS, len(hashes))
            return np.zeros(len(hashes), np.bool_)
        keys = self.keys(hashes)
        known = self.channel.negative_cache.lookup(keys)
        if known is None and 0 < len(keys) <= self.batch_keys:
            outcomes = self._find_keys(keys, deadline_s)
        else:
            outcomes = np.full(len(keys), _ABSENT, np.uint8)
            asked = np.arange(len(keys)) if known is None else np.flatnonzero(~known)
            for start in range(0, len(asked), self.batch_keys):
                part = asked[start : start + self.batch_keys]
                names = [keys[at] for at in part.tolist()]
                outcomes[part] = self._find_keys(names, deadline_s)
        return cast("BoolArray", _by_page(outcomes, len(self.suffixes)) == _OK)

    def _find_keys(self, keys: Sequence[str], deadline_s: float) -> OutcomeArray:
        """Look up keys in one batch; uint8 (n,)."""
        began = time.monotonic()
        batch = Batch(
            Operation.EXISTS, keys, deadline_s=deadline_s, pool=self.pool.name
        )
        found = self.channel.call(self.handle, batch).result.outcomes
        if self.channel.negative_cache.keeps_absent and np.count_nonzero(found):
            self.channel.negative_cache.add_absent(_chosen(keys, found == _ABSENT))
        self._notify(Operation.EXISTS, found, 0, began)
        return found

    def transfer(
        self,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
    ) -> OutcomeArray:
        """Store or load pages in batches; uint8 (n,), an outcome for each.

        Args:
            operation: PUT or GET.
            hashes: The n page hashes.
            pages: int64 (n,), their page indices, checked; the position of a
                `NO_PAGE` is ABSENT.
            deadline_s: Until when, over all batches.
        """
        if self._is_one_batch(operation, pages):
            return self._transfer_batch(operation, hashes, pages, deadline_s)
        outcomes = np.full(len(hashes), _ABSENT, np.uint8)
        chosen = np.flatnonzero(pages != NO_PAGE)
        if operation is Operation.PUT and not self.writes:
            # Another rank stores these very bytes.
            outcomes[chosen] = _OK
            return outcomes
        if operation is Operation.GET and len(chosen) > self.batch_pages:
            chosen = self._once(pages, chosen, outcomes)
        for start in range(0, len(chosen), self.batch_pages):
            if start and time.monotonic() >= deadline_s:
                outcomes[chosen[start:]] = Outcome.TIMEOUT
                break
            part = chosen[start : start + self.batch_pages]
            batch = (_at(hashes, part), pages[part], deadline_s)
            if operation is Operation.PUT and self.channel.background.pending_deletes:
                outcomes[part] = self._put_after_deletes(*batch)
            else:
                outcomes[part] = self._transfer_batch(operation, *batch)
        return outcomes

    def _is_one_batch(self, operation: Operation, pages: Int64Array) -> bool:
        """Return whether all positions have a page that can be moved at once."""
        if not 0 < len(pages) <= self.batch_pages or pages.min() < 0:
            return False
        return operation is Operation.GET or (
            self.writes and not self.channel.background.pending_deletes
        )

    def _once(
        self, pages: Int64Array, chosen: Int64Array, outcomes: OutcomeArray
    ) -> Int64Array:
        """Keep one position of each page: a later batch must not overwrite it."""
        if not self.region.physical:
            return chosen
        again = duplicate_positions(pages[chosen])
        outcomes[chosen[again]] = Outcome.REFUSED
        return chosen[~again]

    def _put_after_deletes(
        self, hashes: Sequence[str], pages: Int64Array, deadline_s: float
    ) -> OutcomeArray:
        """Store pages; those with an unfinished deletion come last."""
        keys = self.keys(hashes)
        outcomes = np.full(len(hashes), Outcome.REFUSED, np.uint8)
        deleting = self._being_deleted(keys)
        for turn in range(2):
            now = np.flatnonzero(
                ~deleting if not turn else deleting & ~self._being_deleted(keys)
            )
            if len(now):
                batch = (_at(hashes, now), pages[now], deadline_s)
                outcomes[now] = self._transfer_batch(Operation.PUT, *batch)
            if not turn and deleting.any():
                mine = np.repeat(deleting, len(self.suffixes))
                self.channel.background.pending_deletes.wait(
                    _chosen(keys, mine), deadline_s
                )
        return outcomes

    def _being_deleted(self, keys: Sequence[str]) -> BoolArray:
        """Return the pages with an object that is being deleted, bool (n,)."""
        found = self.channel.background.pending_deletes.pending(keys).reshape(
            -1, len(self.suffixes)
        )
        return cast("BoolArray", found.any(axis=1))

    def _transfer_batch(
        self,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
    ) -> OutcomeArray:
        if self.channel.rejects(operation):
            self._notify_rejected(operation, len(hashes))
            return np.full(len(hashes), Outcome.UNAVAILABLE, np.uint8)
        if self.region.physical:
            lease = self.leases.take_all(pages)
            if lease is not None:
                return self._execute(operation, hashes, pages, deadline_s, lease)
        outcomes = np.full(len(hashes), Outcome.REFUSED, np.uint8)
        rest = np.arange(len(hashes))
        while len(rest):
            free, lease = self._lease(pages[rest])
            chosen = rest[free]
            if not len(chosen):
                break
            outcomes[chosen] = self._execute(
                operation, _at(hashes, chosen), pages[chosen], deadline_s, lease
            )
            if operation is Operation.GET:
                # A page that is given twice can hold only one of them.
                break
            rest = rest[~free]
        return outcomes

    def _execute(
        self,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
        lease: Lease,
    ) -> OutcomeArray:
        """Move leased pages; the mode ends the lease."""
        try:
            transfer = BatchTransfer(
                operation, self.pool.name, self.keys(hashes), pages, deadline_s,
                lease, self.notify_held,
            )  # fmt: skip
        except BaseException:  # an interrupt: no later step ends the lease
            lease.end()
            raise
        began = time.monotonic()
        codes = self.mode.execute(self.channel, self.handle, transfer)
        return self._recorded(transfer, codes, began)

    def _lease(self, pages: Int64Array) -> tuple[BoolArray, Lease]:
        if self.region.physical:
            return self.leases.take(pages)
        return np.ones(len(pages), np.bool_), Lease(self.leases, pages[:0])

    def _recorded(
        self, transfer: BatchTransfer, codes: OutcomeArray, began: float
    ) -> OutcomeArray:
        """Update the negative cache; return one outcome for each page."""
        outcomes = _by_page(codes, len(self.suffixes))
        if transfer.operation is Operation.PUT:
            whole = not np.count_nonzero(codes)
            self.channel.negative_cache.discard(
                transfer.keys if whole else _chosen(transfer.keys, codes == _OK)
            )
            if self.page_events is not None:
                complete = np.repeat(outcomes == Outcome.OK, len(self.suffixes))
                self._record_events(_chosen(transfer.keys, complete), stored=True)
        elif np.count_nonzero(codes):
            self._discard_corrupt(transfer.keys, codes)
        good = len(outcomes) - int(np.count_nonzero(outcomes))
        nbytes = good * self.page_bytes
        self._notify(transfer.operation, codes, nbytes, began)
        return outcomes

    def _discard_corrupt(self, keys: Sequence[str], codes: OutcomeArray) -> None:
        """Delete wrong objects, and add those that failed to the negative cache."""
        failed = np.isin(codes, _FAILED)
        # If a whole batch is lost, the breaker decides, not the keys.
        if not failed.all() or np.isin(codes, _WRONG).any():
            self.channel.negative_cache.add_corrupt(_chosen(keys, failed))
        names = _chosen(keys, np.isin(codes, _WRONG))
        if names:
            self.channel.log_corrupt(self.pool.name, len(names))
            self._record_events(names, stored=False)
            # Until it is gone, storing it again would keep the wrong bytes.
            self.channel.background.delete_corrupt(self.handle, self.pool.name, names)

    def _notify_rejected(self, operation: Operation, pages: int) -> None:
        if self.channel.observed:
            keys = pages * len(self.suffixes)
            codes = np.full(keys, Outcome.UNAVAILABLE, np.uint8)
            self._notify(operation, codes, 0, time.monotonic())

    def _notify(
        self, operation: Operation, codes: OutcomeArray, nbytes: int, began: float
    ) -> None:
        if not self.channel.observed:
            return
        counts = {Outcome.OK: len(codes)}
        if np.count_nonzero(codes):
            found = np.bincount(codes).tolist()
            counts = {Outcome(at): n for at, n in enumerate(found) if n}
        self.channel.notify(
            BatchEnded(
                backend=self.channel.name,
                pool=self.pool.name,
                operation=operation,
                outcomes=counts,
                nbytes=nbytes,
                seconds=time.monotonic() - began,
            )
        )
        self.channel.background.poll_capacity(self.handle)
        if counts.get(Outcome.TIMEOUT):
            self.notify_held()

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


def _at(hashes: Sequence[str], positions: Int64Array) -> Sequence[str]:
    """Return the hashes at some positions, ascending, each at most once."""
    if len(positions) == len(hashes):
        return hashes
    return [hashes[at] for at in positions.tolist()]


def _chosen(keys: Sequence[str], which: BoolArray) -> list[str]:
    return [key for key, one in zip(keys, which.tolist(), strict=True) if one]


def _by_page(outcomes: OutcomeArray, objects: int) -> OutcomeArray:
    """Fold the outcomes of a page's objects: the worst one counts."""
    if objects == 1:
        return outcomes
    return cast("OutcomeArray", outcomes.reshape(-1, objects).max(axis=1))

"""One pool of an attachment: its keys, its memory, and the way to its store."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from kvdock.batch import Batch, Operation, Outcome
from kvdock.events import BatchEnded, PagesHeld
from kvdock.keys import build_keys
from kvdock.transfer.leases import Lease, PageLeases
from kvdock.transfer.modes import BatchTransfer, Transfer
from kvdock.transfer.page_indices import duplicate_positions

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.pools.spec import PoolSpec
    from kvdock.region import Region
    from kvdock.resilience.channel import BackendChannel


_WRONG = (Outcome.SHORT, Outcome.LONG, Outcome.CORRUPT)


_DEAD = (*_WRONG, Outcome.TIMEOUT, Outcome.UNAVAILABLE, Outcome.ERROR)


_EXISTS_KEYS = 16384
"""Keys of one lookup: a bound like any other batch has."""


@attrs.frozen(eq=False)
class AttachedPool:
    """One pool of an attachment, with all that its batches need.

    Args:
        pool: The pool as it was routed.
        line: The way to its backend.
        handle: What the backend gave for it.
        namespace: The digest that begins every key.
        suffixes: How the keys of a page's objects end.
        region: The engine's memory.
        way: How its bytes are moved.
        leases: Who touches its pages.
        batch_pages: Most pages of a batch.
        writes: Whether this rank stores its pages.
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
    writes: bool
    _notifying: threading.Lock = attrs.field(factory=threading.Lock, repr=False)

    @property
    def page_bytes(self) -> int:
        """Bytes of a page, without trailers."""
        return int(self.region.object_bytes.sum())

    def keys(self, hashes: Sequence[str]) -> list[str]:
        """Return the keys of pages, page-major."""
        return build_keys(self.namespace, hashes, self.suffixes)

    def exists(self, hashes: Sequence[str], deadline_s: float) -> BoolArray:
        """Ask which pages are there; a page is there if all its objects are."""
        if self.channel.rejects(Operation.EXISTS):
            self._notify_rejected(Operation.EXISTS, len(hashes))
            return np.zeros(len(hashes), np.bool_)
        keys = self.keys(hashes)
        outcomes = np.full(len(keys), Outcome.ABSENT, np.uint8)
        known = self.channel.negative_cache.lookup(keys)
        asked = np.arange(len(keys)) if known is None else np.flatnonzero(~known)
        for start in range(0, len(asked), _EXISTS_KEYS):
            part = asked[start : start + _EXISTS_KEYS]
            whole = len(part) == len(keys)
            names = keys if whole else [keys[at] for at in part.tolist()]
            began = time.monotonic()
            batch = Batch(
                Operation.EXISTS, names, deadline_s=deadline_s, pool=self.pool.name
            )
            found = self.channel.call(self.handle, batch).result.outcomes
            outcomes[part] = found
            if self.channel.negative_cache.keeps_absent and np.count_nonzero(found):
                self.channel.negative_cache.add_absent(
                    _chosen(names, found == Outcome.ABSENT)
                )
            self._notify(Operation.EXISTS, found, 0, began)
        return cast("BoolArray", _by_page(outcomes, len(self.suffixes)) == Outcome.OK)

    def transfer(
        self,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
    ) -> OutcomeArray:
        """Store or load pages in batches; an outcome for each page.

        Args:
            operation: PUT or GET.
            hashes: The n page hashes.
            pages: int64 (n,), their page indices.
            deadline_s: Until when, over all batches.
        """
        if operation is Operation.GET and len(hashes) > self.batch_pages:
            return self._load(hashes, pages, deadline_s)
        return self._in_batches(operation, hashes, pages, deadline_s)

    def _load(
        self, hashes: Sequence[str], pages: Int64Array, deadline_s: float
    ) -> OutcomeArray:
        """Load more than a batch; a later one must not overwrite a page."""
        again = duplicate_positions(pages)
        if not self.pool.physical or not again.any():
            return self._in_batches(Operation.GET, hashes, pages, deadline_s)
        outcomes = np.full(len(hashes), Outcome.REFUSED, np.uint8)
        once = np.flatnonzero(~again)
        names = [hashes[at] for at in once.tolist()]
        outcomes[once] = self._in_batches(Operation.GET, names, pages[once], deadline_s)
        return outcomes

    def _in_batches(
        self,
        operation: Operation,
        hashes: Sequence[str],
        pages: Int64Array,
        deadline_s: float,
    ) -> OutcomeArray:
        outcomes = np.full(len(hashes), Outcome.TIMEOUT, np.uint8)
        for start in range(0, len(hashes), self.batch_pages):
            if start and time.monotonic() >= deadline_s:
                break
            part = slice(start, start + self.batch_pages)
            few = (hashes[part], pages[part], deadline_s)
            if operation is Operation.PUT and self.channel.background.pending_deletes:
                outcomes[part] = self._put_after_deletes(*few)
            else:
                outcomes[part] = self._transfer_batch(operation, *few)
        return outcomes

    def _put_after_deletes(
        self, hashes: Sequence[str], pages: Int64Array, deadline_s: float
    ) -> OutcomeArray:
        """Store pages; those whose wrong objects still lie there come last."""
        keys = self.keys(hashes)
        outcomes = np.full(len(hashes), Outcome.REFUSED, np.uint8)
        stands = self._dropped(keys)
        for turn in range(2):
            now = np.flatnonzero(~stands if not turn else stands & ~self._dropped(keys))
            if len(now):
                names = [hashes[at] for at in now.tolist()]
                outcomes[now] = self._transfer_batch(
                    Operation.PUT, names, pages[now], deadline_s
                )
            if not turn and stands.any():
                mine = np.repeat(stands, len(self.suffixes))
                self.channel.background.pending_deletes.wait(
                    _chosen(keys, mine), deadline_s
                )
        return outcomes

    def _dropped(self, keys: Sequence[str]) -> BoolArray:
        """Return of which pages an object is being dropped, bool (n,)."""
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
        outcomes = np.full(len(hashes), Outcome.REFUSED, np.uint8)
        rest = np.arange(len(hashes))
        while len(rest):
            free, lease = self._lease(operation, pages[rest])
            chosen = rest[free]
            if not len(chosen):
                break
            try:
                whole = len(chosen) == len(hashes)
                names = hashes if whole else [hashes[at] for at in chosen.tolist()]
                transfer = BatchTransfer(
                    operation, self.pool.name, self.keys(names), pages[chosen],
                    deadline_s, lease, self.notify_held,
                )  # fmt: skip
            except BaseException:  # an interrupt: nobody else lets go of them
                lease.end()
                raise
            outcomes[chosen] = self._carry(transfer)
            if operation is Operation.GET:
                # A page that is given twice can hold only one of them.
                break
            rest = rest[~free]
        return outcomes

    def _lease(
        self, operation: Operation, pages: Int64Array
    ) -> tuple[BoolArray, Lease]:
        if self.pool.physical:
            return self.leases.take(pages, writing=operation is Operation.GET)
        return np.ones(len(pages), np.bool_), Lease(self.leases, pages[:0])

    def _carry(self, transfer: BatchTransfer) -> OutcomeArray:
        began = time.monotonic()
        codes = self.mode.execute(self.channel, self.handle, transfer)
        outcomes = _by_page(codes, len(self.suffixes))
        if transfer.operation is Operation.PUT:
            stored = codes == Outcome.OK
            whole = bool(stored.all())
            self.channel.negative_cache.discard(
                transfer.keys if whole else _chosen(transfer.keys, stored)
            )
        elif np.count_nonzero(codes):
            self._discard_corrupt(transfer.keys, codes)
        nbytes = int((outcomes == Outcome.OK).sum()) * self.page_bytes
        self._notify(transfer.operation, codes, nbytes, began)
        return outcomes

    def _discard_corrupt(self, keys: Sequence[str], codes: OutcomeArray) -> None:
        """Drop wrong objects, and do not ask again for those that failed."""
        dead = np.isin(codes, _DEAD)
        # Where all of a batch is lost the breaker decides, not the keys.
        if not dead.all() or np.isin(codes, _WRONG).any():
            self.channel.negative_cache.add_corrupt(_chosen(keys, dead))
        names = _chosen(keys, np.isin(codes, _WRONG))
        if names:
            self.channel.log_corrupt(self.pool.name, len(names))
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
        """Tell observers how many pages are under calls, late ones too."""
        if not self.channel.observed:
            return
        # The last one to tell must tell the last number.
        with self._notifying:
            self.channel.notify(
                PagesHeld(
                    pool=self.pool.name,
                    pages=self.region.pages,
                    leased=self.leases.leased_pages,
                )
            )


def _chosen(keys: Sequence[str], which: BoolArray) -> list[str]:
    return [key for key, one in zip(keys, which.tolist(), strict=True) if one]


def _by_page(outcomes: OutcomeArray, objects: int) -> OutcomeArray:
    """Fold the outcomes of a page's objects: the worst one counts."""
    if objects == 1:
        return outcomes
    return cast("OutcomeArray", outcomes.reshape(-1, objects).max(axis=1))


def move(
    operation: Operation,
    attached: AttachedPool,
    hashes: Sequence[str],
    where: tuple[Int64Array, Int64Array],
    deadline_s: float,
) -> OutcomeArray:
    """Move the chosen positions of one pool; an outcome per position.

    Args:
        operation: PUT or GET.
        berth: The pool.
        hashes: All page hashes.
        where: int64 (n,), the page of each position, and the positions.
        deadline_s: Until when, on `time.monotonic()`'s clock.
    """
    own, chosen = where
    outcomes = np.full(len(hashes), Outcome.ABSENT, np.uint8)
    if not len(chosen):
        return outcomes
    if operation is Operation.PUT and not attached.writes:
        # Another rank stores these very bytes.
        outcomes[chosen] = Outcome.OK
        return outcomes
    if len(chosen) == len(hashes):
        return attached.transfer(operation, hashes, own, deadline_s)
    names = [hashes[at] for at in chosen.tolist()]
    outcomes[chosen] = attached.transfer(operation, names, own[chosen], deadline_s)
    return outcomes

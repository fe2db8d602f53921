"""Load and store in the background, batch by batch.

Reads and writes have separate executors, so a slow store never delays a
prefetch. Between two batches a transfer can be stopped or cancelled. Trailing
windows are read last, for the boundary that was really reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.batch import Operation, Outcome
from kvdock.errors import RegionError
from kvdock.hits import evaluate
from kvdock.keys import check_hashes
from kvdock.pools.enums import HitPolicy
from kvdock.transfer.futures import BoundedExecutor, TransferFuture, TransferState
from kvdock.transfer.leases import Reference
from kvdock.transfer.page_indices import duplicate_positions
from kvdock.transfer.result import NO_PAGE, TransferResult

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.transfer.attached_pool import AttachedPool
    from kvdock.transfer.attachment import Attachment


Ended = Callable[[TransferFuture], None]


class TransferManager:
    """Background transfers over an attachment, which it closes with itself."""

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self._core = attachment.core
        given = self._core.transfers
        self._reads = BoundedExecutor("kvdock-read", given.readers, given.queue)
        self._writes = BoundedExecutor("kvdock-write", given.writers, given.queue)

    def __enter__(self) -> Self:
        """Return itself; leaving the block closes it."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the manager."""
        self.close()

    def prefetch(
        self,
        hashes: Sequence[str],
        pages: Mapping[str, npt.ArrayLike],
        windows: Mapping[str, npt.ArrayLike] | None = None,
        ended: Ended | None = None,
    ) -> TransferFuture:
        """Load a prefix in the background.

        Args:
            hashes: Page hashes of a prefix that `exists` called restorable.
            pages: As for `Attachment.get`.
            windows: Pool name to spare pages for a trailing window. They are
                given to the window's positions once the boundary is known;
                such a pool is left out of `pages`.
            ended: Called once when it is over, on the worker's thread.

        Returns:
            A future, which is REFUSED if the queue is full.

        Raises:
            KvdockError: On bad input, at once.
        """
        check_hashes(hashes)
        spare = {
            name: self._checked_window(name, given)
            for name, given in (windows or {}).items()
        }
        nowhere = np.full(len(hashes), NO_PAGE)
        where = self.attachment.resolve_pages(
            hashes, {**dict.fromkeys(spare, nowhere), **pages}
        )
        touched = {
            name: np.concatenate([own[own != NO_PAGE], spare.get(name, nowhere[:0])])
            for name, own in where.items()
        }
        future = self._future(len(hashes), ended)
        job = PrefetchTask(self.attachment, list(hashes), where, spare)
        return self._submit(self._reads, future, job.run, touched)

    def offload(
        self,
        hashes: Sequence[str],
        pages: Mapping[str, npt.ArrayLike],
        ended: Ended | None = None,
    ) -> TransferFuture:
        """Store pages in the background: sidecars first, the anchor last.

        The pages must keep their bytes until the future is done and
        `Attachment.leases` reports them as not in use.

        Args:
            hashes: Page hashes, in order.
            pages: As for `Attachment.put`.
            ended: Called once when it is over, on the worker's thread.

        Returns:
            A future, which is REFUSED if the queue is full.

        Raises:
            KvdockError: On bad input, at once.
        """
        where = self.attachment.resolve_pages(hashes, pages)
        touched = {name: own[own != NO_PAGE] for name, own in where.items()}
        future = self._future(len(hashes), ended)
        job = OffloadTask(self.attachment, list(hashes), where)
        return self._submit(self._writes, future, job.run, touched)

    def drain(self, timeout_s: float) -> bool:
        """Wait until no transfer is queued or running; return whether that is so."""
        deadline_s = time.monotonic() + timeout_s
        return self._writes.drain(deadline_s) and self._reads.drain(deadline_s)

    def close(self) -> bool:
        """Finish the writes that end in time, then close the attachment.

        Ends within `core.deadlines.close`: reads are cancelled at once,
        writes get half of the time to drain, releasing gets the rest.

        Returns:
            Whether every call has ended.
        """
        deadline_s = self._core.deadlines.until("close")
        self._reads.close()
        self._writes.drain(self._core.deadlines.until("close", factor=0.5))
        self._writes.close()
        ended = self.attachment.close(max(0.0, deadline_s - time.monotonic()))
        joined = [executor.join(deadline_s) for executor in (self._reads, self._writes)]
        return ended and all(joined)

    def _future(self, pages: int, ended: Ended | None) -> TransferFuture:
        first = next(iter(self.attachment.pools_by_name.values())).pool
        tokens = pages * first.page_tokens
        return TransferFuture(pages, tokens, self._core.transfers, ended)

    def _submit(
        self,
        executor: BoundedExecutor,
        future: TransferFuture,
        work: Callable[[TransferFuture], TransferResult | None],
        touched: Mapping[str, Int64Array],
    ) -> TransferFuture:
        tables = [
            (attached.leases, touched[name])
            for name, attached in self.attachment.pools_by_name.items()
            if attached.pool.physical
        ]

        def add_references(references: int) -> None:
            for table, pages in tables:
                table.add_references(Reference.HOST, pages, references)

        add_references(1)
        if not executor.submit(future, work, lambda: add_references(-1)):
            add_references(-1)
            future.finish(None, TransferState.REFUSED)
        return future

    def _checked_window(self, name: str, given: npt.ArrayLike) -> Int64Array:
        attached = self.attachment.pools_by_name.get(name)
        if attached is None or attached.pool.hit_policy is not HitPolicy.TRAILING_PAGES:
            raise RegionError(
                f"spare pages are given for {name!r}, which is not an attached "
                "pool with a trailing window"
            )
        pages = attached.region.check(given)
        if len(pages) < attached.pool.window_pages:
            raise RegionError(
                f"pool {name!r}: {len(pages)} spare pages for a window of "
                f"{attached.pool.window_pages}"
            )
        return pages


@attrs.frozen(eq=False)
class OffloadTask:
    """Store pages in batches."""

    attachment: Attachment
    hashes: list[str]
    where: Mapping[str, Int64Array]

    def run(self, future: TransferFuture) -> TransferResult:
        """Store batch by batch until done, stopped, or no page is stored."""
        count = len(self.hashes)
        outcomes = {
            name: np.full(count, Outcome.ABSENT, np.uint8) for name in self.where
        }
        nbytes = dict.fromkeys(self.where, 0)
        prefix, whole = 0, True
        step = self.attachment.core.transfers.batch_pages
        anchor = self.attachment.plan.anchor.pool.name
        for start in range(0, count, step):
            if future.stopping:
                break
            part = slice(start, start + step)
            moved = self.attachment.put(
                self.hashes[part], {name: own[part] for name, own in self.where.items()}
            )
            for name, codes in moved.outcomes.items():
                outcomes[name][part] = codes
                nbytes[name] += moved.nbytes[name]
            if whole:
                prefix = start + moved.pages
                whole = prefix == min(start + step, count)
                future.set_progress(prefix)
            if _stuck(moved, anchor):
                # Full, rejected, or no sidecar was stored: neither would more be.
                break
        return TransferResult(prefix, outcomes, nbytes, self.where)


def _stuck(moved: TransferResult, anchor: str) -> bool:
    """Return whether no required page was stored, though some were given."""
    tried = {
        name: codes[moved.page_indices[name] != NO_PAGE]
        for name, codes in moved.outcomes.items()
    }
    # A stage without a layer of the anchor has none, and a batch may give none.
    lead = tried.get(anchor, ())
    every = np.concatenate([lead] if len(lead) else list(tried.values()))
    return bool(len(every)) and bool((every != Outcome.OK).all())


_TRIES = 3
"""Boundaries that are tried until every trailing window is whole."""


@attrs.define(eq=False)
class PrefetchTask:
    """Load one prefix into memory.

    Args:
        attachment: The pools.
        hashes: The n page hashes.
        where: Pool name to int64 (n,), the page of each position.
        spare: Pool name to pages for a trailing window.
    """

    attachment: Attachment
    hashes: list[str]
    where: dict[str, Int64Array]
    spare: Mapping[str, Int64Array]
    _pools: Mapping[str, AttachedPool] = attrs.field(init=False)
    _outcomes: dict[str, OutcomeArray] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        """Begin with nothing loaded, and one position for each page."""
        self._pools = self.attachment.pools_by_name
        for name, attached in self._pools.items():
            if attached.pool.physical and not _trailing(attached):
                own = self.where[name]
                self.where[name] = np.where(duplicate_positions(own), NO_PAGE, own)
        self._outcomes = {
            name: np.full(len(self.hashes), Outcome.ABSENT, np.uint8)
            for name in self._pools
        }

    def run(self, future: TransferFuture) -> TransferResult | None:
        """Load until done, stopped, or the prefix is cut."""
        reach = self._load_prefix(future)
        if future.cancelled:
            return None
        self._load_windows(reach)
        return self._result(reach)

    def _load_prefix(self, future: TransferFuture) -> int:
        """Load the anchor and all pools that every page needs."""
        transfers = self.attachment.core.transfers
        running = [b for b in self._pools.values() if not _trailing(b)]
        running.sort(key=lambda attached: not attached.pool.anchor)
        reach = 0
        for start in range(0, len(self.hashes), transfers.batch_pages):
            if future.stopping:
                break
            stop = min(start + transfers.batch_pages, len(self.hashes))
            run = self._load_batch(running, start, stop)
            reach = start + run
            future.set_progress(reach)
            if reach < stop:
                break
        return reach

    def _load_batch(self, running: list[AttachedPool], start: int, stop: int) -> int:
        """Load positions start to stop; return how many are whole."""
        run = stop - start
        deadline_s = self.attachment.core.deadlines.until(Operation.GET)
        for attached in running:
            part = slice(start, start + run)
            own = self.where[attached.pool.name][part]
            mine = self._outcomes[attached.pool.name][start:stop]
            mine[:run] = attached.transfer(
                Operation.GET, self.hashes[part], own, deadline_s
            )
            if attached.pool.required and not attached.pool.block_pages:
                # Sidecars are read only as far as those before were.
                run = int(np.logical_and.accumulate(mine == Outcome.OK).sum())
        return run

    def _load_windows(self, reach: int) -> None:
        """Find a boundary whose trailing windows can be loaded, and load them."""
        trailing = [
            attached for attached in self._pools.values() if _trailing(attached)
        ]
        if not trailing or not reach:
            return
        there = self._loaded()
        names = self.hashes[:reach]
        deadline_s = self.attachment.core.deadlines.until(Operation.GET)
        for attached in trailing:
            exists = attached.find(names, deadline_s)
            if attached.pool.name not in self.spare:
                exists &= self.where[attached.pool.name][:reach] != NO_PAGE
            there[attached.pool.name][:reach] = exists
        for _ in range(_TRIES):
            best = self._best(there, reach)
            if not best:
                return
            for attached in trailing:
                self._load_window(attached, best, there[attached.pool.name], deadline_s)
            if self._best(there, reach) == best:
                return

    def _load_window(
        self, attached: AttachedPool, boundary: int, there: BoolArray, deadline_s: float
    ) -> None:
        """Load the window before a boundary; what fails is not there."""
        name = attached.pool.name
        first = max(0, boundary - attached.pool.window_pages)
        window = np.arange(first, boundary)
        if name in self.spare:
            self.where[name] = np.full(len(self.hashes), NO_PAGE)
            self.where[name][window] = self.spare[name][: len(window)]
            self._outcomes[name][:] = Outcome.ABSENT
        own = self.where[name]
        wanted = window[there[window] & (self._outcomes[name][window] != Outcome.OK)]
        names = [self.hashes[at] for at in wanted.tolist()]
        codes = attached.transfer(Operation.GET, names, own[wanted], deadline_s)
        self._outcomes[name][wanted] = codes
        there[wanted] = codes == Outcome.OK

    def _loaded(self) -> dict[str, BoolArray]:
        return {
            name: cast("BoolArray", codes == Outcome.OK)
            for name, codes in self._outcomes.items()
        }

    def _best(self, there: Mapping[str, BoolArray], reach: int) -> int:
        pools = [attached.pool for attached in self._pools.values()]
        hits = evaluate(pools, there, len(self.hashes))
        return int(np.flatnonzero(hits.restorable[: reach + 1])[-1])

    def _result(self, reach: int) -> TransferResult:
        loaded = self._loaded()
        best = self._best(loaded, reach)
        self.attachment.notify_restored(loaded, best)
        nbytes = {
            name: int(ok.sum()) * self._pools[name].page_bytes
            for name, ok in loaded.items()
        }
        return TransferResult(best, self._outcomes, nbytes, self.where)


def _trailing(attached: AttachedPool) -> bool:
    return attached.pool.hit_policy is HitPolicy.TRAILING_PAGES

"""Read and write pages of one pool in the background.

For engines that evaluate hits themselves and poll for what has ended. Reads and
writes have separate workers, so a slow store never delays a load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdock.batch import Operation
from kvdock.closing import ClosedAfterUse
from kvdock.errors import KvdockError, did_you_mean
from kvdock.events import TENANT
from kvdock.pays.policy import LIMIT
from kvdock.resilience.background_executor import BackgroundExecutor
from kvdock.synchronization import check_deadline
from kvdock.transfer.futures import TransferFuture
from kvdock.transfer.result import NO_PAGE

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvdock.arrays import OutcomeArray
    from kvdock.resilience.executor import Job
    from kvdock.retention import Retention
    from kvdock.transfer.attachment import Attachment

Times = tuple["Retention", "Callable[[OutcomeArray], None]"]
"""How long pages are kept and served, and what is told of the answers."""


class TransferManager(ClosedAfterUse):
    """Background transfers over an attachment, which it closes with itself.

    `core.transfers` says how many run at once and how many may wait.
    """

    def __init__(self, attachment: Attachment) -> None:
        self.attachment = attachment
        self._core = attachment.core
        self._pools = dict(attachment.pools_by_name)
        self.any_ended = threading.Event()
        """Set when a transfer ends, for one that polls many to clear.

        Not set by a deadline that passes in the queue, or when pages become free.
        """
        given = self._core.transfers
        self._executors = {
            Operation.GET: BackgroundExecutor(
                "kvdock-read", given.readers, given.queue
            ),
            Operation.PUT: BackgroundExecutor(
                "kvdock-write", given.writers, given.queue
            ),
        }

    def read(
        self,
        pool: str,
        hashes: Sequence[str],
        pages: npt.ArrayLike,
        *,
        timeout_s: float | None = None,
    ) -> TransferFuture:
        """Load pages in the background.

        Returns at once, whatever storage does. A transfer that finds the queue full
        has ended already, with REFUSED for every page, and one of a closed manager
        with UNAVAILABLE.

        Args:
            pool: The pool's name.
            hashes: Page hashes, in any order.
            pages: int64 (n,), the page index of each hash; `NO_PAGE` for none.
            timeout_s: How long it may take from now on, waiting for a worker
                included; None for the deadline of the settings.

        Raises:
            KvdockError: On bad input.
        """
        return self._submit(Operation.GET, pool, hashes, pages, timeout_s)

    def write(
        self,
        pool: str,
        hashes: Sequence[str],
        pages: npt.ArrayLike,
        *,
        timeout_s: float | None = None,
        times: Times | None = None,
    ) -> TransferFuture:
        """Store pages in the background; as `read`.

        The pages must keep their bytes until the future is done.

        Args:
            pool: The pool's name.
            hashes: Page hashes, in any order.
            pages: As for `read`.
            timeout_s: As for `read`.
            times: How long they are kept and served, and what is called with a
                `RetentionAnswer` for each.

        Raises:
            KvdockError: On bad input.
        """
        return self._submit(Operation.PUT, pool, hashes, pages, timeout_s, times)

    def _submit(
        self,
        operation: Operation,
        pool: str,
        hashes: Sequence[str],
        pages: npt.ArrayLike,
        timeout_s: float | None,
        times: Times | None = None,
    ) -> TransferFuture:
        attached = self._pools.get(pool)
        if attached is None:
            raise KvdockError(
                f"pool {pool!r} is not attached", fix=did_you_mean(pool, self._pools)
            )
        # Copies: the caller may use its own again before a worker comes to them.
        own = attached.checked_pages(hashes, pages).copy()
        names = list(hashes)
        deadline_s = self._core.deadlines.until(operation, timeout_s)
        check_deadline(deadline_s)
        given = own[own != NO_PAGE] if attached.pool.physical else own[:0]
        future = TransferFuture(
            operation, pool, own, given, deadline_s, attached.leases
        )
        future.on_ended = self.any_ended.set
        context = copy_context()
        if attached.channel.observes_pages:
            told = partial(attached.placements[0].notify_pages, operation, names)
            future.on_rejected = partial(context.run, told, held_back="queue")

        future.hashes = names

        def work(job: Job, futures: Sequence[Any]) -> OutcomeArray:
            if times is not None:
                return context.run(attached.store, names, own, deadline_s, *times, job)
            together = [name for one in futures for name in one.hashes]
            indices = np.concatenate([one.pages for one in futures])
            until_s = min(one.deadline_s for one in futures)
            return context.run(
                attached.transfer, operation, together, indices, until_s, None, job
            )

        # Else a load is cut for its request, or recorded by request.
        shared = LIMIT.get() is None and not attached.channel.observes_pages
        group = (pool, TENANT.get()) if shared and operation is Operation.GET else None
        nbytes = len(own) * attached.page_bytes
        self._executors[operation].submit(future, work, group, nbytes)
        return future

    def drain(self, timeout_s: float) -> bool:
        """Wait until no transfer is queued or running, and no call is abandoned.

        Returns:
            Whether that is so.
        """
        deadline_s = time.monotonic() + timeout_s
        drained = all(one.drain(deadline_s) for one in self._executors.values())
        left_s = max(0.0, deadline_s - time.monotonic())
        return drained and self.attachment.wait_idle(left_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Finish the writes that end in time, then close the attachment.

        Ends within `timeout_s` or `core.deadlines.close`: loads that wait are
        rejected at once, writes get half of the time to drain, releasing gets the
        rest.

        Returns:
            Whether every call has ended.
        """
        deadline_s = self._core.deadlines.until("close", timeout_s)
        reads, writes = (self._executors[one] for one in (Operation.GET, Operation.PUT))
        reads.close()
        writes.drain(self._core.deadlines.until("close", timeout_s, factor=0.5))
        writes.close()
        ended = self.attachment.close(max(0.0, deadline_s - time.monotonic()))
        joined = [executor.join(deadline_s) for executor in (reads, writes)]
        return ended and all(joined)

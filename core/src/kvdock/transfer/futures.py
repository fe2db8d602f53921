"""Futures of background transfers, and the executor that runs them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import attrs
import numpy as np

from kvdock.batch import Operation, Outcome
from kvdock.errors import KvdockError
from kvdock.synchronization import MAX_WAIT_S, ProcessGuard, new_condition, remaining_s

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, OutcomeArray
    from kvdock.transfer.leases import PageLeases

log = logging.getLogger("kvdock")


class TransferFuture:
    """A read or a write of pages of one pool.

    It ends at its deadline, also while it waits for a worker; a transfer that runs
    ends with its call, which has the same deadline.

    Args:
        operation: GET or PUT.
        pool: The pool's name.
        pages: int64 (n,), page indices, `NO_PAGE` among them.
        held: int64 (m,), those in memory.
        deadline_s: On `time.monotonic()`'s clock.
        leases: Of the pool, to see whether an abandoned call still has a page.
    """

    def __init__(
        self,
        operation: Operation,
        pool: str,
        pages: Int64Array,
        held: Int64Array,
        deadline_s: float,
        leases: PageLeases,
    ) -> None:
        self.operation = operation
        self.pool = pool
        self.pages = pages
        self._held = held
        self.deadline_s = deadline_s
        self._leases = leases
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._running = False
        self._began_s = time.monotonic()
        self._seconds = 0.0
        self._outcomes: OutcomeArray | None = None

    def __len__(self) -> int:
        """Return the number of pages."""
        return len(self.pages)

    @property
    def ended(self) -> bool:
        """Whether the outcomes are known and will not change."""
        if not self._over.is_set() and time.monotonic() >= self.deadline_s:
            self._end_waiting(Outcome.TIMEOUT)
        return self._over.is_set()

    @property
    def done(self) -> bool:
        """Whether it has ended and no call can touch its pages any more.

        An abandoned call keeps the pages of a zero-copy transfer after its end.
        """
        return self.ended and not self._leases.in_use(self._held).any()

    @property
    def outcomes(self) -> OutcomeArray:
        """An `Outcome` for each page, uint8 (n,).

        Raises:
            KvdockError: If it has not ended.
        """
        if not self.ended or self._outcomes is None:
            raise KvdockError(
                f"the transfer of {len(self.pages)} pages of pool {self.pool!r} has "
                "not ended",
                fix="Wait until `ended` or `done`.",
            )
        return self._outcomes

    @property
    def seconds(self) -> float:
        """Time from its submission to its end; 0 before."""
        return self._seconds

    def wait(self, timeout_s: float) -> bool:
        """Wait until it is done; return whether it is."""
        end_s = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        while not self.ended:
            now_s = time.monotonic()
            if now_s >= end_s:
                return False
            # Until its deadline it may still wait for a worker.
            next_s = end_s if self._running else min(end_s, self.deadline_s)
            self._over.wait(remaining_s(next_s))
        return self._leases.wait(self._held, max(0.0, end_s - time.monotonic()))

    def start(self) -> bool:
        """Begin to run; return False if it has ended."""
        with self._lock:
            if self.deadline_s > time.monotonic() and not self._over.is_set():
                self._running = True
        return not self.ended

    def finish(self, outcomes: OutcomeArray) -> None:
        """End with the outcomes, uint8 (n,)."""
        with self._lock:
            self._finish(outcomes)

    def _finish(self, outcomes: OutcomeArray) -> None:
        if not self._over.is_set():
            self._outcomes = outcomes
            self._seconds = time.monotonic() - self._began_s
            self._over.set()

    def reject(self, outcome: Outcome) -> None:
        """End with one outcome for every page, unless it runs."""
        self._end_waiting(outcome)

    def _end_waiting(self, outcome: Outcome) -> None:
        with self._lock:
            # A transfer that runs may still copy into its pages.
            if not self._running:
                self._finish(np.full(len(self.pages), outcome, np.uint8))


Work = Callable[[], "OutcomeArray"]


class QueuedFuture(Protocol):
    """What an executor needs of a future."""

    @property
    def ended(self) -> bool:
        """Whether its outcomes are known."""

    def __len__(self) -> int:
        """Return how many outcomes it has."""

    def start(self) -> bool:
        """Begin to run; return False if it has ended."""

    def finish(self, outcomes: OutcomeArray) -> None:
        """End with the outcomes."""

    def reject(self, outcome: Outcome) -> None:
        """End with one outcome, unless it runs."""


@attrs.frozen(eq=False)
class _QueuedTransfer:
    """One transfer in the queue, and what it does."""

    future: QueuedFuture
    work: Work


class BoundedExecutor:
    """Transfers of one direction, first come, first served.

    Args:
        name: Begins the workers' thread names.
        workers: Transfers at once.
        queue: Transfers that may wait; the next one is rejected.
    """

    def __init__(self, name: str, workers: int, queue: int) -> None:
        self._name = name
        self._workers = workers
        self._queue = queue
        self._lock, self._changed = new_condition()
        self._waiting: deque[_QueuedTransfer] = deque()
        self._running: set[threading.Thread] = set()
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._guard = ProcessGuard()

    def submit(self, future: QueuedFuture, work: Work) -> None:
        """Queue a transfer; reject it, at once, if the queue is full.

        Args:
            future: Reports its end.
            work: Moves its pages, on a worker.
        """
        if self._guard.forked:
            future.reject(Outcome.UNAVAILABLE)
            return
        rejected = Outcome.OK
        with self._lock:
            if not self._closed and len(self._waiting) >= self._queue:
                self._drop_ended()
            if self._closed:
                rejected = Outcome.UNAVAILABLE
            elif len(self._waiting) >= self._queue:
                rejected = Outcome.REFUSED
            else:
                if len(self._threads) < self._workers:
                    self._start_worker()
                if self._threads:
                    self._waiting.append(_QueuedTransfer(future, work))
                    self._changed.notify_all()
                else:
                    rejected = Outcome.UNAVAILABLE
        if rejected is not Outcome.OK:
            future.reject(rejected)

    def _drop_ended(self) -> None:
        """Drop the transfers whose deadline has passed in the queue."""
        self._waiting = deque(one for one in self._waiting if not one.future.ended)

    def _start_worker(self) -> None:
        thread = threading.Thread(
            target=self._run,
            name=f"{self._name}-{len(self._threads)}",
            daemon=True,
        )
        try:
            thread.start()
        except RuntimeError as error:  # a limit of the system
            log.warning("%s: %s", self._name, error)
        else:
            self._threads.add(thread)

    def drain(self, deadline_s: float) -> bool:
        """Wait until the queue is empty and idle; return whether it is."""
        if self._guard.forked:
            return True
        with self._lock:
            return self._changed.wait_for(
                lambda: not self._waiting and not self._running,
                remaining_s(deadline_s),
            )

    def close(self) -> None:
        """Reject new transfers and those that wait."""
        if self._guard.forked:
            return
        with self._lock:
            self._closed = True
            dropped, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        for load in dropped:
            load.future.reject(Outcome.UNAVAILABLE)

    def join(self, deadline_s: float) -> bool:
        """Wait for the workers of a closed executor; return whether they ended."""
        if self._guard.forked:
            return True
        for thread in self._threads:
            thread.join(remaining_s(deadline_s))
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        mine = threading.current_thread()
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                load = self._waiting.popleft()
                self._running.add(mine)
            if load.future.start():
                load.future.finish(self._outcomes(load))
            with self._lock:
                self._running.discard(mine)
                self._changed.notify_all()
            del load  # an idle worker must not keep memory alive

    def _outcomes(self, load: _QueuedTransfer) -> OutcomeArray:
        try:
            return load.work()
        except Exception:
            # A defect of ours: storage answers with outcomes.
            log.exception("a transfer in the background failed")
            return np.full(len(load.future), Outcome.ERROR, np.uint8)

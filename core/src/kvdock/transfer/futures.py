"""Futures of background transfers, and the executor that runs them."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import StrEnum

import attrs

from kvdock.config.core import StopPolicy, TransferSettings
from kvdock.synchronization import MAX_WAIT_S, ProcessGuard, new_condition, remaining_s
from kvdock.transfer.result import TransferResult

log = logging.getLogger("kvdock")


_TOKENS = 1024
"""Tokens to which `stop_growth` applies."""


class TransferState(StrEnum):
    """How far a transfer is."""

    WAITING = "waiting"
    """In the queue."""
    RUNNING = "running"
    """Pages are being moved."""
    DONE = "done"
    """Every pool is done, or the transfer was stopped: there is a result."""
    CANCELLED = "cancelled"
    """The caller cancelled it: there is no result."""
    REFUSED = "refused"
    """The queue is full, or the manager is closed or of another process."""
    FAILED = "failed"
    """The attachment was closed under it; the log says more."""


class TransferFuture:
    """One prefetch or offload.

    Args:
        pages: Length of the prefix.
        tokens: Tokens that these pages cover, for the timeout policy.
        settings: When the engine stops waiting.
        ended: Called once when it is over, on the worker's thread.
    """

    def __init__(
        self,
        pages: int,
        tokens: int,
        settings: TransferSettings,
        ended: Callable[[TransferFuture], None] | None = None,
    ) -> None:
        self.pages = pages
        self._policy = settings.stop
        self._patience_s = settings.stop_base + settings.stop_growth * tokens / _TOKENS
        self._ended = ended
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._began_s = time.monotonic()
        self._state = TransferState.WAITING
        self._stopping = False
        self._moved_pages = 0
        self._result: TransferResult | None = None

    @property
    def state(self) -> TransferState:
        """How far it is."""
        return self._state

    @property
    def done(self) -> bool:
        """Whether it has ended."""
        return self._over.is_set()

    @property
    def moved_pages(self) -> int:
        """Pages of the prefix that are moved, without trailing windows."""
        return self._moved_pages

    @property
    def stopping(self) -> bool:
        """Whether it ends before its next batch."""
        return self._stopping

    @property
    def cancelled(self) -> bool:
        """Whether the caller cancelled it."""
        return self._state is TransferState.CANCELLED

    @property
    def result(self) -> TransferResult | None:
        """What was moved; None until it is done, and if it was cancelled."""
        return self._result

    def should_stop_waiting(self) -> bool:
        """Return whether the engine should stop waiting, by its policy.

        If it is not done then, `stop` ends it with what is there.
        """
        if self.done:
            return True
        match self._policy:
            case StopPolicy.BEST_EFFORT:
                return True
            case StopPolicy.WAIT_COMPLETE:
                return False
            case StopPolicy.TIMEOUT:
                return time.monotonic() - self._began_s >= self._patience_s

    def stop(self) -> None:
        """End after the batch under way, and keep what is complete.

        Returns at once. Trailing windows are still read, for the boundary
        that was reached, so wait for `done` before using the pages.
        """
        self._stopping = True

    def cancel(self) -> None:
        """End after the batch under way, and discard the result.

        Pages of that batch stay leased until it ends.
        """
        self._stopping = True
        with self._lock:
            if not self._over.is_set():
                self._state = TransferState.CANCELLED

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is over; return whether it is."""
        return self._over.wait(
            None if timeout_s is None else min(timeout_s, MAX_WAIT_S)
        )

    def start(self) -> bool:
        """Start moving; return False if it was cancelled."""
        with self._lock:
            if self._state is not TransferState.WAITING:
                return False
            self._state = TransferState.RUNNING
            return True

    def set_progress(self, pages: int) -> None:
        """Report progress."""
        self._moved_pages = pages

    def finish(self, result: TransferResult | None, state: TransferState) -> None:
        """End with a state, and with a result or None."""
        with self._lock:
            if self._over.is_set():
                return
            if self._state is not TransferState.CANCELLED:
                self._state = state
                self._result = result
            self._over.set()
        if self._ended is not None:
            try:
                self._ended(self)
            except Exception:
                log.exception("the callback of a transfer failed")


Work = Callable[[TransferFuture], TransferResult | None]


@attrs.frozen(eq=False)
class _QueuedTransfer:
    """One transfer in the queue, and its callback."""

    future: TransferFuture
    work: Work
    after: Callable[[], None]


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
        self._running: dict[TransferFuture, threading.Thread] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._guard = ProcessGuard()

    @property
    def waiting(self) -> int:
        """Transfers in the queue."""
        return len(self._waiting)

    def submit(
        self, future: TransferFuture, work: Work, after: Callable[[], None]
    ) -> bool:
        """Queue a transfer; return False, at once, if the queue is full.

        Args:
            future: Reports its state and result.
            work: What to do, on a worker.
            after: Done when it is over, whether it ran or not.
        """
        if self._guard.forked:
            return False
        with self._lock:
            if self._closed or len(self._waiting) >= self._queue:
                return False
            if len(self._threads) < self._workers:
                self._start_worker()
            if not self._threads:
                return False
            self._waiting.append(_QueuedTransfer(future, work, after))
            self._changed.notify_all()
        return True

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
        """Wait until the queue is empty and idle; return whether it is.

        A transfer's callback may call it too: it does not wait for itself.
        """
        if self._guard.forked:
            return True
        mine = threading.current_thread()

        def drained() -> bool:
            return not self._waiting and not set(self._running.values()) - {mine}

        with self._lock:
            if self._threads == {mine}:
                return drained()  # no other worker is running
            return self._changed.wait_for(drained, remaining_s(deadline_s))

    def close(self) -> None:
        """Reject new transfers, and cancel those that wait or run."""
        if self._guard.forked:
            return
        with self._lock:
            self._closed = True
            dropped, self._waiting = list(self._waiting), deque()
            for future in self._running:
                future.cancel()
            self._changed.notify_all()
        for load in dropped:
            load.future.cancel()
            self._finish(load, None, TransferState.CANCELLED)

    def join(self, deadline_s: float) -> bool:
        """Wait for the workers of a closed executor; return whether they ended.

        A worker that calls it is not waited for.
        """
        others = [one for one in self._threads if one is not threading.current_thread()]
        for thread in others:
            thread.join(remaining_s(deadline_s))
        return not any(thread.is_alive() for thread in others)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                load = self._waiting.popleft()
                self._running[load.future] = threading.current_thread()
            result, state = None, TransferState.DONE
            try:
                if load.future.start():
                    result = load.work(load.future)
            except Exception:
                # A closed attachment, or a defect of ours.
                log.exception("a transfer in the background failed")
                state = TransferState.FAILED
            self._finish(load, result, state)
            with self._lock:
                del self._running[load.future]
                self._changed.notify_all()
            del load  # an idle worker must not keep memory alive

    def _finish(
        self, load: _QueuedTransfer, result: TransferResult | None, state: TransferState
    ) -> None:
        load.after()
        load.future.finish(result, state)

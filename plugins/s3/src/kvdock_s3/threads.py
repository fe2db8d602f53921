"""Threads that make the requests of an attachment's batches.

A batch's rows are taken one by one, in turn with those of other batches: a
short lookup does not wait until a long transfer has ended.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import attrs

from kvdock.daemon_threads import DaemonThreads


@attrs.define(eq=False)
class Job:
    """The rows of one batch.

    Args:
        do: Called with the job and the number of a row, on any of the threads.
    """

    do: Callable[[Job, int], None]
    rows: int
    _next: Iterator[int] = attrs.field(factory=itertools.count, init=False)
    _changed: threading.Condition = attrs.field(factory=threading.Condition, init=False)
    _active: int = attrs.field(default=0, init=False)
    _committing: int = attrs.field(default=0, init=False)
    _done: int = attrs.field(default=0, init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _error: BaseException | None = attrs.field(default=None, init=False)

    def step(self) -> bool:
        """Do one row; return whether there may be more."""
        with self._changed:
            row = self.rows if self._closed else next(self._next)
            if row >= self.rows:
                return False
            self._active += 1
        error = None
        try:
            self.do(self, row)
        except BaseException as raised:  # noqa: BLE001 - the caller raises it
            error = raised
        finally:
            with self._changed:
                self._error = self._error or error
                self._active -= 1
                self._done += 1
                if self._closed or self._done == self.rows:
                    self._changed.notify_all()
        return True

    @contextmanager
    def committing(self) -> Iterator[bool]:
        """Hold the end of the job off while a row's bytes are copied.

        Yields:
            Whether they may be copied: not once the caller has its answer.
        """
        with self._changed:
            allowed = not self._closed
            self._committing += allowed
        try:
            yield allowed
        finally:
            if allowed:
                with self._changed:
                    self._committing -= 1
                    if self._closed:
                        self._changed.notify_all()

    def wait(self, deadline_s: float, *, for_active: bool) -> None:
        """Wait for all rows, or until the deadline; then begin no more of them.

        Args:
            deadline_s: When to stop waiting, on `time.monotonic()`'s clock.
            for_active: Whether rows that have begun are waited for in any
                case, because they use the caller's memory.

        Raises:
            Exception: What a row raised, the first of them.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._done == self.rows,
                min(max(0.0, deadline_s - time.monotonic()), threading.TIMEOUT_MAX),
            )
            self._closed = True
            self._changed.wait_for(
                lambda: not (self._committing or (for_active and self._active))
            )
            error, self._error = self._error, None
        if error is not None:
            raise error


class RequestThreads:
    """Daemon threads that take the rows of jobs, and do not outlive a process."""

    def __init__(self, number: int, name: str) -> None:
        self._number = number
        self._threads = DaemonThreads(number, name)
        self._closed = False
        self._lock = threading.Lock()

    def start(self, job: Job) -> None:
        """Let the threads work on a job."""
        self._threads.submit(partial(self._work, job), min(self._number, job.rows))

    def close(self) -> None:
        """End the threads, each after the row that it is at."""
        with self._lock:
            self._closed = True
            self._threads.close(wait=False)

    def _work(self, job: Job) -> None:
        if not job.step():
            return
        # A call that is queued after the end would start a thread that is never ended.
        with self._lock:
            if not self._closed:
                # Behind the rows of others.
                self._threads.submit(partial(self._work, job))

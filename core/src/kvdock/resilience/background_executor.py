"""Run background tasks: each is a job on one thread, from the queue to its end.

A call that a task makes runs on the task's own thread, see `executor`. One that
passes its deadline takes that thread with it: the task ends with TIMEOUT, another
thread goes on with the queue, and the lost one ends when the call does. Small tasks
that wait, and say that they may, are run as one.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from functools import partial
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Outcome
from kvdock.resilience.executor import Job
from kvdock.resilience.workers import CallRejected, Workers
from kvdock.synchronization import (
    ProcessGuard,
    held_lock,
    new_condition,
    remaining_s,
    wait_for_release,
)

if TYPE_CHECKING:
    from kvdock.arrays import OutcomeArray

log = logging.getLogger("kvdock")

MOST_AT_ONCE = 8 << 20
"""Bytes up to which tasks are run as one: the first one then waits some 2 ms more."""


class DeadlineFuture:
    """Work that ends by its deadline, also while it waits for a worker.

    Work that runs ends with its call, which has the same deadline.

    Args:
        size: How many outcomes it has.
        deadline_s: On `time.monotonic()`'s clock.
    """

    def __init__(self, size: int, deadline_s: float = math.inf) -> None:
        self._size = size
        self.deadline_s = deadline_s
        self.on_rejected: Callable[[OutcomeArray], None] | None = None
        """Called with the outcomes if it ends without having run."""
        self.on_ended: Callable[[], None] = _nothing
        """Called once its outcomes are known, with its lock held."""
        self._lock = threading.Lock()
        # Held until the end: waiting for a lock costs a tenth of an event.
        self._over = held_lock()
        self._running = False
        self._outcomes: OutcomeArray | None = None
        self._began_s = self._ended_s = time.monotonic()

    @property
    def ended(self) -> bool:
        """Return whether the outcomes are known and will not change."""
        if self._outcomes is None and time.monotonic() >= self.deadline_s:
            self.reject(Outcome.TIMEOUT)
        return self._outcomes is not None

    def start(self) -> bool:
        """Begin to run; return False if it has ended."""
        with self._lock:
            if self._outcomes is None and time.monotonic() < self.deadline_s:
                self._running = True
        return not self.ended

    def __len__(self) -> int:
        """Return how many outcomes it has."""
        return self._size

    def finish(self, outcomes: OutcomeArray) -> None:
        """End with the outcomes, uint8 (n,)."""
        with self._lock:
            self._end(outcomes)

    def reject(self, outcome: Outcome) -> None:
        """End with one outcome for all of it, unless it runs."""
        rejected = np.full(self._size, outcome, np.uint8)
        with self._lock:
            # What runs may still copy into its pages.
            if self._running or self._outcomes is not None:
                return
            self._end(rejected)
        if self.on_rejected is not None:
            self.on_rejected(rejected)

    def _end(self, outcomes: OutcomeArray) -> None:
        """End with the outcomes; with the lock held."""
        self._ended_s = time.monotonic()
        self._outcomes = outcomes
        self.on_ended()
        self._over.release()

    def _wait_ended(self, end_s: float) -> bool:
        """Wait until it has ended; return whether it has."""
        while not self.ended:
            if time.monotonic() >= end_s:
                return False
            # Until its deadline it may still wait for a worker.
            until_s = end_s if self._running else min(end_s, self.deadline_s)
            wait_for_release(self._over, until_s)
        return True


def _nothing() -> None:
    """Do nothing."""


Futures = list[DeadlineFuture]

Work = Callable[[Job, Futures], "OutcomeArray"]
"""Returns the outcomes of some futures on a worker, in their order."""


@attrs.frozen(eq=False)
class _Task:
    """A task in the queue.

    Args:
        work: Does it: with the futures of those that join it, if it has a group.
        group: Equal for tasks that may be run as one; None for one that goes alone.
        nbytes: What it moves.
    """

    future: DeadlineFuture
    work: Work
    group: Hashable
    nbytes: int

    def takes(self, other: _Task) -> bool:
        """Return whether another task may join: it has about as much time left."""
        if self.group is None or other.group != self.group:
            return False
        deadline_s = self.future.deadline_s
        apart_s = abs(other.future.deadline_s - deadline_s)
        return apart_s <= (deadline_s - time.monotonic()) / 10


class BackgroundExecutor:
    """Background tasks of one kind, first come, first served.

    Args:
        name: Begins the workers' thread names.
        workers: Tasks at once.
        queue: Tasks that may wait; the next one is rejected.
    """

    def __init__(self, name: str, workers: int, queue: int) -> None:
        self._name = name
        self._at_once = workers
        self._queue = queue
        self._lock, self._changed = new_condition()
        self._waiting: deque[_Task] = deque()
        self._workers = Workers(name, workers)
        self._running = 0
        self._closed = False
        self._guard = ProcessGuard()

    def submit(
        self,
        future: DeadlineFuture,
        work: Work,
        group: Hashable = None,
        nbytes: int = 0,
    ) -> None:
        """Queue a task; reject it, at once, if the queue is full.

        Small tasks of one group that wait are run as one. `nbytes` is what it moves.
        """
        if self._guard.forked:
            future.reject(Outcome.UNAVAILABLE)
            return
        late: list[_Task] = []
        with self._lock:
            rejected = self._place(_Task(future, work, group, nbytes), late)
        # Without the lock: observers are told, and may ask for a transfer.
        for task in late:
            task.future.reject(Outcome.TIMEOUT)
        if rejected is not Outcome.OK:
            future.reject(rejected)

    def _place(self, task: _Task, late: list[_Task]) -> Outcome:
        """Give a task to a worker or to the queue; with the lock held.

        `late` takes those that leave the queue since their deadline has passed.
        """
        if self._closed:
            return Outcome.UNAVAILABLE
        if self._running < self._at_once:
            if self._start([task]):
                return Outcome.OK
            if not self._running:
                return Outcome.UNAVAILABLE
        if len(self._waiting) >= self._queue:
            now = time.monotonic()
            late += [one for one in self._waiting if one.future.deadline_s <= now]
            rest = [one for one in self._waiting if one.future.deadline_s > now]
            self._waiting = deque(rest)
        if len(self._waiting) >= self._queue:
            return Outcome.REFUSED
        self._waiting.append(task)
        return Outcome.OK

    def _start(self, tasks: list[_Task]) -> bool:
        """Have a worker run tasks as one job; with the lock held."""
        try:
            inbox = self._workers.take()
        except CallRejected as error:
            log.warning("%s: %s", self._name, error)
            return False
        self._running += 1
        inbox.put(partial(self._work, tasks))
        return True

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
        """Reject new tasks and those that wait."""
        if self._guard.forked:
            return
        with self._lock:
            self._closed = True
            dropped, self._waiting = list(self._waiting), deque()
            self._changed.notify_all()
        self._workers.close()
        for task in dropped:
            task.future.reject(Outcome.UNAVAILABLE)

    def join(self, deadline_s: float) -> bool:
        """Wait for the workers of a closed executor; return whether they ended."""
        if self._guard.forked:
            return True
        return self._workers.join(deadline_s)

    def _work(self, tasks: list[_Task]) -> Callable[[], None] | None:
        """Run tasks as one job; return what ends them once the worker is free."""
        begun = [task.future for task in tasks if task.future.start()]
        outcomes: OutcomeArray = np.zeros(0, np.uint8)
        if begun:
            job = Job(lambda job: tasks[0].work(job, begun))
            job.on_lost = partial(self._lose, begun)
            job.run()
            if job.abandoned:
                return None  # another worker has taken its place
            outcomes = job.result
            if job.error is not None:
                # A defect of ours: storage answers with outcomes.
                log.error("%s: a task failed", self._name, exc_info=job.error)
                sizes = sum(map(len, begun))
                outcomes = np.full(sizes, Outcome.ERROR, np.uint8)
        return partial(self._end, begun, outcomes)

    def _end(self, begun: Futures, outcomes: OutcomeArray) -> None:
        """End tasks that ran, and begin the next ones."""
        with self._lock:
            self._go_on()
            # Last, and with the lock held: what it wakes needs the interpreter, and
            # would go to sleep again if this thread still had much to do.
            end = 0
            for future in begun:
                start, end = end, end + len(future)
                future.finish(outcomes[start:end])

    def _go_on(self) -> None:
        """Count a worker less, and begin what waits; with the lock held."""
        self._running -= 1
        following = self._next()
        if following and not self._start(following):
            self._waiting.extendleft(reversed(following))
        self._changed.notify_all()

    def _next(self) -> list[_Task]:
        """Take the first task of the queue, and those behind it that may join it.

        Not more of them than this worker's share.
        """
        if not self._waiting:
            return []
        share = -(-len(self._waiting) // self._at_once)
        first = self._waiting.popleft()
        taken, room = [first], MOST_AT_ONCE - first.nbytes
        while len(taken) < share and first.takes(self._waiting[0]):
            room -= self._waiting[0].nbytes
            if room < 0:
                break
            taken.append(self._waiting.popleft())
        return taken

    def _lose(self, futures: Futures) -> None:
        """End the tasks of a worker whose call is abandoned, and replace it."""
        with self._lock:
            self._go_on()
        for future in futures:
            future.finish(np.full(len(future), Outcome.TIMEOUT, np.uint8))

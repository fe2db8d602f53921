"""Run jobs on worker threads with a deadline, and survive late ones.

Python cannot stop a thread that sits in a client library. A job whose backend
passes its deadline is abandoned on its thread: the caller goes on, and the memory
that the backend may still touch is released only when it really returns. The number
of abandoned jobs is bounded; at the bound every job is rejected until one
ends, or until the backend answers a probe although they do not end.

A job of a background task needs no other thread: it runs on the task's own, and
one thread of the executor watches the deadlines of all such jobs.
"""

from __future__ import annotations

import contextvars
import logging
import math
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from kvdock.resilience.workers import CallRejected, Workers
from kvdock.synchronization import (
    MAX_WAIT_S,
    ProcessGuard,
    QuietCondition,
    new_condition,
    remaining_s,
)

log = logging.getLogger("kvdock")


OnLateEnd = Callable[[Any], None]
"""Called with the result of a call for which no caller waits any more; None if none."""

Work = Callable[["Job"], Any]
"""What a job does, on its worker's thread."""

Steps = list[Callable[[], None]]
"""What runs last, when every call has ended."""


_NEVER = -math.inf
"""A deadline that is not watched: its watcher has ended, or is about to abandon it."""

MAX_DISCOUNTS = 4
"""Times its limit that a quota may hold, discounted calls included."""


class ConcurrencyQuota:
    """Bound the number of abandoned calls or background tasks of one kind.

    Each kind has a quota of its own, so that one that hangs leaves the others
    theirs. Only an executor counts it, under its lock.

    Args:
        limit: Calls at once, besides the discounted ones.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._discounted = 0

    @property
    def full(self) -> bool:
        """Return whether no more are started."""
        return self.taken - self._discounted >= self.limit

    @property
    def exhausted(self) -> bool:
        """Return whether it is full until a call ends, whatever else happens."""
        return self.taken >= MAX_DISCOUNTS * self.limit

    def discount(self) -> None:
        """Discount all calls taken so far, within limits."""
        self._discounted = min(self.taken, (MAX_DISCOUNTS - 1) * self.limit)

    def release(self) -> None:
        """Count one less."""
        self.taken -= 1
        self._discounted = min(self._discounted, self.taken)


class WorkerExit(Exception):  # noqa: N818 - becomes an outcome
    """The call raised a BaseException such as SystemExit."""


class Abandoned(BaseException):
    """Unwinds what a worker still had to do for a job that was abandoned.

    It is raised where the backend's call returns at last: `finally` blocks on the way
    release what that call could touch. No handler of errors may take it for one.
    """


class Job:
    """One piece of work, until its end or until it is abandoned.

    Its lock says who acts for it. The worker has the lock while it prepares memory and
    records what came of a batch, and releases it while the code of a backend runs,
    between `leave` and `resume`. Who waits for the job abandons it with the lock held:
    so either of them records the end of a batch, and never both.

    Args:
        work: What to do.
        until_s: Until when to wait for it, on `time.monotonic()`'s clock.
        closes: Whether it is a step of closing, which is done however late it begins;
            any other is not begun once it is abandoned.
        late: Called on the worker's thread at the end of a job that was abandoned, also
            where it was never begun.

    Attributes:
        executor: Has counted it as under way; None if none has.
        quota: Counts it, as no caller waits for it; None where one does.
        result: What its work returned; before its end, the latest part of it.
        error: What it raised; `CallRejected` if it was never begun, `WorkerExit` for
            what would end a thread.
        begun: Whether its work has begun.
        ended: Whether its work has ended.
        abandoned: Whether no caller waits for its work any more.
        on_abandon: Records that the backend's call was abandoned; see `leave`.
        on_lost: Called after that.
    """

    __slots__ = (
        "_context",
        "_work",
        "abandoned",
        "begun",
        "closes",
        "done",
        "ended",
        "error",
        "executor",
        "late",
        "lock",
        "on_abandon",
        "on_lost",
        "quota",
        "result",
        "until_s",
        "watch",
    )

    def __init__(
        self,
        work: Work,
        until_s: float = math.inf,
        *,
        closes: bool = False,
        late: OnLateEnd | None = None,
    ) -> None:
        self.until_s = until_s
        self.closes = closes
        self.late = late
        self.executor: DeadlineExecutor | None = None
        self.quota: ConcurrencyQuota | None = None
        self.lock = threading.Lock()
        self.done = threading.Lock()
        self.done.acquire()
        self.begun = self.ended = self.abandoned = False
        self.result: Any = None
        self.error: Exception | None = None
        self.on_lost: Callable[[], None] | None = None
        self.watch: Callable[[Job, float], None] | None = None
        self.on_abandon: Callable[[bool], None] | None = None
        self._work = work
        # The engine's trace context continues on the worker thread.
        self._context = contextvars.copy_context()

    def run(self) -> Callable[[], None] | None:
        """Do the work and keep its result or error; a task of `Workers`."""
        with self.lock:
            if self.closes or not self.abandoned:
                self.begun = True
                try:
                    self.result = self._context.run(self._work, self)
                except Abandoned:
                    pass
                except Exception as error:  # noqa: BLE001 - carried to the caller
                    self.error = error
                except BaseException as error:  # noqa: BLE001 - same, but it must not end the thread
                    self.error = WorkerExit(repr(error))
                self.ended = not self.abandoned
            del self._work  # it references the memory of pages
            if not self.ended:
                self.tell_late()
        return self.executor.count_end(self) if self.executor is not None else None

    def tell_late(self) -> None:
        """Hand on what the job has returned, as no caller takes it."""
        if self.late is not None:
            try:
                self.late(self.result)
            except Exception:
                log.exception("the callback of a late call failed")

    def leave(
        self, until_s: float, on_abandon: Callable[[bool], None] | None = None
    ) -> None:
        """Begin to run the code of a backend: the job may be abandoned meanwhile.

        Args:
            until_s: Until when to wait for it.
            on_abandon: Records that it was abandoned, with the job's lock held and on
                the thread of who waited; its argument says whether it was late. False
                is an interrupt of who waited.
        """
        self.on_abandon = on_abandon
        if self.watch is None:
            self.until_s = until_s
        else:
            if on_abandon is not None:  # another thread records it, for this request
                context = contextvars.copy_context()
                self.on_abandon = lambda overran: context.run(on_abandon, overran)
            self.watch(self, until_s)
        self.lock.release()

    def resume(self) -> bool:
        """Go on after the code of a backend; return False if it was abandoned."""
        self.lock.acquire()
        self.on_abandon = None
        return not self.abandoned


class DeadlineExecutor:
    """Runs up to `at_once` jobs beside up to `overrun` abandoned ones.

    Args:
        name: Begins the names of the threads.
        at_once: Jobs that callers wait for.
        overrun: Abandoned jobs at which further ones are rejected.
        moved: Called without the executor's lock whenever `abandoned` has changed.

    Attributes:
        abandoned: Abandoned jobs and background tasks that have not ended.
    """

    def __init__(
        self,
        name: str,
        at_once: int,
        overrun: int,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        self._name = name
        self._at_once = at_once
        self._moved = moved
        self._lock, self._changed = new_condition()
        self._workers = Workers(name, at_once)
        self._overrun = ConcurrencyQuota(overrun)
        self._busy = 0
        self.abandoned = 0
        # Counted until all that follows a job has run as well.
        self._running = 0
        self._closing = False
        self._closed = False
        self._final_steps: Steps = []
        # Jobs on the threads of background tasks, and who watches them.
        self._hosted: set[Job] = set()
        self._watched = QuietCondition(self._lock)
        self._watch_until_s = _NEVER
        self.guard = ProcessGuard()

    @property
    def at_capacity(self) -> bool:
        """Return whether abandoned jobs make the executor reject further ones."""
        return self._overrun.full

    @property
    def exhausted(self) -> bool:
        """Return whether it is full until a job ends, whatever else happens."""
        return self._overrun.exhausted

    @property
    def threads(self) -> int:
        """Threads alive, idle ones included."""
        return len(self._workers)

    def run(
        self,
        call: Callable[[], Any],
        deadline_s: float,
        late: OnLateEnd | None = None,
        *,
        closes: bool = False,
    ) -> Job:
        """Run one call that may hang on a worker thread, and wait for it.

        Args:
            call: What to do.
            deadline_s: Until when to wait, on `time.monotonic()`'s clock.
            late: Called on the worker thread when an abandoned call ends.
            closes: Whether it is a step of closing, which is never rejected.

        Raises:
            BaseException: What a handler of signals raises in the thread that
                waits, and nothing else; `late` is called then.
        """

        def work(job: Job) -> object:
            job.leave(deadline_s)
            try:
                return call()
            finally:
                job.resume()

        return self.work(work, deadline_s, late=late, closes=closes)

    def work(
        self,
        work: Work,
        until_s: float,
        job: Job | None = None,
        *,
        late: OnLateEnd | None = None,
        closes: bool = False,
    ) -> Job:
        """Do the work of one call, where a backend that hangs may keep the thread.

        Args:
            work: What to do, in one job.
            until_s: Until when to wait, unless the job says otherwise.
            job: That of the background task, or of the larger call, that the work
                belongs to: then it is done on the caller's thread. Without one it is
                done on a worker, and the caller waits.
            late: Called with the result where the job is abandoned, or the thread that
                waits is interrupted.
            closes: Whether it is a step of closing, which is never rejected.

        Returns:
            The job, with the result of this work: ended, rejected, or abandoned.

        Raises:
            Abandoned: If a job that was given was abandoned meanwhile.
        """
        if job is not None:
            return self._host(job, work, until_s)
        job = Job(work, until_s, closes=closes, late=late)
        try:
            self._begin(job, until_s)
            while not job.done.acquire(
                timeout=min(max(0.0, job.until_s - time.monotonic()), MAX_WAIT_S)
            ):
                self._abandon_late(job)
                if job.abandoned or (job.ended and job.done.acquire()):
                    break
        except CallRejected as error:
            job.error = error
        except BaseException:  # an interrupt of the waiting thread
            if job.executor is not None and not job.abandoned:
                with job.lock:
                    if not job.ended:
                        self._abandon(job, overran=False)
            if job.executor is None or job.ended:
                job.tell_late()
            raise
        return job

    def _host(self, job: Job, work: Work, deadline_s: float) -> Job:
        """Do work that belongs to a job, on its thread."""
        if job.executor is self:
            job.result = work(job)
            return job
        job.error, job.watch = None, self._watch
        try:
            self._begin(job, deadline_s, hosted=True)
        except CallRejected as error:
            job.error = error
            return job
        try:
            job.result = work(job)
        finally:
            job.executor = job.watch = None
            self._count_answered(job)
            self._finish()
        return job

    def spawn(
        self, quota: ConcurrencyQuota, work: Work, *, watched: bool = False
    ) -> bool:
        """Start a task whose result no caller waits for; return whether it was started.

        The quota bounds the tasks of this kind; jobs have a quota of their own. One
        that is watched is abandoned if a call of it passes its deadline.
        """
        job = Job(work)
        job.quota = quota
        job.watch = self._watch if watched else None
        try:
            self._begin(job, 0.0)
        except CallRejected:
            return False
        self._moved()
        return True

    def discount_abandoned(self, *quotas: ConcurrencyQuota) -> None:
        """Discount abandoned jobs after the backend has answered a probe.

        Background tasks of the given quotas are discounted as well.
        """
        with self._lock:
            for quota in (self._overrun, *quotas):
                quota.discount()
            self._changed.notify_all()

    def stop_accepting(self) -> None:
        """Reject every call that is not a step of closing."""
        with self._lock:
            self._closing = True
            self._changed.notify_all()

    def wait_idle(self, deadline_s: float) -> bool:
        """Wait until nothing runs; return whether that came true.

        Abandoned calls and background tasks count until their callbacks have
        run, the last step of `shutdown` included.
        """
        if self.guard.forked:
            return True
        with self._lock:
            return self._changed.wait_for(
                lambda: not self._running, remaining_s(deadline_s)
            )

    def shutdown(self, deadline_s: float, last: Callable[[], None]) -> bool:
        """Reject calls, wait for running ones, run a last step; return if all ended.

        `last` is done here if all calls have ended, otherwise on the thread of the call
        that ends last.
        """
        self.stop_accepting()
        with self._lock:
            self._closed = True
        self.wait_idle(deadline_s)
        with self._lock:
            self._final_steps.append(last)
            rest = not self._running
            # Counted like a call, so that `wait_idle` waits for it too.
            self._running += 1
            self._watched.notify_all()
            # With the lock: a thread that was taken has its task by now.
            self._workers.close()
        self._finish()
        if rest:  # else a thread may never end
            self._workers.join(deadline_s)
        return rest

    def _abandon_late(self, job: Job) -> None:
        """Abandon a job if its backend is late."""
        # Blocks while its worker prepares memory or records what came of a batch.
        with job.lock:
            under_way = job.executor is self and not job.ended
            if under_way and time.monotonic() >= job.until_s:
                self._abandon(job, overran=True)

    def _abandon(self, job: Job, *, overran: bool) -> None:
        """Abandon a job that is under way; with its lock held."""
        try:
            with self._lock:
                # Plain steps: a signal between two calls finds all of them done, or
                # none.
                job.abandoned = True
                if job.quota is None:
                    job.quota = self._overrun
                    self._overrun.taken += 1
                    self._busy -= 1
                    self.abandoned += 1
                self._hosted.discard(job)
                self._changed.notify()
                self._watched.notify()
            self._moved()
        finally:  # also after a signal: no other thread would do it
            try:
                if job.abandoned and job.on_abandon is not None:
                    job.on_abandon(overran)
            finally:
                if job.abandoned and job.on_lost is not None:
                    job.on_lost()

    def _is_rejecting(self, *, closes: bool) -> bool:
        return self._closed or (not closes and (self._closing or self.at_capacity))

    def _admit(self, deadline_s: float, *, closes: bool) -> None:
        """Wait, with the lock held, until a call may start; else raise CallRejected."""
        if self._busy >= self._at_once:
            self._changed.wait_for(
                lambda: self._is_rejecting(closes=closes) or self._busy < self._at_once,
                remaining_s(deadline_s),
            )
        if self._closing and not closes:
            raise CallRejected("it is being closed")
        if self._is_rejecting(closes=closes) or self._busy >= self._at_once:
            raise CallRejected

    def _watch(self, job: Job, until_s: float) -> None:
        """Set a hosted job's deadline; wake the watcher if it sleeps beyond that."""
        # With the lock: the watcher may be about to sleep, with an older time in mind.
        with self._lock:
            job.until_s = until_s
            if until_s < self._watch_until_s:
                self._watched.notify()

    def _watch_deadlines(self) -> None:
        """Abandon the hosted jobs whose backends pass their deadlines."""
        while True:
            with self._lock:
                if self._closed and not self._hosted:
                    self._watch_until_s = _NEVER
                    return
                now = time.monotonic()
                late = [job for job in self._hosted if _NEVER < job.until_s <= now]
                for job in late:
                    job.until_s = _NEVER
                if not late:
                    times = [job.until_s for job in self._hosted]
                    self._watch_until_s = min(
                        (until_s for until_s in times if until_s > _NEVER),
                        default=math.inf,
                    )
                    self._watched.wait(remaining_s(self._watch_until_s))
            # Popped: a list that waits for the next one would keep their memory.
            while late:
                self._settle(late.pop())

    def _settle(self, job: Job) -> None:
        """Abandon a late job beside the deadlines of the others."""
        settle = partial(self._abandon_late, job)
        try:
            with self._lock:
                self._workers.take().put(settle)
        except CallRejected:
            settle()

    def _begin(self, job: Job, deadline_s: float, *, hosted: bool = False) -> None:
        """Count a job, and give it to a worker unless it runs on its host's thread.

        Raises:
            CallRejected: If it may not start.
        """
        if os.getpid() != self.guard.pid:
            raise CallRejected("this is a forked child")
        quota, task, watched = job.quota, job.run, job.watch is not None
        with self._lock:
            if quota is not None:
                if quota.full or self._closing:
                    raise CallRejected
            elif self._overrun.taken or self._closing or self._busy >= self._at_once:
                self._admit(deadline_s, closes=job.closes)
            if watched and self._watch_until_s == _NEVER:
                self._workers.take().put(self._watch_deadlines)
                self._watch_until_s = math.inf
            inbox = None if hosted else self._workers.take()
            # Python looks for signals after a call. There is none from taking
            # the thread to giving it the job, so a signal finds both or neither.
            if quota is None:
                self._busy += 1
            else:
                quota.taken += 1
                self.abandoned += 1
            self._running += 1
            job.executor = self
            if inbox is not None:
                inbox.put(task)
            if watched:
                self._hosted.add(job)

    def count_end(self, job: Job) -> Callable[[], None] | None:
        """Count the end of a job; return what tells who waits for it."""
        if job.quota is not None:
            self._count_answered(job)
        with self._lock:
            self._busy -= job.quota is None
            if not self._final_steps:
                self._running -= 1
                if self._changed.waiting:
                    self._changed.notify_all()
                return job.done.release
        job.done.release()
        self._finish()
        return None

    def _count_answered(self, job: Job) -> None:
        """Count a job as ended, but not yet as run."""
        with self._lock:
            self._hosted.discard(job)
            if self._closed:
                self._watched.notify()
            if job.quota is None:
                self._busy -= 1
                return
            self.abandoned -= 1
            job.quota.release()
        self._moved()

    def _finish(self) -> None:
        """Count one job less as running; do the last steps before the last one."""
        while True:
            with self._lock:
                steps: Steps = []
                if self._running == 1:
                    steps, self._final_steps = self._final_steps, steps
                if not steps:
                    self._running -= 1
                    self._changed.notify_all()
                    return
            for step in steps:
                try:
                    step()
                except BaseException:  # it must not end the thread
                    log.exception("%s: the last step of closing failed", self._name)

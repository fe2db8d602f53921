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

from kvdock.resilience.workers import Workers
from kvdock.synchronization import (
    MAX_WAIT_S,
    ProcessGuard,
    QuietCondition,
    new_condition,
    remaining_s,
)

log = logging.getLogger("kvdock")


OnLateEnd = Callable[[Any], None]
"""Called with the result (None if it raised) once an abandoned call ends."""

Work = Callable[["Job"], Any]
"""What a job does, on its worker's thread."""

Steps = list[Callable[[], None]]
"""What runs last, when every call has ended."""


MAX_DISCOUNTS = 4
"""Times its limit that a quota may hold, discounted calls included."""


class ConcurrencyQuota:
    """Bound the number of abandoned calls or background tasks of one kind.

    Each kind has a quota of its own, so that one that hangs leaves the others
    theirs. Only an executor acquires and releases it, under its lock.

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


class CallRejected(Exception):  # noqa: N818 - becomes an outcome
    """The executor rejected the call: shut down, forked, or at capacity.

    Or the system could not start a thread; the message then says so.
    """


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

    Attributes:
        executor: Has counted it as under way; None if none has.
        quota: Bounds how many jobs of its kind are abandoned.
        result: What its work returned.
        error: What it raised; `CallRejected` if it was never begun, `WorkerExit` for
            what would end a thread.
        begun: Whether its work has begun.
        ended: Whether its work has ended.
        abandoned: Whether no caller waits for its work any more.
        on_abandon: Records that the backend's call was abandoned; see `leave`.
        on_lost: Called after that.
        on_skipped: Called in place of the work, if it was abandoned before it began.
        on_end: Called on the worker's thread at the end; returns what is done once the
            thread is free again.
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
        "lock",
        "on_abandon",
        "on_end",
        "on_lost",
        "on_skipped",
        "quota",
        "result",
        "until_s",
        "watch",
    )

    def __init__(
        self, work: Work, until_s: float = math.inf, *, closes: bool = False
    ) -> None:
        self.until_s = until_s
        self.closes = closes
        self.executor: DeadlineExecutor | None = None
        self.quota: ConcurrencyQuota | None = None
        self.lock = threading.Lock()
        self.done = threading.Lock()
        self.done.acquire()
        self.begun = self.ended = self.abandoned = False
        self.result: Any = None
        self.error: Exception | None = None
        self.on_lost: Callable[[], None] | None = None
        self.on_skipped: Callable[[], None] | None = None
        self.on_end: Callable[[Job], Callable[[], None] | None] | None = None
        self.watch: Callable[[float], None] | None = None
        self.on_abandon: Callable[[bool], None] | None = None
        self._work: Work | None = work
        # The engine's trace context continues on the worker thread.
        self._context = contextvars.copy_context()

    def run(self) -> Callable[[], None] | None:
        """Do the work and keep its result or error; a task of `Workers`."""
        with self.lock:
            work, self._work = self._work, None
            if work is not None and (self.closes or not self.abandoned):
                self.begun = True
                try:
                    self.result = self._context.run(work, self)
                except Abandoned:
                    pass
                except Exception as error:  # noqa: BLE001 - carried to the caller
                    self.error = error
                except BaseException as error:  # noqa: BLE001 - same, but it must not end the thread
                    self.error = WorkerExit(repr(error))
                self.ended = not self.abandoned
            elif self.on_skipped is not None:
                self.on_skipped()
        return self.on_end(self) if self.on_end is not None else None

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
        self.until_s, self.on_abandon = until_s, on_abandon
        if self.watch is not None:
            if on_abandon is not None:  # another thread records it, for this request
                context = contextvars.copy_context()
                self.on_abandon = lambda overran: context.run(on_abandon, overran)
            self.watch(until_s)
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
        self._watch_until_s = -math.inf
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
            result = None
            job.leave(deadline_s)
            try:
                result = call()
            finally:
                if not job.resume():
                    self._run_late(late, result)
            return result

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
            late: Called with the result if the thread that waits is interrupted after
                the work has ended; with None if it is abandoned or interrupted before
                the work has begun.
            closes: Whether it is a step of closing, which is never rejected.

        Returns:
            The job: ended, rejected, or abandoned.

        Raises:
            Abandoned: If a job that was given was abandoned meanwhile.
        """
        if job is not None:
            return self._host(job, work, until_s)
        job = Job(work, until_s, closes=closes)
        if late is not None:
            job.on_skipped = partial(self._run_late, late, None)
        try:
            self._dispatch(job, until_s)
            while not job.done.acquire(
                timeout=min(max(0.0, job.until_s - time.monotonic()), MAX_WAIT_S)
            ):
                if self._abandon_late(job) or (job.ended and job.done.acquire()):
                    break
        except CallRejected as error:
            job.error = error
        except BaseException:  # an interrupt of the waiting thread
            if job.executor is not None and not job.abandoned:
                with job.lock:
                    if not job.ended:
                        self._abandon(job, overran=False)
            if job.executor is None or job.ended:
                self._run_late(late, job.result)
            raise
        return job

    def _host(self, job: Job, work: Work, deadline_s: float) -> Job:
        """Do work that belongs to a job, on its thread."""
        if job.executor is self:
            work(job)
            return job
        job.error = None
        try:
            if self.guard.forked:
                raise CallRejected("this is a forked child")  # noqa: TRY301 - as below
            with self._lock:
                self._admit(deadline_s, closes=False)
                self._begin_watch(job)
                self._busy += 1
                self._running += 1
        except CallRejected as error:
            job.error = error
            return job
        job.executor, job.quota, job.watch = self, self._overrun, self._watch
        try:
            work(job)
        finally:
            job.executor = job.watch = None
            if job.abandoned:
                self._end_late(job)
            with self._lock:
                self._hosted.discard(job)
                self._busy -= not job.abandoned
                last = self._finish_one()
            self._run_final(last)
        return job

    def spawn(self, quota: ConcurrencyQuota, call: Callable[[], Any]) -> bool:
        """Start a task whose result no caller waits for; return whether it was started.

        The quota bounds the tasks of this kind; jobs have a quota of their own.
        """
        if self.guard.forked:
            return False
        job = Job(lambda _: call())
        with self._lock:
            if quota.full or self._closing:
                return False
            quota.taken += 1
            try:
                inbox = self._workers.take()
            except RuntimeError:  # a limit of the system
                quota.release()
                return False
            except BaseException:  # an interrupt
                quota.release()
                raise
            self.abandoned += 1
            self._running += 1
            job.quota = quota
            job.on_end = self._ended
            inbox.put(job.run)
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
            self._running += rest
            steps = self._finish_one() if rest else []
            self._watched.notify_all()
            # With the lock: a thread that was taken has its task by now.
            self._workers.close()
        self._run_final(steps)
        if rest:  # else a thread may never end
            self._workers.join(deadline_s)
        return rest

    def _abandon_late(self, job: Job) -> bool:
        """Abandon a job if its backend is late; return whether it was."""
        # Blocks while its worker prepares memory or records what came of a batch.
        with job.lock:
            under_way = job.executor is self and not job.ended
            late = under_way and time.monotonic() >= job.until_s
            if late:
                self._abandon(job, overran=True)
            return late

    def _abandon(self, job: Job, *, overran: bool) -> None:
        """Abandon a job that is under way; with its lock held."""
        try:
            with self._lock:
                # Plain steps: a signal between two calls finds all of them done, or
                # none.
                job.abandoned = True
                self._overrun.taken += 1
                self._busy -= 1
                self.abandoned += 1
                self._changed.notify()
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

    def _begin_watch(self, job: Job) -> None:
        """Have the deadlines of a hosted job watched; with the lock held."""
        if self._watch_until_s == -math.inf:
            try:
                self._workers.take().put(self._watch_deadlines)
            except RuntimeError as error:  # a limit of the system
                raise CallRejected(str(error)) from error
            self._watch_until_s = math.inf
        self._hosted.add(job)

    def _watch(self, until_s: float) -> None:
        """Wake the watcher if it sleeps beyond a time."""
        # With the lock: the watcher may be about to sleep, with an older time in mind.
        with self._lock:
            if until_s < self._watch_until_s:
                self._watched.notify_all()

    def _watch_deadlines(self) -> None:
        """Abandon the hosted jobs whose backends pass their deadlines."""
        while True:
            with self._lock:
                if self._closed and not self._hosted:
                    self._watch_until_s = -math.inf  # it has ended
                    return
                now = time.monotonic()
                late = [job for job in self._hosted if job.until_s <= now]
                if not late:
                    self._watch_until_s = min(
                        (job.until_s for job in self._hosted), default=math.inf
                    )
                    self._watched.wait(remaining_s(self._watch_until_s))
                self._hosted.difference_update(late)
            # Popped: a list that waits for the next one would keep their memory.
            while late:
                self._settle(late.pop())

    def _settle(self, job: Job) -> None:
        """Abandon a late job beside the deadlines of the others."""

        def settle() -> None:
            try:
                if not self._abandon_late(job) and job.executor is self:
                    with self._lock:  # it came back in time, and goes on
                        self._begin_watch(job)
                        self._watched.notify_all()
            except Exception:
                log.exception("%s: settling a late call failed", self._name)

        try:
            with self._lock:
                self._workers.take().put(settle)
        except RuntimeError:  # a limit of the system
            settle()

    def _dispatch(self, job: Job, deadline_s: float) -> None:
        if os.getpid() != self.guard.pid:
            raise CallRejected("this is a forked child")
        job.on_end = self._ended
        task = job.run
        with self._lock:
            if self._overrun.taken or self._closing or self._busy >= self._at_once:
                self._admit(deadline_s, closes=job.closes)
            try:
                inbox = self._workers.take()
            except RuntimeError as error:  # a limit of the system
                raise CallRejected(str(error)) from error
            # Python looks for signals after a call. There is none from taking
            # the thread to giving it the job, so a signal finds both or neither.
            self._busy += 1
            self._running += 1
            job.executor, job.quota = self, self._overrun
            inbox.put(task)

    def _ended(self, job: Job) -> Callable[[], None] | None:
        """Count the end of a job; return what tells who waits for it."""
        waits = job.executor is self and not job.abandoned
        if not waits:
            self._end_late(job)
        last: Steps = []
        with self._lock:
            self._busy -= waits
            if self._final_steps:
                last = self._finish_one()
            else:
                self._running -= 1
                if self._changed.waiting:
                    self._changed.notify_all()
        if not last:
            return job.done.release if waits else None
        job.done.release()
        self._run_final(last)
        return None

    def _end_late(self, job: Job) -> None:
        """Count an abandoned job or a task as ended, but not yet as run."""
        assert job.quota is not None  # noqa: S101 - of each job that was counted
        with self._lock:
            self.abandoned -= 1
            job.quota.release()
        self._moved()

    def _finish_one(self) -> Steps:
        """Count one job less as running, or return last steps that come before that."""
        if self._running == 1 and self._final_steps:
            last, self._final_steps = self._final_steps, []
            return last
        self._running -= 1
        self._changed.notify_all()
        return []

    def _run_final(self, last: Steps) -> None:
        while last:
            for step in last:
                try:
                    step()
                except BaseException:  # it must not end the thread
                    log.exception("%s: the last step of closing failed", self._name)
            with self._lock:
                last = self._finish_one()

    def _run_late(self, late: OnLateEnd | None, result: object) -> None:
        if late is None:
            return
        try:
            late(result)
        except Exception:
            log.exception("%s: the callback of a late call failed", self._name)

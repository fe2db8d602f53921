"""Run calls on worker threads with a deadline, and survive late ones.

Python cannot stop a thread that sits in a client library. A call that passes
its deadline is abandoned on its thread: the caller goes on, and the memory
that the call may still touch is released only when it really ends. The number
of abandoned calls is bounded; at the bound every call is rejected until one
ends, or until the backend answers a probe although they do not end.

A call of a background task needs no other thread: it runs on the task's own, and
one thread of the executor watches the deadlines of all such calls.
"""

from __future__ import annotations

import contextvars
import logging
import math
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import attrs

from kvdock.synchronization import (
    ProcessGuard,
    QuietCondition,
    new_condition,
    remaining_s,
)

log = logging.getLogger("kvdock")


OnLateEnd = Callable[[Any], None]
"""Called with the result (None if it raised) once an abandoned call ends."""


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

    def acquire(self) -> None:
        """Count one more."""
        self.taken += 1

    def release(self) -> None:
        """Count one less."""
        self.taken -= 1
        self._discounted = min(self._discounted, self.taken)


@attrs.frozen(eq=False)
class RunResult:
    """The end of a call as its caller sees it.

    Args:
        value: What the work returned.
        error: What it raised; or `CallRejected` if it was never started, or
            `WorkerExit` for what would end a thread.
        abandoned: Whether it did not end by its deadline and still runs.
    """

    value: Any = None
    error: Exception | None = None
    abandoned: bool = False


class CallRejected(Exception):  # noqa: N818 - becomes an outcome
    """The executor rejected the call: shut down, forked, or at capacity.

    Or the system could not start a thread; the message then says so.
    """


class WorkerExit(Exception):  # noqa: N818 - becomes an outcome
    """The call raised a BaseException such as SystemExit."""


class TaskAbandoned(BaseException):
    """Unwinds a background task whose call passed its deadline.

    What the task still had to do was done at the deadline, by the thread that
    watches. No handler of errors may take this for one.
    """


class BackgroundThread(threading.Thread):
    """A thread of background tasks, on which calls run where they are.

    Attributes:
        on_abandoned: Called on another thread when a call of the current task has
            passed its deadline: this thread has no use until the call ends.
    """

    on_abandoned: Callable[[], None] = staticmethod(lambda: None)


class _Job:
    """One call, from its dispatch to its end."""

    __slots__ = (
        "abandoned",
        "context",
        "deadline_s",
        "done",
        "error",
        "finished",
        "late",
        "quota",
        "result",
        "settle",
        "started",
        "work",
    )

    def __init__(
        self, work: Callable[[], Any], late: OnLateEnd | None, quota: ConcurrencyQuota
    ) -> None:
        self.work: Callable[[], Any] | None = work
        self.late = late
        self.quota = quota
        self.deadline_s = math.inf
        self.settle: Callable[[], None] = lambda: None
        # The engine's trace context continues on the worker thread.
        self.context = contextvars.copy_context()
        self.done = threading.Lock()
        self.done.acquire()
        self.started = False
        self.finished = False
        self.abandoned = False
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Run the call and keep its result or error."""
        work, self.work = self.work, None
        try:
            self.result = self.context.run(work) if work else None
        except Exception as error:  # noqa: BLE001 - carried to the caller
            self.error = error
        except BaseException as error:  # noqa: BLE001 - same, but it must not end the thread
            self.error = WorkerExit(repr(error))


class DeadlineExecutor:
    """Runs up to `at_once` calls beside up to `overrun` abandoned ones.

    Args:
        name: Begins the names of the threads.
        at_once: Calls that callers wait for.
        overrun: Abandoned calls at which further calls are rejected.
        moved: Called without a lock whenever `abandoned` has changed.
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
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._threads: set[threading.Thread] = set()
        self._overrun = ConcurrencyQuota(overrun)
        self._busy = 0
        self._abandoned = 0
        # Counted until the callbacks of a call have run as well.
        self._running = 0
        self._closing = False
        self._closed = False
        self._final_steps: Steps = []
        # Calls that run on the threads of background tasks, and who watches them.
        self._here: set[_Job] = set()
        self._watched = QuietCondition(self._lock)
        self._watch_until_s = -math.inf
        self.guard = ProcessGuard()

    @property
    def abandoned(self) -> int:
        """Abandoned calls and background tasks that have not ended."""
        return self._abandoned

    @property
    def at_capacity(self) -> bool:
        """Return whether abandoned calls make the executor reject further calls."""
        return self._overrun.full

    @property
    def exhausted(self) -> bool:
        """Return whether it is full until a call ends, whatever else happens."""
        return self._overrun.exhausted

    @property
    def threads(self) -> int:
        """Threads alive, idle ones included."""
        return len(self._threads)

    def run(
        self,
        work: Callable[[], Any],
        deadline_s: float,
        late: OnLateEnd | None = None,
        *,
        settle: Callable[[], None] | None = None,
        closes: bool = False,
    ) -> RunResult:
        """Run `work` on a worker thread and wait for it.

        With `settle`, a background task's call runs on the task's own thread.

        Args:
            work: What to do.
            deadline_s: Until when to wait, on `time.monotonic()`'s clock.
            late: Called on the worker thread when an abandoned call ends; the
                memory that it may touch is safe from then on.
            settle: Does what the task would do about an abandoned call, on
                another thread and before the call ends.
            closes: Whether it is a step of closing, which is never rejected.

        Raises:
            TaskAbandoned: In a background task, once a call has ended that was
                abandoned and settled.
            BaseException: What a handler of signals raises in the thread that
                waits, and nothing else; `late` is called then.
        """
        job = _Job(work, late, self._overrun)
        thread = threading.current_thread()
        if settle is not None and isinstance(thread, BackgroundThread):
            return self._run_here(job, deadline_s, settle, thread)
        try:
            self._dispatch(job, deadline_s, closes=closes)
            done = job.done.acquire(timeout=remaining_s(deadline_s))
            abandoned = not done and self._abandon(job)
        except CallRejected as error:
            return RunResult(error=error)
        except BaseException:  # an interrupt of the waiting thread
            if not job.abandoned and not self._abandon(job):
                self._run_on_late(job)
            raise
        if abandoned:
            return RunResult(abandoned=True)
        return RunResult(job.result, job.error)

    def spawn(self, quota: ConcurrencyQuota, work: Callable[[], Any]) -> bool:
        """Start a task whose result no caller waits for; return whether it was started.

        The quota bounds the tasks of this kind; calls have a quota of their own.
        """
        if self.guard.forked:
            return False
        job = _Job(work, None, quota)
        with self._lock:
            if quota.full or self._closing:
                return False
            quota.acquire()
            try:
                worker = self._idle_worker()
            except CallRejected:
                quota.release()
                return False
            except BaseException:  # an interrupt
                quota.release()
                raise
            self._abandoned += 1
            self._running += 1
            job.finished = True
            worker.put(job)
        self._moved()
        return True

    def discount_abandoned(self, *quotas: ConcurrencyQuota) -> None:
        """Discount abandoned calls after the backend has answered a probe.

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
            idle, self._idle = self._idle, []
            self._watched.notify_all()
            # A running call may never end: join only idle threads.
            leaving = list(self._threads) if rest else []
        for worker in idle:
            worker.put(None)
        self._run_final(steps)
        for thread in leaving:
            thread.join(remaining_s(deadline_s))
        return rest

    def _abandon(self, job: _Job) -> bool:
        """Count a call as abandoned, unless it is not under way."""
        with self._lock:
            if job.finished or not job.started:
                return False
            job.quota.acquire()
            job.finished = job.abandoned = True
            self._busy -= 1
            self._abandoned += 1
            self._changed.notify()
        self._moved()
        return True

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

    def _run_here(
        self,
        job: _Job,
        deadline_s: float,
        settle: Callable[[], None],
        thread: BackgroundThread,
    ) -> RunResult:
        """Run a call on the thread of its background task."""
        if self.guard.forked:
            return RunResult(error=CallRejected("this is a forked child"))

        def settled() -> None:
            try:
                settle()
            finally:
                thread.on_abandoned()

        job.deadline_s, job.settle, job.started = deadline_s, settled, True
        try:
            with self._lock:
                self._admit(deadline_s, closes=False)
                self._watch(job)
                self._busy += 1
                self._running += 1
        except CallRejected as error:
            return RunResult(error=error)
        job.run()
        with self._lock:
            self._here.discard(job)
            late, job.finished = job.finished, True
            self._busy -= not late
            last = [] if late else self._finish_one()
        if not late:
            self._run_final(last)
            return RunResult(job.result, job.error)
        self._end_late(job)
        with self._lock:
            last = self._finish_one()
        self._run_final(last)
        raise TaskAbandoned

    def _watch(self, job: _Job) -> None:
        """Have the deadline of a call watched; with the lock held."""
        if self._watch_until_s == -math.inf:
            watcher = threading.Thread(
                target=self._watch_deadlines, name=f"{self._name}-watch", daemon=True
            )
            try:
                watcher.start()
            except RuntimeError as error:  # a limit of the system
                raise CallRejected(str(error)) from error
            self._threads.add(watcher)
            self._watch_until_s = math.inf
        self._here.add(job)
        # A watcher that sleeps until an earlier time looks again then.
        if job.deadline_s < self._watch_until_s:
            self._watched.notify_all()

    def _watch_deadlines(self) -> None:
        """Abandon the calls on other threads that pass their deadlines."""
        while True:
            with self._lock:
                if self._closed and not self._here:
                    self._threads.discard(threading.current_thread())
                    return
                now = time.monotonic()
                late = [one for one in self._here if one.deadline_s <= now]
                if not late:
                    self._watch_until_s = min(
                        (job.deadline_s for job in self._here), default=math.inf
                    )
                    self._watched.wait(remaining_s(self._watch_until_s))
                self._here.difference_update(late)
            # Popped: a list that waits for the next one would keep their memory.
            while late:
                self._settle_late(late.pop())

    def _settle_late(self, job: _Job) -> None:
        """Abandon a call and settle it, beside the deadlines of the others."""
        if not self._abandon(job):
            return

        def settle() -> None:
            try:
                job.settle()
            except Exception:
                log.exception("%s: settling a late call failed", self._name)

        try:
            threading.Thread(
                target=settle, name=f"{self._name}-settle", daemon=True
            ).start()
        except RuntimeError:  # a limit of the system
            settle()

    def _dispatch(self, job: _Job, deadline_s: float, *, closes: bool) -> None:
        if self.guard.forked:
            raise CallRejected("this is a forked child")
        with self._lock:
            self._admit(deadline_s, closes=closes)
            worker = self._idle_worker()
            # Python looks for signals after a call. There is none from taking
            # the thread to giving it the job, so a signal finds both or neither.
            self._busy += 1
            self._running += 1
            job.started = True
            worker.put(job)

    def _idle_worker(self) -> SimpleQueue[_Job | None]:
        """Return the inbox of an idle thread, or of a new one."""
        if self._idle:
            # The most recent worker: its memory is still in the caches.
            worker = self._idle[-1]
            del self._idle[-1]
            return worker
        inbox: SimpleQueue[_Job | None] = SimpleQueue()
        # A daemon, so that a call that never ends does not keep the process.
        thread = threading.Thread(
            target=self._work,
            args=(inbox,),
            name=f"{self._name}-{len(self._threads)}",
            daemon=True,
        )
        try:
            thread.start()
            self._threads.add(thread)
        except RuntimeError as error:  # a limit of the system
            raise CallRejected(str(error)) from error
        except BaseException:  # an interrupt: the thread will get no job
            inbox.put(None)
            raise
        return inbox

    def _work(self, inbox: SimpleQueue[_Job | None]) -> None:
        staying = True
        while staying:
            job = inbox.get()
            if job is None:
                break
            job.run()
            staying = self._ended(job, inbox)
            del job  # an idle thread must not keep memory alive
        with self._lock:
            self._threads.discard(threading.current_thread())

    def _ended(self, job: _Job, inbox: SimpleQueue[_Job | None]) -> bool:
        """Finish a job; return whether its thread stays."""
        with self._lock:
            late, job.finished = job.finished, True
            if not late:
                self._busy -= 1
                staying, last = self._return_worker(inbox)
        if late:
            self._end_late(job)
            with self._lock:
                staying, last = self._return_worker(inbox)
        else:
            job.done.release()
        self._run_final(last)
        return staying

    def _end_late(self, job: _Job) -> None:
        """Finish an abandoned call, but for counting it as running."""
        # Run the owner's callback before this executor reports idle: a
        # caller of `wait_idle` then finds the memory released.
        self._run_on_late(job)
        with self._lock:
            self._abandoned -= 1
            job.quota.release()
        self._moved()

    def _return_worker(self, inbox: SimpleQueue[_Job | None]) -> tuple[bool, Steps]:
        """Keep or end a thread, and count one job less; with the lock held."""
        staying = not self._closed and len(self._idle) < self._at_once
        if staying:
            self._idle.append(inbox)
        return staying, self._finish_one()

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

    def _run_on_late(self, job: _Job) -> None:
        if job.late is None:
            return
        try:
            job.late(job.result)
        except Exception:
            log.exception("%s: the callback of a late call failed", self._name)

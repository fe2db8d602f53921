"""Worker threads that make calls with a deadline, and survive late ones.

Python cannot stop a thread that sits in a client library. So a call that
overruns is left behind on its thread: whoever waited goes on, and what the
call may still touch is let go only when it really ends. How many calls may be
left behind is bounded; at the bound nothing more is started.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from kvdock.sessions.waits import seconds_until

log = logging.getLogger("kvdock")

Late = Callable[[Any], None]
"""Called with the result (None if it raised) once a call left behind ends."""


class Overrun(Exception):  # noqa: N818 - leaves a crew, becomes an outcome
    """The call did not end by its deadline and was left behind."""


class NoHands(Exception):  # noqa: N818 - leaves a crew, becomes an outcome
    """The call was not started: closed, forked, too much under way.

    Or no thread could be started, which the message then says.
    """


class Crashed(Exception):  # noqa: N818 - leaves a crew, becomes an outcome
    """The work raised what would end a thread, such as SystemExit."""


class _Job:
    """One call, from the hand-over to its end."""

    __slots__ = (
        "begun",
        "context",
        "done",
        "ended",
        "error",
        "late",
        "result",
        "work",
    )

    def __init__(self, work: Callable[[], Any], late: Late | None) -> None:
        self.work: Callable[[], Any] | None = work
        self.late = late
        # The engine's trace goes on in the thread that does the work.
        self.context = contextvars.copy_context()
        self.done = threading.Lock()
        self.done.acquire()
        self.begun = False
        self.ended = False
        self.result: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        """Do the work and keep what came of it."""
        work, self.work = self.work, None
        try:
            self.result = self.context.run(work) if work else None
        except Exception as error:  # noqa: BLE001 - carried to the caller
            self.error = error
        except BaseException as error:  # noqa: BLE001 - same, but it must not end him
            self.error = Crashed(repr(error))


class Crew:
    """Up to `at_once` calls under way, and up to `overrun` left behind.

    Args:
        name: Whose calls these are; begins the threads' names.
        at_once: Calls that somebody waits for.
        overrun: Calls left behind until nothing more is started.
    """

    def __init__(self, name: str, at_once: int, overrun: int) -> None:
        self._name = name
        self._at_once = at_once
        self._overrun = overrun
        self._room = threading.Condition(threading.Lock())
        self._idle: list[SimpleQueue[_Job | None]] = []
        self._threads: set[threading.Thread] = set()
        self._busy = 0
        self._behind = 0
        self._closed = False
        self._at_rest: list[Callable[[], None]] = []
        self._pid = os.getpid()

    @property
    def behind(self) -> int:
        """Calls left behind that have not ended."""
        return self._behind

    @property
    def full(self) -> bool:
        """Whether so many calls are left behind that no more are started."""
        return self._behind >= self._overrun

    @property
    def threads(self) -> int:
        """Threads alive, idle ones included."""
        return len(self._threads)

    def call(
        self, work: Callable[[], Any], deadline_s: float, late: Late | None = None
    ) -> Any:  # noqa: ANN401 - whatever the work returns
        """Run `work` on a thread of the crew and wait for it.

        Args:
            work: What to do.
            deadline_s: Until when to wait, on `time.monotonic()`'s clock.
            late: Called on the crew's thread when a call that was left behind
                ends; what the call may touch is safe from then on.

        Raises:
            Overrun: If it was left behind.
            NoHands: If it was never started.
            Exception: Whatever the work raised, or a handler of signals in
                the thread that waits; after the latter `late` is called.
        """
        job = _Job(work, late)
        try:
            self._hand_over(job, deadline_s)
            done = job.done.acquire(timeout=seconds_until(deadline_s))
        except NoHands:
            raise
        except BaseException:  # an interrupt of the waiting thread
            if not self._leave_behind(job):
                self._run_late(job)
            raise
        if not done and self._leave_behind(job):
            raise Overrun
        if job.error is not None:
            raise job.error
        return job.result

    def leave(self, work: Callable[[], Any]) -> bool:
        """Start `work` without waiting; return whether it was started.

        It counts as left behind from the beginning, so errands can never use
        up what calls need: half of that room at most is theirs.
        """
        job = _Job(work, None)
        with self._room:
            if self._unfit() or self._behind >= max(1, self._overrun // 2):
                return False
            try:
                hand = self._hand()
            except NoHands:
                return False
            self._behind += 1
            job.ended = True
        hand.put(job)
        return True

    def drain(self, deadline_s: float) -> bool:
        """Wait until no call is under way; return whether that came true.

        Calls left behind count as well.
        """
        with self._room:
            return self._room.wait_for(
                lambda: not self._busy and not self._behind,
                seconds_until(deadline_s),
            )

    def finish(self, deadline_s: float, last: Callable[[], None]) -> bool:
        """Close: start nothing new, wait, and do something last.

        Args:
            deadline_s: Until when to wait for calls under way.
            last: Done here if all calls have ended, otherwise on the thread
                of the call that ends last.

        Returns:
            Whether everything has ended.
        """
        with self._room:
            self._closed = True
            self._room.notify_all()
        rest = self.drain(deadline_s)
        with self._room:
            if not rest and (self._busy or self._behind):
                self._at_rest.append(last)
            else:
                rest = True
            idle, self._idle = self._idle, []
            # Who still works may be for ever; only the idle are waited for.
            leaving = list(self._threads) if rest else []
        for hand in idle:
            hand.put(None)
        if rest:
            last()
        for thread in leaving:
            thread.join(seconds_until(deadline_s))
        return rest

    def _leave_behind(self, job: _Job) -> bool:
        """Book a call as left behind, unless it is not under way."""
        with self._room:
            if job.ended or not job.begun:
                return False
            job.ended = True
            self._busy -= 1
            self._behind += 1
            self._room.notify()
            return True

    def _unfit(self) -> bool:
        # A forked child has the crew's books but none of its threads.
        return self._closed or self.full or os.getpid() != self._pid

    def _hand_over(self, job: _Job, deadline_s: float) -> None:
        with self._room:
            if self._busy >= self._at_once:
                self._room.wait_for(
                    lambda: self._unfit() or self._busy < self._at_once,
                    seconds_until(deadline_s),
                )
            if self._unfit() or self._busy >= self._at_once:
                raise NoHands
            hand = self._hand()
            self._busy += 1
            job.begun = True
        hand.put(job)

    def _hand(self) -> SimpleQueue[_Job | None]:
        """Return the inbox of an idle thread, or of a new one."""
        if self._idle:
            # The last one that worked: its memory is still in the caches.
            return self._idle.pop()
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
        except RuntimeError as error:  # a limit of the system
            raise NoHands(str(error)) from error
        self._threads.add(thread)
        return inbox

    def _work(self, inbox: SimpleQueue[_Job | None]) -> None:
        staying = True
        while staying:
            job = inbox.get()
            if job is None:
                break
            job.run()
            staying = self._ended(job, inbox)
            del job  # an idle thread keeps nobody's memory alive
        with self._room:
            self._threads.discard(threading.current_thread())

    def _ended(self, job: _Job, inbox: SimpleQueue[_Job | None]) -> bool:
        """Book a job out; return whether its thread stays."""
        with self._room:
            late, job.ended = job.ended, True
            if not late:
                self._busy -= 1
        if late:
            # First the books of those who own the memory, then ours: who
            # waits for the crew to come to rest finds everything let go.
            self._run_late(job)
        with self._room:
            if late:
                self._behind -= 1
            last: list[Callable[[], None]] = []
            if not self._busy and not self._behind:
                last, self._at_rest = self._at_rest, []
            staying = not self._closed and len(self._idle) < self._at_once
            if staying:
                self._idle.append(inbox)
            self._room.notify_all()
        if not late:
            job.done.release()
        for step in last:
            step()
        return staying

    def _run_late(self, job: _Job) -> None:
        if job.late is None:
            return
        try:
            job.late(job.result)
        except Exception:
            log.exception("%s: what follows a late call failed", self._name)

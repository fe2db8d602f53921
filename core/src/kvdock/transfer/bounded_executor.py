"""Background workers with a bounded queue, one lane for each direction."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable

import attrs

from kvdock.transfer.result import Moved
from kvdock.transfer.futures import (Ticket, TicketState)
from kvdock.synchronization import (lock_and_condition, seconds_until)

log = logging.getLogger("kvdock")


Work = Callable[[Ticket], Moved | None]


@attrs.frozen(eq=False)
class _Load:
    """One transfer in the queue, and what follows it."""

    ticket: Ticket
    work: Work
    after: Callable[[], None]


class Lane:
    """Transfers of one direction, first come, first served.

    Args:
        name: Begins the workers' thread names.
        workers: Transfers at once.
        queue: Transfers that may wait; the next one is refused.
    """

    def __init__(self, name: str, workers: int, queue: int) -> None:
        self._name = name
        self._workers = workers
        self._queue = queue
        self._lock, self._changed = lock_and_condition()
        self._waiting: deque[_Load] = deque()
        self._running: dict[Ticket, threading.Thread] = {}
        self._threads: set[threading.Thread] = set()
        self._closed = False
        self._pid = os.getpid()

    @property
    def waiting(self) -> int:
        """Transfers in the queue."""
        return len(self._waiting)

    @property
    def _forked(self) -> bool:
        # A forked child has the queue and none of the workers, and one of them
        # may have taken the lock for ever.
        return os.getpid() != self._pid

    def submit(self, ticket: Ticket, work: Work, after: Callable[[], None]) -> bool:
        """Queue a transfer; return False, at once, if there is no room.

        Args:
            ticket: Its ticket.
            work: What to do, on a worker.
            after: Done when it is over, whether it ran or not.
        """
        if self._forked:
            return False
        with self._lock:
            if self._closed or len(self._waiting) >= self._queue:
                return False
            if len(self._threads) < self._workers:
                self._hire()
            if not self._threads:
                return False
            self._waiting.append(_Load(ticket, work, after))
            self._changed.notify_all()
        return True

    def _hire(self) -> None:
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
        """Wait until nothing waits or runs; return whether that came true.

        What follows a transfer's end may ask too: it does not wait for itself.
        """
        if self._forked:
            return True
        mine = threading.current_thread()

        def drained() -> bool:
            return not self._waiting and not set(self._running.values()) - {mine}

        with self._lock:
            if self._threads == {mine}:
                return drained()  # nobody else is there to work
            return self._changed.wait_for(drained, seconds_until(deadline_s))

    def close(self) -> None:
        """Take nothing more, cancel what waits, stop what runs."""
        if self._forked:
            return
        with self._lock:
            self._closed = True
            dropped, self._waiting = list(self._waiting), deque()
            for ticket in self._running:
                ticket.cancel()
            self._changed.notify_all()
        for load in dropped:
            load.ticket.cancel()
            self._finish(load, None, TicketState.CANCELLED)

    def join(self, deadline_s: float) -> bool:
        """Wait for the workers of a closed lane; return whether they ended.

        One that asks itself ends when it is through.
        """
        others = [one for one in self._threads if one is not threading.current_thread()]
        for thread in others:
            thread.join(seconds_until(deadline_s))
        return not any(thread.is_alive() for thread in others)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                load = self._waiting.popleft()
                self._running[load.ticket] = threading.current_thread()
            result, state = None, TicketState.DONE
            try:
                if load.ticket.begin():
                    result = load.work(load.ticket)
            except Exception:
                # A closed attachment, or a defect of ours.
                log.exception("a transfer in the background failed")
                state = TicketState.FAILED
            self._finish(load, result, state)
            with self._lock:
                del self._running[load.ticket]
                self._changed.notify_all()
            del load  # an idle worker keeps nobody's memory alive

    def _finish(self, load: _Load, result: Moved | None, state: TicketState) -> None:
        load.after()
        load.ticket.end(result, state)

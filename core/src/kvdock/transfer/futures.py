"""What an engine holds while pages move in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

from kvdock.config.core import (StopPolicy, TransferSettings)
from kvdock.synchronization import LONGEST_S

if TYPE_CHECKING:
    from kvdock.transfer.result import Moved

log = logging.getLogger("kvdock")


_TOKENS = 1024
"""Tokens that `stop_growth` is counted for."""


class TicketState(StrEnum):
    """How far a transfer is."""

    WAITING = "waiting"
    """In the queue."""
    RUNNING = "running"
    """Pages are being moved."""
    DONE = "done"
    """Every pool is done, or the transfer was stopped: there is a result."""
    CANCELLED = "cancelled"
    """Nobody wants the result any more."""
    REFUSED = "refused"
    """The queue is full, or the session closed or another process's."""
    FAILED = "failed"
    """The attachment was closed under it; the log says more."""


class Ticket:
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
        ended: Callable[[Ticket], None] | None = None,
    ) -> None:
        self.pages = pages
        self._policy = settings.stop
        self._patience_s = settings.stop_base + settings.stop_growth * tokens / _TOKENS
        self._ended = ended
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._began_s = time.monotonic()
        self._state = TicketState.WAITING
        self._stopping = False
        self._moved_pages = 0
        self._result: Moved | None = None

    @property
    def state(self) -> TicketState:
        """How far it is."""
        return self._state

    @property
    def done(self) -> bool:
        """Whether nothing of it is going on any more."""
        return self._over.is_set()

    @property
    def moved_pages(self) -> int:
        """Pages of the prefix that are through, trailing windows aside."""
        return self._moved_pages

    @property
    def stopping(self) -> bool:
        """Whether it ends before its next batch."""
        return self._stopping

    @property
    def cancelled(self) -> bool:
        """Whether nobody wants the result any more."""
        return self._state is TicketState.CANCELLED

    @property
    def result(self) -> Moved | None:
        """What was moved; None until it is done, and if it was cancelled."""
        return self._result

    def ready(self) -> bool:
        """Return whether the engine should wait no longer, by its policy.

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
        """End after the batch under way; nobody wants the result.

        Pages of that batch stay leased until it ends.
        """
        self._stopping = True
        with self._lock:
            if not self._over.is_set():
                self._state = TicketState.CANCELLED

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until it is over; return whether it is."""
        return self._over.wait(None if timeout_s is None else min(timeout_s, LONGEST_S))

    def begin(self) -> bool:
        """Start moving; return False if nobody wants it any more."""
        with self._lock:
            if self._state is not TicketState.WAITING:
                return False
            self._state = TicketState.RUNNING
            return True

    def advance(self, pages: int) -> None:
        """Report progress."""
        self._moved_pages = pages

    def end(self, result: Moved | None, state: TicketState) -> None:
        """Be over, with a result or without."""
        with self._lock:
            if self._over.is_set():
                return
            if self._state is not TicketState.CANCELLED:
                self._state = state
                self._result = result
            self._over.set()
        if self._ended is not None:
            try:
                self._ended(self)
            except Exception:
                log.exception("what follows the end of a transfer failed")

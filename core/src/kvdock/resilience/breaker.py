"""Circuit breaker: reject calls to a backend that fails, until a probe succeeds.

An engine never pays for finding out whether a backend is back: when the
backoff has passed, a probe runs in the background. After it succeeded, the
breaker allows one trial call, and after that call succeeded, all calls.

A probe that hangs is followed by others, each after twice the time: their
number stays small however long an outage lasts, and the backend is back in
use after at most as long again.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvdock.config.core import BreakerSettings

_DOUBLED_MOST = 32
"""Times that a wait is doubled: more than any process lives."""

Clock = Callable[[], float]


class BreakerState(StrEnum):
    """The states of a circuit breaker."""

    CLOSED = "closed"
    """All of them do."""
    OPEN = "open"
    """None does; every key is unavailable at once."""
    HALF_OPEN = "half-open"
    """One at a time, on trial."""


class CircuitBreaker:
    """The state of one operation of one backend.

    Attributes:
        state: The current state; only the breaker sets it.
        quiet: Whether it is closed and no call has failed since one was answered: then
            a call and its success need not be told to it.

    Args:
        moved: Called with each new state, without a lock held.
        jitter: A factor for each backoff, so that ranks that lost the same
            server do not all come back to it at once.
    """

    def __init__(
        self,
        settings: BreakerSettings,
        moved: Callable[[BreakerState], None] = lambda _: None,
        clock: Clock = time.monotonic,
        jitter: Callable[[], float] = lambda: random.uniform(0.8, 1.2),  # noqa: S311 - spreads load, guards nothing
    ) -> None:
        self._settings = settings
        self._moved = moved
        self._clock = clock
        self._jitter = jitter
        self._lock = threading.Lock()
        self.state = BreakerState.CLOSED
        self.quiet = True
        self._failures = 0
        self._overruns = 0
        self._backoff_s = settings.backoff
        self._unanswered = 0
        self._retry_at = 0.0
        self._trying = False

    def allows_call(self) -> bool:
        """Return whether a call may start; its end must then be recorded."""
        # Closed is the usual case and needs no lock.
        if self.state is BreakerState.CLOSED:
            return True
        with self._lock:
            return self._allows_now()

    def _allows_now(self) -> bool:
        # It may have closed since the first look.
        trial = self.state is BreakerState.HALF_OPEN and not self._trying
        self._trying = self._trying or trial
        return trial or self.state is BreakerState.CLOSED

    def probe_due(self) -> bool:
        """Return, once for each backoff, whether a probe is due."""
        if self.state is BreakerState.CLOSED:
            return False
        with self._lock:
            return self._probe_due()

    def _probe_due(self) -> bool:
        due = self.state is BreakerState.OPEN and self._clock() >= self._retry_at
        if due:
            # It may hang for ever, as may all that follow until one ends. The
            # longest backoff does not bound these: each costs a thread.
            self._unanswered = min(self._unanswered + 1, _DOUBLED_MOST)
            self._wait(self._backoff_s * 2**self._unanswered)
        return due

    def record_probe(self, *, alive: bool) -> None:
        """Report how a probe ended, in time."""
        with self._lock:
            self._unanswered = 0
            if self.state is not BreakerState.OPEN:
                return
            if alive:
                self.state = BreakerState.HALF_OPEN
            else:
                self._back_off()
        if alive:
            self._moved(BreakerState.HALF_OPEN)

    def on_late_end(self) -> None:
        """Bring the next probe forward: a call that hung has ended."""
        if self.state is BreakerState.CLOSED:
            return
        with self._lock:
            retry_at = self._retry_at
            self._wait(self._settings.backoff)
            self._retry_at = min(self._retry_at, retry_at)

    def trip(self) -> None:
        """Open the breaker for a reason other than its own calls."""
        with self._lock:
            opening = self.state is not BreakerState.OPEN
            if opening:
                self._open()
        if opening:
            self._moved(BreakerState.OPEN)

    def record_success(self) -> None:
        """Report a call that was answered."""
        if self.quiet:
            return
        with self._lock:
            self._failures = self._overruns = 0
            closing = self.state is BreakerState.HALF_OPEN
            if closing:
                self.state = BreakerState.CLOSED
                self._trying = False
                self._backoff_s = self._settings.backoff
            self.quiet = self.state is BreakerState.CLOSED
        if closing:
            self._moved(BreakerState.CLOSED)

    def record_failure(self, *, overran: bool = False) -> None:
        """Report a call that raised, broke the contract, or came too late."""
        with self._lock:
            self.quiet = False
            self._failures += 1
            self._overruns += overran
            opening = self.state is BreakerState.HALF_OPEN or (
                self.state is BreakerState.CLOSED
                and (
                    self._failures >= self._settings.failures
                    or self._overruns >= self._settings.abandoned_calls
                )
            )
            if opening:
                self._open()
        if opening:
            self._moved(BreakerState.OPEN)

    def record_ignored(self) -> None:
        """Report a call that says nothing about the backend's health."""
        if self.state is not BreakerState.CLOSED:
            with self._lock:
                self._trying = False

    def _open(self) -> None:
        again = self.state is BreakerState.HALF_OPEN
        self.quiet = False
        self.state = BreakerState.OPEN
        self._failures = self._overruns = 0
        self._trying = False
        if again:
            self._back_off()
        else:
            self._wait(self._backoff_s)

    def _back_off(self) -> None:
        self._backoff_s = min(self._backoff_s * 2, self._settings.max_backoff)
        self._wait(self._backoff_s)

    def _wait(self, seconds: float) -> None:
        self._retry_at = self._clock() + seconds * self._jitter()

"""The future of one request that is sent to one peer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from kvdock.batch import Outcome
from kvdock.errors import KvdockError
from kvdock.peers.messages import Completion
from kvdock.resilience.background_executor import DeadlineFuture
from kvdock.synchronization import MAX_WAIT_S, new_condition, remaining_s

if TYPE_CHECKING:
    from kvdock.arrays import OutcomeArray, UInt64Array
    from kvdock.peers.keys import MessageKeys
    from kvdock.peers.messages import Ticket
    from kvdock.transfer.leases import Lease


class SendFuture(DeadlineFuture):
    """One request that is sent to one peer.

    It has ended by its deadline. `quiet` may come later: only then can no byte of
    it land any more, and only then are its pages free for other use. Both are
    reported to the receiver by a completion.

    Args:
        deadline_s: On `time.monotonic()`'s clock.
    """

    def __init__(
        self,
        ticket: Ticket,
        pools: tuple[str, ...],
        deadline_s: float,
        keys: MessageKeys | None = None,
    ) -> None:
        lock, self._changed = new_condition()
        super().__init__(deadline_s, lock)
        self.ticket = ticket
        self._keys = keys
        self.pools = pools
        self._aborted = False
        # Calls that may still read pages here and write there; the run is one.
        self._touching = 1
        self._quiet = False
        self._leases: list[Lease] = []
        self._digests: dict[str, UInt64Array] = {}

    def __len__(self) -> int:
        """Return the number of pools."""
        return len(self.pools)

    @property
    def quiet(self) -> bool:
        """Return whether it has ended and no byte of it can land any more."""
        return self.ended and self._quiet

    @property
    def aborted(self) -> bool:
        """Return whether it was aborted before it had ended."""
        return self._aborted

    @property
    def outcomes(self) -> Mapping[str, Outcome]:
        """Return what became of each pool: the worst outcome of its rows.

        Raises:
            KvdockError: If it has not ended.
        """
        if not self.ended or self._outcomes is None:
            raise KvdockError(
                f"request {self.ticket.request!r} is still being sent",
                fix="Wait until `ended`.",
            )
        found = map(Outcome, self._outcomes.tolist())
        return dict(zip(self.pools, found, strict=True))

    @property
    def ok(self) -> bool:
        """Return whether it has ended with every pool whole at the peer."""
        return self.ended and not any(self.outcomes.values())

    def completion(self) -> Completion:
        """Return what the receiver must know, now.

        Sent when it has ended, and again when it is quiet if it was not yet.

        Raises:
            KvdockError: If it has not ended.
        """
        # Before the outcomes: what ends in between is reported by the next one.
        quiet = self.quiet
        return Completion(
            request=self.ticket.request,
            sender=self.ticket.sender,
            ended=quiet,
            outcomes=self.outcomes,
            digests=dict(self._digests),
            keys=self._keys,
        )

    def abort(self) -> None:
        """Begin no further batch; safe at any moment.

        A batch under way goes on to its end, as it cannot be taken back: the slots
        of the peer are in use until `quiet`.
        """
        with self._lock:
            self._aborted = self._aborted or self._outcomes is None
            running = self._running
        if not running:
            self.reject(Outcome.REFUSED)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; return whether it has."""
        return self._wait_ended(time.monotonic() + min(timeout_s, MAX_WAIT_S))

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no byte of it can land any more; return whether that is so."""
        end_s = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        if not self.wait(timeout_s):
            return False
        self._wait_for(lambda: self._quiet, end_s)
        return self.quiet

    def _wait_until(self, until_s: float) -> None:
        self._wait_for(lambda: self._outcomes is not None, until_s)

    def _wait_for(self, done: Callable[[], bool], until_s: float) -> None:
        with self._lock:
            self._changed.wait_for(done, remaining_s(until_s))

    def finish(self, outcomes: OutcomeArray) -> None:
        """End the run with an outcome for each pool."""
        self._leave(outcomes)

    def reject(self, outcome: Outcome) -> None:
        """End with one outcome for every pool, unless it runs."""
        with self._lock:
            if self._running or self._outcomes is not None:
                return
            # Nothing was leased, and no call was made.
            self._outcomes = np.full(len(self), outcome, np.uint8)
            self._touching = 0
            self._become_quiet()

    def _leave(self, outcomes: OutcomeArray | None) -> None:
        """End a call or the run; the outcomes are seen with what they mean.

        A run that leaves nothing behind is quiet in the moment in which its
        outcomes can be seen: a completion of them says so.
        """
        with self._lock:
            self._touching -= 1
            if self._touching:
                if outcomes is not None:
                    self._outcomes = outcomes
                    self._changed.notify_all()
                return
        # Before it is quiet: its pages are free as soon as that is seen.
        for lease in self._leases:
            lease.end()
        with self._lock:
            if outcomes is not None:
                self._outcomes = outcomes
            self._become_quiet()

    def _become_quiet(self) -> None:
        self._quiet = True
        self._changed.notify_all()


class RunningSend(SendFuture):
    """A request as the calls that send it see it."""

    def hold(self, lease: Lease) -> None:
        """Keep pages until it is quiet."""
        self._leases.append(lease)

    def add_digests(self, pool: str, digests: UInt64Array) -> None:
        """Keep the digests of a pool's pages for the completion."""
        self._digests[pool] = digests

    def enter(self) -> None:
        """Count a call that may touch memory on both sides, until `leave`."""
        with self._lock:
            self._touching += 1

    def leave(self) -> None:
        """End one call; the last one frees the pages."""
        self._leave(None)

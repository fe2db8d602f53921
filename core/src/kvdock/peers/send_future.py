"""The future of one request that is sent to one peer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvdock.batch import Outcome
from kvdock.errors import KvdockError
from kvdock.peers.messages import Completion
from kvdock.resilience.background_executor import DeadlineFuture
from kvdock.synchronization import MAX_WAIT_S, held_lock, wait_for_release

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
        super().__init__(len(pools), deadline_s)
        self.ticket = ticket
        self._keys = keys
        self.pools = pools
        self._aborted = False
        # Calls that may still read pages here and write there; the run is one.
        self._touching = 1
        self._quiet = False
        self._silent = held_lock()
        self._leases: list[Lease] = []
        self._digests: dict[str, UInt64Array] = {}

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
        self.reject(Outcome.REFUSED)

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended; return whether it has."""
        return self._wait_ended(time.monotonic() + min(timeout_s, MAX_WAIT_S))

    def wait_quiet(self, timeout_s: float) -> bool:
        """Wait until no byte of it can land any more; return whether that is so."""
        end_s = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        if not self.wait(timeout_s):
            return False
        wait_for_release(self._silent, end_s)
        return self.quiet

    def _end(self, outcomes: OutcomeArray) -> None:
        """End the run; the outcomes are seen with what they mean.

        A run that leaves nothing behind is quiet in the moment in which its
        outcomes can be seen: a completion of them says so.
        """
        self._leave()
        super()._end(outcomes)

    def _leave(self) -> None:
        """End a call or the run; with the lock held."""
        self._touching -= 1
        if not self._touching:
            # Before it is quiet: its pages are free as soon as that is seen.
            for lease in self._leases:
                lease.end()
            self._quiet = True
            self._silent.release()


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
        with self._lock:
            self._leave()

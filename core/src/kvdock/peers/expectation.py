"""One request that peers send to this process, and the slots that it holds.

Slots are free once no byte can land in them any more, and not before: after the
completion of every sender, a moment after the failure or death of one, or once the
endpoint is closed where the transport guarantees that nothing arrives after that.
Memory that is deregistered is not such a fence, a lost connection is not a death.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Outcome
from kvdock.errors import KvdockError
from kvdock.geometry.matching import coalesce, match, move
from kvdock.peers.digests import landed_digests
from kvdock.synchronization import MAX_WAIT_S, new_condition, remaining_s

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, UInt64Array
    from kvdock.geometry.grid import Grid
    from kvdock.peers.landing import LandingSpan
    from kvdock.peers.messages import Completion
    from kvdock.peers.pool import PeerPool
    from kvdock.transfer.leases import Lease


_NOTHING_UNDER_WAY = frozenset({Outcome.OK, Outcome.ABSENT, Outcome.REFUSED})
"""What a pool ends with of which no row can be on its way any more: it is whole, or
was not sent. After anything else, rows may lie in this process's sockets."""


class RequestState(StrEnum):
    """The state of a request at its receiver."""

    PENDING = "pending"
    """Bytes are expected."""
    ARRIVED = "arrived"
    """Every required pool is whole and verified in its slots."""
    FAILED = "failed"
    """A sender failed, was lost or came too late; the reason says which."""
    CORRUPT = "corrupt"
    """The bytes of a required pool are not those that were sent."""
    ABORTED = "aborted"
    """The engine does not want it any more."""


class PeerState(StrEnum):
    """The state of a process whose connection was lost."""

    DEAD = "dead"
    """The process has ended: what it had sent is all that can still land."""
    UNKNOWN = "unknown"
    """It may live and go on writing; its slots stay held."""


@attrs.frozen(eq=False)
class ExpectedPart:
    """The rows of one pool that one sender sends.

    Args:
        slots: int64 (n,), as in the ticket's view of the pool's own grid.
        positions: Pages of the sender.
        nbytes: Bytes that it writes into slots.
        verify: Whether digests of its pages are compared.
        landing: Where whole pages land first, with its grid; or None.
    """

    pool: PeerPool
    theirs: Grid
    slots: Int64Array = attrs.field(repr=False)
    positions: int
    nbytes: int
    verify: bool
    landing: tuple[LandingSpan, Grid] | None = None

    def arrive(self, completion: Completion) -> bool:
        """Verify what came and copy it to its slots; return whether it was whole."""
        sent = completion.digests.get(self.pool.name)
        if self.verify and (sent is None or not self._verified(sent)):
            return False
        if self.landing is not None:
            _, grid = self.landing
            numbers = np.arange(self.positions)
            move(coalesce(match(grid, self.pool.grid, numbers, self.slots)))
        return True

    def _verified(self, sent: UInt64Array) -> bool:
        if self.landing is None:
            found = self.pool.digests.arrived(
                self.theirs, self.pool.grid, self.positions, self.slots
            )
        else:
            span, grid = self.landing
            found = landed_digests(span.memory, grid.page_bytes)
        return bool(np.array_equal(found, sent))


@attrs.define(eq=False)
class _SenderPart:
    """One sender of a request.

    Args:
        parts: Pool name to what it sends.
        over: Whether no byte of it can land any more.
        arrived: The pools that are whole, once it has completed.
    """

    parts: Mapping[str, ExpectedPart]
    over: bool = False
    completed: bool = False
    arrived: frozenset[str] = frozenset()


class Expectation:
    """One request that peers send to this process.

    Args:
        request: Its name.
        number: Its number; requests that begin later have higher ones.
        senders: For each sender, pool name to what it sends.
        leases: Pool name to the lease of its slots' pages.
        required: The pools without which it has not arrived.
        deadline_s: Until when it may arrive, on `time.monotonic()`'s clock.
        changed: Called after each change, without a lock.
    """

    def __init__(
        self,
        request: str,
        number: int,
        senders: Sequence[Mapping[str, ExpectedPart]],
        leases: Mapping[str, Lease],
        required: frozenset[str],
        deadline_s: float,
        changed: Callable[[Expectation], None] = lambda _: None,
    ) -> None:
        self.request = request
        self.number = number
        self._senders = [_SenderPart(parts) for parts in senders]
        self._leases = dict(leases)
        self._required = required
        self.deadline_s = deadline_s
        self._notify = changed
        self._lock, self._changed = new_condition()
        self._state = RequestState.PENDING
        self._reason = ""
        self._busy = 0
        self._fenced: set[str] = set()
        self.tickets: tuple[bytes, ...] = ()
        """One for each sender, in order; the engine carries them."""

    @property
    def state(self) -> RequestState:
        """Return what became of it so far."""
        pending = self._state is RequestState.PENDING
        # What is being copied to its slots was in time.
        if pending and not self._busy and time.monotonic() >= self.deadline_s:
            self._end(RequestState.FAILED, "the deadline has passed")
        return self._state

    @property
    def reason(self) -> str:
        """Return why it failed, or ""."""
        return self._reason

    @property
    def free(self) -> bool:
        """Return whether none of its slots is held any more."""
        with self._lock:
            return not self._leases

    @property
    def arrived(self) -> frozenset[str]:
        """The pools that are whole in their slots, optional ones included."""
        with self._lock:
            if self._state is not RequestState.ARRIVED:
                return frozenset()
            return self._whole()

    def _whole(self) -> frozenset[str]:
        """Return the pools of which every sender's part has arrived."""
        names = {name for one in self._senders for name in one.parts}
        return frozenset(
            name
            for name in names
            if all(name in one.arrived for one in self._senders if name in one.parts)
        )

    @property
    def nbytes(self) -> int:
        """Bytes that its senders write into slots."""
        parts = [part for one in self._senders for part in one.parts.values()]
        return sum(part.nbytes for part in parts)

    def slots(self, pool: str) -> int:
        """Return how many slots of a pool it holds."""
        with self._lock:
            if pool not in self._leases:
                return 0
            of = (one.parts[pool].slots for one in self._senders if pool in one.parts)
            return max((int(np.count_nonzero(one >= 0)) for one in of), default=0)

    def wait(self, timeout_s: float) -> RequestState:
        """Wait while it is pending; return the state."""
        end_s = min(time.monotonic() + min(timeout_s, MAX_WAIT_S), self.deadline_s)
        with self._lock:
            self._changed.wait_for(
                lambda: self._state is not RequestState.PENDING, remaining_s(end_s)
            )
        return self.state

    def wait_free(self, timeout_s: float) -> bool:
        """Wait until none of its slots is held; return whether that is so."""
        with self._lock:
            return self._changed.wait_for(
                lambda: not self._leases, min(timeout_s, MAX_WAIT_S)
            )

    def complete(self, completion: Completion) -> bool:
        """Take a sender's completion; return whether it was in time.

        Verifies and copies, so it takes as long as the bytes need.

        Raises:
            KvdockError: If it is not of a sender of this request.
        """
        if completion.request != self.request or not (
            0 <= completion.sender < len(self._senders)
        ):
            raise KvdockError(
                f"request {self.request!r} got a completion of sender "
                f"{completion.sender} of request {completion.request!r}"
            )
        sender = self._senders[completion.sender]
        in_time = self.state is RequestState.PENDING
        with self._lock:
            in_time = (
                in_time and self._state is RequestState.PENDING and not sender.completed
            )
            sender.completed = True
            self._busy += 1
        state, reason = RequestState.PENDING, ""
        arrived: set[str] = set()
        try:
            if in_time:
                # What stops in between has not arrived.
                state, reason = RequestState.FAILED, "it could not be taken in"
                state, reason, arrived = self._arrive(sender, completion)
        finally:
            with self._lock:
                sender.arrived = sender.arrived | arrived
                clean = _NOTHING_UNDER_WAY.issuperset(completion.outcomes.values())
                sender.over = sender.over or (completion.ended and clean)
                self._busy -= 1
            self._end(state, reason)
            if completion.ended and not clean:
                self._free_when_drained(sender)
        return in_time

    def _arrive(
        self, sender: _SenderPart, completion: Completion
    ) -> tuple[RequestState, str, set[str]]:
        """Take in what came; return the state, the reason and the whole pools."""
        arrived: set[str] = set()
        if not completion.ended:
            # It may still write: what is there now can change.
            return RequestState.FAILED, "a sender has not ended in time", arrived
        for name, part in sender.parts.items():
            outcome = completion.outcomes.get(name, Outcome.ABSENT)
            whole = outcome is Outcome.OK and part.arrive(completion)
            if whole:
                arrived.add(name)
            elif name in self._required:
                why = f"pool {name}: {outcome.name.lower()} at the sender"
                if outcome is not Outcome.OK:
                    return RequestState.FAILED, why, arrived
                why = f"pool {name}: other bytes than were sent"
                return RequestState.CORRUPT, why, arrived
        return RequestState.PENDING, "", arrived

    def abort(self) -> None:
        """Do not want it any more; safe at any moment.

        Its slots stay held until every sender has ended. The engine tells the
        senders over its control channel.
        """
        self._end(RequestState.ABORTED, "aborted")

    def sender_lost(self, sender: int, state: PeerState) -> None:
        """End it as failed: the control connection to a sender was lost.

        Senders are numbered in the order of the tickets. The slots of one that may
        live, by `state`, stay held.
        """
        one = self._senders[sender]
        self._end(RequestState.FAILED, f"sender {sender} is lost: {state}")
        if state is PeerState.DEAD:
            self._free_when_drained(one)

    def _free_when_drained(self, sender: _SenderPart) -> None:
        """Free what a sender holds once nothing of it lies in sockets any more.

        By this process's clock, from now on: had it been stopped until now, its
        sockets may still be full, however long ago the sender has ended.
        """
        if sender.over:
            return
        drain_s = max(
            (part.pool.manifest.send_drain_s for part in sender.parts.values()),
            default=0.0,
        )
        timer = threading.Timer(drain_s, self._drained, [sender])
        timer.daemon = True
        timer.start()

    def _drained(self, sender: _SenderPart) -> None:
        with self._lock:
            sender.over = True
        self._end(RequestState.PENDING, "")

    def withdraw(self) -> None:
        """End it as failed: the endpoints of its pools are about to be closed."""
        self._end(RequestState.FAILED, "the endpoints were closed")

    def fence(self, pool: str) -> None:
        """Free the slots of a pool: its endpoint is closed, and nothing lands.

        Called after `withdraw`: a sender could use a ticket of a pending request
        with the next endpoint.
        """
        with self._lock:
            self._fenced.add(pool)
        self._end(RequestState.PENDING, "")

    def _end(self, state: RequestState, reason: str) -> None:
        """Enter a state if it is pending, and free what can be freed."""
        with self._lock:
            if self._state is RequestState.PENDING:
                over = all(one.completed for one in self._senders)
                if state is not RequestState.PENDING:
                    self._state, self._reason = state, reason
                elif over and not self._busy:
                    self._state = RequestState.ARRIVED
            self._free()
            self._changed.notify_all()
        self._notify(self)

    def _free(self) -> None:
        if self._busy:
            return
        over = all(one.over for one in self._senders)
        for name in [n for n in self._leases if over or n in self._fenced]:
            self._leases.pop(name).end()
            for one in self._senders:
                part = one.parts.get(name)
                if part is not None and part.landing is not None:
                    part.landing[0].release()


def distinct(slots: Int64Array) -> BoolArray:
    """Return which slots are the first of their number or none, bool (n,)."""
    found = np.ones(len(slots), np.bool_)
    order = np.argsort(slots, kind="stable")
    again = (slots[order][1:] == slots[order][:-1]) & (slots[order][1:] >= 0)
    found[order[1:]] = ~again
    return found

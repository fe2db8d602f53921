"""Which tickets may be used: each one once, by the process that it was made for.

A write into a peer's memory cannot be refused once its sender has the address. So
the sender's process refuses, before a byte moves, what the receiver would not want:
a ticket that was used, one that another process was given, and one of a request
that is over.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import KvdockError

if TYPE_CHECKING:
    from kvdock.peers.messages import Epoch, Ticket

_MOST_RECEIVERS = 1 << 12
"""Processes whose tickets are remembered; beyond that, all tickets become void."""

_MOST_TICKETS = 1 << 16
"""Used tickets of one receiver that are remembered."""


class TicketError(KvdockError):
    """A ticket may not be used; nothing was sent, and nothing will be.

    Args:
        reason: "used", "claim", "epoch" or "expired".
    """

    def __init__(self, reason: str, what: str, *, fix: str = "") -> None:
        super().__init__(what, fix=fix)
        self.reason = reason


@attrs.define
class _Receiver:
    """The tickets of one receiver that were used.

    Args:
        remembered: Of all numbers from here on it is known which were used.
        used: Number and sender of each ticket from there on that was used.
    """

    remembered: int = 0
    used: set[tuple[int, int]] = attrs.field(factory=set)

    def use(self, ticket: Ticket) -> None:
        """Remember a ticket, and forget the oldest ones if there are too many."""
        self.used.add((ticket.number, ticket.sender))
        if len(self.used) > _MOST_TICKETS:
            numbers = sorted(number for number, _ in self.used)
            self.remembered = numbers[len(numbers) // 2]
            self.used = {one for one in self.used if one[0] >= self.remembered}


class TicketBook:
    """The tickets that this process has used, and may use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._claim = secrets.token_hex(8)
        self._receivers: dict[str, _Receiver] = {}

    @property
    def claim(self) -> str:
        """Names this process to receivers; their tickets for it repeat the name."""
        return self._claim

    def use(self, ticket: Ticket, epochs: Iterable[Epoch]) -> None:
        """Use a ticket, for the only time.

        Raises:
            TicketError: If it may not be used. One that was not used before may
                still be declined.
        """
        with self._lock:
            receiver = self._checked(ticket)
            # Only what comes with this call counts: one message that was wrong must
            # not void the tickets of all requests to come.
            for epoch in (ticket.epoch, *epochs):
                if epoch.process != ticket.epoch.process:
                    raise TicketError(
                        "epoch",
                        f"the ticket of request {ticket.request!r} and the offers are "
                        "of two receivers, or of one before and after a restart",
                        fix="Get the offers of the process that made the ticket.",
                    )
                if epoch.voids(ticket.number):
                    raise TicketError(
                        "epoch",
                        f"the ticket of request {ticket.request!r} is void: the "
                        "request has ended at its receiver",
                        fix="Decline it, and wait for a new request.",
                    )
            if time.monotonic() >= ticket.expires_s:
                raise TicketError(
                    "expired",
                    f"the ticket of request {ticket.request!r} was good for "
                    f"{ticket.duration_s:.3f} s",
                    fix="Decline it, and wait for a new request.",
                )
            receiver.use(ticket)

    def decline(self, ticket: Ticket) -> None:
        """Give up a ticket: it is not used, and never will be.

        Raises:
            TicketError: If it was used, or was made for another process.
        """
        with self._lock:
            self._checked(ticket).use(ticket)

    def _checked(self, ticket: Ticket) -> _Receiver:
        if ticket.claim != self._claim:
            raise TicketError(
                "claim",
                f"the ticket of request {ticket.request!r} was made for another "
                "process, or for this one before a restart",
                fix="Give each receiver the offers of this process, and each ticket "
                "to the process whose offers it was made for.",
            )
        receiver = self._receivers.get(ticket.epoch.process)
        if receiver is None:
            if len(self._receivers) >= _MOST_RECEIVERS:
                # What is forgotten must not be used again: no ticket is good now.
                self._receivers.clear()
                self._claim = secrets.token_hex(8)
                return self._checked(ticket)
            receiver = self._receivers[ticket.epoch.process] = _Receiver()
        forgotten = ticket.number < receiver.remembered
        if forgotten or (ticket.number, ticket.sender) in receiver.used:
            raise TicketError(
                "used",
                f"the ticket of request {ticket.request!r} was used before"
                f"{', or is far too old' if forgotten else ''}",
                fix="Send a request again with a new ticket.",
            )
        return receiver

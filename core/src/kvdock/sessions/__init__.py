"""Moving pages safely: whatever a backend does, the engine gets an answer."""

from __future__ import annotations

from kvdock.sessions.attachment import Attachment
from kvdock.sessions.leases import Lease, Leases, Side
from kvdock.sessions.results import NO_PAGE, Moved
from kvdock.sessions.session import Session
from kvdock.sessions.tickets import Ticket, TicketState

__all__ = [
    "NO_PAGE",
    "Attachment",
    "Lease",
    "Leases",
    "Moved",
    "Session",
    "Side",
    "Ticket",
    "TicketState",
]

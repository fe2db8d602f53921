"""Moving pages safely: whatever a backend does, the engine gets an answer."""

from __future__ import annotations

from kvdock.transfer.attachment import Attachment
from kvdock.transfer.futures import Ticket, TicketState
from kvdock.transfer.leases import Lease, Leases, Side
from kvdock.transfer.manager import Session
from kvdock.transfer.result import NO_PAGE, Moved

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

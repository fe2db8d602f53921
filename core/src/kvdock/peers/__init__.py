"""Pages straight from one process's memory to another's: requests of two engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.lazy import lazy_names

if TYPE_CHECKING:
    from kvdock.peers.expectation import Expectation as Expectation
    from kvdock.peers.expectation import PeerState as PeerState
    from kvdock.peers.expectation import RequestState as RequestState
    from kvdock.peers.messages import Completion as Completion
    from kvdock.peers.messages import Offer as Offer
    from kvdock.peers.messages import Ticket as Ticket
    from kvdock.peers.send_future import SendFuture as SendFuture
    from kvdock.peers.tickets import TicketError as TicketError
    from kvdock.peers.transfers import BusyError as BusyError
    from kvdock.peers.transfers import PeerTransfers as PeerTransfers

__getattr__, __dir__, __all__ = lazy_names(__name__)

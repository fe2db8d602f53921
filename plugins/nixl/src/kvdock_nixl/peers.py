"""Pages straight into a peer's host memory, with NIXL's UCX backend.

An attachment that offers a pool has one agent that listens, for all of its pools:
destroying it is what ends the transfers of peers that are out of reach. One that sends
has an agent for each peer: after a transfer that failed only destroying the agent keeps
it from reading the rows. Removing the peer from it does not (measured with 1.5.1: 18 to
59 MB of memory that had another use by then were sent when the peer went on).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock import Outcome
from kvdock.errors import KvdockError
from kvdock.peers.connections import (
    Connection,
    Endpoint,
    PeerConnections,
    TransferLost,
)
from kvdock_nixl.library import load
from kvdock_nixl.ucx_agent import UcxAgent

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock.arrays import Int64Array
    from kvdock.peers.connections import Pieces

MAX_ROWS = 8192
"""Rows of one transfer."""


@attrs.define(eq=False)
class AgentConnection(Connection[UcxAgent]):
    """The way to the agent of that name in another process, for all its pools.

    Args:
        scratch: Address of a few bytes that any peer may write to.
        metadata: What NIXL has to know of the agent.
    """

    pauses_s = (1.0, 1.0)

    shared: Connections = attrs.field(repr=False)
    scratch: int
    metadata: bytes = attrs.field(repr=False)

    def reach(self, deadline_s: float) -> UcxAgent:
        """Open an agent that sends."""
        agent = UcxAgent(load(), self.shared.transports, listens=False)
        agent.register(self.shared.memory())
        try:
            agent.add_peer(self.peer, self.metadata)
            agent.reach(self.peer, self.scratch, deadline_s)
        except TransferLost as reason:
            agent.close()
            raise self._not_reached(reason) from reason
        return agent

    def update(self, endpoint: Endpoint, memory: Pieces) -> None:
        """Add pools that came later, on either side: NIXL adds what is new."""
        before, self.metadata = self.metadata, endpoint.metadata
        if self.link is None:
            return
        self.link.register(memory)
        if before != self.metadata:
            try:
                self.link.add_peer(self.peer, self.metadata)
            except TransferLost as reason:
                raise self._not_reached(reason) from reason

    def _not_reached(self, reason: TransferLost) -> KvdockError:
        return KvdockError(
            f"no peer is reached as agent {self.peer}: {reason}",
            fix="Look whether its process runs, whether both sides have the same "
            "ucx_transports, and whether a firewall is between them.",
        )


@attrs.define(eq=False)
class Connections(PeerConnections[UcxAgent, AgentConnection]):
    """The transfers to peers of one attachment; its pools share them.

    Args:
        transports: As in UCX_TLS.
    """

    backend = "nixl"
    library = "NIXL"
    endpoint_names = 1
    endpoint_metadata = True

    transports: str

    def listen(self, receiver: UcxAgent | None, memory: Pieces) -> UcxAgent:
        """Return the agent that listens; one takes further memory."""
        agent = receiver or UcxAgent(load(), self.transports, listens=True)
        agent.register(memory)
        return agent

    def describe(self, receiver: UcxAgent, memory: Pieces) -> Endpoint:
        """Name the agent."""
        scratch, metadata = receiver.scratch_address, receiver.metadata()
        return Endpoint((receiver.name,), scratch, memory, metadata)

    def connection_to(self, endpoint: Endpoint) -> AgentConnection:
        """Return the connection to an agent: one for all of its pools."""
        (name,) = endpoint.names
        for one in self.connections:
            if one.peer == name:
                return one
        return AgentConnection(name, self, endpoint.scratch, endpoint.metadata)

    @staticmethod
    def parts_of(rows: Int64Array, sizes: Int64Array) -> Iterator[Int64Array]:
        """Cut rows into transfers, by number."""
        del sizes
        for start in range(0, len(rows), MAX_ROWS):
            yield rows[start : start + MAX_ROWS]

    def write(
        self,
        connection: AgentConnection,
        link: UcxAgent,
        table: Int64Array,
        deadline_s: float,
    ) -> Outcome:
        """Make one transfer; NIXL has flushed it when it calls it done."""
        link.write(connection.peer, table, deadline_s)
        return Outcome.OK

"""Pages straight into a peer's host memory, with the library's TransferEngine.

An attachment that offers a pool has one engine that listens, for all of its pools.
An attachment that sends has one engine for each connection, so that a connection
that fails can be closed without touching the others.
"""

from __future__ import annotations

import socket
import time
from functools import partial
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock import Outcome
from kvdock.errors import KvdockError
from kvdock.peers.connections import (
    Connection,
    Endpoint,
    PeerConnections,
    TransferLost,
)
from kvdock.resilience import run_within
from kvdock_mooncake.inflight import InFlightLimit
from kvdock_mooncake.peer_engine import EngineClosed, PeerAddress, PeerEngine
from kvdock_mooncake.settings import split_address

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock.arrays import Int64Array
    from kvdock.peers.connections import Pieces
    from kvdock_mooncake.settings import MooncakeSettings

MAX_ROWS = 512
"""Rows of one call. With more than 1024 pieces outstanding to a peer the library
fails at once, with an unknown part written."""

_MAX_CALL_BYTES = 64 << 20
_PIECES_PER_PEER = 1024
_KNOCK_S = 2.0
"""How long a peer's host may take to accept a connection."""


@attrs.define(eq=False)
class EngineConnection(Connection[PeerEngine]):
    """The way to one pool of another process, by its engine's "host:port".

    Args:
        target: The same, with what proves that it is the one that was offered.
    """

    pauses_s = (1.0, 16.0)

    shared: Connections = attrs.field(repr=False)
    target: PeerAddress
    in_flight: InFlightLimit = attrs.field(init=False)

    @in_flight.default
    def _limit(self) -> InFlightLimit:
        return InFlightLimit(_PIECES_PER_PEER)

    def reach(self, deadline_s: float) -> PeerEngine:
        """Open an engine that sends."""
        settings, memory = self.shared.settings, self.shared.memory()

        def work() -> PeerEngine:
            if _listens(self.peer, deadline_s):
                engine = PeerEngine.open(settings, memory, listens=False)
                try:
                    if engine.reach(self.target):
                        return engine
                except EngineClosed:
                    pass
                except BaseException:
                    engine.end()
                    raise
                engine.end()
            raise KvdockError(
                f"no peer is reached at {self.peer}",
                fix="Look whether its process runs, and whether a firewall lets this "
                "host reach all of its ports above 1024.",
            )

        what = f"reaching the peer at {self.peer}"
        return run_within(deadline_s, work, what, PeerEngine.close)

    def lose(self, link: PeerEngine) -> bool:
        """Close the engine of a call that failed.

        Calls that still run on it end by the library's own timeouts, soon after.
        """
        super().lose(link)
        return True


@attrs.define(eq=False)
class Connections(PeerConnections[PeerEngine, EngineConnection]):
    """The transfers to peers of one attachment; its pools share them."""

    backend = "mooncake"
    library = "Mooncake"
    endpoint_names = 3

    settings: MooncakeSettings

    def listen(self, receiver: PeerEngine | None, memory: Pieces) -> PeerEngine:
        """Return the engine that listens; a further pool needs another one."""
        if receiver is not None:
            if set(memory) <= set(receiver.memory):
                return receiver
            receiver.end()
        deadline_s = time.monotonic() + self.settings.setup_timeout_s
        start = partial(PeerEngine.open, self.settings, memory, listens=True)
        what = "starting a transfer engine"
        return run_within(deadline_s, start, what, PeerEngine.close)

    def describe(self, receiver: PeerEngine, memory: Pieces) -> Endpoint:
        """Name the engine's address, its transport and its nonce."""
        protocol = self.settings.protocol.value
        names = (receiver.address, protocol, receiver.nonce.hex())
        return Endpoint(names, receiver.scratch_address, memory)

    def connection_to(self, endpoint: Endpoint) -> EngineConnection:
        """Return a connection of this pool's own."""
        address, protocol, nonce = endpoint.names
        split_address(address)
        if protocol != self.settings.protocol:
            raise KvdockError(
                f"the peer at {address} uses {protocol}, and this process "
                f"{self.settings.protocol}",
                fix="Set the same `protocol` on both sides.",
            )
        try:
            target = PeerAddress(address, endpoint.scratch, bytes.fromhex(nonce))
        except ValueError as error:
            raise KvdockError(f"the endpoint of {address} has no nonce") from error
        return EngineConnection(address, self, target)

    @staticmethod
    def parts_of(rows: Int64Array, sizes: Int64Array) -> Iterator[Int64Array]:
        """Cut rows into calls of the library, by number and bytes."""
        start = 0
        ends = np.cumsum(sizes[rows])
        while start < len(rows):
            begun = ends[start - 1] if start else 0
            fits = int(np.searchsorted(ends, begun + _MAX_CALL_BYTES, "right"))
            stop = max(start + 1, min(fits, start + MAX_ROWS))
            yield rows[start:stop]
            start = stop

    def write(
        self,
        connection: EngineConnection,
        link: PeerEngine,
        table: Int64Array,
        deadline_s: float,
    ) -> Outcome:
        """Make one call of the library, which ends after the deadline if need be."""
        rows = table.shape[1]
        if not connection.in_flight.enter(rows, deadline_s):
            return Outcome.TIMEOUT
        try:
            if link.write(connection.target, *table):
                return Outcome.OK
        except EngineClosed:
            return Outcome.UNAVAILABLE
        finally:
            connection.in_flight.leave(rows)
        raise TransferLost("they were not confirmed")


def _listens(address: str, deadline_s: float) -> bool:
    """Return whether a port accepts connections; if not, no engine is needed.

    `deadline_s` is on `time.monotonic()`'s clock.
    """
    left_s = min(max(0.001, deadline_s - time.monotonic()), _KNOCK_S)
    try:
        socket.create_connection(split_address(address), left_s).close()
    except OSError:
        return False
    return True

"""The channel between the two processes of the demo.

kvdock carries no requests: an engine has a channel of its own for offers, tickets
and completions. This one shows what it needs: messages as bytes without pickle, a
deadline for each, and whether a peer that is gone has died.
"""

import json
import os
import socket
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

import attrs

from kvdock import KvdockError
from kvdock.peers import Offer, PeerState

MAX_MESSAGE_BYTES = 128 << 20
"""Most bytes of one message."""

PATIENCE_S = 600.0
"""How long one process waits for a message while the other computes."""

_PROC = Path("/proc")


class ChannelLostError(KvdockError):
    """The connection has ended, or a message did not come whole in time."""


@attrs.frozen
class ProcessIdentity:
    """One process of one host, told from a later one with the same number.

    Args:
        host: The boot of the host and the namespace of process numbers.
        pid: The process's number there.
        started: When it started, in ticks since the boot.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessIdentity | None":
        """Describe a process of this host; None if it has ended."""
        try:
            text = (_PROC / str(pid) / "stat").read_text()
        except OSError:
            return None
        # The name before it may hold spaces and brackets.
        fields = text.rpartition(")")[2].split()
        if fields[0] in "ZX":
            return None
        return cls(_host(), pid, int(fields[19]))

    @property
    def state(self) -> PeerState:
        """Return whether it is known to be dead; a process of another host never is."""
        if self.host != _host():
            return PeerState.UNKNOWN
        return PeerState.UNKNOWN if self.of(self.pid) == self else PeerState.DEAD


def _host() -> str:
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        # Without /proc no process is known to be dead.
        return f"{socket.gethostname()} {time.time_ns()}"


class Channel:
    """Messages to and from one peer, in order.

    After a `ChannelLostError` the channel is of no more use, and `peer_state` says
    what is known of the peer.

    Args:
        link: A connection, which this owns.
        deadline_s: Until when the peer must have said who it is, on
            `time.monotonic()`'s clock.

    Raises:
        ChannelLostError: If it has not.
    """

    def __init__(self, link: Connection, deadline_s: float) -> None:
        self._link = link
        own = ProcessIdentity.of(os.getpid())
        about = {} if own is None else attrs.asdict(own)
        self.send(json.dumps(about).encode())
        self._peer = _identity(self.receive(deadline_s))

    @property
    def peer_state(self) -> PeerState:
        """Return what is known of the peer once the connection was lost.

        DEAD only for a process of this host whose end the kernel confirms.
        """
        return PeerState.UNKNOWN if self._peer is None else self._peer.state

    def send(self, message: bytes) -> None:
        """Send one message.

        Raises:
            ChannelLostError: If the peer has gone.
        """
        try:
            self._link.send_bytes(message)
        except OSError as error:
            raise ChannelLostError(f"a message was not sent: {error}") from error

    def receive(self, deadline_s: float | None = None) -> bytes:
        """Return the next message.

        Raises:
            ChannelLostError: If none comes by the deadline; by default, in the time
                that the other process may compute for.
        """
        left_s = PATIENCE_S if deadline_s is None else deadline_s - time.monotonic()
        try:
            if self._link.poll(max(0.0, left_s)):
                return self._link.recv_bytes(MAX_MESSAGE_BYTES)
        except (EOFError, OSError) as error:
            raise ChannelLostError(f"the connection was lost: {error}") from error
        raise ChannelLostError("no message came in time")

    def send_offers(self, offers: Mapping[str, Offer]) -> None:
        """Send the offers of all pools."""
        self.send(json.dumps(len(offers)).encode())
        for offer in offers.values():
            self.send(offer.to_bytes())

    def receive_offers(self) -> dict[str, Offer]:
        """Return the offers of all pools of the other process."""
        count = int(json.loads(self.receive()))
        offers = [Offer.from_bytes(self.receive()) for _ in range(count)]
        return {offer.pool: offer for offer in offers}


def _identity(message: bytes) -> ProcessIdentity | None:
    """Read what a peer said of itself; None where that cannot be used."""
    try:
        found = json.loads(message)
        return ProcessIdentity(
            str(found["host"]), int(found["pid"]), int(found["started"])
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None

"""A small control channel between two processes: for tests, demos and a start.

kvdock carries no requests. An engine has a channel of its own for offers, tickets
and completions; this one shows what it needs: messages with a length, deadlines,
and a word on whether a peer that is gone has died.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock.closing import ClosedAfterUse
from kvdock.errors import KvdockError
from kvdock.transfer.expectation import PeerState

if TYPE_CHECKING:
    from typing import Self

_LENGTH = struct.Struct("<Q")

MAX_MESSAGE_BYTES = 128 << 20
"""Most bytes of one message."""

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
    def of(cls, pid: int) -> ProcessIdentity | None:
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
        """Whether it is known to be dead; a process of another host never is."""
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


class ControlChannel(ClosedAfterUse):
    """Messages to and from one peer, in order.

    One thread may send while another receives. After a `ChannelLostError` the
    channel is of no more use, and `peer_state` says what is known of the peer.

    Args:
        link: A connected stream socket, which it owns.
        deadline_s: Until when the peer must have said who it is, on
            `time.monotonic()`'s clock.

    Raises:
        ChannelLostError: If it has not.
    """

    def __init__(self, link: socket.socket, deadline_s: float) -> None:
        self._link = link
        self._sending = threading.Lock()
        own = ProcessIdentity.of(os.getpid())
        about = {} if own is None else attrs.asdict(own)
        self._peer: ProcessIdentity | None = None
        try:
            self.send(json.dumps(about).encode(), deadline_s)
            self._peer = _identity(self.receive(deadline_s))
        except BaseException:
            self.close()
            raise

    @classmethod
    def connect(cls, host: str, port: int, deadline_s: float) -> Self:
        """Connect to a peer that listens.

        Raises:
            ChannelLostError: If it is not reached by the deadline.
        """
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            link = socket.create_connection((host, port), timeout=left_s)
        except OSError as error:
            raise ChannelLostError(f"{host}:{port} is not reached: {error}") from error
        return cls(link, deadline_s)

    @property
    def peer_state(self) -> PeerState:
        """What is known of the peer once the connection was lost.

        DEAD only for a process of this host whose end the kernel confirms.
        """
        return PeerState.UNKNOWN if self._peer is None else self._peer.state

    def send(self, message: bytes, deadline_s: float) -> None:
        """Send one message.

        Raises:
            ChannelLostError: If it is not taken by the deadline.
        """
        with self._sending:
            self._link.settimeout(_left_s(deadline_s))
            try:
                self._link.sendall(_LENGTH.pack(len(message)) + message)
            except OSError as error:
                raise ChannelLostError(f"a message was not sent: {error}") from error

    def receive(self, deadline_s: float) -> bytes:
        """Return the next message.

        Raises:
            ChannelLostError: If there is none whole by the deadline.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, deadline_s))
        if length > MAX_MESSAGE_BYTES:
            raise ChannelLostError(f"a message has {length} bytes")
        return self._read(length, deadline_s)

    def _read(self, nbytes: int, deadline_s: float) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            self._link.settimeout(_left_s(deadline_s))
            try:
                piece = self._link.recv(min(nbytes - len(data), 1 << 20))
            except OSError as error:
                raise ChannelLostError(f"no message came: {error}") from error
            if not piece:
                raise ChannelLostError("the peer has closed the connection")
            data += piece
        return bytes(data)

    def close(self) -> None:
        """Close the connection."""
        with suppress(OSError):
            self._link.shutdown(socket.SHUT_RDWR)
        self._link.close()


def _left_s(deadline_s: float) -> float:
    # No time at all would make the socket non-blocking.
    return max(0.001, min(deadline_s - time.monotonic(), 1e6))


def _identity(message: bytes) -> ProcessIdentity | None:
    """Read what a peer said of itself; None where that cannot be used."""
    try:
        found = json.loads(message)
        return ProcessIdentity(
            str(found["host"]), int(found["pid"]), int(found["started"])
        )
    except (ValueError, TypeError, KeyError, RecursionError):
        return None

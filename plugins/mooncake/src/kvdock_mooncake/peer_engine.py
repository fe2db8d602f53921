"""One TransferEngine of the library, for transfers between two processes.

It is separate from the store: closing it is what ends its transfers, and the store
goes on. Measured with 0.3.13.post1 over TCP, under a sender that is stopped in the
middle of a piece: after the receiver has unregistered its memory, the rest of the
piece still lands (15 to 34 MB of 64 MiB in two of two runs), because an address is
checked once per piece. After the receiver's engine was destroyed nothing lands.
"""

from __future__ import annotations

import importlib
import os
import secrets
import threading
import time
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock.errors import KvdockError, PluginError
from kvdock.own_sockets import BoundPorts, accept_nothing, listening_ports
from kvdock_mooncake.connect import limit_patience, own_address, reject_fork
from kvdock_mooncake.library import load
from kvdock_mooncake.preconditions import check_transport
from kvdock_mooncake.settings import Protocol
from kvdock_mooncake.shutdown import BACKGROUND_CALLS, STORES
from kvdock_mooncake.teardown import PATIENCE_S, Teardown, end_engine
from kvdock_mooncake.transfer_limits import LIBRARY_WAIT_S

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvdock.arrays import Int64Array
    from kvdock.peers.connections import Pieces
    from kvdock_mooncake.library import Wheel
    from kvdock_mooncake.settings import MooncakeSettings

SINCE = "0.3.13"
"""First release whose receiver confirms a write over TCP after it was applied. Earlier
ones call it done when it has entered the sender's socket."""

NONCE_BYTES = 16
"""Bytes by which an engine is known."""

PROBE_BYTES = 8
"""Bytes that a sender writes to find out whether a peer is reached."""

BOUND = BoundPorts()
"""The ports of receivers that were closed: no other engine listens where old tickets
lead to."""

_UNCONFIRMED = ("MC_TCP_PROTO", "1")
_READS = 254
"""Nonces of peers that may be read at once."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 20e-3
_PAUSE_SHARE = 0.1
"""Pauses between two looks at transfers: a tenth of what they have taken so far."""
_SCRATCH_BYTES = NONCE_BYTES * (2 + _READS)
"""For its nonce, what peers write, and the nonces of peers."""
_SCRATCH: list[Any] = []
"""The scratch of every engine of this process: no address is used a second time, so
that a peer of an engine that was closed does not reach the next one on its port."""
_LOWEST_PORT, _HIGHEST_PORT = ("MC_MIN_RPC_PORT", 15000), ("MC_MAX_RPC_PORT", 17000)
"""Where the library listens: its variables, and what they are by default."""
_STARTING = threading.Lock()
_METADATA = "P2PHANDSHAKE"
"""Endpoints have addresses, so no server of metadata is needed. The library would speak
to one with the interpreter's lock held."""


def why_not(wheel: Wheel) -> str:
    """Return what keeps a release from transfers to peers; empty for nothing."""
    if not wheel.is_since(SINCE):
        return (
            f"{wheel} calls a write done before it has arrived; {SINCE} and newer "
            "releases wait for the receiver"
        )
    name, value = _UNCONFIRMED
    if os.environ.get(name) == value:
        return f"{name}={value} turns off the receiver's confirmations"
    return ""


@attrs.frozen
class PeerAddress:
    """How the engine of a peer is reached and known.

    Args:
        address: "host:port".
        scratch: Address of its nonce, and of a few bytes behind it.
        nonce: What its scratch begins with.
    """

    address: str
    scratch: int
    nonce: bytes


class EngineClosed(Exception):  # noqa: N818 - handled by callers of `write`
    """The engine makes no call: it is closed, or in a forked child."""


def _start(settings: MooncakeSettings, *, listens: bool) -> tuple[Any, frozenset[int]]:
    """Return an engine that is set up, and the ports on which it listens."""
    raw = importlib.import_module("mooncake.engine").TransferEngine()
    with _STARTING:
        before, stores = listening_ports(), STORES.setups
        status = raw.initialize(
            own_address(settings), _METADATA, settings.protocol, settings.devices
        )
        alone = STORES.setups == stores and not STORES.running
        opened = listening_ports() - before
    if status:
        raise KvdockError(
            f"the Mooncake library starts no transfer engine: {status}",
            fix="Look at the library's lines on standard error.",
        )
    # Its second port is told by no call, only by when it was opened.
    data = {port for port in opened if alone and port in _library_ports()}
    ports = frozenset((*data, int(raw.get_rpc_port())))
    if not listens and settings.protocol is Protocol.TCP:
        accept_nothing(ports)
    return raw, ports


def _library_ports() -> range:
    lowest, highest = (
        int(os.environ.get(name) or usual)
        for name, usual in (_LOWEST_PORT, _HIGHEST_PORT)
    )
    return range(lowest, highest + 1)


def _arrived(raw: Any, transfers: Sequence[int]) -> bool:  # noqa: ANN401 - the library's own class
    """Wait for the end of transfers; return whether all of them are there.

    Each is of one piece, as the library's look at several tells of the first alone. Its
    waiting calls poll: under a receiver that is frozen they take most of a core until
    the library gives up.

    Args:
        raw: The library's engine.
        transfers: What its calls that began them returned.
    """
    began_s = time.monotonic()
    for transfer in transfers:
        while (status := raw.transfer_check_status(transfer)) == 0:
            took_s = time.monotonic() - began_s
            if took_s > LIBRARY_WAIT_S:
                return False
            pause_s = max(_PAUSE_SHARE * took_s, _SHORTEST_PAUSE_S)
            time.sleep(min(pause_s, _LONGEST_PAUSE_S))
        if status < 0:
            return False
    return True


@attrs.define(eq=False)
class PeerEngine:
    """A TransferEngine and its running calls.

    Args:
        address: Where peers reach it, "host:port".
        memory: Address and size of each piece that it has registered.
        nonce: What its scratch begins with.
    """

    address: str
    memory: Pieces
    nonce: bytes
    _raw: Any
    _scratch: Any
    _ports: frozenset[int]
    _reads: Iterator[int] = attrs.field(factory=count, init=False)
    _pid: int = attrs.field(factory=os.getpid, init=False)
    _calls: int = attrs.field(default=0, init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _teardown: Teardown | None = attrs.field(default=None, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @classmethod
    def open(
        cls, settings: MooncakeSettings, memory: Pieces, *, listens: bool
    ) -> PeerEngine:
        """Start an engine and register memory with it.

        `memory` has address and size of each piece. One that does not listen only
        sends, and takes no connection where the transport is TCP.
        """
        reject_fork()
        limit_patience(settings)
        check_transport(settings)
        library = load()
        if reason := why_not(library.wheel):
            raise PluginError(reason, fix=f"Use {SINCE} or newer, and unset it.")
        raw, ports = _start(settings, listens=listens)
        host = own_address(settings)
        host = f"[{host}]" if ":" in host else host
        nonce = secrets.token_bytes(NONCE_BYTES)
        scratch = np.zeros(_SCRATCH_BYTES, np.uint8)
        scratch[:NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
        _SCRATCH.append(scratch)
        addresses = [address for address, _ in memory]
        sizes = [nbytes for _, nbytes in memory]
        # This call frees the interpreter meanwhile, which `register_memory` does not.
        status = raw.batch_register_memory(
            [*addresses, int(scratch.ctypes.data)], [*sizes, scratch.nbytes]
        )
        if status:
            end_engine(raw)
            raise KvdockError(
                f"the Mooncake library does not register {len(memory)} pieces of "
                f"{sum(sizes)} bytes for peers: {status}",
                fix="Look at the library's lines on standard error.",
            )
        STORES.add(raw)
        bound = ports if listens else frozenset[int]()
        address = f"{host}:{raw.get_rpc_port()}"
        return cls(address, memory, nonce, raw, scratch, bound)

    @property
    def scratch_address(self) -> int:
        """Its nonce, which peers read, and a few bytes that they may write to."""
        return int(self._scratch.ctypes.data)

    def write(
        self,
        peer: PeerAddress,
        local: Int64Array,
        remote: Int64Array,
        sizes: Int64Array,
    ) -> bool:
        """Write rows into a peer's memory; return whether all are there.

        The library connects again by itself to whatever listens on the peer's ports.
        So its nonce is read first, by the same engine: nothing is written unless the
        peer is the one that was offered. A read beyond what an engine has registered
        is refused there.

        Blocks for as long as the library does: with the timeouts that the plugin
        sets, some 3 s under a peer that is frozen. If it returns False, an unknown
        part was written and the rest may still be under way until `close`.

        Args:
            peer: The peer's engine.
            local: int64 (n,), addresses here.
            remote: int64 (n,), addresses there.
            sizes: int64 (n,), bytes.

        Raises:
            EngineClosed: If no call may be made.
        """
        with self._calling() as raw:
            if not self._is(raw, peer):
                return False
            transfers = []
            for row in zip(
                local.tolist(), remote.tolist(), sizes.tolist(), strict=True
            ):
                transfer = raw.transfer_submit_write(peer.address, *row)
                if transfer <= 0:
                    return False
                transfers.append(transfer)
            return _arrived(raw, transfers)

    def _is(self, raw: Any, peer: PeerAddress) -> bool:  # noqa: ANN401 - the library's own class
        """Return whether the peer's scratch holds its nonce."""
        # Another place for each call, as several may run.
        place = NONCE_BYTES * (2 + next(self._reads) % _READS)
        read = self._scratch[place : place + NONCE_BYTES]
        read[:] = 0
        transfer = raw.batch_transfer_async_read(
            peer.address, [int(read.ctypes.data)], [peer.scratch], [NONCE_BYTES]
        )
        return (
            transfer > 0 and _arrived(raw, (transfer,)) and read.tobytes() == peer.nonce
        )

    @contextmanager
    def _calling(self) -> Iterator[Any]:
        """Yield the library's engine, which is not destroyed meanwhile."""
        if os.getpid() != self._pid or not BACKGROUND_CALLS.begin():
            raise EngineClosed
        try:
            with self._lock:
                if self._closed:
                    raise EngineClosed
                self._calls += 1
            try:
                yield self._raw
            finally:
                self._leave()
        finally:
            BACKGROUND_CALLS.finish()

    def reach(self, peer: PeerAddress) -> bool:
        """Write a few bytes to a peer's scratch; return whether they arrived."""
        here = np.array([self.scratch_address + NONCE_BYTES])
        there = np.array([peer.scratch + NONCE_BYTES])
        return self.write(peer, here, there, np.array([PROBE_BYTES]))

    def _leave(self) -> None:
        with self._lock:
            self._calls -= 1
            if self._closed and not self._calls:
                self._begin_teardown()

    def end(self) -> None:
        """Begin to destroy the engine, or let its last running call do so."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._closed = True
            if not self._calls:
                self._begin_teardown()

    def close(self, patience_s: float = PATIENCE_S) -> bool:
        """Destroy the engine unless a call runs; return whether that is done.

        True says that its threads have ended and its connections are closed: it
        reads and writes no memory of this process any more.
        """
        self.end()
        return self._teardown is not None and self._teardown.wait(patience_s)

    def _begin_teardown(self) -> None:
        if self._teardown is None:
            self._teardown = end_engine(self._raw, BOUND.keep(self._ports))
            self._raw = None

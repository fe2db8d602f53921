"""A reference backend that writes into a peer's memory, over TCP.

Everything right, nothing fast. The receiver's own threads put the bytes where
they belong, as with Mooncake's TCP transport: bytes that a socket still holds
land after the sender has died, and a receiver that is stopped takes them when
it goes on. `withdraw` is a fence: it waits for those threads.
"""

from __future__ import annotations

import ctypes
import json
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np
from reference import Handle, MemoryReference

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.errors import KvdockError
from kvdock.plugin.manifest import Manifest, Support

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array
    from kvdock.geometry.region import Block

HEAD = struct.Struct("<qq")
"""Rows and bytes of one message; the arrays and the bytes follow."""

_TOKEN_BYTES = 16
_ACCEPTED = bytes([Outcome.OK])
_CONNECT_PATIENCE_S = 30.0
"""How long a connection may take to say who it is."""


def inside(blocks: tuple[Block, ...], at: Int64Array, sizes: Int64Array) -> BoolArray:
    """Return which rows lie in one of the blocks, bool (n,)."""
    found = np.zeros(len(at), np.bool_)
    for block in blocks:
        found |= (at >= block.address) & (at + sizes <= block.address + block.nbytes)
    return found


def read_exactly(link: socket.socket, nbytes: int) -> bytearray | None:
    """Read so many bytes; None once the other side has closed."""
    data = bytearray(nbytes)
    view, got = memoryview(data), 0
    while got < nbytes:
        count = link.recv_into(view[got:])
        if not count:
            return None
        got += count
    return data


class Receiver:
    """Takes rows for some blocks of this process's memory.

    Args:
        blocks: Where rows may land.
        port: Where to listen; 0 for a free one.
        token: What peers have to send; None for one that no other endpoint had before.
    """

    def __init__(
        self, blocks: tuple[Block, ...], port: int = 0, token: bytes | None = None
    ) -> None:
        self._blocks = blocks
        self._token = token or secrets.token_bytes(_TOKEN_BYTES)
        self._listener = socket.create_server(("127.0.0.1", port))
        self._lock = threading.Lock()
        self._links: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._start(self._accept)

    @property
    def endpoint(self) -> bytes:
        """Return where it listens, and what proves that a peer was invited."""
        host, port = self._listener.getsockname()[:2]
        return json.dumps([host, port, self._token.hex()]).encode()

    def _start(self, work: object, *arguments: object) -> None:
        thread = threading.Thread(
            target=work,  # type: ignore[arg-type]  # a callable
            args=arguments,
            daemon=True,
        )
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                if self._closed:
                    link.close()
                    return
                self._links.add(link)
                self._start(self._serve, link)

    def _serve(self, link: socket.socket) -> None:
        try:
            link.settimeout(_CONNECT_PATIENCE_S)
            token = read_exactly(link, _TOKEN_BYTES)
            if token is None or not secrets.compare_digest(token, self._token):
                return
            link.sendall(_ACCEPTED)
            link.settimeout(None)
            while self._take(link):
                pass
        except OSError:
            return
        finally:
            # Only now does the sender see the end: nothing lands after it.
            with self._lock:
                self._links.discard(link)
            link.close()

    def _take(self, link: socket.socket) -> bool:
        """Take one message; False at the end of the connection."""
        head = read_exactly(link, HEAD.size)
        if head is None:
            return False
        rows, nbytes = HEAD.unpack(head)
        table = read_exactly(link, 16 * rows)
        data = read_exactly(link, nbytes)
        if table is None or data is None:
            return False
        at, sizes = np.frombuffer(table, np.int64).reshape(2, rows)
        good = inside(self._blocks, at, sizes)
        ends = np.cumsum(sizes)
        with memoryview(data) as view:
            for row in np.flatnonzero(good).tolist():
                self.land(int(at[row]), view[ends[row] - sizes[row] : ends[row]])
        link.sendall(np.where(good, Outcome.OK, Outcome.REFUSED).astype("u1").tobytes())
        return True

    def land(self, address: int, data: memoryview) -> None:
        """Put one row into memory; a seam for mutants."""
        ctypes.memmove(address, bytes(data), len(data))

    def close(self) -> None:
        """Close all connections, and wait until none of them can land bytes."""
        with self._lock:
            self._closed = True
            links = list(self._links)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in links:
            # For reading alone: the thread closes it, once it touches no memory.
            with suppress(OSError):
                link.shutdown(socket.SHUT_RD)
        for thread in self._threads:
            thread.join()


@attrs.define(eq=False)
class Peer:
    """A connection to a receiver: one batch at a time."""

    link: socket.socket
    lock: threading.Lock = attrs.field(factory=threading.Lock)


@attrs.define(eq=False)
class PeerHandle(Handle):
    """One attached pool, and its receiver once it was offered."""

    receiver: Receiver | None = None

    @property
    def peers(self) -> SimpleNamespace:
        """Memory for peers, with the methods of its plugin."""
        plugin = cast("PeerReference", self.plugin)
        return SimpleNamespace(
            endpoint=partial(plugin.endpoint, self),
            connect=partial(plugin.connect, self),
            disconnect=partial(plugin.disconnect, self),
            withdraw=partial(plugin.withdraw, self),
            send=self.run,
        )


class PeerReference(MemoryReference):
    """The reference backend over a dict, with peers that write into its memory."""

    name = "reference_peers"
    handle = PeerHandle
    retention = Support.NO

    def manifest(self) -> Manifest:
        """Declare what the reference declares, and transfers to peers."""
        return attrs.evolve(
            super().manifest(),
            peers=Support.NATIVE,
            fork_safe=Support.NO,
            max_send_rows=512,
            landing_run_bytes=1024,
            send_drain_s=0.2,
        )

    def endpoint(self, handle: PeerHandle) -> bytes:
        """Listen for peers."""
        with handle.lock:
            if handle.receiver is None:
                handle.receiver = self.receiver(handle.blocks)
            return handle.receiver.endpoint

    def receiver(self, blocks: tuple[Block, ...]) -> Receiver:
        """Return what takes rows; a seam for mutants."""
        return Receiver(blocks)

    def connect(self, handle: PeerHandle, endpoint: bytes, deadline_s: float) -> Peer:
        """Connect to a receiver and prove that its endpoint was given to us."""
        del handle
        try:
            host, port, token = json.loads(endpoint)
            proof = bytes.fromhex(token)
        except (ValueError, TypeError) as error:
            raise KvdockError("this is not an endpoint of the reference") from error
        left_s = max(0.001, deadline_s - time.monotonic())
        try:
            link = socket.create_connection((str(host), int(port)), timeout=left_s)
            try:
                link.sendall(proof)
                answer = read_exactly(link, 1)
            except BaseException:
                link.close()
                raise
        except OSError as error:
            raise KvdockError(f"the peer is not reached: {error}") from error
        if answer is None:
            link.close()
            raise KvdockError("the peer does not accept this endpoint")
        link.settimeout(None)
        return Peer(link)

    def disconnect(self, handle: PeerHandle, peer: Peer) -> bool:
        """Close a connection; every message on it was answered before."""
        del handle
        with peer.lock:
            peer.link.close()
        return True

    def withdraw(self, handle: PeerHandle) -> bool:
        """Close the receiver; when this returns no thread of it is left."""
        with handle.lock:
            receiver, handle.receiver = handle.receiver, None
        if receiver is not None:
            receiver.close()
        return True

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        """Do one batch."""
        if batch.operation is not Operation.SEND:
            return super().run(handle, batch)
        peer = cast("Peer", batch.peer)
        if not peer.lock.acquire(timeout=max(0.0, min(batch.remaining_s(), 1e6))):
            return BatchResult.all(batch, Outcome.TIMEOUT)
        try:
            return BatchResult.of(batch, self.send(handle, peer, batch))
        except OSError:
            # The connection has ended, and nothing that was sent on it can land.
            return BatchResult.all(batch, Outcome.UNAVAILABLE)
        finally:
            peer.lock.release()

    def send(self, handle: Handle, peer: Peer, batch: Batch) -> Int64Array:
        """Send one message; return an outcome for each row, int64 (n,).

        Waits for the answer past the deadline if need be: the bytes may still
        land, and only the answer or the end of the connection says otherwise.
        """
        remote = cast("Int64Array", batch.remote)
        at, to, sizes = self.rows(
            batch.addresses[:, 0], remote[:, 0], batch.sizes[:, 0]
        )
        outcomes = np.full(len(batch), Outcome.REFUSED, np.int64)
        mine = np.flatnonzero(inside(handle.blocks, at, sizes))
        pieces = zip(at[mine].tolist(), sizes[mine].tolist(), strict=True)
        data = b"".join(ctypes.string_at(one, nbytes) for one, nbytes in pieces)
        table = np.stack([to[mine], sizes[mine]])
        peer.link.sendall(HEAD.pack(len(mine), len(data)) + table.tobytes() + data)
        answer = read_exactly(peer.link, len(mine))
        if answer is None:
            raise ConnectionResetError
        outcomes[mine] = np.frombuffer(answer, np.uint8)
        return outcomes

    def rows(
        self, local: Int64Array, remote: Int64Array, sizes: Int64Array
    ) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Return the rows to send; a seam for mutants."""
        return local, remote, sizes

    def close(self, handle: Handle) -> None:
        """Release a pool."""
        self.withdraw(cast("PeerHandle", handle))
        handle.blocks = ()


def __getattr__(name: str) -> PeerReference:
    """Make a fresh plugin: `peer_reference:peers`."""
    if name == "peers":
        return PeerReference()
    raise AttributeError(name)

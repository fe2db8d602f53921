"""The common part of backends whose library writes into the memory of peers.

A backend says how its library listens, reaches a peer and writes to it: a subclass of
`PeerConnections`. What the pools of an attachment share, when a peer that was lost is
tried again, and how long memory is held after a failed transfer is the same for all.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Generic, Protocol, TypeVar

import attrs
import msgspec

from kvdock.batch import Batch, BatchResult, MemoryHold, Outcome
from kvdock.errors import KvdockError
from kvdock.geometry.address_ranges import AddressRanges
from kvdock.geometry.peer_rows import send_rows
from kvdock.own_sockets import any_connected, connected_sockets
from kvdock.synchronization import ProcessGuard, remaining_s

if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Self

    from kvdock.arrays import Int64Array
    from kvdock.geometry.region import Block
    from kvdock.plugin.hookspecs import AttachConfig

log = logging.getLogger("kvdock")

DRAIN_S = 5.0
"""How long bytes may lie in the sockets of a peer after a connection was closed."""

_PATIENCE_S = 5.0
"""How long `withdraw` waits; what listens then still is closed by a later call."""
_SHARED = "peers"

_Place = Annotated[int, msgspec.Meta(ge=0, lt=1 << 62)]
"""Of an address or a size; a sum of two is no negative number."""

Pieces = tuple[tuple[int, int], ...]
"""Address and size of pieces of host memory, bytes."""


class TransferLost(Exception):  # noqa: N818 - handled by `PeerConnections`
    """A transfer failed, or did not end in time: an unknown part was written."""


class Endpoint(msgspec.Struct, frozen=True, array_like=True):
    """The way to a peer, and the memory of one pool there.

    Args:
        names: How the library there is reached.
        scratch: Address of a few bytes that any peer may write to.
        memory: Address and size of each piece of the pool.
        metadata: What else the library has to know.
    """

    names: tuple[str, ...]
    scratch: _Place
    memory: tuple[tuple[_Place, _Place], ...]
    metadata: bytes = b""

    def to_bytes(self, backend: str) -> bytes:
        """Write it as MessagePack, with the name of the backend."""
        return msgspec.msgpack.encode((backend, self))

    @classmethod
    def from_bytes(
        cls, data: bytes, backend: str, names: int, *, metadata: bool
    ) -> Endpoint:
        """Read what `to_bytes` wrote; it came over a network.

        Raises:
            KvdockError: If it is not an endpoint of this backend.
        """
        try:
            form, found = _endpoints.decode(data)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            form = ""
        if (
            form != backend
            or len(found.names) != names
            or (found.metadata and not metadata)
        ):
            raise KvdockError(
                f"an endpoint is not one of the {backend} backend",
                fix="Use the same backend and the same release of it on both sides.",
            )
        return found


_endpoints = msgspec.msgpack.Decoder(tuple[str, Endpoint])


class Link(Protocol):
    """An engine or an agent of the library: it moves the bytes."""

    def end(self) -> object:
        """Begin to destroy it: its calls fail from now on."""

    def close(self, patience_s: float = ...) -> bool:
        """Destroy it; return whether no byte moves through it any more."""


L = TypeVar("L", bound=Link)


@attrs.define(eq=False)
class Connection(ABC, Generic[L]):
    """A link to a peer, opened again after it was lost, though not at once."""

    pauses_s: ClassVar[tuple[float, float]]
    """How long a peer that is not reached is left alone: at first, and at most. It is
    twice as long each time."""

    peer: str
    users: int = attrs.field(default=0, init=False)
    link: L | None = attrs.field(default=None, init=False)
    uncertain_until_s: float = attrs.field(default=0.0, init=False)
    _closed: bool = attrs.field(default=False, init=False)
    _pause_s: float = attrs.field(default=0.0, init=False)
    _not_before_s: float = attrs.field(default=0.0, init=False)
    _sockets: dict[int, int] = attrs.field(factory=dict, init=False)
    _opening: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @abstractmethod
    def reach(self, deadline_s: float) -> L:
        """Open a link: write a few bytes, and wait until they have arrived.

        Not a byte before the peer has proved that it is the one whose endpoint this is:
        its ports may belong to another one by now, and its addresses to anything.

        Raises:
            KvdockError: If the peer is not reached by the deadline.
        """

    def update(self, endpoint: Endpoint, memory: Pieces) -> None:
        """Take note of a further pool, here and at the peer; one call at a time."""

    def join(self, endpoint: Endpoint, memory: Pieces, deadline_s: float) -> None:
        """Connect for one more pool.

        `memory` is that of all pools of this attachment; `deadline_s` is on
        `time.monotonic()`'s clock.

        Raises:
            KvdockError: If the peer is not reached by then.
        """
        with self._turn(deadline_s) as mine:
            if not mine:
                raise KvdockError(f"no peer is reached as {self.peer} within its time")
            self.update(endpoint, memory)
            self._open(deadline_s)

    @contextmanager
    def _turn(self, deadline_s: float) -> Iterator[bool]:
        """Wait until no other call opens it; yield whether that is so in time."""
        mine = self._opening.acquire(timeout=remaining_s(deadline_s))
        try:
            yield mine
        finally:
            if mine:
                self._opening.release()

    def _open(self, deadline_s: float) -> L:
        if self.link is not None:
            return self.link
        before = connected_sockets()
        try:
            link = self.reach(deadline_s)
        except KvdockError:
            first_s, longest_s = self.pauses_s
            self._pause_s = min(max(first_s, 2 * self._pause_s), longest_s)
            self._not_before_s = time.monotonic() + self._pause_s
            raise
        self._pause_s = 0.0
        opened = connected_sockets()
        self._sockets = {one: n for one, n in opened.items() if one not in before}
        with self._lock:
            if not self._closed:
                self.link = link
                return link
        link.close()
        raise KvdockError(f"the connection to {self.peer} was closed")

    def open_link(self, deadline_s: float) -> L | None:
        """Return the link, opened again if need be; None if it cannot be had now.

        Raises:
            KvdockError: If the peer is not reached.
        """
        with self._turn(deadline_s) as mine:
            if not mine:
                return None
            resting = self._closed or time.monotonic() < self._not_before_s
            if self.link is not None or resting:
                return self.link
            return self._open(deadline_s)

    def end_if_gone(self) -> None:
        """Destroy the link if its peer has ended, and nothing opens it meanwhile."""
        gone = self.link is not None and self._sockets
        if not gone or any_connected(self._sockets):
            return
        with self._lock:
            link, self.link = self.link, None
        if link is not None:
            link.close(0.0)

    def lose(self, link: L) -> bool:
        """Destroy the link of a failed call; return whether it reads no memory now."""
        with self._lock:
            if self.link is link:
                self.link = None
        closed = link.close()
        self.uncertain_until_s = time.monotonic() + DRAIN_S
        return closed

    def end(self) -> None:
        """Begin to destroy the link."""
        with self._lock:
            if self.link is not None:
                self.link.end()

    def close(self) -> bool:
        """Destroy the link for good; return whether it reads no memory any more."""
        with self._lock:
            link, self.link, self._closed = self.link, None, True
        return link is None or link.close()


C = TypeVar("C", bound="Connection[Any]")


@attrs.frozen(eq=False)
class Peer(Generic[C]):
    """A connection to the memory of one pool in another process.

    Args:
        ranges: Where it takes rows.
    """

    connection: C
    ranges: AddressRanges


@attrs.define(eq=False)
class PeerConnections(ABC, Generic[L, C]):
    """The transfers of one attachment, to and from peers; its pools share them.

    A subclass names the backend and its library, and says what the library does. An
    attachment listens once, for all of its pools.
    """

    backend: ClassVar[str]
    library: ClassVar[str]
    endpoint_names: ClassVar[int]
    """How many names an endpoint has."""
    endpoint_metadata: ClassVar[bool] = False
    """Whether its library has more to say of an endpoint."""

    connections: set[C] = attrs.field(factory=set, init=False)
    _pools: set[ConnectedPool] = attrs.field(factory=set, init=False)
    _receiver: L | None = attrs.field(default=None, init=False)
    _open_ends: list[L] = attrs.field(factory=list, init=False)
    _holds: set[MemoryHold] = attrs.field(factory=set, init=False)
    _guard: ProcessGuard = attrs.field(factory=ProcessGuard, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    # --- What the library does ----------------------------------------------------

    @abstractmethod
    def listen(self, receiver: L | None, memory: Pieces) -> L:
        """Return a link that peers write to, with all of this memory.

        A receiver so far that is replaced has been ended.

        Raises:
            KvdockError: If the library cannot.
        """

    @abstractmethod
    def describe(self, receiver: L, memory: Pieces) -> Endpoint:
        """Return what a peer must know to write to one pool's memory."""

    @abstractmethod
    def connection_to(self, endpoint: Endpoint) -> C:
        """Return the connection for an endpoint, one of `connections` or a new one.

        Raises:
            KvdockError: If there cannot be one.
        """

    @staticmethod
    @abstractmethod
    def parts_of(rows: Int64Array, sizes: Int64Array) -> Iterable[Int64Array]:
        """Cut rows into calls of the library; see `send_rows`."""

    @abstractmethod
    def write(
        self, connection: C, link: L, table: Int64Array, deadline_s: float
    ) -> Outcome:
        """Make one call of the library; return OK, or why nothing was written.

        Args:
            connection: Where to.
            link: Its link.
            table: int64 (3, n): addresses here, addresses there, bytes.
            deadline_s: When to give up, on `time.monotonic()`'s clock.

        Raises:
            TransferLost: If an unknown part was written.
        """

    # --- The memory of this attachment ---------------------------------------------

    def add(self, pool: ConnectedPool) -> None:
        """Note the memory of a pool; nothing is registered yet."""
        with self._lock:
            self._pools.add(pool)

    def remove(self, pool: ConnectedPool) -> None:
        """Forget a pool; the last one ends all connections."""
        if self.forked:
            return
        self.withdraw()
        with self._lock:
            self._pools.discard(pool)
            if self._pools:
                return
            connections, self.connections = self.connections, set()
            holds = list(self._holds)
        # All of them begin to end before the first one is waited for.
        for one in connections:
            one.end()
        for one in connections:
            one.close()
        for hold in holds:
            hold.release()

    @property
    def forked(self) -> bool:
        """Return whether a parent has made this: a child must not meet its locks."""
        return self._guard.forked

    def _check_fork(self) -> None:
        if self.forked:
            raise KvdockError(
                "this process was forked after its pools were attached to "
                f"{self.library}",
                fix='Start it with "spawn", or attach only in children.',
            )

    def memory(self) -> Pieces:
        """Return the memory of all pools, each piece once."""
        with self._lock:
            return self._memory()

    def _memory(self) -> Pieces:
        known = (piece for pool in self._pools for piece in pool.ranges.pieces)
        return AddressRanges.of(known).pieces

    def endpoint(self, ranges: AddressRanges) -> bytes:
        """Listen, if that is not done yet; describe a pool.

        Raises:
            KvdockError: If the library cannot.
        """
        self._check_fork()
        with self._lock:
            before = self._receiver
            receiver = self._receiver = self.listen(before, self._memory())
            if before is not None and before is not receiver:
                self._open_ends.append(before)
            found = self.describe(receiver, ranges.pieces)
        return found.to_bytes(self.backend)

    def withdraw(self) -> bool:
        """Close what listens; return whether nothing lands any more.

        What is not closed within a few seconds is closed later: call it again.
        """
        with self._lock:
            receiver, self._receiver = self._receiver, None
            if receiver is not None:
                self._open_ends.append(receiver)
            ends = list(self._open_ends)
        until_s = time.monotonic() + _PATIENCE_S
        closed = [one for one in ends if one.close(remaining_s(until_s))]
        with self._lock:
            # One that could not be ended for one pool is not for the others either.
            self._open_ends = [one for one in self._open_ends if one not in closed]
            return not self._open_ends

    # --- Peers ----------------------------------------------------------------------

    @classmethod
    def read_endpoint(cls, given: bytes) -> Endpoint:
        """Read what a peer's `endpoint` returned.

        Raises:
            KvdockError: If it is not an endpoint of this backend.
        """
        names, more = cls.endpoint_names, cls.endpoint_metadata
        return Endpoint.from_bytes(given, cls.backend, names, metadata=more)

    def connect(self, given: bytes, deadline_s: float) -> Peer[C]:
        """Reach a peer: write a few bytes there, and wait until they have arrived.

        Raises:
            KvdockError: If it is not reached by the deadline.
        """
        self._check_fork()
        endpoint = self.read_endpoint(given)
        with self._lock:
            connection = self.connection_to(endpoint)
            self.connections.add(connection)
            connection.users += 1
            memory = self._memory()
            others = self.connections - {connection}
        for other in others:
            # Each holds a thread and some ten descriptors.
            other.end_if_gone()
        try:
            connection.join(endpoint, memory, deadline_s)
        except BaseException:
            self.disconnect(connection)
            raise
        return Peer(connection, AddressRanges.of(endpoint.memory))

    def disconnect(self, connection: C) -> bool:
        """End one use; return whether nothing lands at the peer any more."""
        with self._lock:
            connection.users -= 1
            last = not connection.users
            if last:
                self.connections.discard(connection)
        done = not last or connection.close()
        # Of calls that succeeded the peer has confirmed every byte.
        return done and time.monotonic() >= connection.uncertain_until_s

    def send(
        self, connection: C, table: Int64Array, deadline_s: float
    ) -> tuple[Outcome, MemoryHold | None]:
        """Make one call of the library; end its link if it fails. See `write`."""
        try:
            link = connection.open_link(deadline_s)
            if link is None:
                return Outcome.UNAVAILABLE, None
            return self.write(connection, link, table, deadline_s), None
        except KvdockError as error:
            log.warning("%s: %s", self.backend, error)
            return Outcome.UNAVAILABLE, None
        except TransferLost as reason:
            log.warning(
                "%s: rows for %s are lost: %s", self.backend, connection.peer, reason
            )
        hold = self._hold(closed=connection.lose(link))
        late = time.monotonic() >= deadline_s
        return Outcome.TIMEOUT if late else Outcome.UNAVAILABLE, hold

    def _hold(self, *, closed: bool) -> MemoryHold:
        """Return a hold that ends when the sockets of a peer are surely empty.

        Where the link could not be closed, it ends with the attachment.
        """
        hold = MemoryHold()
        with self._lock:
            self._holds.add(hold)
        hold.on_release(lambda: self._holds.discard(hold))
        if closed:
            timer = threading.Timer(DRAIN_S, hold.release)
            timer.daemon = True
            timer.start()
        return hold


@attrs.define(eq=False)
class ConnectedPool:
    """One pool's share of the transfers of its attachment: a `PeerMemory`."""

    shared: PeerConnections[Any, Any]
    ranges: AddressRanges

    @classmethod
    def of(
        cls,
        config: AttachConfig,
        blocks: Iterable[Block],
        own: PeerConnections[Any, Any],
    ) -> Self:
        """Return a new pool's share of its attachment."""
        shared = config.shared.setdefault(_SHARED, own)
        ranges = AddressRanges.of((one.address, one.nbytes) for one in blocks)
        pool = cls(shared, ranges)
        shared.add(pool)
        return pool

    def release(self) -> None:
        """End the pool's share; the last pool ends all connections."""
        self.shared.remove(self)

    def endpoint(self) -> bytes:
        """Open the pool's memory to peers."""
        return self.shared.endpoint(self.ranges)

    def connect(self, endpoint: bytes, deadline_s: float) -> Peer[Any]:
        """Connect to a peer's pool, and write a few bytes there."""
        return self.shared.connect(endpoint, deadline_s)

    def disconnect(self, peer: object) -> bool:
        """End a connection; return whether nothing lands at the peer any more."""
        return isinstance(peer, Peer) and self.shared.disconnect(peer.connection)

    def withdraw(self) -> bool:
        """Close the memory to peers: deregistering is not enough."""
        return self.shared.withdraw()

    def send(self, batch: Batch) -> BatchResult:
        """Write rows into a peer's memory.

        Of a call of the library that fails no row is OK, and its link is closed before
        this returns, with every other transfer on it.
        """
        peer, shared = batch.peer, self.shared
        if not isinstance(peer, Peer):
            return BatchResult.all(batch, Outcome.REFUSED)
        if shared.forked:
            return BatchResult.all(batch, Outcome.UNAVAILABLE)
        return send_rows(
            batch,
            self.ranges,
            peer.ranges,
            shared.parts_of,
            lambda table: shared.send(peer.connection, table, batch.deadline_s),
        )

"""Pages straight into a peer's host memory, with the library's TransferEngine.

An attachment that offers a pool has one engine that listens, for all of its pools.
An attachment that sends has one engine for each connection, so that a connection
that fails can be closed without touching the others.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import partial
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock import AddressRanges, BatchResult, MemoryHold, Outcome, send_rows
from kvdock.errors import KvdockError
from kvdock_mooncake.bounded import run_within
from kvdock_mooncake.direct_endpoint import Endpoint
from kvdock_mooncake.direct_engine import DirectEngine, EngineClosed
from kvdock_mooncake.inflight import InFlightLimit

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvdock import AttachConfig, Batch, Block
    from kvdock.arrays import Int64Array
    from kvdock_mooncake.settings import MooncakeSettings

log = logging.getLogger("kvdock")

MAX_ROWS = 512
"""Rows of one call. With more than 1024 pieces outstanding to a peer the library
fails at once, with an unknown part written."""

DRAIN_S = 5.0
"""How long bytes may lie in the sockets of a peer after a connection was closed."""

_MAX_CALL_BYTES = 64 << 20
_PIECES_PER_PEER = 1024
_AGAIN_S = 1.0
"""How long a peer that was lost is not tried again."""

_SHARED = "direct"


@attrs.define(eq=False)
class Peer:
    """A connection to the memory of one pool in another process.

    Args:
        endpoint: What the peer said about itself.
        ranges: Where it takes rows.
        engine: The engine that sends; None after it was lost.
    """

    endpoint: Endpoint
    ranges: AddressRanges
    engine: DirectEngine | None
    in_flight: InFlightLimit = attrs.field(init=False)
    lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    closed: bool = attrs.field(default=False, init=False)
    uncertain_until_s: float = attrs.field(default=0.0, init=False)
    _not_before_s: float = attrs.field(default=0.0, init=False)

    @in_flight.default
    def _limit(self) -> InFlightLimit:
        return InFlightLimit(_PIECES_PER_PEER)

    def lose(self, engine: DirectEngine) -> None:
        """Close the engine of a call that failed; the next call opens another."""
        with self.lock:
            if self.engine is engine:
                self.engine = None
        engine.close()
        self.uncertain_until_s = time.monotonic() + DRAIN_S

    def rest(self) -> None:
        """Note that it is not reached."""
        self._not_before_s = time.monotonic() + _AGAIN_S

    def resting(self) -> bool:
        """Return whether it was lost a moment ago."""
        return time.monotonic() < self._not_before_s


@attrs.define(eq=False)
class DirectAttachment:
    """What the pools of one attachment share for direct transfers.

    Args:
        settings: Complete settings.
    """

    settings: MooncakeSettings
    _blocks: dict[int, tuple[Block, ...]] = attrs.field(factory=dict, init=False)
    _receiver: DirectEngine | None = attrs.field(default=None, init=False)
    _open_ends: list[DirectEngine] = attrs.field(factory=list, init=False)
    _peers: set[Peer] = attrs.field(factory=set, init=False)
    _holds: set[MemoryHold] = attrs.field(factory=set, init=False)
    _pid: int = attrs.field(factory=os.getpid, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @property
    def forked(self) -> bool:
        """Whether a parent has made this: a child must not meet its locks."""
        return os.getpid() != self._pid

    def _check_fork(self) -> None:
        if self.forked:
            raise KvdockError(
                "this process was forked after its pools were attached to Mooncake",
                fix='Start it with "spawn", or attach only in children.',
            )

    @classmethod
    def shared(cls, config: AttachConfig, settings: MooncakeSettings) -> DirectPool:
        """Return a new pool's share of its attachment."""
        found = config.shared.setdefault(_SHARED, cls(settings))
        return DirectPool(found)

    def add(self, pool: DirectPool, blocks: tuple[Block, ...]) -> None:
        """Note the memory of a pool; nothing is registered yet."""
        with self._lock:
            self._blocks[id(pool)] = blocks

    def remove(self, pool: DirectPool) -> None:
        """Forget a pool; the last one ends all connections."""
        if self.forked:
            return
        self.withdraw()
        with self._lock:
            self._blocks.pop(id(pool), None)
            if self._blocks:
                return
            peers, holds = list(self._peers), list(self._holds)
        for peer in peers:
            self.disconnect(peer)
        for hold in holds:
            hold.release()

    def _known_blocks(self) -> tuple[Block, ...]:
        """Return the memory of all pools, each piece once."""
        blocks = {block for known in self._blocks.values() for block in known}
        whole: list[Block] = []
        end = 0
        for block in sorted(blocks, key=lambda one: (one.address, -one.nbytes)):
            if block.address + block.nbytes > end:
                whole.append(block)
                end = block.address + block.nbytes
        return tuple(whole)

    def endpoint(self, pool: DirectPool) -> bytes:
        """Listen, if that is not done yet; describe a pool.

        Raises:
            KvdockError: If the library cannot.
        """
        self._check_fork()
        with self._lock:
            blocks = self._known_blocks()
            engine = self._receiver
            if engine is not None and set(blocks) - set(engine.blocks):
                # A pool that was attached later: its memory is not known yet.
                self._close_receiver()
                engine = None
            if engine is None:
                engine = self._receiver = self._open(blocks)
            return Endpoint.of(
                engine.address,
                self.settings.protocol,
                engine.scratch_address,
                self._blocks[id(pool)],
            ).to_bytes()

    def _open(self, blocks: tuple[Block, ...]) -> DirectEngine:
        deadline_s = time.monotonic() + self.settings.setup_timeout_s
        start = partial(DirectEngine.open, self.settings, blocks)
        return run_within(
            deadline_s, start, DirectEngine.close, "starting a transfer engine"
        )

    def withdraw(self) -> bool:
        """Close the engine that listens; return whether nothing lands any more."""
        with self._lock:
            self._close_receiver()
            return not self._open_ends

    def _close_receiver(self) -> None:
        engine, self._receiver = self._receiver, None
        if engine is not None:
            self._open_ends.append(engine)
        self._open_ends = [one for one in self._open_ends if not one.close()]

    def connect(self, endpoint: bytes, deadline_s: float) -> Peer:
        """Reach a peer: write a few bytes there, and wait until they have arrived.

        Raises:
            KvdockError: If it is not reached by the deadline.
        """
        self._check_fork()
        found = Endpoint.from_bytes(endpoint)
        if found.protocol != self.settings.protocol:
            raise KvdockError(
                f"the peer at {found.address} uses {found.protocol}, and this process "
                f"{self.settings.protocol}",
                fix="Set the same `protocol` on both sides.",
            )
        engine = self._reach(found, deadline_s)
        peer = Peer(found, found.ranges, engine)
        with self._lock:
            self._peers.add(peer)
        return peer

    def _reach(self, endpoint: Endpoint, deadline_s: float) -> DirectEngine:
        with self._lock:
            blocks = self._known_blocks()

        def work() -> DirectEngine:
            engine = DirectEngine.open(self.settings, blocks)
            try:
                if engine.reach(endpoint.address, endpoint.scratch):
                    return engine
            except EngineClosed:
                pass
            except BaseException:
                engine.close()
                raise
            engine.close()
            raise KvdockError(
                f"no peer is reached at {endpoint.address}",
                fix="Look whether its process runs, and whether a firewall lets this "
                "host reach all of its ports above 1024.",
            )

        what = f"reaching the peer at {endpoint.address}"
        return run_within(deadline_s, work, DirectEngine.close, what)

    def disconnect(self, peer: Peer) -> bool:
        """End a connection; return whether nothing lands at the peer any more."""
        with self._lock:
            self._peers.discard(peer)
        with peer.lock:
            engine, peer.engine, peer.closed = peer.engine, None, True
        done = engine is None or engine.close()
        # Of calls that succeeded the peer has confirmed every byte.
        return done and time.monotonic() >= peer.uncertain_until_s

    def engine_of(self, peer: Peer, deadline_s: float) -> DirectEngine | None:
        """Return the engine for a peer; connect again if it was lost."""
        with peer.lock:
            if peer.engine is not None or peer.closed or peer.resting():
                return peer.engine
            try:
                peer.engine = self._reach(peer.endpoint, deadline_s)
            except KvdockError as error:
                peer.rest()
                log.warning("mooncake: %s", error)
            return peer.engine

    def hold(self) -> MemoryHold:
        """Return a hold that ends when the sockets of a peer are surely empty."""
        hold = MemoryHold()
        with self._lock:
            self._holds.add(hold)
        hold.on_release(lambda: self._holds.discard(hold))
        timer = threading.Timer(DRAIN_S, hold.release)
        timer.daemon = True
        timer.start()
        return hold


@attrs.define(eq=False)
class DirectPool:
    """One pool's share of the direct transfers of its attachment."""

    attachment: DirectAttachment
    _ranges: AddressRanges = attrs.field(factory=AddressRanges.of, init=False)

    def add(self, blocks: tuple[Block, ...]) -> None:
        """Note the memory of the pool."""
        self._ranges = AddressRanges.of((one.address, one.nbytes) for one in blocks)
        self.attachment.add(self, blocks)

    def release(self) -> None:
        """End the pool's share; the last pool ends all connections."""
        self.attachment.remove(self)

    def send(self, batch: Batch) -> BatchResult:
        """Write rows into a peer's memory.

        Ends a call of the library after its deadline if need be: until then it may
        read the rows. Of a call that fails no row is OK; its connection is closed
        before this returns, so that nothing reads the rows any more.
        """
        peer = batch.peer
        if not isinstance(peer, Peer):
            return BatchResult.all(batch, Outcome.REFUSED)
        if self.attachment.forked:
            return BatchResult.all(batch, Outcome.UNAVAILABLE)
        return send_rows(
            batch,
            self._ranges,
            peer.ranges,
            parts_of,
            lambda table: self._send(peer, table, batch.deadline_s),
        )

    def _send(
        self, peer: Peer, table: Int64Array, deadline_s: float
    ) -> tuple[Outcome, MemoryHold | None]:
        """Make one call of the library.

        Args:
            peer: Where to.
            table: int64 (3, n): addresses here, addresses there, bytes.
            deadline_s: When to give up waiting for room.
        """
        attachment, rows = self.attachment, table.shape[1]
        engine = attachment.engine_of(peer, deadline_s)
        if engine is None:
            return Outcome.UNAVAILABLE, None
        if not peer.in_flight.enter(rows, deadline_s):
            return Outcome.TIMEOUT, None
        try:
            if engine.write(peer.endpoint.address, *table):
                return Outcome.OK, None
        except EngineClosed:
            return Outcome.UNAVAILABLE, None
        finally:
            peer.in_flight.leave(rows)
        log.warning("mooncake: rows for %s were not confirmed", peer.endpoint.address)
        hold = attachment.hold()
        peer.lose(engine)
        late = time.monotonic() >= deadline_s
        return Outcome.TIMEOUT if late else Outcome.UNAVAILABLE, hold


def parts_of(rows: Int64Array, sizes: Int64Array) -> Iterator[Int64Array]:
    """Cut rows into calls of the library, by number and bytes.

    Args:
        rows: int64 (m,), positions in the batch.
        sizes: int64 (n,), bytes of each row of the batch.
    """
    start = 0
    ends = np.cumsum(sizes[rows])
    while start < len(rows):
        begun = ends[start - 1] if start else 0
        fits = int(np.searchsorted(ends, begun + _MAX_CALL_BYTES, "right"))
        stop = max(start + 1, min(fits, start + MAX_ROWS))
        yield rows[start:stop]
        start = stop

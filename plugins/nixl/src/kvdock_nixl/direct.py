"""Pages straight into a peer's host memory, with NIXL's UCX backend.

An attachment that offers a pool has one agent that listens, for all of its pools:
destroying it is what ends the transfers of peers that are out of reach. One that sends
has an agent for each peer: after a transfer that failed only destroying the agent keeps
it from reading the rows. Removing the peer from it does not (measured with 1.5.1: 18 to
59 MB of memory that had another use by then were sent when the peer went on).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import attrs

from kvdock import AddressRanges, BatchResult, MemoryHold, Outcome, send_rows
from kvdock.errors import KvdockError
from kvdock_nixl.direct_endpoint import Endpoint
from kvdock_nixl.library import load
from kvdock_nixl.ucx_agent import TransferLost, UcxAgent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from kvdock import AttachConfig, Batch, Block
    from kvdock.arrays import Int64Array

log = logging.getLogger("kvdock")

MAX_ROWS = 8192
"""Rows of one transfer."""

DRAIN_S = 5.0
"""How long bytes may lie in the sockets of a peer after a connection was closed."""

_AGAIN_S = 1.0
"""How long a peer that was lost is not tried again."""

_SHARED = "direct"


@attrs.define(eq=False)
class Remote:
    """The agent of another process, as the pools there share it.

    Args:
        name: Its name.
        metadata: What NIXL has to know of it.
        scratch: Address of a few bytes that any peer may write to.
        open_agent: Makes an agent that sends.
    """

    name: str
    metadata: bytes = attrs.field(repr=False)
    scratch: int
    open_agent: Callable[[], UcxAgent] = attrs.field(repr=False)
    users: int = attrs.field(default=0, init=False)
    lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)
    uncertain_until_s: float = attrs.field(default=0.0, init=False)
    _link: tuple[UcxAgent, threading.Event] | None = attrs.field(
        default=None, init=False
    )
    _not_before_s: float = attrs.field(default=0.0, init=False)

    def join(
        self, endpoint: Endpoint, blocks: Iterable[Block], deadline_s: float
    ) -> None:
        """Connect for one more pool.

        Args:
            endpoint: What the peer said about it.
            blocks: The memory of this attachment.
            deadline_s: When to give up, on `time.monotonic()`'s clock.

        Raises:
            TransferLost: If it is not reached.
        """
        with self.lock:
            if self._link is not None:
                # Of pools that came later, on either side: NIXL adds what is new.
                agent, _ = self._link
                agent.register((block.address, block.nbytes) for block in blocks)
                if endpoint.metadata != self.metadata:
                    agent.add_peer(self.name, endpoint.metadata)
            self.metadata = endpoint.metadata
            self._connect(deadline_s)
            self.users += 1

    def _connect(self, deadline_s: float) -> tuple[UcxAgent, threading.Event]:
        if self._link is None:
            agent = self.open_agent()
            try:
                agent.add_peer(self.name, self.metadata)
                agent.reach(self.name, self.scratch, deadline_s)
            except TransferLost:
                agent.close()
                self._not_before_s = time.monotonic() + _AGAIN_S
                raise
            self._link = agent, threading.Event()
        return self._link

    def connection(self, deadline_s: float) -> tuple[UcxAgent, threading.Event] | None:
        """Return an agent, and what is set when it is given up; None without one."""
        with self.lock:
            if self._link is None and time.monotonic() < self._not_before_s:
                return None
            try:
                return self._connect(deadline_s)
            except (TransferLost, KvdockError) as reason:
                log.warning("nixl: agent %s is not reached: %s", self.name, reason)
                return None

    def lose(self, agent: UcxAgent, lost: threading.Event) -> bool:
        """Destroy the agent of a transfer that failed, and end all others on it.

        Returns:
            Whether it is destroyed: then it reads no memory any more.
        """
        with self.lock:
            if self._link is not None and self._link[1] is lost:
                self._link = None
                lost.set()
        closed = agent.end()
        self.uncertain_until_s = time.monotonic() + DRAIN_S
        return closed

    def close(self) -> bool:
        """End the connection; return whether nothing reads memory any more."""
        with self.lock:
            link, self._link = self._link, None
        if link is None:
            return True
        link[1].set()
        return link[0].end()


@attrs.frozen(eq=False)
class Peer:
    """A connection to the memory of one pool in another process.

    Args:
        remote: Its agent.
        ranges: Where it takes rows.
    """

    remote: Remote
    ranges: AddressRanges


@attrs.define(eq=False)
class DirectAttachment:
    """What the pools of one attachment share for direct transfers.

    Args:
        transports: As in UCX_TLS.
    """

    transports: str
    _blocks: dict[int, tuple[Block, ...]] = attrs.field(factory=dict, init=False)
    _receiver: UcxAgent | None = attrs.field(default=None, init=False)
    _open_ends: list[UcxAgent] = attrs.field(factory=list, init=False)
    _remotes: dict[str, Remote] = attrs.field(factory=dict, init=False)
    _holds: set[MemoryHold] = attrs.field(factory=set, init=False)
    _pid: int = attrs.field(factory=os.getpid, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @classmethod
    def shared(cls, config: AttachConfig, transports: str) -> DirectPool:
        """Return a new pool's share of its attachment."""
        return DirectPool(config.shared.setdefault(_SHARED, cls(transports)))

    @property
    def forked(self) -> bool:
        """Whether a parent has made this: a child must not meet its locks."""
        return os.getpid() != self._pid

    def _check_fork(self) -> None:
        if self.forked:
            raise KvdockError(
                "this process was forked after its pools were attached to NIXL",
                fix='Start it with "spawn", or attach only in children.',
            )

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
            remotes, self._remotes = list(self._remotes.values()), {}
            holds = list(self._holds)
        for remote in remotes:
            remote.close()
        for hold in holds:
            hold.release()

    def _open(self, *, listens: bool) -> UcxAgent:
        agent = UcxAgent(load(), self.transports, listens=listens)
        self._register(agent)
        return agent

    def _register(self, agent: UcxAgent) -> None:
        agent.register((one.address, one.nbytes) for one in self._all_blocks())

    def _all_blocks(self) -> set[Block]:
        known = list(self._blocks.values())
        return {block for blocks in known for block in blocks}

    def _open_sender(self) -> UcxAgent:
        return self._open(listens=False)

    def endpoint(self, pool: DirectPool) -> bytes:
        """Listen, if that is not done yet; describe a pool.

        Raises:
            KvdockError: If NIXL cannot.
        """
        self._check_fork()
        with self._lock:
            if self._receiver is None:
                self._receiver = self._open(listens=True)
            agent = self._receiver
            # Those of a pool that was attached later.
            self._register(agent)
            return Endpoint.of(
                agent.name,
                agent.scratch_address,
                self._blocks[id(pool)],
                agent.metadata(),
            ).to_bytes()

    def withdraw(self) -> bool:
        """Destroy the agent that listens; return whether nothing lands any more."""
        with self._lock:
            agent, self._receiver = self._receiver, None
            if agent is not None and not agent.close():
                self._open_ends.append(agent)
            # One that could not be ended for one pool is not for the others either.
            self._open_ends = [one for one in self._open_ends if not one.close()]
            return not self._open_ends

    def connect(self, endpoint: bytes, deadline_s: float) -> Peer:
        """Reach a peer: write a few bytes there, and wait until they have arrived.

        Raises:
            KvdockError: If it is not reached by the deadline.
        """
        self._check_fork()
        found = Endpoint.from_bytes(endpoint)
        with self._lock:
            remote = self._remotes.get(found.agent)
            if remote is None:
                remote = Remote(
                    found.agent, found.metadata, found.scratch, self._open_sender
                )
                self._remotes[found.agent] = remote
        try:
            remote.join(found, self._all_blocks(), deadline_s)
        except TransferLost as reason:
            raise KvdockError(
                f"no peer is reached as agent {found.agent}: {reason}",
                fix="Look whether its process runs, whether both sides have the same "
                "ucx_transports, and whether a firewall is between them.",
            ) from reason
        return Peer(remote, found.ranges)

    def disconnect(self, peer: Peer) -> bool:
        """End a connection; return whether nothing lands at the peer any more."""
        remote = peer.remote
        with self._lock:
            remote.users -= 1
            last = not remote.users
            if last:
                self._remotes.pop(remote.name, None)
        done = not last or remote.close()
        # NIXL has flushed every transfer that it called done.
        return done and time.monotonic() >= remote.uncertain_until_s

    def send(
        self, peer: Peer, table: Int64Array, deadline_s: float
    ) -> tuple[Outcome, MemoryHold | None]:
        """Make one transfer.

        Args:
            peer: Where to.
            table: int64 (3, n): addresses here, addresses there, bytes.
            deadline_s: When to give up, on `time.monotonic()`'s clock.
        """
        remote = peer.remote
        if self.forked:
            return Outcome.UNAVAILABLE, None
        link = remote.connection(deadline_s)
        if link is None:
            return Outcome.UNAVAILABLE, None
        agent, lost = link
        try:
            agent.write(remote.name, table, deadline_s, lost)
        except TransferLost as reason:
            log.warning("nixl: rows for agent %s are lost: %s", remote.name, reason)
        else:
            return Outcome.OK, None
        ended = remote.lose(agent, lost)
        late = time.monotonic() >= deadline_s
        found = Outcome.TIMEOUT if late else Outcome.UNAVAILABLE
        return found, self._hold(ended=ended)

    def _hold(self, *, ended: bool) -> MemoryHold:
        """Return a hold that ends when the sockets of a peer are surely empty.

        Where the agent could not be destroyed, it ends with the attachment.
        """
        hold = MemoryHold()
        with self._lock:
            self._holds.add(hold)
        hold.on_release(lambda: self._holds.discard(hold))
        if not ended:
            return hold
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

        At the deadline the connection is closed, and with it every other transfer on
        it. Of a transfer that fails no row is OK.
        """
        peer = batch.peer
        if not isinstance(peer, Peer):
            return BatchResult.all(batch, Outcome.REFUSED)
        return send_rows(
            batch,
            self._ranges,
            peer.ranges,
            parts_of,
            lambda table: self.attachment.send(peer, table, batch.deadline_s),
        )


def parts_of(rows: Int64Array, _: Int64Array) -> Iterator[Int64Array]:
    """Cut rows into transfers, by number.

    Args:
        rows: int64 (m,), positions in the batch.
    """
    for start in range(0, len(rows), MAX_ROWS):
        yield rows[start : start + MAX_ROWS]

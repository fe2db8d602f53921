"""Send pages of a request straight into a peer's memory, in the background."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Batch, Operation, Outcome
from kvdock.errors import KvdockError
from kvdock.events import BatchEnded, RowsSent
from kvdock.geometry.matching import coalesce, match
from kvdock.peers.pool import check_names
from kvdock.peers.send_future import RunningSend, SendFuture
from kvdock.peers.tickets import TicketBook
from kvdock.pools.enums import Per
from kvdock.resilience.background_executor import BackgroundExecutor, Work
from kvdock.resilience.channel import MemoryUse
from kvdock.synchronization import check_deadline, remaining_s

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array, OutcomeArray
    from kvdock.config.core import CoreSettings
    from kvdock.geometry.matching import Rows
    from kvdock.peers.keys import MessageKeys
    from kvdock.peers.messages import Offer, PoolTicket, Ticket
    from kvdock.peers.pool import PeerPool
    from kvdock.transfer.leases import Lease

log = logging.getLogger("kvdock")

_OVERLAP_BYTES = 1 << 20
"""From this size on, pages are hashed while they are sent."""

_MOST_ROWS = 1 << 16
"""Rows of a batch where the backend has no limit: an abort waits for its end."""


_MOST_RECEIVERS = 64
"""Receivers that stay connected; of more, those that were idle longest end."""
_IDLE_RECEIVERS = 4
"""Idle receivers whose threads are kept."""


@attrs.define(eq=False)
class _Peer:
    """One pool of a peer: its connection, and the calls that use it."""

    lock: threading.Lock = attrs.field(factory=threading.Lock)
    connecting: threading.Lock = attrs.field(factory=threading.Lock)
    link: object = None
    _calls: dict[object, bool] = attrs.field(factory=dict)

    @property
    def busy(self) -> bool:
        """Return whether any call uses the connection, or opens it."""
        return bool(self._calls) or self.connecting.locked()

    @property
    def hanging(self) -> bool:
        """Return whether a call was abandoned and has not ended."""
        return any(list(self._calls.values()))

    def begin(self) -> object:
        """Note a call; return what ends it."""
        call = object()
        self._calls[call] = False
        return call

    def abandon(self, call: object) -> None:
        """Note that a call goes on without its caller, if it has not ended."""
        with self.lock:
            if call in self._calls:
                self._calls[call] = True

    def end(self, call: object) -> None:
        """Note the end of a call."""
        with self.lock:
            self._calls.pop(call, None)


@attrs.define(eq=False)
class _Receiver:
    """A process that is sent to: what waits for it, and its pools.

    Each has threads of its own: one that does not answer holds up its own requests.

    Args:
        peers: By pool and endpoint.
    """

    peers: dict[tuple[str, bytes], _Peer] = attrs.field(factory=dict)
    executor: BackgroundExecutor | None = None

    @property
    def idle(self) -> bool:
        """Return whether nothing is sent, nor waits to be."""
        executor = self.executor
        waiting = executor is not None and not executor.drain(time.monotonic())
        return not waiting and not any(one.busy for one in self.peers.values())

    def rest(self) -> None:
        """End its threads; the next request makes others."""
        executor, self.executor = self.executor, None
        if executor is not None:
            executor.close()


class Sender:
    """All that an attachment sends."""

    def __init__(
        self,
        core: CoreSettings,
        pools: Mapping[str, PeerPool],
        keys: MessageKeys | None,
    ) -> None:
        self._core = core
        self._pools = pools
        self._keys = keys
        self.tickets = TicketBook()
        self._digests = ThreadPoolExecutor(core.peers.senders, "kvdock-digest")
        # In the order of their last requests.
        self._receivers: dict[str, _Receiver] = {}
        self._closed = False
        self._lock = threading.Lock()

    def send(
        self,
        offers: Mapping[str, Offer],
        ticket: Ticket,
        pages: Mapping[str, Int64Array],
        timeout_s: float | None,
    ) -> SendFuture:
        """Send what a ticket asks for; see `PeerTransfers.send`."""
        deadline_s = self._core.deadlines.until(Operation.SEND, timeout_s)
        check_deadline(deadline_s)
        check_names((*ticket.pools, *pages), self._pools)
        for name in ticket.pools:
            if name not in offers:
                raise KvdockError(f"pool {name!r} was not offered by the peer")
            self._pools[name].check_peer(offers[name])
        used = (offers[name].epoch for name in ticket.pools)
        self.tickets.use(ticket, used)
        # Copies: the caller may use its own again before a worker comes to them.
        own = {name: np.array(one, np.int64) for name, one in pages.items()}
        deadline_s = min(deadline_s, ticket.expires_s)
        future = RunningSend(ticket, tuple(ticket.pools), deadline_s, self._keys)
        self._submit(
            ticket.epoch.process, future, lambda *_: self._run(future, offers, own)
        )
        return future

    def _submit(self, process: str, future: RunningSend, work: Work) -> None:
        ended: list[_Receiver] = []
        with self._lock:
            if self._closed:
                future.reject(Outcome.UNAVAILABLE)
                return
            receiver = self._receivers.pop(process, None)
            if receiver is None:
                ended = self._make_room()
                receiver = _Receiver()
            self._receivers[process] = receiver
            if receiver.executor is None:
                given = self._core.peers
                receiver.executor = BackgroundExecutor(
                    "kvdock-send", given.senders, given.queue
                )
            receiver.executor.submit(future, work)
        for one in ended:
            self._disconnect(one.peers)

    def _make_room(self) -> list[_Receiver]:
        """Forget the receivers that were idle longest; return them, to disconnect."""
        idle = [name for name, one in self._receivers.items() if one.idle]
        for name in idle[: -_IDLE_RECEIVERS or None]:
            self._receivers[name].rest()
        over = max(0, len(self._receivers) + 1 - _MOST_RECEIVERS)
        forgotten = [self._receivers.pop(name) for name in idle[:over]]
        for one in forgotten:
            one.rest()
        return forgotten

    def _disconnect(self, peers: Mapping[tuple[str, bytes], _Peer]) -> None:
        for (pool, _), peer in peers.items():
            with peer.lock:
                link, peer.link = peer.link, None
            if link is not None:
                self._pools[pool].disconnect(
                    link, self._core.deadlines.until("release")
                )

    def _run(
        self,
        future: RunningSend,
        offers: Mapping[str, Offer],
        pages: Mapping[str, Int64Array],
    ) -> OutcomeArray:
        outcomes = np.full(len(future), Outcome.REFUSED, np.uint8)
        for at, name in enumerate(future.pools):
            if future.aborted:
                break
            pool, part = self._pools[name], future.ticket.pools[name]
            try:
                outcome = self._send_pool(future, pool, offers[name], part, pages)
            except KvdockError as error:
                log.warning("pool %s is not sent: %s", name, error)
                outcome = Outcome.ERROR
            outcomes[at] = outcome
            if outcome and pool.attached.pool.required:
                # The request is lost; what is left would only cost the network.
                break
        return outcomes

    def _send_pool(
        self,
        future: RunningSend,
        pool: PeerPool,
        offer: Offer,
        part: PoolTicket,
        pages: Mapping[str, Int64Array],
    ) -> Outcome:
        mine, theirs = pool.grid, part.landing or offer.grid
        own = pages.get(pool.name)
        if own is None or _lacking(pool, own, part.slots).any():
            return Outcome.ABSENT
        used = np.unique(own[own >= 0])
        rows = coalesce(match(mine, theirs, own, part.slots))
        lease = self._lease(future, pool, used)
        if lease is None:
            return Outcome.TIMEOUT
        future.hold(lease)

        def digest() -> None:
            if future.ticket.digests:
                found = pool.digests.sent(mine, theirs, own, part.slots)
                future.add_digests(pool.name, found)

        if not len(rows):
            digest()
            return Outcome.OK
        began = time.monotonic()
        with self._beside(digest, rows.nbytes):
            outcomes, sent = self._send_rows(future, pool, offer, rows)
        self._notify(pool, rows, outcomes, (sent, began))
        return Outcome(int(outcomes.max()))

    @contextmanager
    def _beside(self, step: Callable[[], None], nbytes: int) -> Iterator[None]:
        """Do a step while bytes are sent, and wait for its end.

        Few bytes take less time than another thread needs to begin.
        """
        if nbytes < _OVERLAP_BYTES:
            step()
            yield
            return
        running = self._digests.submit(step)
        try:
            yield
        finally:
            # It reads pages whose lease ends after this.
            wait([running])
        running.result()

    def _lease(
        self, future: RunningSend, pool: PeerPool, pages: Int64Array
    ) -> Lease | None:
        """Share pages for reading; None if another call has one to the end."""
        leases = pool.attached.leases
        while True:
            lease = leases.share(pages)
            if lease is not None:
                return lease
            if not leases.wait(pages, max(0.0, future.deadline_s - time.monotonic())):
                return None

    def _send_rows(
        self, future: RunningSend, pool: PeerPool, offer: Offer, rows: Rows
    ) -> tuple[OutcomeArray, int]:
        """Send rows in batches; return an outcome for each, and the bytes sent."""
        outcomes = np.full(len(rows), Outcome.REFUSED, np.uint8)
        peer = self._peer(pool, offer)
        if peer.hanging:
            # One call that hangs is enough: each more would hold a thread.
            outcomes[:] = Outcome.UNAVAILABLE
            return outcomes, 0
        link = _connect(pool, peer, offer.endpoint, future.deadline_s)
        if link is None:
            outcomes[:] = Outcome.TIMEOUT
            return outcomes, 0
        sent = 0
        for start, stop in _batches(pool, rows, self._core.calls.batch_bytes):
            if future.aborted:
                break
            batch = Batch.send(
                rows.local[start:stop],
                rows.remote[start:stop],
                rows.sizes[start:stop],
                link,
                future.deadline_s,
                pool.name,
            )
            found, abandoned = self._call(future, pool, peer, batch)
            outcomes[start:stop] = found
            if abandoned or np.count_nonzero(found):
                outcomes[stop:] = found.max()
                self._drop(pool, peer, link, found)
                break
            sent += int(rows.sizes[start:stop].sum())
        return outcomes, sent

    def _call(
        self, future: RunningSend, pool: PeerPool, peer: _Peer, batch: Batch
    ) -> tuple[OutcomeArray, bool]:
        """Run a batch; return its outcomes, and whether it may still land."""
        future.enter()
        call = peer.begin()

        def over() -> None:
            peer.end(call)
            future.leave()

        # After a signal too, the call goes on and ends with `over`.
        use = MemoryUse(over)
        attached = pool.attached
        result = attached.channel.call(attached.handle, batch, use=use)
        outcomes, late = result.outcomes, not use.ended
        if late:
            peer.abandon(call)
        if late and not np.count_nonzero(outcomes):
            # Held memory: that it is there is not known before the hold ends.
            outcomes = np.full(len(batch), Outcome.TIMEOUT, np.uint8)
        return outcomes, late

    def _peer(self, pool: PeerPool, offer: Offer) -> _Peer:
        key = pool.name, offer.endpoint
        with self._lock:
            # It was forgotten, if it has just hung for long.
            receiver = self._receivers.setdefault(offer.epoch.process, _Receiver())
            found = receiver.peers.get(key)
            if found is not None:
                return found
            # Its process has withdrawn the endpoint that it had before.
            old = {
                one: peer
                for one, peer in receiver.peers.items()
                if one[0] == pool.name and not peer.busy
            }
            for one in old:
                del receiver.peers[one]
            found = receiver.peers[key] = _Peer()
        self._disconnect(old)
        return found

    def _drop(
        self, pool: PeerPool, peer: _Peer, link: object, outcomes: OutcomeArray
    ) -> None:
        """Forget a connection that is lost; the next request connects again."""
        if not (outcomes == Outcome.UNAVAILABLE).any():
            return
        with peer.lock:
            if peer.link is not link or peer.busy:
                return
            peer.link = None
        pool.disconnect(link, self._core.deadlines.until("release"))

    def _notify(
        self,
        pool: PeerPool,
        rows: Rows,
        outcomes: OutcomeArray,
        sent: tuple[int, float],
    ) -> None:
        channel = pool.attached.channel
        if not channel.observed:
            return
        nbytes, began = sent
        found = np.bincount(outcomes).tolist()
        channel.notify(
            BatchEnded(
                backend=channel.name,
                pool=pool.name,
                operation=Operation.SEND,
                outcomes={Outcome(at): n for at, n in enumerate(found) if n},
                nbytes=nbytes,
                seconds=time.monotonic() - began,
            )
        )
        channel.notify(RowsSent(pool=pool.name, rows=rows.count, descriptors=len(rows)))

    def close(self, deadline_s: float) -> bool:
        """Reject new requests, end idle connections; return whether all have ended."""
        with self._lock:
            self._closed = True
            receivers, self._receivers = self._receivers, {}
        executors = [one.executor for one in receivers.values() if one.executor]
        for executor in executors:
            executor.close()
        drained = all(one.drain(deadline_s) for one in executors)
        joined = all(one.join(deadline_s) for one in executors)
        if joined:
            self._digests.shutdown(wait=False)
        for receiver in receivers.values():
            self._disconnect(
                {key: peer for key, peer in receiver.peers.items() if not peer.busy}
            )
        return drained and joined


def _connect(pool: PeerPool, peer: _Peer, endpoint: bytes, deadline_s: float) -> object:
    """Return the connection, opened if need be; None if another request tries in vain.

    One call that hangs is enough: each more would hold a thread.
    """
    if not peer.connecting.acquire(timeout=remaining_s(deadline_s)):
        return None
    try:
        if peer.link is None:
            peer.link = pool.connect(endpoint, deadline_s)
        return peer.link
    finally:
        peer.connecting.release()


def _lacking(pool: PeerPool, pages: Int64Array, slots: Int64Array) -> BoolArray:
    """Return which slots wait for a page that is not given, bool (n,)."""
    positions = np.arange(len(slots))
    if pool.grid.per is Per.TOKEN:
        positions //= pool.grid.page_tokens
    if len(slots) and positions[-1] >= len(pages):
        return np.ones(1, np.bool_)
    found: BoolArray = (slots >= 0) & (pages[positions] < 0)
    return found


def _batches(pool: PeerPool, rows: Rows, most_bytes: int) -> list[tuple[int, int]]:
    """Cut rows by the backend's limit, and by bytes so that an abort is quick."""
    limit = min(pool.manifest.max_send_rows or _MOST_ROWS, _MOST_ROWS)
    ends = np.cumsum(rows.sizes)
    cuts = []
    start = 0
    while start < len(rows):
        before = int(ends[start - 1]) if start else 0
        stop = int(np.searchsorted(ends, before + most_bytes, side="right"))
        stop = min(start + limit, max(start + 1, stop), len(rows))
        cuts.append((start, stop))
        start = stop
    return cuts

"""Pages of requests that go straight from one process's memory to another's.

A decode engine offers its pools and leases slots for a request; a prefill engine
sends pages to them. The engines carry offers, tickets and completions over a
control channel of their own: kvdock carries no requests.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Operation, Outcome
from kvdock.errors import KvdockError
from kvdock.events import MessageRefused, RequestArrived, SlotsExpected
from kvdock.geometry.matching import coalesce, held_slots, match, missing, packed
from kvdock.peers.expectation import (
    Expectation,
    ExpectedPart,
    RequestState,
    distinct,
)
from kvdock.peers.keys import MessageKeys, UnsignedError
from kvdock.peers.messages import (
    Completion,
    Epoch,
    MessageError,
    Offer,
    PoolTicket,
    Ticket,
)
from kvdock.peers.pool import PeerPool, check_names
from kvdock.peers.sending import Sender
from kvdock.peers.tickets import TicketError
from kvdock.pools.enums import HitPolicy, Per
from kvdock.synchronization import check_deadline, remaining_s

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvdock.arrays import Int64Array
    from kvdock.geometry.grid import Grid
    from kvdock.peers.landing import LandingSpan
    from kvdock.peers.send_future import SendFuture
    from kvdock.transfer.attachment import Attachment
    from kvdock.transfer.leases import Lease

log = logging.getLogger("kvdock")

_PERCENT = 100
_MOST_VOID = 4096


class BusyError(KvdockError):
    """There is no room for a further request now; a later one may fit."""


@attrs.frozen(eq=False)
class _Wanted:
    """The share of one pool in a request.

    Args:
        slots: int64 (n,), checked; below 0 for none.
        offers: Number of each sender that has the pool, and what it offers.
    """

    pool: PeerPool
    slots: Int64Array
    offers: Sequence[tuple[int, Offer]]


class PeerTransfers:
    """All pools of an attachment that go straight to peers.

    One for each attachment, which closes it with itself.

    Args:
        attachment: Pools whose plan has `peers`.

    Raises:
        KvdockError: If no pool goes to peers, or there is one already.
    """

    def __init__(self, attachment: Attachment) -> None:
        self._core = attachment.core
        routes = attachment.plan.accepted
        names = [route.pool.name for route in routes if route.to_peers]
        if not names:
            raise KvdockError(
                "no pool of this attachment goes to peers",
                fix="Plan with needs=RouteRequirements(peers=True).",
            )
        record = attachment.namespace_record
        self.pools = {name: PeerPool.of(attachment[name], record) for name in names}
        path = self._core.peers.key_file
        self._keys = MessageKeys(Path(path)) if path else None
        self._sender = Sender(self._core, self.pools, self._keys)
        self._lock = threading.Lock()
        self._requests: dict[str, Expectation] = {}
        self._next = 0
        self._reported: set[str] = set()
        attachment.open_to_peers(self.close)

    def offer(self, pool: str, *, receives: bool = True) -> Offer:
        """Return what a peer must know of a pool.

        If it receives, its endpoint is opened for peers. A side that only sends offers
        its pools without one.

        Raises:
            KvdockError: If it is not such a pool, or its endpoint does not open.
        """
        check_names([pool], self.pools)
        endpoint = b""
        if receives:
            deadline_s = self._core.deadlines.until("attach")
            endpoint = self.pools[pool].endpoint(deadline_s)
        # After the endpoint: no ticket for the one before is good with this one.
        return self.pools[pool].offer(endpoint, self._epoch(), self._keys)

    def offers(self, *, receives: bool = True) -> dict[str, Offer]:
        """Return the offers of all pools, by name."""
        return {name: self.offer(name, receives=receives) for name in self.pools}

    def send(
        self,
        offers: Mapping[str, Offer],
        ticket: Ticket | bytes,
        pages: Mapping[str, npt.ArrayLike],
        *,
        timeout_s: float | None = None,
    ) -> SendFuture:
        """Send what a ticket asks for, in the background.

        Returns at once. A request that finds the queue full has ended already,
        with REFUSED for each pool.

        Args:
            offers: The receiver's pools, by name.
            ticket: What the receiver made for this request and sender.
            pages: Pool name to int64 (n,), the page of each `page_tokens` tokens,
                or of each state; `NO_PAGE` where nothing is sent, such as before
                a window. A pool that shares another one's indices may be left out.
            timeout_s: How long it may take, waiting for a worker included; None for
                `core.deadlines.send`.

        Returns:
            A future; its completion is for the receiver.

        Raises:
            TicketError: If the ticket may not be used: nothing was sent.
            KvdockError: On bad input, or a peer whose pages hold other bytes.
        """
        with self._refusing("ticket"):
            if isinstance(ticket, bytes):
                ticket = Ticket.from_bytes(ticket)
            ticket.check(self._keys)
        with self._refusing("offer"):
            for one in offers.values():
                one.check(self._keys)
        own = self._shared(pages)
        with self._refusing("ticket"):
            return self._sender.send(offers, ticket, own, timeout_s)

    def decline(self, ticket: Ticket | bytes) -> Completion:
        """Give a ticket up: nothing was sent for it, and nothing ever is.

        Returns:
            What frees the slots at the receiver at once.

        Raises:
            TicketError: If it was used, or was made for another process.
            KvdockError: If it is not a ticket.
        """
        with self._refusing("ticket"):
            if isinstance(ticket, bytes):
                ticket = Ticket.from_bytes(ticket)
            self._sender.tickets.decline(ticket.check(self._keys))
        return Completion(
            request=ticket.request,
            sender=ticket.sender,
            ended=True,
            outcomes=dict.fromkeys(ticket.pools, Outcome.REFUSED),
            keys=self._keys,
        )

    def expect(
        self,
        slots: Mapping[str, npt.ArrayLike],
        senders: Sequence[Mapping[str, Offer]],
        *,
        timeout_s: float | None = None,
        landing_timeout_s: float = 0.0,
    ) -> Expectation:
        """Lease slots for the pages of a request, and make a ticket per sender.

        The slots are leased until the request has arrived, or no byte of it can
        land any more; see `Expectation`.

        Args:
            slots: Pool name to int64 (tokens,), where each token goes: page times
                the pool's `page_tokens`, and the token in that page. Of pools
                whose parts are counted per page: int64 (pages,), a page for each
                of the sender's. `NO_PAGE` for slots without bytes. Before the
                window of a pool none is needed. A pool that shares another one's
                indices may be left out.
            senders: For each process that sends a part, the offers of its pools.
            timeout_s: How long it may take to arrive; None for
                `core.deadlines.send`.
            landing_timeout_s: How long to wait for room in the landing area.

        Raises:
            BusyError: If the landing area is full, a slot's page is in use, or too
                many slots are held for senders that were lost.
            KvdockError: On bad input, or if the senders do not hold all that a
                required pool needs.
        """
        deadline_s = self._core.deadlines.until(Operation.SEND, timeout_s)
        check_deadline(deadline_s)
        landing_s = self._core.deadlines.until(Operation.SEND, landing_timeout_s)
        with self._refusing("offer"):
            for offers in senders:
                for offer in offers.values():
                    offer.check(self._keys)
        claims = [_claim(offers) for offers in senders]
        wanted = self._wanted(self._shared(slots), senders)
        with _undone() as held:
            leases = {one.pool.name: self._lease(one, held) for one in wanted}
            parts: list[dict[str, ExpectedPart]] = [{} for _ in senders]
            for one in wanted:
                for number, offer in one.offers:
                    part = _planned(one, offer, landing_s, held)
                    if part is not None:
                        parts[number][one.pool.name] = part
            required = {o.pool.name for o in wanted if o.pool.attached.pool.required}
            with self._lock:
                # Its number is pending before any message can say that it is not.
                request = Expectation(
                    secrets.token_hex(8),
                    self._next,
                    parts,
                    leases,
                    frozenset(required),
                    deadline_s,
                    self._moved,
                )
                self._next += 1
                self._requests[request.request] = request
            held.clear()
        request.tickets = self._tickets(request, claims, parts)
        self._report_slots()
        return request

    def _tickets(
        self,
        request: Expectation,
        claims: Sequence[str],
        parts: Sequence[Mapping[str, ExpectedPart]],
    ) -> tuple[bytes, ...]:
        epoch = self._epoch()
        return tuple(
            Ticket(
                request=request.request,
                number=request.number,
                sender=sender,
                claim=claim,
                epoch=epoch,
                duration_s=remaining_s(request.deadline_s),
                digests=self._core.peers.verify,
                pools={name: _pool_ticket(one) for name, one in own.items()},
                keys=self._keys,
            ).to_bytes()
            for sender, (claim, own) in enumerate(zip(claims, parts, strict=True))
        )

    def _epoch(self) -> Epoch:
        """Return which tickets of this process may be used now."""
        with self._lock:
            known, following = list(self._requests.values()), self._next
        pending: list[int] = []
        over: list[int] = []
        for one in known:
            alive = one.state is RequestState.PENDING
            (pending if alive else over).append(one.number)
        oldest = min(pending, default=following)
        void = sorted(number for number in over if number > oldest)
        # Slots of the others are held as well, without a word about them.
        return Epoch(self._sender.tickets.claim, oldest, tuple(void[-_MOST_VOID:]))

    def complete(self, message: Completion | bytes) -> Expectation | None:
        """Take a sender's completion, for whichever request it is.

        Returns:
            The request; None for one that is over and free.

        Raises:
            KvdockError: If it is not a completion.
        """
        with self._refusing("completion"):
            if isinstance(message, bytes):
                message = Completion.from_bytes(message)
            message.check(self._keys)
        with self._lock:
            request = self._requests.get(message.request)
        if request is None or not request.complete(message):
            self._report(RequestArrived(outcome="late", nbytes=0))
        return request

    def withdraw(self, timeout_s: float | None = None) -> bool:
        """Close the endpoints of all pools to every peer.

        For slots that lost senders hold: where the transport guarantees that
        nothing lands after that, they are free now. Requests under way fail, and
        pools have to be offered again.

        Returns:
            Whether no slot is held any more.
        """
        deadline_s = self._core.deadlines.until("release", timeout_s)
        # These, and no later ones: a sender may use the ticket of a later one with
        # the next endpoint before this has closed all of the last one's.
        ended = self._all()
        for request in ended:
            request.withdraw()
        closed = [
            name for name, pool in self.pools.items() if pool.withdraw(deadline_s)
        ]
        for request in ended:
            for name in closed:
                request.fence(name)
        return all(request.free for request in self._all())

    def held_slots(self, pool: str) -> int:
        """Return how many slots are held for requests that have ended."""
        ended = (one for one in self._all() if one.state is not RequestState.PENDING)
        return sum(one.slots(pool) for one in ended)

    def close(self, deadline_s: float) -> bool:
        """End all requests; return whether no byte can come or go any more."""
        sent = self._sender.close(deadline_s)
        for request in self._all():
            request.abort()
        if all(request.free for request in self._all()):
            return sent
        return self.withdraw() and sent

    def _all(self) -> list[Expectation]:
        with self._lock:
            return list(self._requests.values())

    def _shared(self, given: Mapping[str, npt.ArrayLike]) -> dict[str, Int64Array]:
        """Return the indices of each pool, where they share them too."""
        check_names(given, self.pools)
        found = {}
        for name, numbers in given.items():
            row = np.asarray(numbers)
            if row.ndim != 1 or (row.size and row.dtype.kind not in "iu"):
                raise KvdockError(
                    f"pool {name!r}: a row of whole numbers is needed, not "
                    f"{row.dtype} {row.shape}"
                )
            found[name] = row.astype(np.int64, copy=False)
        for name, pool in self.pools.items():
            source = pool.attached.pool.indices_from
            if name not in found and source in found:
                found[name] = found[source]
        return found

    def _wanted(
        self,
        slots: Mapping[str, Int64Array],
        senders: Sequence[Mapping[str, Offer]],
    ) -> list[_Wanted]:
        """Check what a request takes, pool by pool."""
        found = []
        for name, pool in self.pools.items():
            required = pool.attached.pool.required
            offers = [(n, one[name]) for n, one in enumerate(senders) if name in one]
            if name not in slots:
                if required:
                    raise KvdockError(
                        f"pool {name!r} is required and was given no slots"
                    )
                continue
            for _, offer in offers:
                pool.check_peer(offer)
            lacking = missing(pool.grid, [offer.grid for _, offer in offers])
            if lacking and required:
                raise KvdockError(
                    f"pool {name!r}: none of the {len(senders)} senders has {lacking}",
                    fix="Expect the request from all ranks that hold a part of it.",
                )
            if lacking:
                log.warning("pool %s is not sent: no sender has %s", name, lacking)
                continue
            found.append(_Wanted(pool, _checked(pool, slots[name]), offers))
        if not found:
            raise KvdockError("a request needs slots of at least one pool")
        return found

    def _lease(self, wanted: _Wanted, held: list[Lease | LandingSpan]) -> Lease:
        pool = wanted.pool
        name, slots = pool.name, wanted.slots
        used = slots[slots >= 0]
        most = self._core.peers.max_held_percent * pool.slots // _PERCENT
        lost = self.held_slots(name)
        if lost and lost + len(used) > most:
            raise BusyError(
                f"pool {name!r}: {lost} slots are held for senders that were lost, "
                f"of {most} at most",
                fix="Close the endpoint with `withdraw`, or raise "
                "core.peers.max_held_percent.",
            )
        pages = used if pool.grid.per is Per.PAGE else used // pool.grid.page_tokens
        lease = pool.attached.leases.take_all(np.unique(pages))
        if lease is None:
            raise BusyError(f"pool {name!r}: the page of a slot is in use")
        held.append(lease)
        return lease

    def _moved(self, request: Expectation) -> None:
        """Forget a request that is free, and report what has changed."""
        state = request.state
        if state is not RequestState.PENDING:
            with self._lock:
                known = request.request in self._reported
                self._reported.add(request.request)
                if request.free:
                    self._requests.pop(request.request, None)
                    self._reported.discard(request.request)
            if not known:
                nbytes = request.nbytes if state is RequestState.ARRIVED else 0
                self._report(RequestArrived(outcome=str(state), nbytes=nbytes))
        self._report_slots()

    @contextmanager
    def _refusing(self, kind: str) -> Iterator[None]:
        """Count a message of a peer that is refused."""
        try:
            yield
        except (MessageError, TicketError, UnsignedError) as error:
            reason = "unreadable"
            if isinstance(error, TicketError):
                reason = error.reason
            elif isinstance(error, UnsignedError):
                reason = "unsigned"
            self._report(MessageRefused(message=kind, reason=reason))
            raise

    def _report(self, event: RequestArrived | MessageRefused) -> None:
        # Observers sit on each backend's manager; one of them is enough.
        for pool in list(self.pools.values())[:1]:
            pool.attached.channel.notify(event)

    def _report_slots(self) -> None:
        for name, pool in self.pools.items():
            channel = pool.attached.channel
            if not channel.observed:
                continue
            pending, held = 0, 0
            for one in self._all():
                if one.state is RequestState.PENDING:
                    pending += one.slots(name)
                else:
                    held += one.slots(name)
            area = pool.area
            channel.notify(
                SlotsExpected(
                    pool=name,
                    expected=pending,
                    held=held,
                    landing_bytes=area.capacity if area else 0,
                    landing_used=area.used if area else 0,
                )
            )


@contextmanager
def _undone() -> Iterator[list[Lease | LandingSpan]]:
    """Release what was leased, unless the list is cleared."""
    held: list[Lease | LandingSpan] = []
    try:
        yield held
    finally:
        for one in held:
            one.release()


def _checked(pool: PeerPool, slots: Int64Array) -> Int64Array:
    """Return the slots that are needed; -1 for the others.

    Raises:
        KvdockError: If one is given twice, lies outside of the pool, or is missing
            in a window.
    """
    name, spec = pool.name, pool.attached.pool
    if not distinct(slots).all():
        raise KvdockError(f"pool {name!r}: a slot is given twice")
    if len(slots) and slots.max() >= pool.slots:
        raise KvdockError(
            f"pool {name!r}: slot {slots.max()} is outside of {pool.slots}"
        )
    if spec.hit_policy is HitPolicy.TRAILING_PAGES:
        window = spec.window_pages
        if pool.grid.per is Per.TOKEN:
            # In tokens: the last page may be a partial one.
            window *= pool.grid.page_tokens
        first = max(0, len(slots) - window)
        if spec.required and (slots[first:] < 0).any():
            raise KvdockError(
                f"pool {name!r}: a slot is missing in its window, the last "
                f"{len(slots) - first}"
            )
        slots = np.where(np.arange(len(slots)) >= first, slots, -1)
    return held_slots(pool.grid, slots)


def _planned(
    wanted: _Wanted,
    offer: Offer,
    landing_s: float,
    held: list[Lease | LandingSpan],
) -> ExpectedPart | None:
    """Return what one sender sends of a pool; None if it has nothing of it."""
    pool, slots, theirs = wanted.pool, wanted.slots, offer.grid
    by_page = theirs.per is Per.PAGE
    positions = len(slots) if by_page else theirs.positions(len(slots))
    # The sender's own pages are not known: as many in a row stand for them, which
    # may be more than it has where most of them are not sent.
    theirs = attrs.evolve(theirs, pages=max(1, positions))
    numbers = np.arange(positions)
    rows = coalesce(match(theirs, pool.grid, numbers, slots))
    if not len(rows):
        return None
    verify = pool.attached.channel.core.peers.verify
    part = ExpectedPart(pool, theirs, slots, positions, rows.nbytes, verify)
    threshold = pool.manifest.landing_run_bytes
    if pool.area is None or rows.nbytes >= threshold * len(rows):
        return part
    page = packed(theirs, pool.grid, 0, 1).page_bytes
    whole = coalesce(match(theirs, _landing(part, 0), numbers, _numbered(slots)))
    if len(whole) >= len(rows) or positions * page > pool.area.capacity:
        # Landing makes no longer runs, or never has room.
        return part
    span = pool.area.acquire(positions * page, landing_s)
    if span is None:
        raise BusyError(
            f"pool {pool.name!r}: the landing area has no {positions * page} bytes now",
            fix="Expect it again later, or raise core.peers.landing_bytes.",
        )
    held.append(span)
    if rows.nbytes < span.nbytes:
        # What is not written is hashed as zeros, here and there.
        span.memory[:] = 0
    return attrs.evolve(part, landing=(span, _landing(part, span.address)))


def _numbered(slots: Int64Array) -> Int64Array:
    return np.where(slots >= 0, np.arange(len(slots)), -1)


def _landing(part: ExpectedPart, address: int) -> Grid:
    return packed(part.theirs, part.pool.grid, address, part.positions)


def _pool_ticket(part: ExpectedPart) -> PoolTicket:
    if part.landing is None:
        return PoolTicket(part.slots)
    return PoolTicket(_numbered(part.slots), part.landing[1])


def _claim(offers: Mapping[str, Offer]) -> str:
    """Return the name of the one process whose offers these are."""
    found = {one.epoch.process for one in offers.values()}
    if len(found) > 1:
        raise KvdockError(
            "the offers of one sender are of several processes",
            fix="Give the offers of each process on their own, and new ones of a "
            "process that was restarted.",
        )
    return found.pop() if found else "none"

"""A ticket is used once, by the process and the endpoint that it names."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from peer_reference import PeerReference
from peers import LONG_S, Content, Peer, settings
from request_pools import attention, peers
from shelf import Heard

from kvdock.batch import Outcome
from kvdock.errors import KvdockError
from kvdock.events import MessageRefused
from kvdock.peers import tickets
from kvdock.peers.expectation import Expectation, PeerState, RequestState
from kvdock.peers.keys import UnsignedError
from kvdock.peers.messages import Epoch, Offer, Ticket
from kvdock.peers.tickets import TicketBook, TicketError

PAGES = {"kv": [0, 1]}
SLOTS = {"kv": np.arange(8)}
NEXT = 3
"""What the next request has in the same slots."""


@contextmanager
def two() -> Iterator[tuple[Peer, Peer]]:
    with peers(Peer([attention()]), Peer([attention()])) as (sender, receiver):
        sender.fill(Content([attention()], 8), PAGES)
        yield sender, receiver


def expected(sender: Peer, receiver: Peer, **more: Any) -> Expectation:
    offers = [sender.transfers.offers(receives=False)]
    return receiver.transfers.expect(SLOTS, offers, **more)


def deliver(sender: Peer, receiver: Peer, request: Expectation) -> None:
    offers = receiver.transfers.offers()
    future = sender.transfers.send(offers, request.tickets[0], PAGES)
    assert future.wait_quiet(LONG_S)
    receiver.transfers.complete(future.completion().to_bytes())
    assert request.state is RequestState.ARRIVED, request.reason
    assert request.free


def check_refused(sender: Peer, receiver: Peer, ticket: bytes, why: str) -> None:
    """Give the slots to the next request, and try a ticket on them."""
    receiver.memory["kv"][:] = NEXT
    offers = receiver.transfers.offers()
    with pytest.raises(KvdockError, match=why):
        sender.transfers.send(offers, ticket, PAGES).wait_quiet(LONG_S)
    assert (receiver.memory["kv"] == NEXT).all(), "the next request's slots"


def test_a_second_use_of_a_ticket_writes_nothing() -> None:
    with two() as (sender, receiver):
        request = expected(sender, receiver)
        deliver(sender, receiver, request)
        check_refused(sender, receiver, request.tickets[0], "used")


def test_an_old_ticket_with_new_offers_after_withdraw_writes_nothing() -> None:
    with two() as (sender, receiver):
        request = expected(sender, receiver)
        assert receiver.transfers.withdraw()
        assert request.free
        check_refused(sender, receiver, request.tickets[0], "void")


def test_a_second_use_while_the_first_one_runs_says_nothing_to_the_receiver() -> None:
    """Its completion would free slots that the first use is writing to."""
    going, go_on = threading.Event(), threading.Event()

    class Waiting(PeerReference):
        def rows(self, local: Any, remote: Any, sizes: Any) -> Any:
            going.set()
            assert go_on.wait(LONG_S)
            return local, remote, sizes

    with peers(Peer([attention()], plugin=Waiting()), Peer([attention()])) as two_:
        sender, receiver = two_
        sender.fill(Content([attention()], 8), PAGES)
        request = expected(sender, receiver)
        offers, ticket = receiver.transfers.offers(), request.tickets[0]
        future = sender.transfers.send(offers, ticket, PAGES)
        assert going.wait(LONG_S)
        with pytest.raises(TicketError, match="used before"):
            sender.transfers.send(offers, ticket, PAGES)
        with pytest.raises(TicketError, match="used before"):
            sender.transfers.decline(ticket)
        go_on.set()
        assert future.wait_quiet(LONG_S)
        receiver.transfers.complete(future.completion())
        assert request.state is RequestState.ARRIVED


def test_of_many_uses_at_once_one_sends() -> None:
    with two() as (sender, receiver):
        request = expected(sender, receiver)
        offers, ticket = receiver.transfers.offers(), request.tickets[0]
        start = threading.Barrier(8)
        found: list[str] = []

        def use() -> None:
            start.wait()
            try:
                sender.transfers.send(offers, ticket, PAGES)
                found.append("sent")
            except TicketError as error:
                found.append(error.reason)

        threads = [threading.Thread(target=use) for _ in range(8)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert sorted(found) == ["sent", *["used"] * 7]


def test_a_request_that_failed_with_its_sender_unknown_voids_its_ticket() -> None:
    with two() as (sender, receiver):
        pending = receiver.transfers.expect(
            {"kv": np.arange(8) + 32}, [sender.transfers.offers(receives=False)]
        )
        request = expected(sender, receiver)
        request.sender_lost(0, PeerState.UNKNOWN)
        check_refused(sender, receiver, request.tickets[0], "void")
        # The other one, which is older, is as good as before.
        receiver.memory["kv"][:] = 0
        deliver(sender, receiver, pending)


def test_a_wrong_message_voids_no_ticket_but_its_own() -> None:
    with two() as (sender, receiver):
        request = expected(sender, receiver)
        later = attrs.evolve(
            Ticket.from_bytes(request.tickets[0]),
            number=1 << 40,
            epoch=Epoch(receiver.transfers.offer("kv").epoch.process, 1 << 41),
        )
        with pytest.raises(TicketError, match="void"):
            sender.transfers.send(receiver.transfers.offers(), later, PAGES)
        deliver(sender, receiver, request)


def test_a_ticket_is_good_for_its_time_on_the_clock_of_each_side() -> None:
    with two() as (sender, receiver):
        request = expected(sender, receiver, timeout_s=0.2)
        offers = receiver.transfers.offers()
        ticket = Ticket.from_bytes(request.tickets[0])
        assert 0 < ticket.duration_s <= 0.2
        assert request.wait(LONG_S) is RequestState.FAILED
        assert ticket.expires_s <= time.monotonic() + 0.2
        # Whatever the deadline of the sender's own is.
        late = attrs.evolve(ticket, received_s=time.monotonic() - 0.2)
        with pytest.raises(TicketError) as caught:
            sender.transfers.send(offers, late, PAGES, timeout_s=LONG_S)
        assert caught.value.reason == "expired"
        again = attrs.evolve(ticket, received_s=time.monotonic() + 1000)
        future = sender.transfers.send(offers, again, PAGES, timeout_s=LONG_S)
        assert future.deadline_s <= time.monotonic() + LONG_S


def test_a_ticket_that_is_declined_frees_its_slots_at_once() -> None:
    with two() as (sender, receiver):
        request = expected(sender, receiver)
        completion = sender.transfers.decline(request.tickets[0])
        receiver.transfers.complete(completion.to_bytes())
        assert request.state is RequestState.FAILED
        assert request.reason == "pool kv: refused at the sender"
        assert request.free
        check_refused(sender, receiver, request.tickets[0], "used")


def test_a_ticket_of_another_process_is_not_declined() -> None:
    with two() as (sender, receiver), peers(Peer([attention()])) as (other,):
        request = expected(sender, receiver)
        with pytest.raises(TicketError, match="another process"):
            other.transfers.decline(request.tickets[0])


def test_offers_of_another_receiver_are_not_used_with_a_ticket() -> None:
    with two() as (sender, receiver), peers(Peer([attention()])) as (other,):
        request = expected(sender, receiver)
        with pytest.raises(TicketError, match="two receivers"):
            sender.transfers.send(other.transfers.offers(), request.tickets[0], PAGES)
        deliver(sender, receiver, request)


def test_offers_of_two_processes_are_not_one_sender() -> None:
    pools = [attention(), attention(name="more", anchor=False)]
    with peers(Peer(pools), Peer(pools), Peer(pools)) as (one, other, receiver):
        mixed = {
            "kv": one.transfers.offer("kv", receives=False),
            "more": other.transfers.offer("more", receives=False),
        }
        slots = {"kv": np.arange(8), "more": np.arange(8)}
        with pytest.raises(KvdockError, match="several processes"):
            receiver.transfers.expect(slots, [mixed])


def test_what_is_refused_is_counted() -> None:
    heard = Heard(MessageRefused)
    one = Peer([attention()], observers=[heard])
    with peers(one, Peer([attention()])) as (sender, receiver):
        sender.fill(Content([attention()], 8), PAGES)
        request = expected(sender, receiver)
        deliver(sender, receiver, request)
        for ticket in (request.tickets[0], b"no ticket"):
            with pytest.raises(KvdockError):
                sender.transfers.send(receiver.transfers.offers(), ticket, PAGES)
        with pytest.raises(KvdockError):
            sender.transfers.complete(b"no completion")
    assert [(one.message, one.reason) for one in heard.events] == [
        ("ticket", "used"), ("ticket", "unreadable"), ("completion", "unreadable"),
    ]  # fmt: skip


def keyed(path: Path) -> Peer:
    return Peer([attention()], core=settings(peers={"key_file": str(path)}))


def test_with_a_key_only_signed_messages_are_taken(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text(secrets.token_hex(32))
    with (
        peers(keyed(keys), keyed(keys)) as (sender, receiver),
        peers(Peer([attention()]), Peer([attention()])) as (without, stranger),
    ):
        sender.fill(Content([attention()], 8), PAGES)

        def over(peer: Peer, *, receives: bool) -> dict[str, Offer]:
            offer = peer.transfers.offer("kv", receives=receives)
            return {"kv": Offer.from_bytes(offer.to_bytes())}

        with pytest.raises(UnsignedError):
            receiver.transfers.expect(SLOTS, [over(without, receives=False)])
        request = receiver.transfers.expect(SLOTS, [over(sender, receives=False)])
        forged = attrs.evolve(
            Ticket.from_bytes(request.tickets[0]), sealed=b"", keys=None
        ).to_bytes()
        offers = over(receiver, receives=True)
        with pytest.raises(UnsignedError):
            sender.transfers.send(offers, forged, PAGES)
        with pytest.raises(UnsignedError):
            sender.transfers.send(
                over(stranger, receives=True), request.tickets[0], PAGES
            )
        with pytest.raises(UnsignedError):
            sender.transfers.decline(forged)
        future = sender.transfers.send(offers, request.tickets[0], PAGES)
        assert future.wait_quiet(LONG_S)
        forged = attrs.evolve(future.completion(), keys=None).to_bytes()
        with pytest.raises(UnsignedError):
            receiver.transfers.complete(forged)
        assert not request.free
        receiver.transfers.complete(future.completion().to_bytes())
        assert request.state is RequestState.ARRIVED


def ticket(number: int, sender: int = 0, **more: Any) -> Ticket:
    given = {"claim": "?", "epoch": Epoch("receiver", 0), "duration_s": 60.0, **more}
    return Ticket(
        request="r", number=number, sender=sender, digests=False, pools={}, **given
    )


@given(
    st.lists(
        st.tuples(
            st.integers(0, 12), st.integers(0, 1), st.integers(0, 12), st.booleans()
        ),
        max_size=40,
    )
)
def test_no_ticket_is_used_twice_however_little_is_remembered(steps: Any) -> None:
    """And none of a request that its receiver has called over."""
    book = TicketBook()
    used: set[tuple[int, int]] = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tickets, "_MOST_TICKETS", 3)
        for number, sender, newest, declines in steps:
            one = ticket(
                number, sender, claim=book.claim, epoch=Epoch("receiver", newest)
            )
            try:
                if declines:
                    book.decline(one)
                else:
                    book.use(one, [])
                    assert number >= newest
            except TicketError:
                continue
            assert (number, sender) not in used
            used.add((number, sender))


def test_with_too_many_receivers_all_tickets_become_void() -> None:
    book = TicketBook()
    first = ticket(0, claim=book.claim, epoch=Epoch("0", 0))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tickets, "_MOST_RECEIVERS", 2)
        for name in "012":
            one = ticket(0, claim=book.claim, epoch=Epoch(name, 0))
            if name == "2":
                with pytest.raises(TicketError, match="another process"):
                    book.use(one, [])
            else:
                book.use(one, [])
        with pytest.raises(TicketError, match="another process"):
            book.use(first, [])
        book.use(ticket(0, claim=book.claim, epoch=Epoch("2", 0)), [])


def test_slots_of_a_withdrawn_endpoint_are_free_only_if_no_new_one_is_written() -> None:
    """A request that begins while endpoints are closed keeps its slots."""
    closing, go_on = threading.Event(), threading.Event()

    class Slow(PeerReference):
        def withdraw(self, handle: Any) -> bool:
            found = super().withdraw(handle)
            closing.set()
            assert go_on.wait(LONG_S)
            return found

    with peers(Peer([attention()]), Peer([attention()], plugin=Slow())) as two_:
        sender, receiver = two_
        receiver.transfers.offers()
        first = expected(sender, receiver)
        thread = threading.Thread(target=receiver.transfers.withdraw)
        thread.start()
        assert closing.wait(LONG_S)
        # Over before its endpoint is: no new offer lets its ticket through.
        assert first.state is RequestState.FAILED
        later = receiver.transfers.expect(
            {"kv": np.arange(8) + 32}, [sender.transfers.offers(receives=False)]
        )
        go_on.set()
        thread.join()
        assert first.free
        assert later.state is RequestState.PENDING
        assert not later.free
        future = sender.transfers.send(
            receiver.transfers.offers(), later.tickets[0], PAGES
        )
        assert future.wait_quiet(LONG_S)
        assert future.outcomes["kv"] is Outcome.OK

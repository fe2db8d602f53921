"""Whole requests over a backend's library, while a side is killed, stopped or aborts.

The memory of both sides lies in files that the test maps as well: it sees what lies
in the slots of a process that is stopped, and plays the next request that uses them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType

import numpy as np
import pytest
from peer_processes import Memory, PeerProcess, memory_file
from peer_trials import settings_of

from kvdock import (
    Attachment,
    Dock,
    DType,
    Namespace,
    PoolKind,
    PoolSpec,
    Region,
    RouteRequirements,
    Shard,
)
from kvdock.config import CoreSettings, structure
from kvdock.errors import KvdockError
from kvdock.peers import (
    Expectation,
    Offer,
    PeerState,
    PeerTransfers,
    RequestState,
    SendFuture,
)
from kvdock.pools import Part

PAGE_TOKENS = 64
TOKEN_BYTES = 4096
PAGES = 512
BYTES = PAGES * PAGE_TOKENS * TOKEN_BYTES
"""128 MiB: some tenths of a second, in which a process can be stopped."""

LONG_S = 60.0
SENT, NEXT_SENT, NEXT_HERE = 7, 5, 3
"""Bytes of the request, of the sender's next one, and of the receiver's next one."""

LONG = "TESTS_OF_KVDOCK_TORTURE"
long_form = pytest.mark.skipif(
    LONG not in os.environ, reason=f"90 s: make torture-direct sets {LONG}"
)

Pair = tuple[PeerProcess, PeerProcess]


class RequestSide:
    """One process of a request: an attachment with one pool.

    Args:
        backend: Name of an installed backend.
        memory: The pool's memory.
        settings: Of the backend.
    """

    def __init__(
        self, backend: str, memory: Memory, settings: dict[str, object]
    ) -> None:
        self.backend = backend
        self.memory = memory
        self.settings = settings
        self.attachment: Attachment | None = None
        self.transfers: PeerTransfers | None = None
        self.future: SendFuture | None = None
        self.request: Expectation | None = None
        self.began_s = 0.0

    def open(self, send_s: float) -> None:
        """Attach, with a deadline for sends and for requests."""
        pool = PoolSpec(
            name="kv",
            kind=PoolKind.MLA,
            parts=[Part("kv", DType.U8, (TOKEN_BYTES,))],
            layers=range(1),
            page_tokens=PAGE_TOKENS,
            anchor=True,
        )
        dock = Dock.load(
            require=[self.backend], environ={"KVDOCK_PLUGINS": self.backend}
        )
        given = {self.backend: self.settings}
        needs = RouteRequirements(peers=True)
        plan = dock.plan([pool], Shard(), needs=needs, settings=given)
        region = Region.of(pool, Shard(), [self.memory], PAGES)
        core: CoreSettings = structure(
            CoreSettings,
            # Small batches: an abort takes effect between two of them.
            {"deadlines": {"send": send_s}, "calls": {"batch_bytes": 4 << 20}},
            where="tests",
        )
        self.attachment = Attachment.open(
            dock, plan, Namespace(model="m"), {"kv": region}, core=core, settings=given
        )
        self.transfers = PeerTransfers(self.attachment)

    @property
    def _peers(self) -> PeerTransfers:
        assert self.transfers is not None
        return self.transfers

    @property
    def _request(self) -> Expectation:
        assert self.request is not None
        return self.request

    @property
    def _future(self) -> SendFuture:
        assert self.future is not None
        return self.future

    def offer(self, *, receives: bool) -> bytes:
        """Return the offer of the pool."""
        return self._peers.offer("kv", receives=receives).to_bytes()

    def expect(self, sender: bytes) -> bytes:
        """Lease all slots, the pages in reverse; return the ticket."""
        slots = np.arange(PAGES * PAGE_TOKENS).reshape(-1, PAGE_TOKENS)[::-1].ravel()
        senders = [{"kv": Offer.from_bytes(sender)}]
        self.request = self._peers.expect({"kv": slots}, senders)
        return self.request.tickets[0]

    def begin(self, offer: bytes, ticket: bytes) -> None:
        """Begin to send all pages."""
        offers = {"kv": Offer.from_bytes(offer)}
        self.began_s = time.monotonic()
        pages = {"kv": np.arange(PAGES)}
        self.future = self._peers.send(offers, ticket, pages)

    def ended(self, timeout_s: float = LONG_S) -> tuple[str, float]:
        """Wait until the send has ended; return its outcome, and after how long."""
        assert self._future.wait(timeout_s), "the send has no end"
        took_s = time.monotonic() - self.began_s
        return self._future.outcomes["kv"].name, took_s

    def completion(self, timeout_s: float = LONG_S) -> bytes:
        """Return the completion once nothing of the send can land any more."""
        assert self._future.wait_quiet(timeout_s), "the send does not become quiet"
        return self._future.completion().to_bytes()

    def leased(self) -> int:
        """Return how many pages are leased."""
        return self._peers.pools["kv"].attached.leases.leased_pages

    def abort_send(self) -> None:
        """Abort the send."""
        self._future.abort()

    def abort(self) -> None:
        """Abort the request."""
        self._request.abort()

    def complete(self, message: bytes) -> bool:
        """Take a completion; return whether its request is known."""
        return self._peers.complete(message) is not None

    def lost(self, state: str) -> None:
        """Note that the sender is lost."""
        self._request.sender_lost(0, PeerState(state))

    def state(self, timeout_s: float = 0.0) -> str:
        """Return what became of the request."""
        return str(self._request.wait(timeout_s))

    def free(self, timeout_s: float = 0.0) -> bool:
        """Wait until no slot is held; return whether that is so."""
        return self._request.wait_free(timeout_s)

    def withdraw(self) -> bool:
        """Close the endpoint; return whether no slot is held any more."""
        return self._peers.withdraw()


@contextmanager
def two_sides(
    backend: str, settings: dict[str, object], send_s: tuple[float, float]
) -> Iterator[Pair]:
    """Yield a sender and a receiver, attached, each with its own deadline."""
    with ExitStack() as stack:
        pair = []
        for seconds in send_s:
            path = stack.enter_context(memory_file(BYTES))
            side = PeerProcess(backend, path, settings, RequestSide)
            stack.enter_context(side)
            side.call("open", seconds)
            pair.append(side)
        sender, receiver = pair
        sender.memory[:] = SENT
        yield sender, receiver


def begun(pair: Pair) -> None:
    """Begin a request."""
    sender, receiver = pair
    offer = receiver.call("offer", {"receives": True})
    ticket = receiver.call("expect", sender.call("offer", {"receives": False}))
    sender.call("begin", offer, ticket)


def in_the_middle(pair: Pair) -> bool:
    """Wait until the first bytes have landed; return whether more are to come.

    On a busy machine a request with little time may be over before its first byte.
    """
    receiver, memory = pair[1], pair[1].memory
    until = time.monotonic() + LONG_S
    while not memory[-TOKEN_BYTES:].any():
        assert time.monotonic() < until, "nothing lands"
        if receiver.call("state") != RequestState.PENDING:
            return False
    return not memory[:TOKEN_BYTES].any()


def use_again(receiver: PeerProcess) -> None:
    """Give the slots to the next request."""
    receiver.memory[:] = NEXT_HERE


def check_untouched(receiver: PeerProcess, for_s: float = 1.0) -> None:
    """Look that nothing lands in the slots of the next request."""
    until = time.monotonic() + for_s
    while time.monotonic() < until:
        assert np.all(receiver.memory == NEXT_HERE), "bytes landed in slots in use"
        time.sleep(0.05)


class PeerRequests:
    """Run by each backend that writes into a peer's memory."""

    backend = ""
    drain_s = 5.0
    """What the manifest says about bytes in sockets."""

    ends_late_by_s = 6.0
    """How long after its deadline a call may end that cannot be cut short."""

    @pytest.fixture
    def given(self) -> Iterator[Mapping[str, object]]:
        """The backend's settings, with what it needs running."""
        with settings_of(self.backend) as settings:
            yield MappingProxyType(settings)

    @contextmanager
    def pair(
        self,
        given: Mapping[str, object],
        send_s: float = LONG_S,
        arrive_s: float = LONG_S,
    ) -> Iterator[Pair]:
        """Yield two sides within a request that is in the middle."""
        for _ in range(10):
            with two_sides(self.backend, dict(given), (send_s, arrive_s)) as pair:
                begun(pair)
                if in_the_middle(pair):
                    yield pair
                    return
        pytest.fail("every request was over at once")

    def test_a_request_arrives_whole(self, given: Mapping[str, object]) -> None:
        with two_sides(self.backend, dict(given), (LONG_S, LONG_S)) as pair:
            begun(pair)
            sender, receiver = pair
            receiver.call("complete", sender.call("completion"))
            assert receiver.call("state") == RequestState.ARRIVED
            assert receiver.call("free")
            assert np.all(receiver.memory == SENT)
            assert sender.call("leased") == 0

    def test_a_ticket_of_a_request_that_is_over_writes_nothing(
        self, given: Mapping[str, object]
    ) -> None:
        """Sent again, by a restarted sender, and with new offers after withdraw."""
        with (
            two_sides(self.backend, dict(given), (LONG_S, LONG_S)) as pair,
            two_sides(self.backend, dict(given), (LONG_S, LONG_S)) as (again, _),
        ):
            sender, receiver = pair
            offer = receiver.call("offer", {"receives": True})
            own = sender.call("offer", {"receives": False})
            ticket = receiver.call("expect", own)
            sender.call("begin", offer, ticket)
            receiver.call("complete", sender.call("completion"))
            assert receiver.call("state") == RequestState.ARRIVED
            use_again(receiver)
            with pytest.raises(KvdockError, match="used before"):
                sender.call("begin", offer, ticket)
            with pytest.raises(KvdockError, match="another process"):
                again.call("begin", offer, ticket)
            ticket = receiver.call("expect", own)
            assert receiver.call("withdraw") is True
            assert receiver.call("free")
            new = receiver.call("offer", {"receives": True})
            with pytest.raises(KvdockError, match="void"):
                sender.call("begin", new, ticket)
            check_untouched(receiver, 0.2)

    def test_slots_of_a_killed_sender_are_free_once_its_bytes_have_drained(
        self, given: Mapping[str, object]
    ) -> None:
        with self.pair(given) as (sender, receiver):
            sender.kill()
            began = time.monotonic()
            receiver.call("lost", str(PeerState.DEAD))
            assert receiver.call("state") == RequestState.FAILED
            assert not receiver.call("free"), "bytes may lie in sockets"
            assert receiver.call("free", LONG_S)
            assert time.monotonic() - began >= self.drain_s
            use_again(receiver)
            check_untouched(receiver)

    def test_a_killed_receiver_ends_the_request_of_its_sender(
        self, given: Mapping[str, object]
    ) -> None:
        with self.pair(given) as (sender, receiver):
            receiver.kill()
            outcome, took_s = sender.call("ended")
            assert outcome in ("UNAVAILABLE", "ERROR")
            assert took_s < LONG_S / 2
            sender.call("completion")
            assert sender.call("leased") == 0

    def test_an_aborted_request_holds_its_slots_until_its_sender_has_ended(
        self, given: Mapping[str, object]
    ) -> None:
        """The sender hears nothing of the abort, and goes on."""
        with self.pair(given) as (sender, receiver):
            receiver.call("abort")
            assert receiver.call("state") == RequestState.ABORTED
            assert not receiver.call("free")
            completion = sender.call("completion")
            assert receiver.memory[:TOKEN_BYTES].all(), "late bytes have landed"
            assert not receiver.call("free"), "no message said that it has ended"
            receiver.call("complete", completion)
            assert receiver.call("free", LONG_S)
            assert receiver.call("state") == RequestState.ABORTED
            use_again(receiver)
            check_untouched(receiver)

    def test_nothing_lands_after_the_completion_of_a_send_that_was_aborted(
        self, given: Mapping[str, object]
    ) -> None:
        with self.pair(given) as (sender, receiver):
            sender.call("abort_send")
            outcome, took_s = sender.call("ended")
            assert took_s < LONG_S / 2
            receiver.call("complete", sender.call("completion"))
            if outcome != "OK":
                assert receiver.call("state") == RequestState.FAILED
            assert receiver.call("free", LONG_S)
            assert sender.call("leased") == 0
            sender.memory[:] = NEXT_SENT
            use_again(receiver)
            check_untouched(receiver)

    def stopped_sender(
        self, given: Mapping[str, object], stopped_s: float, arrive_s: float
    ) -> None:
        """Stop a sender within a request, and use its slots again."""
        with self.pair(given, arrive_s=arrive_s) as (sender, receiver):
            sender.stop()
            began = time.monotonic()
            receiver.call("lost", str(PeerState.UNKNOWN))
            assert receiver.call("state", arrive_s + 1) == RequestState.FAILED
            assert not receiver.call("free", 0.5), "the sender may go on"
            time.sleep(max(0.0, stopped_s - (time.monotonic() - began)))
            assert not receiver.call("free")
            assert receiver.call("withdraw") is True
            assert receiver.call("free")
            use_again(receiver)
            sender.go_on()
            sender.call("ended", LONG_S)
            late = sender.call("completion")
            assert receiver.call("complete", late) is False
            check_untouched(receiver)
            assert receiver.call("state") == RequestState.FAILED

    def test_slots_of_a_stopped_sender_are_held_until_the_endpoint_is_closed(
        self, given: Mapping[str, object]
    ) -> None:
        self.stopped_sender(given, 0.0, 2.0)

    @long_form
    def test_the_same_with_a_sender_that_is_stopped_for_75_s(
        self, given: Mapping[str, object]
    ) -> None:
        self.stopped_sender(given, 75.0, 30.0)

    def stopped_receiver(
        self, given: Mapping[str, object], stopped_s: float, send_s: float
    ) -> None:
        """Stop a receiver within a request, and use the sender's pages again."""
        with self.pair(given, send_s=send_s, arrive_s=send_s) as (sender, receiver):
            receiver.stop()
            began = time.monotonic()
            outcome, took_s = sender.call("ended")
            assert outcome not in ("OK", "REFUSED")
            assert took_s < send_s + self.ends_late_by_s
            completion = sender.call("completion")
            assert sender.call("leased") == 0
            # Another request has the pages by now.
            sender.memory[:] = NEXT_SENT
            time.sleep(max(0.0, stopped_s - (time.monotonic() - began)))
            receiver.go_on()
            receiver.call("complete", completion)
            assert receiver.call("state") == RequestState.FAILED
            assert receiver.call("free", LONG_S)
            found = np.bincount(receiver.memory, minlength=8)
            assert not found[NEXT_SENT], "pages of another request were sent"
            use_again(receiver)
            check_untouched(receiver)

    def test_a_request_to_a_stopped_receiver_ends_by_its_deadline(
        self, given: Mapping[str, object]
    ) -> None:
        self.stopped_receiver(given, 0.0, 3.0)

    @long_form
    def test_the_same_request_with_a_receiver_that_is_stopped_for_75_s(
        self, given: Mapping[str, object]
    ) -> None:
        self.stopped_receiver(given, 75.0, 30.0)

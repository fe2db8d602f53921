"""Several receivers beside one sender: none of them costs the others anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import attrs
import numpy as np
import pytest
from peer_reference import PeerReference
from peers import LONG_S, Peer, settings
from request_pools import attention

from kvdock.batch import Outcome
from kvdock.peers import sending
from kvdock.testing.harness import becomes

if TYPE_CHECKING:
    from peer_reference import Peer as Link
    from peer_reference import PeerHandle

    from kvdock.peers.send_future import SendFuture

HEALTHY_S = 10.0


class Reaching(PeerReference):
    """Counts its connections; some receivers do not answer until `answers`."""

    def __init__(self) -> None:
        super().__init__()
        self.away: set[bytes] = set()
        self.answers = threading.Event()
        self.links: set[int] = set()

    def connect(self, handle: PeerHandle, endpoint: bytes, deadline_s: float) -> Link:
        if endpoint in self.away:
            self.answers.wait(LONG_S)
        link = super().connect(handle, endpoint, deadline_s)
        self.links.add(id(link))
        return link

    def disconnect(self, handle: PeerHandle, peer: Link) -> bool:
        self.links.discard(id(peer))
        return bool(super().disconnect(handle, peer))


@attrs.define(eq=False)
class Prefill:
    """One sender, and its receivers."""

    plugin: Reaching = attrs.field(factory=Reaching)
    stack: ExitStack = attrs.field(factory=ExitStack)
    peer: Peer = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        core = settings(peers={"verify": False})
        self.peer = Peer([attention(4)], core=core, plugin=self.plugin)
        self.stack.callback(self.peer.close)
        self.stack.callback(self.plugin.answers.set)

    def decode(self) -> Peer:
        """Return a further receiver."""
        receiver = Peer([attention(4)])
        self.stack.callback(receiver.close)
        return receiver

    def send(
        self, receiver: Peer, page: int = 0, timeout_s: float = 20.0
    ) -> SendFuture:
        offers = receiver.transfers.offers()
        own = [self.peer.transfers.offers(receives=False)]
        slots = {"kv": np.arange(4) + 4 * page}
        request = receiver.transfers.expect(slots, own)
        return self.peer.transfers.send(
            offers, request.tickets[0], {"kv": [page]}, timeout_s=timeout_s
        )

    def threads(self) -> int:
        return sum("kvdock-send" in one.name for one in threading.enumerate())


@pytest.fixture
def prefill() -> Iterator[Prefill]:
    one = Prefill()
    try:
        yield one
    finally:
        one.stack.close()


def test_a_receiver_that_does_not_answer_costs_its_own_requests_alone(
    prefill: Prefill,
) -> None:
    hung, healthy = prefill.decode(), prefill.decode()
    prefill.plugin.away.add(hung.transfers.offer("kv").endpoint)
    lost = [prefill.send(hung, page) for page in range(4)]
    began = time.monotonic()
    sent = [prefill.send(healthy, page) for page in range(8)]
    assert all(one.wait_quiet(HEALTHY_S) and one.ok for one in sent)
    assert time.monotonic() - began < HEALTHY_S
    assert not any(one.ended for one in lost)
    prefill.plugin.answers.set()
    assert all(one.wait_quiet(LONG_S) and one.ok for one in lost)


def test_requests_to_a_receiver_that_does_not_answer_end_by_their_deadlines(
    prefill: Prefill,
) -> None:
    hung = prefill.decode()
    prefill.plugin.away.add(hung.transfers.offer("kv").endpoint)
    lost = [prefill.send(hung, page, timeout_s=0.5) for page in range(4)]
    began = time.monotonic()
    assert all(one.wait(LONG_S) for one in lost)
    assert time.monotonic() - began < HEALTHY_S
    assert {one.outcomes["kv"] for one in lost} <= {Outcome.TIMEOUT, Outcome.ERROR}


def test_threads_and_connections_to_receivers_are_bounded(
    prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_MOST_RECEIVERS", 3)
    first = prefill.decode()
    assert prefill.send(first).wait_quiet(LONG_S)
    for _ in range(12):
        assert prefill.send(prefill.decode()).wait_quiet(LONG_S)
        assert len(prefill.plugin.links) <= 3
    # A receiver that was forgotten is reached again.
    again = prefill.send(first, 1)
    assert again.wait_quiet(LONG_S)
    assert again.ok
    most = prefill.peer.core.peers.senders * (sending._IDLE_RECEIVERS + 1)
    assert becomes(lambda: prefill.threads() <= most, HEALTHY_S)

"""Requests between two processes, one of which is killed or stopped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import attrs
import numpy as np
import pytest
from peers import LONG_S, Content, Peer, settings
from request_pools import attention, peers
from request_process import PAGES, TOKENS, Slow, receive
from waiting import until

from kvdock.batch import Outcome
from kvdock.peers.expectation import Expectation, PeerState, RequestState
from kvdock.peers.messages import Completion, Offer

pytestmark = pytest.mark.slow

HARNESS = Path(__file__).parents[1] / "harness"
SLOTS = np.arange(TOKENS).reshape(-1, 4)[::-1].ravel()
"""The pages in reverse: nothing can be joined over them."""


@attrs.frozen
class Other:
    """Another process, and the pipe to it."""

    process: subprocess.Popen[bytes]
    link: Connection

    def kill(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)


@contextmanager
def running(part: str) -> Iterator[Other]:
    ours, theirs = Pipe()
    script = str(HARNESS / "request_process.py")
    words = [sys.executable, script, part, str(theirs.fileno())]
    with ours, subprocess.Popen(words, pass_fds=[theirs.fileno()]) as process:
        # Ours is the last one: it ends with the process.
        theirs.close()
        try:
            yield Other(process, ours)
        finally:
            process.kill()


def expected(receiver: Peer, other: Other) -> Expectation:
    """Begin a request and return once its sender is about to write."""
    offers = [{"kv": Offer.from_bytes(receive(other.link))}]
    other.link.send_bytes(receiver.transfers.offer("kv").to_bytes())
    request = receiver.transfers.expect({"kv": SLOTS}, offers)
    other.link.send_bytes(request.tickets[0])
    assert receive(other.link) == b"begun"
    return request


def some_landed(receiver: Peer) -> bool:
    return bool(receiver.memory["kv"].any())


def receiving() -> Peer:
    return Peer([attention()], PAGES, plugin=Slow())


def test_a_request_of_another_process_arrives_whole() -> None:
    with running("prefill") as other, peers(receiving()) as (receiver,):
        request = expected(receiver, other)
        receiver.transfers.complete(receive(other.link))
        assert request.state is RequestState.ARRIVED, request.reason
        content = Content([attention()], TOKENS)
        assert receiver.read(content, {"kv": SLOTS}).equals(content)


def test_a_killed_sender_frees_its_slots_once_nothing_lands() -> None:
    with running("prefill") as other, peers(receiving()) as (receiver,):
        request = expected(receiver, other)
        until(lambda: some_landed(receiver))
        other.kill(signal.SIGKILL)
        with pytest.raises(EOFError):
            receive(other.link)
        other.process.wait()
        request.sender_lost(0, PeerState.DEAD)
        assert request.state is RequestState.FAILED
        assert request.wait_free(LONG_S)
        before = receiver.memory["kv"].copy()
        time.sleep(0.1)
        assert (receiver.memory["kv"] == before).all()


def test_a_stopped_sender_holds_its_slots_until_its_endpoint_is_closed() -> None:
    with running("prefill") as other, peers(receiving()) as (receiver,):
        request = expected(receiver, other)
        until(lambda: some_landed(receiver))
        other.kill(signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            receive(other.link, 0.2)
        request.sender_lost(0, PeerState.UNKNOWN)
        assert not request.wait_free(0.1)
        assert receiver.transfers.held_slots("kv") == TOKENS
        assert receiver.transfers.withdraw()
        assert request.free
        receiver.memory["kv"][:] = 0
        other.kill(signal.SIGCONT)
        # What it sends on is late: the slots belong to another request by now.
        late = Completion.from_bytes(receive(other.link))
        assert late.outcomes["kv"] is not Outcome.OK
        assert receiver.transfers.complete(late) is None
        assert not receiver.memory["kv"].any()


def test_an_aborted_request_gets_late_writes_in_slots_that_it_still_holds() -> None:
    with running("prefill") as other, peers(receiving()) as (receiver,):
        request = expected(receiver, other)
        until(lambda: some_landed(receiver))
        request.abort()
        before = receiver.memory["kv"].copy()
        # Without a word to the sender it goes on writing.
        until(lambda: bool((receiver.memory["kv"] != before).any()))
        assert not request.wait_free(0)
        receiver.transfers.complete(receive(other.link))
        assert request.free
        assert request.wait(0) is RequestState.ABORTED


@contextmanager
def sending(
    other: Other, send_s: float
) -> Iterator[tuple[Peer, dict[str, Offer], bytes]]:
    pools = [attention()]
    core = settings(deadlines={"send": send_s})
    with peers(Peer(pools, PAGES, core=core, plugin=Slow())) as (sender,):
        sender.fill(Content(pools, TOKENS), {"kv": np.arange(PAGES)})
        own = sender.transfers.offer("kv", receives=False)
        other.link.send_bytes(own.to_bytes())
        offers = {"kv": Offer.from_bytes(receive(other.link))}
        other.link.send_bytes(b"next")
        yield sender, offers, receive(other.link)


def test_a_killed_receiver_ends_its_request_at_once() -> None:
    with running("decode") as other, sending(other, LONG_S) as (sender, offers, ticket):
        pages = {"kv": np.arange(PAGES)}
        future = sender.transfers.send(offers, ticket, pages)
        time.sleep(0.05)
        other.kill(signal.SIGKILL)
        assert future.wait_quiet(LONG_S / 2)
        assert future.outcomes["kv"] in (Outcome.UNAVAILABLE, Outcome.ERROR)
        assert not sender.attachment.leases("kv").leased_pages


def test_a_stopped_receiver_ends_its_request_by_the_deadline() -> None:
    with running("decode") as other, sending(other, 0.4) as (sender, offers, ticket):
        other.kill(signal.SIGSTOP)
        pages = {"kv": np.arange(PAGES)}
        future = sender.transfers.send(offers, ticket, pages)
        began = time.monotonic()
        assert future.wait(LONG_S)
        assert time.monotonic() - began < LONG_S / 2
        assert future.outcomes["kv"] is not Outcome.OK
        other.kill(signal.SIGKILL)
        other.kill(signal.SIGCONT)
        assert future.wait_quiet(LONG_S)
        assert not sender.attachment.leases("kv").leased_pages

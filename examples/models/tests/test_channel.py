"""The channel between the two processes of the demo."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import Pipe

import attrs
import pytest

from kvdock.peers import PeerState
from model_demo.channel import (
    MAX_MESSAGE_BYTES,
    Channel,
    ChannelLostError,
    ProcessIdentity,
)

LONG_S = 60.0


def soon(seconds: float = LONG_S) -> float:
    return time.monotonic() + seconds


@contextmanager
def pair() -> Iterator[tuple[Channel, Channel]]:
    one, other = Pipe()
    with one, other:
        found: list[Channel] = []
        thread = threading.Thread(target=lambda: found.append(Channel(other, soon())))
        thread.start()
        first = Channel(one, soon())
        thread.join()
        yield first, found[0]


def test_messages_of_any_length_arrive_in_order() -> None:
    with pair() as (one, other):
        sizes = (0, 1, 70_000, 3 << 20)

        def send_all() -> None:
            for size in sizes:
                one.send(bytes([7]) * size)

        sender = threading.Thread(target=send_all)
        sender.start()
        assert [len(other.receive(soon())) for _ in sizes] == list(sizes)
        sender.join()
        other.send(b"back")
        assert one.receive(soon()) == b"back"


def test_a_message_that_does_not_come_in_time_ends_the_wait() -> None:
    with pair() as (one, other):
        began = time.monotonic()
        with pytest.raises(ChannelLostError, match="no message came"):
            one.receive(soon(0.05))
        assert time.monotonic() - began < LONG_S / 2
        other._link.close()
        with pytest.raises(ChannelLostError, match="was lost"):
            one.receive(soon())
        with pytest.raises(ChannelLostError, match="was not sent"):
            one.send(b"anyone?")


def test_a_length_beyond_all_reason_is_rejected() -> None:
    with pair() as (one, other):
        # The length of a message is a signed number of 4 bytes before it.
        os.write(other._link.fileno(), (MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
        with pytest.raises(ChannelLostError, match="was lost"):
            one.receive(soon())


def test_a_lost_peer_that_lives_is_unknown_and_one_that_ended_is_dead() -> None:
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    child = subprocess.Popen(words)
    try:
        found = ProcessIdentity.of(child.pid)
        assert found is not None
        states = [found.state]
        os.kill(child.pid, signal.SIGSTOP)
        states.append(found.state)
        elsewhere = attrs.evolve(found, host="another")
        reused = attrs.evolve(found, started=found.started - 1)
        assert reused.state is PeerState.DEAD
    finally:
        child.kill()
        child.wait()
    states.append(found.state)
    assert states == [PeerState.UNKNOWN, PeerState.UNKNOWN, PeerState.DEAD]
    assert elsewhere.state is PeerState.UNKNOWN
    with pair() as (one, _):
        assert one.peer_state is PeerState.UNKNOWN

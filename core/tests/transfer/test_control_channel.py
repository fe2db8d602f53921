from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import attrs
import pytest

from kvdock.transfer.control_channel import (
    ChannelLostError,
    ControlChannel,
    ProcessIdentity,
)
from kvdock.transfer.expectation import PeerState

LONG_S = 60.0


def soon(seconds: float = LONG_S) -> float:
    return time.monotonic() + seconds


def pair() -> tuple[ControlChannel, ControlChannel]:
    one, other = socket.socketpair()
    found = []
    thread = threading.Thread(
        target=lambda: found.append(ControlChannel(other, soon()))
    )
    thread.start()
    first = ControlChannel(one, soon())
    thread.join()
    return first, found[0]


def test_messages_of_any_length_arrive_in_order() -> None:
    one, other = pair()
    with one, other:
        sizes = (0, 1, 70_000, 3 << 20)

        def send_all() -> None:
            for size in sizes:
                one.send(bytes([7]) * size, soon())

        sender = threading.Thread(target=send_all)
        sender.start()
        assert [len(other.receive(soon())) for _ in sizes] == list(sizes)
        sender.join()
        other.send(b"back", soon())
        assert one.receive(soon()) == b"back"


def test_a_message_that_does_not_come_whole_in_time_ends_the_wait() -> None:
    one, other = pair()
    with one, other:
        began = time.monotonic()
        with pytest.raises(ChannelLostError, match="no message came"):
            one.receive(soon(0.05))
        assert time.monotonic() - began < LONG_S / 2
        other.close()
        with pytest.raises(ChannelLostError, match="has closed"):
            one.receive(soon())


def test_a_length_beyond_all_reason_is_rejected() -> None:
    one, other = pair()
    with one, other:
        other._link.sendall(b"\xff" * 8)
        with pytest.raises(ChannelLostError, match="a message has"):
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
    one, other = pair()
    with one, other:
        assert one.peer_state is PeerState.UNKNOWN

"""What strangers who connect to the ports of an agent cost its process."""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from peer_processes import PeerProcess, Side, mapped, memory_file
from strangers import Heartbeat, trickling

from kvdock import Outcome
from kvdock.own_sockets import listening_ports, listens, own_tcp_sockets
from kvdock_nixl import ucx_agent
from kvdock_nixl.library import load
from kvdock_nixl.ucx_transports import FENCED_TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Iterator

LONGEST_S = 0.1
"""For which a thread of the engine may wait for the interpreter's lock."""

SETTINGS: dict[str, object] = {"root": "/nowhere"}
STRANGERS = 300
CLOSE_WAIT = 8
"""Of Linux: a state of TCP, which is the first byte of a socket's information."""
QUEUED = struct.Struct("@24xI")
"""Of Linux: in the information of a listening socket, how many wait to be accepted."""

Place = tuple[str, int]


def places_of(metadata: bytes) -> set[Place]:
    """Return where an agent listens: the ports that are in its address.

    Libraries that other tests used may listen and connect in this process as well,
    and two bytes of an address may be like such a port: agents listen on IPv4.
    """
    return {
        one.getsockname()
        for one in own_tcp_sockets()
        if one.family == socket.AF_INET
        and listens(one)
        and one.getsockname()[1].to_bytes(2, "big") in metadata
    }


def left_at(places: set[Place]) -> int:
    """Return how many connections this process has there that the peer has closed.

    An agent is connected to itself as well.
    """
    return sum(
        one.getsockname() in places
        and one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == CLOSE_WAIT
        for one in own_tcp_sockets()
    )


def queued_at(places: set[Place]) -> int:
    """Return how many connections wait there until the agent accepts them."""
    return sum(
        QUEUED.unpack(one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, QUEUED.size))[
            0
        ]
        for one in own_tcp_sockets()
        if listens(one) and one.getsockname() in places
    )


def connect_and_close(places: set[Place]) -> int:
    """Connect to each place many times, and close at once; return how many were."""
    taken = 0
    for place in places:
        for _ in range(STRANGERS):
            with socket.socket() as one, contextlib.suppress(OSError):
                one.settimeout(0.002)
                one.connect(place)
                taken += 1
    return taken


@pytest.fixture
def side() -> Iterator[Side]:
    with memory_file(1 << 20) as path:
        one = Side("nixl", mapped(path), SETTINGS)
        yield one
        one.release()


@pytest.mark.slow
def test_strangers_take_no_descriptor_of_a_sender(side: Side) -> None:
    with (
        memory_file(1 << 20) as path,
        PeerProcess("nixl", path, SETTINGS) as receiver,
    ):
        endpoint, base = receiver.call("endpoint")
        peer: Any = side.peers[side.connect(endpoint)]
        places = places_of(peer.connection.link.metadata())
        assert places
        assert connect_and_close(places) == 0
        assert left_at(places) == 0
        row = np.zeros(1, np.int64)
        outcomes, _, _ = side.send(row, base + row, row + 4096)
        assert outcomes == [Outcome.OK]


def test_a_receiver_closes_what_strangers_have_closed(side: Side) -> None:
    endpoint, _ = side.endpoint()
    places = places_of(endpoint)
    assert connect_and_close(places) > 0
    until = time.monotonic() + 60
    # In this order: what is accepted in between is seen by the second look.
    while queued_at(places) or left_at(places):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("number", [8, pytest.param(64, marks=pytest.mark.slow), 500])
def test_strangers_do_not_hold_a_withdrawal(side: Side, number: int) -> None:
    endpoint, _ = side.endpoint()
    ports = frozenset(port for _, port in places_of(endpoint))
    with trickling(number, ports), Heartbeat() as heart:
        assert side.withdraw()
    assert heart.longest_s < LONGEST_S


@pytest.mark.slow
def test_requests_for_a_killed_peer_do_not_hold_the_lock(side: Side) -> None:
    with (
        memory_file(1 << 20) as path,
        PeerProcess("nixl", path, SETTINGS) as receiver,
    ):
        endpoint, base = receiver.call("endpoint")
        side.connect(endpoint)
        row = np.zeros(1, np.int64)
        arguments = (row, base + row, row + 4096, 1.0)
        assert side.send(*arguments)[0] == [Outcome.OK]
        receiver.kill()
        with Heartbeat() as heart:
            until = time.monotonic() + 3
            while time.monotonic() < until:
                assert side.send(*arguments)[0] != [Outcome.OK]
                time.sleep(0.002)
            side.release()
    # One pause in seconds may be the machine's: each end of an agent would be another.
    assert heart.second_s < LONGEST_S


def test_a_server_that_opens_at_the_same_moment_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[socket.socket] = []

    def ports() -> frozenset[int]:
        found = listening_ports()
        while len(opened) < 2:
            opened.append(socket.create_server(("127.0.0.1", 0)))
        return found

    def reached(server: socket.socket) -> bool:
        with contextlib.suppress(OSError):
            socket.create_connection(server.getsockname(), 5).close()
            return True
        return False

    monkeypatch.setattr(ucx_agent, "listening_ports", ports)
    agent = ucx_agent.UcxAgent(load(), FENCED_TRANSPORTS, listens=False)
    # The port of one of them may be by chance in the agent's address.
    assert any(map(reached, opened))
    for server in opened:
        server.close()
    assert agent.close()

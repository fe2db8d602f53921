"""What strangers who connect to the ports of an agent cost its process."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from direct_peers import PeerProcess, Side, mapped, memory_file

from kvdock import Outcome
from kvdock.own_sockets import listening_ports, listens, own_tcp_sockets
from kvdock_nixl import ucx_agent
from kvdock_nixl.library import load
from kvdock_nixl.ucx_transports import FENCED_TRANSPORTS

if TYPE_CHECKING:
    from collections.abc import Iterator

SETTINGS: dict[str, object] = {"root": "/nowhere"}
STRANGERS = 300


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counted


def addresses() -> set[Any]:
    return {one.getsockname() for one in own_tcp_sockets() if listens(one)}


def connect_and_close(places: set[Any]) -> int:
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


def test_strangers_take_no_descriptor_of_a_sender(side: Side) -> None:
    before = addresses()
    with (
        memory_file(1 << 20) as path,
        PeerProcess("nixl", path, SETTINGS) as receiver,
    ):
        endpoint, base = receiver.call("endpoint")
        side.connect(endpoint)
        places = addresses() - before
        assert places
        count = descriptors()
        assert connect_and_close(places) == 0
        assert descriptors() == count
        row = np.zeros(1, np.int64)
        outcomes, _, _ = side.send(row, base + row, row + 4096)
        assert outcomes == [Outcome.OK]


def test_a_receiver_closes_what_strangers_have_closed(side: Side) -> None:
    before = addresses()
    side.endpoint()
    places = addresses() - before
    count = descriptors()
    assert connect_and_close(places) > 0
    until = time.monotonic() + 20
    while descriptors() > count + 8 and time.monotonic() < until:
        time.sleep(0.01)
    assert descriptors() <= count + 8


def test_a_server_that_opens_at_the_same_moment_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    opened: list[socket.socket] = []

    def ports() -> frozenset[int]:
        found = listening_ports()
        if not opened:
            opened.append(socket.create_server(("127.0.0.1", 0)))
        return found

    monkeypatch.setattr(ucx_agent, "listening_ports", ports)
    agent = ucx_agent.UcxAgent(load(), FENCED_TRANSPORTS, listens=False)
    with opened[0] as server:
        socket.create_connection(server.getsockname(), 20).close()
    assert agent.close()

"""A listening socket of this process can be made deaf, and hear again."""

from __future__ import annotations

import contextlib
import os
import socket
import sys

import pytest

from kvdock import own_sockets
from kvdock.own_sockets import (
    BoundPorts,
    accept_again,
    accept_nothing,
    end_connections,
    listening_ports,
    own_tcp_sockets,
)
from kvdock.testing.harness import becomes
from kvdock.testing.open_files import open_files

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="filters of sockets are the Linux kernel's"
)


def reachable(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


def test_a_deaf_port_takes_connections_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert port in listening_ports()
        assert reachable(port)
        accept_nothing(frozenset({port}))
        assert not reachable(port)
        for one in own_tcp_sockets():
            accept_again(one)
        assert reachable(port)


def test_ended_connections_say_nothing_more_and_the_others_live() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_server(("127.0.0.1", 0)) as other,
    ):
        ends = [
            (socket.create_connection(one.getsockname()), one.accept()[0])
            for one in (server, other)
        ]
        end_connections(frozenset({server.getsockname()[1]}))
        with pytest.raises(ConnectionError):
            ends[0][1].send(b"farewell")
        with pytest.raises(ConnectionResetError):
            ends[0][0].recv(1)
        ends[1][1].send(b"x")
        assert ends[1][0].recv(1) == b"x"
        port = server.getsockname()[1]
        for pair in ends:
            for one in pair:
                one.close()
    # As after a kill the port is free at once: none of its connections lingers.
    with socket.socket() as again:
        again.bind(("127.0.0.1", port))


def test_a_port_stays_with_the_process_when_its_listener_has_ended() -> None:
    bound = BoundPorts()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with bound.keep(frozenset({port})):
            server.close()
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    with (
        socket.create_connection(("127.0.0.1", port), 10.0) as late,
        contextlib.suppress(ConnectionResetError),
    ):
        assert not late.recv(1), "it was told that nothing is there"


def test_a_kept_port_costs_one_descriptor_and_no_other_comes_and_goes() -> None:
    bound, before = BoundPorts(), open_files()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        bound.keep(frozenset({server.getsockname()[1]})),
    ):
        server.close()
    seen: set[str] = set()
    for _ in range(200):
        seen |= open_files() - before
    assert len(seen) == 1, seen
    bound.give_back()


def test_ports_are_given_back_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_sockets, "_MOST_BOUND", 2)
    bound = BoundPorts()
    ports = []
    for _ in range(4):
        with socket.create_server(("127.0.0.1", 0)) as server:
            ports.append(server.getsockname()[1])
            with bound.keep(frozenset(ports[-1:])):
                server.close()
    assert becomes(lambda: not listening_ports() & set(ports[:2]), 10.0)
    assert listening_ports() >= set(ports[2:])
    monkeypatch.setattr(own_sockets, "_MOST_BOUND", 0)
    assert becomes(lambda: not listening_ports() & set(ports), 10.0)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("default_s", [None, 5.0])
def test_a_socket_of_a_library_blocks_or_not_as_before(
    blocks: bool,  # noqa: FBT001 - a column
    default_s: float | None,
) -> None:
    """UCX waited for ever in a listening socket that had begun to block."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(blocks)
        ports = frozenset({server.getsockname()[1]})
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(default_s)
        try:
            with BoundPorts().keep(ports):
                assert os.get_blocking(server.fileno()) is blocks
                assert ports <= listening_ports()
                assert os.get_blocking(server.fileno()) is blocks
        finally:
            socket.setdefaulttimeout(before)

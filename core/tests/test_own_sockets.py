"""A listening socket of this process can be made deaf, and hear again."""

from __future__ import annotations

import socket
import sys

import pytest

from kvdock.own_sockets import (
    accept_again,
    accept_nothing,
    listening_ports,
    own_tcp_sockets,
)

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


def test_a_socket_that_was_never_deaf_stays_as_it_is() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        accept_again(server)
        assert reachable(server.getsockname()[1])

"""What `kvdock doctor NAME` tries out beyond stored pages."""

from __future__ import annotations

import socket
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
import pytest
from peer_reference import PeerReference, Receiver

from kvdock.testing.loading import load_backend
from kvdock_cli.commands._self_test import self_test, summary_of


def test_two_endpoints_of_a_backend_with_peers_reach_each_other() -> None:
    backend = load_backend("peer_reference:peers")
    findings = self_test(backend, {})
    assert all(one.ok for one in findings), findings
    assert findings[-1].what == (
        "to peers: a page went from one endpoint to another, compared"
    )
    assert findings[-1].what in summary_of(backend, findings).what


def test_an_endpoint_that_is_not_reached_is_a_finding() -> None:
    backend = load_backend("mutants:swapped_rows")
    plugin = backend.plugin.manager.get_plugin(backend.name)
    # No memory of the peer begins at address 8.
    plugin.rows = lambda local, remote, sizes: (local, remote * 0 + 8, sizes)  # type: ignore[union-attr]
    *_, found = self_test(backend, {})
    assert not found.ok
    assert (
        "a page did not reach another endpoint: pool compressed: refused" in found.what
    )
    assert found.hint


def test_a_backend_without_peers_is_not_asked_for_it() -> None:
    backend = load_backend("reference:memory")
    assert not any("to peers" in one.what for one in self_test(backend, {}))


class Everywhere(PeerReference):
    """Listens where any host reaches it."""

    listener: socket.socket

    def __init__(self, host: str) -> None:
        super().__init__()
        self.host = host

    def receiver(self, blocks: Any) -> Receiver:
        made = super().receiver(blocks)
        self.listener = socket.create_server((self.host, 0))  # not accepted
        return made


@pytest.mark.parametrize(
    ("host", "others"), [("", []), ("127.0.0.2", []), ("127.0.0.2", ["127.0.0.3"])]
)
def test_a_port_that_listens_on_all_interfaces_is_warned_of(
    host: str, others: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = {
        f"eth{number}": [SimpleNamespace(family=socket.AF_INET, address=one)]
        for number, one in enumerate(["127.0.0.2", *others])
    }
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: addresses)
    backend = load_backend("peer_reference:peers")
    plugin = Everywhere(host)
    backend.plugin.manager.unregister(name=backend.name)
    backend.plugin.manager.register(plugin, name=backend.name)
    *_, found = self_test(backend, {})
    try:
        port = plugin.listener.getsockname()[1]
        if others:
            assert not found.warning, "one of two interfaces"
            return
        assert found.ok
        assert found.warning
        assert f"(now {port}) listen on all interfaces" in found.what
        assert "may read and overwrite" in found.hint
    finally:
        plugin.listener.close()

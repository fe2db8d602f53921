"""A backend is tried out: its probe, an attachment on trial, pages."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
import pytest
from peer_reference import PeerReference, Receiver

from kvdock.dock import Dock
from kvdock.errors import KvdockError
from kvdock.plugin.backend import Backend
from kvdock.plugin.hookspecs import Finding
from kvdock.self_test import require_ready, try_backend, try_engine
from kvdock.testing.loading import load_backend


def test_two_endpoints_of_a_backend_with_peers_reach_each_other() -> None:
    backend = load_backend("peer_reference:peers")
    trial = try_backend(backend, {})
    findings = trial.moved
    assert all(one.ok for one in findings), findings
    assert findings[-1].what == (
        "to peers: a page went from one endpoint to another, compared"
    )
    assert findings[-1].what in trial.short[-1].what
    assert len(trial.short) == len(trial.probed) + 1


def test_an_endpoint_that_is_not_reached_is_a_finding() -> None:
    backend = load_backend("mutants:swapped_rows")
    plugin = backend.plugin.manager.get_plugin(backend.name)
    # No memory of the peer begins at address 8.
    plugin.rows = lambda local, remote, sizes: (local, remote * 0 + 8, sizes)  # type: ignore[union-attr]
    *_, found = try_backend(backend, {}).moved
    assert not found.ok
    assert (
        "a page did not reach another endpoint: pool compressed: refused" in found.what
    )
    assert found.hint


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
    *_, found = try_backend(backend, {}).moved
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


def refusing(backend: Backend) -> Backend:
    """Let a backend fail for a reason that only its log has."""
    plugin: Any = backend.plugin.manager.get_plugin(backend.name)

    def fails(*_: object) -> None:
        raise PermissionError("the shelf is locked")

    plugin.put = fails
    return backend


def test_the_step_that_failed_is_named_with_what_was_logged() -> None:
    trial = try_backend(refusing(load_backend("reference:memory")), {})
    assert all(finding.ok for finding in trial.probed)
    (wrong, *_) = [finding for finding in trial.moved if not finding.ok]
    assert "a page was not stored by reference" in wrong.what
    assert "PermissionError: the shelf is locked" in wrong.hint
    assert trial.short == trial.findings


def test_what_stops_the_trial_names_its_step() -> None:
    backend = load_backend("reference:folder")
    (wrong,) = try_backend(backend, {}).moved
    assert wrong.what.startswith("self test, attaching: ")
    assert "setting 'root' is missing" in wrong.what


def test_nothing_is_stored_where_the_probe_finds_something_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = load_backend("reference:memory")
    missing = (Finding(ok=False, what="no library"),)
    monkeypatch.setattr(Backend, "probe", lambda *_: missing)
    assert try_backend(backend, {}).findings == missing
    with pytest.raises(KvdockError, match="cannot store pages here: no library"):
        require_ready(backend, {})


def test_a_backend_that_answers_nothing_is_a_finding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    go_on = threading.Event()
    monkeypatch.setattr(Backend, "probe", lambda *_: go_on.wait(60))
    (late,) = try_backend(load_backend("reference:memory"), {}, timeout_s=0.1).findings
    go_on.set()
    assert late.what == "no answer within 0.1 s"


def test_an_engines_doctor_is_told_what_its_backends_do_with_a_page() -> None:
    backend = load_backend("reference:memory")
    given: Any = SimpleNamespace(used=["reference"], backends={})
    named, *_, last = try_engine(Dock({"reference": backend}), given)
    assert named.what == "plugin reference: everything right, nothing fast"
    assert last.what.startswith("reference: self test: a page of each kind (")

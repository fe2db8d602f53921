"""Joining a cluster, as far as it goes without one."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvdock.errors import KvdockError
from kvdock_mooncake import connect, preconditions
from kvdock_mooncake.library import Wheel
from kvdock_mooncake.settings import MooncakeSettings, Protocol


class FakeStore:
    """A store whose setup takes as long as a gate is closed."""

    def __init__(self, answer: Any, gate: threading.Event | None = None) -> None:
        self.answer, self.gate = answer, gate
        self.closed = threading.Event()

    def setup(self, store: Any) -> int:
        assert store is self
        if self.gate:
            self.gate.wait(60)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return int(self.answer)

    def close(self) -> None:
        self.closed.set()


def test_a_setup_over_its_time_is_given_up_and_shut_when_it_ends_after_all() -> None:
    gate = threading.Event()
    store = FakeStore(0, gate)
    began = time.monotonic()
    with pytest.raises(KvdockError, match=r"longer than 0\.05 s"):
        connect._within(0.05, lambda: store, store.setup, str)
    assert time.monotonic() - began < 5
    assert not store.closed.is_set()
    gate.set()
    assert store.closed.wait(60)


@pytest.mark.parametrize("answer", [ValueError("a bad path"), MemoryError("too much")])
def test_what_the_library_raises_becomes_an_error_of_ours(answer: Exception) -> None:
    store = FakeStore(answer)
    with pytest.raises(KvdockError, match="refused its settings"):
        connect._within(5, lambda: store, store.setup, str)
    assert not store.closed.is_set()


def test_a_number_of_the_library_is_said_in_words() -> None:
    store = FakeStore(-1300)
    with pytest.raises(KvdockError, match="off in the master"):
        connect._within(5, lambda: store, store.setup, str)


@pytest.mark.parametrize("status", [-300, -900])
def test_a_client_that_its_master_does_not_understand_is_named_with_its_release(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """What a client of 0.3.11 gets from a master of 0.3.13."""
    monkeypatch.setattr(connect, "check_before_setup", lambda *_: None)
    monkeypatch.setattr(connect, "_SET_UP_BY", [])
    wheel = Wheel("mooncake-transfer-engine", "0.3.11")
    store = SimpleNamespace(setup=lambda *_: status)
    library: Any = SimpleNamespace(wheel=wheel, store_class=lambda: store)
    settings = MooncakeSettings(master="127.0.0.1:50051", host="here")
    with pytest.raises(KvdockError, match="could not join") as told:
        connect.join(library, settings)
    assert "`master` 127.0.0.1:50051 listens" in told.value.fix
    assert str(wheel) in told.value.fix
    assert "the same release" in told.value.fix


def test_rdma_without_a_device_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library would say yes and use TCP."""
    monkeypatch.setattr(preconditions, "_RDMA_DEVICES", tmp_path)
    wanted = MooncakeSettings(protocol=Protocol.RDMA, devices="mlx5_0, mlx5_1")
    with pytest.raises(KvdockError, match="no RDMA device"):
        preconditions.check_transport(wanted)
    (tmp_path / "mlx5_0").mkdir()
    with pytest.raises(KvdockError, match="this host has mlx5_0"):
        preconditions.check_transport(wanted)
    (tmp_path / "mlx5_1").mkdir()
    preconditions.check_transport(wanted)
    preconditions.check_transport(MooncakeSettings(protocol=Protocol.RDMA))


def test_the_librarys_patience_is_cut_unless_the_user_chose_it() -> None:
    environ = {"MC_RPC_TIMEOUT_MS": "7"}
    connect.limit_patience(MooncakeSettings(rpc_timeout_s=1.5), environ)
    assert environ["MC_RPC_TIMEOUT_MS"] == "7"
    assert environ["MC_RPC_CONNECT_TIMEOUT_MS"] == "1500"
    assert environ["MC_STORE_CLIENT_SETUP_RETRIES"] == "1"
    assert environ["MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER"] == "65535"


def test_each_store_gets_the_patience_that_its_settings_ask_for() -> None:
    environ: dict[str, str] = {}
    for seconds, milliseconds in ((3.0, "3000"), (30.0, "30000"), (0.001, "1")):
        connect.limit_patience(MooncakeSettings(rpc_timeout_s=seconds), environ)
        assert environ["MC_RPC_TIMEOUT_MS"] == milliseconds
        assert environ["MC_RPC_CONNECT_TIMEOUT_MS"] == milliseconds
    environ["MC_RPC_TIMEOUT_MS"] = "7"
    connect.limit_patience(MooncakeSettings(rpc_timeout_s=2.0), environ)
    assert environ["MC_RPC_TIMEOUT_MS"] == "7"
    assert environ["MC_RPC_CONNECT_TIMEOUT_MS"] == "2000"


def test_the_own_address_is_the_one_that_leads_to_the_master() -> None:
    settings = MooncakeSettings(master="127.0.0.1:50051")
    assert connect.own_address(settings) == "127.0.0.1"
    assert connect.own_address(MooncakeSettings(host="me", master="m:1")) == "me"


def test_options_are_passed_only_where_they_are_wanted() -> None:
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def setup(*args: Any, **kwargs: Any) -> int:
        calls.append((args, kwargs))
        return 0

    store = SimpleNamespace(setup=setup)
    plain = MooncakeSettings(master="127.0.0.1:1", segment_bytes=0)
    assert connect._setup(plain, "")(store) == 0
    spilling = MooncakeSettings(
        master="127.0.0.1:1", ssd_offload=True, ssd_path="/d", tenant="me"
    )
    assert connect._setup(spilling, "/d/own")(store) == 0
    host, peers, master = "127.0.0.1", "P2PHANDSHAKE", "127.0.0.1:1"
    assert calls[0] == ((host, peers, 0, 0, "tcp", "", master), {})
    assert calls[1][1] == {
        "enable_ssd_offload": True,
        "ssd_offload_path": "/d/own",
        "tenant_id": "me",
    }

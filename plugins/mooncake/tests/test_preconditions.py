"""What is checked before the library is asked to join a cluster."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import attrs
import pytest

from kvdock.child_processes import free_port
from kvdock_mooncake import preconditions
from kvdock_mooncake.master import ClusterError
from kvdock_mooncake.settings import MooncakeSettings


def test_a_segment_for_which_there_is_no_memory_is_rejected_with_its_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "meminfo"
    memory.write_text("MemTotal:  9000000 kB\nMemAvailable:   65536 kB\n")
    monkeypatch.setattr(preconditions, "_MEMORY", memory)
    settings = MooncakeSettings(master="h:1", segment_bytes=(64 << 20) + 1)
    with pytest.raises(ClusterError, match="segment_bytes 64") as told:
        preconditions.check_memory(settings)
    assert "MOONCAKE_GLOBAL_SEGMENT_SIZE" in told.value.fix
    preconditions.check_memory(attrs.evolve(settings, segment_bytes=64 << 20))
    preconditions.check_memory(attrs.evolve(settings, segment_bytes=0))
    preconditions.check_memory(attrs.evolve(settings, standalone="h:2"))


def test_a_metadata_server_that_does_not_answer_is_named_at_once() -> None:
    address = f"http://127.0.0.1:{free_port()}/metadata"
    settings = MooncakeSettings(master="h:1", metadata_server=address)
    with pytest.raises(ClusterError, match="no metadata server answers at") as told:
        preconditions.check_metadata_server(settings)
    assert "MOONCAKE_TE_META_DATA_SERVER" in told.value.fix
    for wrong in ("http://", "http://host:port/"):
        wrongly = attrs.evolve(settings, metadata_server=wrong)
        with pytest.raises(ClusterError, match="no metadata server"):
            preconditions.check_metadata_server(wrongly)


def test_a_metadata_server_that_listens_and_handshakes_without_one_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        for address in (f"http://127.0.0.1:{port}/metadata", "P2PHANDSHAKE"):
            settings = MooncakeSettings(master="h:1", metadata_server=address)
            preconditions.check_metadata_server(settings)


def test_leases_that_end_before_a_whole_call_is_read_are_rejected() -> None:
    settings = MooncakeSettings(master="h:1", lease_s=0.04)
    with pytest.raises(ClusterError, match="lease_s 40 ms is too short") as told:
        preconditions.check_leases(settings)
    assert "max_call_bytes" in told.value.what
    assert "-default_kv_lease_ttl" in told.value.fix
    preconditions.check_leases(attrs.evolve(settings, max_call_bytes=32 << 20))
    for lease_s in (0.0, 0.06):
        preconditions.check_leases(attrs.evolve(settings, lease_s=lease_s))


@pytest.mark.mooncake
def test_a_master_whose_leases_are_too_short_is_rejected_at_the_set_up(
    attached: Any, serve: Any
) -> None:
    short = serve("-default_kv_lease_ttl=1")
    settings = MooncakeSettings(master=short.address, segment_bytes=16 << 20)
    with pytest.raises(ClusterError, match="leases end within") as told:
        attached(settings)
    assert "-default_kv_lease_ttl" in told.value.fix
    assert "lease_s" in told.value.fix


@pytest.mark.mooncake
def test_a_set_up_checks_them_before_it_asks_the_library(
    attached: Any, alone: MooncakeSettings
) -> None:
    address = f"http://127.0.0.1:{free_port()}/metadata"
    with pytest.raises(ClusterError, match="no metadata server answers"):
        attached(attrs.evolve(alone, metadata_server=address))
    with pytest.raises(ClusterError, match="segment_bytes 1024"):
        attached(attrs.evolve(alone, segment_bytes=1 << 50))

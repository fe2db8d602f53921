"""Servers that are started for a demo, and ended with it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]  # has no types
import pytest

from kvdock import Outcome
from kvdock.child_processes import ServerError
from kvdock.config import structure
from kvdock_mooncake import server
from kvdock_mooncake.settings import MooncakeSettings

KILLED = (
    "import time\n"
    "from kvdock_mooncake.server import start_master\n"
    "print(start_master().address, flush=True)\n"
    "time.sleep(600)\n"
)


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in os.environ:
        if variable.startswith("MOONCAKE_"):
            monkeypatch.delenv(variable)


def listens(address: str) -> bool:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), 1).close()
    except OSError:
        return False
    return True


def test_the_entry_point_leads_to_the_local_server() -> None:
    (point,) = metadata.entry_points(group="kvdock.servers", name="mooncake")
    assert point.load() is server.local_server


@pytest.mark.usefixtures("no_variables")
def test_a_configured_cluster_is_used_and_lent_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"master": "far.away:50051"}
    with server.local_server(given) as (settings, notice):
        assert settings == {"segment_bytes": 0, "ssd_offload": False, **given}
        assert not notice
    with server.local_server({**given, "segment_bytes": "1 GiB"}) as (settings, _):
        assert settings["segment_bytes"] == "1 GiB"
    monkeypatch.setenv("MOONCAKE_MASTER", "far.away:50051")
    monkeypatch.setenv("MOONCAKE_ENABLE_SSD_OFFLOAD", "1")
    monkeypatch.setenv("MOONCAKE_OFFLOAD_FILE_STORAGE_PATH", "/data")
    with server.local_server({}) as (settings, notice):
        assert settings == {"segment_bytes": 0, "ssd_offload": False}
        assert not notice


@pytest.mark.slow
@pytest.mark.mooncake
@pytest.mark.usefixtures("no_variables")
def test_without_one_a_cluster_of_this_host_lives_as_long_as_it_is_used(
    library: Any, attached: Any
) -> None:
    del library
    with server.local_server({"replicas": 1}) as (given, notice):
        settings = structure(MooncakeSettings, given, where="test")
        assert settings.master in notice
        assert settings.segment_bytes == 0
        rig = attached(settings)
        assert rig.put(["demo"]) == [Outcome.OK]
        rig.release()
        again = attached(settings)
        assert again.get(["demo"]) == [Outcome.OK]
        again.release()
    assert not listens(settings.master)


@pytest.mark.mooncake
def test_a_master_takes_connections_on_loopback_alone(library: Any) -> None:
    del library
    master = server.start_master()
    try:
        found = psutil.Process(master.process.pid).net_connections("tcp")
    finally:
        master.stop()
    listening = [one.laddr for one in found if one.status == psutil.CONN_LISTEN]
    assert {one.port for one in listening} >= {master.port, master.http_port}
    assert {one.ip for one in listening} == {"127.0.0.1"}


@pytest.mark.mooncake
@pytest.mark.usefixtures("no_variables")
def test_servers_end_when_the_process_that_started_them_is_killed(library: Any) -> None:
    del library
    with subprocess.Popen(
        [sys.executable, "-c", KILLED], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        try:
            master = process.stdout.readline().strip()
            assert listens(master)
        finally:
            process.kill()
    until = time.monotonic() + 60
    while listens(master):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.mooncake
def test_a_server_that_does_not_start_says_its_last_words(
    library: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    del library
    monkeypatch.setattr(server, "_TRIES", 1)
    log = tmp_path / "log"
    with pytest.raises(ServerError, match="does not start") as told:
        server.start_master("-no_such_flag=1", log=log)
    assert "no_such_flag" in told.value.fix

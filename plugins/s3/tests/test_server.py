"""A server of this host for the demo."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest

from kvdock.child_processes import ServerError
from kvdock_s3 import server
from kvdock_s3.client import ObjectClient
from kvdock_s3.round_trip import try_bucket
from kvdock_s3.settings import S3Settings


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), 1).close()
    except OSError:
        return False
    return True


def test_a_bucket_of_the_users_own_needs_no_server() -> None:
    given = {"url": "s3://mine/pages"}
    with server.local_server(given) as found:
        assert found == (given, "")


def test_without_moto_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "find_spec", lambda _: None)
    with (
        pytest.raises(ServerError, match="moto is not installed") as raised,
        server.local_server({}),
    ):
        pass
    assert "kvdock-s3[demo]" in raised.value.fix


@pytest.mark.slow
def test_a_server_ends_when_the_demo_is_killed() -> None:
    demo = (
        "import time\n"
        "from kvdock_s3.server import moto_server\n"
        "with moto_server() as endpoint:\n"
        "    print(endpoint, flush=True)\n"
        "    time.sleep(600)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", demo], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        try:
            address = process.stdout.readline().strip().rpartition("/")[2]
            host, port = address.split(":")
            assert listens(host, int(port))
        finally:
            process.kill()
    until = time.monotonic() + 60
    while listens(host, int(port)):
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.slow
def test_a_server_runs_as_long_as_the_block() -> None:
    with server.local_server({"threads": 3}) as (given, notice):
        assert "moto" in notice
        settings = S3Settings(**given)  # type: ignore[arg-type]
        assert settings.threads == 3
        client = ObjectClient(settings)
        assert all(one.ok for one in try_bucket(client, 20.0))
    assert not all(one.ok for one in try_bucket(client, 5.0))
    client.close()

"""Servers of this host alone: a master, and owners of memory.

For demos, tests and examples. They listen on loopback as far as the programs
can be told to: a client's data ports always listen on every interface.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from kvdock.child_processes import (
    LOOPBACK,
    ServerError,
    free_port,
    start_server,
    stop_server,
)
from kvdock.config import structure
from kvdock.units import format_bytes
from kvdock_mooncake.library import installed, program, search_path, the_wheel
from kvdock_mooncake.settings import MooncakeSettings

_START_S = 20.0
_TRIES = 5
_DEMO_SEGMENT_BYTES = 2 << 30
_DEMO_LEASE_S = 2
_METRICS_HOST = "0.3.13"
"""First release whose master can be told where to listen for metrics; others know
no such flag, end on it, and listen for them on every interface."""
_DEMO_UNFINISHED_S = 3
"""After it, a key that a killed writer left half written may be written again."""


@attrs.define(eq=False)
class Server:
    """One running program.

    Args:
        process: The program itself, not a wrapper.
        port: Where it listens, on loopback.
        http_port: Where a master serves its metrics.
    """

    process: subprocess.Popen[bytes]
    port: int
    http_port: int = 0

    @property
    def address(self) -> str:
        """Return where it listens, as "host:port"."""
        return f"{LOOPBACK}:{self.port}"

    def stop(self) -> None:
        """End the program and wait until it has ended."""
        stop_server(self.process)


def start_master(*options: str, port: int = 0, log: Path | None = None) -> Server:
    """Start a master; it answers when this returns.

    Args:
        options: Further flags, such as "-default_kv_lease_ttl=500".
        port: Where it is to listen; 0 finds a free one.
        log: Where its output goes; nowhere if None.

    Raises:
        ServerError: If it does not come up.
    """
    wheel = the_wheel(installed())
    on_loopback = [f"-metrics_host={LOOPBACK}"] if wheel.is_since(_METRICS_HOST) else []

    def command(rpc: int, metrics: int) -> list[str]:
        return [
            str(program("mooncake_master")),
            f"-rpc_port={rpc}",
            f"-rpc_address={LOOPBACK}",
            *on_loopback,
            f"-metrics_port={metrics}",
            "-logtostderr=1",
            *options,
        ]

    for _ in range(_TRIES):
        rpc, metrics = port or free_port(), free_port()
        server = _start(command(rpc, metrics), rpc, log)
        if server:
            server.http_port = metrics
            return server
    raise ServerError("mooncake_master does not start", fix=_words(log))


def start_owner(
    master: str, segment_bytes: int, *options: str, log: Path | None = None
) -> Server:
    """Start a process that lends memory to a cluster until it is stopped.

    Args:
        master: The master's address.
        segment_bytes: How much it lends.
        options: Further flags of mooncake_client.
        log: Where its output goes; nowhere if None.

    Raises:
        ServerError: If it does not come up.
    """
    for _ in range(_TRIES):
        port = free_port()
        command = [
            str(program("mooncake_client")),
            f"--master_server_address={master}",
            f"--host={LOOPBACK}",
            f"--port={port}",
            f"--global_segment_size={segment_bytes}",
            "--metadata_server=P2PHANDSHAKE",
            *options,
        ]
        server = _start(command, port, log)
        if server:
            return server
    raise ServerError("mooncake_client does not start", fix=_words(log))


@contextmanager
def local_server(
    given: Mapping[str, object],
) -> Iterator[tuple[Mapping[str, object], str]]:
    """Bring what the backend needs, for as long as a demo runs.

    Entry point `mooncake` of the group `kvdock.servers`.

    Args:
        given: The user's settings for this backend.

    Yields:
        Settings to use instead, and a sentence that says what was started,
        "" if the user's own cluster is used.
    """
    # What a process of the demo lends ends with it, pages and all.
    lending_none = {"segment_bytes": 0, "ssd_offload": False, **given}
    known = structure(MooncakeSettings, lending_none, where="backend 'mooncake'")
    if known.master or known.standalone:
        yield lending_none, ""
        return
    with ExitStack() as stack:
        master = start_master(
            f"-default_kv_lease_ttl={_DEMO_LEASE_S * 1000}",
            f"-put_start_discard_timeout_sec={_DEMO_UNFINISHED_S}",
        )
        stack.callback(master.stop)
        owner = start_owner(master.address, _DEMO_SEGMENT_BYTES)
        stack.callback(owner.stop)
        settings = {
            "lease_s": _DEMO_LEASE_S,
            **lending_none,
            "master": master.address,
        }
        room = format_bytes(_DEMO_SEGMENT_BYTES)
        notice = f"started a local master at {master.address} with {room} of memory"
        yield settings, f"no master is configured: {notice}"


def _start(command: Sequence[str], port: int, log: Path | None) -> Server | None:
    """Start a program and wait until its port answers; None if it ends."""
    environment = dict(os.environ)
    if path := search_path(environment.get("LD_LIBRARY_PATH", "")):
        environment["LD_LIBRARY_PATH"] = path
    with open(log or os.devnull, "ab") as output:  # noqa: PTH123 - a path or the null device
        process = start_server(
            command,
            lambda: socket.create_connection((LOOPBACK, port), 1.0).close(),
            environ=environment,
            output=output,
            within_s=_START_S,
        )
    return Server(process, port) if process else None


def _words(log: Path | None) -> str:
    if log is None:
        return "Start it by hand to see why."
    last = log.read_text(errors="replace").splitlines()[-5:]
    return "Its last words:\n  " + "\n  ".join(last)

"""Servers of this host alone: a master, and owners of memory.

For demos, tests and examples. They listen on loopback as far as the programs
can be told to: a client's data ports always listen on every interface.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
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

    Port 0 finds a free one. Without a log its output goes nowhere.
    """
    wheel = the_wheel(installed())
    on_loopback = [f"-metrics_host={LOOPBACK}"] if wheel.is_since(_METRICS_HOST) else []

    metrics = []

    def flags(rpc: int) -> list[str]:
        metrics.append(free_port())
        return [
            f"-rpc_port={rpc}",
            f"-rpc_address={LOOPBACK}",
            *on_loopback,
            f"-metrics_port={metrics[-1]}",
            "-logtostderr=1",
            *options,
        ]

    server = _start("mooncake_master", flags, log, port)
    server.http_port = metrics[-1]
    return server


def start_owner(
    master: str, segment_bytes: int, *options: str, log: Path | None = None
) -> Server:
    """Start a process that lends memory to a cluster until it is stopped."""
    return _start(
        "mooncake_client",
        lambda port: [
            f"--master_server_address={master}",
            f"--host={LOOPBACK}",
            f"--port={port}",
            f"--global_segment_size={segment_bytes}",
            "--metadata_server=P2PHANDSHAKE",
            *options,
        ],
        log,
    )


@contextmanager
def local_server(
    given: Mapping[str, object],
) -> Iterator[tuple[Mapping[str, object], str]]:
    """Bring what the backend needs, for as long as a demo runs.

    Entry point `mooncake` of the group `kvdock.servers`.

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


def _start(
    name: str, flags: Callable[[int], list[str]], log: Path | None, port: int = 0
) -> Server:
    """Start a program at a free port, and wait until that answers."""
    environment = dict(os.environ)
    if path := search_path(environment.get("LD_LIBRARY_PATH", "")):
        environment["LD_LIBRARY_PATH"] = path
    for _ in range(_TRIES):
        at = port or free_port()
        with open(log or os.devnull, "ab") as output:  # noqa: PTH123 - a path or the null device
            process = start_server(
                [str(program(name)), *flags(at)],
                lambda: socket.create_connection((LOOPBACK, at), 1.0).close(),  # noqa: B023 - called before the next
                environ=environment,
                output=output,
                within_s=_START_S,
            )
        if process:
            return Server(process, at)
    words = "Start it by hand to see why."
    if log:
        last = log.read_text(errors="replace").splitlines()[-5:]
        words = "Its last words:\n  " + "\n  ".join(last)
    raise ServerError(f"{name} does not start", fix=words)

"""Where a process listens that offers a pool of a backend to peers.

Usage: python listening.py BACKEND SETTINGS, the settings as JSON. Prints addresses.
"""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import psutil  # type: ignore[import-untyped]  # has no types


def listening(
    backend: str, settings: dict[str, object], **environment: str
) -> list[tuple[str, int]]:
    """Return address and port of each socket that listens, in a fresh process."""
    words = [sys.executable, __file__, backend, json.dumps(settings)]
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    found = subprocess.run(
        words,
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        check=True,
        text=True,
        timeout=120,
    )
    return [(host, port) for host, port in json.loads(found.stdout.splitlines()[-1])]


def free_range(ports: int) -> str:
    """Return a range of ports that can be bound now, as "low-high".

    Without SO_REUSEADDR, as the libraries bind them: what a process that was killed
    held is in use for a minute.
    """
    while True:
        low = random.randrange(20_000, 30_000)  # noqa: S311 - no secret
        with ExitStack() as opened:
            try:
                for port in range(low, low + ports):
                    opened.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
        return f"{low}-{low + ports - 1}"


def main(backend: str, settings: str) -> None:
    """Offer a pool, and print where this process listens."""
    from peer_trials import Rank, pools_of

    before = set(_sockets())
    pools = pools_of("mha", 4, ["page_object"])[:1]
    one = Rank(pools, backend=backend, given=json.loads(settings))
    one.transfers.offers()
    sys.stdout.write("\n" + json.dumps(sorted(set(_sockets()) - before)) + "\n")
    sys.stdout.flush()
    os._exit(0)


def _sockets() -> list[tuple[str, int]]:
    return [
        (one.laddr.ip, one.laddr.port)
        for one in psutil.Process().net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    ]


if __name__ == "__main__":
    main(*sys.argv[1:])

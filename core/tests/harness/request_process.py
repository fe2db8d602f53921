"""A process that sends or receives requests, and does as its test writes to it.

usage: request_process.py prefill|decode DESCRIPTOR
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
from peer_reference import PeerReference
from peers import LONG_S, Content, Peer, settings
from request_pools import attention

from kvdock.peers.messages import Offer

TOKENS = 64
PAGES = 16


class Slow(PeerReference):
    """Sends a batch of one row at a time, slowly enough to be stopped in between."""

    def manifest(self) -> Any:
        import attrs

        return attrs.evolve(super().manifest(), max_send_rows=1, landing_run_bytes=0)

    def rows(self, local: Any, remote: Any, sizes: Any) -> Any:
        time.sleep(0.02)
        return local, remote, sizes


def receive(link: Connection, timeout_s: float = LONG_S) -> bytes:
    """Return the next message; EOFError once the other process has ended."""
    if not link.poll(timeout_s):
        raise TimeoutError
    return link.recv_bytes()


def prefill(link: Connection) -> None:
    """Send whatever is asked for, and report its completions."""
    pools = [attention()]
    with_pages = Peer(
        pools, PAGES, core=settings(deadlines={"send": 3.0}), plugin=Slow()
    )
    with_pages.fill(Content(pools, TOKENS), {"kv": np.arange(PAGES)})
    link.send_bytes(with_pages.transfers.offer("kv", receives=False).to_bytes())
    offers = {"kv": Offer.from_bytes(receive(link))}
    while True:
        ticket = receive(link)
        future = with_pages.transfers.send(offers, ticket, {"kv": np.arange(PAGES)})
        link.send_bytes(b"begun")
        if future.wait(LONG_S):
            link.send_bytes(future.completion().to_bytes())
        if not future.quiet and future.wait_quiet(LONG_S):
            link.send_bytes(future.completion().to_bytes())


def decode(link: Connection) -> None:
    """Offer a pool, make tickets, and do nothing else."""
    peer = Peer([attention()], PAGES)
    offers = [{"kv": Offer.from_bytes(receive(link))}]
    link.send_bytes(peer.transfers.offer("kv").to_bytes())
    while True:
        receive(link)
        slots = np.arange(TOKENS).reshape(-1, 4)[::-1].ravel()
        request = peer.transfers.expect({"kv": slots}, offers)
        link.send_bytes(request.tickets[0])


def main() -> None:
    """Play a part for the test at the other end."""
    part, descriptor = sys.argv[1:]
    try:
        {"prefill": prefill, "decode": decode}[part](Connection(int(descriptor)))
    except (EOFError, OSError):
        sys.exit(0)


if __name__ == "__main__":
    main()

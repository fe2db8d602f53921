"""A process that sends or receives requests, and does as its test writes to it.

usage: request_process.py prefill|decode PORT
"""

from __future__ import annotations

import socket
import sys
import time
from typing import Any

import numpy as np
from peers import LONG_S, Content, Peer, settings
from request_pools import attention

from kvdock.testing.direct_reference import DirectReference
from kvdock.transfer.control_channel import ChannelLostError, ControlChannel
from kvdock.transfer.messages import Offer

TOKENS = 64
PAGES = 16


class Slow(DirectReference):
    """Sends a batch of one row at a time, slowly enough to be stopped in between."""

    def manifest(self) -> Any:
        import attrs

        return attrs.evolve(super().manifest(), max_send_rows=1, landing_run_bytes=0)

    def rows(self, local: Any, remote: Any, sizes: Any) -> Any:
        time.sleep(0.02)
        return local, remote, sizes


def until(seconds: float = LONG_S) -> float:
    return time.monotonic() + seconds


def prefill(channel: ControlChannel) -> None:
    """Send whatever is asked for, and report its completions."""
    pools = [attention()]
    with_pages = Peer(
        pools, PAGES, core=settings(deadlines={"send": 3.0}), plugin=Slow()
    )
    with_pages.fill(Content(pools, TOKENS), {"kv": np.arange(PAGES)})
    channel.send(with_pages.direct.offer("kv", receives=False).to_bytes(), until())
    offers = {"kv": Offer.from_bytes(channel.receive(until()))}
    while True:
        ticket = channel.receive(until())
        future = with_pages.attachment.send(offers, ticket, {"kv": np.arange(PAGES)})
        channel.send(b"begun", until())
        if future.wait(LONG_S):
            channel.send(future.completion().to_bytes(), until())
        if not future.quiet and future.wait_quiet(LONG_S):
            channel.send(future.completion().to_bytes(), until())


def decode(channel: ControlChannel) -> None:
    """Offer a pool, make tickets, and do nothing else."""
    peer = Peer([attention()], PAGES)
    offers = [{"kv": Offer.from_bytes(channel.receive(until()))}]
    channel.send(peer.direct.offer("kv").to_bytes(), until())
    while True:
        channel.receive(until())
        slots = np.arange(TOKENS).reshape(-1, 4)[::-1].ravel()
        request = peer.attachment.expect({"kv": slots}, offers)
        channel.send(request.tickets[0], until())


def main() -> None:
    """Connect to the test and play a part."""
    part, port = sys.argv[1:]
    link = socket.create_connection(("127.0.0.1", int(port)), timeout=LONG_S)
    try:
        {"prefill": prefill, "decode": decode}[part](ControlChannel(link, until()))
    except ChannelLostError:
        sys.exit(0)


if __name__ == "__main__":
    main()

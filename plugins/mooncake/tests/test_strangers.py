"""What strangers on the network, and peers that are killed, cost the engine's threads.

The bar: no thread waits more than 100 ms for the interpreter's lock because of the
plugin, and each call ends by its deadline.
"""

from __future__ import annotations

import ctypes
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from peer_processes import PeerProcess, Side, mapped, memory_file
from strangers import Heartbeat, trickling

from kvdock import Outcome
from kvdock.own_sockets import listening_ports
from kvdock_mooncake.connect import join
from kvdock_mooncake.shutdown import STORES
from kvdock_mooncake.teardown import PATIENCE_S, end_store

if TYPE_CHECKING:
    from kvdock_mooncake.settings import MooncakeSettings

pytestmark = pytest.mark.mooncake

LONGEST_S = 0.1
"""For which a thread of the engine may wait for the interpreter's lock."""
SLACK_S = 5.0
"""For which a machine under load may be late; strangers trickle for 30 s."""

MANY = pytest.mark.parametrize(
    "number", [8, pytest.param(64, marks=pytest.mark.slow), 500]
)


@pytest.fixture
def side(library: Any) -> Iterator[Side]:
    del library
    with memory_file(1 << 22) as path:
        one = Side("mooncake", mapped(path), {"host": "127.0.0.1"})
        yield one
        one.release()


@pytest.mark.slow
def test_the_heartbeat_feels_a_lock_that_is_held_asleep() -> None:
    # The busier the machine, the more of it counts as waiting for a core.
    for held_s in (0.4, 1.6, 6.4):
        with Heartbeat() as heart:
            # Calls of a PyDLL keep the lock.
            ctypes.PyDLL(None).usleep(int(held_s * 1e6))
        if heart.longest_s > LONGEST_S:
            return
    pytest.fail(f"held for {held_s} s, felt {heart.longest_s:.3f} s")


def check(heart: Heartbeat, took_s: float, deadline_s: float) -> None:
    assert heart.longest_s < LONGEST_S, "the lock was held"
    assert took_s < deadline_s + SLACK_S, "it outlasted its deadline"


@MANY
def test_strangers_do_not_hold_a_withdrawal(side: Side, number: int) -> None:
    before = listening_ports()
    side.endpoint()
    with trickling(number, listening_ports() - before), Heartbeat() as heart:
        began = time.monotonic()
        assert side.withdraw()
        took = time.monotonic() - began
    check(heart, took, PATIENCE_S)


@pytest.mark.slow
@MANY
def test_strangers_do_not_hold_a_store_that_is_closed(
    library: Any, alone: MooncakeSettings, number: int
) -> None:
    before = listening_ports()
    store = join(library, alone)
    with trickling(number, listening_ports() - before), Heartbeat() as heart:
        began = time.monotonic()
        assert end_store(store)
        took = time.monotonic() - began
    check(heart, took, PATIENCE_S)


@pytest.mark.slow
def test_strangers_do_not_hold_the_last_pool_of_a_lender(
    attached: Any, alone: MooncakeSettings
) -> None:
    before = listening_ports()
    rig = attached(alone)
    with trickling(8, listening_ports() - before), Heartbeat() as heart:
        began = time.monotonic()
        rig.release()
        took = time.monotonic() - began
    check(heart, took, PATIENCE_S)


def test_a_sender_takes_no_connection(side: Side) -> None:
    # While one is set up, as by a late test, a port of its own may be the store's.
    until = time.monotonic() + 60
    while STORES.running and time.monotonic() < until:
        time.sleep(0.01)
    before = listening_ports()
    with (
        memory_file(1 << 22) as path,
        PeerProcess("mooncake", path, {"host": "127.0.0.1"}) as receiver,
    ):
        endpoint, base = receiver.call("endpoint")
        side.connect(endpoint)
        opened = listening_ports() - before
        assert len(opened) == 2
        for port in opened:
            with pytest.raises(TimeoutError):
                socket.create_connection(("127.0.0.1", port), 0.1)
        row = np.zeros(1, np.int64)
        outcomes, _, _ = side.send(row, base + row, row + 4096)
        assert outcomes == [Outcome.OK]


@pytest.mark.parametrize(
    "for_s",
    [
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(26, marks=[pytest.mark.slow, pytest.mark.long]),
    ],
)
def test_requests_for_a_killed_peer_do_not_hold_the_lock(
    side: Side, for_s: float
) -> None:
    with (
        memory_file(1 << 22) as path,
        PeerProcess("mooncake", path, {"host": "127.0.0.1"}) as receiver,
    ):
        endpoint, base = receiver.call("endpoint")
        side.connect(endpoint)
        rows = np.arange(4) * 4096
        arguments = (rows, base + rows, np.full(4, 4096), 1.0)
        assert set(side.send(*arguments)[0]) == {Outcome.OK}
        receiver.kill()
        slowest = 0.0
        threads = set()
        with Heartbeat() as heart:
            until = time.monotonic() + for_s
            while time.monotonic() < until:
                outcomes, _, took = side.send(*arguments)
                assert Outcome.OK not in outcomes
                slowest = max(slowest, took)
                threads.add(len(list(Path("/proc/self/task").iterdir())))
                time.sleep(0.002)
    # One pause in 26 s may be the machine's: each end of an engine would be another.
    assert heart.second_s < LONGEST_S, "the lock was held"
    assert slowest < 1.0 + SLACK_S, "it outlasted its deadline"
    assert max(threads) < min(threads) + 32

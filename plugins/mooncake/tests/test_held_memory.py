"""Memory that stays held after a transfer that the library gave up."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from kvdock import Operation, Outcome
from kvdock_mooncake.client import State
from kvdock_mooncake.error_codes import GIVEN_UP, given_up
from kvdock_mooncake.held_memory import CallTimer, HeldMemory, Renewal
from kvdock_mooncake.settings import MooncakeSettings

OK = Outcome.OK
NAMES = [f"held-{i}" for i in range(4)]
ROW_BYTES = 64 << 10


def test_only_calls_that_lasted_to_the_limit_leave_doubt_about_their_transfers() -> (
    None
):
    numbers = np.array([-800, -707, -900, -1, -704, -703, -200, 0, 4096])
    found = given_up(numbers).tolist()
    assert found == [GIVEN_UP] * 4 + [-704, -703, -200, 0, 4096]


def test_a_clock_that_is_set_forward_counts_as_time_that_has_passed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The library measures its limit by the clock of the wall."""
    timer = CallTimer()
    assert timer.elapsed_s() < 5
    monkeypatch.setattr("time.time", lambda: timer.wall_s + 61)
    assert timer.elapsed_s() > 60
    monkeypatch.setattr("time.time", lambda: timer.wall_s - 1000)
    assert 0 <= timer.elapsed_s() < 5


@pytest.mark.parametrize(
    ("given", "renewal", "limit_s"),
    [
        ({"segment_bytes": 0}, Renewal.AT_ONCE, 50.0),
        ({}, Renewal.WHEN_FULL, 50.0),
        ({"ssd_offload": True, "ssd_path": "/d"}, Renewal.NEVER, 50.0),
        ({"standalone": "h:1"}, Renewal.WITHOUT_EFFECT, 20.0),
    ],
)
def test_what_a_process_lends_decides_when_its_store_is_replaced(
    given: dict[str, Any], renewal: Renewal, limit_s: float
) -> None:
    held = HeldMemory.of(MooncakeSettings(master="h:1", max_held_bytes=100, **given))
    assert (held.renewal, held.limit_s) == (renewal, limit_s)
    assert not held.wants_renewal()
    holds = [held.add(100)]
    assert held.wants_renewal() == (renewal is Renewal.AT_ONCE)
    full = [held.full]
    holds.append(held.add(1))
    full.append(held.full)
    assert full == [False, True]
    assert held.wants_renewal() == (renewal in (Renewal.AT_ONCE, Renewal.WHEN_FULL))
    held.postpone_renewal()
    assert not held.wants_renewal()
    held.release()
    kept = renewal is Renewal.WITHOUT_EFFECT
    assert [hold.released for hold in holds] == [not kept] * 2
    assert held.nbytes == (101 if kept else 0)


@pytest.fixture
def orphaned(attached: Any, serve: Any, start_peer: Any) -> Any:
    """A function that attaches pages whose owner ends then.

    Each transfer from it fails, and counts as one at the library's limit.
    """

    def attach(**given: Any) -> Any:
        master = serve("-client_ttl=60").address
        owner = start_peer(master=master, segment_bytes="64 MiB")
        writer = attached(MooncakeSettings(master=master, segment_bytes=0))
        writer.fill(1)
        assert writer.put(NAMES) == [OK] * len(NAMES)
        writer.release()
        settings = MooncakeSettings(master=master, lease_s=0.5, **given)
        rig = attached(settings)
        rig.handle.client.held = HeldMemory(
            settings.max_held_bytes, Renewal.of(settings), limit_s=0.0
        )
        owner.kill()
        return rig

    return attach


def lost(rig: Any, operation: Operation = Operation.GET) -> Any:
    """Move pages; return the hold on their memory."""
    result = rig.run(operation, NAMES)
    assert set(result.outcomes) == {Outcome.UNAVAILABLE}
    assert result.hold is not None
    return result.hold


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_store_that_lends_nothing_is_replaced_when_the_call_ends(
    orphaned: Any, caplog: pytest.LogCaptureFixture
) -> None:
    rig = orphaned(segment_bytes=0)
    store = rig.store
    assert lost(rig).released
    assert rig.store is not store
    assert "given up may still end: joining the cluster again" in caplog.text
    assert rig.handle.client.held.nbytes == 0
    assert rig.exists(NAMES) == [OK] * len(NAMES), "the master has not noticed yet"
    rig.release()


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_store_that_lends_memory_keeps_its_segment_until_too_much_is_held(
    orphaned: Any, caplog: pytest.LogCaptureFixture
) -> None:
    most = 5 * ROW_BYTES
    rig = orphaned(segment_bytes=64 << 20, max_held_bytes=most)
    store = rig.store
    hold = lost(rig)
    assert not hold.released
    assert rig.store is store
    assert rig.handle.client.held.nbytes == 4 * ROW_BYTES
    assert lost(rig).released, "with this one it is too much"
    assert hold.released
    assert rig.store is not store
    assert "its segment is lost" in caplog.text
    rig.release()


@pytest.mark.slow
@pytest.mark.mooncake
def test_closing_the_last_pool_ends_what_a_lender_holds(orphaned: Any) -> None:
    rig = orphaned(segment_bytes=64 << 20)
    hold = lost(rig)
    rig.release()
    assert rig.handle.client.state is State.CLOSED
    assert hold.released


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_store_that_cannot_be_replaced_moves_nothing_when_too_much_is_held(
    orphaned: Any,
) -> None:
    rig = orphaned(segment_bytes=0)
    client = rig.handle.client
    client.held = HeldMemory(4 * ROW_BYTES - 1, Renewal.NEVER, limit_s=0.0)
    hold = lost(rig)
    began = time.monotonic()
    for move in (rig.get, rig.put):
        assert move(NAMES) == [Outcome.UNAVAILABLE] * len(NAMES)
    assert time.monotonic() - began < 0.5
    assert rig.exists(NAMES) == [OK] * len(NAMES)
    assert not hold.released
    # A client that lends nothing is kept for the next pool, but not this one.
    rig.release()
    assert client.state is State.CLOSED
    assert hold.released


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_failed_put_holds_its_memory_too(orphaned: Any) -> None:
    """Its late pieces would store the bytes of the page's next use."""
    rig = orphaned(segment_bytes=0)
    rig.handle.client.held = HeldMemory(1 << 30, Renewal.NEVER, limit_s=0.0)
    result = rig.run(Operation.PUT, [f"new-{i}" for i in range(4)])
    assert set(result.outcomes) == {Outcome.UNAVAILABLE}
    assert result.hold is not None
    rig.release()
    assert result.hold.released


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_transfer_that_fails_at_once_holds_nothing(orphaned: Any) -> None:
    rig = orphaned(segment_bytes=0)
    rig.handle.client.held = HeldMemory.of(rig.handle.client.settings)
    store = rig.store
    assert rig.run(Operation.GET, NAMES).hold is None
    assert rig.store is store
    rig.release()


class Raising:
    """A store that raises in one call."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        if name == "batch_get_into":
            raise RuntimeError("no words")
        return getattr(self.store, name)


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_call_that_raises_at_the_limit_holds_its_memory(orphaned: Any) -> None:
    rig = orphaned(segment_bytes=0)
    client, store = rig.handle.client, rig.store
    client.held = HeldMemory(1 << 30, Renewal.NEVER, limit_s=0.0)
    client._store = Raising(store)
    hold = lost(rig)
    client._store = store
    rig.release()
    assert hold.released


@pytest.mark.slow
@pytest.mark.mooncake
def test_a_store_that_cannot_join_again_goes_on_holding(
    orphaned: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    rig = orphaned(segment_bytes=0)

    def refuse(*_: object) -> Any:
        raise RuntimeError("the cluster is full")

    monkeypatch.setattr("kvdock_mooncake.client.join", refuse)
    store = rig.store
    hold = lost(rig)
    assert not hold.released
    assert rig.store is store
    assert "cannot be joined again: the cluster is full" in caplog.text
    assert not lost(rig).released
    assert caplog.text.count("cannot be joined again") == 1, "not again at once"
    rig.release()
    assert hold.released


@pytest.mark.slow
@pytest.mark.mooncake
def test_pools_without_checksums_over_tcp_are_warned_about(
    attached: Any, alone: MooncakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    rig = attached(alone)
    assert "pool kv has no checksums (core.integrity is off) over TCP" in caplog.text
    rig.release()

"""What is logged, and when a store counts as stuck."""

from __future__ import annotations

import numpy as np
import pytest

from kvdock import Operation
from kvdock_mooncake.health import Health

FAILED = np.array([-800, -800], np.int64)
MIXED = np.array([-800, 4096], np.int64)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_only_transfers_that_all_fail_for_long_count_as_a_stuck_store(
    clock: list[float],
) -> None:
    health = Health(replaceable=True)
    health.record(Operation.GET, FAILED)
    clock[0] += 29
    health.record(Operation.GET, FAILED)
    assert not health.is_stuck
    health.record(Operation.GET, MIXED)
    clock[0] += 29
    health.record(Operation.GET, FAILED)
    assert not health.is_stuck
    clock[0] += 31
    health.record(Operation.GET, FAILED)
    assert health.is_stuck


def test_what_moves_no_bytes_says_nothing_about_transfers(clock: list[float]) -> None:
    """The master answers for a wedged store, and takes what it has already."""
    health = Health(replaceable=True)
    for _ in range(32):
        health.record(Operation.EXISTS, np.ones(2, np.int64))
        health.record(Operation.GET, FAILED)
        health.record(Operation.PUT, np.zeros(2, np.int64))
        health.record(Operation.DELETE, np.zeros(2, np.int64))
        clock[0] += 1
    assert health.is_stuck
    health.reset()
    for _ in range(32):
        health.record(Operation.EXISTS, FAILED)
        clock[0] += 1
    assert not health.is_stuck


def test_puts_that_fail_now_and_then_are_no_stuck_store(clock: list[float]) -> None:
    health = Health(replaceable=True)
    for _ in range(3):
        health.record(Operation.PUT, FAILED)
        clock[0] += 31
        health.record(Operation.PUT, np.zeros(2, np.int64))
    assert not health.is_stuck


def test_a_store_that_was_replaced_in_vain_is_given_longer(clock: list[float]) -> None:
    health = Health(replaceable=True)
    waited = []
    for _ in range(3):
        began = clock[0]
        while not health.is_stuck:
            health.record(Operation.GET, FAILED)
            clock[0] += 1
        waited.append(clock[0] - began)
        health.reset()
    assert waited == [32, 62, 122]
    health.record(Operation.GET, MIXED)
    health.record(Operation.GET, FAILED)
    clock[0] += 31
    health.record(Operation.GET, FAILED)
    assert health.is_stuck


def test_a_store_that_may_not_be_replaced_is_never_stuck(clock: list[float]) -> None:
    health = Health(replaceable=False)
    health.record(Operation.GET, FAILED)
    clock[0] += 100
    health.record(Operation.GET, FAILED)
    assert not health.is_stuck


def test_each_reason_is_logged_once_in_a_while(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    health = Health(replaceable=True)
    for _ in range(5):
        health.record(Operation.GET, np.array([-801, -704, -801], np.int64))
    assert [record.getMessage() for record in caplog.records] == [
        "mooncake: get of 2 keys of 3 failed: the library's own checksum differs (-801)"
    ]
    clock[0] += 31
    health.record(Operation.GET, np.array([-801], np.int64))
    assert len(caplog.records) == 2


def test_a_store_that_moves_bytes_again_is_not_replaced_after_all(
    clock: list[float],
) -> None:
    """A call that hung has kept it from being replaced until then."""
    health = Health(replaceable=True)
    for _ in range(2):
        health.record(Operation.GET, FAILED)
        health.record(Operation.PUT, FAILED)
        clock[0] += 31
    assert health.is_stuck
    health.record(Operation.PUT, np.zeros(2, np.int64))
    assert health.is_stuck, "a put of what is there already moves nothing"
    health.record(Operation.GET, MIXED)
    assert not health.is_stuck


def test_a_master_that_waits_long_for_the_lost_makes_a_store_stuck_later(
    clock: list[float],
) -> None:
    health = Health(replaceable=True, client_ttl_s=60.0)
    health.record(Operation.GET, FAILED)
    clock[0] += 100
    health.record(Operation.GET, FAILED)
    assert not health.is_stuck
    clock[0] += 100
    health.record(Operation.GET, FAILED)
    assert health.is_stuck

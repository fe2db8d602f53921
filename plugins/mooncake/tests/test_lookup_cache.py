"""Lookups that reach the master, and those that memory answers."""

from __future__ import annotations

import pytest

from kvdock_mooncake import lookup_cache
from kvdock_mooncake.lookup_cache import LookupCache


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_the_first_questions_reach_the_master(clock: list[float]) -> None:
    seen = LookupCache(10.0)
    for _ in range(3):
        assert not seen.contains(["a"]).any()
        seen.add(["a"])
        clock[0] += 1
    assert not seen.contains(["a"]).any()


@pytest.mark.parametrize("every_s", [0.001, 0.1, 3.0, 9.0])
def test_a_polled_key_is_without_a_lease_now_and_then(
    clock: list[float], every_s: float
) -> None:
    seen = LookupCache(10.0)
    leased_until, free = 0.0, 0.0
    while clock[0] < 120:
        if not seen.contains(["a"])[0]:
            seen.add(["a"])
            leased_until = clock[0] + 10.0
        clock[0] += every_s
        free += every_s if clock[0] > leased_until else 0
    assert free > 5


def test_a_key_that_failed_is_asked_for_again() -> None:
    seen = LookupCache(10.0)
    for _ in range(5):
        seen.add(["a", "b"])
    assert seen.contains(["a", "b", "c"]).tolist() == [True, True, False]
    seen.discard(["a"])
    assert seen.contains(["a", "b"]).tolist() == [False, True]
    seen.clear()
    assert not seen.contains(["b"]).any()


def test_memory_is_bounded_and_drops_the_oldest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lookup_cache, "_MOST_KEYS", 3)
    seen = LookupCache(10.0)
    for _ in range(5):
        seen.add(["a", "b", "c", "d"])
    assert len(seen._seen) == 3
    assert "a" not in seen._seen

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from kvdock.config.core import MissSettings
from kvdock.resilience.negative_cache import Misses


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def made(keys: int = 8) -> tuple[Misses, Clock]:
    clock = Clock()
    return Misses(MissSettings(keys=keys, absent=1.0, dead=10.0), clock), clock


def known(misses: Misses, *keys: str) -> list[bool]:
    found = misses.known(keys)
    return [False] * len(keys) if found is None else found.tolist()


def test_absent_keys_are_believed_for_a_moment_and_dead_ones_longer() -> None:
    misses, clock = made()
    misses.absent(["a"])
    misses.dead(["b"])
    assert known(misses, "a", "b", "c") == [True, True, False]
    clock.now += 1.1
    assert known(misses, "a", "b", "c") == [False, True, False]
    clock.now += 10
    assert known(misses, "a", "b", "c") == [False] * 3
    assert len(misses) == 0


def test_a_dead_key_that_is_absent_for_a_moment_stays_dead() -> None:
    misses, clock = made()
    misses.dead(["a"])
    misses.absent(["a"])
    clock.now += 5
    assert known(misses, "a") == [True]


def test_what_was_stored_is_asked_for_again() -> None:
    misses, _ = made()
    misses.dead(["a", "b"])
    misses.forget(["a"])
    assert known(misses, "a", "b") == [False, True]


@given(st.lists(st.lists(st.sampled_from("abcdefghij"), unique=True), max_size=12))
def test_it_never_grows_over_its_bound_and_keeps_the_newest(
    batches: list[list[str]],
) -> None:
    misses, _ = made(keys=3)
    for batch in batches:
        misses.absent(batch)
        assert len(misses) <= 3
        if batch:
            assert known(misses, *batch[:3]) == [True] * len(batch[:3])


def test_a_bound_of_nothing_switches_it_off() -> None:
    misses, _ = made(keys=0)
    misses.dead(["a"])
    assert known(misses, "a") == [False]


def test_a_full_book_takes_new_keys_as_quickly_as_an_empty_one() -> None:
    misses = Misses(MissSettings(keys=65536, absent=3600.0))
    misses.absent([f"{key:064x}" for key in range(65536)])
    fresh = [f"{key:064x}" for key in range(65536, 131072)]
    began_s = time.thread_time()
    for start in range(0, len(fresh), 8192):
        misses.absent(fresh[start : start + 8192])
    # It took two seconds when each of them looked for the oldest.
    assert time.thread_time() - began_s < 0.5
    assert len(misses) == 65536

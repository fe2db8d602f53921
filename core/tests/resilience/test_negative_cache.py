from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from kvdock.config.core import NegativeCacheSettings
from kvdock.resilience.negative_cache import NegativeCache


class Clock:
    now = 50.0

    def __call__(self) -> float:
        return self.now


def made(keys: int = 8) -> tuple[NegativeCache, Clock]:
    clock = Clock()
    return NegativeCache(
        NegativeCacheSettings(max_keys=keys, absent_ttl=1.0, corrupt_ttl=10.0), clock
    ), clock


def known(negative_cache: NegativeCache, *keys: str) -> list[bool]:
    found = negative_cache.lookup(keys)
    return [False] * len(keys) if found is None else found.tolist()


def test_absent_keys_are_believed_for_a_moment_and_dead_ones_longer() -> None:
    negative_cache, clock = made()
    negative_cache.add_absent(["a"])
    negative_cache.add_corrupt(["b"])
    assert known(negative_cache, "a", "b", "c") == [True, True, False]
    clock.now += 1.1
    assert known(negative_cache, "a", "b", "c") == [False, True, False]
    clock.now += 10
    assert known(negative_cache, "a", "b", "c") == [False] * 3
    assert len(negative_cache) == 0


def test_a_dead_key_that_is_absent_for_a_moment_stays_dead() -> None:
    negative_cache, clock = made()
    negative_cache.add_corrupt(["a"])
    negative_cache.add_absent(["a"])
    clock.now += 5
    assert known(negative_cache, "a") == [True]


@given(st.lists(st.lists(st.sampled_from("abcdefghij"), unique=True), max_size=12))
def test_it_never_grows_over_its_bound_and_keeps_the_newest(
    batches: list[list[str]],
) -> None:
    negative_cache, _ = made(keys=3)
    for batch in batches:
        negative_cache.add_absent(batch)
        assert len(negative_cache) <= 3
        if batch:
            assert known(negative_cache, *batch[:3]) == [True] * len(batch[:3])


def test_a_bound_of_nothing_switches_it_off() -> None:
    negative_cache, _ = made(keys=0)
    negative_cache.add_corrupt(["a"])
    assert known(negative_cache, "a") == [False]


def test_a_full_book_takes_new_keys_as_quickly_as_an_empty_one() -> None:
    negative_cache = NegativeCache(
        NegativeCacheSettings(max_keys=65536, absent_ttl=3600.0)
    )
    negative_cache.add_absent([f"{key:064x}" for key in range(65536)])
    fresh = [f"{key:064x}" for key in range(65536, 131072)]
    began_s = time.thread_time()
    for start in range(0, len(fresh), 8192):
        negative_cache.add_absent(fresh[start : start + 8192])
    # It took two seconds when each of them looked for the oldest.
    assert time.thread_time() - began_s < 0.5
    assert len(negative_cache) == 65536

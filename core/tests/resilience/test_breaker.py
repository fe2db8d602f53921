from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from kvdock.config.core import BreakerSettings
from kvdock.resilience.breaker import BreakerState, CircuitBreaker


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(**given: Any) -> tuple[CircuitBreaker, Clock, list[BreakerState]]:
    clock = Clock()
    states: list[BreakerState] = []
    settings = BreakerSettings(
        **{
            "failures": 3,
            "abandoned_calls": 2,
            "backoff": 1.0,
            "max_backoff": 4.0,
            **given,
        }
    )
    breaker = CircuitBreaker(settings, states.append, clock, jitter=lambda: 1.0)
    return breaker, clock, states


def opened(**given: Any) -> tuple[CircuitBreaker, Clock, list[BreakerState]]:
    breaker, clock, states = made(**given)
    for _ in range(3):
        breaker.record_failure()
    return breaker, clock, states


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker, _, states = made()
    for _ in range(5):
        breaker.record_failure()
        breaker.record_failure()
        breaker.record_success()
    assert breaker.allows_call()
    for _ in range(3):
        breaker.record_failure()
    assert not breaker.allows_call()
    assert states == [BreakerState.OPEN]


def test_the_engine_gets_through_only_after_a_probe_and_one_at_a_time() -> None:
    breaker, clock, states = opened()
    assert not breaker.probe_due()
    clock.now += 1.0
    assert not breaker.allows_call()
    assert breaker.probe_due()
    assert not breaker.probe_due()
    assert not breaker.allows_call()
    breaker.record_probe(alive=True)
    assert breaker.allows_call()
    assert not breaker.allows_call()
    breaker.record_success()
    assert breaker.allows_call()
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]


def test_a_failed_trial_opens_again_and_waits_twice_as_long() -> None:
    breaker, clock, _ = opened()
    waits = []
    for _ in range(4):
        waited = 0.0
        while not breaker.probe_due():
            clock.now += 0.5
            waited += 0.5
        waits.append(waited)
        breaker.record_probe(alive=True)
        assert breaker.allows_call()
        breaker.record_failure()
    assert waits in ([2.0, 2.0, 4.0, 4.0], [1.0, 2.0, 4.0, 4.0])


def waited(breaker: CircuitBreaker, clock: Clock) -> float:
    """How long it takes until the next probe is due."""
    began = clock.now
    while not breaker.probe_due():
        clock.now += 0.5
    return clock.now - began


def test_probes_that_hang_follow_each_other_after_twice_the_time() -> None:
    breaker, clock, _ = opened()
    assert [waited(breaker, clock) for _ in range(6)] == [
        1.0,
        2.0,
        4.0,
        8.0,
        16.0,
        32.0,
    ]
    # One that ends says that the others mean nothing.
    breaker.record_probe(alive=False)
    assert waited(breaker, clock) == 2.0


def test_the_end_of_something_that_hung_is_worth_a_look_soon() -> None:
    breaker, clock, _ = opened()
    for _ in range(6):
        waited(breaker, clock)
    breaker.on_late_end()
    assert waited(breaker, clock) == 1.0
    # Still no answer.
    assert waited(breaker, clock) == 128.0


def test_the_end_of_something_that_hung_puts_no_probe_off() -> None:
    breaker, clock, _ = opened()
    clock.now += 0.75
    breaker.on_late_end()
    clock.now += 0.25
    assert breaker.probe_due()


def test_a_breaker_can_be_opened_for_what_others_have_done() -> None:
    breaker, clock, states = made()
    breaker.trip()
    breaker.trip()
    assert not breaker.allows_call()
    assert waited(breaker, clock) == 1.0
    breaker.record_probe(alive=True)
    assert breaker.allows_call()
    breaker.record_success()
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]


def test_a_trial_that_says_nothing_leaves_room_for_the_next() -> None:
    breaker, clock, _ = opened()
    clock.now += 1.0
    assert breaker.probe_due()
    breaker.record_probe(alive=True)
    assert breaker.allows_call()
    breaker.record_ignored()
    assert breaker.allows_call()


def test_late_failures_do_not_prolong_an_open_breaker() -> None:
    breaker, clock, _ = opened()
    clock.now += 0.9
    breaker.record_failure()
    clock.now += 0.1
    assert breaker.probe_due()


STORY: dict[str, Callable[[CircuitBreaker, Clock], object]] = {
    "ok": lambda breaker, _: breaker.record_success(),
    "bad": lambda breaker, _: breaker.record_failure(),
    "late": lambda breaker, _: breaker.record_failure(overran=True),
    "probe": lambda breaker, _: breaker.probe_due(),
    "alive": lambda breaker, _: breaker.record_probe(alive=True),
    "dead": lambda breaker, _: breaker.record_probe(alive=False),
    "none": lambda breaker, _: breaker.record_ignored(),
    "stir": lambda breaker, _: breaker.on_late_end(),
    "cut": lambda breaker, _: breaker.trip(),
    "tick": lambda _, clock: setattr(clock, "now", clock.now + 0.7),
}


@given(st.lists(st.sampled_from(list(STORY))))
def test_no_story_lets_a_call_through_an_open_breaker_unprobed(
    story: list[str],
) -> None:
    breaker, clock, states = made()
    for word in story:
        before = breaker.state
        STORY[word](breaker, clock)
        if before is BreakerState.OPEN and breaker.state is not BreakerState.OPEN:
            assert word == "alive"
        if breaker.state is BreakerState.OPEN:
            assert not breaker.allows_call()
    assert all(one is not two for one, two in itertools.pairwise(states))

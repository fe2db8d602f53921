from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.config.core import BreakerSettings
from kvdock.resilience.breaker import Breaker, BreakerState


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def made(**given: Any) -> tuple[Breaker, Clock, list[BreakerState]]:
    clock = Clock()
    states: list[BreakerState] = []
    settings = BreakerSettings(
        **{"failures": 3, "overruns": 2, "backoff": 1.0, "backoff_most": 4.0, **given}
    )
    breaker = Breaker(settings, states.append, clock, jitter=lambda: 1.0)
    return breaker, clock, states


def opened(**given: Any) -> tuple[Breaker, Clock, list[BreakerState]]:
    breaker, clock, states = made(**given)
    for _ in range(3):
        breaker.failed()
    return breaker, clock, states


def test_it_opens_after_failures_in_a_row_only() -> None:
    breaker, _, states = made()
    for _ in range(5):
        breaker.failed()
        breaker.failed()
        breaker.succeeded()
    assert breaker.admits()
    for _ in range(3):
        breaker.failed()
    assert not breaker.admits()
    assert states == [BreakerState.OPEN]


def test_calls_that_overrun_weigh_more() -> None:
    breaker, _, _ = made()
    breaker.failed(overran=True)
    assert breaker.admits()
    breaker.failed(overran=True)
    assert not breaker.admits()


def test_the_engine_gets_through_only_after_a_probe_and_one_at_a_time() -> None:
    breaker, clock, states = opened()
    assert not breaker.wants_probe()
    clock.now += 1.0
    assert not breaker.admits()
    assert breaker.wants_probe()
    assert not breaker.wants_probe()
    assert not breaker.admits()
    breaker.probed(alive=True)
    assert breaker.admits()
    assert not breaker.admits()
    breaker.succeeded()
    assert breaker.admits()
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]


def test_a_failed_trial_opens_again_and_waits_twice_as_long() -> None:
    breaker, clock, _ = opened()
    waits = []
    for _ in range(4):
        waited = 0.0
        while not breaker.wants_probe():
            clock.now += 0.5
            waited += 0.5
        waits.append(waited)
        breaker.probed(alive=True)
        assert breaker.admits()
        breaker.failed()
    assert waits in ([2.0, 2.0, 4.0, 4.0], [1.0, 2.0, 4.0, 4.0])


def test_a_dead_probe_doubles_the_wait_up_to_the_most() -> None:
    breaker, clock, _ = opened()
    waits = []
    for _ in range(4):
        waited = 0.0
        while not breaker.wants_probe():
            clock.now += 0.5
            waited += 0.5
        waits.append(waited)
        breaker.probed(alive=False)
    assert waits == [1.0, 2.0, 4.0, 4.0]
    assert breaker.state is BreakerState.OPEN


def waited(breaker: Breaker, clock: Clock) -> float:
    """How long it takes until the next probe is due."""
    began = clock.now
    while not breaker.wants_probe():
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
    breaker.probed(alive=False)
    assert waited(breaker, clock) == 2.0


def test_the_end_of_something_that_hung_is_worth_a_look_soon() -> None:
    breaker, clock, _ = opened()
    for _ in range(6):
        waited(breaker, clock)
    breaker.stirred()
    assert waited(breaker, clock) == 1.0
    # Still nobody has answered.
    assert waited(breaker, clock) == 128.0


def test_the_end_of_something_that_hung_puts_no_probe_off() -> None:
    breaker, clock, _ = opened()
    clock.now += 0.75
    breaker.stirred()
    clock.now += 0.25
    assert breaker.wants_probe()


def test_a_breaker_can_be_opened_for_what_others_have_done() -> None:
    breaker, clock, states = made()
    breaker.cut()
    breaker.cut()
    assert not breaker.admits()
    assert waited(breaker, clock) == 1.0
    breaker.probed(alive=True)
    assert breaker.admits()
    breaker.succeeded()
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]


def test_a_trial_that_says_nothing_leaves_room_for_the_next() -> None:
    breaker, clock, _ = opened()
    clock.now += 1.0
    assert breaker.wants_probe()
    breaker.probed(alive=True)
    assert breaker.admits()
    breaker.undecided()
    assert breaker.admits()


def test_late_failures_do_not_prolong_an_open_breaker() -> None:
    breaker, clock, _ = opened()
    clock.now += 0.9
    breaker.failed()
    clock.now += 0.1
    assert breaker.wants_probe()


STORY: dict[str, Callable[[Breaker, Clock], object]] = {
    "ok": lambda breaker, _: breaker.succeeded(),
    "bad": lambda breaker, _: breaker.failed(),
    "late": lambda breaker, _: breaker.failed(overran=True),
    "probe": lambda breaker, _: breaker.wants_probe(),
    "alive": lambda breaker, _: breaker.probed(alive=True),
    "dead": lambda breaker, _: breaker.probed(alive=False),
    "none": lambda breaker, _: breaker.undecided(),
    "stir": lambda breaker, _: breaker.stirred(),
    "cut": lambda breaker, _: breaker.cut(),
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
            assert not breaker.admits()
    assert all(one is not two for one, two in itertools.pairwise(states))


def test_ranks_do_not_come_back_all_at_once() -> None:
    factors = {Breaker(BreakerSettings())._jitter() for _ in range(20)}
    assert len(factors) > 10
    assert all(0.8 <= factor <= 1.2 for factor in factors)


@pytest.mark.parametrize("state", list(BreakerState))
def test_every_state_has_a_word_and_a_meaning(state: BreakerState) -> None:
    from kvdock.observers.metrics import BREAKER_VALUES

    assert str(state) in BREAKER_VALUES

"""Decisions: modes, hysteresis, exploration, limits, and what waits in front."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
from paced import Clock, Engine, StandIn, Store

from kvdock.config.core import PaysMode, PaysSettings
from kvdock.pays.curves import LoadCurve
from kvdock.pays.policy import LoadLimit, LoadPolicy, Prefix

SLOW, FAST = Store(bytes_per_s=50e6), Store(bytes_per_s=20e9)


def warm(store: Store, **more: Any) -> StandIn:
    """Return an engine that has computed, and loaded from a store for a while."""
    found = StandIn(Engine(), store, **more)
    for _ in range(2):
        found.compute(0)
    for _ in range(30):
        found.request()
    return found


def test_what_pays_is_loaded_and_what_does_not_is_computed() -> None:
    assert warm(FAST).events[-1].choice == "all"
    assert {one.choice for one in warm(SLOW).events[-20:]} <= {"compute", "explore"}


def test_all_is_loaded_until_both_curves_are_known() -> None:
    fresh = StandIn(Engine(), SLOW)
    fresh.request()
    event = fresh.events[-1]
    assert (event.choice, event.acted, event.pages) == ("unknown", False, event.found)


def test_advisory_counts_and_loads_everything() -> None:
    settings = PaysSettings(mode=PaysMode.ADVISORY)
    found = warm(SLOW, settings=settings)
    took_s = found.request()
    event = found.events[-1]
    assert (event.choice, event.acted) == ("compute", False)
    assert took_s == pytest.approx(found.load_all_s())
    assert not LoadPolicy(PaysSettings(mode=PaysMode.ALWAYS), print).decides


def test_the_log_says_once_a_minute_what_was_learned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "kvdock")
    found = warm(FAST)
    while found.clock.now_s < 130:
        found.request()
        found.pass_time(1)
    lines = [one for one in caplog.messages if one.startswith("load or compute: ")]
    assert len(lines) == 3
    assert re.search(r"\(\d+ tokens/s; store kv [0-9.]+ ms \+ \d+ MB/s\)", lines[-1])


def test_nothing_flaps_between_equals() -> None:
    """Loads vary around what computing takes; the decision does not follow them."""
    clock = Clock()
    policy = LoadPolicy(PaysSettings(), lambda _: None, clock)
    for _ in range(3):
        policy.compute.begin([(0, 1600)])
        clock.now_s += 0.1
        policy.compute.end()
    curve = LoadCurve()
    pages = np.arange(101)
    choices = []
    for number in range(100):
        clock.now_s += 0.1
        shake = 1.01 if number % 2 else 0.99
        for _ in range(2):
            curve.add(100, 0.1 / 1.03 * shake, clock.now_s)
        load_s = np.where(pages > 0, 0.1 / 1.03 * shake, 0.0)
        ends, known = pages * 16, {("store", "kv"): curve}
        ones = np.ones(101, np.bool_)
        prefix = Prefix(str(number), ones, load_s, ends, 1600, known)
        choices.append(bool(policy.decide(prefix).pages))
        policy.done(str(number))
    assert len(set(choices)) == 1


def test_loads_are_tried_again_at_a_bounded_cost() -> None:
    found = warm(SLOW)
    began_s, best_s, spent_s = found.clock.now_s, found.best_s(), 0.0
    tried = 0
    while found.clock.now_s < began_s + 30:
        spent_s += found.request() - best_s
        tried += found.events[-1].choice == "explore"
    assert tried >= 10
    assert spent_s <= 0.06 * 30


def test_a_store_that_became_fast_is_noticed_within_seconds() -> None:
    found = warm(SLOW)
    found.store = FAST
    began_s = found.clock.now_s
    while found.events[-1].choice != "all":
        found.request()
        assert found.clock.now_s < began_s + 3


def test_what_other_requests_load_is_waited_for() -> None:
    found = warm(Store(bytes_per_s=2.5e9), pages=128)
    assert found.events[-1].choice == "all"
    busy, known = found.policy, {("store", "kv"): found.meter.curve("kv")}
    pages = np.arange(129)
    prefix = Prefix(
        "other",
        np.ones(129, np.bool_),
        known["store", "kv"].seconds(pages << 20, -(-pages // 32)),
        pages * 16,
        128 * 16 + 40,
        known,
    )
    for number in range(4):
        busy.decide(Prefix(f"other{number}", *(prefix.restorable, prefix.load_s,
                           prefix.ends, prefix.end, prefix.curves)))  # fmt: skip
    found.request()
    assert found.events[-1].wait_s > 0
    assert found.events[-1].choice == "compute"


def test_a_load_is_cut_when_computing_would_have_been_faster() -> None:
    clock = Clock()
    limit = LoadLimit(np.linspace(1.0, 0.0, 11), 1.0, clock)
    assert limit.until(5.0) == pytest.approx(1.0)
    clock.now_s = 0.2
    assert not limit.reached(0.5)  # 0.2 s more, where computing takes 0.5 s
    clock.now_s = 0.6
    assert limit.reached(0.2)
    assert limit.cut


def test_an_exploring_load_that_goes_well_has_the_time_of_any_other() -> None:
    clock = Clock()
    limit = LoadLimit(np.linspace(1.0, 0.0, 11), 0.25, clock)
    assert limit.until(5.0) == pytest.approx(0.25)
    clock.now_s = 0.2
    assert not limit.reached(0.4)
    assert limit.deadline_s == pytest.approx(1.05)


def test_computing_is_learned_where_only_short_rests_are_computed() -> None:
    slow = Store(bytes_per_s=20e9, latency_s=1.5)
    found = StandIn(Engine(), slow, tail_tokens=8)
    for _ in range(12):
        found.request()
    choices = [one.choice for one in found.events]
    assert choices[:4] == ["unknown", "unknown", "learn", "learn"]
    # A piece is computed, and all but that is loaded.
    assert all(found.pages // 2 < one.pages < found.pages for one in found.events[2:4])
    assert {one.reason for one in found.skipped[:2]} == {"learn"}
    assert set(choices[4:]) == {"compute", "explore"}
    assert found.request() == pytest.approx(Engine().seconds(0, found.end))


def test_a_decision_comes_with_its_numbers() -> None:
    event = warm(SLOW).events[-1]
    assert event.compute_s == pytest.approx(0.23, rel=0.05)
    assert event.load_s == pytest.approx(256 * (1 << 20) / 50e6, rel=0.1)
    assert event.curves["store", "kv"][1] < 200e6
    assert "of 256 pages" in str(event)

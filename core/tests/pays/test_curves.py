"""What is learned of loads and of steps, and how soon."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from paced import Clock

from kvdock.pays.choice import cheapest, costs
from kvdock.pays.curves import ComputeCurve, LoadCurve, LoadMeter

MB = 1_000_000


def seconds(curve: LoadCurve, nbytes: int) -> float:
    """Return what one call should take."""
    return float(curve.seconds(np.array([nbytes]), np.array([1]))[0])


def test_latency_and_rate_are_told_apart_by_sizes() -> None:
    curve = LoadCurve()
    for number in range(20):
        nbytes = (1 + number % 4) * MB
        curve.add(nbytes, 0.02 + nbytes / 500e6, number * 0.1)
        seconds(curve, nbytes)  # as each decision asks
    assert curve.latency_s == pytest.approx(0.02, rel=0.05)
    assert curve.bytes_per_s == pytest.approx(500e6, rel=0.05)


@pytest.mark.parametrize("factor", [20.0, 0.05])
def test_a_store_that_became_slow_or_fast_is_known_after_few_calls(
    factor: float,
) -> None:
    curve = LoadCurve()
    for number in range(100):
        curve.add(8 * MB, 0.1, number * 0.1)
    for number in range(3):
        curve.add(8 * MB, 0.1 * factor, 10 + number * 0.1)
    assert seconds(curve, 8 * MB) == pytest.approx(0.1 * factor, rel=0.2)


def test_one_slow_call_is_no_change() -> None:
    curve = LoadCurve()
    for number in range(100):
        curve.add(8 * MB, 2.0 if number == 90 else 0.1, number * 0.1)
    assert seconds(curve, 8 * MB) == pytest.approx(0.1, rel=0.2)


def test_what_is_old_counts_less() -> None:
    curve = LoadCurve()
    for number in range(100):
        curve.add(8 * MB, 0.1, number * 0.1)
    # Too near for a change, and after a minute without a call.
    curve.add(8 * MB, 0.12, 70.0)
    assert seconds(curve, 8 * MB) == pytest.approx(0.12, rel=0.03)


def test_calls_at_once_are_charged_their_share() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    for _ in range(5):
        # A store that gives both calls half of its time.
        began = [meter.time.advance(1)[0], meter.time.advance(1)[0]]
        clock.now_s += 0.2
        for one in began:
            meter.end(one, "kv", 8 * MB)
    assert seconds(meter.curve("kv"), 8 * MB) == pytest.approx(0.1, rel=0.01)


def test_a_call_that_nobody_waits_for_is_measured_when_it_ends() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    for _ in range(4):
        began = meter.time.advance(1)[0]
        clock.now_s += 0.1
        meter.abandon(began, "kv", 8 * MB)
        clock.now_s += 1.9
        meter.end(began, "kv", 8 * MB, late=True)
    assert seconds(meter.curve("kv"), 8 * MB) == pytest.approx(2.0, rel=0.2)


def test_a_call_that_hangs_counts_with_the_time_that_it_took() -> None:
    clock = Clock()
    meter = LoadMeter(clock)
    for _ in range(3):
        began = meter.time.advance(1)[0]
        clock.now_s += 5.0
        meter.abandon(began, "kv", 8 * MB)
    assert seconds(meter.curve("kv"), 8 * MB) == pytest.approx(5.0, rel=0.2)


def test_attention_makes_long_prefixes_dearer() -> None:
    clock = Clock()
    curve = ComputeCurve(clock=clock)
    for number in range(40):
        prefix, tokens = (number % 8) * 2048, 2048 if number % 3 else 700
        began_s = clock.now_s
        clock.now_s += 0.003 + tokens / 20e3 + 4e-9 * tokens * (prefix + tokens / 2)
        curve.add([(prefix, tokens)], began_s)
    end = 16 * 1024
    found = float(curve.seconds(np.array([0]), end)[0])
    true = 8 * 0.003 + end / 20e3 + 4e-9 * end**2 / 2
    assert found == pytest.approx(true, rel=0.05)


def test_gaps_and_steps_scheduled_ahead_do_not_count() -> None:
    clock = Clock()
    curve = ComputeCurve(clock=clock)
    curve.begin([(0, 1000)])
    for _ in range(10):
        # The next step is scheduled while this one runs.
        curve.begin([(0, 1000)])
        clock.now_s += 0.1
        curve.end()
    clock.now_s += 0.1
    curve.end()
    clock.now_s += 60.0  # nothing to do
    curve.begin([(0, 1000)])
    clock.now_s += 0.1
    curve.end()
    assert float(curve.seconds(np.array([0]), 1000)[0]) == pytest.approx(0.1, rel=0.01)


def test_steps_that_only_decode_teach_nothing() -> None:
    curve = ComputeCurve()
    for _ in range(10):
        curve.begin([(500, 1), (90, 1)])
        curve.end()
    assert not curve.known


def test_the_setting_holds_until_steps_were_seen() -> None:
    clock = Clock()
    curve = ComputeCurve(2000.0, clock)
    assert float(curve.seconds(np.array([0]), 1000)[0]) == 0.5
    assert curve.tokens_per_s == pytest.approx(2000.0)
    for _ in range(2):
        curve.begin([(0, 1000)])
        clock.now_s += 0.1
        curve.end()
    assert float(curve.seconds(np.array([0]), 1000)[0]) == pytest.approx(0.1)


_SECONDS = st.floats(1e-5, 1.0)


@given(
    restorable=st.lists(st.booleans(), max_size=40),
    calls=st.lists(
        st.tuples(st.integers(1, 1 << 26), _SECONDS), min_size=2, max_size=6
    ),
    steps=st.lists(
        st.tuples(st.integers(0, 5000), st.integers(16, 4096), _SECONDS),
        min_size=2,
        max_size=6,
    ),
    start=st.integers(0, 1000),
    wait_s=st.floats(0, 10),
    margin=st.floats(0, 0.5),
    batch=st.integers(1, 20),
)
def test_no_restorable_prefix_is_cheaper_than_the_chosen_one(
    restorable: list[bool],
    calls: list[tuple[int, float]],
    steps: list[tuple[int, int, float]],
    start: int,
    wait_s: float,
    margin: float,
    batch: int,
) -> None:
    load, now_s = LoadCurve(), 0.0
    for nbytes, seconds in calls:
        now_s += seconds
        load.add(nbytes, seconds, now_s)
    clock = iter(np.cumsum([seconds for _, _, seconds in steps]).tolist())
    compute = ComputeCurve(clock=lambda: next(clock))
    began_s = 0.0
    for prefix, tokens, seconds in steps:
        compute.add([(prefix, tokens)], began_s)
        began_s += seconds
    allowed = np.array([True, *restorable])
    pages = np.arange(len(allowed))
    load_s = load.seconds(pages << 16, -(-pages // batch))
    compute_s = compute.seconds(start + pages * 16, start + len(pages) * 16)
    chosen = cheapest(allowed, costs(load_s, compute_s, wait_s, margin))

    def brute(page: int) -> float:
        took = float(load_s[page])
        waited = wait_s if took > 0 else 0.0
        return (took + waited) * (1 + margin) + float(compute_s[page])

    assert allowed[chosen]
    least = min(brute(page) for page in pages.tolist() if allowed[page])
    assert brute(chosen) <= least * (1 + 1e-9)

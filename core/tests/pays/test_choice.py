"""The law: the chosen prefix is restorable, and none of them is cheaper."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdock.pays.choice import cheapest, costs
from kvdock.pays.curves import ComputeCurve, LoadCurve

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


def test_of_equal_prefixes_the_longest_is_loaded() -> None:
    assert cheapest(np.array([True, True, False, True]), np.ones(4)) == 3


def test_near_pages_are_loaded_and_far_ones_computed() -> None:
    # Three pages of a tier that is near, three of one that is far.
    load_s = np.array([0.0, 0.1, 0.2, 0.3, 5.3, 10.3, 15.3])
    compute_s = np.arange(6, -1, -1).astype(np.float64)
    cost_s = costs(load_s, compute_s)
    assert cheapest(np.ones(7, np.bool_), cost_s) == 3

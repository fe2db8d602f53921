"""The resident index: rows by segment, and what becomes of those given back."""

import numpy as np

from kvdock.segments.index import Index, Rows


def test_segments_of_any_size_use_the_rows_of_those_that_went() -> None:
    index, chance = Index(), np.random.default_rng(1)
    here: list[Rows] = []
    most = 0
    for _ in range(2000):
        here.append(index.open_rows(int(chance.integers(100, 2000))))
        most = max(most, sum(rows.slots for rows in here))
        if len(here) > 20:
            index.close_rows(here.pop(int(chance.integers(len(here)))))
    assert len(index.records) < 3 * most


def test_no_two_segments_share_a_row() -> None:
    index, chance = Index(), np.random.default_rng(2)
    here: list[Rows] = []
    for _ in range(500):
        here.append(index.open_rows(int(chance.integers(50))))
        if len(here) > 8:
            index.close_rows(here.pop(int(chance.integers(len(here)))))
        taken = [row for rows in here for row in range(len(index.records))[rows.span]]
        assert len(taken) == len({*taken})
        for rows in here:
            assert (index.segment_of[rows.span] == rows.number).all()

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvdock.errors import PoolError
from kvdock.pools.rows import RowLayout


def test_pieces_are_repeated_in_every_ranks_slot_and_joined_where_they_touch() -> None:
    rows = RowLayout(row_bytes=200, pieces=[(0, 8), (8, 4), (20, 10)], slots=[0, 100])
    assert rows.page_bytes == 44
    assert rows.runs == ((0, 12), (20, 10), (100, 12), (120, 10))


def test_slots_that_are_full_make_one_run() -> None:
    rows = RowLayout(row_bytes=64, pieces=[(0, 16), (16, 16)], slots=[0, 32])
    assert rows.runs == ((0, 64),)


def test_pieces_that_touch_in_another_order_stay_apart() -> None:
    rows = RowLayout(row_bytes=16, pieces=[(8, 8), (0, 8)])
    assert rows.runs == ((8, 8), (0, 8))


def test_numbers_of_numpy_are_taken() -> None:
    sizes: Any = np.array([16, 8])
    rows = RowLayout(row_bytes=sizes[0], pieces=[(0, sizes[1])], slots=[0])
    assert rows.runs == ((0, 8),)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pieces": [(0, 8), (4, 8)]}, "4 overlaps another of a row of 32 bytes"),
        ({"pieces": [(0, 8)], "slots": [0, 4]}, "4 overlaps another"),
        ({"pieces": [(30, 8)]}, "8 bytes at 30 is not inside of a row of 32"),
        ({"pieces": [(0, 8)], "slots": [-8]}, "at -8 is not inside"),
        ({"pieces": [(0, 0)]}, r"\(offset, bytes\), not \(0, 0\)"),
        ({"pieces": [(0, 8.0)]}, r"\(offset, bytes\), not \(0, 8.0\)"),
        ({"pieces": [(0, 8, 1)]}, r"not \(0, 8, 1\)"),
        ({"pieces": []}, "0 pieces in 1 slots"),
        ({"pieces": [(0, 8)], "slots": []}, "1 pieces in 0 slots"),
        ({"pieces": [(0, 8)], "row_bytes": 0}, "row_bytes must be at least 1"),
    ],
)
def test_pieces_that_are_not_parts_of_a_row_are_rejected(
    given: dict[str, Any], message: str
) -> None:
    with pytest.raises(PoolError, match=message):
        RowLayout(**{"row_bytes": 32, **given})

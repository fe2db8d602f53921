"""Ranges of addresses, against sets of single bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdock.geometry.address_ranges import AddressRanges

BASE = 1000
ranges = st.lists(
    st.tuples(st.integers(BASE, BASE + 90), st.integers(0, 20)), max_size=6
)
piece = st.tuples(st.integers(BASE - 5, BASE + 110), st.integers(0, 25))


@given(ranges, st.lists(st.tuples(piece, piece), max_size=4))
def test_an_object_is_covered_if_each_of_its_pieces_lies_in_one_range(
    known: list[tuple[int, int]], objects: list[tuple[tuple[int, int], ...]]
) -> None:
    table = np.array(objects, np.int64).reshape(-1, 2, 2)
    addresses, sizes = table[:, :, 0], table[:, :, 1]
    expected = [
        all(
            not size or any(at >= a and at + size <= a + n for a, n in known)
            for at, size in pieces
        )
        for pieces in objects
    ]
    found = AddressRanges.of(known)
    assert found.covered_rows(addresses, sizes).tolist() == expected
    assert found.covers(addresses, sizes) is all(expected)


@given(ranges, st.lists(st.tuples(*[st.integers(0, 120)] * 2)))
def test_one_row_of_sizes_for_all_is_judged_like_the_same_sizes_in_full(
    known: list[tuple[int, int]], rows: list[tuple[int, int]]
) -> None:
    found = AddressRanges.of(known)
    addresses = BASE + np.array(rows, np.int64).reshape(-1, 2)
    for row in ([8, 14], [0, 10], [-1, 8], [2**63 - 1, 8]):
        sizes = np.broadcast_to(np.array(row, np.int64), addresses.shape)
        assert found.covers(addresses, sizes) is found.covers(addresses, sizes.copy())


def test_ranges_that_touch_do_not_cover_a_piece_that_lies_in_both() -> None:
    found = AddressRanges.of([(BASE, 10), (BASE + 10, 10)])
    at, size = np.array([[BASE + 5]]), np.array([[10]])
    assert not found.covers(at, size)
    assert AddressRanges.of([(BASE, 20)]).covers(at, size)


def test_sizes_that_would_wrap_around_are_not_covered() -> None:
    for known in ([(BASE, 100)], [(BASE, 100), (BASE + 200, 100)]):
        found = AddressRanges.of(known)
        for size in (2**63 - 1, -1, -8):
            assert not found.covers(np.array([[BASE]]), np.array([[size]]))


def test_without_ranges_only_objects_without_bytes_are_covered() -> None:
    nothing = AddressRanges.of()
    at = np.array([[BASE], [BASE]])
    assert nothing.covered_rows(at, np.array([[0], [1]])).tolist() == [True, False]
    assert nothing.covers(at[:0], at[:0])

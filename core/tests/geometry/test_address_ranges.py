"""Ranges of addresses, against sets of single bytes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvdock.batch import Batch, MemoryHold, Outcome
from kvdock.geometry.address_ranges import AddressRanges
from kvdock.geometry.peer_rows import send_rows

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array


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


OK, REFUSED, TIMEOUT = Outcome.OK, Outcome.REFUSED, Outcome.TIMEOUT

HERE, THERE = AddressRanges.of([(100, 100)]), AddressRanges.of([(500, 100)])


def by_two(rows: Int64Array, _: Int64Array) -> Iterator[Int64Array]:
    for start in range(0, len(rows), 2):
        yield rows[start : start + 2]


@attrs.define
class Library:
    """Writes down its calls and fails the one of a number."""

    fails_at: int = -1
    calls: list[list[list[int]]] = attrs.field(factory=list)
    hold: MemoryHold = attrs.field(factory=MemoryHold)

    def write(self, table: Int64Array) -> tuple[Outcome, MemoryHold | None]:
        self.calls.append(table.T.tolist())
        if len(self.calls) - 1 == self.fails_at:
            return Outcome.UNAVAILABLE, self.hold
        return OK, None


def rows(*of: tuple[int, int, int], seconds: float = 600) -> Batch:
    """Return a batch of rows: address here, address there, bytes."""
    local, remote, sizes = np.array(of, np.int64).T
    deadline_s = time.monotonic() + seconds
    return Batch.send(local, remote, sizes, object(), deadline_s, "kv")


def test_after_a_call_that_fails_no_row_left_is_written_or_ok() -> None:
    library = Library(fails_at=1)
    batch = rows(*((100 + row, 500 + row, 1) for row in range(7)), (0, 0, 0))
    found = send_rows(batch, HERE, THERE, by_two, library.write)
    gone = Outcome.UNAVAILABLE
    assert found.outcomes.tolist() == [OK, OK, *[gone] * 5, OK]
    assert len(library.calls) == 2
    assert found.hold is library.hold


def test_after_the_deadline_no_call_is_made() -> None:
    library = Library()
    batch = rows((100, 500, 10), seconds=-1)
    found = send_rows(batch, HERE, THERE, by_two, library.write)
    assert (found.outcomes.tolist(), library.calls) == ([TIMEOUT], [])


def test_a_batch_without_a_peers_addresses_is_refused() -> None:
    batch = attrs.evolve(rows((100, 500, 10)), remote=None)
    found = send_rows(batch, HERE, THERE, by_two, Library().write)
    assert found.outcomes.tolist() == [REFUSED]

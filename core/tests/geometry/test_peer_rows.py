from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Batch, MemoryHold, Outcome
from kvdock.geometry.address_ranges import AddressRanges
from kvdock.geometry.peer_rows import send_rows

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array

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


def test_rows_are_written_in_the_calls_that_they_are_cut_into() -> None:
    library = Library()
    batch = rows((100, 500, 10), (110, 520, 20), (150, 540, 50))
    found = send_rows(batch, HERE, THERE, by_two, library.write)
    assert found.outcomes.tolist() == [OK] * 3
    assert library.calls == [[[100, 500, 10], [110, 520, 20]], [[150, 540, 50]]]


def test_a_row_outside_of_either_memory_never_reaches_the_library() -> None:
    library = Library()
    batch = rows((99, 500, 10), (100, 595, 10), (100, 500, 10), (150, 510, -1))
    found = send_rows(batch, HERE, THERE, by_two, library.write)
    assert found.outcomes.tolist() == [REFUSED, REFUSED, OK, REFUSED]
    assert library.calls == [[[100, 500, 10]]]


def test_a_row_without_bytes_is_sent_without_a_call() -> None:
    library = Library()
    found = send_rows(rows((0, 0, 0)), HERE, THERE, by_two, library.write)
    assert (found.outcomes.tolist(), library.calls) == ([OK], [])


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

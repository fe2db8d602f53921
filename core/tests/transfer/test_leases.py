from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock.transfer.leases import PageLeases


def test_a_page_has_one_lease_at_a_time() -> None:
    book = PageLeases(6)
    free, lease = book.take(np.array([1, 2]))
    again, other = book.take(np.array([2, 3]))
    assert free.tolist() == [True, True]
    assert again.tolist() == [False, True]
    assert book.leased_pages == 3
    lease.end()
    assert book.in_use(range(6)).tolist() == [False, False, False, True, False, False]
    other.end()
    assert book.leased_pages == 0


def test_ending_twice_does_not_end_the_lease_of_another_call() -> None:
    book = PageLeases(2)
    _, first = book.take(np.array([0]))
    first.end()
    _, second = book.take(np.array([0]))
    first.end()
    assert book.in_use([0]).all()
    second.end()


def test_a_page_that_is_named_twice_is_leased_to_its_first_place() -> None:
    free, lease = PageLeases(4).take(np.array([3, 1, 3, 3]))
    assert free.tolist() == [True, True, False, False]
    assert lease.pages.tolist() == [3, 1]


def test_who_waits_for_pages_is_woken_when_the_last_is_free() -> None:
    book = PageLeases(2)
    _, lease = book.take(np.array([0]))
    _, other = book.take(np.array([1]))
    assert not book.wait([0, 1], 0.01)
    woken: list[bool] = []
    thread = threading.Thread(target=lambda: woken.append(book.wait([0, 1], 10)))
    thread.start()
    lease.end()
    other.end()
    thread.join()
    assert woken == [True]


@given(st.lists(st.lists(st.integers(0, 7), max_size=6), max_size=8), st.randoms())
def test_whatever_the_order_no_page_is_lost_or_shared(
    requests: list[list[int]], random: object
) -> None:
    book = PageLeases(8)
    held: dict[int, int] = {}
    leases = []
    for number, pages in enumerate(requests):
        free, lease = book.take(np.array(pages, np.int64))
        for page, got in zip(pages, free.tolist(), strict=True):
            assert got == (page not in held)
            held.setdefault(page, number)
        leases.append(lease)
        assert book.leased_pages == len(held)
    random.shuffle(leases)  # type: ignore[attr-defined]  # hypothesis types it as object
    for lease in leases:
        lease.end()
    assert book.leased_pages == 0


pages = st.lists(st.integers(0, 7), min_size=1, max_size=6)


@given(leased=pages, asked=pages)
def test_all_pages_are_leased_where_each_one_would_be(
    leased: list[int], asked: list[int]
) -> None:
    books = [PageLeases(8), PageLeases(8)]
    for book in books:
        book.take(np.array(leased[:2]))
    together, apart = books
    lease = together.take_all(np.array(asked))
    free, _ = apart.take(np.array(asked))
    assert (lease is not None) == free.all()
    if lease is not None:
        assert together.in_use(range(8)).tolist() == apart.in_use(range(8)).tolist()
        lease.end()
    assert together.leased_pages == len({*leased[:2]})


def test_a_signal_while_a_lease_is_given_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ring(*_: object) -> None:
        raise KeyboardInterrupt

    book = PageLeases(4)
    monkeypatch.setattr("kvdock.transfer.leases.Lease", ring)
    with pytest.raises(KeyboardInterrupt):
        book.take(np.arange(2))
    with pytest.raises(KeyboardInterrupt):
        book.take_all(np.arange(2))
    assert not book.leased_pages

"""The resident index and its hash table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvdock_segments.format import RECORD, Records, with_checksums
from kvdock_segments.index import ABSENT, HashTable, Index

if TYPE_CHECKING:
    from kvdock.arrays import UInt64Array
    from kvdock_segments.segment import RowRange


def test_segments_of_any_size_reuse_the_rows_of_deleted_ones() -> None:
    index, chance = Index(), np.random.default_rng(1)
    here: list[RowRange] = []
    most = 0
    for _ in range(2000):
        here.append(index.open_rows(int(chance.integers(100, 2000))))
        most = max(most, sum(rows.slots for rows in here))
        if len(here) > 20:
            index.close_rows(here.pop(int(chance.integers(len(here)))))
    assert len(index.records) < 3 * most


def test_no_two_segments_share_a_row() -> None:
    index, chance = Index(), np.random.default_rng(2)
    here: list[RowRange] = []
    for _ in range(500):
        here.append(index.open_rows(int(chance.integers(50))))
        if len(here) > 8:
            index.close_rows(here.pop(int(chance.integers(len(here)))))
        taken = [row for rows in here for row in range(len(index.records))[rows.span]]
        assert len(taken) == len({*taken})
        for rows in here:
            assert (index.segment_of[rows.span] == rows.number).all()


# Few low bits and few tags: buckets fill up, overflow, and tags collide.
crowded = st.builds(
    lambda low, tag: (low, tag << 32),
    st.integers(0, 3),
    st.integers(0, 40),
)


steps = st.lists(
    st.tuples(st.booleans(), st.lists(crowded, max_size=30, unique=True)), max_size=25
)


def digests_of(pairs: Iterable[tuple[int, int]]) -> UInt64Array:
    return np.array(list(pairs), np.uint64).reshape(-1, 2)


@settings(deadline=None)
@given(steps=steps)
def test_a_table_behaves_like_a_dict_at_any_load(
    steps: list[tuple[bool, list[tuple[int, int]]]],
) -> None:
    table = HashTable()
    model: dict[tuple[int, int], int] = {}
    known = np.zeros((0, 2), np.uint64)
    for adds, pairs in steps:
        if adds:
            fresh = [pair for pair in pairs if pair not in model]
            rows = np.arange(len(known), len(known) + len(fresh))
            known = np.concatenate([known, digests_of(fresh)])
            table.add(digests_of(fresh), rows, known)
            model |= dict(zip(fresh, rows.tolist(), strict=True))
        else:
            gone = [pair for pair in pairs if pair in model]
            rows = np.array([model.pop(pair) for pair in gone], np.int64)
            table.remove(digests_of(gone), rows)
        every = [(low, tag << 32) for low in range(4) for tag in range(41)]
        found = table.find(digests_of(every), known)
        assert found.tolist() == [model.get(pair, ABSENT) for pair in every]


def test_removing_another_row_of_a_key_leaves_it() -> None:
    table = HashTable()
    known = digests_of([(1, 2 << 32), (1, 2 << 32)])
    table.add(known[:1], np.array([0]), known)
    table.remove(known[1:], np.array([1]))
    assert table.find(known[:1], known).tolist() == [0]


def records_of(keys: list[int]) -> Records:
    records = np.zeros(len(keys), RECORD)
    records["key_low"] = keys
    records["key_high"] = np.array(keys, np.uint64) << np.uint64(32)
    return with_checksums(records)


def digests_at(keys: list[int]) -> UInt64Array:
    return digests_of((key, key << 32) for key in keys)


keys = st.integers(1, 30)


contents = st.lists(st.one_of(st.none(), keys), min_size=8, max_size=8)


@settings(deadline=None)
@given(loads=st.lists(st.tuples(st.integers(0, 3), contents), max_size=15))
def test_an_index_finds_exactly_what_its_segments_hold(
    loads: list[tuple[int, list[int | None]]],
) -> None:
    index = Index()
    segments = [index.open_rows(8) for _ in range(4)]
    held: dict[int, list[int | None]] = {number: [None] * 8 for number in range(4)}
    for number, slots in loads:
        records = np.zeros(8, RECORD)
        there = [slot for slot, key in enumerate(slots) if key is not None]
        if there:
            records[there] = records_of([key for key in slots if key is not None])
        index.load(segments[number], records, np.ones(8, np.int64))
        held[number] = slots
        every = list(range(1, 31))
        rows = index.find(digests_at(every))
        for key, row in zip(every, rows.tolist(), strict=True):
            if row != ABSENT:
                assert held[row // 8][row % 8] == key
        counts = [sum(key is not None for key in held[n]) for n in range(4)]
        assert index.live_in[:4].tolist() == counts


def test_rows_of_a_closed_segment_are_used_again() -> None:
    index = Index()
    for turn in range(50):
        rows = index.open_rows(16)
        index.put(rows.first + np.arange(4), records_of([1, 2, 3, 4]), turn)
        assert (index.find(digests_at([1, 2, 3, 4])) != ABSENT).all()
        index.close_rows(rows)
        assert (index.find(digests_at([1, 2, 3, 4])) == ABSENT).all()
    assert len(index.records) <= 20


def test_the_index_takes_less_than_200_bytes_a_page() -> None:
    index = Index()
    rng = np.random.default_rng(1)
    for _ in range(50):
        rows = index.open_rows(1024)
        records = np.zeros(1024, RECORD)
        records["key_low"] = rng.integers(1, 2**63, 1024)
        records["key_high"] = rng.integers(1, 2**63, 1024)
        index.load(rows, with_checksums(records), np.zeros(1024, np.int64))
        assert index.nbytes < 200 * max(4096, rows.first + 1024)


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_of_two_records_of_a_key_the_one_that_is_still_served_counts(
    order: tuple[int, int],
) -> None:
    index = Index()
    rows = [index.open_rows(1) for _ in range(2)]
    for number in order:  # the first has expired
        record = records_of([7])
        record["expire_at"] = [1, 0][number]
        index.load(rows[number], with_checksums(record), np.zeros(1, np.int64))
    assert index.find(digests_at([7])).tolist() == [rows[1].first]


@pytest.mark.parametrize("over", [0, 1])
def test_of_two_records_of_a_segment_the_one_that_is_still_served_counts(
    over: int,
) -> None:
    index, both = Index(), records_of([7, 7])
    both["expire_at"][over] = 1
    with_checksums(both)
    rows = index.open_rows(2)
    index.load(rows, both, np.zeros(2, np.int64))
    assert index.find(digests_at([7])).tolist() == [rows.first + 1 - over]

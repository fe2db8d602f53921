"""Times of use: whatever the calls of a prefix are, its head is the latest."""

import math
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvdock_segments import index, recency
from kvdock_segments.format import RECORD
from kvdock_segments.index import Index
from kvdock_segments.recency import PrefixLookups


class Pages:
    """An index that stores pages as soon as their times are known."""

    def __init__(self) -> None:
        self.index = Index()
        self.rows = self.index.open_rows(4096)
        self.segments: dict[int, Any] = {self.rows.number: type("Segment", (), {})()}
        self.lookups = PrefixLookups(self.index, self.segments)
        self.stored: dict[int, int] = {}

    def digests(self, pages: Any) -> Any:
        low = np.array(list(pages), np.uint64)
        return np.stack([low, low + np.uint64(7)], axis=1)

    def look_up(self, pages: Any, deadline_s: float = math.inf) -> None:
        there = [at for at, page in enumerate(pages) if page in self.stored]
        self.index.clock.end_run()
        self.lookups.add(self.digests(pages), np.array(there, int), deadline_s)

    def times(self, digests: Any, deadline_s: float = math.inf) -> Any:
        continued = self.lookups.continue_with(digests)
        first_ns = continued[0] if continued else None
        return self.index.clock.written(len(digests), deadline_s, first_ns)

    def put(self, pages: Any, deadline_s: float = math.inf) -> list[int]:
        digests = self.digests(pages)
        used_ns = self.times(digests, deadline_s)
        records = np.zeros(len(used_ns), RECORD)
        records["key_low"], records["key_high"] = digests.T
        records["check"] = 1
        at = np.arange(len(self.stored), len(self.stored) + len(used_ns))
        self.index.put(at + self.rows.first, records, used_ns)
        self.stored.update(zip(pages, at.tolist(), strict=True))
        return [int(used) for used in used_ns]

    def get(self, pages: Any, deadline_s: float = math.inf) -> None:
        used_ns = self.index.clock.read(len(pages), deadline_s) - np.arange(len(pages))
        rows = np.array([self.stored[page] for page in pages], np.int64)
        self.index.touch(rows, used_ns)

    def used(self, pages: Any) -> list[int]:
        return [int(self.index.used_ns[self.stored[page]]) for page in pages]


@pytest.fixture
def pages() -> Pages:
    return Pages()


def descending(times: list[int]) -> bool:
    return all(np.diff(times) < 0)


def test_the_pages_of_a_call_are_used_head_last(pages: Pages) -> None:
    began_ns = time.time_ns()
    assert descending(pages.put(range(100)))
    pages.look_up(range(100))
    pages.get(range(100))
    assert descending(pages.used(range(100)))
    assert pages.used([0])[0] >= began_ns


def test_batches_of_one_call_go_on_whatever_others_do(pages: Pages) -> None:
    for start in range(0, 100, 10):
        pages.put(range(start, start + 10), deadline_s=5.0)
        pages.put([1000 + start], deadline_s=6.0)
        pages.look_up([2000 + start])
    assert descending(pages.used(range(100)))
    for start in range(0, 100, 10):
        pages.get(range(start, start + 10), deadline_s=7.0)
        pages.get([1000 + start], deadline_s=8.0)
    assert descending(pages.used(range(100)))


def test_calls_that_write_one_after_the_other_are_one_prefix(pages: Pages) -> None:
    pages.look_up(range(1))
    for start in range(0, 100, 10):
        pages.put(range(start, start + 10))
    assert descending(pages.used(range(100)))


def test_calls_of_a_process_that_looks_nothing_up_are_prefixes_of_their_own(
    pages: Pages,
) -> None:
    pages.put(range(10))
    assert min(pages.put(range(10, 20))) > max(pages.used(range(10)))


def test_writes_are_not_one_prefix_for_ever(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.look_up(range(1))
    pages.put(range(10))
    monkeypatch.setattr(index, "_RUN_S", 0.0)
    assert max(pages.put(range(10, 20))) > max(pages.used(range(10)))


def test_a_lookup_ends_a_run_of_writes(pages: Pages) -> None:
    pages.put(range(10))
    pages.look_up(range(10))
    assert min(pages.put(range(10, 20))) > max(pages.used(range(10)))


def test_what_continues_a_lookup_refreshes_the_pages_before_it(pages: Pages) -> None:
    pages.put(range(50))
    before = pages.used(range(50))
    pages.look_up(range(80))
    pages.look_up(range(500, 600))
    pages.put(range(50, 80))
    assert descending(pages.used(range(80)))
    assert min(pages.used(range(50))) > max(before)
    assert pages.segments[pages.rows.number].touched


def test_an_old_lookup_tells_nothing_of_what_is_stored_now(
    pages: Pages, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages.put(range(50))
    before = pages.used(range(50))
    pages.look_up(range(80))
    monkeypatch.setattr(recency, "_LOOKUP_NS", 0)
    asked_ns = time.time_ns()
    assert max(pages.put(range(50, 80))) >= asked_ns
    assert pages.used(range(50)) == before


def test_what_is_stored_again_before_what_was_absent_continues_a_lookup(
    pages: Pages,
) -> None:
    pages.put(range(50))
    pages.look_up(range(80))
    pages.look_up([5000])
    pages.put(range(100, 110))
    before = pages.used(range(100, 110))
    digests = pages.digests(range(40, 80))
    times = pages.times(digests).tolist()
    assert descending([*pages.used(range(40)), *times])
    assert max(times) < min(before)


def test_a_lookup_alone_is_not_use(pages: Pages) -> None:
    pages.put(range(50))
    before = pages.used(range(50))
    pages.look_up(range(80))
    pages.put(range(200, 210))
    assert pages.used(range(50)) == before


def test_what_is_remembered_is_bounded(pages: Pages) -> None:
    for start in range(0, 10**6, 1000):
        pages.look_up(range(start, start + 1000), deadline_s=float(start))
        pages.put([start], deadline_s=float(start))
        pages.stored.clear()
    recent = pages.lookups
    assert recent._lookup_keys <= recency._LOOKUP_KEYS
    assert len(pages.index.clock._next_ns) <= index._CALLS
    for start in range(0, 10**6, 1000):  # one lookup that comes in batches
        pages.look_up(range(start, start + 1000), deadline_s=9.0)
    kept = sum(len(one.digests) for one in recent.by_key.values())
    assert kept == recent._lookup_keys <= recency._LOOKUP_KEYS


@pytest.mark.slow
@given(data=st.data())
def test_any_two_prefixes_that_were_looked_up_keep_their_order(
    data: st.DataObject,
) -> None:
    pages = Pages()
    left = {0: range(60), 1: range(1000, 1060)}
    whole = dict(left)
    for one in left.values():
        pages.look_up(one)
    while any(left.values()):
        which = data.draw(st.sampled_from([n for n in left if left[n]]))
        count = data.draw(st.integers(1, len(left[which])))
        pages.put(left[which][:count])
        left[which] = left[which][count:]
        if data.draw(st.booleans()):
            pages.look_up([5000])
    for one in whole.values():
        assert descending(pages.used(one))


def test_a_prefix_that_returns_in_calls_was_in_use_for_no_less_time_than_its_tail(
    pages: Pages,
) -> None:
    """Of evicted pages only some are remembered, rarely the last one of a call."""
    count, history = 1000, pages.index.history
    digests = pages.digests(np.random.default_rng(0).integers(1, 2**63, count))
    digests[:, 1] = np.random.default_rng(1).integers(0, 2**63, count)
    history.ghosts.fit(8 * 4096)
    assert history.ghosts.share > 1
    now_ns = time.time_ns()
    evicted_ns = now_ns - 10**9 - np.arange(count)
    history.note_evicted(digests, evicted_ns - 10**9, evicted_ns, now_ns)
    pages.lookups.add(digests, np.zeros(0, int), math.inf)
    spans: list[int] = []
    for start in range(0, count, 50):
        continued = pages.lookups.continue_with(digests[start : start + 50])
        assert continued is not None
        first_ns, since_ns = continued
        spans += (first_ns - np.arange(50) - since_ns).tolist()
    assert spans[0] > 0
    assert (np.diff(spans) <= 0).all()

"""What is learned of reuse: laws of which pages are cold."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvdock_segments.reuse import Ghosts, ReuseHistory

ROOM = 400


class Pool:
    """Pages by number: a prefix is a list of numbers, and none has two parents."""

    def __init__(self) -> None:
        self.history = ReuseHistory()
        self.now_ns = 10**12
        self.used: dict[int, int] = {}
        self.stored: dict[int, int] = {}
        self.evicted: list[int] = []

    def digests(self, pages: list[int]) -> np.ndarray:
        low = np.array(pages, np.uint64) + np.uint64(1)
        return np.stack([low, low * np.uint64(0x9E3779B97F4A7C15)], axis=1)

    def request(self, pages: list[int]) -> int:
        """Load what is there of a prefix, store the rest; return what was there."""
        best = next((n for n, p in enumerate(pages) if p not in self.used), len(pages))
        self.now_ns += 1000 * len(pages) + 1
        times = dict(zip(pages, range(self.now_ns, 0, -1), strict=False))
        again = [page for page in pages if page in self.used]
        self.history.note(
            np.array([self.stored[page] for page in again], np.int64),
            np.array([self.used[page] for page in again], np.int64),
            self.now_ns,
        )
        fresh = [page for page in pages if page not in self.used]
        used = np.array([times[page] for page in fresh], np.int64)
        since = self.history.begin(self.digests(fresh), used) if fresh else used
        assert (since <= used).all()
        self.stored |= dict(zip(fresh, since.tolist(), strict=True))
        self.used |= times
        return best

    def evict(self, wanted: int, before_ns: int | None = None) -> list[int]:
        """Evict so many pages that were used before; return which."""
        before_ns = self.now_ns + 1 if before_ns is None else before_ns
        pages = list(self.used)
        used = np.array([self.used[page] for page in pages], np.int64)
        stored = np.array([self.stored[page] for page in pages], np.int64)
        may_go = used < before_ns
        if not may_go.any():
            return []
        cold = self.history.find_cold(stored, used, may_go, wanted, self.now_ns)
        gone = np.flatnonzero(cold.find(stored, used) & (used < before_ns))
        numbers = [pages[at] for at in gone.tolist()]
        self.history.note_evicted(
            self.digests(numbers), stored[gone], used[gone], self.now_ns
        )
        for page in numbers:
            del self.used[page], self.stored[page]
        return numbers

    def run(self, requests: list[list[int]], room: int = ROOM) -> int:
        """Return how many pages a pool of this room restores."""
        restored = 0
        for pages in requests:
            restored += self.request(pages)
            over = len(self.used) - room
            if over > 0:
                self.evict(max(over, room // 64))
        return restored


# A tree of prefixes: request n continues an earlier one at some place.
@st.composite
def prefixes(draw: st.DrawFn) -> list[list[int]]:
    made: list[list[int]] = []
    fresh = 0
    for _ in range(draw(st.integers(2, 25))):
        head: list[int] = []
        continues = draw(st.booleans())
        if made and continues:
            other = draw(st.sampled_from(made))
            head = other[: draw(st.integers(0, len(other)))]
        more = draw(st.integers(1, 12))
        made.append([*head, *range(fresh, fresh + more)])
        fresh += more
        again = draw(st.sampled_from([None, *made]))
        if again is not None:
            made.append(again)
    return made


@example(  # two pages whose times in use differ by less than those of others
    requests=[
        [0], [1, 2, 3], [4], [5], [1, 2, 3], [1, 2, 6, 7, 8], [1, 2, 6, 7, 8], [9],
    ],
    room=4,
)  # fmt: skip
@given(requests=prefixes(), room=st.integers(4, 60))
def test_the_tail_of_a_prefix_goes_before_its_head(
    requests: list[list[int]], room: int
) -> None:
    pool = Pool()
    for pages in requests:
        pool.request(pages)
        while len(pool.used) > room:
            assert pool.evict(len(pool.used) - room)
        for prefix in requests:
            there = [page in pool.used for page in prefix]
            assert there == sorted(there, reverse=True)


@pytest.mark.slow
@given(requests=prefixes(), wanted=st.integers(1, 40), data=st.data())
def test_no_page_goes_that_was_used_since(
    requests: list[list[int]], wanted: int, data: st.DataObject
) -> None:
    pool = Pool()
    for pages in requests:
        pool.request(pages)
        before_ns = data.draw(st.sampled_from(sorted(pool.used.values())))
        used = dict(pool.used)
        may_go = sum(one < before_ns for one in used.values())
        gone = pool.evict(wanted, before_ns)
        assert all(used[page] < before_ns for page in gone)
        assert bool(gone) == bool(may_go)


@given(
    pages=st.integers(1, 10**6), evicted=st.lists(st.integers(0, 10**6), max_size=80)
)
def test_the_memory_for_evicted_pages_is_bounded(
    pages: int, evicted: list[int]
) -> None:
    ghosts = Ghosts()
    ghosts.fit(pages)
    size = ghosts.nbytes
    assert size <= max(512 * 24, pages * 24 // 8)
    low = np.array(evicted, np.uint64)
    times = np.arange(len(evicted))
    ghosts.add(np.stack([low, low << np.uint64(41)], axis=1), times, times)
    assert ghosts.nbytes == size


def test_a_hot_set_outlives_scans_that_are_longer_than_the_store() -> None:
    rng = np.random.default_rng(1)
    hot = [list(range(20 * n, 20 * n + 20)) for n in range(8)]
    fresh = 10**6
    requests = []
    for _ in range(1500):
        if rng.random() < 0.3:
            requests.append(hot[int(rng.integers(len(hot)))])
        else:
            requests.append(list(range(fresh, fresh + 40)))
            fresh += 40
    asked = sum(len(one) for one in requests if one[0] < 10**6)
    assert Pool().run(requests) > 0.7 * asked


def test_without_anything_to_learn_the_order_is_that_of_an_lru() -> None:
    requests = [list(range(10 * n, 10 * n + 10)) for n in range(100)]
    pool = Pool()
    pool.run(requests)
    assert set(pool.used) >= set(range(1000 - ROOM + ROOM // 32, 1000))


def test_an_evicted_page_that_comes_back_is_in_use_since_it_was_stored_first() -> None:
    pool = Pool()
    pool.run([list(range(10 * n, 10 * n + 10)) for n in range(100)])
    gone = next(page for page in range(0, 1000, 10) if page not in pool.used)
    evicted_before = pool.now_ns
    back = [gone + n for n in range(10)]
    pool.request(back)
    known = [page for page in back if pool.stored[page] < evicted_before]
    assert known == back[: len(known)]


def test_uses_that_were_noted_take_no_more_memory_than_a_few_calls() -> None:
    history = ReuseHistory()
    for now in range(10_000):
        history.note(1, 1, now + 2)
    assert len(history._noted) < 256

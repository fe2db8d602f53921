"""Which pages are cold: what is learned of how soon pages are used again.

Pure arithmetic on arrays, for the store and for simulations alike. A page belongs
to one of three classes, which follow from the two times that its record has:

    once       not used since it was stored, but for the request that stored it
    again      used again, for less than half of the time that pages stay
    long       used again, for longer

For each class this module counts after how long pages were used again, evicted ones
(ghosts) included, and estimates from that how many uses a page still brings for each
second that it is kept. A class is kept for as long as that pays; all classes have the
same price. So pages of scans and bursts go early, and where it makes no difference
the order is that of the last use, as in an LRU.

Along a prefix, a page was used no later and no longer than the page before it. Longer
use never makes a page colder here, so the tail of a prefix goes before its head.
"""

from __future__ import annotations

import threading
from typing import cast

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.arrays import BoolArray, Int64Array, UInt64Array

Float64Array = npt.NDArray[np.float64]

CLASSES = 3
_PER_OCTAVE = 4
_BINS = 63 * _PER_OCTAVE  # of ages: each is a fifth longer than the one before
_PRICES = 64
_OLDEST = 62.0  # octaves of ns; above any age
_MEMORY = 8.0
"""Halve what was counted after pages have been exchanged so many times. With fewer,
sessions of thousands of pages each leave too few examples."""
_EXAMPLES = 0.05
"""Weight of what holds for all classes, in pages of the store: a class with few
examples is kept as long as the others are."""
_LEARN = 8
"""How often the estimate is made anew while all pages are exchanged once."""
_RECENT = 64
"""Pages that were last used within such a part of the time that pages stay, after
they were stored, were used once: a request may name its pages several times."""
_GHOST_SHARE = 8
"""Of how many pages of a store there is one place for an evicted page."""
_LEAST_GHOSTS = 512
"""Places for evicted pages in the smallest store, 24 bytes each."""
_FOLD = 256  # calls whose uses are counted together
_SAMPLE = 1 << 18  # pages that stand for all
_HIGH = np.uint64(40)


@attrs.frozen(eq=False)
class ColdTimes:
    """Which pages are cold, by class.

    Args:
        recent_ns: Span of use up to which a page was used once.
        long_ns: Span of use from which on a page is in use for long.
        cold_ns: int64 (classes,), the latest time of use of a cold page; it never
            rises with the class.
    """

    recent_ns: int
    long_ns: int
    cold_ns: Int64Array

    def find(self, stored_ns: Int64Array, used_ns: Int64Array) -> BoolArray:
        """Return which pages are cold, bool (n,).

        Args:
            stored_ns: int64 (n,), when each was stored.
            used_ns: int64 (n,), when each was last used.
        """
        kinds = _classes(used_ns - stored_ns, self.recent_ns, self.long_ns)
        cold: BoolArray = used_ns <= self.cold_ns[kinds]
        return cold


class Ghosts:
    """Pages that were evicted: some of them, in a table of fixed size.

    A place holds the latest page that belongs there, so the table forgets the pages
    that were evicted first, more or less.
    """

    def __init__(self) -> None:
        self.keys: UInt64Array = np.zeros(0, np.uint64)
        self.stored_ns: Int64Array = np.zeros(0, np.int64)
        self.used_ns: Int64Array = np.zeros(0, np.int64)
        self.share = 1

    @property
    def nbytes(self) -> int:
        """Memory of the table, bytes."""
        return self.keys.nbytes + self.stored_ns.nbytes + self.used_ns.nbytes

    def fit(self, pages: int) -> None:
        """Be of a size for a store of so many pages; another size forgets all."""
        places = max(_LEAST_GHOSTS, pages // _GHOST_SHARE)
        size = 1 << places.bit_length() - 1
        if size <= len(self.keys) < 4 * size:
            return  # a store's number of pages varies
        self.keys = np.zeros(size, np.uint64)
        self.stored_ns = np.zeros(size, np.int64)
        self.used_ns = np.zeros(size, np.int64)
        self.share = 1 << max(0, -(-pages // size) - 1).bit_length()

    def _which(self, digests: UInt64Array) -> tuple[Int64Array, Int64Array]:
        """Return positions of the keys that count, and their places in the table."""
        high = digests[:, 1]
        some = np.flatnonzero((high >> _HIGH) % np.uint64(self.share) == 0)
        return some, (high[some] % np.uint64(len(self.keys))).astype(np.int64)

    def add(
        self, digests: UInt64Array, stored_ns: Int64Array, used_ns: Int64Array
    ) -> tuple[Int64Array, Int64Array]:
        """Remember evicted pages; return times of those that are forgotten."""
        if not len(self.keys):
            return stored_ns[:0], used_ns[:0]
        some, places = self._which(digests)
        # Of pages with one place the last counts, here as below.
        old = places[self.keys[places] != 0]
        forgotten = self.stored_ns[old], self.used_ns[old]
        self.keys[places] = digests[some, 0]
        self.stored_ns[places] = stored_ns[some]
        self.used_ns[places] = used_ns[some]
        return forgotten

    def take(self, digests: UInt64Array) -> tuple[Int64Array, Int64Array, Int64Array]:
        """Remove pages that are stored again; return positions and their times."""
        if not len(self.keys):
            none = np.zeros(0, np.int64)
            return none, none, none
        some, places = self._which(digests)
        there = self.keys[places] == digests[some, 0]
        some, places = some[there], places[there]
        self.keys[places] = 0
        return some, self.stored_ns[places], self.used_ns[places]


class ReuseHistory:
    """After how long pages of one pool were used again, by class.

    Called under a lock of its own: uses are noted under that of the index, and what
    is cold is found without it.
    """

    def __init__(self) -> None:
        self.ghosts = Ghosts()
        self._lock = threading.Lock()
        self._reused: Float64Array = np.zeros((CLASSES, _BINS))
        self._lost: Float64Array = np.zeros((CLASSES, _BINS))
        self._noted: list[tuple[Int64Array | int, Int64Array | int, int]] = []
        self._turnover_ns = 0
        self._halved_ns = 0
        self._learned_ns = 0
        self._curves: Float64Array | None = None  # see `_curves_of`

    def note(
        self, stored_ns: Int64Array | int, used_ns: Int64Array | int, now_ns: int
    ) -> None:
        """Note that pages are used again.

        Args:
            stored_ns: When each was stored.
            used_ns: When each had been used before.
            now_ns: When they are used.
        """
        self._noted.append((stored_ns, used_ns, now_ns))
        if len(self._noted) >= _FOLD:
            with self._lock:
                self._fold()

    def note_evicted(
        self,
        digests: UInt64Array,
        stored_ns: Int64Array,
        used_ns: Int64Array,
        now_ns: int,
    ) -> None:
        """Remember pages that are evicted.

        Args:
            digests: uint64 (n, 2), of their keys.
            stored_ns: int64 (n,).
            used_ns: int64 (n,).
            now_ns: The time.
        """
        if not len(digests):
            return
        with self._lock:
            stored_ns, used_ns = self.ghosts.add(digests, stored_ns, used_ns)
            if len(used_ns):
                self._lost += self.ghosts.share * self._count(
                    stored_ns, used_ns, now_ns
                )

    def begin(self, digests: UInt64Array, used_ns: Int64Array) -> Int64Array:
        """Return since when pages that are stored count as stored, int64 (n,).

        For pages that were stored before, and evicted, since then. What comes before
        one of them in a prefix was there as well.

        Args:
            digests: uint64 (n, 2), of their keys, in the order of the prefix.
            used_ns: int64 (n,), when they are used.
        """
        with self._lock:
            known, stored_ns, last_ns = self.ghosts.take(digests)
            if not len(known):
                return used_ns
            now_ns = int(used_ns.max())
            self._reused += self.ghosts.share * self._count(stored_ns, last_ns, now_ns)
        since = np.array(used_ns)
        nearest = np.searchsorted(known, np.arange(int(known[-1]) + 1))
        head = slice(0, len(nearest))
        # The head of a prefix has been in use for no less time than what follows it,
        # to the nanosecond: pages of one prefix differ by one each.
        spans = used_ns[known] - stored_ns
        longest = np.maximum.accumulate(spans[::-1])[::-1]
        since[head] = used_ns[head] - np.maximum(longest[nearest], 0)
        return since

    def find_cold(
        self,
        stored_ns: Int64Array,
        used_ns: Int64Array,
        may_go: BoolArray,
        wanted: int,
        now_ns: int,
    ) -> ColdTimes:
        """Return times such that so many pages are cold, or a few more.

        Args:
            stored_ns: int64 (n,), when each page of the pool was stored.
            used_ns: int64 (n,), when each was last used.
            may_go: bool (n,), which of them may be evicted; at least one.
            wanted: How many of those are to be cold; at least one.
            now_ns: The time; no page was used later.
        """
        step = max(1, len(used_ns) // _SAMPLE)
        if step > 1 and np.count_nonzero(may_go[::step]):
            wanted = max(1, wanted // step)
            stored_ns, used_ns = stored_ns[::step], used_ns[::step]
            may_go = may_go[::step]
        else:
            step = 1
        with self._lock:
            self._learn(stored_ns, used_ns, now_ns, step)
            recent_ns, long_ns = self._spans()
            kinds = _classes(used_ns[may_go] - stored_ns[may_go], recent_ns, long_ns)
            return ColdTimes(
                recent_ns,
                long_ns,
                self._cut(kinds, now_ns - used_ns[may_go], wanted, now_ns),
            )

    def _spans(self) -> tuple[int, int]:
        return self._turnover_ns // _RECENT, self._turnover_ns // 2

    def _count(
        self, stored_ns: Int64Array, used_ns: Int64Array, now_ns: Int64Array | int
    ) -> Float64Array:
        """Count pages by class and age, float64 (classes, bins)."""
        kinds = _classes(used_ns - stored_ns, *self._spans())
        ages = np.maximum(now_ns - used_ns, 1)
        bins = np.minimum((_PER_OCTAVE * np.log2(ages)).astype(np.int64), _BINS - 1)
        counts = np.bincount(kinds * _BINS + bins, minlength=CLASSES * _BINS)
        return counts.reshape(CLASSES, _BINS).astype(np.float64)

    def _fold(self) -> None:
        """Count the uses that were noted."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        stored = [np.atleast_1d(np.asarray(one, np.int64)) for one, _, _ in noted]
        used = [np.atleast_1d(np.asarray(one, np.int64)) for _, one, _ in noted]
        times = [at for _, _, at in noted]
        now = np.repeat(np.array(times, np.int64), [len(one) for one in used])
        self._reused += self._count(np.concatenate(stored), np.concatenate(used), now)

    def _learn(
        self, stored_ns: Int64Array, used_ns: Int64Array, now_ns: int, step: int
    ) -> None:
        """Estimate anew for how long to keep each class, where it is time."""
        self._fold()
        due_ns = self._learned_ns + self._turnover_ns // _LEARN
        if self._curves is not None and now_ns < due_ns:
            return
        self.ghosts.fit(step * len(used_ns))
        passed = now_ns - self._halved_ns
        if self._turnover_ns and self._halved_ns:
            fade = 0.5 ** (passed / (_MEMORY * self._turnover_ns))
            self._reused *= fade
            self._lost *= fade
        # The oldest pages may be damaged times, or of a class that stays for long.
        oldest_ns = int(used_ns[used_ns > 0].min(initial=now_ns))
        self._turnover_ns = max(1, now_ns - oldest_ns)
        self._halved_ns = self._learned_ns = now_ns
        ghosts = self.ghosts
        gone = np.flatnonzero(ghosts.keys)
        open_ones = step * self._count(stored_ns, used_ns, now_ns)
        open_ones += ghosts.share * self._count(
            ghosts.stored_ns[gone], ghosts.used_ns[gone], now_ns
        )
        self._curves = _curves_of(
            self._reused, self._lost + open_ones, _EXAMPLES * step * len(used_ns)
        )

    def _cut(
        self, kinds: Int64Array, ages: Int64Array, wanted: int, now_ns: int
    ) -> Int64Array:
        """Return the latest time of use of a cold page of each class."""
        curves = cast("Float64Array", self._curves)
        # The price at which a page is kept no longer: the lower, the colder it is.
        levels = np.arange(curves.shape[1], dtype=np.float64)
        prices = np.empty(len(ages))
        logs = np.log2(np.maximum(ages, 1))
        for kind, curve in enumerate(curves):
            mine = kinds == kind
            prices[mine] = np.interp(logs[mine], curve[::-1], levels[::-1])
        place = min(wanted, len(prices)) - 1
        last = np.argpartition(prices, place)[place]
        kept = [float(np.interp(prices[last], levels, curve)) for curve in curves]
        cold_ns = now_ns - np.ceil(2.0 ** np.array(kept)).astype(np.int64)
        # Exactly, where pages of one prefix differ by nanoseconds.
        cold_ns[kinds[last]] = now_ns - ages[last]
        # A longer use makes no page colder, whatever was rounded.
        return np.maximum.accumulate(cold_ns[::-1])[::-1]


def _classes(spans: Int64Array, recent_ns: int, long_ns: int) -> Int64Array:
    """Return the class of pages that were used for so long, int64 (n,)."""
    return (spans > recent_ns).astype(np.int64) + (spans >= max(long_ns, recent_ns + 1))


def _curves_of(
    reused: Float64Array, others: Float64Array, examples: float
) -> Float64Array:
    """Return for how long each class is worth keeping, by price.

    A page of a class that is kept up to some age brings a number of uses and takes
    room for a time, both by the Kaplan-Meier estimate: pages of that age or older
    that were used again, of all that reached it. For each price of room there is an
    age with the largest gain.

    Args:
        reused: float64 (classes, bins), pages that were used again, by age.
        others: float64 (classes, bins), pages that were not, by their latest age.
        examples: Weight of what holds for all classes together.

    Returns:
        float64 (classes, prices), logarithms of ages in ns, to the base 2: descending
        with the price, ascending with the class.
    """
    every = reused + others
    busy = np.flatnonzero(every.sum(axis=0))
    begin, end = (int(busy[0]), int(busy[-1]) + 1) if len(busy) else (0, _BINS)
    reused, every = reused[:, begin:end], every[:, begin:end]
    reached = np.cumsum(every[:, ::-1], axis=1)[:, ::-1]
    hazard = reused.sum(axis=0) / np.maximum(reached.sum(axis=0), 1e-9)
    hazards = (reused + examples * hazard) / np.maximum(reached + examples, 1e-9)
    after = np.cumprod(1 - np.minimum(hazards, 1), axis=1)
    before = np.concatenate([np.ones((len(every), 1)), after[:, :-1]], axis=1)
    edges = 2.0 ** (np.arange(begin, end + 1) / _PER_OCTAVE)
    edges, widths = edges[1:], np.diff(edges)
    # Until the first age that was ever seen, all pages stay.
    widths[0] += 2.0 ** (begin / _PER_OCTAVE)
    rooms = np.cumsum((before + after) / 2 * widths, axis=1)
    uses = 1 - after
    # Prices from the least gain of any age to the largest.
    gains = uses / rooms
    most = max(float(gains.max(initial=0)), 1e-300) * 2
    least = 1e-3 / edges[-1]
    prices = np.geomspace(min(least, most / 2), most, _PRICES)
    kept = np.empty((CLASSES, _PRICES))
    for kind in range(CLASSES):
        gain = uses[kind] - prices[:, None] * rooms[kind]
        best = len(edges) - 1 - gain[:, ::-1].argmax(axis=1)
        kept[kind] = np.where(gain.max(axis=1) > 0, edges[best], 0)
    kept = np.maximum.accumulate(kept, axis=0)
    kept = np.maximum.accumulate(kept[:, ::-1], axis=1)[:, ::-1]
    logs = np.clip(np.log2(np.maximum(kept, 1)), 0, _OLDEST - 1)
    first, final = np.full((CLASSES, 1), _OLDEST), np.zeros((CLASSES, 1))
    curves = np.hstack([first, logs, final])
    # Ages between two prices have one between them, so none may stand twice.
    return cast("Float64Array", curves + np.arange(curves.shape[1])[::-1] * 1e-9)

"""Which pages make way for new ones: a plan for each pool, segment by segment.

Within a pool a writer plans ahead: a small share of all pages, the coldest by
`kvdock_segments.reuse`, is to go, segment by segment, those with the most such pages
first. Nothing that is warmer goes with them. Segments as a whole, of other pools or
of a store that is made smaller, go in the order of the mean of the times of use of
their pages.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock_segments.format import promised

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array
    from kvdock_segments.index import Index
    from kvdock_segments.reuse import ColdTimes
    from kvdock_segments.segment import RowRange
    from kvdock_segments.usage import NamespaceUsage

_SHARE = 32
"""Of how many pages one is planned to go. Where a request is a quarter of the store,
as in agentic sessions, a 16th costs 2.3 % of what is restored, a 32nd .9 % and a 64th
.2 %; a 32nd makes up to 1.6 times the system calls of a 16th, a 64th over 3 times."""
NONE_ABOVE: Mapping[int, int] = MappingProxyType({})
_YIELD = 8
"""Of how many slots one has to be freed for a segment to be worth claiming."""


@attrs.define(eq=False)
class EvictionPlan:
    """What is to go next in one folder.

    Args:
        cold: Which pages are to go.
        coldest_ns: When a quarter of them had been used for the last time.
        numbers: Numbers of their segments, the one that yields most last.
        over: The tenants that were above their quotas.
        spares: Whether pages of those tenants alone are to go.
    """

    cold: ColdTimes
    coldest_ns: int
    numbers: list[int]
    over: frozenset[int] = frozenset()
    spares: bool = False


def plan_eviction(
    index: Index,
    writable: BoolArray,
    wanted: int,
    before_ns: int,
    over: Mapping[int, int] = NONE_ABOVE,
) -> EvictionPlan | None:
    """Plan which pages go next; None where nothing may go.

    Args:
        index: All pages of a pool.
        writable: bool (segments,), which may be claimed, by number.
        wanted: Pages that should go at least.
        before_ns: Pages that were used then, or later, stay.
        over: Tenants above their quotas, and how many pages each may lose: pages of
            all others stay as long as one of those may go.
    """
    if not writable.any():
        return None
    slots, live, check = index.slots_in, index.live_in, index.records["check"]
    # Without the lock arrays may grow meanwhile; what goes is looked at once more.
    known = min(len(check), len(index.used_ns), len(index.segment_of))
    rows = np.flatnonzero(check[:known])
    rows = rows[index.segment_of[rows] < len(writable)]
    used_ns, segment_of = index.used_ns[rows], index.segment_of[rows]
    stored_ns = index.records["stored_ns"][rows].astype(np.int64)
    may_go = writable[segment_of] & (used_ns < before_ns)
    if index.timed:
        may_go &= ~promised(index.words[rows])
    taxed = _taxed(index, rows, may_go, over)
    spares = bool(np.count_nonzero(taxed))
    if spares:
        may_go, wanted = taxed, min(wanted, int(np.count_nonzero(taxed)))
    going = int(np.count_nonzero(may_go))
    if not going:
        return None
    count = min(going, max(wanted, going // _SHARE, 1))
    now_ns = max(index.clock.newest_ns, int(used_ns.max()))
    cold = index.history.find_cold(stored_ns, used_ns, may_go, count, now_ns)
    goes = np.flatnonzero(may_go & cold.find(stored_ns, used_ns, before_ns))
    segments = len(writable)
    cold_in = np.bincount(segment_of[goes], minlength=segments)
    freed = np.where(cold_in > 0, cold_in + slots[:segments] - live[:segments], 0)
    order = np.argsort(freed, kind="stable")
    whole = spares or not over
    worth = freed[order] * _YIELD >= np.maximum(slots[order], 1)
    return EvictionPlan(
        cold=cold,
        coldest_ns=int(np.quantile(used_ns[goes], 0.25, method="lower")),
        # Where tenants above their quotas have nothing here that may go, others lose no
        # more than a segment before that is looked at again.
        numbers=(order[worth] if worth.any() and whole else order[-1:]).tolist(),
        over=frozenset(over),
        spares=spares,
    )


def _taxed(
    index: Index, rows: Int64Array | slice, may_go: BoolArray, over: Mapping[int, int]
) -> BoolArray:
    """Return which pages tenants have above their quotas, the coldest, bool (n,).

    `over` has the tenants above their quotas, and by how many pages.
    """
    found = np.zeros(len(may_go), np.bool_)
    if not over or index.tenants is None:
        return found
    whose, used_ns = (
        index.tenants.owners(index.records["tenant"][rows]),
        index.used_ns[rows],
    )
    for number, pages in over.items():
        mine = np.flatnonzero(may_go & (whose == number))
        if len(mine) > pages:
            mine = mine[np.argpartition(used_ns[mine], pages - 1)[:pages]]
        found[mine] = True
    return found


def cold_slots(
    index: Index,
    rows: RowRange,
    plan: EvictionPlan,
    before_ns: int,
    over: Mapping[int, int] = NONE_ABOVE,
) -> Int64Array:
    """Return the slots of a segment whose pages are to go, ascending.

    Pages that were used at `before_ns` or later stay, and no tenant loses more than is
    in `over` by now.
    """
    cold = plan.cold
    stored_ns = index.records["stored_ns"][rows.span].astype(np.int64)
    goes = cold.find(stored_ns, index.used_ns[rows.span], before_ns)
    if index.timed:
        goes &= ~promised(index.words[rows.span])
    goes &= index.live(rows)
    if plan.spares:
        goes = _taxed(index, rows.span, goes, over)
    return np.flatnonzero(goes)


def mean_last_used_ns(used_ns: Int64Array) -> int:
    """Return when the pages of a segment were last used, their mean; 0 for none.

    Args:
        used_ns: int64, of each page; 0 where there is none.
    """
    used_ns = used_ns[used_ns > 0]
    if not len(used_ns):
        return 0
    # Segments of one prefix differ by a few nanoseconds, which no float can tell.
    first_ns = used_ns.min()
    return int(first_ns) + int((used_ns - first_ns).mean())


@attrs.define(eq=False)
class OtherPools:
    """Segments of the other pools of a namespace, coldest first.

    Their writers note uses every ten seconds, so what is known of one is read
    again before it goes.
    """

    usage: NamespaceUsage
    counts: Counter[str]
    _known: dict[tuple[str, str], tuple[int, int]] = attrs.field(factory=dict)

    def evict_segment(
        self,
        but_fd: int,
        *,
        colder_than_ns: float = float("inf"),
        least_slots: int = 0,
    ) -> bool:
        """Delete the coldest segment of the other pools; return whether there was one.

        It spares the folder `but_fd`, segments that are warmer, and pools that would be
        left with fewer slots than `least_slots`.
        """
        for coldest in self._coldest_first(but_fd, colder_than_ns, least_slots):
            if self.usage.delete(*coldest):
                self.counts["segments_deleted"] += 1
                return True
        return False

    def has_colder(self, but_fd: int, colder_than_ns: int) -> bool:
        """Return whether `evict_segment` would find one to delete."""
        return any(True for _ in self._coldest_first(but_fd, colder_than_ns, 0))

    def _coldest_first(
        self, but_fd: int, colder_than_ns: float, least_slots: int
    ) -> Iterator[tuple[str, str]]:
        """Return folder and name of segments, the coldest first."""
        listed = self.usage.full_segments(but_fd=but_fd, least_slots=least_slots)
        self._known = {
            one: self._known[one]
            if one in self._known and self._known[one][0] == changed_ns
            else (changed_ns, self._mean_ns(one))
            for one, changed_ns in listed.items()
        }
        choice = {one: used_ns for one, (_, used_ns) in self._known.items()}
        while choice:
            coldest = min(choice, key=lambda one: choice[one])
            if choice[coldest] >= colder_than_ns:
                return
            # A folder does not change where the use of its pages is noted.
            now_ns = self._mean_ns(coldest)
            if now_ns > choice[coldest]:
                choice[coldest] = now_ns
                self._known[coldest] = (listed[coldest], now_ns)
                continue
            del choice[coldest]
            yield coldest

    def _mean_ns(self, one: tuple[str, str]) -> int:
        return mean_last_used_ns(self.usage.uses_of(*one))

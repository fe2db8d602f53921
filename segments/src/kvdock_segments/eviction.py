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
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock_segments.format import promised

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array
    from kvdock_segments.index import Index
    from kvdock_segments.reuse import ColdTimes
    from kvdock_segments.room import Room
    from kvdock_segments.segment import RowRange
    from kvdock_segments.usage import NamespaceUsage

_SHARE = 32
"""Of how many pages one is planned to go. Where a request is a quarter of the store,
as in agentic sessions, a 16th costs 2.3 % of what is restored, a 32nd .9 % and a 64th
.2 %; a 32nd makes up to 1.6 times the system calls of a 16th, a 64th over 3 times."""
_YIELD = 8
"""Of how many slots one has to be freed for a segment to be worth claiming."""


@attrs.frozen
class Shares:
    """Who loses pages for what a tenant stores.

    Args:
        over: Tenants above their quotas, and by how many pages: they lose pages before
            all others, and no more than that.
        writer: The tenant that stores. While another one is above its quota, it loses
            pages itself, and the others nothing.
    """

    over: Mapping[int, int]
    writer: int


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
    shares: Shares | None = None,
) -> EvictionPlan | None:
    """Plan which pages go next; None where nothing may go.

    Args:
        index: All pages of a pool.
        writable: bool (segments,), which may be claimed, by number.
        wanted: Pages that should go at least.
        before_ns: Pages that were used then, or later, stay; but not those of other
            tenants that are above their quotas.
        shares: Whose pages may go; None where no tenant has a quota.
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
    may_go = writable[segment_of]
    if index.timed:
        may_go &= ~promised(index.words[rows])
    older = used_ns < before_ns
    taxed = _taxed(index, rows, may_go, older, shares)
    spares = bool(np.count_nonzero(taxed))
    if spares:
        may_go, wanted = taxed, min(wanted, int(np.count_nonzero(taxed)))
    else:
        may_go = _untaxed(index, rows, may_go & older, shares)
    going = int(np.count_nonzero(may_go))
    if not going:
        return None
    count = min(going, max(wanted, going // _SHARE, 1))
    now_ns = max(index.clock.newest_ns, int(used_ns.max()))
    cold = index.history.find_cold(stored_ns, used_ns, may_go, count, now_ns)
    goes = np.flatnonzero(may_go & cold.find(stored_ns, used_ns))
    segments = len(writable)
    cold_in = np.bincount(segment_of[goes], minlength=segments)
    freed = np.where(cold_in > 0, cold_in + slots[:segments] - live[:segments], 0)
    order = np.argsort(freed, kind="stable")
    over = frozenset(shares.over if shares else ())
    whole = spares or not over
    worth = freed[order] * _YIELD >= np.maximum(slots[order], 1)
    return EvictionPlan(
        cold=cold,
        coldest_ns=int(np.quantile(used_ns[goes], 0.25, method="lower")),
        # Where tenants above their quotas have nothing here that may go, the one that
        # stores loses no more than a segment before that is looked at again.
        numbers=(order[worth] if worth.any() and whole else order[-1:]).tolist(),
        over=over,
        spares=spares,
    )


def _taxed(
    index: Index,
    rows: Int64Array | slice,
    may_go: BoolArray,
    older: BoolArray,
    shares: Shares | None,
) -> BoolArray:
    """Return which pages tenants have above their quotas, the coldest, bool (n,).

    Pages of the tenant that stores only if they are `older` than what it stores. Those
    of others go all the same: a prompt that is longer than the room of its tenant would
    keep what it has above.
    """
    found, tenants = np.zeros(len(may_go), np.bool_), index.tenants
    if shares is None or tenants is None:
        return found
    whose, used_ns = tenants.owners(index.records["tenant"][rows]), index.used_ns[rows]
    may_go = may_go & (older | (whose != shares.writer))
    for number, pages in shares.over.items():
        mine = np.flatnonzero(may_go & (whose == number))
        if len(mine) > pages:
            mine = mine[np.argpartition(used_ns[mine], pages - 1)[:pages]]
        found[mine] = True
    return found


def _untaxed(
    index: Index, rows: Int64Array | slice, may_go: BoolArray, shares: Shares | None
) -> BoolArray:
    """Return which pages may go where none is above a quota, bool (n,).

    If a tenant has more than its room, though not here, the others keep theirs, and
    the one that stores makes way for itself.
    """
    tenants = index.tenants
    if shares is None or tenants is None or not shares.over:
        return may_go
    may_go &= tenants.owners(index.records["tenant"][rows]) == shares.writer
    return may_go


def cold_slots(
    index: Index,
    rows: RowRange,
    plan: EvictionPlan,
    before_ns: int,
    shares: Shares | None = None,
) -> Int64Array:
    """Return the slots of a segment whose pages are to go, ascending.

    `before_ns` and `shares` are those of now, as `plan_eviction` has them.
    """
    stored_ns = index.records["stored_ns"][rows.span].astype(np.int64)
    used_ns = index.used_ns[rows.span]
    goes = plan.cold.find(stored_ns, used_ns) & index.live(rows)
    if index.timed:
        goes &= ~promised(index.words[rows.span])
    older = used_ns < before_ns
    if plan.spares:
        goes = _taxed(index, rows.span, goes, older, shares)
    else:
        goes = _untaxed(index, rows.span, goes & older, shares)
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
    again before it goes. None goes with pages of a tenant that has them within its
    quota, unless it is that of the tenant that stores.
    """

    usage: NamespaceUsage
    counts: Counter[str]
    room: Room | None = None
    _known: dict[tuple[str, str], tuple[int, int]] = attrs.field(factory=dict)

    def evict_segment(
        self,
        but: str,
        *,
        colder_than_ns: float = float("inf"),
        least_slots: int = 0,
    ) -> bool:
        """Delete the coldest segment of the other pools; return whether there was one.

        It spares the folder `but`, segments that are warmer, and pools that would be
        left with fewer slots than `least_slots`.
        """
        for coldest in self._coldest_first(but, colder_than_ns, least_slots):
            if self.usage.delete(*coldest):
                self.counts["segments_deleted"] += 1
                return True
        return False

    def _coldest_first(
        self, but: str, colder_than_ns: float, least_slots: int
    ) -> Iterator[tuple[str, str]]:
        """Return folder and name of segments, the coldest first."""
        listed = self.usage.full_segments(but=but, least_slots=least_slots)
        self._known = {
            one: self._known[one]
            if one in self._known and self._known[one][0] == changed_ns
            else (changed_ns, self._mean_ns(one))
            for one, changed_ns in listed.items()
        }
        choice = {one: used_ns for one, (_, used_ns) in self._known.items()}
        if self.room:
            may_go, here = self.room.may_lose(), self.room.namespace
            choice = {one: choice[one] for one in choice if may_go((here, *one))}
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

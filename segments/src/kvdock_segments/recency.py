"""When the pages of a prefix count as used: its head last.

A page is of use only together with all pages before it, so the tail of a prefix
has to be evicted before its head. The pages of one call therefore differ by a
nanosecond each, the head being the latest, and calls that continue a prefix go on
counting downwards. What is evicted is what was used the longest time ago, and
never for a page that was used before it: so a prefix that is longer than the store
keeps its head.

A call continues a prefix if it is a further batch of one call (they share their
deadline), if a lookup named its pages after others, or if it is a write right after
another one.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock_segments.index import ABSENT

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array, UInt64Array
    from kvdock_segments.index import Index
    from kvdock_segments.segment import Segment

_LOOKUP_NS = 60 * 10**9
"""How long a lookup is remembered: the time that an engine takes to compute what was
absent, and to store it."""
_LOOKUPS = 1024
"""Lookups that are remembered until what was absent is stored."""
_LATEST = 8
"""Lookups of which every key is compared."""
_LOOKUP_KEYS = 1 << 16
"""Keys of all those lookups together: 16 bytes each."""


@attrs.define(eq=False)
class _Lookup:
    """The keys of a lookup, in the order of the prefix.

    Args:
        digests: uint64 (n, 2).
        deadline_s: Of the call that it belongs to.
        asked_ns: When it was begun: when its pages count as used, if it is
            continued.
        next: Place of the page that is stored next.
        since_ns: int64 (n,), since when each counts as stored; None before any is.
    """

    digests: UInt64Array
    deadline_s: float
    asked_ns: int
    next: int
    since_ns: Int64Array | None = None

    @property
    def key(self) -> int:
        """Return what the page that is stored next is found by."""
        return int(self.digests[self.next, 0])


class PrefixLookups:
    """The last lookups, and which of them a write continues.

    Called under the index's lock.
    """

    def __init__(self, index: Index, segments: dict[int, Segment]) -> None:
        self._index = index
        self._segments = segments
        self.by_key: dict[int, _Lookup] = {}  # by their key, the oldest first
        self._lookup_keys = 0

    def add(self, digests: UInt64Array, there: Int64Array, deadline_s: float) -> None:
        """Remember the pages of a prefix that may be stored soon.

        Args:
            digests: uint64 (n, 2), in the order of the prefix.
            there: int64 (m,), places of those that were found, ascending.
            deadline_s: Of the call.
        """
        if len(there) == len(digests):
            return
        last = next(reversed(self.by_key.values()), None)
        self._lookup_keys += len(digests)
        if last and last.deadline_s == deadline_s < np.inf:
            last.digests = np.concatenate([last.digests, digests])
            last.since_ns = None
        else:
            gaps = np.flatnonzero(there != np.arange(len(there)))
            absent = int(gaps[0]) if len(gaps) else len(there)
            self._keep(_Lookup(digests, deadline_s, self._index.clock.now_ns(), absent))
        while len(self.by_key) > _LOOKUPS or self._lookup_keys > _LOOKUP_KEYS:
            self._drop(next(iter(self.by_key)))

    def _keep(self, lookup: _Lookup) -> None:
        self._drop(lookup.key)
        self.by_key[lookup.key] = lookup

    def _drop(self, key: int) -> None:
        lookup = self.by_key.pop(key, None)
        if lookup:
            self._lookup_keys -= len(lookup.digests)

    def continue_with(self, digests: UInt64Array) -> tuple[int, Int64Array] | None:
        """Return when pages that are stored after a lookup count as used and stored.

        Refreshes the pages before them. What an engine asks for and never continues
        is not use: it asks for far more than it loads.

        Args:
            digests: uint64 (n, 2), what is stored, in the order of the prefix.

        Returns:
            The time of use of the first, and since when each counts as stored,
            int64 (n,); None if they continue no lookup.
        """
        lookup, first = self._continued(digests)
        if lookup is None or self._index.clock.now_ns() - lookup.asked_ns > _LOOKUP_NS:
            return None
        if lookup.since_ns is None:
            # Once for the whole prefix: only some evicted pages are remembered, and
            # the last pages of a call would look newer than the next call's.
            used_ns = lookup.asked_ns - np.arange(len(lookup.digests))
            lookup.since_ns = self._index.history.begin(lookup.digests, used_ns)
            if first:
                self.refresh(lookup.digests[:first], lookup.asked_ns)
        self._drop(lookup.key)
        lookup.next = first + len(digests)
        if lookup.next < len(lookup.digests):
            self._lookup_keys += len(lookup.digests)
            self._keep(lookup)
        first_ns, since_ns = lookup.asked_ns - first, lookup.since_ns
        if np.array_equal(lookup.digests[first : first + len(digests)], digests):
            return first_ns, since_ns[first : first + len(digests)]
        used_ns = first_ns - np.arange(len(digests))
        return first_ns, self._index.history.begin(digests, used_ns)

    def _continued(self, digests: UInt64Array) -> tuple[_Lookup | None, int]:
        """Find a lookup, and the place in it where these pages begin."""
        for place, key in enumerate(digests[:, 0].tolist()):
            lookup = self.by_key.get(key)
            # An engine may store again what was found, or what it fails to load.
            if lookup is not None and lookup.next >= place:
                return lookup, lookup.next - place
        # Or go on behind pages that were refused.
        for lookup in islice(reversed(self.by_key.values()), _LATEST):
            at = np.flatnonzero(lookup.digests[:, 0] == digests[0, 0])
            if len(at):
                return lookup, int(at[0])
        return None, 0

    def refresh(self, digests: UInt64Array, first_ns: int) -> None:
        """Note that the pages of a prefix are in use; reads no file.

        Args:
            digests: uint64 (n, 2), in the order of the prefix.
            first_ns: The time of use of the first.
        """
        index = self._index
        rows = index.find(digests)
        there = np.flatnonzero(rows != ABSENT)
        # Those that were loaded since are in use already.
        there = there[index.used_ns[rows[there]] < first_ns - there]
        rows = rows[there]
        index.touch(rows, first_ns - there)
        for number in np.unique(index.segment_of[rows]).tolist():
            self._segments[number].touched = True

"""Page leases: the pages of host memory that a call may still touch.

A page under a storage call is leased to it. An abandoned call keeps its pages
until it really ends, since late bytes may still land in them, or late reads
may still store their bytes under an old key.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.arrays import any_of
from kvdock.errors import RegionError
from kvdock.synchronization import MAX_WAIT_S, new_condition, remaining_s

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array


@attrs.define(eq=False)
class Lease:
    """Pages held for one storage call. Ending it twice does nothing."""

    table: PageLeases
    pages: Int64Array = attrs.field(repr=False)
    shared: bool = False
    open: bool = attrs.field(default=True, init=False)

    def end(self) -> None:
        """Release the pages."""
        self.table.end(self)

    release = end


class PageLeases:
    """The leases of the pages of one pool: one storage call each.

    Args:
        pages: How many pages the pool has.
    """

    def __init__(self, pages: int) -> None:
        self._lock, self._changed = new_condition()
        self._leased = np.zeros(pages, np.bool_)
        self._order = np.zeros(pages, np.int64)
        self._readers = np.zeros(pages, np.int32)

    @property
    def leased_pages(self) -> int:
        """Pages that a storage call may touch."""
        return int(np.count_nonzero(self._leased))

    def take(self, pages: Int64Array) -> tuple[BoolArray, Lease]:
        """Lease those pages that are not in use, for one storage call.

        A page that is given twice is leased once: its second position would
        share the first one's memory.

        Args:
            pages: int64 (n,), page indices.

        Returns:
            bool (n,), which were leased, and the lease.
        """
        positions = np.arange(len(pages))
        taken = pages[:0]
        try:
            with self._lock:
                free = ~self._leased[pages]
                # The last position that writes its number into a page keeps it.
                self._order[pages[::-1]] = positions[::-1]
                free &= self._order[pages] == positions
                taken = pages[free]
                self._leased[taken] = True
            return free, Lease(self, taken)
        except BaseException:  # an interrupt: there is no lease that could end
            with self._lock:
                self._leased[taken] = False
            raise

    def take_all(self, pages: Int64Array) -> Lease | None:
        """Lease all of these pages: the usual case of `take`.

        Args:
            pages: int64 (n,), page indices.

        Returns:
            None if one is in use, or given twice; then none is leased.
        """
        if len(pages) > 1 and len(set(pages.tolist())) < len(pages):
            return None
        lease = Lease(self, pages)
        with self._lock:
            if any_of(self._leased[pages]):
                return None
            self._leased[pages] = True
        return lease

    def share(self, pages: Int64Array) -> Lease | None:
        """Lease all of these pages for a call that only reads them.

        Several such calls may have the same page: the prefix that two requests
        have in common goes to two peers at once.

        Args:
            pages: int64 (n,), page indices, each once.

        Returns:
            None if one is under a call of another kind.
        """
        with self._lock:
            if np.count_nonzero(self._leased[pages] & (self._readers[pages] == 0)):
                return None
            self._readers[pages] += 1
            self._leased[pages] = True
        return Lease(self, pages, shared=True)

    def end(self, lease: Lease) -> None:
        """Release the pages of a lease, once."""
        with self._lock:
            if lease.open:
                lease.open = False
                if lease.shared:
                    self._readers[lease.pages] -= 1
                    self._leased[lease.pages] = self._readers[lease.pages] > 0
                else:
                    self._leased[lease.pages] = False
                if self._changed.waiting:
                    self._changed.notify_all()

    def in_use(self, pages: npt.ArrayLike) -> BoolArray:
        """Return which pages must not be reused yet, bool (n,)."""
        with self._lock:
            return self._leased[self._checked(pages)]

    def wait(self, pages: npt.ArrayLike, timeout_s: float) -> bool:
        """Wait until none of the pages is in use; return whether that is so."""
        end_s = time.monotonic() + min(timeout_s, MAX_WAIT_S)
        return self.wait_free(self._checked(pages), end_s)

    def wait_free(self, pages: Int64Array, deadline_s: float) -> bool:
        """Wait as `wait`, for page indices that were checked, until a deadline."""
        with self._lock:
            if not np.count_nonzero(self._leased[pages]):
                return True
            return self._changed.wait_for(
                lambda: not self._leased[pages].any(), remaining_s(deadline_s)
            )

    def _checked(self, pages: npt.ArrayLike) -> Int64Array:
        """Return page indices as int64 after a bounds check.

        Raises:
            RegionError: If one is not a page of the pool.
        """
        given = np.asarray(pages)
        if not given.size:
            return np.zeros(0, np.int64)
        if given.dtype.kind not in "iu" or given.min() < 0:
            raise RegionError(f"page indices are whole numbers from 0, not {given!r}")
        if given.max() >= len(self._leased):
            raise RegionError(
                f"page index {given.max()} is outside of {len(self._leased)} pages"
            )
        return given.astype(np.int64, copy=False)

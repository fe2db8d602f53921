"""Ranges of host addresses, and whether a batch stays inside of them.

For backends that reach only memory which was registered before. Over RDMA an
address that was not registered corrupts memory, and a ring or an agent rejects it
with an error of its own, so every piece is checked before the library sees it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

if TYPE_CHECKING:
    from typing import Self

    from kvdock.arrays import BoolArray, Int64Array


@attrs.frozen(eq=False)
class AddressRanges:
    """Ranges of host addresses. Immutable, so any thread may read it.

    Args:
        starts: First address of each range, ascending.
        ends: Address after the last one of each range, ascending.
    """

    starts: list[int]
    ends: list[int]
    _bounds: tuple[Int64Array, Int64Array] = attrs.field(init=False, repr=False)

    @_bounds.default
    def _as_arrays(self) -> tuple[Int64Array, Int64Array]:
        return np.array(self.starts, np.int64), np.array(self.ends, np.int64)

    @classmethod
    def of(cls, ranges: Iterable[tuple[int, int]] = ()) -> Self:
        """Sort ranges, and drop those that lie inside of another one.

        Ranges that touch stay two: memory that was registered in two pieces cannot be
        reached in one.

        Args:
            ranges: Address and size of each, bytes.
        """
        starts: list[int] = []
        ends: list[int] = []
        # The longest of those that begin together comes first.
        for address, nbytes in sorted(ranges, key=lambda one: (one[0], -one[1])):
            if nbytes > 0 and (not ends or address + nbytes > ends[-1]):
                starts.append(address)
                ends.append(address + nbytes)
        return cls(starts, ends)

    @property
    def pieces(self) -> tuple[tuple[int, int], ...]:
        """Address and size of each range, bytes, ascending."""
        pairs = zip(self.starts, self.ends, strict=True)
        return tuple((start, end - start) for start, end in pairs)

    def covers(self, addresses: Int64Array, sizes: Int64Array) -> bool:
        """Return whether every piece lies in one of the ranges.

        Args:
            addresses: int64 (n, segments), host byte addresses.
            sizes: int64 (n, segments), bytes; pieces of 0 bytes lie anywhere.
        """
        if not addresses.size:
            return True
        if self.starts and sizes.strides[0] == 0:
            # One row of sizes for all: what lies first and last decides. Nearly always
            # one range holds all columns, and two numbers say so.
            row, low, high = sizes[0].tolist(), addresses.min(), addresses.max()
            if min(row) >= 0 and self._holds([int(low)], [int(high)], [max(row)]):
                return True
            first = np.minimum.reduce(addresses).tolist()
            last = np.maximum.reduce(addresses).tolist()
            if self._holds(first, last, row):
                return True
        return bool(self._inside(addresses, sizes).all())

    def covered_rows(self, addresses: Int64Array, sizes: Int64Array) -> BoolArray:
        """Return which objects lie in the ranges with every piece, bool (n,)."""
        if self.covers(addresses, sizes):
            return np.ones(len(addresses), np.bool_)
        return cast("BoolArray", self._inside(addresses, sizes).all(axis=1))

    def _inside(self, addresses: Int64Array, sizes: Int64Array) -> BoolArray:
        """Return which pieces lie in one range, bool (n, segments)."""
        starts, ends = self._bounds
        if not len(starts):
            return cast("BoolArray", sizes == 0)
        # Never address + size: a garbage size must not wrap around.
        if len(starts) == 1:
            inside = (addresses >= starts[0]) & (sizes <= ends[0] - addresses)
        else:
            at = np.searchsorted(starts, addresses, "right") - 1
            inside = (at >= 0) & (sizes <= ends[at] - addresses)
        inside &= sizes >= 0
        inside |= sizes == 0
        return cast("BoolArray", inside)

    def _holds(self, first: list[int], last: list[int], sizes: list[int]) -> bool:
        """Return whether each column lies in one range; no is not a verdict yet."""
        for low, high, nbytes in zip(first, last, sizes, strict=True):
            at = bisect_right(self.starts, low) - 1
            if at < 0 or not 0 <= nbytes <= self.ends[at] - high:
                return False
        return True

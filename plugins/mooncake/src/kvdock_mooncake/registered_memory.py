"""Which memory the library knows, and whether a batch stays inside of it.

Over TCP the library moves bytes of any address; over RDMA an address that was
not registered corrupts memory. So every piece is checked here, on every
transport, before the library sees it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.errors import RegionError
from kvdock.units import format_bytes

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock.region import Block


def _none() -> Int64Array:
    return np.zeros(0, np.int64)


@attrs.define(eq=False)
class KnownMemory:
    """Registered ranges, each counted by the pools that lie in it.

    Not thread safe for changes; `covers` may run on any thread beside them,
    because the arrays that it reads are replaced and never altered.
    """

    _users: dict[Block, int] = attrs.field(factory=dict, init=False)
    _bounds: tuple[Int64Array, Int64Array] = attrs.field(
        factory=lambda: (_none(), _none()), init=False
    )

    _edges: tuple[list[int], list[int]] = attrs.field(
        factory=lambda: ([], []), init=False
    )

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The registered ranges, by address."""
        return tuple(sorted(self._users, key=lambda block: block.address))

    def add(self, block: Block, register: Callable[[Block], None]) -> Block:
        """Count one more user of a piece of memory.

        Args:
            block: The memory of a pool.
            register: Called first if no known range covers it.

        Returns:
            The range that covers it, to be given to `remove`.

        Raises:
            RegionError: If it overlaps a known range without lying inside.
        """
        for known in self._users:
            if known.address <= block.address and _end(block) <= _end(known):
                self._users[known] += 1
                return known
            if known.address < _end(block) and block.address < _end(known):
                raise RegionError(
                    f"memory at {block.address:#x} of {format_bytes(block.nbytes)} "
                    f"overlaps memory at {known.address:#x} of "
                    f"{format_bytes(known.nbytes)} that is registered already",
                    fix="Attach the pool that spans the most memory first, or "
                    "give each pool memory of its own.",
                )
        register(block)
        self._users[block] = 1
        self._sort()
        return block

    def remove(self, known: Block, unregister: Callable[[Block], None]) -> None:
        """Count one user less; the last one unregisters the range."""
        self._users[known] -= 1
        if not self._users[known]:
            del self._users[known]
            # First it stops being known: no batch may begin in it any more.
            self._sort()
            unregister(known)

    def covers(self, addresses: Int64Array, sizes: Int64Array) -> bool:
        """Return whether every piece lies in one registered range.

        Args:
            addresses: int64 (n, segments), host byte addresses.
            sizes: int64 (n, segments), bytes; pieces of 0 bytes lie anywhere.
        """
        if not addresses.size:
            return True
        starts, ends = self._bounds
        if not len(starts):
            return not sizes.any()
        if sizes.strides[0] == 0:
            # One row of sizes for all: what lies first and last decides.
            first = np.minimum.reduce(addresses).tolist()
            last = np.maximum.reduce(addresses).tolist()
            if self._holds(first, last, sizes[0].tolist()):
                return True
        if len(starts) == 1:
            # Never address + size: a garbage size must not wrap around.
            inside = (addresses >= starts[0]) & (sizes <= ends[0] - addresses)
        else:
            at = np.searchsorted(starts, addresses, "right") - 1
            inside = (at >= 0) & (sizes <= ends[at] - addresses)
        inside &= sizes >= 0
        return bool(inside.all()) or bool((inside | (sizes == 0)).all())

    def _holds(self, first: list[int], last: list[int], sizes: list[int]) -> bool:
        """Return whether each column lies in one range; no is no verdict yet."""
        starts, ends = self._edges
        for low, high, nbytes in zip(first, last, sizes, strict=True):
            at = bisect_right(starts, low) - 1
            if at < 0 or not 0 <= nbytes <= ends[at] - high:
                return False
        return True

    def _sort(self) -> None:
        blocks = self.blocks
        edges = [block.address for block in blocks], [_end(block) for block in blocks]
        self._edges = edges
        self._bounds = np.array(edges[0], np.int64), np.array(edges[1], np.int64)


def _end(block: Block) -> int:
    return block.address + block.nbytes


class RawMemory:
    """Memory of the library in numpy's own terms."""

    def __init__(self, address: int, size: int) -> None:
        self.__array_interface__ = {
            "data": (address, False),
            "shape": (size,),
            "typestr": "|u1",
            "version": 3,
        }

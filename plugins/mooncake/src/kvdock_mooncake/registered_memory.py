"""Keep track of registered memory, and keep batches inside of it.

Over TCP the library moves bytes of any address; over RDMA an address that was
not registered corrupts memory. So every piece is checked here, on every
transport, before the library sees it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import RegionError
from kvdock.geometry import AddressRanges
from kvdock.units import format_bytes

if TYPE_CHECKING:
    from kvdock import Block
    from kvdock.arrays import Int64Array


@attrs.define(eq=False)
class KnownMemory:
    """Registered ranges, each counted by the pools that lie in it.

    Not thread safe for changes; `covers` may run on any thread meanwhile,
    because the ranges that it reads are replaced and never altered.
    """

    _users: dict[Block, int] = attrs.field(factory=dict, init=False)
    _ranges: AddressRanges = attrs.field(factory=AddressRanges.of, init=False)

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The registered ranges, by address."""
        return tuple(sorted(self._users, key=lambda block: block.address))

    def add(self, block: Block, register: Callable[[Block], None]) -> Block:
        """Count one more user of a piece of memory.

        `register` is called first if no known range covers it.

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
        return self._ranges.covers(addresses, sizes)

    def _sort(self) -> None:
        self._ranges = AddressRanges.of(
            (block.address, block.nbytes) for block in self._users
        )


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

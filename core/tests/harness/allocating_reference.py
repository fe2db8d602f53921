"""The reference backend once more, reaching no memory but its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt
from reference import Handle, MemoryReference

from kvdock.errors import KvdockError
from kvdock.plugin.hookspecs import AttachConfig, HostMemory, hookimpl
from kvdock.plugin.manifest import Manifest, Support

if TYPE_CHECKING:
    from kvdock.geometry.region import Block, Region
    from kvdock.pools.spec import PoolSpec

WIPED = 0xDD
"""The bytes of memory that is released."""


@attrs.define(eq=False)
class Piece:
    """Memory that was brought, and who has it.

    Args:
        array: The bytes.
        lent: Whether it was not given back yet.
        pools: Handles of the pools that lie in it.
    """

    array: npt.NDArray[np.uint8]
    lent: bool = True
    pools: list[Handle] = attrs.field(factory=list)

    def holds(self, block: Block) -> bool:
        """Return whether a block lies in it."""
        at = int(self.array.ctypes.data)
        ends = at + self.array.nbytes
        return at <= block.address and block.address + block.nbytes <= ends


class OwnMemoryReference(MemoryReference):
    """A backend that reaches what it brought, as over a client process."""

    name = "reference_own_memory"

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[Piece] = []

    def manifest(self) -> Manifest:
        """Declare an allocator as well."""
        return attrs.evolve(super().manifest(), host_allocator=Support.NATIVE)

    @hookimpl
    def kvdock_allocate(self, nbytes: int, config: AttachConfig) -> HostMemory | None:
        """Bring memory."""
        del config
        piece = self.new_piece(nbytes)
        return HostMemory(piece.array, lambda: self.take_back(piece))

    def new_piece(self, nbytes: int) -> Piece:
        """Make memory and note that it is ours."""
        piece = Piece(np.zeros(nbytes, np.uint8))
        self.pieces.append(piece)
        return piece

    def take_back(self, piece: Piece) -> None:
        """Wipe memory, or leave that to the last pool that lies in it."""
        piece.lent = False
        self.sweep()

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> Handle:
        """Attach a pool whose memory is ours.

        Raises:
            KvdockError: If it is not.
        """
        lain = [[one for one in self.pieces if one.holds(b)] for b in region.blocks]
        if not all(lain):
            raise KvdockError(
                f"pool {pool.name!r} lies in memory that this backend did not allocate",
                fix="Get it from Dock.allocate.",
            )
        handle = super().kvdock_register_pool(pool, region, config)
        for pieces in lain:
            pieces[0].pools.append(handle)
        return handle

    def close(self, handle: Handle) -> None:
        """Release a pool, and memory that was given back before."""
        super().close(handle)
        for piece in self.pieces:
            piece.pools = [one for one in piece.pools if one is not handle]
        self.sweep()

    def sweep(self) -> None:
        """Wipe and drop memory that is no longer in use."""
        gone = [one for one in self.pieces if not one.lent and not one.pools]
        for piece in gone:
            piece.array[:] = WIPED
        self.pieces = [one for one in self.pieces if one not in gone]


def __getattr__(name: str) -> OwnMemoryReference:
    """Make a fresh plugin: `allocating_reference:plugin`."""
    if name == "plugin":
        return OwnMemoryReference()
    raise AttributeError(name)

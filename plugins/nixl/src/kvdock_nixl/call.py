"""One request on its way through NIXL."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock_nixl.byte_counts import MOVED, Way
from kvdock_nixl.kernel_io import move_by_kernel
from kvdock_segments import checksums

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock_nixl.agent_pair import AgentPair
    from kvdock_nixl.agents import Agent
    from kvdock_segments import IORequest, IOResult

BLOCK = 4096
"""File offsets and sizes of direct I/O."""

PART_BYTES = 4 << 20
"""Bytes of one transfer, and between two checks of the deadline."""

CACHED_PART_BYTES = 32 << 20
"""The same through the page cache: it is faster than a device, and each transfer has
a fixed cost, so that 4 MiB would take a sixth longer."""


@attrs.frozen(eq=False)
class Call:
    """A request, its result, and what moves it.

    Args:
        direct: Whether the files bypass the page cache.
        totals: int64 (n,), bytes of each object.
        fds: int64 (n,), descriptor of each object's file.
    """

    pair: AgentPair
    agent: Agent
    request: IORequest
    result: IOResult
    direct: bool
    totals: Int64Array
    fds: Int64Array

    @classmethod
    def of(
        cls, pair: AgentPair, request: IORequest, result: IOResult, *, direct: bool
    ) -> Call:
        """Prepare to move a request."""
        sizes = request.sizes
        return cls(
            pair=pair,
            agent=pair.agent(write=request.write),
            request=request,
            result=result,
            direct=direct,
            # A repeated row needs one sum.
            totals=np.full(len(request), sizes[0].sum())
            if sizes.strides[0] == 0
            else sizes.sum(axis=1),
            fds=np.asarray(request.files, np.int64)[request.file_of],
        )

    @property
    def part_bytes(self) -> int:
        """Bytes of one transfer."""
        return PART_BYTES if self.direct else CACHED_PART_BYTES

    @property
    def late(self) -> bool:
        """Return whether nothing more may begin."""
        return time.monotonic() >= self.request.deadline_s

    def pieces(self, row: int) -> list[tuple[int, int]]:
        """Return host address and bytes of each piece of an object."""
        addresses, sizes = self.request.addresses[row], self.request.sizes[row]
        return list(zip(addresses.tolist(), sizes.tolist(), strict=True))

    def moved(self, rows: Int64Array) -> None:
        """Record objects that moved whole through NIXL."""
        totals = self.totals[rows]
        self.result.errors[rows] = 0
        self.result.nbytes[rows] = totals
        way = Way.NIXL_WRITE if self.request.write else Way.NIXL_READ
        MOVED.add(way, int(totals.sum()))

    def sum(self, rows: Int64Array) -> None:
        """Compute the checksums of objects, of what lies in their memory now."""
        request = self.request
        self.result.checksums[rows] = checksums(
            request.addresses[rows], request.sizes[rows]
        )

    def ask_kernel(
        self, row: int, pieces: list[tuple[int, int]], offset: int, skip: int = 0
    ) -> bool:
        """Move an object past NIXL, and record what comes of it.

        Args:
            row: Its position in the request.
            pieces: Host address and bytes, of its own memory or of a buffer.
            offset: Where they begin in its file.
            skip: How many of the bytes lie before the object.

        Returns:
            Whether it moved whole; its checksum is then still to be computed.
        """
        write = self.request.write
        error, done = move_by_kernel(int(self.fds[row]), pieces, offset, write=write)
        done = min(max(0, done - skip), int(self.totals[row]))
        MOVED.add(Way.KERNEL_WRITE if write else Way.KERNEL_READ, done)
        self.result.errors[row] = error
        self.result.nbytes[row] = done
        return bool(done == self.totals[row])

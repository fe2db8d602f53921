"""Rows of one pool: memory of the core that pages pass through between tiers.

Each placement of the pool reaches the same rows through staging buffers of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock.geometry.region import Region
from kvdock.routing.verdicts import IntegrityCheck
from kvdock.tiers.chain import Chain
from kvdock.tiers.copier import CopiedPool, Copier
from kvdock.tiers.rows import RowChunks
from kvdock.tiers.shared_loads import SharedLoads
from kvdock.transfer.staging import StagingBuffers
from kvdock.transfer.steps import PageSteps

if TYPE_CHECKING:
    from kvdock.config.core import CoreSettings
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec
    from kvdock.routing.verdicts import RouteOption
    from kvdock.transfer.host_memory import Allocator, HostBuffer
    from kvdock.transfer.placement import Placement

_LOADS = 4
"""Chunks for loads that calls share; where all are in use, a call loads directly."""


@attrs.frozen(eq=False)
class PoolRows:
    """Rows for the pages of one pool.

    Args:
        memory: Of all rows; None for a pool without bytes.
        chunk_rows: Rows that one copy or one load uses at a time.
    """

    core: CoreSettings
    memory: HostBuffer | None
    page_bytes: int
    chunk_rows: int

    @classmethod
    def of(cls, region: Region, core: CoreSettings, lend: Allocator) -> PoolRows:
        """Take memory for the rows of a pool."""
        page_bytes = region.page_bytes
        most = core.tiers.batch_bytes // max(1, page_bytes)
        chunk_rows = max(1, min(most, core.calls.batch_pages, region.pages))
        rows = cls(core, None, page_bytes, chunk_rows)
        if not region.physical:
            return rows
        return attrs.evolve(rows, memory=lend(rows.count * page_bytes))

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.chunk_rows * (self.core.tiers.threads + _LOADS)

    def steps(
        self,
        pool: PoolSpec,
        shard: Shard,
        option: RouteOption,
        batch_pages: int,
        lend: Allocator,
    ) -> tuple[Region, PageSteps]:
        """Return the rows as one backend cuts them, and how it moves them."""
        if self.memory is None:
            region = Region.of(pool, shard, [], self.count)
            return region, PageSteps.of_markers(region)
        memory = self.memory.memory[: self.count * self.page_bytes]
        region = Region.of(pool, shard, [memory], self.count)
        trailers = option.check is IntegrityCheck.TRAILER
        buffers = self.core.tiers.threads + _LOADS
        staging = StagingBuffers(
            region, buffers, batch_pages, trailers=trailers, lend=lend
        )
        return region, PageSteps.staged(staging, region)

    def reached_by(
        self, placement: Placement, region: Region, steps: PageSteps, batch_pages: int
    ) -> Placement:
        """Return a placement that reaches these rows, for loads and for copies."""
        loads = attrs.evolve(
            placement, region=region, steps=steps, batch_pages=batch_pages
        )
        copies = attrs.evolve(loads, counted=False)
        return attrs.evolve(placement, loads=loads, copies=copies)

    def chain(
        self,
        pool: PoolSpec,
        placements: Sequence[Placement],
        copier: Copier,
        *,
        writes: bool,
    ) -> Chain:
        """Return the chain of a pool's placements."""
        threads = self.core.tiers.threads
        loads = RowChunks(_LOADS, self.chunk_rows, threads * self.chunk_rows)
        return Chain(
            CopiedPool(
                pool.name,
                pool.anchor,
                pool.required,
                self.page_bytes,
                RowChunks(threads, self.chunk_rows),
            ),
            placements,
            self.core.tiers,
            copier,
            writes,
            # What lies on this host is as near to every call: it needs no copy.
            tuple(SharedLoads(loads) if one.remote else None for one in placements[1:])
            if self.memory is not None
            else (),
        )

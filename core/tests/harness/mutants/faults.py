"""Mutants that come to light under an engine, and when something fails."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvdock.plugin.hookspecs import AttachConfig, hookimpl
from mutants.mutant import MemoryMutant

if TYPE_CHECKING:
    from reference import Handle

    from kvdock.batch import Batch, BatchResult, Outcome
    from kvdock.geometry.region import Region
    from kvdock.pools.spec import PoolSpec


class EmptyAfterATimeout(MemoryMutant):
    """Opens a new index when a call came too late."""

    image_of = "U4: a client that closes on an error and comes back empty"
    caught_by = "test_what_was_stored_before_a_fault_is_there_after_it"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if time.monotonic() >= batch.deadline_s:
            for key in handle.shelf.names():
                handle.shelf.remove(key)
        return super().run(handle, batch)


class SizesOfTheModel(MemoryMutant):
    """Works out the size of an object from the model instead of the batch."""

    image_of = "W6: slots sized once from the model's shape; what is longer is cut"
    caught_by = "test_a_fault_is_a_miss_in_time"

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> Handle:
        self.largest = max(self.largest, pool.page_bytes(config.shard))
        return super().kvdock_register_pool(pool, region, config)

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        return super().put(handle, key, data[: self.largest])

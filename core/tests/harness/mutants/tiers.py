"""Mutants that show only under an engine: as one tier of several, or in a fault."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from reference import CHECK_BYTES, DictShelf

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.plugin.hookspecs import AttachConfig, hookimpl
from mutants.mutant import FolderMutant, MemoryMutant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reference import Handle, ReferenceSettings, Shelf

    from kvdock.geometry.region import Region
    from kvdock.pools.spec import PoolSpec


class OneShelfForAllTiers(MemoryMutant):
    """Answers with the pages of another instance of the same plugin."""

    image_of = "a client kept by process, whatever place its settings name"
    caught_by = "test_a_tier_answers_with_its_own_pages_alone"

    def open_shelf(self, settings: ReferenceSettings) -> Shelf:
        del settings
        return self.shelves.setdefault("", DictShelf())


class CopiesAcknowledgedAndLost(MemoryMutant):
    """Acknowledges pages that come while others of a batch are there already."""

    image_of = "a queue that is full: what is behind is dropped, and success returned"
    caught_by = "test_every_tier_gets_what_was_stored"

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        if len(handle.shelf.names()) >= 3:
            return Outcome.OK
        return super().put(handle, key, data)


class DamagePassedOn(FolderMutant):
    """Declares integrity and loads whatever lies in the file."""

    image_of = "SGLang's file storage: a file that is long enough is believed"
    caught_by = "test_a_damaged_page_is_not_promoted"

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        blob = handle.shelf.read(key)
        if blob is None or len(blob) != CHECK_BYTES + nbytes:
            return Outcome.ABSENT, b""
        return Outcome.OK, blob[CHECK_BYTES:]


class CopiesNeverEnd(MemoryMutant):
    """Takes the batches of the first tier, and hangs in those of the others."""

    image_of = "LMCache: a put to a remote without connection waits for ever"
    caught_by = "test_every_tier_gets_what_was_stored"

    def __init__(self) -> None:
        super().__init__()
        self.first: Shelf | None = None

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if batch.operation is Operation.PUT:
            self.first = self.first or handle.shelf
            if handle.shelf is not self.first:
                threading.Event().wait()
        return super().run(handle, batch)


class RemovalTooEarly(MemoryMutant):
    """Reports as gone what it was asked for the longest time ago."""

    image_of = "events of eviction that are sent before the page is evicted"
    caught_by = "test_no_tier_reports_a_removal_too_early"

    def removed(self, handle: Handle, limit: int) -> Sequence[str]:
        """Report the oldest half."""
        handle.track_limit = limit
        gone = list(handle.tracked)[: len(handle.tracked) // 2]
        for key in gone:
            del handle.tracked[key]
        return gone


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

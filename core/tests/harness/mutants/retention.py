"""Mutants of promises, of expiry, of what is noted of use, and of reports."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import numpy as np
from reference import sealed

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.capacity import Capacity
from kvdock.plugin.manifest import Support
from mutants.mutant import FolderMutant, MemoryMutant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reference import Handle, ReferenceSettings

    from kvdock.arrays import Int64Array


class PromiseForgotten(MemoryMutant):
    """Keeps promises in the memory of a handle."""

    image_of = "pins in a set of the process: after a restart everything may go"
    caught_by = "test_promised_pages_stay_while_others_are_evicted"

    def open_times(self, settings: ReferenceSettings) -> dict[str, tuple[int, int]]:
        del settings
        return {}


class QuotaForgotten(MemoryMutant):
    """Says that it keeps tenants' quotas, and evicts all pages alike."""

    image_of = "a plugin that takes the setting for what its server does"
    caught_by = "test_a_tenant_within_its_quota_loses_nothing_to_others"

    def within_quotas(self, handle: Handle) -> set[str]:
        del handle
        return set()


class PromiseIgnored(MemoryMutant):
    """Says that it keeps pages, and evicts them like others."""

    image_of = "a priority that the eviction reads only after it has chosen"
    caught_by = "test_promised_pages_stay_while_others_are_evicted"

    def promised(self, handle: Handle) -> set[str]:
        del handle
        return set()


class ClippedSilently(MemoryMutant):
    """Answers that all pages of a put are promised, whatever fits."""

    image_of = "a pin call that returns success when the budget is spent"
    caught_by = "test_promises_leave_room_for_other_pages"
    raises = "Failed"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        result = super().run(handle, batch)
        if not batch.keep_until or batch.operation is not Operation.PUT:
            return result
        return attrs.evolve(result, kept=np.ones(len(batch), np.bool_))


class PinsWithoutBudget(MemoryMutant):
    """Promises everything that it is asked for."""

    image_of = "hard pins that fill the store, so that it stores nothing any more"
    caught_by = "test_promises_leave_room_for_other_pages"

    def promises(self, handle: Handle, key: str) -> bool:
        del handle, key
        return True


class ExpiredIsFound(MemoryMutant):
    """Looks up keys without their times, and loads none after them."""

    image_of = "a lookup that counts what the load then misses, at each request"
    caught_by = "test_pages_are_not_served_after_their_time"

    def exists(self, handle: Handle, key: str) -> Outcome:
        there = handle.shelf.read(key) is not None
        return Outcome.OK if there else Outcome.ABSENT


class ClockSetBack(MemoryMutant):
    """Compares with a clock that may be set back."""

    image_of = "a page that NTP brings back after its time"
    caught_by = "test_a_clock_that_is_set_back_brings_no_page_back"

    def clock(self) -> float:
        return time.time()


class ExpiredStaysStored(MemoryMutant):
    """Deletes a key from its index and keeps the object that a put then finds."""

    image_of = "a put that succeeds without a write, because the old object is there"
    caught_by = "test_pages_that_expire_by_trailers_make_room_for_new_ones"
    retention = Support.EMULATED

    def __init__(self) -> None:
        super().__init__()
        self.deleted: set[str] = set()

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        key = batch.keys[row]
        if batch.operation is Operation.DELETE:
            self.deleted.add(key)
            return Outcome.OK
        if batch.operation is Operation.PUT and key in self.deleted:
            self.deleted.discard(key)
            return Outcome.OK
        if key in self.deleted:
            return Outcome.ABSENT
        return super().step(handle, batch, row)


class WishCalledPromise(MemoryMutant):
    """Takes a wish for a promise, and evicts as it likes."""

    image_of = "a soft pin that is reported as a pin"
    caught_by = "test_a_wish_to_be_kept_is_stored_and_is_no_promise"
    retention = Support.EMULATED

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        result = super().run(handle, batch)
        if not batch.keep_until or batch.operation is not Operation.PUT:
            return result
        return attrs.evolve(result, kept=np.ones(len(batch), np.bool_))


class PutTakesTheTimeAway(MemoryMutant):
    """Writes the times of a batch also where it has none."""

    image_of = "SET without EX: the old time to live is gone"
    caught_by = "test_an_expiry_stays_where_a_call_says_no_time"

    def retain(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        if batch.operation is Operation.PUT and batch.expire_at is None:
            handle.times.pop(batch.keys[row], None)
        return super().retain(handle, batch, row)


class RetainTakesTheTimeAway(MemoryMutant):
    """Lets a promise replace an expiry."""

    image_of = "a lease with one time for both: what is kept longer is served longer"
    caught_by = "test_an_expiry_stays_where_a_call_says_no_time"

    def retain(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        if batch.operation is Operation.RETAIN and batch.expire_at is None:
            handle.times.pop(batch.keys[row], None)
        return super().retain(handle, batch, row)


class ExpiryNotTold(MemoryMutant):
    """Loads pages without their times, so that a copy of them has none."""

    image_of = "a copy between tiers that is served for ever"
    caught_by = "test_a_load_tells_when_its_pages_expire"

    def told(self, handle: Handle, batch: Batch) -> Int64Array | None:
        del handle, batch
        return None


class TimesNotTold(MemoryMutant):
    """Answers who asks for times with what it has stored alone."""

    image_of = "a TTL command that says whether there is a key"
    caught_by = "test_times_are_told_to_who_asks_for_nothing"

    def all_told(
        self, handle: Handle, batch: Batch, result: BatchResult
    ) -> BatchResult:
        del handle, batch
        return result


class MaximalAgeIgnored(MemoryMutant):
    """Knows the times of pages, and none for those that say none."""

    image_of = "segments: max_age_s was tried by no test"
    caught_by = "test_pages_of_the_maximal_age_are_not_served"

    def end_of(self, handle: Handle, key: str) -> float:
        return handle.times.get(key, (0, 0))[1]


class ExpiredBytesStay(FolderMutant):
    """Serves nothing after its time, and leaves the bytes on the disk."""

    image_of = "a key that is only hidden: its blob waits for a compaction"
    caught_by = "test_bytes_are_gone_soon_after_their_time"
    retention = Support.NATIVE

    def erase(self, handle: Handle) -> None:
        del handle


class ServedAfterItsTime(MemoryMutant):
    """Looks at times in look-ups, and loads whatever is stored."""

    image_of = "an expiry that the index knows and the read does not"
    caught_by = "test_pages_are_not_served_after_their_time"

    def get(self, handle: Handle, key: str, nbytes: int) -> tuple[Outcome, bytes]:
        times = handle.times.pop(key, None)
        found = super().get(handle, key, nbytes)
        if times is not None:
            handle.times[key] = times
        return found


class UseIgnored(MemoryMutant):
    """Takes notes of use and evicts in the order of the puts."""

    image_of = "a store that counts loads alone evicts the system prompt first"
    caught_by = "test_pages_that_an_engine_uses_stay_while_others_are_evicted"

    def touch(self, handle: Handle, keys: Sequence[str]) -> None:
        """Do nothing."""


class UseMakesPages(MemoryMutant):
    """Makes an entry for each key that is used, stored or not."""

    image_of = "an LRU map that is filled on use: keys without bytes are found"
    caught_by = "test_use_of_pages_that_are_not_there_counts_for_nothing"

    def touch(self, handle: Handle, keys: Sequence[str]) -> None:
        """Make entries."""
        for key in keys:
            if handle.shelf.read(key) is None:
                handle.shelf.write(key, sealed(key, b""))


class RemovalsRepeated(MemoryMutant):
    """Reports a removed key at each call."""

    image_of = "a router drops pages that an engine has stored again meanwhile"
    caught_by = "test_removed_pages_are_reported_once_and_others_never"

    def removed(self, handle: Handle, limit: int) -> Sequence[str]:
        """Forget nothing."""
        handle.track_limit = limit
        return [key for key in handle.tracked if handle.shelf.read(key) is None]


class TrackedWithoutLimit(MemoryMutant):
    """Keeps every key that it has ever stored."""

    image_of = "a list of stored blocks that grows until the engine is killed"
    caught_by = "test_no_more_pages_are_tracked_than_were_asked_for"

    def track(self, handle: Handle, key: str) -> None:
        if handle.track_limit:
            handle.tracked[key] = None


class RoomOfOnePool(MemoryMutant):
    """Counts what one pool has stored, and calls it the store's."""

    image_of = "a gauge per pool: full disks that look half empty"
    caught_by = "test_room_that_is_reported_is_that_of_all_pools_of_a_store"

    def capacity(self, handle: Handle) -> Capacity:
        """Count what this handle keeps track of."""
        blobs = [handle.shelf.read(key) for key in handle.tracked]
        return Capacity(sum(len(blob) for blob in blobs if blob), handle.quota_bytes)

"""Mutants of what is noted of use, and of what is reported."""

from __future__ import annotations

from typing import TYPE_CHECKING

from reference import sealed

from kvdock.capacity import Capacity
from mutants.mutant import MemoryMutant

if TYPE_CHECKING:
    from collections.abc import Sequence

    from reference import Handle


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

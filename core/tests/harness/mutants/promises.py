"""Mutants that promise what they do not keep, or misbehave as guests."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

import attrs
from reference import (
    CHECK_BYTES,
    DictShelf,
    FolderShelf,
    Handle,
    ReferenceSettings,
    Shelf,
    sealed,
)

from kvdock.batch import Batch, BatchResult, MemoryHold, Operation, Outcome
from kvdock.capacity import Capacity
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.manifest import Manifest, Scope
from mutants.mutant import FolderMutant, MemoryMutant

if TYPE_CHECKING:
    from kvdock.geometry.region import Region
    from kvdock.plugin.hookspecs import AttachConfig
    from kvdock.pools.spec import PoolSpec


PART_BYTES = 4 << 20
TURN_S = 0.6
LATE_S = 4.0
"""More than a call may take that has nearly no time."""
EXPIRES_S = 1.5
VISIBLE_S = 3.0
MOST_DELETED = 256
LISTED = 1000


class WaitsItsTurn(MemoryMutant):
    """Ends in time when alone, and queues behind all others when not."""

    image_of = "one connection for all threads, taken without a timeout"
    caught_by = "test_a_call_ends_by_its_deadline_beside_others_that_have_time"

    def __init__(self) -> None:
        super().__init__()
        self.queue: deque[threading.Lock] = deque()

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        mine = threading.Lock()
        with mine:
            self.queue.append(mine)
            for before in list(self.queue)[: self.queue.index(mine)]:
                with before:
                    pass
            if len(self.queue) > 1:
                time.sleep(TURN_S if batch.remaining_s() > TURN_S else LATE_S)
            result = super().run(handle, batch)
            self.queue.remove(mine)
        return result


class NeverReturns(MemoryMutant):
    """Waits for ever once the time is over."""

    image_of = "a wait on an event that nothing sets after a cancelled transfer"
    caught_by = "test_a_call_ends_by_its_deadline"
    raises = "DidNotReturn"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if batch.remaining_s() <= 0:
            threading.Event().wait()
        return super().run(handle, batch)


class DeletesTheFirst(MemoryMutant):
    """Deletes the first 256 keys of a batch and says OK to all."""

    image_of = "S3: DeleteObjects takes 1000 keys, and the rest stays"
    caught_by = "test_more_pages_are_deleted_than_one_batch_takes"

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        if batch.operation is Operation.DELETE and row >= MOST_DELETED:
            return Outcome.OK
        return super().step(handle, batch, row)


@attrs.frozen(eq=False)
class _ExpiringShelf(FolderShelf):
    """Blobs that are gone when they are too old."""

    most_s: float = EXPIRES_S

    def read(self, key: str) -> bytes | None:
        blob = super().read(key)
        if blob is None or time.time() - self.path(key).stat().st_mtime > self.most_s:
            return None
        return blob


class VanishesSoon(FolderMutant):
    """Declares that it evicts nothing, and forgets what is a moment old."""

    image_of = "a cache with a time to live that the manifest does not mention"
    caught_by = "test_pages_stay_where_nothing_is_evicted"

    folder = _ExpiringShelf


@attrs.frozen(eq=False)
class _LateShelf(FolderShelf):
    """Blobs of others that are seen when they are old enough."""

    own: set[str] = attrs.field(factory=set)

    def read(self, key: str) -> bytes | None:
        blob = super().read(key)
        if blob is None or key in self.own:
            return blob
        age_s = time.time() - self.path(key).stat().st_mtime
        return blob if age_s > VISIBLE_S else None

    def write(self, key: str, blob: bytes) -> None:
        self.own.add(key)
        super().write(key, blob)


class VisibleLate(FolderMutant):
    """Shows a page at once to the handle that stored it, and late to others."""

    image_of = "a listing that is cached for seconds: only the writer finds the page"
    caught_by = "test_two_handles_find_each_others_pages"

    folder = _LateShelf


class ForgetsAtTheEnd(MemoryMutant):
    """Declares that pages outlive the process."""

    image_of = "a lying capability: durability"
    caught_by = "test_pages_outlive_the_process_that_stored_them"
    durability = Scope.HOST


class SharesNothing(MemoryMutant):
    """Declares sharing and opens a store for each handle."""

    image_of = "a lying capability: sharing; the hf3fs index lives in one client's RAM"
    caught_by = "test_two_handles_find_each_others_pages"

    def open_shelf(self, settings: ReferenceSettings) -> Shelf:
        del settings
        return DictShelf()


class LargeObjectRefused(MemoryMutant):
    """Declares objects of a mebibyte and takes half of that."""

    image_of = "a lying limit: max_object_bytes"
    caught_by = "test_an_object_of_the_largest_size_is_kept"

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        if len(data) > 1 << 19:
            return Outcome.REFUSED
        return super().put(handle, key, data)


class LargeObjectTorn(MemoryMutant):
    """Declares no limit and loses the end of what takes more than one part."""

    image_of = "a library that sends parts of 4 MiB and forgets the last one"
    caught_by = "test_objects_of_many_mebibytes_come_back"

    def manifest(self) -> Manifest:
        return attrs.evolve(super().manifest(), max_object_bytes=0)

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        whole = len(data) - len(data) % PART_BYTES if len(data) > PART_BYTES else None
        return super().put(handle, key, data[:whole].ljust(len(data), b"\0"))


class AnyMemoryTaken(MemoryMutant):
    """Declares that memory is registered and touches any."""

    image_of = "mooncake over TCP: unregistered ranges work, and corrupt on RDMA"
    caught_by = "test_memory_is_taken_as_registration_is_declared"

    def registered(self, handle: Handle, batch: Batch, row: int) -> bool:
        del handle, batch, row
        return True


class ChildIsLost(MemoryMutant):
    """Declares fork safety, and its client knows one process."""

    image_of = "mooncake: a forked child hangs or fails"
    caught_by = "test_a_forked_child_meets_what_is_declared"

    def __init__(self) -> None:
        super().__init__()
        self.home = os.getpid()

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if os.getpid() != self.home:
            return BatchResult.all(batch, Outcome.UNAVAILABLE)
        return super().run(handle, batch)


class ClearsInSecret(MemoryMutant):
    """Declares no clear and obeys it."""

    image_of = "a lying capability: clear_reach"
    caught_by = "test_a_clear_that_is_not_declared_is_refused"

    def manifest(self) -> Manifest:
        return attrs.evolve(super().manifest(), clear_reach=Scope.NONE)


class SignalsTaken(MemoryMutant):
    """Replaces the engine's signal handlers with its own."""

    image_of = "B9: SIGINT, SIGTERM, SIGQUIT close the client and nothing else"
    caught_by = "test_signal_handlers_stay_the_hosts"

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> Handle:
        signal.signal(signal.SIGTERM, self._close)
        return super().kvdock_register_pool(pool, region, config)

    def _close(self, *_: object) -> None:
        self.shelves.clear()


class DescriptorsLeft(MemoryMutant):
    """Opens something for each attachment and closes nothing."""

    image_of = "close() is a no-op in SGLang's mooncake store"
    caught_by = "test_no_descriptor_or_thread_is_left_behind"

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> Handle:
        os.dup(2)
        return super().kvdock_register_pool(pool, region, config)


class HoldsForGood(MemoryMutant):
    """Holds the memory of what it could not read, and never releases it."""

    image_of = "mooncake: a transfer that was given up still queues on its lanes"
    caught_by = "test_memory_that_is_held_after_a_call_is_free_after_the_release"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        result = super().run(handle, batch)
        if batch.operation is not Operation.GET or result.ok.all():
            return result
        return attrs.evolve(result, hold=MemoryHold())


class ThreadsLeft(MemoryMutant):
    """Starts a worker for each attachment and joins none."""

    image_of = "metadata pollers that outlive their backend"
    caught_by = "test_no_descriptor_or_thread_is_left_behind"

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> Handle:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        return super().kvdock_register_pool(pool, region, config)


class MemoryKept(MemoryMutant):
    """Keeps the engine's memory after the release."""

    image_of = "regions are never deregistered: host memory is never given back"
    caught_by = "test_no_reference_to_the_callers_memory_is_kept"

    def __init__(self) -> None:
        super().__init__()
        self.regions: list[Region] = []

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> Handle:
        self.regions.append(region)
        return super().kvdock_register_pool(pool, region, config)


class ReleaseClosesAll(MemoryMutant):
    """Closes the client that all pools share with the first of them."""

    image_of = "one pool's close takes the client of the others"
    caught_by = "test_releasing_one_pool_leaves_the_others_alone"

    def __init__(self) -> None:
        super().__init__()
        self.closed = False

    def close(self, handle: Handle) -> None:
        """Close the client."""
        del handle
        self.closed = True

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if self.closed:
            return BatchResult.all(batch, Outcome.UNAVAILABLE)
        return super().run(handle, batch)


class LogicalAnchorDivides(MemoryMutant):
    """Divides by the bytes of a page."""

    image_of = "DeepSeek V4's logical anchor: ZeroDivisionError in hf3fs"
    caught_by = "test_a_logical_anchor_marks_pages_without_bytes"
    raises = "ZeroDivisionError"

    def run(self, handle: Handle, batch: Batch) -> BatchResult:
        if batch.operation is Operation.PUT and len(batch):
            _slots = (1 << 20) // int(batch.object_bytes[0])
        return super().run(handle, batch)


class FolderThatForgets(FolderMutant):
    """Drops on release what only this process has seen."""

    image_of = "an index that is written every 60 s and lost with its process"
    caught_by = "test_pages_outlive_the_process_that_stored_them"

    def close(self, handle: Handle) -> None:
        """Clean up too well."""
        for key in handle.shelf.names():
            handle.shelf.remove(key)


class WrittenOnRelease(FolderMutant):
    """Keeps pages in memory and writes them on release."""

    image_of = "an index that reaches the disk on close(), and no close() came"
    caught_by = "test_pages_outlive_a_process_that_is_killed"

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[object, DictShelf] = {}

    def open_shelf(self, settings: ReferenceSettings) -> Shelf:
        folder = super().open_shelf(settings)
        if settings.root not in self.kept:
            blobs = {key: folder.read(key) or b"" for key in folder.names()}
            self.kept[settings.root] = _Late(blobs, folder=folder)
        return self.kept[settings.root]

    def close(self, handle: Handle) -> None:
        """Write at last."""
        late = handle.shelf
        assert isinstance(late, _Late)
        for key in set(late.folder.names()) - set(late.names()):
            late.folder.remove(key)
        for key in late.names():
            late.folder.write(key, late.read(key) or b"")


@attrs.define(eq=False)
class _Late(DictShelf):
    """Blobs of this process, and the folder that they belong into."""

    folder: Shelf = attrs.field(kw_only=True)


@attrs.frozen(eq=False)
class _FaultyShelf(FolderShelf):
    """Blobs that cannot be written once so many writes of a part have failed."""

    part: str
    most: int
    in_a_row: bool = attrs.field(default=False, kw_only=True)
    failed: list[str] = attrs.field(factory=list)

    def begin_write(self, part: str, place: str) -> None:
        if len(self.failed) >= self.most:
            raise OSError(errno.EIO, "nothing is free")
        try:
            super().begin_write(part, place)
        except OSError:
            if part == self.part:
                self.failed.append(place)
            raise
        if self.in_a_row and part == self.part:
            self.failed.clear()


class NothingAfterAFailedWrite(FolderMutant):
    """Takes no more pages once a write has failed."""

    image_of = "a store that is read-only for good after one error of its disk"
    caught_by = "test_puts_come_back_after_writes_that_failed_now_and_then"

    folder = staticmethod(partial(_FaultyShelf, part="data", most=1))


class ClaimsAreKept(FolderMutant):
    """Keeps something claimed with each write of its index that fails."""

    image_of = "segments: 13 failed index writes in eviction, and nothing is stored"
    caught_by = "test_puts_come_back_after_writes_that_failed_now_and_then"

    folder = staticmethod(partial(_FaultyShelf, part="index", most=13))


class GivesUpAfterARow(FolderMutant):
    """Writes nothing any more once three writes in a row have failed."""

    image_of = "segments: in a full store nothing was evicted after a disk had failed"
    caught_by = "test_puts_come_back_after_writes_that_failed_now_and_then"

    folder = staticmethod(partial(_FaultyShelf, part="index", most=3, in_a_row=True))


@attrs.frozen(eq=False)
class _NumberedShelf(FolderShelf):
    """Blobs whose next place is free until it was written."""

    part: str
    written: list[str] = attrs.field(factory=list)

    def begin_write(self, part: str, place: str) -> None:
        mine = part == self.part
        super().begin_write(part, str(len(self.written)) if mine else place)
        if mine:
            self.written.append(place)


class TheSamePlaceAgain(FolderMutant):
    """Takes the lowest free place for each object, also if it has just failed."""

    image_of = "segments: failed slots went back to the free list, sorted"
    caught_by = "test_one_place_that_always_fails_leaves_the_others_in_use"

    folder = staticmethod(partial(_NumberedShelf, part="data"))


class TheSameRecordAgain(FolderMutant):
    """Writes the first free record of its index, also if it has just failed."""

    image_of = "segments: an index that cannot be written was never left"
    caught_by = "test_one_place_that_always_fails_leaves_the_others_in_use"

    folder = staticmethod(partial(_NumberedShelf, part="index"))


class ClearsWhileOthersWrite(MemoryMutant):
    """Iterates over its index to clear it while other threads change it."""

    image_of = "a dict that changes size during iteration: clear() raises"
    caught_by = "test_a_clear_beside_other_calls_breaks_none_of_them"
    raises = "RuntimeError"

    def clear(self, handle: Handle, prefix: str) -> Outcome:
        assert isinstance(handle.shelf, DictShelf)
        gone = []
        for key in handle.shelf.blobs:
            time.sleep(0)  # as reading a file's head would, it lets others in
            if key.startswith(prefix):
                gone.append(key)
        for key in gone:
            handle.shelf.remove(key)
        return Outcome.OK


class ClearsTheFirstThousand(MemoryMutant):
    """Clears what one listing of its names returns."""

    image_of = "S3: a listing has 1000 keys, and the next page is never asked for"
    caught_by = "test_a_clear_forgets_thousands_of_pages"

    def clear(self, handle: Handle, prefix: str) -> Outcome:
        for key in list(handle.shelf.names())[:LISTED]:
            if key.startswith(prefix):
                handle.shelf.remove(key)
        return Outcome.OK


class EvictsTheRound(MemoryMutant):
    """Drops all that it has when it is full, and refuses what it was asked for."""

    image_of = "a cache that is flushed when an upload does not fit"
    caught_by = "test_a_full_store_loses_nothing_that_it_called_ok"

    def room(self, handle: Handle, nbytes: int) -> bool:
        quota = handle.quota_bytes
        if not quota or handle.shelf.used() + nbytes <= quota:
            return True
        for key in list(handle.shelf.names()):
            if key not in self.promised(handle):
                handle.shelf.remove(key)
        return False


class EvictsItsOwnRound(MemoryMutant):
    """Makes room for the pages of a batch with the pages before them."""

    image_of = "most recently used first: a round of puts is OK, and one of it is there"
    caught_by = "test_a_full_store_loses_nothing_that_it_called_ok"

    def room(self, handle: Handle, nbytes: int) -> bool:
        while handle.quota_bytes and handle.shelf.used() + nbytes > handle.quota_bytes:
            promised = self.promised(handle)
            keys = [key for key in handle.shelf.names() if key not in promised]
            if not keys:
                return False
            handle.shelf.remove(keys[-1])
        return True


class CapacityOfTheDisk(MemoryMutant):
    """Reports the size of the disk as what its pages may take."""

    image_of = "statvfs under a quota: a full store is a thousandth full"
    caught_by = "test_a_full_store_loses_nothing_that_it_called_ok"

    def capacity(self, handle: Handle) -> Capacity:
        """Count right, and report another limit."""
        return Capacity(handle.shelf.used(), 1 << 40)


class LimitOfTheProtocol(MemoryMutant):
    """Declares the 512 MiB of a protocol, and its server takes 20."""

    image_of = "a lying limit: proto-max-bulk-len is one thing, maxmemory another"
    caught_by = "test_an_object_of_the_largest_size_is_kept"

    def manifest(self) -> Manifest:
        return attrs.evolve(super().manifest(), max_object_bytes=512 << 20)

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        if len(data) > 20 << 20:
            return Outcome.REFUSED
        return super().put(handle, key, data)


class RemembersAbsence(FolderMutant):
    """Remembers for each handle which keys were not there."""

    image_of = "a negative cache per handle: what another one stores is never found"
    caught_by = "test_a_page_that_was_missing_is_found_once_another_handle_stored_it"

    def __init__(self) -> None:
        super().__init__()
        self.absent: set[tuple[int, str]] = set()

    def step(self, handle: Handle, batch: Batch, row: int) -> Outcome:
        mine = id(handle), batch.keys[row]
        asks = batch.operation in (Operation.EXISTS, Operation.GET)
        if asks and mine in self.absent:
            return Outcome.ABSENT
        outcome = super().step(handle, batch, row)
        self.absent.discard(mine)
        if asks and outcome is Outcome.ABSENT:
            self.absent.add(mine)
        return outcome


class ChecksThenSets(FolderMutant):
    """Looks whether a key is there, and writes it part by part some time later."""

    image_of = "EXISTS and then SET of each part: two writers mix their parts"
    caught_by = "test_of_two_that_store_a_key_at_once_one_is_kept"

    def put(self, handle: Handle, key: str, data: bytes) -> Outcome:
        limit = self.manifest().max_object_bytes
        if len(data) > limit:
            return Outcome.REFUSED
        if self.get(handle, key, len(data))[0] is Outcome.OK:
            return Outcome.OK
        half = len(data) // 2
        for part in (slice(0, half), slice(half, None)):
            time.sleep(0.001 + data[-1] * 2e-5)  # as fast as the network is just now
            there = (handle.shelf.read(key) or sealed(key, data))[CHECK_BYTES:]
            mixed = bytearray(there)
            mixed[part] = data[part]
            handle.shelf.write(key, sealed(key, bytes(mixed)))
        return Outcome.OK


class VanishesLater(FolderMutant):
    """Declares that it evicts nothing, and forgets what is some seconds old."""

    image_of = "a default expiry of the server: a page is gone after ten seconds"
    caught_by = "test_pages_stay_where_nothing_is_evicted"
    stays_s = 5.0

    folder = staticmethod(partial(_ExpiringShelf, most_s=4.0))

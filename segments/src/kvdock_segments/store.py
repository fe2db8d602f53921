"""A store of one pool in one namespace: the handle of a backend on segments."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.batch import Batch, BatchResult, Operation, Outcome
from kvdock.capacity import Capacity, TenantUse
from kvdock.closing import ClosedAfterUse
from kvdock.errors import KvdockError
from kvdock.throttled_log import ThrottledLog, at_powers_of_two
from kvdock_segments import paths
from kvdock_segments.allocator import SegmentAllocator
from kvdock_segments.catalog import Catalog, LookupResult
from kvdock_segments.cleanup import clear_namespace
from kvdock_segments.elsewhere import Elsewhere
from kvdock_segments.eviction import OtherPools
from kvdock_segments.io import slot_bytes_of
from kvdock_segments.ledger import Ledger
from kvdock_segments.limits import check_quota
from kvdock_segments.namespace_files import keep_files, remove_damaged
from kvdock_segments.paths import OUT_OF_FILES
from kvdock_segments.quick import QuickWay
from kvdock_segments.reader import Reader
from kvdock_segments.retention import Retainer
from kvdock_segments.room import Room
from kvdock_segments.settings import SegmentSettings
from kvdock_segments.tracked_keys import TrackedKeys
from kvdock_segments.upkeep import Upkeep
from kvdock_segments.usage import NamespaceUsage
from kvdock_segments.walk import namespace_of
from kvdock_segments.writer import Writer

if TYPE_CHECKING:
    from kvdock.arrays import BoolArray, Int64Array
    from kvdock_segments.io import IOEngine
    from kvdock_segments.limits import StoreLocation

log = logging.getLogger("kvdock_segments")

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_LOOK_S = 1.0
"""Seconds between two looks at whether the root is still where it was."""


@attrs.frozen(kw_only=True)
class Usage:
    """Contents and disk usage of a store.

    Args:
        pages: Objects of this pool that this process knows.
        page_bytes: Bytes of those objects.
        pool_bytes: Bytes of the segments of this pool, full or not.
        namespace_bytes: Bytes of all segments of the namespace.
        quota_bytes: Maximum bytes of the namespace; 0 for no quota.
        free_bytes: Free space of the file system.
        index_bytes: Memory of the resident index.
        failed_slots: Slots of this pool that could not be written and are set aside.
        open_files: Files of pages that are open.
        counts: Counters of events since the store was opened, by name.
    """

    pages: int = 0
    page_bytes: int = 0
    pool_bytes: int = 0
    namespace_bytes: int = 0
    quota_bytes: int = 0
    free_bytes: int = 0
    index_bytes: int = 0
    failed_slots: int = 0
    open_files: int = 0
    counts: Mapping[str, int]


class SegmentStore(ClosedAfterUse):
    """Objects of one pool of one namespace, under a root directory.

    Any number of stores, in any number of processes, may be open on the same
    root. Safe to use from several threads, and in a forked child.

    Args:
        engine: Moves their bytes; closed with the store.
        settings: Of the space that the namespace takes; nothing limits it without them.
        shrinks: Whether pages are deleted where the namespace takes more than its quota
            when it is opened. A command that looks at a store deletes nothing.

    Raises:
        KvdockError: If the root or the namespace cannot be trusted, or the quota is
            smaller than one object. Not if the disk is full: then nothing
            is stored until there is room.
    """

    def __init__(
        self,
        place: StoreLocation,
        engine: IOEngine,
        settings: SegmentSettings | None = None,
        *,
        shrinks: bool = True,
    ) -> None:
        self.place = place
        self._shrinks = shrinks
        self.counts: Counter[str] = Counter()
        self._engine = engine
        self._settings = settings or SegmentSettings(place.root, free_space=0)
        self._forking = threading.Lock()
        self._failures = ThrottledLog(log, at_powers_of_two)
        self._tracked = TrackedKeys()
        self._namespace_fd = -1
        self._awaits_room = self._deleted = False
        self._opening: dict[int, threading.Lock] = {}
        paths.check_namespace(place.namespace)
        for size in place.object_bytes:
            for quota in (self._settings.quota, self._settings.root_quota):
                check_quota(quota, size, slot_bytes_of(engine, size))
        try:
            self._open()
        except (OSError, KvdockError) as error:
            if _lacks_room(error):
                self._awaits_room = True
                self._log_no_room(error)
                return
            if isinstance(error, KvdockError):
                raise
            raise KvdockError(
                f"namespace {place.namespace[:12]} of store {str(place.root)!r} cannot "
                f"be opened: {error.strerror or error} ({error.filename})",
                fix="Let this user write there, free some space, and move away files "
                "that do not belong to the store.",
            ) from error

    def _open(self) -> None:
        place = self.place
        others = Elsewhere(place.root, place.namespace, self.counts)
        while True:
            try:
                return self._open_once()
            except (OSError, KvdockError) as error:
                # Which tenant may lose what is known once the store is open.
                may_evict = _lacks_room(error) and not place.tenants.rooms
                if not (may_evict and others.evict_segment()):
                    raise

    def _open_once(self) -> None:
        self._namespace_fd = self._open_namespace()
        try:
            self._begin()
        except BaseException:
            fd, self._namespace_fd = self._namespace_fd, -1
            os.close(fd)
            raise

    def _open_late(self) -> bool:
        """Open what a full disk had no room for; return whether it is open."""
        # A forked child does not have the thread that may hold its parent's lock.
        with self._opening.setdefault(os.getpid(), threading.Lock()):
            if self._awaits_room:
                try:
                    self._open()
                except (OSError, KvdockError) as error:
                    self._log_no_room(error)
                    return False
                self._awaits_room = False
                log.warning("store %s has room again: it is opened", self.place.root)
        return True

    def _log_no_room(self, error: Exception) -> None:
        self.counts["open_failed"] += 1
        self._failures.warning(
            "no room",
            f"store {self.place.root} keeps nothing of namespace "
            f"{self.place.namespace[:12]} until there is room: {error}",
        )

    def _open_namespace(self) -> int:
        place = self.place
        root_fd = paths.open_root(place.root, shared=place.shared)
        exposed = None if place.shared else paths.find_exposed_parent(place.root)
        if exposed:
            log.warning(
                "store %s can be replaced by other users: everyone may write %s, "
                "which has no sticky bit",
                place.root,
                exposed,
            )
        with paths.closing_fd(root_fd):
            fd = paths.open_namespace(root_fd, place.namespace, place.record)
        try:
            keep_files(fd, place.namespace, place.record, place.liveness)
            Ledger(fd, place.liveness).recount()
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _begin(self) -> None:
        """Read the store, at the start and again in a forked child."""
        self._reopening = threading.Lock()
        self._look_at_s = time.monotonic() + _LOOK_S
        self._catalog = Catalog(
            self._namespace_fd,
            self.place,
            self._engine,
            self.counts,
            self._settings.open_files,
        )
        usage = NamespaceUsage(self._namespace_fd, self.place.liveness)
        catalog, place, room = self._catalog, self.place, None
        count = catalog.index.tenants
        elsewhere = Elsewhere(
            place.root,
            place.namespace,
            self.counts,
            count.listed if count else (),
            catalog.folders,
        )
        if count:
            room = Room(place.namespace, place.tenants, count, catalog.lock, elsewhere)
        self._allocator = SegmentAllocator(
            self.place,
            self._namespace_fd,
            self._settings,
            catalog,
            usage,
            OtherPools(usage, self.counts, room),
            self._engine,
            self._failures,
            elsewhere,
            room,
        )
        self._reader = Reader(self._catalog, self._engine)
        self._retainer = Retainer(self._catalog, self._allocator)
        self._writer = Writer(
            self._catalog, self._allocator, self._engine, self._retainer
        )
        self._quick = QuickWay(self._catalog, self._writer, self._engine)
        self._pid = os.getpid()
        self._upkeep = Upkeep(catalog, self._allocator, self._retainer)
        folder = next(iter(catalog.folders.values()), None) if self._shrinks else None
        above = folder is not None and self._allocator.check_quota(folder)
        if above or catalog.index.timed:
            self._upkeep.begin()

    def run(self, batch: Batch) -> BatchResult:
        """Run one batch.

        Called from any thread, several at a time.

        Returns:
            One outcome per key, in the order of the keys; ERROR for all of them if
            the store cannot be read.
        """
        try:
            if self._awaits_room and not self._open_late():
                return self._run_without_room(batch)
            if os.getpid() != self._pid:
                self._check_fork()
            result = self._run(batch)
        except OSError as error:
            failure = error
        else:
            if self._catalog.index.timed:  # also where no call follows
                self._upkeep.begin()
            return result
        if failure.errno in OUT_OF_FILES and self._catalog.files.close_idle():
            with suppress(OSError):
                return self._run(batch)
        if failure.errno in _NO_ROOM and batch.operation is Operation.PUT:
            return _full(batch)
        self.counts["batches_failed"] += 1
        self._failures.warning(
            "unusable", f"store {self.place.root} cannot be used: {failure}"
        )
        return BatchResult.all(batch, Outcome.ERROR)

    def _run(self, batch: Batch) -> BatchResult:
        if self._catalog.gone() or time.monotonic() >= self._look_at_s:
            self._check_gone()
        match batch.operation:
            case Operation.GET:
                result = self._quick.get(batch) or self._reader.get(batch)
                return self._with_loss(result) if self._deleted else result
            case Operation.EXISTS:
                result = self._reader.exists(batch)
                return self._with_loss(result) if self._deleted else result
            case Operation.PUT:
                refused = self.counts.get("segments_refused", 0)
                result = self._quick.put(batch) or self._writer.put(batch)
                if self.counts.get("segments_refused", 0) > refused:
                    result = attrs.evolve(result, cause="full")
                if self._tracked.limit:
                    self._track(batch, result)
                return result
            case _:
                return self._run_rarely(batch)

    def _with_loss(self, result: BatchResult) -> BatchResult:
        """Say in one answer that all that was stored has been deleted."""
        self._deleted = False
        return attrs.evolve(result, cause="deleted")

    def _run_rarely(self, batch: Batch) -> BatchResult:
        match batch.operation:
            case Operation.DELETE:
                return self._delete(batch)
            case Operation.CLEAR:
                return self._clear(batch)
            case Operation.RETAIN:
                return self._retainer.retain(batch)
            case _:
                return BatchResult.all(batch, Outcome.REFUSED)

    def _run_without_room(self, batch: Batch) -> BatchResult:
        """Answer for a namespace or a pool that no folder could be made for."""
        match batch.operation:
            case Operation.PUT:
                return _full(batch)
            case Operation.SEND:
                return BatchResult.all(batch, Outcome.REFUSED)
            case Operation.EXISTS | Operation.GET | Operation.RETAIN:
                return BatchResult.all(batch, Outcome.ABSENT)
            case Operation.DELETE:
                return BatchResult.all(batch, Outcome.OK)
            case Operation.CLEAR:
                # Its other pools may be there: what they give back is room.
                place = self.place
                with (
                    suppress(KvdockError),
                    namespace_of(
                        place.root, place.namespace, shared=place.shared
                    ) as fd,
                ):
                    clear_namespace(fd)
                return _cleared(batch, f"{self.place.namespace}/")

    def _check_fork(self) -> None:
        if os.getpid() == self._pid:
            return
        with self._forking:
            if os.getpid() != self._pid:
                # Threads, locks and claims belong to the parent: open everything again.
                self._catalog.close_after_fork()
                self._failures = ThrottledLog(log, at_powers_of_two)
                self._tracked = TrackedKeys()
                self._begin()

    def _check_gone(self) -> None:
        """Create folders again that were deleted, or log why that fails."""
        moved = self._was_moved()
        if not (self._catalog.gone() or moved):
            return
        root = self.place.root
        with self._reopening:
            # Another thread may have done it.
            moved = moved and self._lies_elsewhere()
            if not (self._catalog.gone() or moved):
                return
            try:
                if moved or paths.is_gone(self._namespace_fd):
                    paths.replace_folder(self._namespace_fd, self._open_namespace())
                self._catalog.recreate_folders(moved=moved)
                self.counts["reopened"] += 1
                self._deleted = True
                log.warning(
                    "store %s was %s in use: it is created again%s",
                    root,
                    "renamed or replaced" if moved else "deleted",
                    ", and what it held is not found any more" if moved else "",
                )
            except (OSError, KvdockError) as error:
                self.counts["reopen_failed"] += 1
                self._failures.warning(
                    "deleted", f"deleted store {root} cannot be created: {error}"
                )

    def _was_moved(self) -> bool:
        """Return whether the root has another place now; looks once a second."""
        now_s = time.monotonic()
        if now_s < self._look_at_s:
            return False
        self._look_at_s = now_s + _LOOK_S
        return self._lies_elsewhere()

    def _lies_elsewhere(self) -> bool:
        """Return whether the name of the namespace is not the folder that is open."""
        place = self.place
        mine = os.fstat(self._namespace_fd)
        try:
            there = (place.root / place.namespace).stat()
        except (FileNotFoundError, NotADirectoryError):
            return True
        except OSError:
            return False  # it cannot be looked at now
        return (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino)

    def _delete(self, batch: Batch) -> BatchResult:
        # A segment that became full has another name: the lookup has to find it there.
        looked_up = self._catalog.lookup_durable(batch.keys, newest=True)
        every, index = [looked_up], self._catalog.index
        if index.doubled or index.timed:
            every.append(self._catalog.copies_of(looked_up, with_expired=True))
        outcomes = np.zeros(len(batch), np.uint8)
        for found in every:
            if index.timed:
                self._retainer.erase_timed(found)
            outcomes[self._delete_found(found)] = Outcome.REFUSED
        return BatchResult.of(batch, outcomes)

    def _delete_found(self, found: LookupResult) -> Int64Array:
        """Delete records in all processes; return the positions of those that stay."""
        catalog, stay = self._catalog, np.zeros(len(found.there), np.bool_)
        for number in np.unique(found.numbers).tolist():
            chosen = found.numbers == number
            segment = catalog.segments.get(number)
            if segment is None:
                continue
            filled = segment.name.state == "open"
            # By its new name others read a full one again; who fills it keeps the name.
            with self._retainer.writing(segment) as writes:
                rows, first = np.unique(found.rows[chosen], return_index=True)
                catalog.invalidate(rows, found.records[chosen][first])
                if filled:
                    catalog.tell_deleted(segment)
            stay[chosen] = not (writes or filled)
        return found.there[stay]

    def _clear(self, batch: Batch) -> BatchResult:
        own = f"{self.place.namespace}/"
        if own in batch.keys:
            place = self.place
            clear_namespace(self._namespace_fd)
            remove_damaged(self._namespace_fd, place.namespace)
            keep_files(
                self._namespace_fd, place.namespace, place.record, place.liveness
            )
            for folder in list(self._catalog.folders.values()):
                folder.mark_stale()
            self._catalog.refresh(always=True)
            self.counts["cleared"] += 1
        return _cleared(batch, own)

    def _track(self, batch: Batch, result: BatchResult) -> None:
        """Keep track of the keys that are stored."""
        stored = result.ok.tolist()
        keys = [key for key, ok in zip(batch.keys, stored, strict=True) if ok]
        self._tracked.add(self._catalog.digests(keys), keys)

    def removed(self, limit: int) -> list[str]:
        """Return stored keys that are no longer there; each is returned once.

        The first call begins to keep track of what is stored. Pages that another
        process deletes one by one are noticed when they are loaded in vain.

        Args:
            limit: How many keys to keep track of; the oldest are forgotten first.
        """
        if self._awaits_room:
            return []
        self._check_fork()
        self._tracked.limit = limit
        self._catalog.refresh()
        return self._tracked.take_removed(self._catalog.has)

    def touch(self, keys: Sequence[str]) -> None:
        """Count pages as used now, without I/O.

        Args:
            keys: In the order of the prefix; what is not there counts for nothing.
        """
        if not self._awaits_room:
            self._check_fork()
            self._catalog.note_use(keys)

    def usage(self) -> Usage:
        """Count contents and disk usage."""
        if self._awaits_room:
            used = self.capacity().used_bytes
            return Usage(
                namespace_bytes=used,
                quota_bytes=self._settings.quota,
                free_bytes=self._free_bytes(),
                counts=MappingProxyType(dict(self.counts)),
            )
        self._check_fork()
        catalog = self._catalog
        for again in (False, True):
            try:
                catalog.refresh(missed=True)
                used = self._allocator.usage_bytes()
                break
            except OSError as error:
                full = error.errno in OUT_OF_FILES
                if again or not full or not catalog.files.close_idle():
                    raise
        with catalog.lock:
            live = catalog.index.live_in
            nbytes = int((live * catalog.index.object_bytes_in).sum())
            segments = list(catalog.segments.values())
        return Usage(
            pages=int(live.sum()),
            page_bytes=nbytes,
            failed_slots=sum(len(segment.failed) for segment in segments),
            pool_bytes=sum(segment.nbytes for segment in segments),
            namespace_bytes=used,
            quota_bytes=self._settings.quota,
            free_bytes=self._allocator.free_bytes(),
            index_bytes=catalog.index.nbytes,
            open_files=len(catalog.files),
            counts=MappingProxyType(dict(self.counts)),
        )

    def erase_expired(self) -> int:
        """Overwrite pages whose time is over; return how many."""
        return 0 if self._awaits_room else self._retainer.erase_expired()

    def erase(self, keys: Sequence[str], deadline_s: float) -> BoolArray:
        """Overwrite pages and forget them in all processes; return which are gone.

        Those in segments that another process fills stay as they are.
        """
        if self._awaits_room:
            return np.ones(len(keys), np.bool_)
        self._check_fork()
        return self._retainer.erase(self._catalog.digests(keys), deadline_s)

    def capacity(self) -> Capacity:
        """Measure the namespace against its quota, or against the free space.

        What failed are slots of this pool that could not be written. Cheap: it adds
        up sizes of files, not of pages.
        """
        failed = promised = promises = 0
        tenants: Mapping[str, TenantUse] = {}
        place, settings = self.place, self._settings
        if self._awaits_room:
            used = 0
            # Its other pools may be there.
            with (
                suppress(KvdockError, OSError),
                namespace_of(place.root, place.namespace, shared=place.shared) as fd,
            ):
                used = NamespaceUsage(fd).usage_bytes()
            elsewhere = Elsewhere(place.root, place.namespace, self.counts)
            growth = max(0, self._free_bytes() - settings.free_space)
        else:
            self._check_fork()
            allocator = self._allocator
            elsewhere = allocator.elsewhere
            used, growth = allocator.usage_bytes(), allocator.growth_bytes()
            failed = self._catalog.failed_bytes()
            promised = self._catalog.ledger.promised_bytes()
            promises = allocator.promise_bytes()
            if allocator.room is not None:
                tenants = allocator.room.report(self._catalog.ledger.by_tenant())
        limit = used + growth
        # A limit of 0 would mean that it is not known.
        limit = max(1, min(limit, settings.quota or limit))
        others = elsewhere.look().nbytes.total()
        return Capacity(used, limit, failed, promised, promises, others, tenants)

    def _free_bytes(self) -> int:
        """Return the free space where the root is, or will be created."""
        root = self.place.root.absolute()
        for folder in (root, *root.parents):
            with suppress(OSError):
                status = os.statvfs(folder)
                return status.f_bavail * status.f_frsize
        return 0

    def close(self) -> None:
        """Close files and release segments; stored pages stay."""
        if self._awaits_room:
            self._awaits_room = False
            self._engine.close()
        if self._namespace_fd < 0:
            return
        self._check_fork()
        self._upkeep.close()
        self._catalog.close()
        self._engine.close()
        os.close(self._namespace_fd)
        self._namespace_fd = -1


def _lacks_room(error: BaseException) -> bool:
    """Return whether a folder could not be made because a disk is full."""
    cause = error.__cause__ if isinstance(error, KvdockError) else error
    return isinstance(cause, OSError) and cause.errno in _NO_ROOM


def _full(batch: Batch) -> BatchResult:
    """Refuse a put for lack of room."""
    refused = BatchResult.all(batch, Outcome.REFUSED)
    return attrs.evolve(refused, cause="full")


def _cleared(batch: Batch, own: str) -> BatchResult:
    """Answer a clear: a store clears its own namespace alone."""
    done = [Outcome.OK if key == own else Outcome.REFUSED for key in batch.keys]
    return BatchResult.of(batch, done)

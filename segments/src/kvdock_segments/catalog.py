"""The catalog of one pool: its folders, segments and index, kept up to date."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from kvdock.arrays import any_of
from kvdock.batch import Outcome
from kvdock_segments import paths
from kvdock_segments.cleanup import collect_garbage
from kvdock_segments.directory import SegmentDirectory
from kvdock_segments.fd_cache import FdCache
from kvdock_segments.format import (
    Records,
    are_same,
    credible_uses,
    key_seed,
    packed_digests,
)
from kvdock_segments.index import ABSENT, Index
from kvdock_segments.index_file import (
    note_deletion,
    open_index,
    read_records,
    retire_records,
)
from kvdock_segments.ledger import Ledger
from kvdock_segments.paths import closing_fd
from kvdock_segments.recency import PrefixLookups
from kvdock_segments.tenant_count import TenantCount

if TYPE_CHECKING:
    from kvdock.arrays import (
        BoolArray,
        Int32Array,
        Int64Array,
        OutcomeArray,
        UInt64Array,
    )
    from kvdock_segments.io import IOEngine, Token
    from kvdock_segments.limits import StoreLocation
    from kvdock_segments.segment import Segment

_USES_S = 10.0
"""Seconds between two writes of times of use."""
_PATIENCE = 4
"""Pause after a refresh, in multiples of its duration: it takes a fifth of the time."""
_LONGEST_S = 0.05
"""Maximum pause between two refreshes that callers ask for, seconds."""
_SWEEP_S = 0.2
"""Most time that opening spends on what dead writers left; the rest comes later."""
_LOOKS = 3
"""Maximum number of lookups in a row of which records are gone from disk."""


@attrs.frozen(eq=False)
class OpenSegments:
    """Segments whose files of pages stay open while a batch uses them.

    Args:
        segments: The segments.
        tokens: The I/O engine's token of each.
        failed: uint64, identities of segments whose file may exist and could not
            be opened.
    """

    segments: tuple[Segment, ...]
    tokens: tuple[Token, ...]
    failed: UInt64Array

    def offsets(self, files: Int64Array, slots: Int64Array) -> Int64Array:
        """Return where slots begin in their files, int64 (n,)."""
        strides = [segment.slot_bytes for segment in self.segments]
        if len(set(strides)) == 1:
            return slots * strides[0]
        return slots * np.array(strides, np.int64)[files]

    def position_of(self, identities: UInt64Array) -> Int64Array:
        """Return which segment has each identity, int64 (n,), or `ABSENT`."""
        places = np.full(len(identities), ABSENT, np.int64)
        for place, segment in enumerate(self.segments):
            places[identities == np.uint64(segment.name.segment)] = place
        return places


@attrs.frozen(eq=False)
class LookupResult:
    """The result of a lookup.

    A snapshot: rows may hold other records by now.

    Args:
        digests: uint64 (n, 2), of the keys.
        there: int64 (m,), positions of the keys that were found.
        rows: int64 (m,), their rows of the index.
        records: (m,), what those rows hold.
        numbers: int64 (m,), their segments' numbers.
        nbytes: int64 (m,), sizes of the objects.
        version: Version of the index at the lookup.
    """

    digests: UInt64Array
    there: Int64Array
    rows: Int64Array
    records: Records
    numbers: Int64Array
    nbytes: Int64Array
    version: int


class Catalog:
    """Looks up keys, follows other writers, and drops damaged records.

    Args:
        namespace_fd: Descriptor of the namespace's folder; not closed here.
        engine: Opens the files of pages.
        open_files: How many files may stay open beyond those in use; 0 to derive it.
    """

    def __init__(
        self,
        namespace_fd: int,
        place: StoreLocation,
        engine: IOEngine,
        counts: Counter[str],
        open_files: int,
    ) -> None:
        self.lock = threading.RLock()
        self.index = Index()
        self.ledger = Ledger(namespace_fd, place.liveness)
        self.index.max_age_s = place.max_age_s
        self.index.timed = place.max_age_s > 0
        if place.tenants.rooms:
            self.index.tenants = TenantCount(set(place.tenants.names), place.tenant)
        self.folders: dict[int, SegmentDirectory] = {}
        self.segments: dict[int, Segment] = {}
        self._lookups = PrefixLookups(self.index, self.segments)
        self.counts = counts
        self._namespace_fd = namespace_fd
        self._place = place
        # Return the digests of keys, 16 bytes each.
        self.packed: Callable[[Sequence[str]], bytes] = (
            _from_hex
            if place.digests
            else partial(packed_digests, seed=key_seed(place.namespace))
        )
        self.files = FdCache(engine, open_files or None)
        # Ends one use of each file that `open` or `open_one` has opened.
        self.release_all = self.files.release
        self._syncing = threading.Lock()
        self._next_sync_s = 0.0
        self._next_uses_s = time.monotonic() + _USES_S
        try:
            for size in place.object_bytes:
                self.folder(size)
        except BaseException:
            self.close()
            raise

    def folder(self, object_bytes: int) -> SegmentDirectory:
        """Return the folder of one size of objects, opened when first used."""
        folder = self.folders.get(object_bytes)
        if folder is not None:
            return folder
        with self._syncing:
            if object_bytes not in self.folders:
                place = self._place
                name = paths.pool_folder(place.pool, object_bytes)
                fd = paths.open_folder(self._namespace_fd, name, create=True)
                folder = SegmentDirectory(
                    fd,
                    name,
                    object_bytes,
                    self.index,
                    self.segments,
                    self.lock,
                    place.liveness,
                )
                try:
                    collect_garbage(fd, place.liveness, limit_s=_SWEEP_S)
                    folder.scan()
                except BaseException:
                    os.close(fd)
                    raise
                self.folders[object_bytes] = folder
            return self.folders[object_bytes]

    def folder_of(self, segment: Segment) -> SegmentDirectory:
        """Return the folder of a segment."""
        folders = tuple(self.folders.values())
        return next(folder for folder in folders if folder.fd == segment.folder)

    def gone(self) -> bool:
        """Return whether the namespace or a folder of it was deleted."""
        # A namespace's folder can only go after those in it. `refresh` needs each look.
        if not self.folders:
            return paths.is_gone(self._namespace_fd)
        gone = False
        for folder in tuple(self.folders.values()):
            gone |= folder.look()
        return gone

    def recreate_folders(self, *, moved: bool = False) -> None:
        """Create folders again that were deleted.

        If `moved`, the namespace is another folder now, and these are still those of
        the old one.
        """
        with self._syncing:
            for folder in self.folders.values():
                if moved or paths.is_gone(folder.fd):
                    at = self._namespace_fd
                    fresh = paths.open_folder(at, folder.name, create=True)
                    paths.replace_folder(folder.fd, fresh)
                    folder.mark_stale()

    def lookup(self, keys: Sequence[str]) -> LookupResult:
        """Look up keys; refresh once if some are missing."""
        self.refresh()
        digests = self.digests(keys)
        found = self._look_up(digests)
        if len(found.there) < len(keys) and self.refresh(missed=True):
            found = self._look_up(digests)
        return found

    def digests(self, keys: Sequence[str]) -> UInt64Array:
        """Return the digests of keys, uint64 (n, 2)."""
        return np.frombuffer(self.packed(keys), "<u8").reshape(-1, 2)

    def has(self, digests: UInt64Array) -> BoolArray:
        """Return which keys are there, bool (n,), by digest; reads no file."""
        with self.lock:
            return cast("BoolArray", self.index.find(digests) != ABSENT)

    def lookup_durable(
        self, keys: Sequence[str], *, newest: bool = False
    ) -> LookupResult:
        """Look up keys, and check that their records are still on disk.

        Another process may have erased a page or a whole segment that is still in
        this index. A read of it is a miss, but a write must not skip it.

        Args:
            keys: What to look for.
            newest: Whether what other processes stored just now is to be found.
        """
        if newest:
            self.refresh(missed=True, always=True)
        found = self.lookup(keys)
        for _ in range(_LOOKS):
            gone = np.flatnonzero(~self._still_stored(found))
            if not len(gone):
                break
            with self.lock:
                rows = found.rows[gone]
                same = self.index.records["check"][rows] == found.records["check"][gone]
                self.index.forget(np.unique(rows[same]))
            # A segment that was renamed meanwhile is read again as a whole.
            for folder in list(self.folders.values()):
                folder.mark_stale()
            self.refresh(always=True)
            found = self._look_up(found.digests)
        return found

    def copies_of(
        self, found: LookupResult, *, with_expired: bool = False
    ) -> LookupResult:
        """Return the other rows of keys that were looked up, those that are served.

        Two processes that store a page at the same moment store it twice. Those that
        have expired are served again where the clock is set back before a restart.
        """
        with self.lock:
            rows = self.index.rows_of(found.digests)
            rows = rows[~np.isin(rows, found.rows)]
            if not with_expired:
                rows = rows[~self.index.are_expired(rows)]
            numbers = self.index.segment_of[rows].astype(np.int64)
            positions = {(*key,): n for n, key in enumerate(found.digests.tolist())}
            keys = self.index.words[rows, :2].tolist()
            return attrs.evolve(
                found,
                there=np.array([positions[*key,] for key in keys], np.int64),
                rows=rows,
                records=self.index.records[rows],
                numbers=numbers,
                nbytes=self.index.object_bytes_in[numbers],
            )

    def _still_stored(self, found: LookupResult) -> BoolArray:
        """Return which records are unchanged on disk, bool (m,)."""
        standing = np.zeros(len(found.rows), np.bool_)
        order = np.argsort(found.rows)
        for number in np.unique(found.numbers).tolist():
            mine = order[found.numbers[order] == number]
            # Segments of this process keep their names while the lock is held.
            with self.lock, suppress(OSError):
                segment = self.segments.get(number)
                if segment is None:
                    continue
                with closing_fd(open_index(segment.folder, str(segment.name))) as fd:
                    stored = read_records(fd, found.rows[mine] - segment.rows.first)
                standing[mine] = are_same(stored, found.records[mine])
        return standing

    def _look_up(self, digests: UInt64Array) -> LookupResult:
        with self.lock:
            rows = self.index.find(digests)
            there = np.flatnonzero(rows != ABSENT)
            rows = rows[there]
            numbers = self.index.segment_of[rows].astype(np.int64)
            return LookupResult(
                digests=digests,
                there=there,
                rows=rows,
                records=self.index.records[rows],
                numbers=numbers,
                nbytes=self.index.object_bytes_in[numbers],
                version=self.index.version,
            )

    def touch(self, found: LookupResult, which: BoolArray, used_ns: Int64Array) -> None:
        """Note the use of pages, except those that are gone by now.

        Args:
            found: Where they were found.
            which: bool (m,), which of those that are there.
            used_ns: int64 (n,), the time of use of each key.
        """
        with self.lock:
            rows, believed = found.rows[which], found.records["check"][which]
            still = self.index.records["check"][rows] == believed
            times = used_ns[found.there[which]]
            self.index.touch(rows[still], times[still])
            for number in np.unique(found.numbers[which][still]).tolist():
                self.segments[number].touched = True

    def note_use(self, keys: Sequence[str]) -> None:
        """Note that keys are used now, the first as the latest; reads no file."""
        digests = self.digests(keys)
        with self.lock:
            self._lookups.refresh(digests, self.index.clock.now_ns())

    def note_lookup(
        self, digests: UInt64Array, there: Int64Array, deadline_s: float
    ) -> None:
        """Remember a lookup and the places of what was there, for writes to follow."""
        with self.lock:
            self.index.clock.end_run()
            self._lookups.add(digests, there, deadline_s)

    def write_times(
        self, digests: UInt64Array, deadline_s: float, tenant: int
    ) -> tuple[Int64Array, Int64Array]:
        """Return when each key that a tenant writes counts as used and as stored."""
        with self.lock:
            known = self._lookups.by_key and len(digests)
            continued = self._lookups.continue_with(digests) if known else None
            first_ns = continued[0] if continued else None
            used_ns = self.index.clock.written(
                len(digests), deadline_s, first_ns, tenant
            )
        if continued:
            return used_ns, continued[1]
        return used_ns, self.index.history.begin(digests, used_ns)

    def disown(self, segment: Segment) -> None:
        """Drop a segment that another writer took over."""
        folder = self.folder_of(segment)
        folder.drop(segment)
        folder.mark_stale()

    def count(self, verb: str, outcomes: OutcomeArray) -> None:
        """Count outcomes by name."""
        if not any_of(outcomes):
            with self.lock:
                self.counts[f"{verb}_ok"] += len(outcomes)
            return
        found = np.bincount(outcomes, minlength=len(Outcome)).tolist()
        with self.lock:
            for outcome in Outcome:
                if found[outcome]:
                    self.counts[f"{verb}_{outcome.name.lower()}"] += found[outcome]

    def refresh(
        self,
        *,
        missed: bool = False,
        stored: bool = False,
        always: bool = False,
        looked: bool = False,
    ) -> bool:
        """Read changes of other processes; return whether there were any.

        Args:
            missed: A key was not found, so read segments that are being filled too.
            stored: The same for keys that are stored now: where another process
                stores one at the same moment, it is there twice.
            always: Read now, however recent the last refresh is.
            looked: Whether `gone` has looked at the folders just now.
        """
        folders = tuple(self.folders.values())
        changed = []
        for folder in folders:
            if folder.unread if looked else folder.changed(missed=missed):
                changed.append(folder)  # noqa: PERF401 - a frame less for each call
        missed |= stored
        nothing_new = not (changed or missed)
        if not always and (nothing_new or time.monotonic() < self._next_sync_s):
            return False
        if not self._syncing.acquire(blocking=always):
            return False
        try:
            begun_s = time.monotonic()
            new = False
            for folder in changed:
                new |= folder.scan()
            for folder in folders if missed else ():
                new |= folder.poll()
            if changed:
                self.files.keep_only(set(self.segments.values()))
            if begun_s > self._next_uses_s:
                self._next_uses_s = begun_s + _USES_S
                self.flush_uses()
            now_s = time.monotonic()
            pause_s = min(_PATIENCE * (now_s - begun_s), _LONGEST_S)
            self._next_sync_s = now_s + pause_s
        finally:
            self._syncing.release()
        return new

    def flush_uses(self) -> None:
        """Write times of use to disk, for other processes and the next start."""
        with self.lock:
            credible = credible_uses(self.index.used_ns)
            if credible is not self.index.used_ns:  # the clock was set back
                self.index.used_ns[:] = credible
                self.index.clock.newest_ns = 0
        for folder in list(self.folders.values()):
            folder.flush_uses()

    def open(self, numbers: Int32Array | Int64Array) -> OpenSegments:
        """Open the files of segments, by number; `release_all` ends it."""
        held: list[Segment] = []
        tokens = []
        failed = []
        for number in sorted(set(numbers.tolist())):
            segment = self.segments.get(number)
            if segment is None:
                continue
            try:
                tokens.append(self.open_one(segment))
            except OSError as error:
                # For example out of descriptors: pages must not be dropped for that.
                if error.errno not in paths.NO_FILE:
                    failed.append(segment.name.segment)
                continue
            held.append(segment)
        return OpenSegments(tuple(held), tuple(tokens), np.array(failed, np.uint64))

    def open_one(self, segment: Segment) -> Token:
        """Open the file of one segment; `release_all` ends it.

        Raises:
            OSError: If it cannot be opened.
        """
        token = self.files.open(segment)
        segment.touched = True
        return token

    def invalidate(self, rows: Int64Array, believed: Records) -> BoolArray:
        """Erase records, here and on disk, so that a rewrite heals them.

        Args:
            rows: int64 (n,).
            believed: (n,), what the rows held when they were looked up.

        Returns:
            bool (n,): which of them another process had replaced already; those
            pages are not damaged.
        """
        raced = np.ones(len(rows), np.bool_)
        numbers = self.index.segment_of[rows]
        for number in np.unique(numbers).tolist():
            segment = self.segments.get(number)
            if segment is not None:
                mine = np.flatnonzero(numbers == number)
                raced[mine] = self._invalidate_in(segment, rows[mine], believed[mine])
        self.counts["pages_retired"] += int((~raced).sum())
        return raced

    def _invalidate_in(
        self, segment: Segment, rows: Int64Array, believed: Records
    ) -> BoolArray:
        """Erase records of one segment; return which had been replaced."""
        slots = rows - segment.rows.first
        same = np.zeros(len(slots), np.bool_)
        with self.lock:
            try:
                fd = open_index(segment.folder, str(segment.name), write=True)
                with closing_fd(fd):
                    same = retire_records(fd, slots, believed)
                self.ledger.give_back(segment.slot_bytes, believed[same])
            except FileNotFoundError:
                pass  # renamed, or gone
            except OSError:
                same[:] = True  # a read-only disk: nothing was replaced
            now = self.index.records["check"][rows] == believed["check"]
            self.index.forget(rows[now])
        self.folder_of(segment).mark_stale()
        return ~same

    def tell_deleted(self, segment: Segment) -> None:
        """Have other processes forget what was deleted from a segment."""
        with suppress(OSError), self.folder_of(segment).own_change():
            fd = open_index(segment.folder, str(segment.name), write=True)
            with closing_fd(fd):
                note_deletion(fd)
            os.utime(segment.folder)

    def failed_bytes(self) -> int:
        """Return the bytes of slots that could not be written and are set aside."""
        with self.lock:
            failing = [one for it in self.folders.values() for one in it.failing]
            return sum(len(one.failed) * one.slot_bytes for one in failing)

    def close(self) -> None:
        """Close all files and release all segments."""
        with self._syncing, self.lock:
            self.files.close()
            for folder in self.folders.values():
                folder.close()
            self.folders.clear()
            self.segments.clear()
            self.index.clear()

    def close_after_fork(self) -> None:
        """Close what a forked child inherited; its parent keeps its claims."""
        for folder in self.folders.values():
            for segment in folder.segments.values():
                if segment.owned:
                    os.close(segment.index_fd)
            os.close(folder.fd)
        self.folders.clear()
        self.files.close_after_fork()


def _from_hex(keys: Sequence[str]) -> bytes:
    return bytes.fromhex("".join(keys))

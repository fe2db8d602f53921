"""What a store does by itself: it erases expired pages and comes below its quota."""

from __future__ import annotations

import logging
import os
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvdock.units import format_bytes
from kvdock_segments.cleanup import delete_if_unowned
from kvdock_segments.eviction import mean_last_used_ns
from kvdock_segments.format import index_bytes, promised, with_checksums
from kvdock_segments.ownership import read_liveness
from kvdock_segments.paths import closing_fd, open_file
from kvdock_segments.retention import GRACE_S
from kvdock_segments.usage import NamespaceUsage
from kvdock_segments.walk import segments

if TYPE_CHECKING:
    from pathlib import Path

    from kvdock.arrays import Int64Array
    from kvdock_segments.allocator import SegmentAllocator
    from kvdock_segments.catalog import Catalog
    from kvdock_segments.directory import SegmentDirectory
    from kvdock_segments.retention import Retainer
    from kvdock_segments.segment import Segment

log = logging.getLogger("kvdock_segments")

_PATIENCE = 20
"""Pause between two tries to come below the quota, in multiples of their duration."""
_LEAST_PAUSE_S = 0.5
_MOST_PAUSE_S = 10.0


class Upkeep:
    """One thread of a store, which begins with the first work for it."""

    def __init__(
        self, catalog: Catalog, allocator: SegmentAllocator, retainer: Retainer
    ) -> None:
        self._catalog = catalog
        self._allocator = allocator
        self._retainer = retainer
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, if it is not running."""
        if self._thread is not None or self._stopped.is_set():
            return
        thread = threading.Thread(target=self._run, name="kvdock-upkeep", daemon=True)
        with suppress(RuntimeError):  # no thread can be started now
            thread.start()
            self._thread = thread

    def close(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        within_s = self._allocator.place.erase_within_s
        erase_s = max(0.1, (within_s - GRACE_S) / 2)
        wait_s = 0.0 if self._allocator.above_quota.is_set() else erase_s
        while not self._stopped.wait(wait_s):
            wait_s, begun_s = erase_s, time.monotonic()
            try:
                if self._allocator.above_quota.is_set() and not self._shrink():
                    pause_s = _PATIENCE * (time.monotonic() - begun_s)
                    pause_s = max(_LEAST_PAUSE_S, min(pause_s, _MOST_PAUSE_S))
                    wait_s = min(wait_s, pause_s)
                if self._catalog.index.timed:
                    self._retainer.erase_expired(self._stopped)
            except Exception as error:  # noqa: BLE001 - tried again at the next turn
                log.warning("the upkeep of a store failed: %s", error)

    def _shrink(self) -> bool:
        """Delete cold segments; return whether the namespace is below its quota."""
        allocator, place = self._allocator, self._allocator.place
        quota = allocator.settings.quota
        fd, stopped = allocator.namespace_fd, self._stopped
        shrink(place.root, place.namespace, fd, quota, stopped)
        if allocator.usage_bytes() > quota:
            self._condense()
        self._catalog.refresh(always=True)
        if allocator.usage_bytes() > quota:
            return False
        allocator.above_quota.clear()
        log.warning(
            "namespace %s of store %s is within its quota of %s again",
            place.namespace[:12],
            place.root,
            format_bytes(quota),
        )
        return True

    def _condense(self) -> None:
        """Move promised pages out of segments that hold other pages as well."""
        quota = self._allocator.settings.quota
        for folder in list(self._catalog.folders.values()):
            folder.scan()
            for segment in list(folder.segments.values()):
                if self._stopped.is_set() or self._allocator.usage_bytes() <= quota:
                    return
                self._condense_one(folder, segment)

    def _condense_one(self, folder: SegmentDirectory, segment: Segment) -> None:
        """Replace a segment by one that has room for its promised pages alone."""
        allocator, index, lock = (
            self._allocator,
            self._catalog.index,
            self._catalog.lock,
        )
        slots = self._promised_in(segment)
        if not 0 < len(slots) < segment.rows.slots:
            return
        if not (
            allocator.may_claim(folder, segment) and allocator.claim(folder, segment)
        ):
            return
        made = None
        try:
            made = allocator.create_files(folder, len(slots), segment.slot_bytes)
            _copy_slots(segment, slots, made)
            with lock:
                # Its times may have been changed meanwhile: then the next turn tries.
                if np.array_equal(slots, self._promised_in(segment)):
                    rows = slots + segment.rows.first
                    records = index.records[rows].copy()
                    records["segment"] = made.name.segment
                    records["slot"] = places = np.arange(len(slots))
                    self._catalog.ledger.move(made.slot_bytes, records[:0], records)
                    made.commit(places, with_checksums(records))
                    index.put(made.rows.first + places, records, index.used_ns[rows])
                    allocator.delete(folder, segment)
                    allocator.release_full(folder, made)
                    made = None
        finally:
            if made is not None:
                allocator.delete(folder, made)
            allocator.release_full(folder, segment)

    def _promised_in(self, segment: Segment) -> Int64Array:
        words = self._catalog.index.words[segment.rows.span]
        return np.flatnonzero(promised(words))


def _copy_slots(source: Segment, slots: Int64Array, target: Segment) -> None:
    """Copy slots of one segment to the first ones of another."""
    size = source.slot_bytes
    reading = open_file(source.folder, source.name.data, os.O_RDONLY)
    with closing_fd(reading) as reads:
        writing = open_file(target.folder, target.name.data, os.O_WRONLY)
        with closing_fd(writing) as writes:
            for place, slot in enumerate(slots.tolist()):
                os.pwrite(writes, os.pread(reads, size, slot * size), place * size)


def shrink(
    root: Path,
    namespace: str,
    fd: int,
    to_bytes: int,
    stopped: threading.Event | None = None,
) -> None:
    """Delete the coldest segments until a namespace takes no more than `to_bytes`.

    Those with promised pages stay, and those that a process writes.
    """
    usage, kept_by = NamespaceUsage(fd), read_liveness(fd)
    left, by_use = usage.usage_bytes(), []
    for one in segments(root, namespace) if left > to_bytes else ():
        contents = one.contents
        nbytes = index_bytes(contents.slots) + contents.slots * contents.slot_bytes
        used_ns = mean_last_used_ns(contents.used_ns[one.live])
        by_use.append((used_ns, one.folder, str(one.name), nbytes))
    for _, folder, name, nbytes in sorted(by_use):
        if left <= to_bytes or (stopped and stopped.is_set()):
            break
        if delete_if_unowned(fd, folder, name, kept_by):
            left -= nbytes

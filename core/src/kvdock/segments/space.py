"""Where new pages go: new segments while there is room, old ones after.

A namespace has a quota, its file system a floor of free space. Below both, a
writer makes a segment; else it recycles the one that was used the longest
time ago, because extents that were written before are several times faster
than fresh ones. Other namespaces are never touched.
"""

from __future__ import annotations

import errno
import logging
import os
import secrets
import threading
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock.segments import tenure
from kvdock.segments.names import (
    IndexName,
    data_segment,
    listing,
    open_folder,
    parse_pool_folder,
)
from kvdock.segments.records import index_bytes
from kvdock.segments.segment import (
    Segment,
    erase_records,
    make_index,
    open_index,
    preallocate,
    read_contents,
)

if TYPE_CHECKING:
    from kvdock.segments.engine import Engine
    from kvdock.segments.folder import Folder
    from kvdock.segments.index import Index

log = logging.getLogger("kvdock.segments")

_MOST_SLOTS = 1 << 16
_LEAST_SEGMENTS = 16  # of a quota: one segment is what eviction takes at once
_FIRST_BYTES = 16 << 20  # size of a pool's first segment
_MARK_SLOTS = 4096  # of a segment whose objects have no bytes


@attrs.frozen(kw_only=True)
class Limits:
    """How much a namespace may take.

    Args:
        quota_bytes: Most bytes of all its pools; 0 for no quota.
        high_watermark: Share of the quota at which old pages begin to go.
        low_watermark: Share of the quota to which they go when segments are
            deleted rather than recycled.
        free_bytes: Space that the file system keeps free.
        segment_bytes: Size of a segment; smaller where space is short.
    """

    quota_bytes: int = 0
    high_watermark: float = 1.0
    low_watermark: float = 0.9
    free_bytes: int = 0
    segment_bytes: int = 256 << 20


@attrs.frozen
class Space:
    """Segments for one writer in one namespace.

    Args:
        namespace_fd: Descriptor of the namespace's folder.
        limits: How much it may take.
        engine: Makes the files of pages.
        index: Of the pool that writes.
        lock: Held around every use of the index.
        counts: What happened, by name.
    """

    namespace_fd: int
    limits: Limits
    engine: Engine
    index: Index
    lock: threading.RLock
    counts: Counter[str]

    def acquire(self, folder: Folder) -> Segment | None:
        """Return a segment of this folder with free slots, ours to write.

        Returns:
            None where there is no space at all.
        """
        folder.scan()
        return self._adopt(folder) or self._create(folder) or self._make_way(folder)

    def usage_bytes(self) -> int:
        """Return the bytes that all pools of the namespace take."""
        return sum(size for _, size in self._folders())

    def _adopt(self, folder: Folder) -> Segment | None:
        """Take over a segment with room that nobody writes."""
        choice = []
        for segment in folder.segments.values():
            if segment.owned or not self._fits(folder, segment):
                continue
            free = segment.rows.slots - self._live(segment)
            if free and (
                segment.name.state == "open" or free * 4 >= segment.rows.slots
            ):
                choice.append((free, segment))
        choice.sort(key=lambda pair: -pair[0])
        for _, segment in choice:
            if (
                self._claim(folder, segment)
                and self._live(segment) < segment.rows.slots
            ):
                self.counts["segments_adopted"] += 1
                return segment
        return None

    def _fits(self, folder: Folder, segment: Segment) -> bool:
        """Return whether the engine can write this segment's slots."""
        return (
            segment.slot_bytes >= folder.object_bytes
            and segment.slot_bytes % self.engine.alignment == 0
        )

    def _live(self, segment: Segment) -> int:
        with self.lock:
            return int(self.index.live(segment.rows).sum())

    def _claim(self, folder: Folder, segment: Segment) -> bool:
        """Become a segment's writer and read what it really holds."""
        with self.lock:
            if not segment.claim():
                return False
        contents = None
        with suppress(OSError):
            size = folder.data_bytes(segment.name)
            wanted = segment.rows.slots * segment.slot_bytes
            if size < wanted:
                self._restore_size(folder, segment, wanted)
            contents = read_contents(segment.index_fd, segment.name, size)
        if contents is None or contents.slots != segment.rows.slots:
            self.delete(folder, segment)
            return False
        folder.admit(segment.name, contents)
        return True

    def _restore_size(self, folder: Folder, segment: Segment, wanted: int) -> None:
        token = self.engine.open_file(segment.name.data, folder.fd, create=False)
        try:
            preallocate(token, wanted)
        finally:
            self.engine.close_file(token)

    def _create(self, folder: Folder, *, least: float = 0.5) -> Segment | None:
        """Make a segment, as large as there is room for.

        Args:
            folder: Where it goes.
            least: Share of the usual size below which it is not worth while.
        """
        slot_bytes = _slot_bytes(folder.object_bytes, self.engine.alignment)
        usual = self._slots(folder, slot_bytes)
        fixed, each = index_bytes(0), slot_bytes + index_bytes(1) - index_bytes(0)
        slots = min(usual, (self._room() - fixed) // each)
        while slots >= max(1, usual * least):
            try:
                return self._create_files(folder, slots, slot_bytes)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                    log.warning("a segment could not be made: %s", error)
                    self.counts["segments_failed"] += 1
                    return None
                slots //= 2
        return None

    def _slots(self, folder: Folder, slot_bytes: int) -> int:
        """Return the usual number of slots of the next segment."""
        if not slot_bytes:
            return _MARK_SLOTS
        most = self.limits.segment_bytes
        if self.limits.quota_bytes:
            most = min(most, self.limits.quota_bytes // _LEAST_SEGMENTS)
        # Segments grow with the pool, so that a small pool takes little space.
        most = min(most, max(_FIRST_BYTES, folder.nbytes))
        return max(1, min(_MOST_SLOTS, most // slot_bytes))

    def _room(self) -> int:
        """Return how many bytes the namespace may still grow by."""
        limits = self.limits
        room = self.free_bytes() - limits.free_bytes
        if limits.quota_bytes:
            high = int(limits.quota_bytes * limits.high_watermark)
            room = min(room, high - self.usage_bytes())
        return room

    def free_bytes(self) -> int:
        """Return the free space of the file system, bytes."""
        status = os.fstatvfs(self.namespace_fd)
        return status.f_bavail * status.f_frsize

    def _create_files(self, folder: Folder, slots: int, slot_bytes: int) -> Segment:
        name = IndexName(secrets.randbits(64), 1, "new")
        index_fd = make_index(folder.fd, name, slots, slot_bytes, folder.object_bytes)
        fresh = attrs.evolve(name, state="open")
        try:
            token = self.engine.open_file(name.data, folder.fd, create=True)
            try:
                preallocate(token, slots * slot_bytes)
            finally:
                self.engine.close_file(token)
            contents = read_contents(index_fd, name, slots * slot_bytes)
            os.rename(str(name), str(fresh), src_dir_fd=folder.fd, dst_dir_fd=folder.fd)
        except OSError:
            os.close(index_fd)
            for leftover in (str(name), name.data):
                with suppress(FileNotFoundError):
                    os.unlink(leftover, dir_fd=folder.fd)
            raise
        if contents is None:
            raise OSError(errno.EIO, "a new index file does not read back")
        segment = folder.admit(fresh, contents)
        segment.index_fd = index_fd
        self.counts["segments_created"] += 1
        return segment

    def _make_way(self, folder: Folder) -> Segment | None:
        """Recycle the coldest segment, or delete colder ones elsewhere."""
        with self.lock:
            ranked = self._ranked(folder)
        for used_ns, segment in ranked:
            if self._delete_elsewhere(folder, used_ns):
                made = self._create(folder)
                if made:
                    return made
            if self._claim(folder, segment):
                self._thin(segment)
                self.counts["segments_recycled"] += 1
                return segment
        while True:
            made = self._create(folder, least=0.0)
            if made or not self._delete_elsewhere(folder, np.inf):
                return made

    def _ranked(self, folder: Folder) -> list[tuple[float, Segment]]:
        """Return the segments that could go, the coldest first."""
        ranked: list[tuple[float, Segment]] = []
        for segment in folder.segments.values():
            if segment.owned or not self._fits(folder, segment):
                continue
            live = self.index.live(segment.rows)
            used = self.index.used_ns[segment.rows.span][live]
            ranked.append((float(used.mean()) if len(used) else 0.0, segment))
        ranked.sort(key=lambda pair: pair[0])
        return ranked

    def _thin(self, segment: Segment) -> None:
        """Empty the cold slots of a claimed segment, at least half of them."""
        with self.lock:
            rows = segment.rows
            live = np.flatnonzero(self.index.live(rows))
            used = self.index.used_ns[rows.span]
            everything = self.index.used_ns
            usual = everything[everything != 0].mean() if live.size else 0.0
            order = live[np.argsort(used[live], kind="stable")]
            least = max(0, (rows.slots + 1) // 2 - (rows.slots - len(live)))
            cold = max(least, int((used[order] <= usual).sum()))
            gone = np.sort(order[:cold])
            self.index.forget(gone + rows.first)
        erase_records(segment.index_fd, gone)
        self.counts["pages_evicted"] += len(gone)

    def delete(self, folder: Folder, segment: Segment) -> None:
        """Delete a segment's files; the index first, so nothing is found."""
        for name in (str(segment.name), segment.name.data):
            with suppress(OSError):
                os.unlink(name, dir_fd=folder.fd)
        folder.drop(segment)

    def _folders(self) -> list[tuple[str, int]]:
        """Return the pool folders of the namespace and their bytes."""
        found = []
        with listing(self.namespace_fd) as entries:
            names = [entry.name for entry in entries if parse_pool_folder(entry.name)]
        for name in names:
            with suppress(OSError):
                fd = open_folder(self.namespace_fd, name)
                try:
                    found.append((name, _bytes_in(fd)))
                finally:
                    os.close(fd)
        return found

    def _delete_elsewhere(self, folder: Folder, colder_than_ns: float) -> bool:
        """Delete the coldest segment of the namespace's other folders.

        Returns:
            Whether one was deleted.
        """
        here = os.fstat(folder.fd).st_ino
        choice: list[tuple[int, str, str]] = []
        for pool, _ in self._folders():
            with suppress(OSError):
                fd = open_folder(self.namespace_fd, pool)
                try:
                    if os.fstat(fd).st_ino != here:
                        choice += _by_age(fd, pool)
                finally:
                    os.close(fd)
        for modified_ns, pool, name in sorted(choice):
            if modified_ns >= colder_than_ns:
                break
            if delete_unowned(self.namespace_fd, pool, name):
                self.counts["segments_deleted"] += 1
                return True
        return False


def _slot_bytes(object_bytes: int, alignment: int) -> int:
    return -(-object_bytes // alignment) * alignment


def _bytes_in(fd: int) -> int:
    total = 0
    with listing(fd) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                total += entry.stat(follow_symlinks=False).st_size
    return total


def _by_age(fd: int, pool: str) -> list[tuple[int, str, str]]:
    """Return time of change, folder and name of each index file."""
    found = []
    with listing(fd) as entries:
        for entry in entries:
            name = IndexName.parse(entry.name)
            if name and name.state == "idx":
                with suppress(FileNotFoundError):
                    stamp = entry.stat(follow_symlinks=False).st_mtime_ns
                    found.append((stamp, pool, entry.name))
    return found


def delete_unowned(namespace_fd: int, pool: str, name: str) -> bool:
    """Delete one segment, unless it has a writer or is pinned."""
    index_name = IndexName.parse(name)
    if index_name is None:
        return False
    with suppress(OSError):
        folder = open_folder(namespace_fd, pool)
        try:
            fd = open_index(folder, name, write=True)
            try:
                if not (tenure.claim(fd) and tenure.unpinned(fd)):
                    return False
                os.unlink(name, dir_fd=folder)
                os.unlink(index_name.data, dir_fd=folder)
            finally:
                os.close(fd)
        finally:
            os.close(folder)
        return True
    return False


def sweep(folder: int) -> int:
    """Delete what writers left behind that died while making a segment.

    Returns:
        Bytes that came back.
    """
    freed = 0
    with listing(folder) as entries:
        names = [entry.name for entry in entries]
    parsed = [name for name in map(IndexName.parse, names) if name]
    known = {name.segment for name in parsed if name.state != "new"}
    making = {name.segment for name in parsed if name.state == "new"}
    for name in parsed:
        if name.state == "new" and name.segment not in known:
            freed += _unlink_abandoned(folder, name)
    for file in names:
        segment = data_segment(file)
        if segment is None or segment in known | making:
            continue
        freed += _unlink_orphan(folder, segment)
    return freed


def _unlink_abandoned(folder: int, name: IndexName) -> int:
    freed = 0
    with suppress(OSError):
        fd = open_index(folder, str(name), write=True)
        try:
            if tenure.claim(fd):
                for file in (name.data, str(name)):
                    with suppress(FileNotFoundError):
                        size = os.stat(file, dir_fd=folder).st_size
                        os.unlink(file, dir_fd=folder)
                        freed += size
        finally:
            os.close(fd)
    return freed


def _unlink_orphan(folder: int, segment: int) -> int:
    """Delete a file of pages without any index, seen twice without one."""
    with listing(folder) as entries:
        for entry in entries:
            name = IndexName.parse(entry.name)
            if name and name.segment == segment:
                return 0
    with suppress(OSError):
        file = IndexName(segment, 0, "idx").data
        size = os.stat(file, dir_fd=folder).st_size
        os.unlink(file, dir_fd=folder)
        return size
    return 0

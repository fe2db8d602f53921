"""Verify every page of a namespace on disk.

Reads files only; processes may use the store meanwhile.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import numpy as np
import xxhash

from kvdock.errors import KvdockError, NamespaceError
from kvdock.stores import Verified
from kvdock_segments.cleanup import linked_segments
from kvdock_segments.format import RECORD, are_same, expired, records_in_words
from kvdock_segments.index_file import (
    IndexContents,
    open_index,
    read_contents,
    read_record,
    retire_records,
)
from kvdock_segments.inspect import (
    Location,
    folders_of,
    index_names,
    location,
    namespace_of,
)
from kvdock_segments.namespace_files import damaged_files
from kvdock_segments.paths import data_name, open_file

if TYPE_CHECKING:
    from kvdock.arrays import Int64Array
    from kvdock_segments.paths import IndexName

_PIECE_BYTES = 4 << 20
_NOT_FOR_US = (errno.EROFS, errno.EACCES, errno.EPERM)


@attrs.define
class _VerifyCounts:
    good: int = 0
    bad: list[Location] = attrs.Factory(list)
    corrupt_records: int = 0
    unreadable: list[Path] = attrs.Factory(list)
    forgotten: int = 0
    failed_slots: int = 0


@attrs.frozen
class _Checker:
    """Verifies one namespace, segment by segment.

    Args:
        heal: Erase wrong records and records of wrong pages.
        progress: Called with the bytes that were read since its last call.
    """

    home: Path
    heal: bool
    progress: Callable[[int], None] | None
    tally: _VerifyCounts = attrs.Factory(_VerifyCounts)

    def segment(self, pool: str, folder: int, name: IndexName) -> None:
        """Verify one segment, unless it is deleted meanwhile."""
        try:
            fd = open_index(folder, str(name), write=self.heal)
        except OSError as error:
            self._check_damage(error)
            self._unreadable(pool, folder, name)
            return
        data = -1
        try:
            try:
                data = open_file(folder, name.data, os.O_RDONLY)
            except OSError as error:
                self._check_damage(error)
            contents = _settled(fd, name, data) if data >= 0 else None
            if contents is None:
                self._unreadable(pool, folder, name)
                return
            self._pages(pool, name, contents, fd, data)
        finally:
            os.close(fd)
            if data >= 0:
                os.close(data)

    def _check_damage(self, error: OSError) -> None:
        """Raise KvdockError unless an error means that a file is damaged."""
        if error.errno in _NOT_FOR_US:
            raise KvdockError(
                f"{self.home} cannot be {'healed' if self.heal else 'read'}: "
                f"{error.strerror} ({error.filename})",
                fix="Run this as the user who owns the store, and with --heal where "
                "its file system can be written.",
            ) from error

    def _unreadable(self, pool: str, folder: int, name: IndexName) -> None:
        # It may have been recycled, or deleted, since it was listed.
        with suppress(FileNotFoundError):
            os.stat(str(name), dir_fd=folder, follow_symlinks=False)
            self.tally.unreadable.append(self.home / pool / str(name))

    def _pages(
        self, pool: str, name: IndexName, contents: IndexContents, fd: int, data: int
    ) -> None:
        self.tally.corrupt_records += len(contents.corrupt_slots)
        self.tally.failed_slots += len(contents.failed)
        bad: list[int] = []
        # What has expired may be overwritten already.
        over = expired(records_in_words(contents.records), time.time())
        stored = (contents.records["check"] != 0) & ~over
        for slot in np.flatnonzero(stored).tolist():
            spot = location(self.home, pool, name, contents, slot)
            if checksum(data, spot) == spot.checksum:
                self.tally.good += 1
            elif self._stands(fd, contents, slot):
                # Otherwise it was recycled while it was read.
                self.tally.bad.append(spot)
                bad.append(slot)
            if self.progress:
                self.progress(spot.nbytes)
        if self.heal:
            self._forget(fd, contents, np.array(bad, np.int64))

    def _stands(self, fd: int, contents: IndexContents, slot: int) -> bool:
        """Return whether a record is on disk as it was read."""
        stored = np.frombuffer(read_record(fd, slot), RECORD)
        believed = contents.records[slot : slot + 1]
        return len(stored) == 1 and bool(are_same(stored, believed)[0])

    def _forget(self, fd: int, contents: IndexContents, bad: Int64Array) -> None:
        erased = retire_records(fd, bad, contents.records[bad])
        wrong = retire_records(fd, contents.corrupt_slots, contents.corrupt_records)
        self.tally.forgotten += int(erased.sum()) + int(wrong.sum())


def verify_namespace(
    root: Path,
    namespace: str,
    progress: Callable[[int], None] | None = None,
    *,
    heal: bool = False,
    shared: bool = False,
) -> Verified:
    """Read every page of a namespace and compare its checksum.

    `progress` is called with the bytes that were read since its last call. With `heal`,
    the records of wrong pages are erased, as a read of them does: the next write in any
    process stores them again.

    Raises:
        KvdockError: If `heal` is set and other users own the root or can write it.
    """
    checker = _Checker(root / namespace, heal, progress)
    damaged: tuple[str, ...] = ()
    opened = namespace_of(root, namespace, shared=shared or not heal)
    with suppress(NamespaceError), opened as fd:  # it may go meanwhile
        linked = [
            f"{pool}/{data_name(segment)}"
            for group in linked_segments(fd)
            for pool, segment in group
        ]
        damaged = (*damaged_files(fd, namespace), *sorted(linked))
    for pool, folder in folders_of(root, namespace, shared=shared or not heal):
        for name in index_names(folder):
            checker.segment(pool, folder, name)
    tally = checker.tally
    return Verified(
        namespace=namespace,
        good=tally.good,
        bad=tuple(tally.bad),
        corrupt_records=tally.corrupt_records,
        unreadable_segments=tuple(tally.unreadable),
        damaged_files=tuple(checker.home / name for name in damaged),
        forgotten=tally.forgotten,
        failed_slots=tally.failed_slots,
    )


def _settled(fd: int, name: IndexName, data: int) -> IndexContents | None:
    """Read an index file; again if a record may just be written."""
    contents = read_contents(fd, name, os.fstat(data).st_size)
    if contents is not None and len(contents.corrupt_slots):
        contents = read_contents(fd, name, os.fstat(data).st_size)
    return contents


def checksum(fd: int, spot: Location) -> int | None:
    """Return the checksum of an object's bytes; None if they are missing."""
    state = xxhash.xxh3_64()
    done = 0
    while done < spot.nbytes:
        try:
            piece = os.pread(
                fd, min(_PIECE_BYTES, spot.nbytes - done), spot.offset + done
            )
        except OSError:
            return None  # the disk cannot read it: as bad as wrong bytes
        if not piece:
            return None
        state.update(piece)
        done += len(piece)
    return state.intdigest()

"""Delete segments, leftovers and whole namespaces, with or without an open store."""

from __future__ import annotations

import fcntl
import math
import os
import stat
import time
from collections import Counter
from contextlib import suppress

import attrs

from kvdock_segments import ownership
from kvdock_segments.format import HEADER_BYTES, is_newer, promised, records_in_words
from kvdock_segments.index_file import open_index, read_contents, read_header
from kvdock_segments.ledger import Ledger
from kvdock_segments.namespace_files import FILES, PROMISES
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import (
    IndexName,
    data_segment,
    earlier_now_ns,
    listing,
    open_folder,
    pool_folders,
    remove,
)

_PASSES = 16  # over a folder that is cleared while it is written


def clear_namespace(namespace_fd: int) -> int:
    """Delete all segments, also those that are being written; return the bytes freed.

    Index files are deleted first, so that no page of a half-deleted segment is
    found. Processes that have it open notice at their next call.
    """
    freed = 0
    for pool in pool_folders(namespace_fd):
        with suppress(FileNotFoundError):
            folder = open_folder(namespace_fd, pool)
            try:
                freed += _clear_folder(folder)
            finally:
                os.close(folder)
    with suppress(OSError):
        os.unlink(PROMISES, dir_fd=namespace_fd)  # what it counts is gone
    return freed


def _clear_folder(folder: int) -> int:
    freed = 0
    for _ in range(_PASSES):
        indexes = [name for name in _names(folder) if IndexName.parse(name)]
        sizes = [remove(folder, name) for name in indexes]
        freed += sum(size or 0 for size in sizes)
        if None not in sizes:
            break  # else one was renamed: list again
    # A segment in creation has its index file first. A listing may miss a file that
    # is renamed meanwhile.
    names = _names(folder)
    parsed = map(IndexName.parse, (*names, *_names(folder)))
    known = {name.segment for name in parsed if name}
    for name in names:
        segment = data_segment(name)
        if segment is not None and segment not in known:
            freed += remove(folder, name) or 0
    return freed


def _names(folder: int) -> list[str]:
    with listing(folder) as entries:
        return [entry.name for entry in entries]


def remove_empty(root: int, namespace: str) -> bool:
    """Remove a namespace that is empty and not open; return whether it was."""
    with suppress(OSError):  # of `rmdir` as well, if a file was added meanwhile
        fd = open_folder(root, namespace)
        try:
            if lock_unused(fd) or not _is_empty(fd):
                return False
            for pool in pool_folders(fd):
                os.rmdir(pool, dir_fd=fd)
            for name in FILES:
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=fd)
            os.rmdir(namespace, dir_fd=root)
        finally:
            os.close(fd)
        return True
    return False


def lock_unused(namespace_fd: int) -> str:
    """Lock a namespace until it is closed; say why it may be open elsewhere, or ""."""
    if ownership.read_liveness(namespace_fd) is not WriterLiveness.LOCKS:
        return "other hosts may have it open, which no lock shows"
    try:
        fcntl.flock(namespace_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "a process has it open"
    except OSError as error:
        return f"it cannot be locked: {error.strerror}"
    return ""


def _is_empty(namespace_fd: int) -> bool:
    """Return whether there are only empty folders and the files of the namespace."""
    pools = pool_folders(namespace_fd)
    with listing(namespace_fd) as entries:
        others = {entry.name for entry in entries} - {*pools}
    if others - {*FILES}:
        return False
    for pool in pools:
        folder = open_folder(namespace_fd, pool)
        try:
            with listing(folder) as entries:
                if any(entries):
                    return False
        finally:
            os.close(folder)
    return True


def delete_if_unowned(
    namespace_fd: int, pool: str, name: str, kept_by: WriterLiveness | None
) -> bool:
    """Delete a segment unless it has a writer, is pinned, or holds promised pages."""
    index_name = IndexName.parse(name)
    if index_name is None:
        return False
    with suppress(OSError):
        folder = open_folder(namespace_fd, pool)
        try:
            return _delete(namespace_fd, folder, index_name, kept_by)
        finally:
            os.close(folder)
    return False


def _delete(
    namespace_fd: int, folder: int, name: IndexName, kept_by: WriterLiveness | None
) -> bool:
    fd = open_index(folder, str(name), write=True)
    try:
        if not _is_abandoned(folder, fd, name, kept_by):
            return False
        contents = read_contents(fd, name, 2**62)
        if contents and promised(records_in_words(contents.records)).any():
            return False
        if kept_by is not WriterLiveness.LOCKS:
            # Only one process can rename it; for the others it is missing.
            fresh = attrs.evolve(name, generation=name.generation + 1, state="open")
            os.rename(str(name), str(fresh), src_dir_fd=folder, dst_dir_fd=folder)
            name = fresh
        os.unlink(str(name), dir_fd=folder)
        os.unlink(name.data, dir_fd=folder)
        if contents and contents.records["keep_until"].any():  # of promises that ended
            ledger = Ledger(namespace_fd, WriterLiveness.LOCKS)
            ledger.give_back(contents.slot_bytes, contents.records)
    finally:
        os.close(fd)
    return True


def collect_garbage(
    folder: int,
    kept_by: WriterLiveness | None,
    *,
    lost: bool = False,
    newer: bool = False,
    limit_s: float = math.inf,
) -> int:
    """Delete what writers left that died creating segments; return the bytes freed.

    If `lost`, segments go as well whose index is torn or of an earlier version, and
    index files without pages; if `newer`, segments of a later version. After `limit_s`
    the next sweep goes on.
    """
    freed = 0
    end_s = time.monotonic() + limit_s
    with listing(folder) as entries:
        names = [entry.name for entry in entries]
    parsed = [name for name in map(IndexName.parse, names) if name]
    known = Counter(name.segment for name in parsed if name.state != "new")
    making = {name.segment for name in parsed if name.state == "new"}
    for name in parsed:
        if time.monotonic() > end_s:
            return freed
        if name.state == "new":
            if not known[name.segment]:
                freed += _unlink_abandoned(folder, name, kept_by)
        elif lost and not _is_readable(folder, name, newer=newer):
            # Pages that another index file describes stay.
            freed += _unlink_abandoned(
                folder, name, kept_by, with_data=known[name.segment] == 1
            )
    orphans = {
        segment: file
        for file in names
        if (segment := data_segment(file)) is not None
        and not known[segment]
        and segment not in making
    }
    return freed + _unlink_orphans(folder, orphans, end_s)


def linked_segments(namespace_fd: int) -> list[list[tuple[str, int]]]:
    """Return groups of (folder name, segment) that share one file of pages."""
    found: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for pool in pool_folders(namespace_fd):
        with suppress(OSError):
            folder = open_folder(namespace_fd, pool)
            try:
                with listing(folder) as entries:
                    for entry in entries:
                        segment = data_segment(entry.name)
                        if segment is None:
                            continue
                        status = entry.stat(follow_symlinks=False)
                        if status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
                            file = (status.st_dev, status.st_ino)
                            found.setdefault(file, []).append((pool, segment))
            finally:
                os.close(folder)
    return [group for group in found.values() if len(group) > 1]


def delete_linked(namespace_fd: int, kept_by: WriterLiveness | None) -> int:
    """Delete all but one of segments that share a file of pages; return how many."""
    deleted = 0
    for group in linked_segments(namespace_fd):
        left = len(group)
        for pool, segment in group:
            for name in _indexes_of(namespace_fd, pool, segment):
                if left > 1 and delete_if_unowned(namespace_fd, pool, name, kept_by):
                    left -= 1
                    deleted += 1
    return deleted


def _indexes_of(namespace_fd: int, pool: str, segment: int) -> list[str]:
    with suppress(OSError):
        folder = open_folder(namespace_fd, pool)
        try:
            parsed = map(IndexName.parse, _names(folder))
            return [str(name) for name in parsed if name and name.segment == segment]
        finally:
            os.close(folder)
    return []


def _is_readable(folder: int, name: IndexName, *, newer: bool) -> bool:
    """Return whether some version can read a segment, or it is missing."""
    with suppress(OSError):
        fd = open_index(folder, str(name))
        try:
            if is_newer(os.pread(fd, HEADER_BYTES, 0)):
                return not newer
            os.stat(name.data, dir_fd=folder, follow_symlinks=False)
            return read_header(fd, name) is not None
        except FileNotFoundError:
            return False
        finally:
            os.close(fd)
    return True


def _unlink_abandoned(
    folder: int,
    name: IndexName,
    kept_by: WriterLiveness | None,
    *,
    with_data: bool = True,
) -> int:
    freed = 0
    with suppress(OSError):
        fd = open_index(folder, str(name), write=True)
        try:
            if _is_abandoned(folder, fd, name, kept_by):
                os.stat(str(name), dir_fd=folder)  # else another process took it
                for file in (name.data, str(name)) if with_data else (str(name),):
                    # A directory in place of the pages must not keep the index.
                    with suppress(FileNotFoundError, IsADirectoryError):
                        status = os.stat(file, dir_fd=folder, follow_symlinks=False)
                        size = status.st_size
                        os.unlink(file, dir_fd=folder)
                        freed += size
        finally:
            os.close(fd)
    return freed


def _is_abandoned(
    folder: int, fd: int, name: IndexName, kept_by: WriterLiveness | None
) -> bool:
    """Return whether a segment has no writer and is not pinned."""
    if kept_by is not WriterLiveness.TIMEOUT and not (
        ownership.acquire(fd) and ownership.is_unpinned(fd)
    ):
        return False
    if kept_by is WriterLiveness.LOCKS or name.state == "idx":
        return True
    # Its writer may live on a host that no lock shows.
    age_ns = earlier_now_ns(folder) - os.fstat(fd).st_mtime_ns
    return age_ns > ownership.ABANDONED_S * 1e9


def _unlink_orphans(folder: int, orphans: dict[int, str], end_s: float) -> int:
    """Delete files of pages for which no index file was listed twice.

    One listing for all of them: with one for each, 20,000 took minutes.
    """
    if not orphans:
        return 0
    freed = 0
    indexed = {name.segment for name in map(IndexName.parse, _names(folder)) if name}
    for segment, file in orphans.items():
        if time.monotonic() > end_s:
            break
        if segment not in indexed:
            with suppress(OSError):
                size = os.stat(file, dir_fd=folder, follow_symlinks=False).st_size
                os.unlink(file, dir_fd=folder)
                freed += size
    return freed

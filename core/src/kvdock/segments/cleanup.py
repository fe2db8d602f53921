"""Delete segments, leftovers and whole namespaces, with or without an open store."""

from __future__ import annotations

import fcntl
import os
import time
from collections import Counter
from contextlib import suppress

import attrs

from kvdock.segments import ownership
from kvdock.segments.format import HEADER_BYTES, is_newer
from kvdock.segments.ownership import WriterLiveness
from kvdock.segments.paths import (
    RECORD_NAME,
    IndexName,
    data_segment,
    is_folder,
    listing,
    open_folder,
    parse_pool_folder,
)
from kvdock.segments.segment import open_index, read_header

_PASSES = 16  # over a folder that is cleared while it is written


def pool_folders(namespace_fd: int) -> list[str]:
    """Return the names of a namespace's folders of segments, sorted."""
    with listing(namespace_fd) as entries:
        return sorted(
            e.name for e in entries if parse_pool_folder(e.name) and is_folder(e)
        )


def clear_namespace(namespace_fd: int) -> int:
    """Delete every segment of a namespace, including those that are being written.

    Index files are deleted first, so that no page of a half-deleted segment is
    found. Processes that have it open notice at their next call.

    Returns:
        Bytes that were freed.
    """
    freed = 0
    for pool in pool_folders(namespace_fd):
        with suppress(FileNotFoundError):
            folder = open_folder(namespace_fd, pool)
            try:
                freed += _clear_folder(folder)
            finally:
                os.close(folder)
    return freed


def _clear_folder(folder: int) -> int:
    freed = 0
    for _ in range(_PASSES):
        indexes = [name for name in _names(folder) if IndexName.parse(name)]
        sizes = [_unlink(folder, name) for name in indexes]
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
            freed += _unlink(folder, name) or 0
    return freed


def _names(folder: int) -> list[str]:
    with listing(folder) as entries:
        return [entry.name for entry in entries]


def _unlink(folder: int, name: str) -> int | None:
    """Delete a file; return its size, or None if it is not there."""
    try:
        size = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return None
    return size


def remove_empty(root: int, namespace: str) -> bool:
    """Remove a namespace that is empty and that no store has open.

    Args:
        root: Descriptor of the store's root.
        namespace: Its digest.

    Returns:
        Whether it was removed.
    """
    with suppress(OSError):  # of `rmdir` as well, if a file was added meanwhile
        fd = open_folder(root, namespace)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if ownership.read_liveness(fd) is not WriterLiveness.LOCKS or not _is_empty(
                fd
            ):
                return False  # other hosts may have it open, which no lock shows
            for pool in pool_folders(fd):
                os.rmdir(pool, dir_fd=fd)
            for note in (RECORD_NAME, ownership.FILE_NAME):
                with suppress(FileNotFoundError):
                    os.unlink(note, dir_fd=fd)
            os.rmdir(namespace, dir_fd=root)
        finally:
            os.close(fd)
        return True
    return False


def _is_empty(namespace_fd: int) -> bool:
    """Return whether there are only empty folders and the files of the namespace."""
    pools = pool_folders(namespace_fd)
    with listing(namespace_fd) as entries:
        others = {entry.name for entry in entries} - {*pools}
    if others - {RECORD_NAME, ownership.FILE_NAME}:
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
    """Delete one segment, unless it has a writer or is pinned.

    Args:
        namespace_fd: Descriptor of the namespace's folder.
        pool: Name of the segment's folder.
        name: Name of its index file.
        kept_by: How living writers are detected; None if it is unknown.
    """
    index_name = IndexName.parse(name)
    if index_name is None:
        return False
    with suppress(OSError):
        folder = open_folder(namespace_fd, pool)
        try:
            return _delete(folder, index_name, kept_by)
        finally:
            os.close(folder)
    return False


def _delete(folder: int, name: IndexName, kept_by: WriterLiveness | None) -> bool:
    fd = open_index(folder, str(name), write=True)
    try:
        if not _is_abandoned(fd, name, kept_by):
            return False
        if kept_by is not WriterLiveness.LOCKS:
            # Only one process can rename it; for the others it is missing.
            fresh = attrs.evolve(name, generation=name.generation + 1, state="open")
            os.rename(str(name), str(fresh), src_dir_fd=folder, dst_dir_fd=folder)
            name = fresh
        os.unlink(str(name), dir_fd=folder)
        os.unlink(name.data, dir_fd=folder)
    finally:
        os.close(fd)
    return True


def collect_garbage(
    folder: int,
    kept_by: WriterLiveness | None,
    *,
    lost: bool = False,
    newer: bool = False,
) -> int:
    """Delete leftovers of writers that died while creating a segment.

    Args:
        folder: Descriptor of a folder of segments.
        kept_by: How living writers are detected; None if it is unknown.
        lost: Delete segments as well whose index is torn or of an earlier
            version, and index files without pages.
        newer: Delete segments of a later version as well.

    Returns:
        Bytes that were freed.
    """
    freed = 0
    with listing(folder) as entries:
        names = [entry.name for entry in entries]
    parsed = [name for name in map(IndexName.parse, names) if name]
    known = Counter(name.segment for name in parsed if name.state != "new")
    making = {name.segment for name in parsed if name.state == "new"}
    for name in parsed:
        if name.state == "new":
            if not known[name.segment]:
                freed += _unlink_abandoned(folder, name, kept_by)
        elif lost and not _is_readable(folder, name, newer=newer):
            # Pages that another index file describes stay.
            freed += _unlink_abandoned(
                folder, name, kept_by, with_data=known[name.segment] == 1
            )
    for file in names:
        segment = data_segment(file)
        if segment is None or known[segment] or segment in making:
            continue
        freed += _unlink_orphan(folder, segment)
    return freed


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
            if _is_abandoned(fd, name, kept_by):
                os.stat(str(name), dir_fd=folder)  # else another process took it
                for file in (name.data, str(name)) if with_data else (str(name),):
                    with suppress(FileNotFoundError):
                        size = os.stat(file, dir_fd=folder).st_size
                        os.unlink(file, dir_fd=folder)
                        freed += size
        finally:
            os.close(fd)
    return freed


def _is_abandoned(fd: int, name: IndexName, kept_by: WriterLiveness | None) -> bool:
    """Return whether a segment has no writer and is not pinned."""
    if kept_by is not WriterLiveness.TIMEOUT and not (
        ownership.acquire(fd) and ownership.is_unpinned(fd)
    ):
        return False
    if kept_by is WriterLiveness.LOCKS or name.state == "idx":
        return True
    # Its writer may live on a host that no lock shows.
    return time.time() - os.fstat(fd).st_mtime > ownership.ABANDONED_S


def _unlink_orphan(folder: int, segment: int) -> int:
    """Delete a file of pages for which no index file was listed twice."""
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

"""Work on whole namespaces, with or without an open store."""

from __future__ import annotations

import os
from contextlib import suppress

from kvdock.segments import tenure
from kvdock.segments.names import (
    IndexName,
    data_segment,
    listing,
    open_folder,
    parse_pool_folder,
)
from kvdock.segments.segment import open_index


def pool_folders(namespace_fd: int) -> list[str]:
    """Return the names of a namespace's folders of segments, sorted."""
    with listing(namespace_fd) as entries:
        return sorted(e.name for e in entries if parse_pool_folder(e.name))


def clear_namespace(namespace_fd: int) -> int:
    """Delete every segment of a namespace, whoever writes it.

    Index files go first: what is half deleted is already forgotten. Processes
    that have it open read what they hold, and notice with their next call.

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
    with listing(folder) as entries:
        names = [entry.name for entry in entries]
    ours = [name for name in names if IndexName.parse(name)]
    ours += [name for name in names if data_segment(name) is not None]
    for name in ours:
        with suppress(FileNotFoundError):
            size = os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
            os.unlink(name, dir_fd=folder)
            freed += size
    return freed


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

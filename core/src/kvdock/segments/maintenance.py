"""Work on whole namespaces, with or without an open store."""

from __future__ import annotations

import os
from contextlib import suppress

from kvdock.segments.names import (
    IndexName,
    data_segment,
    listing,
    open_folder,
    parse_pool_folder,
)


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

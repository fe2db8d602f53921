"""Who may write a segment: one process at a time, told by a kernel lock.

Locks belong to an open file (Linux open-file-description locks), so they end
with their process, whatever ended it, and two stores of one process exclude
each other as well. Nothing rests on them for correctness: every read is
verified, so two writers on one segment would cost pages and never serve wrong
ones.
"""

from __future__ import annotations

import fcntl
import os
import struct

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid
_WRITER = 0  # byte that the writer locks
_PIN = 1  # byte that readers share while pages must stay


def _set(fd: int, kind: int, byte: int) -> bool:
    request = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


def claim(fd: int) -> bool:
    """Become the writer of an index file; False if there is one."""
    return _set(fd, fcntl.F_WRLCK, _WRITER)


def unpinned(fd: int) -> bool:
    """Return whether nobody pins a segment; called by its writer."""
    if not _set(fd, fcntl.F_WRLCK, _PIN):
        return False
    return _set(fd, fcntl.F_UNLCK, _PIN)


def pin(fd: int) -> bool:
    """Keep a segment from being recycled until the descriptor is closed."""
    return _set(fd, fcntl.F_RDLCK, _PIN)

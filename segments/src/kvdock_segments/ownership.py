"""Segment ownership: one writer at a time.

A writer claims a segment by renaming its index file to the next generation, which
only one of several processes can do. Before that it has to know that the previous
writer is dead, see `WriterLiveness`.

Correctness does not depend on it: every read is verified, so two writers on one
segment would cost pages and never serve wrong ones.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from enum import StrEnum

from kvdock_segments.paths import read_aside, write_aside

FILE_NAME = "tenure"
"""The file that names a namespace's `WriterLiveness`, for tools."""

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid
_WRITER = 0  # byte that the writer locks
_PIN = 1  # byte that is reserved: a process may share it while pages must stay


SILENCE_S = 60.0
"""Without locks, seconds without a commit after which the writer of an open segment
counts as dead, by the clock of the process that watches it."""

ABANDONED_S = 3600.0
"""Without locks, age in seconds of an unfinished segment whose writer is dead."""


class WriterLiveness(StrEnum):
    """The ways to detect that the writer of a segment is alive."""

    LOCKS = "locks"
    """By kernel locks, which end with their process: one host, or a file system whose
    locks all hosts see. They belong to an open file, so two stores of one process
    exclude each other as well."""
    TIMEOUT = "silence"
    """By watching: another writer may take over a segment without a commit for a
    minute. For file systems that have no locks."""


def _set(fd: int, kind: int, byte: int) -> bool:
    request = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


def acquire(fd: int) -> bool:
    """Lock an index file for writing; False if another writer has it."""
    return _set(fd, fcntl.F_WRLCK, _WRITER)


def is_unpinned(fd: int) -> bool:
    """Return whether a segment is not pinned; called by its writer."""
    if not _set(fd, fcntl.F_WRLCK, _PIN):
        return False
    return _set(fd, fcntl.F_UNLCK, _PIN)


def release(fd: int) -> None:
    """Release the locks of a descriptor and close it.

    Closing alone is not enough: a child that was forked meanwhile shares the open
    file, and with it the locks, until it exits.
    """
    with suppress(OSError):
        for byte in (_WRITER, _PIN):
            _set(fd, fcntl.F_UNLCK, byte)
    os.close(fd)


def read_liveness(namespace_fd: int) -> WriterLiveness | None:
    """Return how living writers of a namespace are detected; None if unknown."""
    stored = b""
    with suppress(OSError):  # something else of its name
        stored = read_aside(namespace_fd, FILE_NAME)
    return next((one for one in WriterLiveness if stored == one.encode()), None)


def write_liveness(namespace_fd: int, kept_by: WriterLiveness) -> None:
    """Store how living writers of a namespace are detected, if there is room.

    With one writer that takes no locks, locks are not reliable any more.
    """
    stored = read_liveness(namespace_fd)
    if stored is None or (stored, kept_by) == (
        WriterLiveness.LOCKS,
        WriterLiveness.TIMEOUT,
    ):
        with suppress(OSError):
            write_aside(namespace_fd, FILE_NAME, kept_by.encode())

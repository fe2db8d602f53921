"""Who may write a segment: one process at a time.

The claim itself is a rename of the index file to its next generation, which
only one of several can do. What is left to find out is whether the writer of
an open segment still lives, see `WriterLiveness`.

Nothing rests on it for correctness: every read is verified, so two writers on
one segment would cost pages and never serve wrong ones.
"""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from enum import StrEnum

from kvdock.segments.paths import read_aside, write_aside

FILE_NAME = "tenure"
"""How the writers of a namespace are told to live, for tools that look at it."""

_FLOCK = struct.Struct("@hhqqi4x")  # type, whence, start, length, pid
_WRITER = 0  # byte that the writer locks
_PIN = 1  # byte that is reserved: a process may share it while pages must stay


SILENCE_S = 60.0
"""How long the index of an open segment stays as it is before its writer counts
as dead, where there are no locks; by the clock of who watches it."""

ABANDONED_S = 3600.0
"""Age of a half-made segment that nobody is making any more, without locks."""


class WriterLiveness(StrEnum):
    """How a store tells that the writer of a segment lives."""

    LOCKS = "locks"
    """By locks of the kernel, which end with their process: one host, or a file
    system whose locks all hosts see. They belong to an open file, so two stores
    of one process exclude each other as well."""
    TIMEOUT = "silence"
    """By watching: a writer that adds nothing for a minute has lost its segment
    to whoever renames it. For file systems that have no locks."""


def _set(fd: int, kind: int, byte: int) -> bool:
    request = _FLOCK.pack(kind, os.SEEK_SET, byte, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except (BlockingIOError, PermissionError):
        return False
    return True


def acquire(fd: int) -> bool:
    """Become the writer of an index file; False if there is one."""
    return _set(fd, fcntl.F_WRLCK, _WRITER)


def is_unpinned(fd: int) -> bool:
    """Return whether nobody pins a segment; called by its writer."""
    if not _set(fd, fcntl.F_WRLCK, _PIN):
        return False
    return _set(fd, fcntl.F_UNLCK, _PIN)


def release(fd: int) -> None:
    """Give up what is held through a descriptor, and close it.

    Closing alone would not do: a child that was forked meanwhile has the
    same open file, and with it the locks, for as long as it lives.
    """
    with suppress(OSError):
        for byte in (_WRITER, _PIN):
            _set(fd, fcntl.F_UNLCK, byte)
    os.close(fd)


def read_liveness(namespace_fd: int) -> WriterLiveness | None:
    """Return how a namespace's writers are told to live; None if unknown."""
    stored = b""
    with suppress(OSError):  # something else of its name
        stored = read_aside(namespace_fd, FILE_NAME)
    return next((one for one in WriterLiveness if stored == one.encode()), None)


def write_liveness(namespace_fd: int, kept_by: WriterLiveness) -> None:
    """Keep how a namespace's writers are told to live, as long as there is room.

    One writer without locks is enough for locks to tell nothing.
    """
    stored = read_liveness(namespace_fd)
    if stored is None or (stored, kept_by) == (
        WriterLiveness.LOCKS,
        WriterLiveness.TIMEOUT,
    ):
        with suppress(OSError):
            write_aside(namespace_fd, FILE_NAME, kept_by.encode())

"""The small files of a namespace: its record, and how living writers are detected.

No page depends on them: keys carry the digest of the namespace, and every read is
verified. So a file that is damaged is reported and written again, and never keeps
a store from being opened.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING

from kvdock_segments import ownership
from kvdock_segments.paths import (
    OUT_OF_FILES,
    RECORD_NAME,
    earlier_now_ns,
    fits,
    is_leftover,
    listing,
    read_aside,
    remove,
    status_of,
    write_aside,
)

if TYPE_CHECKING:
    from kvdock_segments.ownership import WriterLiveness

log = logging.getLogger("kvdock_segments")

PROMISES = "promises"
"""The file that counts promised bytes; see `kvdock_segments.ledger`."""

FILES = (RECORD_NAME, ownership.FILE_NAME, PROMISES)
"""Files of a namespace besides its pool folders."""

_IN_WRITING_S = 60.0
"""Maximum age of a file that another process may be writing."""


def read_record(namespace_fd: int) -> bytes:
    """Return the record of a namespace, or b"" if it is not stored."""
    return read_aside(namespace_fd, RECORD_NAME)


def parse_record(namespace_fd: int, namespace: str) -> Mapping[str, object]:
    """Return the record of a namespace, one of a later version too; {} for none."""
    with suppress(OSError, ValueError, RecursionError):
        record = read_record(namespace_fd)
        found = json.loads(record) if fits(record, namespace) else None
        if isinstance(found, dict):
            return found
    return {}


def keep_files(
    namespace_fd: int, namespace: str, record: bytes, kept_by: WriterLiveness
) -> None:
    """Write the small files of a namespace; replace those that are damaged.

    Called when a store is opened. They are not written if the disk is full. `record` is
    the bytes of that digest, or b"" if they are unknown.
    """
    _keep_record(namespace_fd, namespace, record)
    if _tenure_is_damaged(namespace_fd):
        log.warning(
            "%s of namespace %s cannot be read: it is written again",
            ownership.FILE_NAME,
            namespace[:12],
        )
    ownership.write_liveness(namespace_fd, kept_by)


def _keep_record(namespace_fd: int, namespace: str, record: bytes) -> None:
    problem = _record_problem(namespace_fd, namespace)
    if problem:
        log.warning(
            "%s of namespace %s %s: %s",
            RECORD_NAME,
            namespace[:12],
            problem,
            "it is written again" if record else "it is not used",
        )
    elif status_of(namespace_fd, RECORD_NAME):
        return
    if not record:
        return
    try:
        write_aside(namespace_fd, RECORD_NAME, record)
    except OSError as error:
        log.warning(
            "%s of namespace %s cannot be written: %s",
            RECORD_NAME,
            namespace[:12],
            error.strerror,
        )


def damaged_files(namespace_fd: int, namespace: str) -> tuple[str, ...]:
    """Return the names of small files that are damaged or unfinished."""
    with listing(namespace_fd) as entries:
        found = [one.name for one in entries if is_leftover(one.name, FILES)]
    found = [name for name in found if not _in_writing(namespace_fd, name)]
    if _record_problem(namespace_fd, namespace):
        found.append(RECORD_NAME)
    if _tenure_is_damaged(namespace_fd):
        found.append(ownership.FILE_NAME)
    return tuple(sorted(found))


def remove_damaged(namespace_fd: int, namespace: str) -> int:
    """Delete small files that are damaged or unfinished; return the bytes freed.

    The next store that is opened writes them again.
    """
    freed = 0
    for name in damaged_files(namespace_fd, namespace):
        with suppress(OSError):
            freed += remove(namespace_fd, name) or 0
    return freed


def _record_problem(namespace_fd: int, namespace: str) -> str:
    """Return what is wrong with a namespace's record, or ""."""
    try:
        stored = read_record(namespace_fd)
    except OSError as error:
        if error.errno in OUT_OF_FILES:
            raise
        return f"cannot be read ({error.strerror})"
    if fits(stored, namespace) or not status_of(namespace_fd, RECORD_NAME):
        return ""
    return "does not fit the namespace's digest"


def _tenure_is_damaged(namespace_fd: int) -> bool:
    there = status_of(namespace_fd, ownership.FILE_NAME) is not None
    return there and ownership.read_liveness(namespace_fd) is None


def _in_writing(folder: int, name: str) -> bool:
    status = status_of(folder, name)
    if status is None:
        return True  # it is gone
    age_ns = earlier_now_ns(folder) - status.st_mtime_ns
    return name.startswith(".") and age_ns < _IN_WRITING_S * 1e9

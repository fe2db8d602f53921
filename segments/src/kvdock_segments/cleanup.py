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
    closing_fd,
    data_segment,
    earlier_now_ns,
    open_folder,
    pool_folders,
    remove,
    status_of,
)
from kvdock_segments.walk import index_names, names_in, pools

_PASSES = 16  # over a folder that is cleared while it is written


def clear_namespace(namespace_fd: int) -> int:
    """Delete all segments, also those that are being written; return the bytes freed.

    Index files are deleted first, so that no page of a half-deleted segment is
    found. Processes that have it open notice at their next call.
    """
    freed = 0
    for _, folder in pools(namespace_fd):
        with suppress(FileNotFoundError):  # deleted meanwhile
            freed += _clear_folder(folder)
    with suppress(OSError):
        os.unlink(PROMISES, dir_fd=namespace_fd)  # what it counts is gone
    return freed


def _clear_folder(folder: int) -> int:
    freed = 0
    for _ in range(_PASSES):
        sizes = [remove(folder, str(name)) for name in index_names(folder)]
        freed += sum(size or 0 for size in sizes)
        if None not in sizes:
            break  # else one was renamed: list again
    # A segment in creation has its index file first. A listing may miss a file that
    # is renamed meanwhile.
    names = names_in(folder)
    parsed = map(IndexName.parse, (*names, *names_in(folder)))
    known = {name.segment for name in parsed if name}
    for name in names:
        segment = data_segment(name)
        if segment is not None and segment not in known:
            freed += remove(folder, name) or 0
    return freed


def remove_empty(root: int, namespace: str) -> bool:
    """Remove a namespace that is empty and not open; return whether it was."""
    # Errors of `rmdir` as well, if a file was added meanwhile.
    with suppress(OSError), closing_fd(open_folder(root, namespace)) as fd:
        pool_names = pool_folders(fd)
        if lock_unused(fd) or {*names_in(fd)} - {*pool_names, *FILES}:
            return False
        for pool in pool_names:
            os.rmdir(pool, dir_fd=fd)
        for name in FILES:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
        os.rmdir(namespace, dir_fd=root)
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


def delete_if_unowned(
    namespace_fd: int, pool: str, name: str, kept_by: WriterLiveness | None
) -> bool:
    """Delete a segment unless it has a writer, is pinned, or holds promised pages."""
    index_name = IndexName.parse(name)
    if index_name is None:
        return False
    with suppress(OSError), closing_fd(open_folder(namespace_fd, pool)) as folder:
        return _delete(namespace_fd, folder, index_name, kept_by)
    return False


def _delete(
    namespace_fd: int, folder: int, name: IndexName, kept_by: WriterLiveness | None
) -> bool:
    with closing_fd(open_index(folder, str(name), write=True)) as fd:
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
    names = names_in(folder)
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
    for pool, folder in pools(namespace_fd):
        for name in names_in(folder):
            segment = data_segment(name)
            if segment is not None:
                status = status_of(folder, name)
                if status and status.st_nlink > 1 and stat.S_ISREG(status.st_mode):
                    file = (status.st_dev, status.st_ino)
                    found.setdefault(file, []).append((pool, segment))
    return [group for group in found.values() if len(group) > 1]


def delete_linked(namespace_fd: int, kept_by: WriterLiveness | None) -> int:
    """Delete all but one of segments that share a file of pages; return how many."""
    every: dict[tuple[str, int], list[str]] = {}
    linked = linked_segments(namespace_fd)
    for pool, folder in pools(namespace_fd) if linked else ():
        for name in index_names(folder):
            every.setdefault((pool, name.segment), []).append(str(name))
    deleted = 0
    for group in linked:
        left = len(group)
        for pool, segment in group:
            for file in every.get((pool, segment), ()):
                if left > 1 and delete_if_unowned(namespace_fd, pool, file, kept_by):
                    left -= 1
                    deleted += 1
    return deleted


def _is_readable(folder: int, name: IndexName, *, newer: bool) -> bool:
    """Return whether some version can read a segment, or it is missing."""
    with suppress(OSError), closing_fd(open_index(folder, str(name))) as fd:
        if is_newer(os.pread(fd, HEADER_BYTES, 0)):
            return not newer
        there = status_of(folder, name.data) is not None
        return there and read_header(fd, name) is not None
    return True


def _unlink_abandoned(
    folder: int,
    name: IndexName,
    kept_by: WriterLiveness | None,
    *,
    with_data: bool = True,
) -> int:
    freed = 0
    with (
        suppress(OSError),
        closing_fd(open_index(folder, str(name), write=True)) as fd,
    ):
        if _is_abandoned(folder, fd, name, kept_by):
            os.stat(str(name), dir_fd=folder)  # else another process took it
            for file in (name.data, str(name)) if with_data else (str(name),):
                # A directory in place of the pages must not keep the index.
                with suppress(FileNotFoundError, IsADirectoryError):
                    freed += _unlink(folder, file)
    return freed


def _unlink(folder: int, file: str) -> int:
    """Delete a file; return the bytes that are free then."""
    size = os.stat(file, dir_fd=folder, follow_symlinks=False).st_size
    os.unlink(file, dir_fd=folder)
    return size


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
    indexed = {name.segment for name in index_names(folder)}
    for segment, file in orphans.items():
        if time.monotonic() > end_s:
            break
        if segment not in indexed:
            with suppress(OSError):
                freed += _unlink(folder, file)
    return freed

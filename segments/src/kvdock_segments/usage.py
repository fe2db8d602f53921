"""Disk usage of a namespace, and the segments of its folders."""

from __future__ import annotations

import math
import os
import time
from contextlib import suppress
from pathlib import Path

import attrs
import numpy as np

from kvdock.arrays import Int64Array
from kvdock.units import format_bytes
from kvdock_segments import paths
from kvdock_segments.cleanup import delete_if_unowned
from kvdock_segments.format import (
    CLOCK_SLACK_NS,
    credible_uses,
    slots_of,
)
from kvdock_segments.index_file import open_index, read_records, read_uses
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import (
    SETTLED_NS,
    IndexName,
    listing,
    open_folder,
    pool_folders,
)

_SAMPLE = 1024  # pages that show when a segment was used
_SHORT = 12  # digits of a namespace that are enough to name it


_MEASURE_S = 0.1
"""Most time that a refused put spends on measuring other namespaces: of 5000, all
took 0.2 s, and the caller has a deadline."""


def bytes_by_namespace(
    root: int, *, first: str = "", limit_s: float = math.inf
) -> dict[str, int]:
    """Return the bytes of each namespace of a store.

    `first` is measured in any case, and no further one after `limit_s`.
    """
    found: dict[str, int] = {}
    end_s = time.monotonic() + limit_s
    for namespace in sorted(paths.namespaces_in(root), key=lambda one: one != first):
        if found and time.monotonic() > end_s:
            break
        with suppress(OSError):  # it may be deleted meanwhile
            fd = paths.open_folder(root, namespace)
            try:
                found[namespace] = NamespaceUsage(fd).usage_bytes()
            finally:
                os.close(fd)
    return found


def cleanup_hint(root: Path, taken: dict[str, int]) -> str:
    """Name the command that frees the space of a namespace; "" for none."""
    if not any(taken.values()):
        return ""
    largest = max(taken, key=lambda namespace: taken[namespace])
    return (
        f"{_namespaces(len(taken))} {format_bytes(sum(taken.values()))}; "
        f"`kvdock store rm {root} {largest[:_SHORT]}` deletes the largest, "
        f"`kvdock store gc {root} --namespace {largest[:_SHORT]} --to SIZE` its "
        "coldest pages"
    )


def _namespaces(count: int) -> str:
    return f"{count} namespaces take" if count > 1 else "one namespace takes"


def describe_full(root: Path, namespace: str, bound: str) -> str:
    """Describe why a namespace cannot store more pages.

    `bound` is the limit that leaves no room.
    """
    taken: dict[str, int] = {}
    whole = True
    with suppress(OSError):
        fd = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            taken = bytes_by_namespace(fd, first=namespace, limit_s=_MEASURE_S)
            whole = len(taken) == len(paths.namespaces_in(fd))
        finally:
            os.close(fd)
    own = taken.pop(namespace, 0)
    said = (
        f"store {str(root)!r} has no room for pages of namespace "
        f"{namespace[:_SHORT]}, which takes {format_bytes(own)}: {bound}"
    )
    more = cleanup_hint(root, taken)
    besides = "Besides it" if whole else "Besides it, and not all were measured"
    return f"{said}. {besides}, {more}" if more else said


@attrs.frozen
class _Listed:
    """The last listing of a folder of segments.

    Args:
        changed_ns: The folder's time of change; -1 if a later change may have the
            same one.
        inode: Which folder it is.
        full: (time of change in nanoseconds, name, slots) of index files of full
            segments, in any order.
    """

    changed_ns: int
    inode: int
    nbytes: int
    slots: int
    full: tuple[tuple[int, str, int], ...]


class NamespaceUsage:
    """Disk usage of all pools of a namespace; folders are listed when they change.

    The descriptor is not closed here.
    """

    def __init__(
        self, namespace_fd: int, kept_by: WriterLiveness = WriterLiveness.LOCKS
    ) -> None:
        self._kept_by = kept_by
        self._namespace_fd = namespace_fd
        self._listed: dict[str, _Listed] = {}

    def usage_bytes(self, *, but_fd: int = -1) -> int:
        """Return the bytes that all pools take, or all but one.

        The folder `but_fd` is left out, and not listed.
        """
        spared = os.fstat(but_fd).st_ino if but_fd >= 0 else -1
        every = self._look(spared)
        return sum(one.nbytes for one in every.values() if one.inode != spared)

    def bytes_of(self) -> dict[str, int]:
        """Return the folders and the bytes that each takes."""
        return {name: listed.nbytes for name, listed in self._look().items()}

    def full_segments(
        self, *, but_fd: int, least_slots: int = 0
    ) -> dict[tuple[str, str], int]:
        """Return the segments of the other folders that are not being filled.

        Segments without which their folder would have fewer than `least_slots` are
        skipped.

        Returns:
            Folder and name of each index file, and when it was last written, in
            nanoseconds, as it was listed.
        """
        spared = os.fstat(but_fd).st_ino
        return {
            (pool, name): changed_ns
            for pool, listed in self._look(spared).items()
            if listed.inode != spared
            for changed_ns, name, slots in listed.full
            if listed.slots - slots >= least_slots
        }

    def uses_of(self, pool: str, name: str) -> Int64Array:
        """Return when the first pages of a full segment were last used.

        When they were stored, or used until ten seconds ago; of at most 1024 pages,
        since an index file may have megabytes.
        """
        uses = np.zeros(0, np.int64)
        with suppress(OSError):
            folder = open_folder(self._namespace_fd, pool)
            try:
                fd = open_index(folder, name)
                try:
                    slots = slots_of(os.fstat(fd).st_size)
                    uses = read_uses(fd, slots, most=_SAMPLE)
                    records = read_records(fd, np.arange(len(uses)))
                    stored_ns = credible_uses(records["stored_ns"].astype(np.int64))
                    uses = np.where(records["check"], np.maximum(uses, stored_ns), 0)
                finally:
                    os.close(fd)
            finally:
                os.close(folder)
        return uses

    def delete(self, pool: str, name: str) -> bool:
        """Delete a segment, unless it has a writer or is pinned."""
        return delete_if_unowned(self._namespace_fd, pool, name, self._kept_by)

    def _look(self, spared: int = -1) -> dict[str, _Listed]:
        found: dict[str, _Listed] = {}
        for pool in pool_folders(self._namespace_fd):
            with suppress(OSError):
                fd = open_folder(self._namespace_fd, pool)
                try:
                    if os.fstat(fd).st_ino != spared:
                        found[pool] = self._list(fd, self._listed.get(pool))
                finally:
                    os.close(fd)
        self._listed = found
        return found

    def _list(self, fd: int, before: _Listed | None) -> _Listed:
        now_ns = time.time_ns()
        status = os.fstat(fd)
        if before and before.changed_ns == status.st_mtime_ns:
            return before
        nbytes = every_slot = 0
        full = []
        with listing(fd) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    file = entry.stat(follow_symlinks=False)
                    nbytes += file.st_size
                    name = IndexName.parse(entry.name)
                    if name:
                        slots = slots_of(file.st_size)
                        every_slot += slots
                        if name.state == "idx":
                            full.append(
                                (_credible(file.st_mtime_ns), entry.name, slots)
                            )
        settled = now_ns - status.st_mtime_ns > SETTLED_NS
        changed_ns = status.st_mtime_ns if settled else -1
        return _Listed(changed_ns, status.st_ino, nbytes, every_slot, tuple(full))


def _credible(stamp_ns: int) -> int:
    """Return a time of change, 0 if it lies in the future (see `credible_uses`)."""
    return 0 if stamp_ns > time.time_ns() + CLOCK_SLACK_NS else stamp_ns

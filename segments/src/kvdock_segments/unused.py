"""Namespaces that no process has open make way for the one that stores.

Each release of a model, dtype or size of its tensor parallelism makes a namespace of
its own, and the pages of one that is opened no more would stay for ever. Where the
root or its disk is full, its segments go before any page of a namespace in use: of
the longest unused namespace first, and of that the longest unused segment. Promised
pages stay, and so does what a tenant has within its quota.

A namespace is open while a process holds its lock. Where locks do not reach every
host, it is open for a day after its last use.
"""

from __future__ import annotations

import fcntl
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from kvdock.units import format_age, format_bytes
from kvdock_segments import ownership, paths
from kvdock_segments.cleanup import (
    collect_garbage,
    delete_if_unowned,
    remove_empty,
)
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.paths import (
    IndexName,
    data_segment,
    earlier_now_ns,
    listing,
    open_folder,
    pool_folders,
)

if TYPE_CHECKING:
    from kvdock_segments.room import Room

UNUSED_S = 24 * 3600.0
"""Age of the last use after which a namespace counts as not open, where no lock of
another host would show."""
_LOOK_S = 0.5
"""Least seconds between two looks at the other namespaces."""
_PATIENCE = 20
"""How many times as long as a look takes is waited before the next one."""


@attrs.frozen(order=True)
class _Segment:
    """A segment of a namespace that is not open; those in front go first.

    Args:
        since_ns: When its namespace was last used.
        used_ns: When itself was.
    """

    since_ns: int
    used_ns: int
    namespace: str
    pool: str
    name: str
    nbytes: int


class OtherNamespaces:
    """The other namespaces of a root, as the writer of one sees them.

    Safe to use from several threads.

    Args:
        counts: Counters of events, by name.
        room: The room of tenants; None where none has a quota.
    """

    def __init__(
        self, root: Path, namespace: str, counts: Counter[str], room: Room | None
    ) -> None:
        self._root = root
        self._own = namespace
        self._counts = counts
        self._room = room
        self._lock = threading.Lock()
        self._next_look_s = -math.inf
        self._nbytes = 0
        self._unused: list[_Segment] = []

    def nbytes(self) -> int:
        """Return the bytes of all of them, as of a moment ago."""
        with self._lock:
            self._look()
            return self._nbytes

    def unused_bytes(self) -> int:
        """Return the bytes of those that are not open, as of a moment ago."""
        with self._lock:
            self._look()
            return sum(segment.nbytes for segment in self._unused)

    def describe_unused(self) -> str:
        """Say what those that are not open hold; "" for nothing."""
        with self._lock:
            self._look()
            since = {segment.namespace: segment.since_ns for segment in self._unused}
            nbytes = sum(segment.nbytes for segment in self._unused)
        if not nbytes:
            return ""
        several = "one namespace" if len(since) == 1 else f"{len(since)} namespaces"
        age = format_age((time.time_ns() - min(since.values())) / 1e9)
        return (
            f"no process has {several} open: {format_bytes(nbytes)}, not used for "
            f"{age}, make way where there is no room"
        )

    def evict_segment(self) -> bool:
        """Delete the next segment that is to go; return whether there was one."""
        with self._lock:
            self._look()
            while self._unused:
                segment = self._unused.pop(0)
                with suppress(OSError):  # others delete there as well
                    if self._delete(segment):
                        self._nbytes -= segment.nbytes
                        self._counts["segments_deleted"] += 1
                        return True
        return False

    def _look(self) -> None:
        """List what is there, if it is time; called under the lock."""
        began_s = time.monotonic()
        if began_s < self._next_look_s:
            return
        self._nbytes, self._unused = 0, []
        with suppress(OSError), self._opened() as root:
            for namespace in paths.namespaces_in(root):
                if namespace != self._own:
                    with suppress(OSError):  # it may be deleted meanwhile
                        self._look_at(root, namespace)
        self._unused.sort()
        ended_s = time.monotonic()
        self._next_look_s = ended_s + max(_LOOK_S, _PATIENCE * (ended_s - began_s))

    def _look_at(self, root: int, namespace: str) -> None:
        with self._opened(namespace, root) as fd:
            listed: list[tuple[int, str, str, int]] = []
            for pool in pool_folders(fd):
                folder = open_folder(fd, pool)
                try:
                    for used_ns, name, nbytes in _files(folder):
                        self._nbytes += nbytes
                        if name:
                            listed.append((used_ns, pool, name, nbytes))
                finally:
                    os.close(folder)
            since_ns = max((used_ns for used_ns, *_ in listed), default=0)
            if listed and is_unused(fd, since_ns):
                for used_ns, pool, name, nbytes in listed:
                    self._unused.append(
                        _Segment(since_ns, used_ns, namespace, pool, name, nbytes)
                    )

    def _delete(self, segment: _Segment) -> bool:
        """Delete a segment, unless its namespace is open or its pages have to stay."""
        namespace, pool, name = segment.namespace, segment.pool, segment.name
        with self._opened() as root:
            # A process that opens it waits until its descriptor is closed.
            with self._opened(namespace, root) as fd:
                if not is_unused(fd, segment.since_ns):
                    return False
                room = self._room
                if room and not any(room.may_lose([(pool, name)], namespace)):
                    return False
                kept_by = ownership.read_liveness(fd)
                if not delete_if_unowned(fd, pool, name, kept_by):
                    return False
                last = namespace not in {left.namespace for left in self._unused}
                for other in pool_folders(fd) if last else ():
                    folder = open_folder(fd, other)
                    collect_garbage(folder, kept_by, lost=True)
                    os.close(folder)
            if last:
                remove_empty(root, namespace)
        return True

    @contextmanager
    def _opened(self, namespace: str = "", root: int = -1) -> Iterator[int]:
        """Open the root, or a namespace in it, as a context."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        fd = open_folder(root, namespace) if namespace else os.open(self._root, flags)
        try:
            yield fd
        finally:
            os.close(fd)


def is_unused(namespace_fd: int, used_ns: int) -> bool:
    """Return whether no process has a namespace open; others wait until it is closed.

    `used_ns` is when it was last used, by its file system's clock.
    """
    locked = True
    try:
        fcntl.flock(namespace_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        locked = False
    if locked and ownership.read_liveness(namespace_fd) is WriterLiveness.LOCKS:
        return True
    return used_ns < earlier_now_ns(namespace_fd) - UNUSED_S * 1e9


def _files(folder: int) -> Iterator[tuple[int, str, int]]:
    """Yield time of change and name of each index file, and the bytes of its segment.

    A file without one has no name and time. What is read or stored is noted in index
    files within ten seconds, so their times of change are those of use.
    """
    index_files: dict[int, tuple[int, str]] = {}
    sizes: Counter[int] = Counter()
    with listing(folder) as entries:
        for entry in entries:
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                name = IndexName.parse(entry.name)
                segment = name.segment if name else data_segment(entry.name)
                sizes[-1 if segment is None else segment] += status.st_size
                if name:
                    index_files[name.segment] = status.st_mtime_ns, entry.name
    for segment, nbytes in sizes.items():
        yield *index_files.get(segment, (0, "")), nbytes

"""The folders of one namespace: what they take, and who is coldest."""

from __future__ import annotations

import heapq
import os
import time
from contextlib import suppress

import attrs

from kvdock.segments.cleanup import (delete_unowned, pool_folders)
from kvdock.segments.paths import (SETTLED_NS, IndexName, listing, open_folder)
from kvdock.segments.ownership import Tenure


@attrs.frozen
class _Listed:
    """A folder of segments as it was listed.

    Args:
        changed_ns: The folder's time of change then; -1 if it was too fresh to
            be told from a later one.
        inode: Which folder it is.
        nbytes: Bytes of its files.
        full: (time of last note, name) of index files that nobody fills,
            in any order.
    """

    changed_ns: int
    inode: int
    nbytes: int
    full: tuple[tuple[int, str], ...]


class Neighbours:
    """All pools of a namespace, listed again only when they have changed.

    Args:
        namespace_fd: Descriptor of the namespace's folder; not closed here.
        kept_by: How it is told that a writer lives.
    """

    def __init__(self, namespace_fd: int, kept_by: Tenure = Tenure.LOCKS) -> None:
        self._kept_by = kept_by
        self._namespace_fd = namespace_fd
        self._listed: dict[str, _Listed] = {}

    def usage_bytes(self, *, but_fd: int = -1) -> int:
        """Return the bytes that all pools take, or all but one.

        Args:
            but_fd: Descriptor of a folder that is left out, and not listed.
        """
        spared = os.fstat(but_fd).st_ino if but_fd >= 0 else -1
        every = self._look(spared)
        return sum(one.nbytes for one in every.values() if one.inode != spared)

    def bytes_of(self) -> dict[str, int]:
        """Return the folders and the bytes that each takes."""
        return {name: listed.nbytes for name, listed in self._look().items()}

    def delete_one(self, but_fd: int, *, colder_than_ns: float = float("inf")) -> bool:
        """Delete the coldest segment of the other folders.

        Args:
            but_fd: Descriptor of the folder that is spared.
            colder_than_ns: Spare all that were noted later.

        Returns:
            Whether one was deleted.
        """
        spared = os.fstat(but_fd).st_ino
        choice = [
            (stamp, pool, name)
            for pool, listed in self._look(spared).items()
            if listed.inode != spared
            for stamp, name in listed.full
        ]
        heapq.heapify(choice)
        while choice:
            stamp, pool, name = heapq.heappop(choice)
            if stamp >= colder_than_ns:
                return False
            # A folder does not change where a file of it is noted as used.
            noted = self._noted_ns(pool, name)
            if noted > stamp:
                heapq.heappush(choice, (noted, pool, name))
            elif delete_unowned(self._namespace_fd, pool, name, self._kept_by):
                return True
        return False

    def _noted_ns(self, pool: str, name: str) -> int:
        """Return when the use of a segment was last noted; 0 if it is gone."""
        with suppress(OSError):
            path = f"{pool}/{name}"
            at = os.stat(path, dir_fd=self._namespace_fd, follow_symlinks=False)
            return at.st_mtime_ns
        return 0

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
        nbytes = 0
        full = []
        with listing(fd) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    file = entry.stat(follow_symlinks=False)
                    nbytes += file.st_size
                    name = IndexName.parse(entry.name)
                    if name and name.state == "idx":
                        full.append((file.st_mtime_ns, entry.name))
        settled = now_ns - status.st_mtime_ns > SETTLED_NS
        changed_ns = status.st_mtime_ns if settled else -1
        return _Listed(changed_ns, status.st_ino, nbytes, tuple(full))

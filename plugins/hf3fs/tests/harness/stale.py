"""What a host of 3FS sees through its caches, on a clock that may run faster.

3FS's FUSE daemon keeps attributes for 30 s. A writer reports the length of a file that
grows by writes every 5 s; `ftruncate` sets it at once. Bytes that are read without
O_DIRECT come through the page cache.
"""

from __future__ import annotations

import os
import time
from typing import Any

ATTRIBUTES_S = 30.0
LENGTHS_S = 5.0

_CALLS = ("fstat", "stat", "pread", "pwrite", "ftruncate")
_real = {name: getattr(os, name) for name in _CALLS}
_SIZE = 6  # of the fields of `os.stat_result`


class StaleAttributes:
    """Caches of one host in front of the system calls of this process.

    Args:
        scale: How many times faster than the real clock they expire.
    """

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._attributes: dict[Any, tuple[float, os.stat_result]] = {}
        self._lengths: dict[int, tuple[int, int, float]] = {}
        self._bytes: dict[tuple[int, int, int], tuple[float, bytes]] = {}

    def install(self, patch: Any = setattr) -> None:
        """Put the caches in front of `os`, by `setattr` or pytest's monkeypatch."""
        for name in _real:
            patch(os, name, getattr(self, name))

    def _now_s(self) -> float:
        return time.monotonic() * self._scale

    def _cached(self, key: Any, look: Any) -> os.stat_result:
        now_s = self._now_s()
        found = self._attributes.get(key)
        if found is None or found[0] <= now_s:
            status = self._late_length(look(), now_s)
            found = self._attributes[key] = now_s + ATTRIBUTES_S, status
        return found[1]

    def _late_length(self, status: os.stat_result, now_s: float) -> os.stat_result:
        """Return attributes with the length that was reported last."""
        size = status.st_size
        shown, latest, since_s = self._lengths.get(status.st_ino, (size, size, now_s))
        if size != latest:
            latest, since_s = size, now_s
        if now_s - since_s >= LENGTHS_S:
            shown = latest
        self._lengths[status.st_ino] = shown, latest, since_s
        if shown == size:
            return status
        whole: Any = status.__reduce__()[1]
        fields = list(whole[0])
        fields[_SIZE] = shown
        return os.stat_result(fields, whole[1])

    def fstat(self, fd: int) -> os.stat_result:
        status = _real["fstat"](fd)
        return self._cached(status.st_ino, lambda: status)

    def stat(self, path: Any, *, dir_fd: int | None = None, **more: Any) -> Any:
        folder = 0 if dir_fd is None else _real["fstat"](dir_fd).st_ino
        key = folder, path
        return self._cached(key, lambda: _real["stat"](path, dir_fd=dir_fd, **more))

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """Set a length, which this host then knows."""
        _real["ftruncate"](fd, nbytes)
        inode = _real["fstat"](fd).st_ino
        self._lengths.pop(inode, None)
        self._attributes = {
            key: one for key, one in self._attributes.items() if one[1].st_ino != inode
        }

    def pread(self, fd: int, nbytes: int, at: int) -> bytes:
        now_s = self._now_s()
        key = _real["fstat"](fd).st_ino, nbytes, at
        found = self._bytes.get(key)
        if found is None or found[0] <= now_s:
            found = now_s + ATTRIBUTES_S, _real["pread"](fd, nbytes, at)
            self._bytes[key] = found
        return found[1]

    def pwrite(self, fd: int, data: Any, at: int) -> int:
        # A host sees its own writes.
        inode = _real["fstat"](fd).st_ino
        self._bytes = {key: one for key, one in self._bytes.items() if key[0] != inode}
        done: int = _real["pwrite"](fd, data, at)
        return done

"""Keys that a store has written, to notice when they are no longer there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from kvdock.arrays import BoolArray, UInt64Array

_STEP = 1 << 14
"""Keys that are looked up at once: 3 ms under the lock of the index."""


class TrackedKeys:
    """The last keys that were written, by digest.

    About 300 bytes for each key, where it is asked for. Pages may go in many ways:
    evicted here, by another process, deleted, cleared. So what is gone is found by
    looking all of them up, which costs 0.15 microseconds each.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._keys: dict[bytes, str] = {}
        self.limit = 0

    def add(self, digests: UInt64Array, keys: Sequence[str]) -> None:
        """Keep track of keys that were written; forget the oldest over the limit.

        Args:
            digests: uint64 (n, 2).
            keys: The n keys.
        """
        packed = np.ascontiguousarray(digests).tobytes()
        with self._lock:
            for at, key in enumerate(keys):
                digest = packed[16 * at : 16 * at + 16]
                self._keys.pop(digest, None)  # the last written is the youngest
                self._keys[digest] = key
            while len(self._keys) > self.limit:
                del self._keys[next(iter(self._keys))]

    def take_removed(self, find: Callable[[UInt64Array], BoolArray]) -> list[str]:
        """Return and forget the keys that are not there.

        Args:
            find: Says which digests, uint64 (n, 2), are there: bool (n,).
        """
        with self._lock:
            every = list(self._keys)
        gone = []
        for start in range(0, len(every), _STEP):
            part = every[start : start + _STEP]
            digests = np.frombuffer(b"".join(part), np.uint64).reshape(-1, 2)
            gone += [part[at] for at in np.flatnonzero(~find(digests)).tolist()]
        with self._lock:
            found = [self._keys.pop(digest, None) for digest in gone]
        return [key for key in found if key is not None]

"""Count the bytes that moved through NIXL, and those that moved past it."""

from __future__ import annotations

import threading
from collections import Counter
from enum import StrEnum

import attrs


class Way(StrEnum):
    """The ways of bytes between host memory and a file, or to a peer."""

    NIXL_READ = "nixl_read"
    """A transfer of NIXL."""

    NIXL_WRITE = "nixl_write"
    """The same."""

    NIXL_SEND = "nixl_send"
    """A transfer to a peer's memory, as counted by NIXL's own telemetry."""

    KERNEL_READ = "kernel_read"
    """`preadv`, to learn the errno and the length of what NIXL could not move."""

    KERNEL_WRITE = "kernel_write"
    """`pwritev`, for the same reason."""


@attrs.frozen(eq=False)
class ByteCounts:
    """Bytes by way, since the process began. Safe to use from several threads."""

    _counts: Counter[Way] = attrs.field(factory=Counter)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def add(self, way: Way, nbytes: int) -> None:
        """Count bytes that moved."""
        with self._lock:
            self._counts[way] += nbytes

    def read(self) -> dict[Way, int]:
        """Return the bytes of every way, 0 for those not used."""
        with self._lock:
            return {way: self._counts[way] for way in Way}


MOVED = ByteCounts()
"""Of this process."""

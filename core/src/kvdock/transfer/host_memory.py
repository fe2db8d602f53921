"""Host memory for the core's own needs: its own, or a backend's.

Some backends reach only memory that they bring. The core's staging buffers,
trailers and test pages must then be memory of the backend as well. Such memory
may be unmapped when it is released, so its users are counted.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from kvdock.synchronization import new_condition

if TYPE_CHECKING:
    from kvdock.arrays import ByteArray
    from kvdock.plugin.hookspecs import AttachConfig, HostMemory
    from kvdock.pools.spec import PoolSpec
    from kvdock.resilience.channel import BackendChannel

log = logging.getLogger("kvdock")

ALIGN_BYTES = 4096
"""Where memory begins, for direct I/O."""


class HostBuffer:
    """Memory, and the number of its users.

    Args:
        memory: uint8 (nbytes,), beginning on a page of the system's.
        give_back: Releases the memory; None for memory of the core's own,
            which lives as long as references to it.
    """

    def __init__(
        self, memory: ByteArray, give_back: Callable[[], None] | None = None
    ) -> None:
        self.memory = memory
        self._give_back = give_back
        self._users = 0
        self._ended = False
        self._lock, self._changed = new_condition()

    def acquire(self) -> bool:
        """Begin to use it, until `release`; False once it is being closed."""
        if self._give_back is None:
            return True
        with self._lock:
            self._users += not self._ended
            return not self._ended

    def release(self) -> None:
        """End one use."""
        if self._give_back is None:
            return
        with self._lock:
            self._users -= 1
            self._changed.notify_all()

    def close(self) -> None:
        """Reject new users, wait for current ones, then release the memory.

        Called when no backend's call is under way: its users only hash or
        copy.
        """
        if self._give_back is None:
            return
        with self._lock:
            self._ended = True
            self._changed.wait_for(lambda: not self._users)
        self._give_back()


Allocator = Callable[[int], HostBuffer]
"""From a number of bytes to memory."""


def page_aligned(raw: ByteArray) -> ByteArray:
    """Cut memory so that it begins on a page of the system's.

    Args:
        raw: uint8 (nbytes + ALIGN_BYTES,).
    """
    nbytes = len(raw) - ALIGN_BYTES
    return raw[-raw.ctypes.data % ALIGN_BYTES :][:nbytes]


def allocate_host(nbytes: int) -> HostBuffer:
    """Return zeroed memory of the core's own."""
    # Zeroed memory that was never touched costs address space only.
    return HostBuffer(page_aligned(np.zeros(nbytes + ALIGN_BYTES, np.uint8)))


def allocator_for(
    channel: BackendChannel, pool: PoolSpec, config: AttachConfig
) -> Allocator:
    """Return the allocator for a pool's buffers.

    Memory of the backend is released when the channel is closed, after the
    pool is released.
    """
    if "kvdock_allocate" not in channel.backend.plugin.implemented:
        return allocate_host

    def allocate(nbytes: int) -> Callable[[], HostMemory | None]:
        return lambda: channel.backend.allocate(nbytes + ALIGN_BYTES, config)

    def give_back(memory: HostMemory | None) -> None:
        try:
            if memory is not None:
                memory.give_back()
        except Exception:
            log.exception("backend %s failed to take memory back", channel.name)

    def allocate_through_backend(nbytes: int) -> HostBuffer:
        found = channel.call_attach(pool, allocate(nbytes), give_back)
        if found is None:
            return allocate_host(nbytes)
        buffer = HostBuffer(
            page_aligned(np.frombuffer(found.buffer, np.uint8)),
            lambda: give_back(found),
        )
        channel.on_close(buffer.close)
        return buffer

    return allocate_through_backend

"""Aligned, registered memory for objects that direct I/O cannot reach.

O_DIRECT moves whole blocks between aligned addresses. An object that begins or
ends elsewhere, or lies in more pieces than one transfer takes, passes through a
buffer from here. Buffers are kept and used again: to map and register one of
4 MiB costs as much as to move it.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs

LEAST_BYTES = 1 << 20
"""Smallest buffer; one takes many small objects."""

MOST_BYTES = 32 << 20
"""All buffers of a process together, but for one that holds a larger object."""


@attrs.frozen(eq=False)
class BounceBuffer:
    """Anonymous memory, which begins at a page."""

    address: int
    nbytes: int
    forget: Callable[[], None] = attrs.field(repr=False)
    _mapped: mmap.mmap = attrs.field(repr=False)


class BounceBuffers:
    """A bounded pool of buffers.

    Args:
        register: Makes memory known to the library, given its address and bytes;
            returns what ends that.
        most_bytes: Bound of all buffers together.
    """

    def __init__(
        self,
        register: Callable[[int, int], Callable[[], None]],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._register = register
        self._most_bytes = most_bytes
        self._idle: list[BounceBuffer] = []
        self._taken_bytes = 0
        self._changed = threading.Condition()

    @contextmanager
    def borrow(self, nbytes: int, deadline_s: float) -> Iterator[BounceBuffer | None]:
        """Lend a buffer of at least so many bytes; None if time runs out first."""
        buffer = self._take(nbytes, deadline_s)
        try:
            yield buffer
        finally:
            if buffer is not None:
                with self._changed:
                    self._taken_bytes -= buffer.nbytes
                    self._idle.append(buffer)
                    self._changed.notify_all()

    def _take(self, nbytes: int, deadline_s: float) -> BounceBuffer | None:
        with self._changed:
            while True:
                fit = [one for one in self._idle if one.nbytes >= nbytes]
                if fit:
                    buffer = min(fit, key=lambda one: one.nbytes)
                    self._idle.remove(buffer)
                    self._taken_bytes += buffer.nbytes
                    return buffer
                size = max(LEAST_BYTES, 1 << (nbytes - 1).bit_length())
                # A larger object than all buffers together gets its own, alone.
                if (
                    not self._taken_bytes
                    or self._taken_bytes + size <= self._most_bytes
                ):
                    self._drop_idle(size)
                    buffer = self._make(size)
                    self._taken_bytes += size
                    return buffer
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return None
                self._changed.wait(min(left_s, threading.TIMEOUT_MAX))

    def _drop_idle(self, size: int) -> None:
        """Make room for a new buffer of this size."""
        idle_bytes = sum(one.nbytes for one in self._idle)
        while self._idle and self._taken_bytes + idle_bytes + size > self._most_bytes:
            gone = self._idle.pop(0)
            idle_bytes -= gone.nbytes
            gone.forget()

    def _make(self, size: int) -> BounceBuffer:
        mapped = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        return BounceBuffer(address, size, self._register(address, size), mapped)

    def close(self) -> None:
        """Unmap every buffer; none is lent any more."""
        with self._changed:
            idle, self._idle = self._idle, []
        for buffer in idle:
            buffer.forget()

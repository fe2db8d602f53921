"""The landing area: memory where whole pages arrive before they are copied on.

Rows of single tokens are 20 to 50 times slower over a network than whole pages.
Where a peer's tokens go to scattered slots, its pages land here in one piece,
and the receiver copies them to their slots.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock.synchronization import new_condition, remaining_s

if TYPE_CHECKING:
    from kvdock.arrays import ByteArray

_ALIGN_BYTES = 64


@attrs.frozen(eq=False)
class LandingSpan:
    """A piece of the landing area, leased to one request."""

    area: LandingArea
    start: int
    nbytes: int

    @property
    def memory(self) -> ByteArray:
        """Its bytes, uint8 (nbytes,)."""
        return self.area.memory[self.start : self.start + self.nbytes]

    @property
    def address(self) -> int:
        """Return where its bytes begin."""
        return int(self.memory.ctypes.data)

    def release(self) -> None:
        """Give it back, once no byte can land in it; twice does nothing."""
        self.area.release(self)


class LandingArea:
    """Memory for pages that arrive in one piece, of one pool.

    Args:
        memory: uint8 (nbytes,), reachable for peers.
    """

    def __init__(self, memory: ByteArray) -> None:
        self.memory = memory
        self._lock, self._changed = new_condition()
        # Each leased span with its end, in order of their starts.
        self._leased: list[LandingSpan] = []

    @property
    def capacity(self) -> int:
        """Bytes of the area."""
        return len(self.memory)

    @property
    def used(self) -> int:
        """Bytes that are leased."""
        with self._lock:
            return sum(span.nbytes for span in self._leased)

    def acquire(self, nbytes: int, deadline_s: float) -> LandingSpan | None:
        """Lease a piece; None if none is free by the deadline."""
        if nbytes > self.capacity:
            return None
        with self._lock:
            while True:
                span = self._first_fit(nbytes)
                if span is not None:
                    return span
                left_s = remaining_s(deadline_s)
                if not left_s:
                    return None
                self._changed.wait(left_s)

    def _first_fit(self, nbytes: int) -> LandingSpan | None:
        start = 0
        for at, span in enumerate([*self._leased, None]):
            end = self.capacity if span is None else span.start
            if end - start >= nbytes:
                found = LandingSpan(self, start, nbytes)
                self._leased.insert(at, found)
                return found
            if span is not None:
                start = -(-(span.start + span.nbytes) // _ALIGN_BYTES) * _ALIGN_BYTES
        return None

    def release(self, span: LandingSpan) -> None:
        """End the lease of a piece."""
        with self._lock:
            if span in self._leased:
                self._leased.remove(span)
                self._changed.notify_all()

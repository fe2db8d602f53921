"""Rings: each belongs to one call at a time, and goes back empty."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING

from kvdock_hf3fs.library import FORBID_HOLES, Kept

if TYPE_CHECKING:
    from kvdock_hf3fs.library import RawRing, Usrbio

IDLE = -1
"""Row of a ticket whose operation is not in flight."""


class Ticket:
    """The userdata that identifies one operation of a ring.

    A completion is matched by this object itself, never by its position: results
    come in the order in which operations ended. A ring has one for each of its
    entries and uses them again and again. They are shared with no other thread,
    since the library counts references to them without the interpreter's lock.
    """

    __slots__ = ("home", "nbytes", "row")

    def __init__(self, home: object) -> None:
        self.home = home
        self.row = IDLE
        self.nbytes = 0


class Ring:
    """A ring that a call has to itself.

    Args:
        entries: Operations that it takes.
    """

    def __init__(self, raw: RawRing, entries: int) -> None:
        self._kept = Kept(raw)
        self._home = object()
        self.raw = raw
        self.entries = entries
        self.free = [Ticket(self._home) for _ in range(entries)]
        self.broken = False

    @property
    def in_flight(self) -> int:
        """Operations that may still move bytes."""
        return self.entries - len(self.free)

    def submit(self) -> None:
        """Wake the daemon; what was prepared may have begun before."""
        with suppress(OSError):  # `collect` repeats it while nothing comes back
            self.raw.submit()

    def collect(
        self, least: int, timeout_s: float, moved: list[int]
    ) -> list[tuple[int, int]]:
        """Wait for operations to end.

        A library that fails is asked again after `timeout_s`. Bytes of whole operations
        are added to `moved`, by row.

        Returns:
            Row, and bytes moved or -errno, of each that has failed or fell short.
        """
        try:
            found = self.raw.wait(
                max_results=self.entries, min_results=least, timeout=timeout_s
            )
        except OSError:
            # Memory in flight must not be released because a wait failed.
            time.sleep(timeout_s)
            found = []
        if not found:
            self.submit()
        home, free = self._home, self.free
        failed = []
        for done in found:
            ticket = done.userdata
            if type(ticket) is not Ticket or ticket.home is not home:
                self.broken = True
                continue
            row = ticket.row
            if row == IDLE:
                # Not in flight: the ring is not used for another call.
                self.broken = True
                continue
            ticket.row = IDLE
            free.append(ticket)
            result = done.result
            if result == ticket.nbytes:
                moved[row] += result
            else:
                failed.append((row, result))
        return failed

    def release(self) -> None:
        """End the ring, which must be empty."""
        self._kept.release()


class RingPool:
    """Rings of one direction, the one that was used last first.

    Args:
        most: Maximum number of rings, those of hung calls included.
    """

    def __init__(
        self, usrbio: Usrbio, mount: str, entries: int, most: int, *, read: bool
    ) -> None:
        self._usrbio = usrbio
        self._mount = mount
        self._entries = entries
        self._most = most
        self._read = read
        self._free: list[Ring] = []
        self._made = 0
        self._closed = False
        self._lock = threading.Lock()
        self._returned = threading.Condition(self._lock)

    def take(self, deadline_s: float) -> Ring | None:
        """Check out a ring; None if all are in use until the deadline."""
        with self._lock:
            while not self._free and self._made >= self._most:
                if not self._returned.wait(_left_s(deadline_s)):
                    return None
            if self._free:
                return self._free.pop()
            self._made += 1
        try:
            return self._make()
        except BaseException:
            self._forget()
            raise

    def _make(self) -> Ring:
        flags = FORBID_HOLES if self._read else 0
        raw = self._usrbio.make_ioring(
            self._mount, self._entries, self._read, flags=flags
        )
        return Ring(raw, self._entries)

    def give_back(self, ring: Ring) -> None:
        """Check in a ring; one that is not empty stays where it is.

        Called at the end of a call, by its thread.
        """
        if ring.in_flight:
            return
        with self._lock:
            keep = not (ring.broken or self._closed)
            if keep:
                self._free.append(ring)
                self._returned.notify()
        if not keep:
            ring.release()
            self._forget()

    def _forget(self) -> None:
        with self._lock:
            self._made -= 1
            self._returned.notify()

    def close(self) -> None:
        """End the rings that no call has; the others end with their calls."""
        with self._lock:
            self._closed = True
            ended, self._free = self._free, []
            self._made -= len(ended)
        for ring in ended:
            ring.release()


class Rings:
    """The rings of an attachment, shared by its pools.

    Args:
        most: Maximum number of rings for each direction.
    """

    def __init__(self, usrbio: Usrbio, mount: str, entries: int, most: int) -> None:
        self.read = RingPool(usrbio, mount, entries, most, read=True)
        self.write = RingPool(usrbio, mount, entries, most, read=False)
        self._users = 0
        self._closed = False
        self._lock = threading.Lock()

    def join(self) -> bool:
        """Add a user; False after the last one has left."""
        with self._lock:
            self._users += not self._closed
            return not self._closed

    def leave(self) -> None:
        """Remove a user; the last one closes the rings."""
        with self._lock:
            self._users -= 1
            if self._users:
                return
            self._closed = True
        self.read.close()
        self.write.close()


def _left_s(deadline_s: float) -> float:
    """Return how long to wait; a lock waits for no more than `TIMEOUT_MAX`."""
    return min(max(0.0, deadline_s - time.monotonic()), threading.TIMEOUT_MAX / 2)

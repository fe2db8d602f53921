"""Memory of transfers that the library gave up and may still finish.

A get from an owner that is frozen or out of reach fails after 60 s, and its bytes
are written into the caller's memory when the owner answers again, measured with
0.3.13: also when the memory is not registered any more. Closing the store is what
ends that. So such memory is held until its store is closed or replaced.
"""

from __future__ import annotations

import logging
import threading
import time
from enum import StrEnum
from typing import TYPE_CHECKING

import attrs

from kvdock import MemoryHold
from kvdock.units import format_bytes
from kvdock_mooncake.transfer_limits import LIBRARY_WAIT_S

if TYPE_CHECKING:
    from kvdock_mooncake.settings import MooncakeSettings

log = logging.getLogger("kvdock")

_NEAR_LIMIT_S = LIBRARY_WAIT_S - 10.0
_STANDALONE_LIMIT_S = 20.0
"""A standalone client is given up after 30 s, and executes the call when it can."""

_RENEW_AGAIN_S = 30.0


class Renewal(StrEnum):
    """When a store is replaced so that held memory becomes free."""

    AT_ONCE = "at once"
    """When no call runs: it lends nothing, so nothing is lost with it."""
    WHEN_FULL = "when full"
    """When `max_held_bytes` are held: objects in its own segment are lost."""
    NEVER = "never"
    """Two stores cannot spill into one directory: it is free when this one closes."""
    WITHOUT_EFFECT = "without effect"
    """A standalone client makes the transfers, and goes on with them when our store
    is closed: the memory is held until the process ends."""

    @classmethod
    def of(cls, settings: MooncakeSettings) -> Renewal:
        """Return what becomes of the store of a process with these settings."""
        if settings.standalone:
            return cls.WITHOUT_EFFECT
        if settings.ssd_offload:
            return cls.NEVER
        return cls.WHEN_FULL if settings.segment_bytes else cls.AT_ONCE


@attrs.frozen
class CallTimer:
    """The start of a library call by both clocks that matter.

    The library measures its 60 s by the clock of the wall, which may be set.
    """

    monotonic_s: float = attrs.field(factory=time.monotonic)
    wall_s: float = attrs.field(factory=time.time)

    def elapsed_s(self) -> float:
        """Return the longer time of both."""
        return max(time.monotonic() - self.monotonic_s, time.time() - self.wall_s)


@attrs.define(eq=False)
class HeldMemory:
    """The holds of one client's store.

    Args:
        most_bytes: Above it no more bytes are moved with this store.
        renewal: When the store is replaced.
        limit_s: A failed call that lasted as long may not have ended.
    """

    most_bytes: int
    renewal: Renewal
    limit_s: float = _NEAR_LIMIT_S
    nbytes: int = attrs.field(default=0, init=False)
    _holds: list[MemoryHold] = attrs.field(factory=list, init=False)
    _not_before_s: float = attrs.field(default=0.0, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @classmethod
    def of(cls, settings: MooncakeSettings) -> HeldMemory:
        """Return it for the store of a process with these settings."""
        limit_s = _STANDALONE_LIMIT_S if settings.standalone else _NEAR_LIMIT_S
        return cls(settings.max_held_bytes, Renewal.of(settings), limit_s)

    @property
    def full(self) -> bool:
        """Return whether so much is held that nothing more may be moved."""
        return self.nbytes > self.most_bytes

    @property
    def outlives_store(self) -> bool:
        """Return whether some is held that stays so when its store is closed."""
        return bool(self.nbytes) and self.renewal is Renewal.WITHOUT_EFFECT

    def add(self, nbytes: int) -> MemoryHold:
        """Hold the memory of one batch until `release`."""
        hold = MemoryHold()
        with self._lock:
            self._holds.append(hold)
            self.nbytes += nbytes
            total = self.nbytes
        log.warning(
            "mooncake: transfers of %s were given up and may still end: %s of memory "
            "stay leased until the %s; the store is replaced: %s",
            format_bytes(nbytes),
            format_bytes(total),
            "process ends" if self.outlives_store else "store is closed",
            self.renewal,
        )
        return hold

    def wants_renewal(self) -> bool:
        """Return whether the store is to be replaced now, if no call runs."""
        if not self.nbytes or time.monotonic() < self._not_before_s:
            return False
        return self.renewal is Renewal.AT_ONCE or (
            self.renewal is Renewal.WHEN_FULL and self.full
        )

    def postpone_renewal(self) -> None:
        """Note that the store could not be replaced."""
        self._not_before_s = time.monotonic() + _RENEW_AGAIN_S

    def release(self) -> None:
        """Free all of it, after its store was closed, if that ends transfers."""
        if self.outlives_store:
            return
        with self._lock:
            holds, self._holds = self._holds, []
            self.nbytes = 0
        for hold in holds:
            hold.release()

"""The state that the pools of one namespace share in one client."""

from __future__ import annotations

import threading
import time

import attrs

_CALL_S = 0.01
_LEASE_FACTOR = 1.1
"""How long a lease counts, in leases: the ranks of an engine read the same pages,
and clear them, not quite at once. The rank that reopened first would find what
another rank's lease has kept, and hold it with a lease of its own."""


@attrs.define(eq=False)
class NamespaceState:
    """Leases and running calls of one namespace, and whether it is being cleared.

    Args:
        lease_s: The lease that the master grants.
        trial: Whether it only holds test pages of the core.
    """

    namespace: str
    lease_s: float
    trial: bool = False
    clearing: bool = attrs.field(default=False, init=False)
    _leased_until: float = attrs.field(default=0.0, init=False)
    _calls: int = attrs.field(default=0, init=False)
    _remover: bool = attrs.field(default=False, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def note_lease(self) -> None:
        """Note that the master has just granted leases to this process."""
        self._leased_until = time.monotonic() + _LEASE_FACTOR * self.lease_s

    def leased_for_s(self) -> float:
        """Return for how long this process surely holds leases, or longer."""
        leased_s = max(0.0, self._leased_until - time.monotonic())
        return max(leased_s, _CALL_S) if self._calls else leased_s

    def acquire(self) -> bool:
        """Begin a lookup, a read or a put; return False while it is cleared."""
        with self._lock:
            self._calls += not self.clearing
            return not self.clearing

    def release(self) -> None:
        """End what `acquire` has begun."""
        with self._lock:
            self._calls -= 1

    def begin_clear(self) -> None:
        """Reject new calls until `reopen`."""
        with self._lock:
            if not self.clearing and self.leased_for_s():
                # Other ranks may have read what this one has until now.
                self.note_lease()
            self.clearing = True

    def reopen(self) -> None:
        """Accept calls again, unless a thread still removes objects."""
        with self._lock:
            self.clearing = self._remover

    def start_remover(self) -> bool:
        """Reserve the removal in the background; return whether it is needed."""
        with self._lock:
            if self._remover or not self.clearing:
                return False
            self._remover = True
            return True

    def end_remover(self, *, clearing: bool) -> None:
        """End the removal in the background."""
        with self._lock:
            self._remover = False
            self.clearing = clearing

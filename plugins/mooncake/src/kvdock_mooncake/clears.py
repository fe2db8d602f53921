"""Clear a namespace although leases hold some of it.

Nothing is removed by force, and the library tells neither which objects a
lease has kept nor how many. So a clear removes what it can, and where leases
last it closes the namespace for this client: nothing of it is found, read or
stored until the last lease of this process has ended and the rest is removed,
by a thread that ends with the last pool.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from kvdock_mooncake.client import Client, PoolRegistration

log = logging.getLogger("kvdock")

_WAITED_FOR_S = 1.0
"""Leases that end so soon are waited for: afterwards puts go on at once."""

_EVERY_S = 0.25
_CALL_S = 0.01
_APART = 1.1
"""How long a lease counts, in leases: the ranks of an engine read the same pages,
and clear them, not quite at once. Whoever opened first would find what another
rank's lease has kept, and hold it with a lease of its own."""


class ClientClosed(Exception):  # noqa: N818 - leaves a client's `using`, never this plugin
    """No call may be made: shut, or in a forked child."""


@attrs.define(eq=False)
class NamespaceState:
    """One namespace, as the pools of a client share it.

    Args:
        namespace: Its digest.
        lease_s: The lease that the master grants.
        trial: Whether only pages of the core's own lie there.
    """

    namespace: str
    lease_s: float
    trial: bool = False
    clearing: bool = attrs.field(default=False, init=False)
    _leased_until: float = attrs.field(default=0.0, init=False)
    _inside: int = attrs.field(default=0, init=False)
    _errand: bool = attrs.field(default=False, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def note_lease(self) -> None:
        """Note that the master has just given leases to this process."""
        self._leased_until = time.monotonic() + _APART * self.lease_s

    def acquire(self) -> bool:
        """Begin to find, read or store; return False where it is closed."""
        with self._lock:
            self._inside += not self.clearing
            return not self.clearing

    def release(self) -> None:
        """End what `enter` has begun."""
        with self._lock:
            self._inside -= 1

    def clear(self, client: Client, store: Any, deadline_s: float) -> int:  # noqa: ANN401 - the library's own class
        """Forget the namespace; return 0, or the library's number."""
        with self._lock:
            if not self.clearing and self.leased_for_s():
                # Other ranks may have read what this one has until now.
                self.note_lease()
            self.clearing = True
        try:
            return self._clear(client, store, deadline_s)
        except BaseException:
            self.reopen()
            raise

    def _clear(self, client: Client, store: Any, deadline_s: float) -> int:  # noqa: ANN401 - the library's own class
        client.lookup_cache.clear()
        until = min(deadline_s, time.monotonic() + _WAITED_FOR_S)
        while True:
            held_s = self.leased_for_s()
            removed = self._remove(store)
            if removed or not held_s:
                self.reopen()
                return removed
            now = time.monotonic()
            if now + held_s > until:
                break
            time.sleep(held_s)
        log.info("mooncake: a cleared namespace is closed for %.1f s or more", held_s)
        with self._lock:
            self.clearing = True
        self.resume_clear(client)
        return 0

    def resume_clear(self, client: Client) -> None:
        """Let a thread remove what is left, unless one does or nothing is."""
        with self._lock:
            if self._errand or not self.clearing:
                return
            self._errand = True
        try:
            member = client.admit((), errand=True)
        except ClientClosed:
            self._errand = False
            return
        threading.Thread(
            target=self.finish_clear,
            args=(client, member),
            name="kvdock-clear",
            daemon=True,
        ).start()

    def leased_for_s(self) -> float:
        """How long objects of it are surely held by this process, or more."""
        leased_s = max(0.0, self._leased_until - time.monotonic())
        return max(leased_s, _CALL_S) if self._inside else leased_s

    def reopen(self) -> None:
        """Let calls in again, if nothing is left to be removed."""
        with self._lock:
            self.clearing = self._errand

    def finish_clear(self, client: Client, member: PoolRegistration) -> None:
        done = False
        while not done and not client.left(member, _EVERY_S):
            held_s = self.leased_for_s()
            if client.master.is_down():
                continue
            done = client.removes(member, self._remove) and not held_s
        with self._lock:
            self._errand = False
            self.clearing = not done
        if not done:
            log.log(
                logging.INFO if self.trial else logging.WARNING,
                "mooncake: closed before the leases of a cleared namespace had "
                "ended: what was read in the last %g s stays stored",
                self.lease_s,
            )
        client.release_pool(member)

    def _remove(self, store: Any) -> int:  # noqa: ANN401 - the library's own class
        """Remove all that no lease holds; return 0, or the library's number."""
        return min(0, int(store.remove_by_regex(f"^{re.escape(self.namespace)}/.*")))

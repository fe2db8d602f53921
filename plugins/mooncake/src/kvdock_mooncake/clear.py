"""Clear a namespace although leases keep some of it.

Nothing is removed by force, and the library reports neither which objects a
lease has kept nor how many. So a clear removes what it can, and while leases
last this client rejects calls of the namespace: nothing of it is found, read or
stored until the last lease of this process has ended and a background thread,
which ends with the last pool, has removed the rest. The same thread ends a removal
of so many objects that the library does not wait for the master's answer.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import TYPE_CHECKING, Any

from kvdock_mooncake.client import ClientClosed
from kvdock_mooncake.error_codes import MASTER_SILENT

if TYPE_CHECKING:
    from kvdock_mooncake.client import Client, PoolRegistration
    from kvdock_mooncake.namespace_state import NamespaceState

log = logging.getLogger("kvdock")

_WAITED_FOR_S = 1.0
"""Leases that end so soon are waited for: afterwards puts go on at once."""

_POLL_S = 0.25


def clear(client: Client, store: Any, state: NamespaceState, deadline_s: float) -> int:  # noqa: ANN401 - the library's own class
    """Forget a namespace; return 0, or the library's number.

    Leases are waited for until `deadline_s`, on `time.monotonic()`'s clock.
    """
    state.begin_clear()
    try:
        return _clear(client, store, state, deadline_s)
    except BaseException:
        state.reopen()
        raise


def _clear(client: Client, store: Any, state: NamespaceState, deadline_s: float) -> int:  # noqa: ANN401 - the library's own class
    client.lookup_cache.clear()
    until = min(deadline_s, time.monotonic() + _WAITED_FOR_S)
    while True:
        leased_s = state.leased_for_s()
        began_s = time.monotonic()
        removed = remove_unleased(store, state)
        now = time.monotonic()
        if removed == MASTER_SILENT and _is_busy(client, now - began_s, deadline_s):
            break
        if removed or not leased_s:
            state.reopen()
            return removed
        if now + leased_s > until:
            break
        time.sleep(leased_s)
    log.info("mooncake: a cleared namespace is closed for %.1f s or more", leased_s)
    # Another call may have reopened it meanwhile.
    state.begin_clear()
    resume_clear(client, state)
    return 0


def _is_busy(client: Client, silence_s: float, deadline_s: float) -> bool:
    """Return whether the master answers other calls, soon enough.

    A client may have to wait for its removal even then: its next call goes
    through the same connection.
    """
    while time.monotonic() + silence_s < deadline_s and client.master.answers():
        if client.reachable():
            return True
        time.sleep(_POLL_S)
    return False


def resume_clear(client: Client, state: NamespaceState) -> None:
    """Start the removal in the background, unless it runs or is not needed."""
    if not state.start_remover():
        return
    try:
        member = client.admit((), background=True)
    except ClientClosed:
        state.end_remover(clearing=True)
        return
    threading.Thread(
        target=_finish_clear,
        args=(client, member, state),
        name="kvdock-clear",
        daemon=True,
    ).start()


def _finish_clear(
    client: Client, member: PoolRegistration, state: NamespaceState
) -> None:
    done, pause_s = False, _POLL_S
    while not done and not client.left(member, pause_s):
        leased_s = state.leased_for_s()
        if client.master.is_down():
            continue
        remove = lambda store: remove_unleased(store, state)  # noqa: E731 - a thunk
        began_s = time.monotonic()
        done = client.removes(member, remove) and not leased_s
        # Removals whose answer comes late must not take all threads of the master.
        pause_s = max(_POLL_S, time.monotonic() - began_s)
    state.end_remover(clearing=not done)
    if not done:
        log.log(
            logging.INFO if state.trial else logging.WARNING,
            "mooncake: closed before the leases of a cleared namespace had "
            "ended: what was read in the last %g s stays stored",
            state.lease_s,
        )
    client.release_pool(member)


def remove_unleased(store: Any, state: NamespaceState) -> int:  # noqa: ANN401 - the library's own class
    """Remove all that no lease keeps; return 0, or the library's number."""
    pattern = f"^{re.escape(state.namespace)}/.*"
    return min(0, int(store.remove_by_regex(pattern)))

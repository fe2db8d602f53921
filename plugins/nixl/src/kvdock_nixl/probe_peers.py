"""Try whether two UCX agents of this process reach each other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvdock import Finding
from kvdock.errors import KvdockError
from kvdock.peers.connections import TransferLost
from kvdock_nixl.ucx_agent import UcxAgent
from kvdock_nixl.ucx_transports import is_fenced

if TYPE_CHECKING:
    from kvdock_nixl.library import Library
    from kvdock_nixl.settings import NixlSettings

_TIME_S = 5.0


def probe_peers(library: Library, settings: NixlSettings) -> Finding:
    """Write a few bytes from one agent to another."""
    transports = settings.ucx_transports
    agents: list[UcxAgent] = []
    try:
        agents += [
            UcxAgent(library, transports, listens=listens) for listens in (False, True)
        ]
        sender, receiver = agents
        sender.add_peer(receiver.name, receiver.metadata())
        until_s = time.monotonic() + _TIME_S
        sender.reach(receiver.name, receiver.scratch_address, until_s)
    except TransferLost as reason:
        return Finding(
            ok=False,
            what=f"no peer is reached with the transports {transports!r}: {reason}",
            hint="Set ucx_transports (UCX_TLS) to transports of this host.",
        )
    except KvdockError as error:
        return Finding(ok=False, what=error.what, hint=error.fix)
    finally:
        for agent in agents:
            agent.close()
    what = f"a peer's memory is reached through UCX ({transports})"
    if is_fenced(transports):
        return Finding(ok=True, what=what)
    return Finding(
        ok=True,
        warning=True,
        what=f"{what}; with these a sender on this host writes after it was withdrawn",
        hint="Leave out cma, knem, xpmem, posix and sysv, or slots of a sender that is "
        "lost stay held until it is dead.",
    )

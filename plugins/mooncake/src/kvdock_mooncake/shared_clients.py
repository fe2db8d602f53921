"""The clients of this process: one for each way of joining a cluster.

Attachments that join in the same way share a client, so that a process lends
its memory once. A client that lends memory is shut when its last pool leaves.
One that lends none is kept for the next attachment: each time the library
shuts a store it holds the interpreter for a second or two, and leaves a dozen
threads behind.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from kvdock_mooncake.client import Client, ClientClosed, PoolRegistration
from kvdock_mooncake.connect import reject_fork
from kvdock_mooncake.master import ClusterError
from kvdock_mooncake.settings import MooncakeSettings

if TYPE_CHECKING:
    from kvdock import Block

_Way = tuple[MooncakeSettings, str]

_CLIENTS: dict[_Way, Client] = {}
_OPENING = threading.Lock()


def join_pool(
    settings: MooncakeSettings,
    owner: str,
    namespace: str,
    blocks: tuple[Block, ...],
) -> tuple[Client, PoolRegistration]:
    """Register a pool's memory with the client for these settings.

    Args:
        settings: Complete settings.
        owner: This process's name; those that spill have a client each.
        namespace: Where the warm-up's key lies.
        blocks: The pool's memory.

    Raises:
        KvdockError: If the cluster cannot be joined, or rejects the memory.
    """
    # Before the lock, which a parent may have held when it forked.
    reject_fork()
    way = (settings, owner if settings.ssd_offload else "")
    with _OPENING:
        client = _CLIENTS.get(way)
        if client is not None:
            try:
                client.warm_up(namespace)
                return client, client.admit(blocks)
            except (ClientClosed, ClusterError):
                client.close_when_idle()
        client = _CLIENTS[way] = Client.open(settings, owner, namespace)
        return client, client.admit(blocks)

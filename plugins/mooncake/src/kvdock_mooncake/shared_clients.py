"""The clients of this process: one for each way of joining a cluster.

Attachments that join in the same way share a client, so that a process lends
its memory once. A client that lends memory is shut when its last pool leaves.
One that lends none is kept for the next attachment: each time the library
shuts a store it holds the interpreter for a second or two, and leaves a dozen
threads threads behind.

A standalone client (`mooncake_client`) owns the segment and outlives the engine. It
reads and writes only memory that the library shares with it, so everything that is to
be moved lies in some that is taken here.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from kvdock import AttachConfig, HostMemory
from kvdock_mooncake.client import Client, ClientClosed, PoolRegistration
from kvdock_mooncake.connect import reject_fork
from kvdock_mooncake.master import ClusterError
from kvdock_mooncake.registered_memory import RawMemory
from kvdock_mooncake.settings import MooncakeSettings
from kvdock_mooncake.shared_segments import SHARED_SEGMENTS
from kvdock_mooncake.spill import owner_of

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

    Those that spill have a client for each `owner`, a process.
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


def allocate(
    settings: MooncakeSettings, nbytes: int, config: AttachConfig
) -> HostMemory:
    """Take host memory that a standalone client reaches.

    It keeps the client's connection open until it is given back.
    """
    owner = owner_of(config.process, config.shard)
    client, member = join_pool(settings, owner, config.namespace, ())
    try:
        piece = SHARED_SEGMENTS.take(nbytes, member, client.take)
    except BaseException:
        client.release_pool(member)
        raise

    def give_back() -> None:
        # The client first: then the piece may be handed out again.
        client.release_pool(member)
        # What the standalone client may still write to has no other use.
        if not client.held.outlives_store:
            SHARED_SEGMENTS.leave(piece, member)

    try:
        client.extend(member, piece)
    except BaseException:
        give_back()
        raise
    return HostMemory(np.asarray(RawMemory(piece.address, piece.nbytes)), give_back)

"""Memory of a standalone client, for pools to lie in.

A standalone client (`mooncake_client`) owns the segment and outlives the
engine. It reads and writes only memory that the library shares with it, so
everything that is to be moved lies in some from here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvdock import AttachConfig, HostMemory
from kvdock_mooncake.registered_memory import RawMemory
from kvdock_mooncake.shared_clients import join_pool
from kvdock_mooncake.shared_segments import SHARED_SEGMENTS
from kvdock_mooncake.spill import owner_of

if TYPE_CHECKING:
    from kvdock_mooncake.settings import MooncakeSettings


def allocate(
    settings: MooncakeSettings, nbytes: int, config: AttachConfig
) -> HostMemory:
    """Take host memory that a standalone client reaches.

    It keeps the client's connection open until it is given back.

    Args:
        settings: Complete settings with `standalone`, the client's address.
        nbytes: How much.
        config: Whose memory it is.

    Raises:
        KvdockError: If there is no such client, or no memory.
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

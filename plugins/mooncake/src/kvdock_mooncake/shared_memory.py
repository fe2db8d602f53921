"""Memory of a standalone client, for pools to lie in.

A standalone client (`mooncake_client`) owns the segment and outlives the
engine. It reads and writes only memory that it shares itself, so an engine
that uses one takes its host pools from here, before it attaches them: only the
very client that gave the memory out can register it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np
import numpy.typing as npt

from kvdock.errors import RegionError
from kvdock.regions import Block
from kvdock.settings import format_bytes
from kvdock.shards import Shard
from kvdock_mooncake.clients import join_pool
from kvdock_mooncake.memory import RawMemory
from kvdock_mooncake.spill import owner_of

if TYPE_CHECKING:
    from kvdock_mooncake.client import Client, Member
    from kvdock_mooncake.settings import MooncakeSettings


@attrs.frozen(eq=False)
class SharedMemory:
    """Memory of a standalone client.

    Args:
        array: The bytes, uint8 (nbytes,).
    """

    array: npt.NDArray[np.uint8] = attrs.field(repr=False)
    _client: Client
    _member: Member

    def release(self) -> None:
        """Let go of it; no pool may lie in it any more."""
        self._client.release(self._member)


def allocate(settings: MooncakeSettings, nbytes: int) -> SharedMemory:
    """Take host memory from a standalone client.

    Called before pools are attached, once for each pool or once for all.

    Args:
        settings: With `standalone`, the client's address.
        nbytes: How much.

    Raises:
        KvdockError: If there is no such client, or it has no room.
    """
    full = settings.completed()
    if not full.standalone:
        raise RegionError(
            "memory is only shared by a standalone client",
            fix="Set `standalone` to its address, or use memory of your own.",
        )
    client, member = join_pool(full, owner_of("", Shard()), "", ())
    address = client.take(nbytes)
    if not address:
        client.release(member)
        raise RegionError(
            f"the standalone client has no {format_bytes(nbytes)} left",
            fix="Raise standalone_bytes.",
        )
    try:
        client.extend(member, Block(address, nbytes))
    except BaseException:
        client.release(member)
        raise
    return SharedMemory(np.asarray(RawMemory(address, nbytes)), client, member)

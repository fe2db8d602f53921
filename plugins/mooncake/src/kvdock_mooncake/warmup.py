"""A few bytes that are stored and read back to see whether a cluster works."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvdock import Block
from kvdock.units import format_seconds
from kvdock_mooncake.error_codes import NO_ROOM, TRANSFER_FAILED, sentence_of
from kvdock_mooncake.master import ClusterError
from kvdock_mooncake.registered_memory import RawMemory

log = logging.getLogger("kvdock")

_BYTES = 64
_FOR_S = 2.0
_AGAIN_EVERY_S = 0.02
_LEAST_LEASE_S = 0.05
"""A lease that ends within it is too short for a call of full size."""
_JUDGED_S = 0.1
"""After it, on a machine that is busy, a lease of any length may have ended."""


@attrs.frozen(eq=False)
class WarmUp:
    """Bytes to store, and as many to read them back into.

    Args:
        memory: uint8 (2, 64).
    """

    memory: npt.NDArray[np.uint8]

    @classmethod
    def of(cls, take: Callable[[int], Block] | None) -> WarmUp:
        """Fill memory that `take` brings; any memory if it is None."""
        size = 2 * _BYTES
        if take:
            memory = np.asarray(RawMemory(take(size).address, size))
        else:
            memory = np.zeros(size, np.uint8)
        memory[:_BYTES] = np.arange(_BYTES)
        return cls(memory.reshape(2, _BYTES))

    @property
    def block(self) -> Block:
        """All of it, to be registered."""
        return Block(int(self.memory.ctypes.data), 2 * _BYTES)

    def round_trip(
        self,
        store: Any,  # noqa: ANN401 - the library's own class
        namespace: str,
        put_config: Any,  # noqa: ANN401 - same
        *,
        leases: bool = False,
    ) -> int:
        """Store it, read it back and remove it, under a key of our own.

        Peers may not be reachable in the first moments, so it is tried again. A cluster
        without room is accepted: it may get some later. With `leases`, it looks whether
        the master's are long enough as well, which takes as long as the shortest that
        are.

        Returns:
            0, or the library's number where nothing can be stored.
        """
        key = f"{namespace}/{uuid.uuid4().hex}.warmup"
        until = time.monotonic() + _FOR_S
        while True:
            began = time.monotonic()
            status = self._there_and_back(store, key, put_config)
            if status in (_BYTES, NO_ROOM) or time.monotonic() > until:
                break
            time.sleep(_AGAIN_EVERY_S)
        short_s = _short_lease_s(store, key, began) if leases else 0.0
        store.remove(key, True)
        if status == _BYTES:
            if (self.memory[0] != self.memory[1]).any():
                raise ClusterError("the Mooncake cluster gave wrong bytes back")
            if short_s:
                raise _short_leases(short_s)
            return 0
        if status in (NO_ROOM, TRANSFER_FAILED):
            log.warning("the Mooncake cluster stores nothing: %s", sentence_of(status))
            return status
        raise ClusterError(
            f"the Mooncake cluster does not work: {sentence_of(status)}",
            fix="Look at the master's log.",
        )

    def _there_and_back(self, store: Any, key: str, put_config: Any) -> int:  # noqa: ANN401 - the library's own classes
        """Store it and read it back; return the bytes or the library's number."""
        here, size = self.block.address, _BYTES
        self.memory[1] = 0
        status = int(store.batch_put_from([key], [here], [size], put_config)[0])
        if status:
            return status
        return int(store.batch_get_into([key], [here + size], [size])[0])


def _short_lease_s(store: Any, key: str, began: float) -> float:  # noqa: ANN401 - the library's own class
    """Return within how many seconds the lease of a read ended; 0.0 if it is long.

    Only a forced removal takes what is leased.
    """
    time.sleep(max(0.0, began + _LEAST_LEASE_S - time.monotonic()))
    removed = int(store.remove(key, False)) == 0
    took_s = time.monotonic() - began
    return took_s if removed and took_s < _JUDGED_S else 0.0


def _short_leases(took_s: float) -> ClusterError:
    """Say that what was read a moment ago is leased no more."""
    return ClusterError(
        f"the master's leases end within {format_seconds(round(took_s, 3))}, before "
        "pages can be read",
        fix="Start it with -default_kv_lease_ttl=5000, and set lease_s to the same "
        "(5 s).",
    )


def nothing_stored(address: str, status: int) -> ClusterError:
    """Say why a page cannot be tried in the cluster at an address."""
    if status == NO_ROOM:
        return ClusterError(
            f"the Mooncake cluster at {address} has no memory to store a page in",
            fix="Start mooncake_client on a host that has some, or an engine: each "
            "lends segment_bytes.",
        )
    return ClusterError(
        f"the Mooncake cluster at {address} stores no page: {sentence_of(status)}",
        fix="Look whether this host reaches those that lend memory. One that has "
        "died is given up after the master's -client_ttl.",
    )

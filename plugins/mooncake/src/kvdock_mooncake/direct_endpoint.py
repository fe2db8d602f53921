"""What a peer has to know to write into a pool's memory, as bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock import AddressRanges
from kvdock.errors import KvdockError
from kvdock_mooncake.settings import split_address

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock import Block

_FORMAT = "kvdock-mooncake/1"
_HIGHEST = 1 << 62


@attrs.frozen
class Endpoint:
    """An engine that listens, and the memory of one pool there.

    Args:
        address: Where the engine is reached, "host:port".
        protocol: Its transport.
        scratch: Address of a few bytes that any peer may write to.
        memory: Address and size of each block of the pool.
    """

    address: str
    protocol: str
    scratch: int
    memory: tuple[tuple[int, int], ...] = attrs.field(repr=False)

    @classmethod
    def of(
        cls, address: str, protocol: str, scratch: int, blocks: Iterable[Block]
    ) -> Endpoint:
        """Describe the blocks of a pool."""
        memory = tuple((block.address, block.nbytes) for block in blocks)
        return cls(address, protocol, scratch, memory)

    def to_bytes(self) -> bytes:
        """Write a line of JSON, and the blocks as 64-bit integers."""
        head = [_FORMAT, self.address, self.protocol, self.scratch, len(self.memory)]
        blocks = np.array(self.memory, "<i8").tobytes()
        return json.dumps(head).encode() + b"\n" + blocks

    @classmethod
    def from_bytes(cls, data: bytes) -> Endpoint:
        """Read what `to_bytes` wrote; it came over a network.

        Raises:
            KvdockError: If it is not an endpoint of this backend.
        """
        line, _, rest = data.partition(b"\n")
        try:
            form, address, protocol, scratch, count = json.loads(line)
            blocks = np.frombuffer(rest, "<i8").reshape(-1, 2)
            host_port = split_address(str(address))
            known = form == _FORMAT and isinstance(scratch, int)
            known = known and 0 < scratch < _HIGHEST and bool(host_port)
            known = known and count == len(blocks)
            # Above, an address and a size could add up to a negative number.
            known = known and bool(((blocks >= 0) & (blocks < _HIGHEST)).all())
        except (ValueError, TypeError, RecursionError, KvdockError):
            known = False
        if not known:
            raise KvdockError(
                "an endpoint is not one of the mooncake backend",
                fix="Use the same backend and the same release of it on both sides.",
            )
        pairs = blocks.tolist()
        memory = tuple((int(start), int(nbytes)) for start, nbytes in pairs)
        return cls(str(address), str(protocol), scratch, memory)

    @property
    def ranges(self) -> AddressRanges:
        """Where a sender may write."""
        return AddressRanges.of(self.memory)

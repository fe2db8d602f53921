"""What a peer has to know to write into a pool's memory, as bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvdock import AddressRanges
from kvdock.errors import KvdockError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock import Block

_FORMAT = "kvdock-nixl/1"
_HIGHEST = 1 << 62


@attrs.frozen
class Endpoint:
    """An agent that listens, and the memory of one pool there.

    Args:
        agent: The name of the agent.
        scratch: Address of a few bytes that any peer may write to.
        memory: Address and size of each block of the pool.
        metadata: What NIXL has to know of the agent.
    """

    agent: str
    scratch: int
    memory: tuple[tuple[int, int], ...] = attrs.field(repr=False)
    metadata: bytes = attrs.field(repr=False)

    @classmethod
    def of(
        cls, agent: str, scratch: int, blocks: Iterable[Block], metadata: bytes
    ) -> Endpoint:
        """Describe the blocks of a pool."""
        memory = tuple((block.address, block.nbytes) for block in blocks)
        return cls(agent, scratch, memory, metadata)

    def to_bytes(self) -> bytes:
        """Write a line of JSON, the blocks as 64-bit integers, and the metadata."""
        head = [_FORMAT, self.agent, self.scratch, len(self.memory)]
        blocks = np.array(self.memory, "<i8").tobytes()
        return json.dumps(head).encode() + b"\n" + blocks + self.metadata

    @classmethod
    def from_bytes(cls, data: bytes) -> Endpoint:
        """Read what `to_bytes` wrote; it came over a network.

        Raises:
            KvdockError: If it is not an endpoint of this backend.
        """
        line, _, rest = data.partition(b"\n")
        try:
            form, agent, scratch, count = json.loads(line)
            blocks = np.frombuffer(rest, "<i8", 2 * count).reshape(-1, 2)
            known = form == _FORMAT and isinstance(agent, str)
            known = known and 0 < scratch < _HIGHEST and count >= 0
            # Above, an address and a size could add up to a negative number.
            known = known and bool(((blocks >= 0) & (blocks < _HIGHEST)).all())
        except (ValueError, TypeError, RecursionError):
            known = False
        if not known:
            raise KvdockError(
                "an endpoint is not one of the nixl backend",
                fix="Use the same backend and the same release of it on both sides.",
            )
        pairs = blocks.tolist()
        memory = tuple((int(start), int(nbytes)) for start, nbytes in pairs)
        return cls(agent, int(scratch), memory, rest[16 * count :])

    @property
    def ranges(self) -> AddressRanges:
        """Where a sender may write."""
        return AddressRanges.of(self.memory)

"""Pages as flat tensors: the engine's older way, one copy more.

SGLang takes this way only for backends that do not speak addresses, and it is
told that kvdock does. It is kept for other callers of the same contract. A
flat page has its parts in the order in which the pool's layout has them, so a
pool of one page, laid out alike, is a flat page.
"""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvdock.batch import Outcome
from kvdock.errors import RegionError
from kvdock.region import Block, Region, block_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec
    from kvdock.transfer.attachment import Attachment


@attrs.frozen(eq=False)
class FlatPages:
    """One scratch page of the anchor, through which flat pages pass.

    Args:
        spec: The anchor.
        scratch: uint8 (bytes of a page,), registered with the plugin.
        attachment: Where the scratch page is attached.
    """

    spec: PoolSpec
    scratch: Any = attrs.field(repr=False)
    attachment: Attachment
    _one_at_a_time: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    @classmethod
    def region(cls, spec: PoolSpec, shard: Shard) -> tuple[Any, Region]:
        """Return a scratch page and the region that describes it."""
        scratch = np.zeros(spec.page_bytes(shard), np.uint8)
        return scratch, Region.of(spec, shard, [scratch], 1)

    def load(
        self, hashes: Sequence[str], targets: Sequence[Any], deadline_s: float
    ) -> list[Any]:
        """Fill flat tensors with pages; None where one is missing."""
        loaded: list[Any] = []
        attached = self.attachment[self.spec.name]
        for page, target in zip(hashes, targets, strict=True):
            block = self._fits(target)
            with self._one_at_a_time:
                outcome = self._moved(attached.get, page, deadline_s)
                if outcome == Outcome.OK:
                    at = self.scratch.ctypes.data
                    ctypes.memmove(block.address, at, block.nbytes)
            loaded.append(target if outcome == Outcome.OK else None)
        return loaded

    def store(
        self, hashes: Sequence[str], sources: Sequence[Any], deadline_s: float
    ) -> bool:
        """Store pages from flat tensors; whether all of them are stored."""
        attached = self.attachment[self.spec.name]
        for page, source in zip(hashes, sources, strict=True):
            block = self._fits(source)
            with self._one_at_a_time:
                ctypes.memmove(self.scratch.ctypes.data, block.address, block.nbytes)
                outcome = self._moved(attached.put, page, deadline_s)
            if outcome != Outcome.OK:
                return False
        return True

    def _moved(self, move: Callable[..., Any], page: str, deadline_s: float) -> int:
        return int(move([page], [0], deadline_s)[0])

    def _fits(self, tensor: object) -> Block:
        block = block_of(tensor)
        if block.nbytes != len(self.scratch):
            raise RegionError(
                f"a flat page of pool {self.spec.name!r} has {len(self.scratch)} "
                f"bytes, the tensor {block.nbytes}"
            )
        return block

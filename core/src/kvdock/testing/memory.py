"""Host memory of a sample pool, written without the code under test.

Pages are placed by numpy's own reshaping and transposing, so a wrong address
shows as wrong bytes. Guards around each block and a pattern in every page
that a batch does not name show writes that went astray.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import attrs
import numpy as np

from kvdock.arrays import ByteArray
from kvdock.geometry.region import Block, Region
from kvdock.pools.enums import Layout, Per
from kvdock.testing.samples import local_content

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvdock.plugin.backend import Backend
    from kvdock.plugin.hookspecs import AttachConfig, HostMemory
    from kvdock.pools.objects import StoredObject
    from kvdock.pools.part import Part
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec


GUARD_BYTES = 192
"""Bytes before and after each block that must stay unchanged."""

GUARD = 0xC3
"""What the guards hold."""

BLANK = 0xA5
"""What a page holds before it is read."""

Bring = Callable[[int], ByteArray]
"""From a number of bytes to memory of that size."""


def plain(nbytes: int) -> ByteArray:
    """Return plain memory."""
    return np.zeros(nbytes, np.uint8)


def bringer(backend: Backend, config: AttachConfig, lent: list[HostMemory]) -> Bring:
    """Return who brings memory that a backend reaches, noting what is its own."""

    def bring(nbytes: int) -> ByteArray:
        found = backend.allocate(nbytes, config)
        if found is None:
            return plain(nbytes)
        lent.append(found)
        return np.frombuffer(found.buffer, np.uint8)

    return bring


def staging_of(region: Region, bring: Bring) -> tuple[ByteArray, Region]:
    """Return a row for each page of a region, and the region that a plugin registers.

    As in the core, a plugin whose pages are staged never hears of the engine's
    memory.

    Returns:
        uint8 (pages, bytes of a page), and its region.
    """
    each = region.object_bytes
    width = int(each.sum())
    rows = bring(region.pages * width).reshape(region.pages, width)
    at = int(rows.ctypes.data)
    registered = attrs.evolve(
        region,
        bases=(at + np.cumsum(each) - each).reshape(-1, 1),
        strides=np.full((len(each), 1), width, np.int64),
        sizes=each.reshape(-1, 1),
        blocks=(Block(at, rows.nbytes),),
        owners=(rows,),
    )
    return rows, registered


# From the order in memory, without the page, to (layer, token, head, row).
_TO_CANONICAL = MappingProxyType(
    {
        Layout.LAYER_FIRST: (0, 1, 2, 3),
        Layout.PAGE_FIRST: (1, 0, 2, 3),
        Layout.PAGE_FIRST_DIRECT: (0, 1, 2, 3),
        Layout.PAGE_HEAD: (2, 1, 0, 3),
        Layout.PAGE_OBJECT: (0, 1, 2, 3),
    }
)


@attrs.frozen(eq=False)
class PageMemory:
    """Memory of one pool on one rank, with guards."""

    pool: PoolSpec
    shard: Shard
    pages: int
    blocks: tuple[ByteArray, ...]

    @classmethod
    def of(
        cls, pool: PoolSpec, shard: Shard, pages: int, bring: Bring = plain
    ) -> PageMemory:
        """Make memory: a block for each part, or one where pages are objects."""
        layers = len(pool.local_layers(shard))
        each = [layers * pool.part_bytes(part, shard) * pages for part in pool.parts]
        if pool.layout is Layout.PAGE_OBJECT and each:
            each = [sum(each)]
        blocks = tuple(bring(n + 2 * GUARD_BYTES) for n in each)
        for block in blocks:
            block[:] = GUARD
            block[GUARD_BYTES:-GUARD_BYTES] = BLANK
        return cls(pool, shard, pages, blocks)

    @property
    def insides(self) -> list[ByteArray]:
        """The blocks without their guards."""
        return [block[GUARD_BYTES:-GUARD_BYTES] for block in self.blocks]

    def region(self) -> Region:
        """Describe the memory to the core."""
        return Region.of(self.pool, self.shard, self.insides, self.pages)

    def blank(self, first: int, last: int) -> None:
        """Fill some pages with the pattern of unread memory."""
        layers = 1
        if self.pool.layout is Layout.LAYER_FIRST:
            layers = len(self.pool.local_layers(self.shard))
        for inside in self.insides:
            inside.reshape(layers, self.pages, -1)[:, first:last] = BLANK

    def _view(self, part: Part, page: int) -> ByteArray:
        """Return one part of a page as (layer, entry, unit, row bytes)."""
        pool, shard = self.pool, self.shard
        layers = len(pool.local_layers(shard))
        entries = pool.local_tokens(shard) if part.per is Per.TOKEN else 1
        extents = {
            "layer": layers,
            "token": entries * part.outer,
            "head": pool.local_units(part, shard),
        }
        at = pool.parts.index(part)
        if pool.layout is Layout.PAGE_OBJECT:
            each = [layers * pool.part_bytes(one, shard) for one in pool.parts]
            row = self.insides[0].reshape(self.pages, -1)[page]
            flat = row[sum(each[:at]) : sum(each[: at + 1])]
            return cast("ByteArray", flat.reshape(*extents.values(), part.row_bytes))
        order = {
            Layout.PAGE_FIRST: ("token", "layer", "head"),
            Layout.PAGE_HEAD: ("head", "token", "layer"),
        }.get(pool.layout, ("layer", "token", "head"))
        shape = [extents[axis] for axis in order]
        if pool.layout is Layout.LAYER_FIRST:
            whole = self.insides[at].reshape(layers, self.pages, *shape[1:], -1)
            return whole[:, page]
        whole = self.insides[at].reshape(self.pages, *shape, -1)
        return cast("ByteArray", whole[page].transpose(_TO_CANONICAL[pool.layout]))

    def write(self, page: int, page_hash: str, seed: int = 0) -> None:
        """Place the content of a page hash into a page."""
        for part in self.pool.parts:
            self._view(part, page)[:] = local_content(
                self.pool, part, self.shard, page_hash, seed
            )

    def holds(
        self, page: int, page_hash: str, stored: StoredObject, seed: int = 0
    ) -> bool:
        """Return whether one object of a page is there, byte for byte."""
        mine = self.pool.local_layers(self.shard)
        layers = [mine.index(layer) for layer in stored.layers]
        for part in self.pool.parts:
            if part.name not in stored.parts:
                continue
            wanted = local_content(self.pool, part, self.shard, page_hash, seed)
            found = self._view(part, page)
            heads = slice(None)
            if stored.heads is not None and part.shard_axis is not None:
                start = self.pool.local_heads(self.shard)[0]
                heads = slice(stored.heads[0] - start, stored.heads[1] - start)
            if not np.array_equal(
                found[layers][:, :, heads], wanted[layers][:, :, heads]
            ):
                return False
        return True

    def check_untouched(self, named: Iterable[int], first: int, last: int) -> None:
        """Assert that guards and other pages from first to last are as before."""
        for block in self.blocks:
            assert (block[:GUARD_BYTES] == GUARD).all(), (
                "bytes before the pool's memory were overwritten"
            )
            assert (block[-GUARD_BYTES:] == GUARD).all(), (
                "bytes behind the pool's memory were overwritten"
            )
        for page in sorted(set(range(first, last)) - set(named)):
            for part in self.pool.parts:
                assert (self._view(part, page) == BLANK).all(), (
                    f"page {page} of pool {self.pool.name!r} was overwritten, "
                    "although the batch did not name it"
                )

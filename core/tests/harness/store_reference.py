"""The reference backend in the form of objects, as most plugins are written."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from reference import Handle, MemoryReference

from kvdock.plugin.hookspecs import AttachConfig, hookimpl

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock.batch import Batch, BatchResult
    from kvdock.capacity import Capacity
    from kvdock.geometry.region import Region
    from kvdock.plugin.manifest import Manifest
    from kvdock.pools.spec import PoolSpec


@attrs.frozen(eq=False)
class ReferenceStore:
    """One pool of the reference backend."""

    reference: MemoryReference
    pool: Handle

    def run(self, batch: Batch) -> BatchResult:
        return self.reference.run(self.pool, batch)

    def touch(self, keys: Sequence[str]) -> None:
        self.reference.kvdock_touch(self.pool, keys)

    def removed(self, limit: int) -> Sequence[str]:
        return self.reference.kvdock_removed(self.pool, limit)

    def capacity(self) -> Capacity:
        return self.reference.kvdock_capacity(self.pool)

    def close(self) -> None:
        self.reference.kvdock_release(self.pool)


class Stores:
    """A plugin of two hooks; its pages are the reference's."""

    def __init__(self) -> None:
        self._reference = MemoryReference()

    @hookimpl
    def kvdock_manifest(self) -> Manifest:
        return attrs.evolve(self._reference.manifest(), name="stores")

    @hookimpl
    def kvdock_register_pool(
        self, pool: PoolSpec, region: Region, config: AttachConfig
    ) -> ReferenceStore:
        opened = self._reference.kvdock_register_pool(pool, region, config)
        return ReferenceStore(self._reference, opened)


plugin = Stores()

"""Pools of a backend with memory of their own, as `bench` and `demo` use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvdock import Attachment, Dock, Region, Shard

if TYPE_CHECKING:
    from kvdock import Backend, Namespace, PoolSpec
    from kvdock.arrays import ByteArray
    from kvdock.config import CoreSettings


@contextmanager
def attached(
    backend: Backend,
    settings: Mapping[str, object],
    namespace: Namespace,
    pools: Sequence[PoolSpec],
    pages: int,
    *,
    core: CoreSettings | None = None,
    trial: bool = False,
) -> Iterator[tuple[Attachment, Mapping[str, ByteArray]]]:
    """Attach memory for so many pages of each pool, all zeros.

    Yields:
        The attachment, and the memory of each pool, uint8 (pages, bytes of a page).
    """
    shard = Shard()
    dock = Dock({backend.name: backend})
    given = {backend.name: settings} if backend.manifest.settings else None
    plan = dock.plan(pools, shard, [backend.name], settings=given)
    memory = {
        route.pool.name: np.zeros((pages, route.pool.page_bytes(shard)), np.uint8)
        for route in plan.accepted
    }
    regions = {
        route.pool.name: Region.of(
            route.pool, shard, [memory[route.pool.name]], pages=pages
        )
        for route in plan.accepted
    }
    with Attachment.open(
        dock, plan, namespace, regions, given, core=core, trial=trial
    ) as cache:
        yield cache, memory

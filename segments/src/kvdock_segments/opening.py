"""Open the store of a pool, as a plugin's `kvdock_register_pool` does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.namespace import canonical
from kvdock_segments.limits import StoreLocation
from kvdock_segments.ownership import WriterLiveness
from kvdock_segments.store import SegmentStore
from kvdock_segments.trial import TrialStore

if TYPE_CHECKING:
    from kvdock import AttachConfig, PoolSpec, Region
    from kvdock_segments.io import IOEngine
    from kvdock_segments.settings import SegmentSettings


def open_store(
    engine: IOEngine, pool: PoolSpec, region: Region, config: AttachConfig
) -> SegmentStore:
    """Open the store of one pool of a namespace.

    The engine is closed with the store, or if this fails. Settings extend
    `SegmentSettings`.

    Raises:
        KvdockError: If the root or a stored namespace record cannot be trusted.
    """
    settings: SegmentSettings = config.settings
    record = config.namespace_record
    try:
        place = StoreLocation(
            root=settings.root,
            namespace=config.namespace,
            pool=pool.name,
            object_bytes=region.object_bytes.tolist(),
            record=canonical(record) if record else b"",
            shared=settings.shared_root,
            liveness=WriterLiveness.LOCKS if settings.locks else WriterLiveness.TIMEOUT,
            tenant=config.tenants.number(config.tenant),
            tenants=config.tenants,
            max_age_s=config.max_age_s,
            erase_within_s=config.erase_within_s,
        )
        if config.trial:
            return TrialStore.open(place, engine, settings, config.shared)
        return SegmentStore(place, engine, settings)
    except BaseException:
        engine.close()
        raise

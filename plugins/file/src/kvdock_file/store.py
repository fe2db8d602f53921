"""Open the store of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock import canonical
from kvdock.segments import (
    PosixIOEngine,
    SegmentStore,
    StoreLimits,
    StoreLocation,
    TrialStore,
    WriterLiveness,
)

if TYPE_CHECKING:
    from kvdock import AttachConfig, PoolSpec, Region
    from kvdock_file.settings import FileSettings


def limits_of(settings: FileSettings) -> StoreLimits:
    """Return the limits of a namespace."""
    return StoreLimits(
        quota_bytes=settings.quota,
        high_watermark=settings.high_watermark,
        low_watermark=settings.low_watermark,
        free_bytes=settings.free_space,
        segment_bytes=settings.segment_bytes,
    )


def open_store(pool: PoolSpec, region: Region, config: AttachConfig) -> SegmentStore:
    """Open the store of one pool of a namespace.

    Raises:
        KvdockError: If the root or a stored namespace record cannot be trusted.
    """
    settings: FileSettings = config.settings
    record = config.namespace_record
    place = StoreLocation(
        root=settings.root,
        namespace=config.namespace,
        pool=pool.name,
        object_bytes=region.object_bytes.tolist(),
        record=canonical(record) if record else b"",
        shared=settings.shared_root,
        liveness=WriterLiveness.LOCKS if settings.locks else WriterLiveness.TIMEOUT,
    )
    engine = PosixIOEngine(settings.threads, direct=settings.direct)
    limits = limits_of(settings)
    if config.trial:
        return TrialStore.open(place, engine, limits, config.shared)
    return SegmentStore(place, engine, limits)

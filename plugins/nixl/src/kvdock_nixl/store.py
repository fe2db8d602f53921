"""Open the store of a pool."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs

from kvdock import canonical
from kvdock.segments import (
    SegmentStore,
    StoreLimits,
    StoreLocation,
    TrialStore,
    WriterLiveness,
)
from kvdock_nixl.direct import DirectAttachment, DirectPool
from kvdock_nixl.io_engine import NixlIOEngine

if TYPE_CHECKING:
    from kvdock import AttachConfig, PoolSpec, Region
    from kvdock_nixl.settings import NixlSettings


def limits_of(settings: NixlSettings) -> StoreLimits:
    """Return the limits of a namespace."""
    return StoreLimits(
        quota_bytes=settings.quota,
        high_watermark=settings.high_watermark,
        low_watermark=settings.low_watermark,
        free_bytes=settings.free_space,
        segment_bytes=settings.segment_bytes,
    )


@attrs.frozen(eq=False)
class PoolHandle:
    """One pool of an attachment.

    Args:
        store: Its pages in files.
        direct: Its share of the attachment's direct transfers.
    """

    store: SegmentStore
    direct: DirectPool


def open_pool(pool: PoolSpec, region: Region, config: AttachConfig) -> PoolHandle:
    """Open the store of one pool of a namespace, and note its memory.

    Raises:
        KvdockError: As `open_store`.
    """
    store = open_store(pool, region, config)
    direct = DirectAttachment.shared(config, config.settings.ucx_transports)
    direct.add(region.blocks)
    return PoolHandle(store, direct)


def open_store(pool: PoolSpec, region: Region, config: AttachConfig) -> SegmentStore:
    """Open the store of one pool of a namespace.

    Raises:
        KvdockError: If NIXL cannot be used here, or the root or a stored namespace
            record cannot be trusted.
    """
    settings: NixlSettings = config.settings
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
    limits = limits_of(settings)
    engine = NixlIOEngine.open(settings.io, region.blocks, direct=settings.direct)
    try:
        if config.trial:
            return TrialStore.open(place, engine, limits, config.shared)
        return SegmentStore(place, engine, limits)
    except BaseException:
        engine.close()
        raise

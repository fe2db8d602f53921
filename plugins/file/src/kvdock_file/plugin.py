"""The hooks of the file backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock import (
    API_VERSION,
    AttachConfig,
    Capacity,
    Finding,
    HitPolicy,
    KindSupport,
    Manifest,
    PoolKind,
    Scope,
    Support,
    hookimpl,
    key_suffixes,
)
from kvdock_file.settings import FileSettings

if TYPE_CHECKING:
    from kvdock import Batch, BatchResult, PoolSpec, Region, Shard
    from kvdock.segments import SegmentStore

_ANY_POOL = KindSupport(
    hit_policies=HitPolicy,
    split_heads=Support.NATIVE,
    draft=Support.NATIVE,
    multi_buffer=Support.NATIVE,
)


@hookimpl
def kvdock_manifest() -> Manifest:
    """Declare that any pool can be kept in files."""
    return Manifest(
        name="file",
        api=API_VERSION,
        summary="pages in files of a local disk, no server",
        kinds=dict.fromkeys(PoolKind, _ANY_POOL),
        zero_copy=Support.NATIVE,
        memory_registration=Support.NO,
        host_allocator=Support.NO,
        gated_get=Support.NATIVE,
        gated_put=Support.NATIVE,
        direct_transfer=Support.NO,
        integrity=Support.NATIVE,
        eviction=Support.NATIVE,
        durability=Scope.HOST,
        sharing=Scope.HOST,
        clear_reach=Scope.NAMESPACE,
        fork_safe=Support.NATIVE,
        settings=FileSettings,
    )


@hookimpl
def kvdock_probe(config: AttachConfig) -> Sequence[Finding]:
    """Check whether the root can be used, and how much room it has."""
    from kvdock.segments import check_root  # noqa: PLC0415 - keeps a listing light

    settings: FileSettings = config.settings
    findings = check_root(
        settings.root,
        free_bytes=settings.free_space,
        shared=settings.shared_root,
        direct=settings.direct,
    )
    return [Finding(*finding) for finding in findings]


@hookimpl
def kvdock_register_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> SegmentStore:
    """Open the store of this namespace and pool."""
    from kvdock_file.store import open_store  # noqa: PLC0415 - same

    return open_store(pool, region, config)


@hookimpl
def kvdock_key_suffix(pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
    """Return the suffixes of the core, one for each object of a page."""
    return key_suffixes(pool, shard)


@hookimpl
def kvdock_batch_io(handle: SegmentStore, batch: Batch) -> BatchResult:
    """Run one batch."""
    return handle.run(batch)


@hookimpl
def kvdock_touch(handle: SegmentStore, keys: Sequence[str]) -> None:
    """Count objects as used now, in memory."""
    handle.touch(keys)


@hookimpl
def kvdock_removed(handle: SegmentStore, limit: int) -> Sequence[str]:
    """Look up the keys that were stored, in memory."""
    return handle.removed(limit)


@hookimpl
def kvdock_capacity(handle: SegmentStore) -> Capacity:
    """Measure the namespace against its quota, or against the free space."""
    return Capacity(*handle.fill())


@hookimpl
def kvdock_release(handle: SegmentStore) -> None:
    """Close the store's files; stored pages stay."""
    handle.close()

"""The hooks of the nixl backend."""

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
from kvdock_nixl.settings import NixlSettings

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
        name="nixl",
        api=API_VERSION,
        summary="pages in files through NIXL: io_uring, AIO, GPUDirect Storage",
        kinds=dict.fromkeys(PoolKind, _ANY_POOL),
        zero_copy=Support.NATIVE,
        memory_registration=Support.NATIVE,
        host_allocator=Support.NO,
        # Its library moves bytes from and to registered memory when it likes.
        gated_get=Support.NO,
        gated_put=Support.NO,
        direct_transfer=Support.NO,
        integrity=Support.NATIVE,
        eviction=Support.NATIVE,
        durability=Scope.HOST,
        sharing=Scope.HOST,
        clear_reach=Scope.NAMESPACE,
        # A piece of more than 2 GiB is more than the kernel moves at once, and one
        # descriptor of NIXL is one system call.
        max_object_bytes=1 << 30,
        # Queues of a parent do not work in a child.
        fork_safe=Support.NO,
        settings=NixlSettings,
    )


@hookimpl
def kvdock_probe(config: AttachConfig) -> Sequence[Finding]:
    """Look at the library, the way of moving bytes and the root."""
    from kvdock_nixl.probe import findings  # noqa: PLC0415 - keeps a listing light

    return findings(config.settings)


@hookimpl
def kvdock_register_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> SegmentStore:
    """Open the store of this namespace and pool, and register the pool's memory."""
    from kvdock_nixl.store import open_store  # noqa: PLC0415 - same

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
    """Close the store's files and deregister its memory; stored pages stay."""
    handle.close()

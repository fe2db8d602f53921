"""The hooks of the nixl backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock import (
    API_VERSION,
    AttachConfig,
    Capability,
    Capacity,
    Finding,
    HitPolicy,
    KindSupport,
    Manifest,
    PoolKind,
    Scope,
    Support,
    Verdict,
    hookimpl,
    key_suffixes,
)
from kvdock.errors import KvdockError
from kvdock_nixl.settings import NixlSettings

if TYPE_CHECKING:
    from kvdock import Batch, BatchResult, PoolSpec, Region, Shard
    from kvdock_nixl.direct import Peer
    from kvdock_nixl.store import PoolHandle

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
        direct_transfer=Support.NATIVE,
        integrity=Support.NATIVE,
        eviction=Support.NATIVE,
        durability=Scope.HOST,
        sharing=Scope.HOST,
        clear_reach=Scope.NAMESPACE,
        # A piece of more than 2 GiB is more than the kernel moves at once, and one
        # descriptor of NIXL is one system call.
        max_object_bytes=1 << 30,
        max_send_rows=8192,
        landing_run_bytes=64 << 10,
        send_drain_s=5.0,
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
def kvdock_check_capability(
    capability: Capability,
    pool: PoolSpec,
    shard: Shard,
    settings: NixlSettings | None,
) -> Verdict | None:
    """Send nothing to peers without the library."""
    del pool, shard, settings
    if capability is not Capability.DIRECT_TRANSFER:
        return None
    from kvdock_nixl.library import check_installed  # noqa: PLC0415 - same

    try:
        check_installed()
    except KvdockError as error:
        return Verdict(Support.NO, f"{error.what}: {error.fix}")
    return None


@hookimpl
def kvdock_register_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> PoolHandle:
    """Open the store of this namespace and pool, and register the pool's memory."""
    from kvdock_nixl.store import open_pool  # noqa: PLC0415 - same

    return open_pool(pool, region, config)


@hookimpl
def kvdock_key_suffix(pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
    """Return the suffixes of the core, one for each object of a page."""
    return key_suffixes(pool, shard)


@hookimpl
def kvdock_batch_io(handle: PoolHandle, batch: Batch) -> BatchResult:
    """Run one batch."""
    if batch.remote is not None:  # a SEND; its own name would load numpy
        return handle.direct.send(batch)
    return handle.store.run(batch)


@hookimpl
def kvdock_endpoint(handle: PoolHandle) -> bytes:
    """Make an agent that listens."""
    return handle.direct.attachment.endpoint(handle.direct)


@hookimpl
def kvdock_connect(handle: PoolHandle, endpoint: bytes, deadline_s: float) -> Peer:
    """Connect to a peer's agent, and write a few bytes there."""
    return handle.direct.attachment.connect(endpoint, deadline_s)


@hookimpl
def kvdock_disconnect(handle: PoolHandle, peer: Peer) -> bool:
    """End the connection, with its last pool."""
    return handle.direct.attachment.disconnect(peer)


@hookimpl
def kvdock_withdraw(handle: PoolHandle) -> bool:
    """Destroy the agent that listens: deregistering is not enough."""
    return handle.direct.attachment.withdraw()


@hookimpl
def kvdock_touch(handle: PoolHandle, keys: Sequence[str]) -> None:
    """Count objects as used now, in memory."""
    handle.store.touch(keys)


@hookimpl
def kvdock_removed(handle: PoolHandle, limit: int) -> Sequence[str]:
    """Look up the keys that were stored, in memory."""
    return handle.store.removed(limit)


@hookimpl
def kvdock_capacity(handle: PoolHandle) -> Capacity:
    """Measure the namespace against its quota, or against the free space."""
    return Capacity(*handle.store.fill())


@hookimpl
def kvdock_release(handle: PoolHandle) -> None:
    """Close the store's files and deregister its memory; stored pages stay."""
    handle.direct.release()
    handle.store.close()

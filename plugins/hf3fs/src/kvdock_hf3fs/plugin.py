"""The hooks of the hf3fs backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock import (
    API_VERSION,
    AttachConfig,
    Capability,
    Finding,
    HostMemory,
    KindSupport,
    Manifest,
    Scope,
    Support,
    Verdict,
    hookimpl,
)
from kvdock_hf3fs.settings import Hf3fsSettings, Mode

if TYPE_CHECKING:
    from kvdock import PoolSpec, Region, Shard
    from kvdock_segments import SegmentStore


@hookimpl
def kvdock_manifest() -> Manifest:
    """Declare that any pool can be kept in 3FS."""
    return Manifest(
        name="hf3fs",
        api=API_VERSION,
        summary="pages in files of 3FS through USRBIO, or of any shared file system",
        kinds=KindSupport.of_every_kind(),
        zero_copy=Support.NATIVE,
        memory_registration=Support.NATIVE,
        host_allocator=Support.NATIVE,
        # A ring that is given up may still move bytes from and to its memory.
        gated_get=Support.NO,
        gated_put=Support.NO,
        peers=Support.NO,
        integrity=Support.NATIVE,
        eviction=Support.NATIVE,
        touch=Support.NATIVE,
        removed=Support.NATIVE,
        capacity=Support.NATIVE,
        retention=Support.NATIVE,
        tenant_quotas=Support.NATIVE,
        durability=Scope.CLUSTER,
        sharing=Scope.CLUSTER,
        clear_reach=Scope.NAMESPACE,
        fork_safe=Support.NO,
        settings=Hf3fsSettings,
    )


@hookimpl
def kvdock_probe(config: AttachConfig) -> Sequence[Finding]:
    """Look at the library, the mount and the root."""
    from kvdock_hf3fs.probe import findings  # noqa: PLC0415 - keeps a listing light

    return findings(config.settings)


@hookimpl
def kvdock_check_capability(
    capability: Capability,
    pool: PoolSpec,
    shard: Shard,
    settings: Hf3fsSettings | None,
) -> Verdict | None:
    """Store nothing without the library, promise nothing without locks."""
    del pool, shard
    posix = settings is not None and settings.mode is Mode.POSIX
    if capability is Capability.HOST_ALLOCATOR and posix:
        return Verdict(Support.NATIVE, "in mode posix any memory will do")
    if capability is Capability.RETENTION and not (settings and settings.locks):
        return Verdict(Support.EMULATED, "without locks nothing is promised")
    if capability is Capability.STORE and settings and not posix:
        from kvdock_hf3fs.store import installed  # noqa: PLC0415 - as above

        missing = installed()
        if missing:
            return Verdict(Support.NO, missing)
    return None


@hookimpl
def kvdock_allocate(nbytes: int, config: AttachConfig) -> HostMemory | None:
    """Bring memory of an iov, where rings move the bytes."""
    if config.settings.mode is Mode.POSIX:
        return None
    from kvdock_hf3fs.store import allocate  # noqa: PLC0415 - as above

    return allocate(nbytes, config.settings)


@hookimpl
def kvdock_register_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> SegmentStore:
    """Open the store of this namespace and pool."""
    from kvdock_hf3fs.store import open_pool  # noqa: PLC0415 - as above

    return open_pool(pool, region, config)

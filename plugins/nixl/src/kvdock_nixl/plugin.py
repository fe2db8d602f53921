"""The hooks of the nixl backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock import (
    API_VERSION,
    AttachConfig,
    Capability,
    Finding,
    KindSupport,
    Manifest,
    Scope,
    Support,
    Verdict,
    hookimpl,
)
from kvdock.errors import KvdockError
from kvdock_nixl.settings import NixlSettings

if TYPE_CHECKING:
    from kvdock import PoolSpec, Region, Shard
    from kvdock_nixl.store import NixlStore, NoPages


@hookimpl
def kvdock_manifest() -> Manifest:
    """Declare that any pool can be kept in files."""
    return Manifest(
        name="nixl",
        api=API_VERSION,
        summary="pages in files through NIXL: io_uring, AIO, GPUDirect Storage",
        kinds=KindSupport.of_every_kind(),
        zero_copy=Support.NATIVE,
        memory_registration=Support.NATIVE,
        host_allocator=Support.NO,
        # Its library moves bytes from and to registered memory when it likes.
        gated_get=Support.NO,
        gated_put=Support.NO,
        peers=Support.NATIVE,
        integrity=Support.NATIVE,
        eviction=Support.NATIVE,
        touch=Support.NATIVE,
        removed=Support.NATIVE,
        capacity=Support.NATIVE,
        retention=Support.NATIVE,
        tenant_quotas=Support.NATIVE,
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
    if capability is not Capability.PEERS:
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
) -> NixlStore | NoPages:
    """Open the store of this namespace and pool, and register the pool's memory."""
    from kvdock_nixl.store import open_pool  # noqa: PLC0415 - same

    return open_pool(pool, region, config)

"""The hooks of the file backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock import (
    API_VERSION,
    AttachConfig,
    Finding,
    KindSupport,
    Manifest,
    Scope,
    Support,
    hookimpl,
)
from kvdock_file.settings import FileSettings

if TYPE_CHECKING:
    from kvdock import PoolSpec, Region
    from kvdock_segments import SegmentStore


@hookimpl
def kvdock_manifest() -> Manifest:
    """Declare that any pool can be kept in files."""
    return Manifest(
        name="file",
        api=API_VERSION,
        summary="pages in files of a local disk, no server",
        kinds=KindSupport.of_every_kind(),
        zero_copy=Support.NATIVE,
        memory_registration=Support.NO,
        host_allocator=Support.NO,
        gated_get=Support.NATIVE,
        gated_put=Support.NATIVE,
        peers=Support.NO,
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
        fork_safe=Support.NATIVE,
        settings=FileSettings,
    )


@hookimpl
def kvdock_probe(config: AttachConfig) -> Sequence[Finding]:
    """Check whether the root can be used, and how much room it has."""
    settings: FileSettings = config.settings
    return [Finding(*one) for one in settings.check_root(direct=settings.direct)]


@hookimpl
def kvdock_register_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> SegmentStore:
    """Open the store of this namespace and pool."""
    from kvdock_segments import (  # noqa: PLC0415 - keeps a listing light
        PosixIOEngine,
        open_store,
    )

    settings: FileSettings = config.settings
    engine = PosixIOEngine(settings.threads, direct=settings.direct)
    return open_store(engine, pool, region, config)

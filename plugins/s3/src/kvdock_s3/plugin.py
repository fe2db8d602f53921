"""The hooks of the s3 backend."""

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
from kvdock_s3.layout import MAX_KEY_BYTES
from kvdock_s3.settings import S3Settings

if TYPE_CHECKING:
    from kvdock import PoolSpec, Region
    from kvdock_s3.pool import PoolHandle


@hookimpl
def kvdock_manifest() -> Manifest:
    """Declare that any pool can be kept as objects."""
    return Manifest(
        name="s3",
        api=API_VERSION,
        summary="one object per page in S3, Azure or GCS (not tested), through obstore",
        kinds=KindSupport.of_every_kind(),
        # A get is copied once, from the client's memory.
        zero_copy=Support.EMULATED,
        memory_registration=Support.NO,
        host_allocator=Support.NO,
        peers=Support.NO,
        integrity=Support.NO,
        eviction=Support.NO,
        durability=Scope.CLUSTER,
        sharing=Scope.CLUSTER,
        clear_reach=Scope.NAMESPACE,
        # What S3 takes in one put.
        max_object_bytes=5 << 30,
        max_key_bytes=MAX_KEY_BYTES,
        retention=Support.EMULATED,
        tenant_quotas=Support.NO,
        fork_safe=Support.NO,
        settings=S3Settings,
    )


@hookimpl
def kvdock_probe(config: AttachConfig) -> Sequence[Finding]:
    """Look at the library and make a round trip to the bucket."""
    from kvdock_s3.probe import findings  # noqa: PLC0415 - keeps a listing light

    return findings(config.settings)


@hookimpl
def kvdock_register_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> PoolHandle:
    """Try the bucket, or share the client that has."""
    from kvdock_s3.attachment import attach_pool  # noqa: PLC0415 - same

    del pool, region
    return attach_pool(config)

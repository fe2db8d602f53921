"""The hooks of the mooncake backend."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

from kvdock import (
    API_VERSION,
    AttachConfig,
    Capability,
    Capacity,
    Finding,
    HitPolicy,
    HostMemory,
    KindSupport,
    Manifest,
    PoolKind,
    Scope,
    Support,
    Verdict,
    hookimpl,
    key_suffixes,
)
from kvdock.config import structure
from kvdock.errors import KvdockError, PluginError
from kvdock_mooncake.settings import MooncakeSettings, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock import Batch, BatchResult, PoolSpec, Region, Shard
    from kvdock_mooncake.direct import Peer
    from kvdock_mooncake.pool import PoolHandle

log = logging.getLogger("kvdock")

_ANY_POOL = KindSupport(
    hit_policies=HitPolicy,
    split_heads=Support.NATIVE,
    draft=Support.NATIVE,
    multi_buffer=Support.NATIVE,
)


def _unsaid() -> MooncakeSettings:
    """Return the settings where none are given: those of the environment."""
    return structure(MooncakeSettings, {}, where="backend 'mooncake'")


@hookimpl
def kvdock_manifest() -> Manifest:
    """Declare that any pool can be kept in the cluster."""
    return Manifest(
        name="mooncake",
        api=API_VERSION,
        summary="DRAM and SSD of a Mooncake cluster, over RDMA or TCP",
        kinds=dict.fromkeys(PoolKind, _ANY_POOL),
        zero_copy=Support.NATIVE,
        memory_registration=Support.NATIVE,
        host_allocator=Support.NATIVE,
        direct_transfer=Support.NATIVE,
        integrity=Support.NO,
        eviction=Support.NATIVE,
        durability=Scope.PROCESS,
        sharing=Scope.CLUSTER,
        clear_reach=Scope.NAMESPACE,
        max_send_rows=512,
        landing_run_bytes=128 << 10,
        send_drain_s=5.0,
        fork_safe=Support.NO,
        settings=MooncakeSettings,
    )


@hookimpl
def kvdock_probe(config: AttachConfig) -> Sequence[Finding]:
    """Look at the library, the master and the host."""
    from kvdock_mooncake.probe import findings  # noqa: PLC0415 - keeps a listing light

    return findings(config.settings or _unsaid())


@hookimpl
def kvdock_check_capability(
    capability: Capability,
    pool: PoolSpec,
    shard: Shard,
    settings: MooncakeSettings | None,
) -> Verdict | None:
    """Store nothing without the library, or with two; take any memory or not."""
    del pool, shard
    if capability is Capability.HOST_ALLOCATOR and not _standalone(settings):
        return Verdict(Support.NATIVE, "without a standalone client any memory will do")
    if capability not in (Capability.STORE, Capability.DIRECT_TRANSFER):
        return None
    from kvdock_mooncake.library import installed, the_wheel  # noqa: PLC0415 - as above

    try:
        wheel = the_wheel(installed())
    except PluginError as error:
        return Verdict(Support.NO, f"{error.what}: {error.fix}")
    if capability is Capability.STORE:
        return None
    from kvdock_mooncake.direct_engine import why_not  # noqa: PLC0415 - as above

    reason = why_not(wheel)
    return Verdict(Support.NO, reason) if reason else None


def _standalone(settings: MooncakeSettings | None) -> bool:
    """Return whether a client process owns the memory."""
    try:
        return bool((settings or _unsaid()).standalone)
    except KvdockError:
        # Attaching with them reports what is wrong.
        return False


def _joins_with(config: AttachConfig) -> MooncakeSettings:
    """Return the settings with which a process joins; a trial lends nothing."""
    settings: MooncakeSettings = config.settings or _unsaid()
    settings = settings.completed(config.shard)
    if config.trial:
        settings = attrs.evolve(settings, segment_bytes=0, ssd_offload=False)
    return settings


@hookimpl
def kvdock_allocate(nbytes: int, config: AttachConfig) -> HostMemory | None:
    """Bring memory that a standalone client shares, if there is one."""
    settings = _joins_with(config)
    if not settings.standalone:
        return None
    from kvdock_mooncake.shared_memory import allocate  # noqa: PLC0415 - as above

    return allocate(settings, nbytes, config)


@hookimpl
def kvdock_register_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> PoolHandle:
    """Join the cluster, or share the client that has, and register memory."""
    from kvdock_mooncake.clear import resume_clear  # noqa: PLC0415 - as above
    from kvdock_mooncake.direct import DirectAttachment  # noqa: PLC0415 - as above
    from kvdock_mooncake.pool import PoolHandle  # noqa: PLC0415 - as above
    from kvdock_mooncake.shared_clients import join_pool  # noqa: PLC0415 - as above
    from kvdock_mooncake.spill import owner_of  # noqa: PLC0415 - as above
    from kvdock_mooncake.warmup import nothing_stored  # noqa: PLC0415 - as above

    settings = _joins_with(config)
    _warn_if_unverified(pool, region, config.shard, settings)
    owner = owner_of(config.process, config.shard)
    client, member = join_pool(settings, owner, config.namespace, region.blocks)
    if config.trial and client.warm_up_status:
        client.release_pool(member)
        raise nothing_stored(client.master.address, client.warm_up_status)
    state = client.namespace_state(config.namespace, trial=config.trial)
    # One that was cleared just before the last pool left.
    resume_clear(client, state)
    direct = DirectAttachment.shared(config, settings)
    direct.add(region.blocks)
    return PoolHandle(client, member, state, direct)


def _warn_if_unverified(
    pool: PoolSpec, region: Region, shard: Shard, settings: MooncakeSettings
) -> None:
    """Warn where no checksum would notice that pages were overwritten."""
    if not pool.physical or settings.protocol is not Protocol.TCP:
        return
    if int(region.object_bytes.sum()) == pool.page_bytes(shard):
        log.warning(
            "mooncake: pool %s has no checksums (core.integrity is off) over TCP: "
            "a put that another process gave up under a frozen owner can overwrite "
            "stored pages later, and the wrong bytes would be loaded",
            pool.name,
        )


@hookimpl
def kvdock_key_suffix(pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
    """Spell what an object holds, as the core does."""
    return key_suffixes(pool, shard)


@hookimpl
def kvdock_batch_io(handle: PoolHandle, batch: Batch) -> BatchResult:
    """Do one batch; sending to a peer needs no store."""
    if batch.remote is not None:  # a SEND; its own name would load numpy
        return handle.direct.send(batch)
    return handle.run(batch)


@hookimpl
def kvdock_endpoint(handle: PoolHandle) -> bytes:
    """Start an engine that peers write to."""
    return handle.direct.attachment.endpoint(handle.direct)


@hookimpl
def kvdock_connect(handle: PoolHandle, endpoint: bytes, deadline_s: float) -> Peer:
    """Start an engine that writes to a peer, and write a few bytes there."""
    return handle.direct.attachment.connect(endpoint, deadline_s)


@hookimpl
def kvdock_disconnect(handle: PoolHandle, peer: Peer) -> bool:
    """Close the engine of a connection."""
    return handle.direct.attachment.disconnect(peer)


@hookimpl
def kvdock_withdraw(handle: PoolHandle) -> bool:
    """Close the engine that peers write to: unregistering is not enough."""
    return handle.direct.attachment.withdraw()


@hookimpl
def kvdock_capacity(handle: PoolHandle) -> Capacity | None:
    """Say how full the cluster is, or else the disk to which this process spills."""
    from kvdock_mooncake.master_status import MasterStatus  # noqa: PLC0415 - as above

    status = MasterStatus.of(handle.client.settings)
    found = status.capacity() if status else None
    if found:
        return found
    spill = handle.client.spill
    return spill.disk.capacity if spill else None


@hookimpl
def kvdock_release(handle: PoolHandle) -> None:
    """Unregister the pool's memory; the last one leaves the cluster."""
    handle.direct.release()
    handle.client.release_pool(handle.member)

"""The hooks of the mooncake backend."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import attrs

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
from kvdock.config import structure
from kvdock.errors import KvdockError, PluginError
from kvdock.plugin import StorelessPool
from kvdock_mooncake.settings import MooncakeSettings, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvdock import PoolSpec, Region, Shard
    from kvdock_mooncake.pool import PoolHandle

log = logging.getLogger("kvdock")


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
        kinds=KindSupport.of_every_kind(),
        zero_copy=Support.NATIVE,
        memory_registration=Support.NATIVE,
        host_allocator=Support.NATIVE,
        peers=Support.NATIVE,
        integrity=Support.NO,
        eviction=Support.NATIVE,
        capacity=Support.NATIVE,
        # Soft pins of a PUT; those of stored objects cannot be changed.
        retention=Support.EMULATED,
        tenant_quotas=Support.NO,
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
    if capability not in (Capability.STORE, Capability.PEERS):
        return None
    from kvdock_mooncake.library import installed, the_wheel  # noqa: PLC0415 - as above

    try:
        wheel = the_wheel(installed())
    except PluginError as error:
        return Verdict(Support.NO, f"{error.what}: {error.fix}")
    if capability is Capability.STORE:
        return None
    from kvdock_mooncake.peer_engine import why_not  # noqa: PLC0415 - as above

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
    if not (config.settings or _unsaid()).standalone:
        return None
    settings = _joins_with(config)
    from kvdock_mooncake.shared_clients import allocate  # noqa: PLC0415 - as above

    return allocate(settings, nbytes, config)


@hookimpl
def kvdock_register_pool(
    pool: PoolSpec, region: Region, config: AttachConfig
) -> PoolHandle | NoPages:
    """Join the cluster, or share the client that has, and register memory.

    Pools that only go to peers need no cluster: without a master none is joined.
    """
    from kvdock.peers.connections import ConnectedPool  # noqa: PLC0415 - as above
    from kvdock_mooncake.clear import resume_clear  # noqa: PLC0415 - as above
    from kvdock_mooncake.peers import Connections  # noqa: PLC0415 - as above
    from kvdock_mooncake.pool import PoolHandle  # noqa: PLC0415 - as above
    from kvdock_mooncake.shared_clients import join_pool  # noqa: PLC0415 - as above
    from kvdock_mooncake.spill import owner_of  # noqa: PLC0415 - as above
    from kvdock_mooncake.warmup import nothing_stored  # noqa: PLC0415 - as above

    given: MooncakeSettings = config.settings or _unsaid()
    if config.to_peers and not given.master and not given.standalone:
        peers = ConnectedPool.of(config, region.blocks, Connections(given))
        return NoPages(peers, peers.release)
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
    peers = ConnectedPool.of(config, region.blocks, Connections(settings))
    return PoolHandle(client, member, state, peers)


class NoPages(StorelessPool):
    """A pool that goes to peers alone."""

    def capacity(self) -> None:
        """Return None: nothing is stored."""


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

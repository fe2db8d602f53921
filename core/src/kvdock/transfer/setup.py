"""Attach the memory of a plan's pools to its backends."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock.config.core import CoreSettings, Integrity
from kvdock.config.core import StagingPolicy as StagingChoice
from kvdock.errors import AttachError, did_you_mean
from kvdock.events import Origin, PoolRouted
from kvdock.keys import check_suffixes
from kvdock.models.memory_budget import HostBudget
from kvdock.namespace import namespace_digest, namespace_record
from kvdock.pools.layout import stored_objects
from kvdock.region import Block, Region, block_of
from kvdock.resilience.answers import as_kvdock_error
from kvdock.resilience.channel import BackendChannel
from kvdock.routing.verdicts import IntegrityCheck, TransferMode
from kvdock.transfer.attached_pool import AttachedPool
from kvdock.transfer.direct_pool import DirectPool
from kvdock.transfer.health_check import HealthCheck
from kvdock.transfer.host_memory import allocator_for
from kvdock.transfer.integrity import TrailerBuffers
from kvdock.transfer.landing import LandingArea
from kvdock.transfer.leases import PageLeases
from kvdock.transfer.modes import (
    MarkerTransfer,
    StagedLoads,
    StagedTransfer,
    Transfer,
    ZeroCopyTransfer,
)
from kvdock.transfer.page_events import PageEvents
from kvdock.transfer.staging import StagingBuffers

if TYPE_CHECKING:
    from kvdock.dock import Dock
    from kvdock.events import PluginLoaded
    from kvdock.namespace import Namespace
    from kvdock.plugin.hookspecs import AttachConfig
    from kvdock.pools.spec import PoolSpec
    from kvdock.routing.plan import Plan, Route
    from kvdock.transfer.host_memory import Allocator, HostBuffer


log = logging.getLogger("kvdock")

_EXISTS_KEYS = 16384
"""Keys of one lookup: a bound like any other batch has."""


@attrs.frozen(eq=False)
class AttachedBackends:
    """The channels, pools and test pages of an attachment.

    Args:
        namespace: The digest that begins every key.
        record: What the digest covers.
        channels: Backend name to its channel.
        pools: Pool name to the attached pool, anchor first.
        health_checks: Pool name to its test page.
        budget: Host memory that there was when attaching began.
        taken: Pool name and bytes of each piece of memory that the core took.
        page_events: What the engine reports of its pages to others, if it does.
        direct: Pool name to the pool, where its pages go straight to peers.
    """

    namespace: str
    record: Mapping[str, object]
    channels: dict[str, BackendChannel] = attrs.field(factory=dict)
    pools: dict[str, AttachedPool] = attrs.field(factory=dict)
    health_checks: dict[str, HealthCheck] = attrs.field(factory=dict)
    budget: HostBudget = attrs.field(factory=HostBudget.measure)
    taken: list[tuple[str, int]] = attrs.field(factory=list)
    page_events: PageEvents | None = None
    direct: dict[str, DirectPool] = attrs.field(factory=dict)

    def within_budget(self, pool: PoolSpec, lend: Allocator) -> Allocator:
        """Return an allocator for a pool that checks the host's free memory.

        Memory that nothing has touched yet is not missing from what the kernel
        reports, so it is summed up here.
        """

        def lend_within(nbytes: int) -> HostBuffer:
            self.taken.append((pool.name, nbytes))
            self.budget.check(
                self.taken,
                times=" to copy and verify pages",
                fix="Lower core.calls.batch_bytes or core.calls.staging_buffers, or "
                "core.host_memory.reserve.",
            )
            return lend(nbytes)

        return lend_within

    def close(self, deadline_s: float) -> bool:
        """Close all backends; return whether all calls have finished."""
        self.pools.clear()
        ended = True
        left = len(self.channels)
        for channel in self.channels.values():
            # Each backend gets its share, so one cannot use up another's time.
            now = time.monotonic()
            share = max(0.0, deadline_s - now) / left
            ended = channel.close(now + share) and ended
            left -= 1
        return ended


def attach_plan(  # noqa: PLR0913 - the arguments of `Attachment.open`
    dock: Dock,
    plan: Plan,
    namespace: Namespace,
    regions: Mapping[str, Region],
    settings: Mapping[str, Mapping[str, object]],
    core: CoreSettings,
    *,
    config: AttachConfig,
) -> AttachedBackends:
    """Attach every accepted pool of a plan.

    `config` has what is the same for each backend.

    Raises:
        KvdockError: If anything is missing or rejected; what was attached
            before is released.
    """
    used = {route.backend for route in plan.accepted if route.backend}
    _check(plan, regions, settings, used)
    _check_observers(dock, used, core)
    _check_integrity(plan, core.integrity)
    record = namespace_record(namespace, [route.pool for route in plan.routes])
    digest = namespace_digest(record)
    backends = AttachedBackends(
        digest,
        record,
        budget=HostBudget.measure(core.host_memory.reserve),
        page_events=PageEvents(core.page_events) if core.page_events else None,
    )
    configs = {
        name: attrs.evolve(
            config,
            settings=dock.backends[name].settings(settings.get(name)),
            namespace=digest,
            namespace_record=record,
            shard=plan.shard,
            shared={},
        )
        for name in sorted(used)
    }
    origin = Origin.of(plan.shard, namespace.model, digest)
    try:
        for name in configs:
            backends.channels[name] = BackendChannel(dock.backends[name], core, origin)
        for route in plan.accepted:
            name = str(route.backend)
            _attach(backends, route, regions[route.pool.name], configs[name], core)
        for name in configs:
            mine = [one for one in backends.pools.values() if one.channel.name == name]
            check_suffixes(
                name, [(one.pool, one.suffixes, one.region.objects) for one in mine]
            )
        _announce(backends, plan, dock.provenance())
    except BaseException:
        backends.close(core.deadlines.until("close"))
        raise
    return backends


def _check(
    plan: Plan,
    regions: Mapping[str, Region],
    settings: Mapping[str, Mapping[str, object]],
    used: set[str],
) -> None:
    for name in settings:
        if name not in used:
            raise AttachError(
                f"settings are given for backend {name!r}, which has no pool",
                fix=did_you_mean(name, used),
            )
    for route in plan.accepted:
        if route.pool.name not in regions:
            raise AttachError(f"pool {route.pool.name!r} was given no memory")
        _check_layout(route.pool, regions[route.pool.name])


def _check_layout(pool: PoolSpec, region: Region) -> None:
    """Raise if the memory of a pool has another layout than its plan."""
    if pool.physical and region.layout is not pool.layout:
        raise AttachError(
            f"pool {pool.name!r} was planned in layout {pool.layout}, but its memory "
            f"was described in {region.layout}",
            fix="Describe pool and region in the layout in which the pages lie.",
        )


def _check_observers(dock: Dock, used: set[str], core: CoreSettings) -> None:
    """Raise if a configured observer is not installed on every backend."""
    for backend in sorted(used):
        around = dock.backends[backend].observers
        for name in core.observers:
            if name not in around:
                raise AttachError(
                    f"core.observers names {name!r}, which is not around backend "
                    f"{backend!r}",
                    fix="Call dock.observe(core.observers, settings) before "
                    "Attachment.open.",
                )


def _check_integrity(plan: Plan, asked: Integrity) -> None:
    """Raise if the plan was made for another choice than the settings'."""
    kept = {
        Integrity.AUTO: (IntegrityCheck.TRAILER, IntegrityCheck.BACKEND),
        Integrity.ALWAYS: (IntegrityCheck.TRAILER,),
        Integrity.OFF: (IntegrityCheck.NONE, IntegrityCheck.BACKEND),
    }[asked]
    for route in plan.accepted:
        if route.pool.physical and route.check not in kept:
            raise AttachError(
                f"core.integrity is {asked}, and the plan was made for another: pool "
                f"{route.pool.name!r} is {route.check}",
                fix="Plan with needs=RouteRequirements(integrity=core.integrity).",
            )


def _announce(
    backends: AttachedBackends, plan: Plan, plugins: Sequence[PluginLoaded]
) -> None:
    for plugin in plugins:
        log.info("%s", plugin)
    for route in plan.refused:
        log.warning("pool %s is not stored: %s", route.pool.name, route.reason)
    unverified = [r.pool.name for r in plan.accepted if r.check is IntegrityCheck.NONE]
    if unverified:
        log.warning("integrity is off: %s are not verified", ", ".join(unverified))
    for channel in backends.channels.values():
        channel.notify_breakers()
    # Observers sit on each backend's manager; one of them is enough.
    for channel in list(backends.channels.values())[:1]:
        for plugin in plugins:
            channel.notify(plugin)
        for route in plan.routes:
            channel.notify(
                PoolRouted(
                    pool=route.pool.name,
                    backend=route.backend or "",
                    enabled=route.backend is not None,
                    reason=route.reason,
                )
            )
        for attached in backends.pools.values():
            attached.notify_held()


def _attach(
    backends: AttachedBackends,
    route: Route,
    region: Region,
    config: AttachConfig,
    core: CoreSettings,
) -> None:
    pool, name = route.pool, str(route.backend)
    channel = backends.channels[name]
    if region.objects != stored_objects(pool, config.shard):
        # The route cut pages into other objects than the engine did.
        region = Region.of(pool, config.shard, region.owners, region.pages)
    staged = pool.physical and _is_staged(route, core.calls.staging)
    loads = core.calls.staging is StagingChoice.LOADS
    batch_pages = _batch_pages(channel, region, core, staged=staged or loads)
    lend = backends.within_budget(pool, allocator_for(channel, pool, config))
    mode = _transfer_mode(route, region, batch_pages, core, lend, staged=staged)
    check_memory = None
    registered = mode.region
    if pool.physical:
        check_memory = StagingBuffers(
            region, 2, 1,
            trailers=route.check is IntegrityCheck.TRAILER,
            pieces=not isinstance(mode, StagedTransfer),
            lend=lend,
        )  # fmt: skip
        registered = attrs.evolve(
            registered,
            blocks=(*registered.blocks, *check_memory.region.blocks),
            owners=(*registered.owners, *check_memory.region.owners),
        )
    area = None
    if route.direct:
        area = _landing_area(channel, core, lend)
        registered = _reachable(registered, region, area)
    handle = channel.register_pool(pool, registered, config)
    try:
        suffixes = channel.backend.key_suffix(pool, config.shard)
    except Exception as error:
        what = as_kvdock_error(error).what
        raise AttachError(
            f"backend {name!r} gives pool {pool.name!r} no key suffixes: {what}",
            fix="kvdock_key_suffix returns one for each object of a page.",
        ) from error
    attached = AttachedPool(
        pool=pool,
        channel=channel,
        handle=handle,
        namespace=backends.namespace,
        suffixes=suffixes,
        region=region,
        mode=mode,
        leases=PageLeases(region.pages),
        batch_pages=batch_pages,
        batch_keys=min(
            _EXISTS_KEYS, channel.backend.manifest.max_batch_keys or _EXISTS_KEYS
        ),
        writes=pool.writes(config.shard),
        page_events=backends.page_events,
    )
    if core.page_events and channel.backend.tracks_removal:
        # The first call begins to keep track of what is stored.
        channel.call_attach(
            pool,
            lambda: channel.backend.removed(handle, core.page_events),
            lambda _: None,
        )
    check = HealthCheck.of(
        channel, handle, (pool.name, backends.namespace, suffixes), check_memory
    )
    backends.pools[pool.name] = attached
    if route.direct:
        backends.direct[pool.name] = DirectPool.of(attached, backends.record, area)
    backends.health_checks[pool.name] = check
    channel.background.set_health_check(check.run)


def _landing_area(
    channel: BackendChannel, core: CoreSettings, lend: Allocator
) -> LandingArea | None:
    """Return memory for whole pages of peers, where the backend wants some."""
    if not channel.backend.manifest.landing_run_bytes or not core.direct.landing_bytes:
        return None
    return LandingArea(core.direct.landing_bytes, lend)


def _reachable(registered: Region, region: Region, area: LandingArea | None) -> Region:
    """Return what is registered with what peers reach: pages and landing area."""
    added: list[tuple[Block, object]] = []
    known = set(registered.blocks)
    # A staged pool has only the core's memory registered.
    added += [
        (block, owner)
        for block, owner in zip(region.blocks, region.owners, strict=False)
        if block not in known
    ]
    if area is not None:
        added.append((block_of(area.memory), area))
    return attrs.evolve(
        registered,
        blocks=(*registered.blocks, *(block for block, _ in added)),
        owners=(*registered.owners, *(owner for _, owner in added)),
    )


def _is_staged(route: Route, policy: StagingChoice) -> bool:
    """Return whether a pool is moved through memory of the core.

    A plan that was made without the policy knows of no gate: then a pool of an
    engine that cannot hold pages back is staged.
    """
    if route.mode is TransferMode.STAGED or policy is StagingChoice.ALWAYS:
        return True
    return policy is StagingChoice.SAFE and route.mode is not TransferMode.GATED


def _batch_pages(
    channel: BackendChannel, region: Region, core: CoreSettings, *, staged: bool
) -> int:
    """Return the most pages of a batch: the one bound of every GET and PUT.

    A staged one is small enough that its bytes are still in the processor's cache
    when they are copied again.

    Raises:
        AttachError: If the backend takes fewer keys than a page has objects.
    """
    page_bytes = max(1, int(region.object_bytes.sum()))
    most_bytes = core.calls.batch_bytes
    if staged:
        most_bytes = min(most_bytes, core.calls.staging_bytes)
    pages = min(core.calls.batch_pages, most_bytes // page_bytes)
    limit, objects = channel.backend.manifest.max_batch_keys, len(region.objects)
    if limit and objects:
        if objects > limit:
            raise AttachError(
                f"backend {channel.name!r} takes {limit} keys at once "
                f"(max_batch_keys), and pool {region.pool!r} has {objects} objects "
                "a page",
                fix="Plan with the manifests of the backends that are attached.",
            )
        pages = min(pages, limit // objects)
    return max(1, pages)


def _transfer_mode(
    route: Route,
    region: Region,
    batch_pages: int,
    core: CoreSettings,
    lend: Allocator,
    *,
    staged: bool,
) -> Transfer:
    if not route.pool.physical:
        return MarkerTransfer(region)
    trailers = route.check is IntegrityCheck.TRAILER
    through_core: StagedTransfer | None = None
    if staged or core.calls.staging is StagingChoice.LOADS:
        pages = min(batch_pages, region.pages)
        areas = core.calls.staging_buffers
        staging = StagingBuffers(region, areas, pages, trailers=trailers, lend=lend)
        through_core = StagedTransfer.through(staging, region)
    if through_core is not None and staged:
        return through_core
    gated = route.mode is TransferMode.GATED
    direct = ZeroCopyTransfer(region, gated=gated)
    if trailers:
        buffers = TrailerBuffers.attach_to(region, lend)
        direct = ZeroCopyTransfer(buffers.region, buffers, gated=gated)
    return StagedLoads.of(through_core, direct) if through_core else direct

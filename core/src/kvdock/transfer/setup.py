"""Attach the memory of a plan's pools to its backends."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.config.core import CoreSettings, Integrity
from kvdock.config.core import StagingPolicy as StagingChoice
from kvdock.config.tenants import tenant_of
from kvdock.errors import AttachError, did_you_mean
from kvdock.events import Origin, PoolRouted, PoolsAttached, PoolsDetached
from kvdock.geometry.region import Block, Region, block_of
from kvdock.keys import check_suffixes
from kvdock.models.memory_budget import HostBudget
from kvdock.namespace import (
    SEALED_FORMAT,
    configuration_digest,
    namespace_digest,
    namespace_record,
)
from kvdock.pools.layout import stored_objects
from kvdock.resilience.channel import BackendChannel, as_kvdock_error
from kvdock.routing.verdicts import IntegrityCheck, TransferMode
from kvdock.tiers.copier import Copier
from kvdock.transfer.attached_pool import AttachedPool
from kvdock.transfer.call_pools import CallPools
from kvdock.transfer.health_check import HealthCheck
from kvdock.transfer.host_memory import allocate_host, allocator_for
from kvdock.transfer.integrity import TrailerBuffers
from kvdock.transfer.leases import PageLeases
from kvdock.transfer.page_events import PageEvents
from kvdock.transfer.placement import Placement
from kvdock.transfer.pool_rows import PoolRows
from kvdock.transfer.staging import StagingBuffers
from kvdock.transfer.steps import PageSteps

if TYPE_CHECKING:
    from kvdock.dock import Dock
    from kvdock.events import Event, PluginLoaded
    from kvdock.namespace import Namespace
    from kvdock.plugin.hookspecs import AttachConfig
    from kvdock.plugin.manifest import Manifest
    from kvdock.pools.shard import Shard
    from kvdock.pools.spec import PoolSpec
    from kvdock.routing.plan import Plan, Route
    from kvdock.routing.verdicts import RouteOption
    from kvdock.transfer.host_memory import Allocator, HostBuffer


log = logging.getLogger("kvdock")

_EXISTS_KEYS = 16384
"""Keys of one lookup: a bound like any other batch has."""

_SHARE = 0.5
"""How much of the time of a call each placement may take before the last one."""

_COPIES_SHARE = 0.75
"""How much of the time of closing copies may take, those under way included."""


@attrs.define(eq=False)
class AttachedBackends:
    """The channels, pools and test pages of an attachment.

    Args:
        namespace: The digest that begins every key.
        budget: Host memory that there was when attaching began.
        taken: Pool name and bytes of each piece of memory that the core took.
        page_events: What the engine reports of its pages to others, if it does.
        copier: Copies pages between the placements of a pool; None where each pool
            has one.
    """

    namespace: str
    record: Mapping[str, object]
    channels: dict[str, BackendChannel] = attrs.field(factory=dict)
    pools: dict[str, AttachedPool] = attrs.field(factory=dict)
    budget: HostBudget = attrs.field(factory=HostBudget.measure)
    taken: list[tuple[str, int]] = attrs.field(factory=list)
    page_events: PageEvents | None = None
    copier: Copier | None = None
    calls: CallPools | None = None
    """The same pools as calls need them; None unless they are attached."""

    prefix_calls: CallPools | None = None
    """The same, unless the engine evaluates hits itself."""

    listening: bool = False
    """Whether there is any observer."""

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements of all pools."""
        return tuple(
            one for attached in self.pools.values() for one in attached.placements
        )

    def farther(self, pool: str) -> tuple[str, ...]:
        """Return the backends of a pool behind the nearest one."""
        attached = self.pools.get(pool)
        tiers = attached.placements[1:] if attached is not None else ()
        return tuple(one.backend for one in tiers)

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

    def notify(self, event: Event) -> None:
        """Notify observers of what is no backend's own."""
        # Observers sit on each backend's manager; one of them is enough.
        for channel in list(self.channels.values())[:1]:
            channel.notify(event)

    def close(self, deadline_s: float) -> bool:
        """Close all backends; return whether all calls have finished."""
        # Not emptied: a call under way reads it.
        self.pools = {}
        self.calls = self.prefix_calls = None
        now = time.monotonic()
        ended = True
        if self.copier is not None:
            # Half of the time for the copies that wait.
            left_s = max(0.0, deadline_s - now)
            ended = self.copier.close(now + left_s / 2, now + left_s * _COPIES_SHARE)
        left = len(self.channels)
        for channel in self.channels.values():
            # Each backend gets its share, so one cannot use up another's time.
            now = time.monotonic()
            share = max(0.0, deadline_s - now) / left
            ended = channel.close(now + share) and ended
            left -= 1
        for channel in list(self.channels.values())[:1]:
            channel.notify(PoolsDetached())
        return ended


def attach_plan(
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
    used = set(plan.backends)
    # A file of settings may have sections for what this plan does not use.
    _check(plan, regions, settings, {*used, *dock.backends, *dock.installed})
    _check_observers(dock, used, core)
    _check_integrity(plan, core.integrity)
    record = namespace_record(namespace, [route.pool for route in plan.routes])
    digest = namespace_digest(record)
    tenant = tenant_of(record, core.tenants)
    backends = AttachedBackends(
        digest,
        record,
        budget=HostBudget.measure(core.host_memory.reserve),
    )
    configs = {
        name: attrs.evolve(
            config,
            settings=dock.backends[name].settings(settings.get(name)),
            **_namespace_of(dock.backends[name].manifest, record),
            tenant=tenant,
            tenants=core.tenants,
            shard=plan.shard,
            shared={},
            # Only the nearest placement of a pool sends its pages.
            to_peers=all(
                route.to_peers and route.backend == name
                for route in plan.accepted
                if name in [one.backend for one in route.placements]
            ),
        )
        for name in sorted(used)
    }
    _check_places(configs)
    if any(len(route.placements) > 1 for route in plan.accepted):
        backends.copier = Copier(core, backends.notify)
    if core.page_events:
        backends.page_events = PageEvents(core.page_events)
    origin = Origin.of(
        plan.shard, namespace.model, digest, configuration_digest(record)
    )
    try:
        for name in configs:
            backends.channels[name] = BackendChannel(dock.backends[name], core, origin)
        for route in plan.accepted:
            _attach(backends, route, regions[route.pool.name], configs, core)
        for name in configs:
            mine = [one for one in backends.placements if one.backend == name]
            check_suffixes(
                name, [(one.pool, one.suffixes, one.region.objects) for one in mine]
            )
        known = frozenset(route.pool.name for route in plan.routes)
        backends.calls = calls = CallPools.of(backends.pools, known)
        backends.prefix_calls = None if calls.engine_hits else calls
        channels = backends.channels.values()
        backends.listening = any(channel.listening for channel in channels)
        _announce(backends, plan, dock.provenance(), config.max_age_s)
    except BaseException:
        backends.close(core.deadlines.until("close"))
        raise
    return backends


def _namespace_of(manifest: Manifest, record: dict[str, object]) -> dict[str, Any]:
    """Return namespace and record for one backend: sealed pages have their own."""
    if manifest.sealed:
        record = {**record, "sealed": SEALED_FORMAT}
    return {"namespace": namespace_digest(record), "namespace_record": record}


def _check(
    plan: Plan,
    regions: Mapping[str, Region],
    settings: Mapping[str, Mapping[str, object]],
    known: set[str],
) -> None:
    for name in settings:
        if name not in known:
            raise AttachError(
                f"settings are given for backend {name!r}, which is not installed",
                fix=did_you_mean(name, known),
            )
    for route in plan.accepted:
        if route.pool.name not in regions:
            raise AttachError(f"pool {route.pool.name!r} was given no memory")
        _check_layout(route.pool, regions[route.pool.name])


def _check_places(configs: Mapping[str, AttachConfig]) -> None:
    """Raise if two backends would keep pages in the same place."""
    users: dict[str, str] = {}
    for name, config in configs.items():
        settings = config.settings
        for field in attrs.fields(type(settings)) if settings is not None else ():
            value = getattr(settings, field.name)
            if not field.metadata.get("place") or value is None:
                continue
            place = os.path.realpath(value)
            if place in users:
                raise AttachError(
                    f"backends {name!r} and {users[place]!r} have the same "
                    f"{field.name}, {place}",
                    fix="Give each its own.",
                )
            users[place] = name


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
        Integrity.TRUST: (IntegrityCheck.TRAILER, IntegrityCheck.BACKEND),
        Integrity.ALWAYS: (IntegrityCheck.TRAILER,),
        Integrity.OFF: (IntegrityCheck.NONE, IntegrityCheck.BACKEND),
    }[asked]
    for route in plan.accepted:
        for placement in route.placements if route.pool.physical else ():
            if placement.check not in (*kept, IntegrityCheck.SEALED):
                raise AttachError(
                    f"core.integrity is {asked}, and the plan was made for another: "
                    f"pool {route.pool.name!r} is {placement.check}",
                    fix="Plan with needs=RouteRequirements(integrity=core.integrity).",
                )


def _announce(
    backends: AttachedBackends,
    plan: Plan,
    plugins: Sequence[PluginLoaded],
    max_age_s: float,
) -> None:
    for plugin in plugins:
        log.info("%s", plugin)
    for route in plan.refused:
        log.warning("pool %s is not stored: %s", route.pool.name, route.reason)
    unverified = [
        route.pool.name
        for route in plan.accepted
        if IntegrityCheck.NONE in [one.check for one in route.placements]
    ]
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
                    farther=backends.farther(route.pool.name),
                )
            )
        for attached in backends.pools.values():
            attached.notify_held()
        if channel.observes_pages:
            channel.notify_pages(
                PoolsAttached(
                    record=backends.record,
                    pools=tuple(one.pool for one in backends.pools.values()),
                    refused={one.pool.name: one.reason for one in plan.refused},
                    slice_names={
                        name: one.placements[0].slice_name
                        for name, one in backends.pools.items()
                        if one.placements
                    },
                    max_age_s=max_age_s,
                )
            )


def _attach(
    backends: AttachedBackends,
    route: Route,
    region: Region,
    configs: Mapping[str, AttachConfig],
    core: CoreSettings,
) -> None:
    """Attach a pool to each of its backends, near first."""
    shard = configs[route.placements[0].backend].shard
    placements: list[Placement] = []
    landing = None
    rows = None
    if len(route.placements) > 1:
        lend_rows = backends.within_budget(route.pool, allocate_host)
        rows = PoolRows.of(region, core, lend_rows)
    for option in route.placements:
        config, channel = configs[option.backend], backends.channels[option.backend]
        pool = attrs.evolve(route.pool, object_unit=option.unit)
        lend = backends.within_budget(pool, allocator_for(channel, pool, config))
        mine = region
        if region.objects != stored_objects(pool, shard):
            # The route cut pages into other objects than the engine did.
            mine = Region.of(pool, shard, region.owners, region.pages)
        batch_pages, steps, registered, test_page = _prepare(
            channel, pool, option, mine, core, lend
        )
        if rows is not None:
            most = _batch_pages(channel, mine, core, staged=False)
            batch_rows = min(rows.chunk_rows, most)
            as_rows, through = rows.steps(pool, shard, option, batch_rows, lend)
            registered = attrs.evolve(
                registered,
                blocks=(*registered.blocks, *through.region.blocks),
                owners=(*registered.owners, *through.region.owners),
            )
        if route.to_peers and not placements:
            # Pages go straight to peers through the nearest backend alone.
            _check_grid(mine)
            landing = _landing_memory(channel, core, lend)
            registered = _reachable(registered, mine, landing)
        try:
            handle = channel.register_pool(pool, registered, config)
        except AttachError as error:
            if not placements:
                raise
            log.warning(
                "pool %s goes without its tier %s until it is attached again: %s",
                pool.name,
                option.backend,
                error,
            )
            continue
        suffixes = _suffixes(channel, pool, shard)
        names = (pool.name, config.namespace, suffixes)
        limit = channel.backend.manifest.max_batch_keys or _EXISTS_KEYS
        placement = Placement(
            pool=pool,
            channel=channel,
            handle=handle,
            namespace=config.namespace,
            suffixes=suffixes,
            region=mine,
            steps=steps,
            batch_pages=batch_pages,
            batch_keys=min(_EXISTS_KEYS, limit),
            health_check=HealthCheck.of(channel, handle, names, test_page),
            share=_SHARE,
            page_events=backends.page_events,
            tier=option.tier,
            alone=rows is None,
        )
        _start(placement, core)
        if rows is not None:
            placement = rows.reached_by(placement, as_rows, through, batch_rows)
        placements.append(placement)
    # Nothing waits for its turn behind the last one.
    placements[-1] = attrs.evolve(placements[-1], share=1.0)
    writes = route.pool.writes(shard)
    chain = None
    if rows is not None and backends.copier is not None and len(placements) > 1:
        chain = rows.chain(route.pool, placements, backends.copier, writes=writes)
    backends.pools[route.pool.name] = AttachedPool(
        pool=placements[0].pool,
        region=placements[0].region,
        leases=PageLeases(region.pages),
        writes=writes,
        placements=tuple(placements),
        chain=chain,
        landing=landing,
    )


def _prepare(
    channel: BackendChannel,
    pool: PoolSpec,
    option: RouteOption,
    region: Region,
    core: CoreSettings,
    lend: Allocator,
) -> tuple[int, PageSteps, Region, StagingBuffers | None]:
    """Return a batch's pages, the steps, what is registered, and test pages."""
    staged = pool.physical and _is_staged(option, core.calls.staging)
    loads = core.calls.staging is StagingChoice.LOADS
    batch_pages = _batch_pages(channel, region, core, staged=staged or loads)
    if not pool.physical:
        return batch_pages, PageSteps.of_markers(region), region, None
    steps = _steps(option, region, batch_pages, core, lend, staged=staged)
    test_page = StagingBuffers(
        region, 2, 1,
        trailers=option.check is IntegrityCheck.TRAILER,
        pieces=not staged,
        lend=lend,
    )  # fmt: skip
    registered = attrs.evolve(
        steps.region,
        blocks=(*steps.region.blocks, *test_page.region.blocks),
        owners=(*steps.region.owners, *test_page.region.owners),
    )
    return batch_pages, steps, registered, test_page


def _suffixes(channel: BackendChannel, pool: PoolSpec, shard: Shard) -> tuple[str, ...]:
    """Ask a backend for the ends of a pool's keys.

    Raises:
        AttachError: If it fails.
    """
    try:
        return channel.backend.key_suffix(pool, shard)
    except Exception as error:
        what = as_kvdock_error(error).what
        raise AttachError(
            f"backend {channel.name!r} gives pool {pool.name!r} no key suffixes: "
            f"{what}",
            fix="kvdock_key_suffix returns one for each object of a page.",
        ) from error


def _start(placement: Placement, core: CoreSettings) -> None:
    """Let a backend keep track of what is stored, and its breaker probe."""
    channel, handle = placement.channel, placement.handle
    if core.page_events and placement.reports_removal:
        # The first call begins to keep track of what is stored.
        channel.call_attach(
            placement.pool,
            lambda: handle.removed(core.page_events),
            lambda _: None,
        )
    channel.background.set_health_check(placement.health_check.run)


def _check_grid(region: Region) -> None:
    """Raise if rows of a pool cannot be addressed one by one."""
    if region.grid is None:
        raise AttachError(
            f"pool {region.pool!r} cannot go straight to peers: it lies in rows with "
            "gaps, or its parts are counted per token and per page",
            fix="Use Region.of, as pools whose parts are counted alike.",
        )


def _landing_memory(
    channel: BackendChannel, core: CoreSettings, lend: Allocator
) -> HostBuffer | None:
    """Return memory for whole pages of peers, where the backend wants some."""
    if not channel.backend.manifest.landing_run_bytes or not core.peers.landing_bytes:
        return None
    return lend(core.peers.landing_bytes)


def _reachable(
    registered: Region, region: Region, landing: HostBuffer | None
) -> Region:
    """Return what is registered with what peers reach: pages and landing memory."""
    added: list[tuple[Block, object]] = []
    known = set(registered.blocks)
    # A staged pool has only the core's memory registered.
    added += [
        (block, owner)
        for block, owner in zip(region.blocks, region.owners, strict=False)
        if block not in known
    ]
    if landing is not None:
        added.append((block_of(landing.memory), landing))
    return attrs.evolve(
        registered,
        blocks=(*registered.blocks, *(block for block, _ in added)),
        owners=(*registered.owners, *(owner for _, owner in added)),
    )


def _is_staged(option: RouteOption, policy: StagingChoice) -> bool:
    """Return whether a pool is moved through memory of the core.

    A plan that was made without the policy knows of no gate: then a pool of an
    engine that cannot hold pages back is staged.
    """
    if option.mode is TransferMode.STAGED or policy is StagingChoice.ALWAYS:
        return True
    return policy is StagingChoice.SAFE and option.mode is not TransferMode.GATED


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


def _steps(
    option: RouteOption,
    region: Region,
    batch_pages: int,
    core: CoreSettings,
    lend: Allocator,
    *,
    staged: bool,
) -> PageSteps:
    trailers = option.check is IntegrityCheck.TRAILER
    through_core: PageSteps | None = None
    if staged or core.calls.staging is StagingChoice.LOADS:
        pages = min(batch_pages, region.pages)
        areas = core.calls.staging_buffers
        staging = StagingBuffers(region, areas, pages, trailers=trailers, lend=lend)
        through_core = PageSteps.staged(staging, region)
    if through_core is not None and staged:
        return through_core
    buffers = TrailerBuffers.attach_to(region, lend) if trailers else None
    gated = option.mode is TransferMode.GATED
    steps = PageSteps.direct(region, buffers, gated=gated)
    return steps.with_loads_of(through_core) if through_core else steps

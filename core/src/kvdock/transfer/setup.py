"""Give the backends of a plan the memory of its pools."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kvdock.config.core import CoreSettings, Integrity
from kvdock.config.core import Staging as StagingChoice
from kvdock.errors import AttachError, KvdockError, nearest
from kvdock.events import PoolRouted
from kvdock.keys import check_suffixes
from kvdock.namespace import namespace_digest, namespace_record
from kvdock.region import Region
from kvdock.resilience.channel import Line, named
from kvdock.routing.verdicts import Check, Path
from kvdock.transfer.attached_pool import Berth
from kvdock.transfer.health_check import Probe
from kvdock.transfer.host_memory import lender
from kvdock.transfer.integrity import Trailers
from kvdock.transfer.leases import Leases
from kvdock.transfer.modes import Direct, Marks, Staged, Way
from kvdock.transfer.staging import Staging

if TYPE_CHECKING:
    from kvdock.dock import Dock
    from kvdock.namespace import Namespace
    from kvdock.plugin.hookspecs import AttachConfig
    from kvdock.pools.spec import PoolSpec
    from kvdock.routing.plan import Plan, Route
    from kvdock.transfer.host_memory import Lender


log = logging.getLogger("kvdock")


@attrs.frozen(eq=False)
class Moorings:
    """Everything that an attachment holds on to.

    Args:
        namespace: The digest that begins every key.
        record: What the digest covers.
        lines: Backend name to the way to it.
        berths: Pool name to the attached pool, anchor first.
        probes: Pool name to its test page.
    """

    namespace: str
    record: Mapping[str, object]
    lines: dict[str, Line] = attrs.field(factory=dict)
    berths: dict[str, Berth] = attrs.field(factory=dict)
    probes: dict[str, Probe] = attrs.field(factory=dict)

    def close(self, timeout_s: float) -> bool:
        """Let go of everything; return whether every call has ended."""
        deadline_s = time.monotonic() + timeout_s
        self.berths.clear()
        ended = True
        left = len(self.lines)
        for line in self.lines.values():
            # Each backend gets its share, so one cannot use up another's time.
            now = time.monotonic()
            share = max(0.0, deadline_s - now) / left
            ended = line.close(now + share) and ended
            left -= 1
        return ended


def moor(
    dock: Dock,
    plan: Plan,
    namespace: Namespace,
    regions: Mapping[str, Region],
    settings: Mapping[str, Mapping[str, object]],
    core: CoreSettings,
    *,
    told: AttachConfig,
) -> Moorings:
    """Attach every accepted pool of a plan; `told` holds for each backend.

    Raises:
        KvdockError: If anything is missing or refused; what was attached
            before is let go again.
    """
    used = {route.backend for route in plan.accepted if route.backend}
    _check(plan, regions, settings, used)
    _check_observers(dock, used, core)
    _check_integrity(plan, core.integrity)
    record = namespace_record(namespace, [route.pool for route in plan.routes])
    digest = namespace_digest(record)
    moorings = Moorings(digest, record)
    configs = {
        name: attrs.evolve(
            told,
            settings=dock.backends[name].settings(settings.get(name)),
            namespace=digest,
            namespace_record=record,
            shard=plan.shard,
            shared={},
        )
        for name in sorted(used)
    }
    try:
        for name in configs:
            moorings.lines[name] = Line(dock.backends[name], core)
        for route in plan.accepted:
            name = str(route.backend)
            _attach(moorings, route, regions[route.pool.name], configs[name], core)
        for name in configs:
            mine = [one for one in moorings.berths.values() if one.line.name == name]
            check_suffixes(
                name, [(one.pool, one.suffixes, one.region.objects) for one in mine]
            )
        _announce(moorings, plan)
    except BaseException:
        moorings.close(core.deadlines.close)
        raise
    return moorings


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
                fix=nearest(name, used),
            )
    for route in plan.accepted:
        if route.pool.name not in regions:
            raise AttachError(f"pool {route.pool.name!r} was given no memory")
        _check_layout(route.pool, regions[route.pool.name])


def _check_layout(pool: PoolSpec, region: Region) -> None:
    """Refuse memory whose objects have their bytes in another order."""
    if pool.physical and region.layout is not pool.layout:
        raise AttachError(
            f"pool {pool.name!r} was planned in layout {pool.layout}, but its memory "
            f"was described in {region.layout}",
            fix="Describe pool and region in the layout in which the pages lie.",
        )


def _check_observers(dock: Dock, used: set[str], core: CoreSettings) -> None:
    """Refuse to be observed by nobody where somebody was asked for."""
    for backend in sorted(used):
        around = dock.backends[backend].observers
        for name in core.observers:
            if name not in around:
                raise AttachError(
                    f"core.observers names {name!r}, which is not around backend "
                    f"{backend!r}",
                    fix="Call kvdock.observers.observe(dock, core.observers, settings) "
                    "before Attachment.open.",
                )


def _check_integrity(plan: Plan, asked: Integrity) -> None:
    """Refuse a plan that was made for another choice than the settings'."""
    kept = {
        Integrity.AUTO: (Check.TRAILER, Check.BACKEND),
        Integrity.ALWAYS: (Check.TRAILER,),
        Integrity.OFF: (Check.NONE, Check.BACKEND),
    }[asked]
    for route in plan.accepted:
        if route.pool.physical and route.check not in kept:
            raise AttachError(
                f"core.integrity is {asked}, and the plan was made for another: pool "
                f"{route.pool.name!r} is {route.check}",
                fix="Plan with needs=Needs(checks=core.integrity).",
            )


def _announce(moorings: Moorings, plan: Plan) -> None:
    for route in plan.refused:
        log.warning("pool %s is not stored: %s", route.pool.name, route.reason)
    unverified = [r.pool.name for r in plan.accepted if r.check is Check.NONE]
    if unverified:
        log.warning("integrity is off: nobody verifies %s", ", ".join(unverified))
    for line in moorings.lines.values():
        line.tell_breakers()
    # Observers sit on each backend's manager; one of them is enough.
    for line in list(moorings.lines.values())[:1]:
        for route in plan.routes:
            line.tell(
                PoolRouted(
                    pool=route.pool.name,
                    backend=route.backend or "",
                    enabled=route.backend is not None,
                    reason=route.reason,
                )
            )
        for berth in moorings.berths.values():
            berth.tell_held()


def _attach(
    moorings: Moorings,
    route: Route,
    region: Region,
    config: AttachConfig,
    core: CoreSettings,
) -> None:
    pool, name = route.pool, str(route.backend)
    line = moorings.lines[name]
    if region.objects != pool.objects(config.shard):
        # The route cut pages into other objects than the engine did.
        region = Region.of(pool, config.shard, region.owners, region.pages)
    batch_pages = _batch_pages(region, core)
    lend = lender(line, pool, config)
    way = _way(route, region, batch_pages, core, lend)
    probe_memory = None
    told = way.region
    if pool.physical:
        probe_memory = Staging(
            region, 2, 1,
            trailers=route.check is Check.TRAILER,
            pieces=isinstance(way, Direct),
            lend=lend,
        )  # fmt: skip
        told = attrs.evolve(
            told,
            blocks=(*told.blocks, *probe_memory.region.blocks),
            owners=(*told.owners, *probe_memory.region.owners),
        )
    handle = line.attach(pool, told, config)
    try:
        suffixes = named(lambda: line.backend.key_suffix(pool, config.shard))
    except KvdockError as error:
        raise AttachError(
            f"backend {name!r} gives pool {pool.name!r} no key suffixes: {error.what}",
            fix="kvdock_key_suffix returns one for each object of a page.",
        ) from error
    berth = Berth(
        pool=pool,
        line=line,
        handle=handle,
        namespace=moorings.namespace,
        suffixes=suffixes,
        region=region,
        way=way,
        leases=Leases(region.pages),
        batch_pages=batch_pages,
        writes=pool.writes(config.shard),
    )
    probe = Probe.of(
        line, handle, (pool.name, moorings.namespace, suffixes), probe_memory
    )
    moorings.berths[pool.name] = berth
    moorings.probes[pool.name] = probe
    line.errands.probe_with(probe.run)


def _batch_pages(region: Region, core: CoreSettings) -> int:
    page_bytes = max(1, int(region.object_bytes.sum()))
    return max(1, min(core.calls.batch_pages, core.calls.batch_bytes // page_bytes))


def _way(
    route: Route, region: Region, batch_pages: int, core: CoreSettings, lend: Lender
) -> Way:
    if not route.pool.physical:
        return Marks(region)
    trailers = route.check is Check.TRAILER
    always = core.calls.staging is StagingChoice.ALWAYS
    if route.path is Path.STAGED or always:
        pages = min(batch_pages, region.pages)
        areas = core.calls.staging_areas
        staging = Staging(region, areas, pages, trailers=trailers, lend=lend)
        return Staged.through(staging, region)
    if trailers:
        behind = Trailers.behind(region, lend)
        return Direct(behind.region, behind)
    return Direct(region)

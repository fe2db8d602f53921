"""Decide which backend keeps which pool, and say why.

Pure and deterministic: pools, a shard and manifests in, a plan out. A
backend's own judgement of a pool comes in as a callable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock.config.tiers import Tier, Write
from kvdock.errors import NoRoute, PluginError, PoolError, did_you_mean
from kvdock.plugin.evidence import NO_REPORT
from kvdock.plugin.manifest import Capability, Scope
from kvdock.pools.layout import stored_objects
from kvdock.pools.spec import PoolSpec, check_pools
from kvdock.routing.verdicts import (
    CapabilityCheck,
    IntegrityCheck,
    RouteOption,
    RouteRequirements,
    TransferMode,
    evaluate_backend,
)
from kvdock.units import format_bytes

if TYPE_CHECKING:
    from kvdock.plugin.manifest import Manifest
    from kvdock.pools.shard import Shard


@attrs.frozen
class Route:
    """The route of one pool, with every backend's answer.

    Args:
        pool: The pool, with the object unit that was chosen for the nearest backend.
        placements: The backends that keep it, near first, each with its transfer
            mode, its object unit and its integrity check; empty for a pool that is
            not stored.
        reason: How it is done, or why it is not.
        options: What each backend that was asked said.
        absent: Whether this rank has nothing of the pool to keep, because
            its stage has none of the pool's layers.
    """

    pool: PoolSpec
    placements: tuple[RouteOption, ...]
    reason: str
    options: tuple[RouteOption, ...] = ()
    absent: bool = False

    @property
    def words(self) -> str:
        """The pool and where it goes, for people."""
        return (
            f"{self.pool.name} to {' and '.join(at.backend for at in self.placements)}"
        )

    @property
    def nearest(self) -> RouteOption | None:
        """The first placement, or None for a pool that is not stored."""
        return self.placements[0] if self.placements else None

    @property
    def backend(self) -> str | None:
        """The name of the nearest backend, or None."""
        return self.nearest.backend if self.nearest else None

    @property
    def mode(self) -> TransferMode:
        """The path of bytes from and to the nearest backend."""
        return self.nearest.mode if self.nearest else TransferMode.NONE

    @property
    def check(self) -> IntegrityCheck:
        """The check of pages that come from the nearest backend."""
        return self.nearest.check if self.nearest else IntegrityCheck.BACKEND

    @property
    def allocate(self) -> bool:
        """Return whether the nearest backend should bring the pool's memory."""
        return self.nearest is not None and self.nearest.allocate

    @property
    def to_peers(self) -> bool:
        """Return whether its pages go straight to peers: asked for, and there."""
        return self.nearest is not None and any(
            capability is Capability.PEERS for capability, _ in self.nearest.verdicts
        )


@attrs.frozen
class Plan:
    """Routes of all pools of an engine, anchor first."""

    shard: Shard
    routes: tuple[Route, ...]

    @property
    def anchor(self) -> Route:
        """The route of the pool whose pages define the prefix.

        Raises:
            PoolError: If there is none: the engine evaluates hits itself.
        """
        for route in self.routes:
            if route.pool.anchor:
                return route
        raise PoolError("no pool of this plan is the anchor: its engine evaluates hits")

    @property
    def accepted(self) -> tuple[Route, ...]:
        """Routes that lead somewhere."""
        return tuple(route for route in self.routes if route.placements)

    @property
    def refused(self) -> tuple[Route, ...]:
        """Pools that no backend takes, although this rank has some."""
        return tuple(
            route for route in self.routes if not route.placements and not route.absent
        )

    @property
    def backends(self) -> frozenset[str]:
        """The names of all backends that keep a pool."""
        return frozenset(
            placement.backend for route in self.routes for placement in route.placements
        )

    @property
    def absent(self) -> tuple[Route, ...]:
        """Pools of which this rank has nothing."""
        return tuple(route for route in self.routes if route.absent)

    def explain(self) -> str:
        """Render the plan as a table of plain text, options included."""
        rows = [("POOL", "KIND", "NEED", "PAGE", "BACKEND", "WHY")]
        for route in self.routes:
            pool = route.pool
            rows.append(
                (
                    pool.name,
                    f"{pool.kind}{' draft' if pool.draft else ''}",
                    "anchor"
                    if pool.anchor
                    else ("required" if pool.required else "optional"),
                    format_bytes(pool.page_bytes(self.shard)),
                    ", ".join(one.backend for one in route.placements) or "-",
                    route.reason,
                )
            )
            rows += [
                ("", "", "", "", option.backend, option.not_chosen)
                for option in route.options
                if route.placements and option not in route.placements
            ]
        return _as_table(rows)


def _as_table(rows: Sequence[Sequence[str]]) -> str:
    """Align columns of text with two spaces between them."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) for cell, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in rows
    )


def plan_routes(  # noqa: PLR0913 - the whole question in one call
    pools: Sequence[PoolSpec],
    shard: Shard,
    manifests: Mapping[str, Manifest],
    preference: Sequence[str] = (),
    *,
    tiers: Sequence[Tier] = (),
    overrides: Mapping[str, str] | None = None,
    strict: bool = False,
    needs: RouteRequirements | None = None,
    judge: CapabilityCheck | None = None,
    unproven: Mapping[str, str] | None = None,
    wrapped: Mapping[str, Sequence[str]] | None = None,
) -> Plan:
    """Choose a backend for every pool.

    Args:
        pools: All pools of the engine, one of them the anchor, or none where
            the engine evaluates hits itself.
        shard: The slice of the model that this process owns.
        manifests: What the installed backends declare, by name.
        preference: Backends to consider, best first; empty for all, those
            that need no staging first, then by name.
        tiers: Instead of a preference, the backends that keep each page, near
            first. A pool that a tier does not take skips it.
        overrides: Pool name to the one backend that may take it.
        strict: Treat optional pools as required; otherwise one that no backend
            takes is refused with a reason and not stored.
        needs: What the deployment asks of every backend.
        judge: A backend's own verdict, which comes before its manifest.
        unproven: Backend name to why the integrity that it declares is not proven, ""
            where it is. That of any other counts as NO: the core adds trailers.
        wrapped: Backend name to the wrappers around its stores, to be shown.

    Raises:
        NoRoute: If no backend takes a required pool; the message is the table.
        PluginError: If a backend is named that is not there, or there are both
            a preference and tiers.
        PoolError: If the pools do not belong together.
    """
    check_pools(pools)
    wanted = dict(overrides or {})
    if preference and tiers:
        raise PluginError(
            f"both a preference ({', '.join(preference)}) and tiers are given",
            fix="Give one of them.",
        )
    for name in [*preference, *(one.backend for one in tiers), *wanted.values()]:
        if name not in manifests:
            raise PluginError(
                f"no backend {name!r} is loaded", fix=did_you_mean(name, manifests)
            )
    for name in wanted:
        if name not in {pool.name for pool in pools}:
            raise PluginError(
                f"a backend is chosen for pool {name!r}, which is not there",
                fix=did_you_mean(name, [pool.name for pool in pools]),
            )
    ordered = sorted(pools, key=lambda pool: not pool.anchor)
    deployment = _Deployment(
        shard,
        manifests,
        needs or RouteRequirements(),
        judge,
        unproven or {},
        wrapped or {},
    )
    routes = tuple(
        _tiered_route(pool, deployment, tiers)
        if tiers and pool.name not in wanted
        else _route(
            pool,
            deployment,
            [wanted[pool.name]] if pool.name in wanted else list(preference),
        )
        for pool in ordered
    )
    plan = Plan(shard, routes)
    lost = [r.pool.name for r in plan.refused if strict or r.pool.required]
    if lost:
        raise NoRoute(
            f"no backend takes {', '.join(lost)}\n{plan.explain()}",
            fix="Install a backend that does, or see `kvdock list`.",
            plan=plan,
        )
    return plan


@attrs.frozen
class _Deployment:
    """What the routes of all pools depend on; see `plan_routes`."""

    shard: Shard
    manifests: Mapping[str, Manifest]
    needs: RouteRequirements
    judge: CapabilityCheck | None
    unproven: Mapping[str, str]
    wrapped: Mapping[str, Sequence[str]]

    def ask(
        self, pool: PoolSpec, name: str, needs: RouteRequirements | None = None
    ) -> RouteOption:
        """Return what a backend says to a pool."""
        option = evaluate_backend(
            pool,
            self.shard,
            self.manifests[name],
            needs or self.needs,
            self.judge,
            unproven=self.unproven.get(name, NO_REPORT),
        )
        return attrs.evolve(option, wrapped_by=tuple(self.wrapped.get(name, ())))


def _route(pool: PoolSpec, given: _Deployment, preference: Sequence[str]) -> Route:
    if not stored_objects(pool, given.shard):
        return _absent(pool)
    names = list(preference) or sorted(given.manifests)
    options = tuple(given.ask(pool, name) for name in names)
    takers = [option for option in options if option.accepted]
    if not preference:
        takers.sort(key=lambda option: option.mode is TransferMode.STAGED)
    if not takers:
        return _refused(pool, options)
    best = takers[0]
    routed = attrs.evolve(pool, object_unit=best.unit)
    return Route(routed, (best,), best.reason, options)


def _absent(pool: PoolSpec) -> Route:
    return Route(pool, (), "this rank has none of its layers", absent=True)


def _refused(pool: PoolSpec, options: tuple[RouteOption, ...]) -> Route:
    reason = "; ".join(f"{option.backend}: {option.reason}" for option in options)
    return Route(pool, (), reason or "no backend is loaded", options)


def _tiered_route(pool: PoolSpec, given: _Deployment, tiers: Sequence[Tier]) -> Route:
    """Route a pool to each tier that takes it.

    What is stored is shared and kept as far as one of the written tiers does it.
    """
    if not stored_objects(pool, given.shard):
        return _absent(pool)
    needs = attrs.evolve(given.needs, sharing=Scope.NONE, durability=Scope.NONE)
    options: list[RouteOption] = []
    for tier in tiers:
        option = given.ask(pool, tier.backend, needs)
        options.append(attrs.evolve(option, tier=tier))
        if option.accepted:
            # Only the nearest tier sends pages to peers.
            needs = attrs.evolve(needs, peers=False)
    takers = [option for option in options if option.accepted]
    written = [one for one in takers if one.tier and one.tier.write is not Write.NEVER]
    if takers and not written:
        return Route(pool, (), "no tier that takes it is written", tuple(options))
    lacking = [
        reason for reach in _REACH if (reason := _lacks(pool, given, written, reach))
    ]
    if lacking:
        return Route(pool, (), "; ".join(lacking), tuple(options))
    if not takers:
        return _refused(pool, tuple(options))
    near = takers[0]
    said = [f"{one.backend}: {one.tier}, {one.reason}" for one in takers]
    said += [
        f"skips {one.backend}: {one.reason}" for one in options if not one.accepted
    ]
    routed = attrs.evolve(pool, object_unit=near.unit)
    return Route(routed, tuple(takers), "; ".join(said), tuple(options))


_REACH = (Capability.SHARING, Capability.DURABILITY)
"""What the tiers of a route have together."""


def _lacks(
    pool: PoolSpec,
    given: _Deployment,
    written: Sequence[RouteOption],
    reach: Capability,
) -> str:
    """Return why no written tier reaches as far as is needed, or ""."""
    reasons = []
    for one in written:
        verdict = dict(given.ask(pool, one.backend).verdicts).get(reach)
        if verdict is None or verdict:
            return ""
        reasons.append(verdict.reason)
    return ", ".join(reasons)

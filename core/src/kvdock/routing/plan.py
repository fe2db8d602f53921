"""Decide which backend keeps which pool, and say why.

Pure and deterministic: pools, a shard and manifests in, a plan out. A
backend's own judgement of a pool comes in as a callable.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

from kvdock.errors import NoRoute, PluginError, PoolError, did_you_mean
from kvdock.plugin.manifest import Capability
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

if TYPE_CHECKING:
    from kvdock.plugin.manifest import Manifest
    from kvdock.pools.shard import Shard

__all__ = (
    "CapabilityCheck",
    "IntegrityCheck",
    "Plan",
    "Route",
    "RouteOption",
    "RouteRequirements",
    "TransferMode",
    "as_table",
    "plan_routes",
)


@attrs.frozen
class Route:
    """Where one pool goes, with every backend's answer.

    Args:
        pool: The pool, with the object unit that was chosen for it.
        backend: Who keeps it, or None.
        mode: How its bytes move.
        reason: How it is done, or why it is not.
        options: What each backend that was asked said.
        absent: Whether this rank has nothing of the pool to keep, because
            its stage has none of the pool's layers.
        allocate: Whether the backend should bring the pool's memory.
        check: Who verifies its pages.
    """

    pool: PoolSpec
    backend: str | None
    mode: TransferMode
    reason: str
    options: tuple[RouteOption, ...] = ()
    absent: bool = False
    allocate: bool = False
    check: IntegrityCheck = IntegrityCheck.BACKEND

    @property
    def direct(self) -> bool:
        """Whether its pages go straight to peers: asked for, and there."""
        return any(
            capability is Capability.DIRECT_TRANSFER
            for option in self.options
            if option.backend == self.backend
            for capability, _ in option.verdicts
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
        return tuple(route for route in self.routes if route.backend)

    @property
    def refused(self) -> tuple[Route, ...]:
        """Pools that no backend takes, although this rank has some."""
        return tuple(
            route for route in self.routes if not route.backend and not route.absent
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
                    f"{pool.page_bytes(self.shard)} B",
                    route.backend or "-",
                    route.reason,
                )
            )
            rows += [
                ("", "", "", "", option.backend, option.not_chosen)
                for option in route.options
                if option.backend != route.backend and route.backend
            ]
        return as_table(rows)


def as_table(rows: Sequence[Sequence[str]]) -> str:
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
    overrides: Mapping[str, str] | None = None,
    strict: bool = False,
    needs: RouteRequirements | None = None,
    judge: CapabilityCheck | None = None,
    oracles: Collection[str] = (),
) -> Plan:
    """Choose a backend for every pool.

    Args:
        pools: All pools of the engine, one of them the anchor, or none where
            the engine evaluates hits itself.
        shard: The slice of the model that this process owns.
        manifests: What the installed backends declare, by name.
        preference: Backends to consider, best first; empty for all, those
            that need no staging first, then by name.
        overrides: Pool name to the one backend that may take it.
        strict: Treat optional pools as required; otherwise one that no backend
            takes is refused with a reason and not stored.
        needs: What the deployment asks of every backend.
        judge: A backend's own verdict, which comes before its manifest.
        oracles: The backends whose distribution brings an oracle. NATIVE
            integrity of any other counts as NO: the core adds trailers.

    Raises:
        NoRoute: If no backend takes a required pool; the message is the table.
        PluginError: If a backend is named that is not there.
        PoolError: If the pools do not belong together.
    """
    check_pools(pools)
    wanted = dict(overrides or {})
    for name in [*preference, *wanted.values()]:
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
    routes = tuple(
        _route(
            pool,
            shard,
            manifests,
            [wanted[pool.name]] if pool.name in wanted else list(preference),
            needs or RouteRequirements(),
            judge,
            oracles=oracles,
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


def _route(  # noqa: PLR0913 - what one route depends on
    pool: PoolSpec,
    shard: Shard,
    manifests: Mapping[str, Manifest],
    preference: Sequence[str],
    needs: RouteRequirements,
    judge: CapabilityCheck | None,
    *,
    oracles: Collection[str],
) -> Route:
    if not stored_objects(pool, shard):
        why = "this rank has none of its layers"
        return Route(pool, None, TransferMode.NONE, why, absent=True)
    names = list(preference) or sorted(manifests)
    options = tuple(
        evaluate_backend(
            pool, shard, manifests[name], needs, judge, oracle=name in oracles
        )
        for name in names
    )
    takers = [option for option in options if option.accepted]
    if not preference:
        takers.sort(key=lambda option: option.mode is TransferMode.STAGED)
    if not takers:
        reason = "; ".join(f"{option.backend}: {option.reason}" for option in options)
        return Route(
            pool, None, TransferMode.NONE, reason or "no backend is loaded", options
        )
    best = takers[0]
    routed = attrs.evolve(pool, object_unit=best.unit)
    return Route(
        routed,
        best.backend,
        best.mode,
        best.reason,
        options,
        allocate=best.allocate,
        check=best.check,
    )

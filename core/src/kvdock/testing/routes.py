"""Ask the router about sample pools of an engine whose anchor lies elsewhere."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs

from kvdock.plugin.manifest import (
    Capability,
    KindSupport,
    Manifest,
    Scope,
    Support,
    Verdict,
)
from kvdock.pools.enums import HitPolicy, PoolKind
from kvdock.pools.shard import Shard
from kvdock.pools.spec import PoolSpec
from kvdock.routing.plan import Route, plan_routes
from kvdock.routing.verdicts import RouteRequirements
from kvdock.testing.samples import PAGE_TOKENS, Sample, possible_shardings

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvdock.plugin.backend import Backend

ANCHOR = PoolSpec(
    name="kit_anchor",
    kind=PoolKind.LOGICAL,
    parts=(),
    layers=(),
    page_tokens=PAGE_TOKENS,
    anchor=True,
)
"""The anchor of the engine that the sample pools belong to."""

_ASKED: Mapping[PoolKind, HitPolicy] = MappingProxyType(
    dict.fromkeys(
        (PoolKind.MAMBA, PoolKind.SWA, PoolKind.COMPRESSED), HitPolicy.TRAILING_PAGES
    )
)
"""What engines ask of a pool of each family, where it is not every page."""


def family_routes(backend: Backend) -> tuple[Route, ...]:
    """Return where a pool of each family would go, in its engines' own words."""
    found: list[Route] = []
    for kind in PoolKind:
        mine = backend.manifest.kinds.get(kind, KindSupport())
        policy = _ASKED.get(kind, HitPolicy.ALL_PAGES)
        layouts, shardings = sorted(mine.layouts), sorted(mine.shardings)
        usual = possible_shardings(kind)
        sample = Sample(
            kind=kind,
            hit_policy=policy,
            name=kind.value,
            layout=layouts[0],
            sharding=next((one for one in usual if one in shardings), usual[0]),
        )
        needs = RouteRequirements(allocator=backend.name)
        found += route_pools(backend, [sample.pool()], Shard(), needs, judged=False)
    return tuple(found)


def route_pools(
    backend: Backend,
    pools: Sequence[PoolSpec],
    shard: Shard,
    needs: RouteRequirements | None = None,
    settings: object = None,
    *,
    judged: bool = True,
) -> tuple[Route, ...]:
    """Ask the router for pools of an engine whose anchor lives elsewhere.

    Optional pools show why they are rejected; nothing is raised for them. Unless
    `judged`, the manifest alone counts, without the plugin's own verdicts.
    """
    anchor = Manifest(
        name="kit_anchor",
        api=backend.manifest.api,
        summary="counts pages and meets every need",
        kinds={PoolKind.LOGICAL: KindSupport()},
        peers=Support.NATIVE,
        integrity=Support.NATIVE,
        eviction=Support.NATIVE,
        fork_safe=Support.NATIVE,
        durability=Scope.CLUSTER,
        sharing=Scope.CLUSTER,
        clear_reach=Scope.NAMESPACE,
    )

    def judge(
        name: str, capability: Capability, pool: PoolSpec, shard: Shard
    ) -> Verdict | None:
        if name != backend.name or not judged:
            return None
        return backend.check_capability(capability, pool, shard, settings)

    wanted = {pool.name: backend.name for pool in pools}
    plan = plan_routes(
        [ANCHOR, *(attrs.evolve(pool, required=False) for pool in pools)],
        shard,
        {"kit_anchor": anchor, backend.name: backend.manifest},
        overrides={"kit_anchor": "kit_anchor", **wanted},
        needs=needs,
        judge=judge,
        # The kit tries what is declared; the checkup says what was not proven.
        unproven={"kit_anchor": "", backend.name: ""},
    )
    by_name = {route.pool.name: route for route in plan.routes}
    return tuple(by_name[pool.name] for pool in pools)

"""Routes of pools that are kept in tiers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
import pytest
from shelf import Shelf, attention, states

from kvdock.config import Tier, Write
from kvdock.dock import Dock
from kvdock.errors import NoRoute, PluginError, SettingsError
from kvdock.plugin.backend import Backend
from kvdock.plugin.manifest import Manifest, Scope
from kvdock.pools.enums import PoolKind
from kvdock.pools.shard import Shard
from kvdock.routing.verdicts import RouteRequirements

if TYPE_CHECKING:
    from kvdock.routing.plan import Plan


def dock(**changes: dict[str, Any]) -> Dock:
    """Three shelves, near to far, their manifests changed."""
    backends = {}
    for name in ("near", "disk", "far"):
        backend = Shelf(name).backend()
        manifest: Manifest = attrs.evolve(backend.manifest, **changes.get(name, {}))
        backends[name] = Backend(attrs.evolve(backend.plugin, manifest=manifest))
    return Dock(backends)


def names(plan: Plan, pool: str = "kv") -> list[str]:
    (route,) = [one for one in plan.routes if one.pool.name == pool]
    return [one.backend for one in route.placements]


def test_each_pool_goes_to_all_tiers_near_first() -> None:
    plan = dock().plan([attention(), states()], Shard(), tiers=["far", "near"])
    assert names(plan) == names(plan, "mamba") == ["far", "near"]
    assert [one.tier for one in plan.anchor.placements] == [
        Tier("far", Write.THROUGH),
        Tier("near", Write.BEHIND),
    ]
    assert plan.anchor.backend == "far"
    assert "near: written behind, promoted at the second use" in plan.explain()


def test_a_pool_skips_the_tier_that_does_not_take_it_and_says_why() -> None:
    kinds = dict(Shelf().backend().manifest.kinds)
    del kinds[PoolKind.MAMBA]
    found = dock(disk={"kinds": kinds})
    plan = found.plan([attention(), states()], Shard(), tiers=["near", "disk", "far"])
    assert names(plan) == ["near", "disk", "far"]
    assert names(plan, "mamba") == ["near", "far"]
    (route,) = [one for one in plan.routes if one.pool.name == "mamba"]
    assert "skips disk: disk does not take mamba pools" in route.reason


def test_tiers_are_shared_and_durable_together() -> None:
    needs = RouteRequirements(sharing=Scope.CLUSTER)
    with pytest.raises(NoRoute, match="near shares with"):
        dock().plan([attention()], Shard(), tiers=["near", "far"], needs=needs)
    shared = dock(far={"sharing": Scope.CLUSTER})
    plan = shared.plan([attention()], Shard(), tiers=["near", "far"], needs=needs)
    assert names(plan) == ["near", "far"]
    never: list[Any] = ["near", {"backend": "far", "write": "never"}]
    with pytest.raises(NoRoute):
        shared.plan([attention()], Shard(), tiers=never, needs=needs)
    needs = RouteRequirements(durability=Scope.HOST)
    kept = dock(disk={"durability": Scope.HOST})
    assert names(
        kept.plan([attention()], Shard(), tiers=["near", "disk"], needs=needs)
    ) == ["near", "disk"]


def test_a_pool_may_have_a_route_of_its_own_beside_tiers() -> None:
    plan = dock().plan(
        [attention(), states()], Shard(),
        tiers=["near", "far"], overrides={"mamba": "disk"},
    )  # fmt: skip
    assert names(plan) == ["near", "far"]
    assert names(plan, "mamba") == ["disk"]
    assert plan.routes[1].placements[0].tier is None


def test_a_pool_that_only_unwritten_tiers_take_is_refused() -> None:
    kinds = dict(Shelf().backend().manifest.kinds)
    del kinds[PoolKind.MAMBA]
    with pytest.raises(NoRoute, match="no tier that takes it is written"):
        dock(near={"kinds": kinds}).plan(
            [attention(), states()], Shard(),
            tiers=["near", {"backend": "far", "write": "never"}],
        )  # fmt: skip


def test_wrong_tiers_are_rejected() -> None:
    with pytest.raises(PluginError, match=r"'fare'.*Did you mean 'far'"):
        dock().plan([attention()], Shard(), tiers=["near", "fare"])
    with pytest.raises(SettingsError, match="given twice"):
        dock().plan([attention()], Shard(), tiers=["near", "near"])
    with pytest.raises(PluginError, match="both a preference"):
        dock().plan([attention()], Shard(), ["near"], tiers=["near", "far"])

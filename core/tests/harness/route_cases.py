"""Backends and pools to make plans with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.plugin.manifest import (
    API_VERSION,
    KindSupport,
    Manifest,
    Scope,
    Support,
)
from kvdock.pools.enums import HitPolicy, PoolKind
from kvdock.pools.factories import logical, mla
from kvdock.pools.shard import Shard
from kvdock.routing.plan import Plan, Route, plan_routes

if TYPE_CHECKING:
    from kvdock.pools.spec import PoolSpec

EVERYTHING = KindSupport(
    hit_policies=HitPolicy,
    split_heads=Support.NATIVE,
    draft=Support.NATIVE,
    multi_buffer=Support.NATIVE,
)
BASE: dict[str, Any] = {"layers": range(3), "page_tokens": 8}
KV = mla("kv", latent=28, rope=4, anchor=True, **BASE)


def backend(
    name: str = "best", *, kind: Mapping[str, Any] = {}, **said: Any
) -> Manifest:
    given: dict[str, Any] = {
        "kinds": dict.fromkeys(PoolKind, attrs.evolve(EVERYTHING, **kind)),
        "zero_copy": Support.NATIVE,
        "integrity": Support.NATIVE,
    }
    return Manifest(name=name, api=API_VERSION, summary=name, **(given | said))


def plan(
    *pools: PoolSpec, by: Any = (), shard: Shard | None = None, **how: Any
) -> Plan:
    manifests = {one.name: one for one in (by or [backend()])}
    return plan_routes(
        pools,
        shard or Shard(),
        manifests,
        **{"unproven": dict.fromkeys(manifests, "")} | how,
    )


ANY = backend(
    "any",
    sharing=Scope.CLUSTER,
    durability=Scope.CLUSTER,
    eviction=Support.NATIVE,
    fork_safe=Support.NATIVE,
)


def route(pool: PoolSpec, manifest: Manifest, **how: Any) -> Route:
    """Route one pool beside an anchor that any backend takes."""
    anchor = logical("top", page_tokens=8, anchor=True)
    pools = (attrs.evolve(pool, anchor=False, required=False), anchor)
    manifests = [manifest, ANY]
    found = plan(*pools, by=manifests, overrides={pool.name: manifest.name}, **how)
    return next(one for one in found.routes if one.pool.name == pool.name)

"""What `kvdock route` says: the plan as data; its text is `Plan.explain`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock import stored_objects
from kvdock_cli.reports._tables import plain

if TYPE_CHECKING:
    from kvdock import Plan, Route, RouteOption, Shard

SCHEMA = "kvdock.route/1"


def as_data(plan: Plan) -> dict[str, object]:
    """Describe a plan with every backend's answer."""
    return {
        "schema": SCHEMA,
        "ok": not any(route.pool.required for route in plan.refused),
        "shard": plain(plan.shard),
        "routes": [_route(route, plan.shard) for route in plan.routes],
    }


def _route(route: Route, shard: Shard) -> dict[str, object]:
    pool = route.pool
    return {
        "pool": pool.name,
        "kind": pool.kind.value,
        "anchor": pool.anchor,
        "draft": pool.draft,
        "required": pool.required,
        "page_tokens": pool.page_tokens,
        "page_bytes": pool.page_bytes(shard),
        "backend": route.backend,
        "path": route.mode.value,
        "object_unit": pool.object_unit.value,
        "objects_per_page": 0 if route.absent else len(stored_objects(pool, shard)),
        "absent": route.absent,
        "allocate": route.allocate,
        "reason": route.reason,
        "options": [_option(option) for option in route.options],
    }


def _option(option: RouteOption) -> dict[str, object]:
    return {
        "backend": option.backend,
        "accepted": option.accepted,
        "reason": option.reason,
        "path": option.mode.value,
        "object_unit": option.unit.value,
        "verdicts": [
            {
                "capability": capability.value,
                "support": verdict.support.value,
                "reason": verdict.reason,
            }
            for capability, verdict in option.verdicts
        ],
    }

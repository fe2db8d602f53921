"""The output of `kvdock route`: where each pool goes, and why not elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock.pools import stored_objects
from kvdock.units import format_bytes
from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, paragraph, plain, table

if TYPE_CHECKING:
    from kvdock import Plan, Route, RouteOption, Shard
    from kvdock_cli.reports._tables import Row

SCHEMA = "kvdock.route/1"


def as_text(plan: Plan, style: Style = PLAIN, *, every: bool = True) -> str:
    """Render a plan as a table: a row for each pool and each other backend.

    With `every`, backends that are not chosen have rows also where a pool is stored.
    """
    left = 0
    rows: list[Row] = []
    for route in plan.routes:
        pool = route.pool
        chosen = Cell(", ".join(one.backend for one in route.placements), Tone.GOOD)
        why: str | Cell = route.reason
        if not route.backend:
            chosen = Cell("-", Tone.FAINT if route.absent else Tone.BAD)
            why = Cell(route.reason, Tone.FAINT if route.absent else Tone.BAD)
            if route.options:
                why = Cell("not stored", Tone.BAD)
        rows.append(
            (
                Cell(pool.name, Tone.STRONG),
                f"{pool.kind}{' draft' if pool.draft else ''}",
                _need(route),
                format_bytes(pool.page_bytes(plan.shard)),
                chosen,
                why,
            )
        )
        others = [one for one in route.options if one not in route.placements]
        if route.backend and not every:
            left += len(others)
            continue
        rows += [
            (
                *("", "", "", ""),
                Cell(option.backend, Tone.FAINT),
                Cell(option.not_chosen, Tone.FAINT),
            )
            for option in others
        ]
    headings = ("POOL", "KIND", "NEED", "PAGE", "BACKEND", "WHY")
    lines = table(headings, rows, style, fold=["WHY", "KIND"], drop=["KIND", "NEED"])
    if left:
        lines += paragraph("--all says why the other backends are not chosen.", style)
    return "\n".join(lines)


def _need(route: Route) -> str:
    if route.pool.anchor:
        return "anchor"
    return "required" if route.pool.required else "optional"


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
        "placements": [_placement(option) for option in route.placements],
        "path": route.mode.value,
        "object_unit": pool.object_unit.value,
        "objects_per_page": 0 if route.absent else len(stored_objects(pool, shard)),
        "absent": route.absent,
        "allocate": route.allocate,
        "reason": route.reason,
        "options": [_option(option) for option in route.options],
    }


def _placement(option: RouteOption) -> dict[str, object]:
    return {
        "backend": option.backend,
        "path": option.mode.value,
        "object_unit": option.unit.value,
        "check": option.check.value,
        "retention": option.retention.value,
        **({"tier": plain(option.tier)} if option.tier else {}),
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

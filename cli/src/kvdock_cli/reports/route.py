"""What `kvdock route` says: where each pool goes, and why not elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvdock import stored_objects
from kvdock.units import format_bytes
from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, plain, table

if TYPE_CHECKING:
    from kvdock import Plan, Route, RouteOption, Shard
    from kvdock_cli.reports._tables import Row

SCHEMA = "kvdock.route/1"


def as_text(plan: Plan, style: Style = PLAIN) -> str:
    """Render a plan as a table: a row for each pool and each other backend."""
    rows: list[Row] = []
    for route in plan.routes:
        pool = route.pool
        chosen = Cell(route.backend or "-", Tone.GOOD if route.backend else Tone.BAD)
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
        rows += [
            ("", "", "", "", Cell(option.backend, Tone.FAINT), _unchosen(option))
            for option in route.options
            if option.backend != route.backend
        ]
    headings = ("POOL", "KIND", "NEED", "PAGE", "BACKEND", "WHY")
    lines = table(headings, rows, style, fold=["WHY", "KIND"], drop=["KIND", "NEED"])
    return "\n".join(lines)


def _need(route: Route) -> str:
    if route.pool.anchor:
        return "anchor"
    return "required" if route.pool.required else "optional"


def _unchosen(option: RouteOption) -> Cell:
    return Cell(option.not_chosen, Tone.FAINT)


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

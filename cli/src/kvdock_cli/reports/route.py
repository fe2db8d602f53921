"""The output of `kvdock route`: where each pool goes, and why not elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvdock.pools import stored_objects
from kvdock.units import format_bytes
from kvdock_cli.reports._report import Block, Column, Report, Table, Text
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import Cell, plain

if TYPE_CHECKING:
    from kvdock import Plan, Route, RouteOption, Shard
    from kvdock_cli.reports._tables import Row
    from kvdock_cli.reports.memory import Memory

_COLUMNS = (
    Column("POOL"),
    Column("KIND", fold=True, drop=1),
    Column("NEED", drop=2),
    Column("PAGE"),
    Column("BACKEND", fold=True),
    Column("WHY", fold=True),
)


def report(
    plan: Plan,
    *,
    every: bool = True,
    limits: Sequence[object] = (),
    memory: Memory | None = None,
) -> Report:
    """Report a plan: a row for each pool, and below it those for other backends.

    Args:
        plan: The plan.
        every: Whether backends that are not chosen have rows also where a pool is
            stored.
        limits: What is not shared with other TP sizes.
        memory: The host's memory, where that was asked for.
    """
    rows: list[Row] = []
    left = False
    for route in plan.routes:
        rows.append(_row(route, plan.shard))
        if route.backend and not every:
            left = left or len(route.options) > len(route.placements)
        else:
            rows += _others(route)
    blocks: list[Block] = [Table(_COLUMNS, rows)]
    if left:
        blocks.append("--all says why the other backends are not chosen.")
    blocks += [Text(str(one)) for one in (*limits, *([memory] if memory else ()))]
    data = {
        "shard": plan.shard,
        "routes": [_route(route, plan.shard) for route in plan.routes],
        "not_shared": limits,
        **({"memory": memory.as_data()} if memory else {}),
    }
    ok = not any(route.pool.required for route in plan.refused)
    fits = memory is None or memory.fits
    return Report("kvdock.route/1", data, blocks, ok and fits)


def _row(route: Route, shard: Shard) -> Row:
    pool, bad = route.pool, Tone.FAINT if route.absent else Tone.BAD
    chosen = Cell(", ".join(one.backend for one in route.placements), Tone.GOOD)
    not_stored = "not stored" if route.options else route.reason
    return (
        Cell(pool.name, Tone.STRONG),
        f"{pool.kind}{' draft' if pool.draft else ''}",
        "anchor" if pool.anchor else "required" if pool.required else "optional",
        format_bytes(pool.page_bytes(shard)),
        chosen if route.backend else Cell("-", bad),
        route.reason if route.backend else Cell(not_stored, bad),
    )


def _others(route: Route) -> list[Row]:
    """Return a row for each reason for which other backends are not chosen."""
    reasons: dict[str, list[str]] = {}
    for option in route.options:
        if option not in route.placements:
            reasons.setdefault(option.not_chosen, []).append(option.backend)
    return [
        (*[""] * 4, Cell(", ".join(names), Tone.FAINT), Cell(reason, Tone.FAINT))
        for reason, names in reasons.items()
    ]


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

"""The output of `kvdock top`: the storage of engines at one moment."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvdock.units import format_bytes
from kvdock_cli.reports._report import Block, Column, Report, Table, flagged, spelt
from kvdock_cli.reports._style import Tone
from kvdock_cli.reports._tables import Cell
from kvdock_cli.reports.store import TENANTS

if TYPE_CHECKING:
    from kvdock_cli.exposition import Samples

View = Mapping[str, Any]
"""One engine: what `--json` shows of it. Counts are since its start; rates are taken
over `seconds`, and are None where there is only one answer."""

_TENANTS = "kvdock_tenant_bytes"
_KEYS, _BYTES = "kvdock_keys_total", "kvdock_bytes_total"
_COPIED, _RESTORED = "kvdock_copied_pages_total", "kvdock_restored_pages_total"
_LOAD_S, _LOAD_RATE = "kvdock_load_latency_seconds", "kvdock_load_bytes_per_second"
_DECISIONS = "kvdock_load_decisions_total"
_BREAKERS = ("closed", "half-open", "open")
_BROKEN = ("corrupt", "short", "long")
_LOST = ("dropped", "failed", "gone")
_FULL = 0.95


@attrs.frozen
class Look:
    """An engine's answer, and its time on `time.monotonic()`'s clock.

    Args:
        source: Its URL.
        error: Why it has no metrics; empty if it has.
    """

    source: str
    at_s: float
    metrics: Samples
    error: str = ""


def view_of(look: Look, last: Look | None = None) -> View:
    """Sum metrics over ranks and models; rates need an earlier answer."""
    now = look.metrics
    before = last.metrics if last is not None else None
    seconds = look.at_s - last.at_s if last is not None and before else 0.0

    def rate(name: str, **labels: str) -> float | None:
        if not before or not seconds:
            return None
        # A counter that fell belongs to an engine that was started again.
        more = now.total(name, **labels) - before.total(name, **labels)
        return max(0.0, more) / seconds

    def pool_of(pool: str) -> View:
        looked = {"pool": pool, "operation": "exists"}
        return {
            "pool": pool,
            "stored": min(now.numbers("kvdock_pool_enabled", pool=pool), default=1) > 0,
            "looked_up": now.total(_KEYS, **looked),
            "found": now.total(_KEYS, outcome="ok", **looked),
            "restored_pages": now.total(_RESTORED, pool=pool),
            "restored_per_s": rate(_RESTORED, pool=pool),
            "wrong": sum(now.total(_KEYS, pool=pool, outcome=one) for one in _BROKEN),
            "pages": now.total("kvdock_pool_pages", pool=pool, state="all"),
            "leased": now.total("kvdock_pool_pages", pool=pool, state="leased"),
        }

    def backend_of(backend: str) -> View:
        states = now.of("kvdock_breaker_state", backend=backend)
        # Of several ranks the last one, which is the worst, stays.
        states.sort(key=lambda sample: sample[1])
        put = {"backend": backend, "operation": "put"}
        get = {"backend": backend, "operation": "get"}
        return {
            "backend": backend,
            "breakers": {
                labels.get("operation", "?"): _BREAKERS[min(2, int(state))]
                for labels, state in states
            },
            "written_bytes": now.total(_BYTES, **put),
            "read_bytes": now.total(_BYTES, **get),
            "written_per_s": rate(_BYTES, **put),
            "read_per_s": rate(_BYTES, **get),
            "abandoned_calls": now.total("kvdock_calls_behind", backend=backend),
            "held_batches": now.total("kvdock_held_batches", backend=backend),
            **{
                f"{state}_bytes": now.most(
                    "kvdock_store_bytes", backend=backend, state=state
                )
                for state in ("used", "limit", "promised", "promise_limit")
            },
        }

    def tier_of(tier: str) -> View:
        copied = {"target": tier, "outcome": "copied"}
        lost = {one: now.total(_COPIED, target=tier, outcome=one) for one in _LOST}
        return {
            "tier": tier,
            "loaded": now.total(_KEYS, backend=tier, operation="get", outcome="ok"),
            "copied": now.total(_COPIED, **copied),
            "copied_per_s": rate(_COPIED, **copied),
            "lost": {why: pages for why, pages in lost.items() if pages},
            "queued_bytes": now.total("kvdock_copy_queue_bytes", target=tier),
        }

    def load_of(backend: str, pool: str) -> View:
        where = {"backend": backend, "pool": pool}
        pace = min(now.numbers(_LOAD_RATE, **where))
        return {
            **where,
            "latency_s": now.most(_LOAD_S, **where),
            # No pace where the size makes no difference.
            "bytes_per_s": None if math.isinf(pace) else pace,
        }

    def tenant_of(backend: str, tenant: str) -> View:
        where = {"backend": backend, "tenant": tenant}
        return where | {
            f"{state}_bytes": now.most(_TENANTS, **where, state=state)
            for state in ("used", "quota", "promised")
        }

    sources, targets = (now.values(end, _COPIED) for end in ("source", "target"))
    return {
        "source": look.source,
        "error": look.error,
        "seconds": seconds,
        "pools": [*map(pool_of, now.values("pool", _KEYS, "kvdock_pool_enabled"))],
        "backends": [
            *map(backend_of, now.values("backend", _KEYS, "kvdock_breaker_state"))
        ],
        "tiers": [*map(tier_of, dict.fromkeys([*sources, *targets]))],
        "loads": [load_of(*pair) for pair in now.pairs(_LOAD_RATE, "backend", "pool")],
        "tenants": [
            tenant_of(*pair) for pair in now.pairs(_TENANTS, "backend", "tenant")
        ],
        "compute_tokens_per_s": min(
            filter(None, now.numbers("kvdock_compute_tokens_per_second")), default=None
        ),
        "decisions": {
            choice: now.total(_DECISIONS, choice=choice)
            for choice in now.values("choice", _DECISIONS)
        },
    }


def _paced(heading: str, field: str, per_s: str) -> Column:
    """Return a column of a count or of bytes; in a second, where a rate is known."""

    def show(row: View) -> str:
        known = row[per_s] is not None
        return (
            spelt(f"{field}_per_s", row[per_s]) if known else spelt(field, row[field])
        )

    return Column(heading, show)


def _breakers(row: View) -> str | Cell:
    states = row["breakers"].items()
    moved = [f"{name} {state}" for name, state in states if state != "closed"]
    return Cell(", ".join(moved), Tone.BAD) if moved else "closed"


def _store(row: View) -> str | Cell:
    used, limit = row["used_bytes"], row["limit_bytes"]
    if not limit:
        return spelt("bytes", used or None)
    return flagged(
        f"{used / limit:.0%} of {format_bytes(int(limit))}", used / limit > _FULL
    )


def _promised(row: View) -> str:
    """Say what is promised, and how much more may be."""
    promised, limit = row["promised_bytes"], row["promise_limit_bytes"]
    free = format_bytes(max(0, int(limit - promised)))
    return f"{format_bytes(int(promised))}, {free} free" if limit else "-"


_POOLS = (
    Column("POOL", "pool", tone=Tone.STRONG),
    Column("STORED", lambda row: "yes" if row["stored"] else "no"),
    Column(
        "HITS",
        lambda row: (
            f"{row['found'] / row['looked_up']:.0%}" if row["looked_up"] else "-"
        ),
    ),
    _paced("RESTORED", "restored_pages", "restored_per_s"),
    Column("WRONG", lambda row: flagged(f"{row['wrong']:.0f}", row["wrong"], Tone.BAD)),
    Column(
        "LEASED",
        lambda row: f"{row['leased']:.0f}/{row['pages']:.0f}" if row["pages"] else "-",
        drop=1,
    ),
)
_BACKENDS = (
    Column("BACKEND", "backend", tone=Tone.STRONG),
    Column("BREAKERS", _breakers, fold=True),
    _paced("WRITTEN", "written_bytes", "written_per_s"),
    _paced("READ", "read_bytes", "read_per_s"),
    Column("STORE", _store),
    Column("PROMISED", _promised, drop=3),
    Column(
        "ABANDONED",
        lambda row: flagged(f"{row['abandoned_calls']:.0f}", row["abandoned_calls"]),
        drop=2,
    ),
    Column("HELD", "held_batches", drop=1),
)
_TIERS = (
    Column("TIER", "tier", tone=Tone.STRONG),
    Column("LOADED", "loaded"),
    _paced("COPIED TO IT", "copied", "copied_per_s"),
    Column(
        "NOT COPIED",
        lambda row: ", ".join(f"{n:.0f} {why}" for why, n in row["lost"].items()),
        tone=Tone.WARNING,
    ),
    Column("QUEUE", "queued_bytes"),
)
_ROOMS = (TENANTS[0], Column("STORE", "backend"), *TENANTS[1:])
_LOADS = (
    Column("LOADS FROM", "backend", tone=Tone.STRONG),
    Column("POOL", "pool"),
    Column("A CALL TAKES", lambda row: f"{row['latency_s'] * 1e3:.1f} ms"),
    Column("AND THEN", "bytes_per_s"),
)


def report(views: Sequence[View]) -> Report:
    """Report engines one below the other; not ok where something is wrong."""
    blocks = [block for view in views for block in ("", *_blocks(view))]
    pools = [pool for view in views for pool in view["pools"]]
    backends = [backend for view in views for backend in view["backends"]]
    answered = not any(view["error"] for view in views)
    ok = (
        answered
        and all(pool["stored"] and not pool["wrong"] for pool in pools)
        and all(
            state == "closed" for one in backends for state in one["breakers"].values()
        )
    )
    return Report("kvdock.top/2", {"engines": views}, blocks[1:], ok)


def _blocks(view: View) -> list[Block]:
    since = f"over {view['seconds']:.1f} s" if view["seconds"] else "since the start"
    if view["error"]:
        return [Cell(view["source"], Tone.STRONG), Cell(view["error"], Tone.BAD)]
    blocks: list[Block] = [Cell(f"{view['source']}, {since}", Tone.STRONG)]
    tables = {
        "pools": _POOLS,
        "backends": _BACKENDS,
        "tiers": _TIERS,
        "tenants": _ROOMS,
        "loads": _LOADS,
    }
    for name, columns in tables.items():
        blocks += ["", Table(columns, view[name])] if view[name] else []
    if made := view["decisions"]:
        pace = view["compute_tokens_per_s"]
        learned = f"{pace:.0f} tokens/s" if pace else "not known yet"
        words = ", ".join(f"{count:.0f} {choice}" for choice, count in made.items())
        blocks += ["", f"computing: {learned}", f"decisions: {words}"]
    return blocks

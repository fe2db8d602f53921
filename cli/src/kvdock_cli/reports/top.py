"""The output of `kvdock top`: an engine's storage at one moment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kvdock.units import format_bytes
from kvdock_cli.reports._style import PLAIN, Style, Tone
from kvdock_cli.reports._tables import Cell, plain, table

if TYPE_CHECKING:
    from kvdock_cli.exposition import Samples
    from kvdock_cli.reports._tables import Row

SCHEMA = "kvdock.top/1"

_TENANTS = "kvdock_tenant_bytes"
_KEYS, _BYTES = "kvdock_keys_total", "kvdock_bytes_total"
_COPIED = "kvdock_copied_pages_total"
_LOAD_S, _LOAD_RATE = "kvdock_load_latency_seconds", "kvdock_load_bytes_per_second"
_DECISIONS = "kvdock_load_decisions_total"
_BREAKERS = ("closed", "half-open", "open")
_BROKEN = ("corrupt", "short", "long")
_LOST = ("dropped", "failed", "gone")
_FULL = 0.95


@attrs.frozen(kw_only=True)
class PoolView:
    """One pool: counts since the engine started, and rates where two were taken."""

    pool: str
    stored: bool
    looked_up: float
    found: float
    restored_pages: float
    restored_per_s: float | None
    wrong: float
    pages: float
    leased: float


@attrs.frozen(kw_only=True)
class BackendView:
    """One backend: bytes since the engine started, and per second."""

    backend: str
    breakers: Mapping[str, str]
    written_bytes: float
    read_bytes: float
    written_per_s: float | None
    read_per_s: float | None
    abandoned_calls: float
    held_batches: float
    used_bytes: float
    limit_bytes: float
    promised_bytes: float
    promise_limit_bytes: float


@attrs.frozen(kw_only=True)
class TierView:
    """One of several tiers: pages loaded from it, and copied or not copied to it."""

    tier: str
    loaded: float
    copied: float
    copied_per_s: float | None
    lost: Mapping[str, float]
    queued_bytes: float


@attrs.frozen(kw_only=True)
class LoadView:
    """What loads take, as the slowest rank learned it; no rate if size is free."""

    backend: str
    pool: str
    latency_s: float
    bytes_per_s: float | None


@attrs.frozen(kw_only=True)
class TenantView:
    """What one tenant takes of a backend's store; a quota of 0 is none."""

    backend: str
    tenant: str
    used_bytes: float
    quota_bytes: float
    promised_bytes: float


@attrs.frozen(kw_only=True)
class View:
    """Everything, and the seconds over which rates were taken."""

    source: str
    seconds: float
    pools: tuple[PoolView, ...]
    backends: tuple[BackendView, ...]
    tiers: tuple[TierView, ...] = ()
    loads: tuple[LoadView, ...] = ()
    tenants: tuple[TenantView, ...] = ()
    compute_tokens_per_s: float | None = None
    decisions: Mapping[str, float] = {}


def view_of(
    source: str, now: Samples, before: Samples | None = None, seconds: float = 0.0
) -> View:
    """Sum metrics over ranks and models; rates need an earlier answer."""

    def rate(name: str, **labels: str) -> float | None:
        if before is None or seconds <= 0:
            return None
        # A counter that fell belongs to an engine that was started again.
        return max(0.0, now.total(name, **labels) - before.total(name, **labels)) / (
            seconds
        )

    def pool_of(pool: str) -> PoolView:
        looked = {"pool": pool, "operation": "exists"}
        return PoolView(
            pool=pool,
            stored=min(now.numbers("kvdock_pool_enabled", pool=pool), default=1) > 0,
            looked_up=now.total(_KEYS, **looked),
            found=now.total(_KEYS, outcome="ok", **looked),
            restored_pages=now.total("kvdock_restored_pages_total", pool=pool),
            restored_per_s=rate("kvdock_restored_pages_total", pool=pool),
            wrong=sum(now.total(_KEYS, pool=pool, outcome=one) for one in _BROKEN),
            pages=now.total("kvdock_pool_pages", pool=pool, state="all"),
            leased=now.total("kvdock_pool_pages", pool=pool, state="leased"),
        )

    def fill(backend: str, state: str) -> float:
        seen = now.numbers("kvdock_store_bytes", backend=backend, state=state)
        return max(seen, default=0.0)

    def backend_of(backend: str) -> BackendView:
        worst: dict[str, int] = {}
        for labels, value in now.of("kvdock_breaker_state", backend=backend):
            operation = labels.get("operation", "?")
            worst[operation] = max(worst.get(operation, 0), int(value))
        put = {"backend": backend, "operation": "put"}
        get = {"backend": backend, "operation": "get"}
        return BackendView(
            backend=backend,
            breakers={name: _BREAKERS[min(2, one)] for name, one in worst.items()},
            written_bytes=now.total(_BYTES, **put),
            read_bytes=now.total(_BYTES, **get),
            written_per_s=rate(_BYTES, **put),
            read_per_s=rate(_BYTES, **get),
            abandoned_calls=now.total("kvdock_calls_behind", backend=backend),
            held_batches=now.total("kvdock_held_batches", backend=backend),
            used_bytes=fill(backend, "used"),
            limit_bytes=fill(backend, "limit"),
            promised_bytes=fill(backend, "promised"),
            promise_limit_bytes=fill(backend, "promise_limit"),
        )

    def tier_of(tier: str) -> TierView:
        copied = {"target": tier, "outcome": "copied"}
        lost = {one: now.total(_COPIED, target=tier, outcome=one) for one in _LOST}
        return TierView(
            tier=tier,
            loaded=now.total(_KEYS, backend=tier, operation="get", outcome="ok"),
            copied=now.total(_COPIED, **copied),
            copied_per_s=rate(_COPIED, **copied),
            lost={one: pages for one, pages in lost.items() if pages},
            queued_bytes=now.total("kvdock_copy_queue_bytes", target=tier),
        )

    def load_of(backend: str, pool: str) -> LoadView:
        where = {"backend": backend, "pool": pool}
        rate = min(now.numbers(_LOAD_RATE, **where))
        return LoadView(
            **where,
            latency_s=max(now.numbers(_LOAD_S, **where), default=0.0),
            bytes_per_s=None if math.isinf(rate) else rate,
        )

    def tenant_of(backend: str, tenant: str) -> TenantView:
        where = {"backend": backend, "tenant": tenant}
        used, quota, promised = (
            max(now.numbers(_TENANTS, **where, state=state), default=0.0)
            for state in ("used", "quota", "promised")
        )
        return TenantView(
            **where, used_bytes=used, quota_bytes=quota, promised_bytes=promised
        )

    roomy = {(one["backend"], one["tenant"]) for one, _ in now.of(_TENANTS)}
    measured = {(one["backend"], one["pool"]) for one, _ in now.of(_LOAD_RATE)}
    paces = filter(None, now.numbers("kvdock_compute_tokens_per_second"))
    sources, targets = (now.values(end, (_COPIED,)) for end in ("source", "target"))
    return View(
        source=source,
        seconds=seconds,
        loads=tuple(load_of(*one) for one in sorted(measured)),
        tenants=tuple(tenant_of(*one) for one in sorted(roomy)),
        compute_tokens_per_s=min(paces, default=None),
        decisions={
            choice: now.total(_DECISIONS, choice=choice)
            for choice in now.values("choice", (_DECISIONS,))
        },
        tiers=tuple(map(tier_of, dict.fromkeys((*sources, *targets)))),
        pools=tuple(map(pool_of, now.values("pool", (_KEYS, "kvdock_pool_enabled")))),
        backends=tuple(
            map(backend_of, now.values("backend", (_KEYS, "kvdock_breaker_state")))
        ),
    )


def as_text(view: View, style: Style = PLAIN) -> str:
    """Render a view as tables."""
    since = f"over {view.seconds:.1f} s" if view.seconds else "since the start"
    lines = [style.paint(f"{view.source}, {since}", Tone.STRONG), ""]
    lines += table(
        ("POOL", "STORED", "HITS", "RESTORED", "WRONG", "LEASED"),
        [_pool_row(one) for one in view.pools],
        style,
        drop=["LEASED"],
    )
    lines.append("")
    lines += table(
        (
            "BACKEND",
            "BREAKERS",
            "WRITTEN",
            "READ",
            "STORE",
            "PROMISED",
            "ABANDONED",
            "HELD",
        ),
        [_backend_row(one) for one in view.backends],
        style,
        fold=["BREAKERS"],
        drop=["HELD", "ABANDONED", "PROMISED"],
    )
    if view.tiers:
        heads = ("TIER", "LOADED", "COPIED TO IT", "NOT COPIED", "QUEUE")
        lines += ["", *table(heads, list(map(_tier_row, view.tiers)), style)]
    if view.tenants:
        heads = ("TENANT", "STORE", "TAKES", "QUOTA", "PROMISED")
        lines += ["", *table(heads, list(map(_tenant_row, view.tenants)), style)]
    if view.loads:
        columns = ("LOADS FROM", "POOL", "A CALL TAKES", "AND THEN")
        lines += ["", *table(columns, list(map(_load_row, view.loads)), style)]
    if view.decisions:
        pace = view.compute_tokens_per_s
        learned = f"{pace:.0f} tokens/s" if pace else "not known yet"
        made = ", ".join(f"{count:.0f} {one}" for one, count in view.decisions.items())
        lines += ["", f"computing: {learned}", f"decisions: {made}"]
    return "\n".join(lines)


def _load_row(one: LoadView) -> Row:
    pace = "-" if one.bytes_per_s is None else f"{format_bytes(int(one.bytes_per_s))}/s"
    return (
        Cell(one.backend, Tone.STRONG),
        one.pool,
        f"{one.latency_s * 1e3:.1f} ms",
        pace,
    )


def _tenant_row(one: TenantView) -> Row:
    above = 0 < one.quota_bytes < one.used_bytes
    return (
        Cell(one.tenant, Tone.STRONG),
        one.backend,
        Cell(format_bytes(int(one.used_bytes)), Tone.WARNING if above else None),
        format_bytes(int(one.quota_bytes)) if one.quota_bytes else "-",
        format_bytes(int(one.promised_bytes)),
    )


def _tier_row(one: TierView) -> Row:
    copied = f"{one.copied:.0f}"
    if one.copied_per_s is not None:
        copied = f"{one.copied_per_s:.1f}/s"
    lost = ", ".join(f"{pages:.0f} {why}" for why, pages in one.lost.items())
    return (
        Cell(one.tier, Tone.STRONG),
        f"{one.loaded:.0f}",
        copied,
        Cell(lost or "-", Tone.WARNING if lost else None),
        format_bytes(one.queued_bytes),
    )


def _pool_row(one: PoolView) -> Row:
    hits = f"{one.found / one.looked_up:.0%}" if one.looked_up else "-"
    restored = f"{one.restored_pages:.0f}"
    if one.restored_per_s is not None:
        restored = f"{one.restored_per_s:.1f}/s"
    return (
        Cell(one.pool, Tone.STRONG),
        Cell("yes", Tone.GOOD) if one.stored else Cell("no", Tone.BAD),
        hits,
        restored,
        Cell(f"{one.wrong:.0f}", Tone.BAD if one.wrong else None),
        f"{one.leased:.0f}/{one.pages:.0f}" if one.pages else "-",
    )


def _backend_row(one: BackendView) -> Row:
    moved = {name: state for name, state in one.breakers.items() if state != "closed"}
    breakers = Cell("closed", Tone.GOOD)
    if moved:
        words = ", ".join(f"{name} {state}" for name, state in moved.items())
        breakers = Cell(words, Tone.BAD)
    store = format_bytes(int(one.used_bytes)) if one.used_bytes else "-"
    tone = None
    if one.limit_bytes:
        share = one.used_bytes / one.limit_bytes
        store = f"{share:.0%} of {format_bytes(int(one.limit_bytes))}"
        tone = Tone.WARNING if share > _FULL else None
    behind = Cell(
        f"{one.abandoned_calls:.0f}", Tone.WARNING if one.abandoned_calls else None
    )
    return (
        Cell(one.backend, Tone.STRONG),
        breakers,
        _moved(one.written_bytes, one.written_per_s),
        _moved(one.read_bytes, one.read_per_s),
        Cell(store, tone),
        _promised(one),
        behind,
        f"{one.held_batches:.0f}",
    )


def _promised(one: BackendView) -> str:
    """Say what is promised, and how much more may be."""
    if not one.promise_limit_bytes:
        return "-"
    free = max(0, int(one.promise_limit_bytes - one.promised_bytes))
    return f"{format_bytes(int(one.promised_bytes))}, {format_bytes(free)} free"


def _moved(total: float, per_s: float | None) -> str:
    if per_s is None:
        return format_bytes(int(total))
    return f"{format_bytes(int(per_s))}/s"


def as_data(view: View) -> dict[str, object]:
    """Describe a view as data; `ok` is false where something is wrong."""
    fine = all(one.stored and not one.wrong for one in view.pools) and all(
        state == "closed" for one in view.backends for state in one.breakers.values()
    )
    return {"schema": SCHEMA, "ok": fine, **plain(view)}

"""Metrics for Prometheus. Names and labels are documented and stay.

They come from the core's events alone: what was cut off, abandoned or found
corrupt never comes back through a wrapper of the hook, and one more wrapper
with a histogram of its own would cost each batch two microseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import events
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.observer import Observer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvdock.batch import Outcome

BREAKER_VALUES: Mapping[str, int] = MappingProxyType(
    {"closed": 0, "half-open": 1, "open": 2}
)
"""What `kvdock_breaker_state` says for each state."""

SECONDS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Upper ends of the histograms' buckets."""


@attrs.frozen(kw_only=True)
class MetricsSettings:
    """The registry is the process's own; who serves it is the host's affair."""


class Metrics:
    """The hooks, and the metrics that they feed.

    Args:
        registry: Where the metrics live; None for the process's own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        from prometheus_client import (  # noqa: PLC0415 - an extra
            REGISTRY,
            Counter,
            Gauge,
            Histogram,
        )

        where = registry or REGISTRY

        def made(kind: Any, name: str, about: str, *labels: str, **more: Any) -> Any:  # noqa: ANN401 - the library's classes
            try:
                return kind(name, about, labels, registry=where, **more)
            except ValueError:
                # Attached again in the same process: go on with what is there.
                return where._names_to_collectors[name]  # noqa: SLF001 - there is no public look-up

        batch = ("backend", "pool", "operation")
        self._keys = made(
            Counter, "kvdock_keys_total", "Keys by how they ended.", *batch, "outcome"
        )
        self._bytes = made(
            Counter, "kvdock_bytes_total", "Bytes of pages moved and verified.", *batch
        )
        self._batch_seconds = made(
            Histogram, "kvdock_batch_seconds", "A batch as the engine sees it.",
            *batch, buckets=SECONDS,
        )  # fmt: skip
        self._breaker = made(
            Gauge, "kvdock_breaker_state", "0 closed, 1 half-open, 2 open.",
            "backend", "operation",
        )  # fmt: skip
        self._behind = made(
            Gauge, "kvdock_calls_behind", "Abandoned calls that still run.", "backend"
        )
        self._held = made(
            Gauge, "kvdock_held_batches", "Ended batches whose memory is held.",
            "backend",
        )  # fmt: skip
        self._enabled = made(
            Gauge, "kvdock_pool_enabled", "Whether a pool is stored, and why.",
            "pool", "backend", "reason",
        )  # fmt: skip
        self._pages = made(
            Gauge, "kvdock_pool_pages", "Pages of host memory, and those under I/O.",
            "pool", "state",
        )  # fmt: skip
        self._store = made(
            Gauge, "kvdock_store_bytes", "Bytes of a store: used, and at most.",
            "backend", "state",
        )  # fmt: skip
        self._restored = made(
            Counter, "kvdock_restored_pages_total", "Pages of restored prefixes.",
            "pool",
        )  # fmt: skip
        self._prefix = made(
            Counter, "kvdock_restored_prefix_pages_total",
            "Pages of the target's restored prefixes.",
        )  # fmt: skip
        self._drafted = made(
            Counter, "kvdock_restored_draft_pages_total",
            "Pages of restored prefixes whose draft pools are restored too.",
        )  # fmt: skip
        self._ratio = made(
            Gauge, "kvdock_draft_restored_ratio",
            "Draft restored over target restored since the start.",
        )  # fmt: skip
        self._plugin = made(
            Gauge, "kvdock_plugin_info", "1 for each plugin that is loaded.",
            "kind", "name", "distribution", "version", "path",
        )  # fmt: skip
        self._with_draft = [0, 0]
        # Looking a label up costs a microsecond, this a tenth.
        self._batches: dict[tuple[str, str, str], Any] = {}

    @hookimpl
    def kvdock_observe(self, event: events.Event) -> None:
        """Count an event."""
        match event:
            case events.BatchEnded():
                self._count(event)
            case events.BreakerMoved():
                value = BREAKER_VALUES[event.state]
                self._breaker.labels(event.backend, event.operation).set(value)
            case events.CallsBehind():
                self._behind.labels(event.backend).set(event.calls)
            case events.MemoryHeld():
                self._held.labels(event.backend).set(event.batches)
            case events.PoolRouted():
                self._route(event)
            case events.PagesHeld():
                self._pages.labels(event.pool, "all").set(event.pages)
                self._pages.labels(event.pool, "leased").set(event.leased)
            case events.StoreFilled():
                self._fill(event)
            case events.PluginLoaded():
                source = (event.distribution, event.version, event.path)
                self._plugin.labels(event.kind, event.name, *source).set(1)
            case events.PagesRestored():
                self._count_restored(event)

    def _fill(self, event: events.StoreFilled) -> None:
        """Show how full a store is."""
        self._store.labels(event.backend, "used").set(event.used_bytes)
        if event.limit_bytes:
            self._store.labels(event.backend, "limit").set(event.limit_bytes)

    def _route(self, event: events.PoolRouted) -> None:
        """Show where a pool goes now, and no longer where it went before."""
        labels = (event.pool, event.backend, event.reason)
        # Another attachment of this process may have set it, by its own object.
        shown = [
            tuple(sample.labels[name] for name in ("pool", "backend", "reason"))
            for metric in self._enabled.collect()
            for sample in metric.samples
        ]
        for other in shown:
            if other[0] == event.pool and other != labels:
                self._enabled.remove(*other)
        self._enabled.labels(*labels).set(event.enabled)

    def _count(self, event: events.BatchEnded) -> None:
        key = (event.backend, event.pool, event.operation)
        known = self._batches.get(key)
        if known is None:
            by_outcome: dict[Outcome, Callable[[float], None]] = {}
            known = self._batches[key] = (
                self._batch_seconds.labels(*key).observe,
                self._bytes.labels(*key).inc,
                by_outcome,
            )
        observe, add_bytes, by_outcome = known
        observe(event.seconds)
        if event.nbytes:
            add_bytes(event.nbytes)
        for outcome, keys in event.outcomes.items():
            add = by_outcome.get(outcome)
            if add is None:
                labels = (*key, outcome.name.lower())
                add = by_outcome[outcome] = self._keys.labels(*labels).inc
            add(keys)

    def _count_restored(self, event: events.PagesRestored) -> None:
        for pool, pages in event.pages.items():
            self._restored.labels(pool).inc(pages)
        self._prefix.inc(event.target)
        if event.draft is not None:
            self._drafted.inc(event.draft)
            self._with_draft[0] += event.draft
            self._with_draft[1] += event.target
            draft, target = self._with_draft
            self._ratio.set(draft / target if target else 1.0)


observer = Observer(
    name="metrics",
    summary="counters, histograms and gauges for Prometheus",
    settings=MetricsSettings,
    build=lambda _: Metrics(),
    needs="kvdock[metrics]",
)

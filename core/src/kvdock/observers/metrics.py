"""Metrics for Prometheus. Names and labels are documented and stay.

They come from the core's events alone: what was cut off, left behind or found
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


ORIGIN = ("rank", "model")
"""Labels of every series: the process of its deployment, and the model."""

ROUTE = ("pool", "backend", "reason")

MOST_MODELS = 16
"""Models that a process shows by name, so that its series stay few."""

OTHER_MODELS = "(other)"
"""The model of every further one."""

_MOST_ORIGINS = 1024


@attrs.frozen(kw_only=True)
class MetricsSettings:
    """The registry is the process's own; who serves it is the host's affair."""


class Metrics:
    """The hooks, and the metrics that they feed.

    Each series but those of plugins has the labels `rank` and `model`, so
    processes that share one exposition (prometheus_client's multiprocess mode,
    which SGLang uses) do not write each other's gauges. Gauges count the processes
    that live; a series is never removed, which that mode cannot do.

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
                return kind(name, about, (*labels, *ORIGIN), registry=where, **more)
            except ValueError:
                # Attached again in the same process: go on with what is there.
                return where._names_to_collectors[name]  # noqa: SLF001 - there is no public look-up

        def gauge(name: str, about: str, *labels: str, mode: str) -> Any:  # noqa: ANN401 - same
            return made(Gauge, name, about, *labels, multiprocess_mode=mode)

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
        self._breaker = gauge(
            "kvdock_breaker_state", "0 closed, 1 half-open, 2 open.",
            "backend", "operation", mode="livemax",
        )  # fmt: skip
        self._behind = gauge(
            "kvdock_calls_behind", "Calls left behind, still running.",
            "backend", mode="livesum",
        )  # fmt: skip
        self._held = gauge(
            "kvdock_held_batches", "Ended batches whose memory is held.",
            "backend", mode="livesum",
        )  # fmt: skip
        self._enabled = gauge(
            "kvdock_pool_enabled", "Whether a pool is stored.", "pool", mode="livemin"
        )
        self._route = gauge(
            "kvdock_pool_route_info", "1 for where a pool goes now, and why.",
            "pool", "backend", "reason", mode="livemax",
        )  # fmt: skip
        self._pages = gauge(
            "kvdock_pool_pages", "Pages of host memory, and those under I/O.",
            "pool", "state", mode="livesum",
        )  # fmt: skip
        self._store = gauge(
            "kvdock_store_bytes", "Bytes of a store: used, and at most.",
            "backend", "state", mode="livemostrecent",
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
        self._ratio = gauge(
            "kvdock_draft_restored_ratio",
            "Draft restored over target restored since the start.",
            mode="livemin",
        )  # fmt: skip
        self._plugin = gauge(
            "kvdock_plugin_info", "1 for each plugin that is loaded.",
            "kind", "name", "distribution", "version", "path", mode="livemax",
        )  # fmt: skip
        self._with_draft: dict[tuple[str, str], list[int]] = {}
        self._models: set[str] = set()
        self._origins: dict[events.Origin, tuple[str, str]] = {}
        # Looking a label up costs a microsecond, this a tenth.
        self._batches: dict[tuple[str, ...], Any] = {}

    @hookimpl
    def kvdock_observe(self, event: events.Event, origin: events.Origin) -> None:
        """Count an event."""
        whose = self._origins.get(origin) or self._labels(origin)
        match event:
            case events.BatchEnded():
                self._count(event, whose)
            case events.BreakerMoved():
                value = BREAKER_VALUES[event.state]
                self._breaker.labels(event.backend, event.operation, *whose).set(value)
            case events.CallsBehind():
                self._behind.labels(event.backend, *whose).set(event.calls)
            case events.MemoryHeld():
                self._held.labels(event.backend, *whose).set(event.batches)
            case events.PoolRouted():
                self._show_route(event, whose)
            case events.PagesHeld():
                self._pages.labels(event.pool, "all", *whose).set(event.pages)
                self._pages.labels(event.pool, "leased", *whose).set(event.leased)
            case events.StoreFilled():
                self._fill(event, whose)
            case events.PluginLoaded():
                source = (event.distribution, event.version, event.path)
                self._plugin.labels(event.kind, event.name, *source, *whose).set(1)
            case events.PagesRestored():
                self._count_restored(event, whose)

    def _labels(self, origin: events.Origin) -> tuple[str, str]:
        """Return the labels of an attachment; they stay few."""
        if len(self._models) < MOST_MODELS:
            self._models.add(origin.model)
        model = origin.model if origin.model in self._models else OTHER_MODELS
        found = (origin.rank, model)
        if len(self._origins) < _MOST_ORIGINS:
            self._origins[origin] = found
        return found

    def _fill(self, event: events.StoreFilled, whose: tuple[str, str]) -> None:
        """Show how full a store is."""
        self._store.labels(event.backend, "used", *whose).set(event.used_bytes)
        if event.limit_bytes:
            self._store.labels(event.backend, "limit", *whose).set(event.limit_bytes)

    def _show_route(self, event: events.PoolRouted, whose: tuple[str, str]) -> None:
        """Show where a pool goes now, and no longer where it went before."""
        labels = (event.pool, event.backend, event.reason, *whose)
        # Another attachment of this process may have set it, by its own object.
        for metric in self._route.collect():
            for sample in metric.samples:
                other = tuple(sample.labels[name] for name in (*ROUTE, *ORIGIN))
                if other[0] == event.pool and other[3:] == whose and other != labels:
                    self._route.labels(*other).set(0)
        self._route.labels(*labels).set(1)
        self._enabled.labels(event.pool, *whose).set(event.enabled)

    def _count(self, event: events.BatchEnded, whose: tuple[str, str]) -> None:
        key = (event.backend, event.pool, event.operation, *whose)
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
                labels = (*key[:3], outcome.name.lower(), *whose)
                add = by_outcome[outcome] = self._keys.labels(*labels).inc
            add(keys)

    def _count_restored(
        self, event: events.PagesRestored, whose: tuple[str, str]
    ) -> None:
        for pool, pages in event.pages.items():
            self._restored.labels(pool, *whose).inc(pages)
        self._prefix.labels(*whose).inc(event.target)
        if event.draft is not None:
            self._drafted.labels(*whose).inc(event.draft)
            sums = self._with_draft.setdefault(whose, [0, 0])
            sums[0] += event.draft
            sums[1] += event.target
            draft, target = sums
            self._ratio.labels(*whose).set(draft / target if target else 1.0)


observer = Observer(
    name="metrics",
    summary="counters, histograms and gauges for Prometheus",
    settings=MetricsSettings,
    build=lambda _: Metrics(),
    needs="kvdock[metrics]",
)

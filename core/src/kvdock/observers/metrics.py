"""Metrics. Names and labels are documented and stay.

They come from the core's events alone: what was cut off, abandoned or found
corrupt never comes back through a wrapper of the hook, and one more wrapper
with a histogram of its own would cost each batch two microseconds.

`Metrics` feeds the registry of Prometheus in this process. `MetricDeltas` gives the
same as data, to an engine whose scraped process is another one.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from enum import StrEnum
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

_SAMPLES = 4096
"""Samples of one series that are kept until they are taken; later ones count."""


class MetricKind(StrEnum):
    """How the values of a metric add up."""

    COUNTER = "counter"
    """Increments."""
    GAUGE = "gauge"
    """The last value holds."""
    HISTOGRAM = "histogram"
    """Samples."""


@attrs.frozen
class Metric:
    """One metric.

    Args:
        name: Its name for Prometheus.
        kind: How its values add up.
        about: What it is, in one sentence.
        labels: Names of its labels.
        buckets: Upper ends of the buckets of a histogram.
    """

    name: str
    kind: MetricKind
    about: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()


def _metrics() -> tuple[Metric, ...]:
    counter, gauge, histogram = MetricKind
    batch = ("backend", "pool", "operation")
    return (
        Metric(
            "kvdock_keys_total", counter, "Keys by how they ended.", (*batch, "outcome")
        ),
        Metric(
            "kvdock_bytes_total", counter, "Bytes of pages moved and verified.", batch
        ),
        Metric(
            "kvdock_batch_seconds", histogram, "A batch as the engine sees it.",
            batch, SECONDS,
        ),
        Metric(
            "kvdock_breaker_state", gauge, "0 closed, 1 half-open, 2 open.",
            ("backend", "operation"),
        ),
        Metric(
            "kvdock_calls_behind", gauge, "Abandoned calls that still run.",
            ("backend",),
        ),
        Metric(
            "kvdock_held_batches", gauge, "Ended batches whose memory is held.",
            ("backend",),
        ),
        Metric(
            "kvdock_pool_enabled", gauge, "Whether a pool is stored, and why.",
            ("pool", "backend", "reason"),
        ),
        Metric(
            "kvdock_pool_pages", gauge, "Pages of host memory, and those under I/O.",
            ("pool", "state"),
        ),
        Metric(
            "kvdock_store_bytes", gauge, "Bytes of a store: used, and at most.",
            ("backend", "state"),
        ),
        Metric(
            "kvdock_restored_pages_total", counter, "Pages of restored prefixes.",
            ("pool",),
        ),
        Metric(
            "kvdock_restored_prefix_pages_total", counter,
            "Pages of the target's restored prefixes.",
        ),
        Metric(
            "kvdock_restored_draft_pages_total", counter,
            "Pages of restored prefixes whose draft pools are restored too.",
        ),
        Metric(
            "kvdock_draft_restored_ratio", gauge,
            "Draft restored over target restored since the start.",
        ),
        Metric(
            "kvdock_plugin_info", gauge, "1 for each plugin that is loaded.",
            ("kind", "name", "distribution", "version", "path"),
        ),
    )  # fmt: skip


METRICS = _metrics()
"""All metrics."""


class EventMetrics(ABC):
    """Turn events into values of metrics."""

    def __init__(self) -> None:
        self._with_draft = [0, 0]

    @abstractmethod
    def _add(self, name: str, amount: float, *labels: str) -> None:
        """Increase a counter."""

    @abstractmethod
    def _set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""

    @abstractmethod
    def _sample(self, name: str, value: float, *labels: str) -> None:
        """Add a sample to a histogram."""

    @abstractmethod
    def _retire_routes(self, pool: str, kept: tuple[str, ...]) -> None:
        """Show no longer where a pool went before."""

    @hookimpl
    def kvdock_observe(self, event: events.Event) -> None:
        """Count an event."""
        match event:
            case events.BatchEnded():
                self._count(event)
            case events.BreakerMoved():
                value = BREAKER_VALUES[event.state]
                self._set("kvdock_breaker_state", value, event.backend, event.operation)
            case events.CallsBehind():
                self._set("kvdock_calls_behind", event.calls, event.backend)
            case events.MemoryHeld():
                self._set("kvdock_held_batches", event.batches, event.backend)
            case events.PoolRouted():
                labels = (event.pool, event.backend, event.reason)
                self._retire_routes(event.pool, labels)
                self._set("kvdock_pool_enabled", event.enabled, *labels)
            case events.PagesHeld():
                self._set("kvdock_pool_pages", event.pages, event.pool, "all")
                self._set("kvdock_pool_pages", event.leased, event.pool, "leased")
            case events.StoreFilled():
                self._fill(event)
            case events.PluginLoaded():
                source = (event.distribution, event.version, event.path)
                self._set("kvdock_plugin_info", 1, event.kind, event.name, *source)
            case events.PagesRestored():
                self._count_restored(event)

    def _fill(self, event: events.StoreFilled) -> None:
        self._set("kvdock_store_bytes", event.used_bytes, event.backend, "used")
        if event.limit_bytes:
            self._set("kvdock_store_bytes", event.limit_bytes, event.backend, "limit")

    def _count(self, event: events.BatchEnded) -> None:
        labels = (event.backend, event.pool, event.operation)
        self._sample("kvdock_batch_seconds", event.seconds, *labels)
        if event.nbytes:
            self._add("kvdock_bytes_total", event.nbytes, *labels)
        for outcome, keys in event.outcomes.items():
            self._add("kvdock_keys_total", keys, *labels, outcome.name.lower())

    def _count_restored(self, event: events.PagesRestored) -> None:
        for pool, pages in event.pages.items():
            self._add("kvdock_restored_pages_total", pages, pool)
        self._add("kvdock_restored_prefix_pages_total", event.target)
        if event.draft is not None:
            self._add("kvdock_restored_draft_pages_total", event.draft)
            self._with_draft[0] += event.draft
            self._with_draft[1] += event.target
            draft, target = self._with_draft
            ratio = draft / target if target else 1.0
            self._set("kvdock_draft_restored_ratio", ratio)


@attrs.frozen(kw_only=True)
class MetricsSettings:
    """The registry is the process's own; who serves it is the host's affair."""


class Metrics(EventMetrics):
    """The metrics in a registry of Prometheus.

    Args:
        registry: Where the metrics live; None for the process's own.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__()
        from prometheus_client import (  # noqa: PLC0415 - an extra
            REGISTRY,
            Counter,
            Gauge,
            Histogram,
        )

        where = registry or REGISTRY
        kinds: Mapping[MetricKind, Any] = {
            MetricKind.COUNTER: Counter,
            MetricKind.GAUGE: Gauge,
            MetricKind.HISTOGRAM: Histogram,
        }

        def made(metric: Metric) -> Any:  # noqa: ANN401 - the library's classes
            more = {"buckets": metric.buckets} if metric.buckets else {}
            kind, about = kinds[metric.kind], metric.about
            try:
                return kind(metric.name, about, metric.labels, registry=where, **more)
            except ValueError:
                # Attached again in the same process: go on with what is there.
                return where._names_to_collectors[metric.name]  # noqa: SLF001 - there is no public look-up

        self._metrics = {metric.name: made(metric) for metric in METRICS}
        # Looking a label up costs a microsecond, this a tenth.
        self._series: dict[tuple[str, ...], Callable[[float], None]] = {}
        self._batches: dict[tuple[str, str, str], Any] = {}

    def _series_of(
        self, verb: str, name: str, labels: tuple[str, ...]
    ) -> Callable[[float], None]:
        """Return what takes the values of one series."""
        found = self._series.get((name, *labels))
        if found is None:
            metric = self._metrics[name]
            series = metric.labels(*labels) if labels else metric
            found = self._series[name, *labels] = getattr(series, verb)
        return found

    def _count(self, event: events.BatchEnded) -> None:
        # As above, with one look-up for each batch instead of one for each metric:
        # 6 us instead of 11.
        labels = (event.backend, event.pool, event.operation)
        known = self._batches.get(labels)
        if known is None:
            by_outcome: dict[Outcome, Callable[[float], None]] = {}
            known = self._batches[labels] = (
                self._series_of("observe", "kvdock_batch_seconds", labels),
                self._series_of("inc", "kvdock_bytes_total", labels),
                by_outcome,
            )
        sample, add_bytes, by_outcome = known
        sample(event.seconds)
        if event.nbytes:
            add_bytes(event.nbytes)
        for outcome, keys in event.outcomes.items():
            add = by_outcome.get(outcome)
            if add is None:
                series = (*labels, outcome.name.lower())
                add = self._series_of("inc", "kvdock_keys_total", series)
                by_outcome[outcome] = add
            add(keys)

    def _add(self, name: str, amount: float, *labels: str) -> None:
        self._series_of("inc", name, labels)(amount)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._series_of("set", name, labels)(value)

    def _sample(self, name: str, value: float, *labels: str) -> None:
        self._series_of("observe", name, labels)(value)

    def _retire_routes(self, pool: str, kept: tuple[str, ...]) -> None:
        gauge = self._metrics["kvdock_pool_enabled"]
        # Another attachment of this process may have set it, by its own object.
        shown = [
            tuple(sample.labels[name] for name in ("pool", "backend", "reason"))
            for metric in gauge.collect()
            for sample in metric.samples
        ]
        for other in shown:
            if other[0] == pool and other != kept:
                gauge.remove(*other)
        # What is remembered of a series that was removed would take no values.
        for series in [one for one in self._series if one[0] == "kvdock_pool_enabled"]:
            del self._series[series]


@attrs.frozen
class MetricDelta:
    """What one series of a metric got since it was taken the last time.

    Args:
        name: The metric's name.
        kind: How the values add up.
        labels: Values of the metric's labels.
        values: One increment of a counter, one value of a gauge, or the samples
            of a histogram.
    """

    name: str
    kind: MetricKind
    labels: tuple[str, ...]
    values: tuple[float, ...]


class MetricDeltas(EventMetrics):
    """The metrics as data, for an engine that carries them to another process.

    An observer: `dock.add_observer("metric_deltas", deltas)` before memory is
    attached. Between two calls of `take` one series keeps 4096 samples at most.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()
        self._counters: dict[tuple[str, ...], float] = {}
        self._gauges: dict[tuple[str, ...], float] = {}
        self._samples: dict[tuple[str, ...], deque[float]] = {}
        self._routes: dict[str, tuple[str, ...]] = {}

    def take(self) -> tuple[MetricDelta, ...]:
        """Return what has changed since the last call, each series once."""
        with self._lock:
            counters, self._counters = self._counters, {}
            gauges, self._gauges = self._gauges, {}
            samples, self._samples = self._samples, {}
        return (
            *_deltas(MetricKind.COUNTER, {one: [n] for one, n in counters.items()}),
            *_deltas(MetricKind.GAUGE, {one: [n] for one, n in gauges.items()}),
            *_deltas(MetricKind.HISTOGRAM, samples),
        )

    def _add(self, name: str, amount: float, *labels: str) -> None:
        series = (name, *labels)
        with self._lock:
            self._counters[series] = self._counters.get(series, 0) + amount

    def _set(self, name: str, value: float, *labels: str) -> None:
        with self._lock:
            self._gauges[name, *labels] = float(value)

    def _sample(self, name: str, value: float, *labels: str) -> None:
        series = (name, *labels)
        with self._lock:
            if series not in self._samples:
                self._samples[series] = deque(maxlen=_SAMPLES)
            self._samples[series].append(value)

    def _retire_routes(self, pool: str, kept: tuple[str, ...]) -> None:
        """Set a route of before to 0: a series that was carried away stays."""
        before = self._routes.get(pool, kept)
        self._routes[pool] = kept
        if before != kept:
            self._set("kvdock_pool_enabled", 0, *before)


def _deltas(
    kind: MetricKind, series: Mapping[tuple[str, ...], Any]
) -> list[MetricDelta]:
    return [
        MetricDelta(name, kind, tuple(map(str, labels)), tuple(values))
        for (name, *labels), values in series.items()
    ]


observer = Observer(
    name="metrics",
    summary="counters, histograms and gauges for Prometheus",
    settings=MetricsSettings,
    build=lambda _: Metrics(),
    needs="kvdock[metrics]",
)

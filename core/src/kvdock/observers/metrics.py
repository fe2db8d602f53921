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

ORIGIN = ("rank", "model")
"""Labels that every series has besides its own: the process, and its model."""

MOST_MODELS = 16
"""Models that a process shows by name, so that its series stay few."""

OTHER_MODELS = "(other)"
"""The model of every further one."""

_MOST_ORIGINS = 1024

_SAMPLES = 4096
"""Samples of one series that are kept until they are taken; later ones count."""


ROUTES = "kvdock_pool_route_info"

Whose = tuple[str, str]
"""Values of the labels of an origin."""


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
        own: Names of its labels, without those of its origin.
        buckets: Upper ends of the buckets of a histogram.
        mode: How a gauge adds up over living processes with the same labels, as
            prometheus_client's multiprocess mode names it.
    """

    name: str
    kind: MetricKind
    about: str
    own: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    mode: str = "livesum"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of all of its labels."""
        return (*self.own, *ORIGIN)


def _metrics() -> tuple[Metric, ...]:
    counter, gauge, histogram = MetricKind
    batch = ("backend", "pool", "operation")
    return (
        Metric(
            "kvdock_keys_total", counter, "Keys by how they ended for the engine.",
            (*batch, "outcome"),
        ),
        Metric(
            "kvdock_bytes_total", counter, "Bytes of pages moved and verified.", batch
        ),
        Metric(
            "kvdock_batch_seconds", histogram, "A batch as the engine sees it.",
            batch, SECONDS,
        ),
        Metric(
            "kvdock_breaker_state", gauge,
            "0 closed, 1 half-open, 2 open, from the attachment on.",
            ("backend", "operation"), mode="livemax",
        ),
        Metric(
            "kvdock_calls_behind", gauge,
            "Calls that run without a caller: abandoned calls, probes, deletions.",
            ("backend",),
        ),
        Metric(
            "kvdock_held_batches", gauge,
            "Ended batches whose memory the backend's library may still use; their "
            "pages stay leased.",
            ("backend",),
        ),
        Metric(
            "kvdock_pool_enabled", gauge,
            "1 if the pool is stored, 0 if not, since it was last attached.",
            ("pool",), mode="livemin",
        ),
        Metric(
            ROUTES, gauge,
            "1 for where the pool goes and why, 0 for where it went before.",
            ("pool", "backend", "reason"), mode="livemax",
        ),
        Metric(
            "kvdock_pool_pages", gauge,
            "Pages of host memory: all, and those leased to storage calls.",
            ("pool", "state"),
        ),
        Metric(
            "kvdock_store_bytes", gauge,
            "Bytes of a store: used by pages, and its limit where it is reported.",
            ("backend", "state"), mode="livemostrecent",
        ),
        Metric(
            "kvdock_restored_pages_total", counter, "Pages within restored prefixes.",
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
            mode="livemin",
        ),
        Metric(
            "kvdock_sent_rows_total", counter,
            "Rows sent to peers: all, one a token, layer and part, and as joined.",
            ("pool", "state"),
        ),
        Metric(
            "kvdock_slots", gauge, "Slots expected from peers, and held after the end.",
            ("pool", "state"),
        ),
        Metric(
            "kvdock_landing_bytes", gauge, "Bytes of landing areas: all, and leased.",
            ("pool", "state"),
        ),
        Metric("kvdock_requests_total", counter, "Requests of peers.", ("outcome",)),
        Metric("kvdock_requests_bytes_total", counter, "Bytes of those that arrived."),
        Metric(
            "kvdock_plugin_info", gauge,
            "1 for each backend and observer that is loaded, since memory was "
            "attached.",
            ("kind", "name", "distribution", "version", "path"), mode="livemax",
        ),
    )  # fmt: skip


METRICS = _metrics()
"""All metrics."""


class EventMetrics(ABC):
    """Turn events into values of metrics.

    Processes that share one exposition do not write each other's gauges, as their
    series differ in `rank` and `model`. No series is removed, which Prometheus'
    client cannot do where several processes share one: it is set to 0 instead.
    """

    def __init__(self) -> None:
        self._with_draft: dict[Whose, list[int]] = {}
        self._models: set[str] = set()
        self._origins: dict[events.Origin, Whose] = {}

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
    def _retire_routes(self, kept: tuple[str, ...]) -> None:
        """Set to 0 where a pool of the same origin went before."""

    @hookimpl
    def kvdock_observe(self, event: events.Event, origin: events.Origin) -> None:
        """Count an event."""
        whose = self._origins.get(origin) or self._labels(origin)
        match event:
            case events.BatchEnded():
                self._count(event, whose)
            case events.BreakerMoved():
                labels = (event.backend, event.operation, *whose)
                value = BREAKER_VALUES[event.state]
                self._set("kvdock_breaker_state", value, *labels)
            case events.CallsBehind():
                self._set("kvdock_calls_behind", event.calls, event.backend, *whose)
            case events.MemoryHeld():
                self._set("kvdock_held_batches", event.batches, event.backend, *whose)
            case events.PoolRouted():
                route = (event.pool, event.backend, event.reason, *whose)
                self._retire_routes(route)
                self._set(ROUTES, 1, *route)
                self._set("kvdock_pool_enabled", event.enabled, event.pool, *whose)
            case events.PagesHeld():
                held = "kvdock_pool_pages"
                self._set(held, event.pages, event.pool, "all", *whose)
                self._set(held, event.leased, event.pool, "leased", *whose)
            case events.StoreFilled():
                self._fill(event, whose)
            case events.PluginLoaded():
                plugin = (event.kind, event.name, event.distribution, event.version)
                self._set("kvdock_plugin_info", 1, *plugin, event.path, *whose)
            case events.PagesRestored():
                self._count_restored(event, whose)
            case _:
                self._count_direct(event, whose)

    def _labels(self, origin: events.Origin) -> Whose:
        """Return the labels of an attachment; they stay few."""
        if len(self._models) < MOST_MODELS:
            self._models.add(origin.model)
        model = origin.model if origin.model in self._models else OTHER_MODELS
        found = (origin.rank, model)
        if len(self._origins) < _MOST_ORIGINS:
            self._origins[origin] = found
        return found

    def _fill(self, event: events.StoreFilled, whose: Whose) -> None:
        store = "kvdock_store_bytes"
        self._set(store, event.used_bytes, event.backend, "used", *whose)
        if event.limit_bytes:
            self._set(store, event.limit_bytes, event.backend, "limit", *whose)

    def _count(self, event: events.BatchEnded, whose: Whose) -> None:
        labels = (event.backend, event.pool, event.operation)
        self._sample("kvdock_batch_seconds", event.seconds, *labels, *whose)
        if event.nbytes:
            self._add("kvdock_bytes_total", event.nbytes, *labels, *whose)
        for outcome, keys in event.outcomes.items():
            name = outcome.name.lower()
            self._add("kvdock_keys_total", keys, *labels, name, *whose)

    def _count_direct(self, event: events.Event, whose: Whose) -> None:
        """Count what goes straight to peers, or comes from them."""
        match event:
            case events.RowsSent():
                rows = "kvdock_sent_rows_total"
                self._add(rows, event.rows, event.pool, "all", *whose)
                self._add(rows, event.descriptors, event.pool, "joined", *whose)
            case events.SlotsExpected():
                pool = event.pool
                self._set("kvdock_slots", event.expected, pool, "expected", *whose)
                self._set("kvdock_slots", event.held, pool, "held", *whose)
                area = "kvdock_landing_bytes"
                self._set(area, event.landing_bytes, pool, "all", *whose)
                self._set(area, event.landing_used, pool, "leased", *whose)
            case events.RequestArrived():
                self._add("kvdock_requests_total", 1, event.outcome, *whose)
                self._add("kvdock_requests_bytes_total", event.nbytes, *whose)

    def _count_restored(self, event: events.PagesRestored, whose: Whose) -> None:
        for pool, pages in event.pages.items():
            self._add("kvdock_restored_pages_total", pages, pool, *whose)
        self._add("kvdock_restored_prefix_pages_total", event.target, *whose)
        if event.draft is not None:
            self._add("kvdock_restored_draft_pages_total", event.draft, *whose)
            sums = self._with_draft.setdefault(whose, [0, 0])
            sums[0] += event.draft
            sums[1] += event.target
            draft, target = sums
            ratio = draft / target if target else 1.0
            self._set("kvdock_draft_restored_ratio", ratio, *whose)


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
            more: dict[str, Any] = {}
            if metric.buckets:
                more["buckets"] = metric.buckets
            if metric.kind is MetricKind.GAUGE:
                more["multiprocess_mode"] = metric.mode
            kind, about = kinds[metric.kind], metric.about
            try:
                return kind(metric.name, about, metric.labels, registry=where, **more)
            except ValueError:
                # Attached again in the same process: go on with what is there.
                return where._names_to_collectors[metric.name]  # noqa: SLF001 - there is no public look-up

        self._metrics = {metric.name: made(metric) for metric in METRICS}
        # Looking a label up costs a microsecond, this a tenth.
        self._series: dict[tuple[str, ...], Callable[[float], None]] = {}
        self._batches: dict[tuple[str, ...], Any] = {}

    def _series_of(
        self, verb: str, name: str, labels: tuple[str, ...]
    ) -> Callable[[float], None]:
        """Return what takes the values of one series."""
        found = self._series.get((name, *labels))
        if found is None:
            series = self._metrics[name].labels(*labels)
            found = self._series[name, *labels] = getattr(series, verb)
        return found

    def _count(self, event: events.BatchEnded, whose: Whose) -> None:
        # As above, with one look-up for each batch instead of one for each metric:
        # 6 us instead of 11.
        labels = (event.backend, event.pool, event.operation, *whose)
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
                series = (*labels[:3], outcome.name.lower(), *whose)
                add = self._series_of("inc", "kvdock_keys_total", series)
                by_outcome[outcome] = add
            add(keys)

    def _add(self, name: str, amount: float, *labels: str) -> None:
        self._series_of("inc", name, labels)(amount)

    def _set(self, name: str, value: float, *labels: str) -> None:
        self._series_of("set", name, labels)(value)

    def _sample(self, name: str, value: float, *labels: str) -> None:
        self._series_of("observe", name, labels)(value)

    def _retire_routes(self, kept: tuple[str, ...]) -> None:
        pool, _, _, *whose = kept
        # Another attachment of this process may have set it, by its own object.
        for metric in self._metrics[ROUTES].collect():
            names = ("pool", "backend", "reason", *ORIGIN)
            for sample in metric.samples:
                other = tuple(sample.labels[name] for name in names)
                if other[0] == pool and [*other[3:]] == whose and other != kept:
                    self._set(ROUTES, 0, *other)


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
        self._routes: dict[tuple[str, ...], tuple[str, ...]] = {}

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

    def _retire_routes(self, kept: tuple[str, ...]) -> None:
        pool, _, _, *whose = kept
        before = self._routes.get((pool, *whose), kept)
        self._routes[pool, *whose] = kept
        if before != kept:
            self._set(ROUTES, 0, *before)


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

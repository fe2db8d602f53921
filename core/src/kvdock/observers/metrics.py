"""Metrics. Names and labels are documented and stay.

They come from the core's events alone: what was cut off, abandoned or found
corrupt never comes back through a wrapper of the hook, and one more wrapper
with a histogram of its own would cost each batch two microseconds.

`Metrics` feeds the registry of Prometheus in this process. `MetricDeltas` gives the
same as data, to an engine whose scraped process is another one.
"""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from enum import StrEnum
from itertools import product
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import attrs

from kvdock import events
from kvdock.batch import Operation, Outcome
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.observer import Observer

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

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


log = logging.getLogger(__name__)

NEVER_RESTORED = "kvdock_never_restored"
MANY_PAGES = 1024
"""Pages of a pool that are stored, and found, before none of them is restored."""

ROUTES = "kvdock_pool_route_info"

_PLUGINS = "kvdock_plugin_info"

_CONFIG = "kvdock_config_info"

_RATIO = "kvdock_draft_restored_ratio"

_OUTLIVES = ("kvdock_calls_behind", "kvdock_held_batches")

_COUNTED = (Operation.EXISTS, Operation.PUT, Operation.GET)
"""Operations whose outcomes are shown from the attachment on."""

REQUEST_OUTCOMES = ("arrived", "failed", "aborted", "corrupt", "late")
"""How requests of peers end; see `RequestArrived`."""

Whose = tuple[str, str]
"""Values of the labels of an origin."""


class MetricKind(StrEnum):
    """The ways in which values of a metric add up."""

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
        kind: How its values add up.
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
            _CONFIG, gauge,
            "1 for the namespace that pages are found in: engines with the same digest "
            "share them, those of one generation where weights are replaced.",
            ("digest",), mode="livemax",
        ),
        Metric(
            "kvdock_generations_total", counter,
            "Generations of pages that were opened after weights had been replaced.",
            ("kind",),
        ),
        Metric(
            "kvdock_pool_pages", gauge,
            "Pages of host memory: all, and those leased to storage calls.",
            ("pool", "state"),
        ),
        Metric(
            "kvdock_store_bytes", gauge,
            "Bytes of a store: used by pages, its limit where it is reported, "
            "failed: what could not be written and is set aside, others: other "
            "namespaces of the same place, and where pages can be promised what is "
            "promised and its promise_limit.",
            ("backend", "state"), mode="livemostrecent",
        ),
        Metric(
            "kvdock_tenant_bytes", gauge,
            "Bytes of a store by tenant: used by its pages, its quota, and what is "
            "promised. Tenants that are not listed are one, `default`.",
            ("backend", "tenant", "state"), mode="livemostrecent",
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
            _RATIO, gauge,
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
        Metric(
            NEVER_RESTORED, gauge,
            "1 while pages of the pool were stored and found again, and none was "
            "ever restored.",
            ("pool",), mode="livemax",
        ),
        Metric(
            "kvdock_hints_total", counter,
            "Actions of requests' hints: taken, ignored as they are not known, "
            "malformed, or dropped as they are too many or too large.",
            ("action", "outcome"),
        ),
        Metric(
            "kvdock_hint_pages_total", counter,
            "Pages of hints by how they were answered: accepted, clipped, absent, "
            "unsupported; of a prefetch queued, present, absent, unsupported.",
            ("action", "answer"),
        ),
        Metric(
            "kvdock_copied_pages_total", counter,
            "Pages of copies between tiers by how they ended: copied, present there "
            "already, gone from the source, failed, dropped because too much waits, "
            "or incomplete.",
            ("pool", "source", "target", "outcome"),
        ),
        Metric(
            "kvdock_copied_bytes_total", counter, "Bytes copied between tiers.",
            ("pool", "source", "target"),
        ),
        Metric(
            "kvdock_copy_queue_bytes", gauge,
            "Bytes of pages that wait to be copied to a tier.", ("target",),
        ),
        Metric(
            "kvdock_load_decisions_total", counter,
            "Decisions how much of a prefix is loaded: all, part, compute, explore, "
            "learn, or unknown; acted is no where they were only counted.",
            ("choice", "acted"),
        ),
        Metric(
            "kvdock_host_memory_waits_total", counter,
            "Requests that waited for host memory to load into, or got less of it.",
        ),
        Metric(
            "kvdock_host_memory_wait_seconds_total", counter,
            "Seconds that requests waited for host memory to load into.",
        ),
        Metric(
            "kvdock_host_memory_computed_tokens_total", counter,
            "Stored tokens that were computed because host memory had no room.",
        ),
        Metric(
            "kvdock_load_latency_seconds", gauge,
            "What a load takes whatever its size, as it was learned.",
            ("backend", "pool"), mode="livemostrecent",
        ),
        Metric(
            "kvdock_load_bytes_per_second", gauge,
            "Bytes per second of loads, as they were learned.",
            ("backend", "pool"), mode="livemostrecent",
        ),
        Metric(
            "kvdock_compute_tokens_per_second", gauge,
            "Tokens per second that the engine prefills, as it was learned.",
            mode="livemostrecent",
        ),
        Metric("kvdock_requests_total", counter, "Requests of peers.", ("outcome",)),
        Metric(
            "kvdock_messages_refused_total", counter,
            "Messages of peers that were refused before anything was done.",
            ("message", "reason"),
        ),
        Metric("kvdock_requests_bytes_total", counter, "Bytes of those that arrived."),
        Metric(
            _PLUGINS, gauge,
            "1 for each backend and observer that is loaded, since memory was "
            "attached.",
            ("kind", "name", "distribution", "version", "path"), mode="livemax",
        ),
    )  # fmt: skip


METRICS = _metrics()
"""All metrics."""

_KINDS = MappingProxyType({metric.name: metric.kind for metric in METRICS})

Value = tuple[str, float, *tuple[str, ...]]
"""Name of a metric, an amount or a value, and its labels without those of an origin."""


def _of_store(event: events.StoreFilled) -> Iterator[Value]:
    states = {
        "used": event.used_bytes,
        "failed": event.failed_bytes,
        "others": event.other_bytes,
    }
    if event.limit_bytes:
        states["limit"] = event.limit_bytes
    if event.promise_limit_bytes:
        states["promised"] = event.promised_bytes
        states["promise_limit"] = event.promise_limit_bytes
    for state, nbytes in states.items():
        yield "kvdock_store_bytes", nbytes, event.backend, state
    for tenant, use in event.tenants.items():
        for state, nbytes in (
            ("used", use.used_bytes),
            ("quota", use.quota_bytes),
            ("promised", use.promised_bytes),
        ):
            yield "kvdock_tenant_bytes", nbytes, event.backend, tenant, state


_VALUES: Mapping[type, Callable[[Any], Iterable[Value]]] = MappingProxyType(
    {
        events.BreakerMoved: lambda of: [
            ("kvdock_breaker_state", BREAKER_VALUES[of.state], of.backend, of.operation)
        ],
        events.CallsBehind: lambda of: [(_OUTLIVES[0], of.calls, of.backend)],
        events.MemoryHeld: lambda of: [(_OUTLIVES[1], of.batches, of.backend)],
        events.PagesHeld: lambda of: [
            ("kvdock_pool_pages", of.pages, of.pool, "all"),
            ("kvdock_pool_pages", of.leased, of.pool, "leased"),
        ],
        events.StoreFilled: _of_store,
        events.GenerationOpened: lambda of: [("kvdock_generations_total", 1, of.kind)],
        events.PluginLoaded: lambda of: [
            (_PLUGINS, 1, of.kind, of.name, of.distribution, of.version, of.path)
        ],
        events.PagesCopied: lambda of: [
            *(
                ("kvdock_copied_pages_total", pages, of.pool, of.source, of.target, how)
                for how, pages in of.outcomes.items()
            ),
            ("kvdock_copied_bytes_total", of.nbytes, of.pool, of.source, of.target),
            ("kvdock_copy_queue_bytes", of.queued_bytes, of.target),
        ],
        events.HintAnswered: lambda of: [
            *([("kvdock_hints_total", 1, of.action, of.outcome)] if of.outcome else []),
            *(
                ("kvdock_hint_pages_total", pages, of.action, answer)
                for answer, pages in of.pages.items()
            ),
        ],
        events.LoadDecided: lambda of: [
            (
                "kvdock_load_decisions_total", 1, of.choice,
                "yes" if of.acted else "no",
            ),
            ("kvdock_compute_tokens_per_second", of.tokens_per_s),
            *(
                ("kvdock_load_latency_seconds", latency_s, *where)
                for where, (latency_s, _) in of.curves.items()
            ),
            *(
                ("kvdock_load_bytes_per_second", rate, *where)
                for where, (_, rate) in of.curves.items()
            ),
        ],
        events.HostMemoryShared: lambda of: [
            ("kvdock_host_memory_waits_total", 1),
            ("kvdock_host_memory_wait_seconds_total", of.waited_s),
            ("kvdock_host_memory_computed_tokens_total", of.computed_tokens),
        ],
        events.RowsSent: lambda of: [
            ("kvdock_sent_rows_total", of.rows, of.pool, "all"),
            ("kvdock_sent_rows_total", of.descriptors, of.pool, "joined"),
        ],
        events.SlotsExpected: lambda of: [
            ("kvdock_slots", of.expected, of.pool, "expected"),
            ("kvdock_slots", of.held, of.pool, "held"),
            ("kvdock_landing_bytes", of.landing_bytes, of.pool, "all"),
            ("kvdock_landing_bytes", of.landing_used, of.pool, "leased"),
        ],
        events.MessageRefused: lambda of: [
            ("kvdock_messages_refused_total", 1, of.message, of.reason)
        ],
        events.RequestArrived: lambda of: [
            ("kvdock_requests_total", 1, of.outcome),
            ("kvdock_requests_bytes_total", of.nbytes),
        ],
    }
)  # fmt: skip
"""What each event says, where that is all it does."""


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
        self._unrestored: dict[tuple[str, ...], Counter[str]] = {}
        self._shown: dict[tuple[str, ...], dict[tuple[str, ...], float]] = {}

    @abstractmethod
    def _add(self, name: str, amount: float, *labels: str) -> None:
        """Increase a counter."""

    def _set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge, and remember to end it with its attachment."""
        self._shown.setdefault(labels[-2:], {})[name, *labels] = value
        self._write(name, value, *labels)

    @abstractmethod
    def _write(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""

    def _end(self, name: str, *labels: str) -> None:
        """Set a gauge to what it says of nothing."""
        self._write(name, 1.0 if name == _RATIO else 0.0, *labels)

    def _detach(self, whose: Whose) -> None:
        """End the gauges of an attachment, and begin anew with its next one."""
        for (name, *labels), value in self._shown.pop(whose, {}).items():
            # What a library has not given back outlives its attachment.
            if name != _PLUGINS and not (value and name in _OUTLIVES):
                self._end(name, *labels)
        self._with_draft.pop(whose, None)
        for series in [one for one in self._unrestored if one[1:] == whose]:
            del self._unrestored[series]

    @abstractmethod
    def _sample(self, name: str, value: float, *labels: str) -> None:
        """Add a sample to a histogram."""

    @hookimpl
    def kvdock_observe(self, event: events.Event, origin: events.Origin) -> None:
        """Count an event."""
        whose = self._origins.get(origin) or self._labels(origin)
        match event:
            case events.BatchEnded():
                self._count(event, whose)
                self._watch(event, whose)
            case events.PoolRouted():
                self._note_route(event, whose)
                self._set(_CONFIG, 1, origin.configuration, *whose)
            case events.PagesRestored():
                self._count_restored(event, whose)
            case events.PoolsDetached():
                self._detach(whose)
            case _ if type(event) in _VALUES:
                for name, value, *labels in _VALUES[type(event)](event):
                    counts = _KINDS[name] is MetricKind.COUNTER
                    (self._add if counts else self._set)(name, value, *labels, *whose)

    def _note_route(self, event: events.PoolRouted, whose: Whose) -> None:
        """Show where a pool goes, and its counters at 0.

        Prometheus takes a series that begins at 1 for one that did not increase,
        and would miss the first page of each outcome.
        """
        self._set(ROUTES, 1, event.pool, event.backend, event.reason, *whose)
        self._set("kvdock_pool_enabled", event.enabled, event.pool, *whose)
        if not event.enabled:
            return
        for backend, operation in product((event.backend, *event.farther), _COUNTED):
            labels = (backend, event.pool, operation)
            for outcome in Outcome:
                name = outcome.name.lower()
                self._add("kvdock_keys_total", 0, *labels, name, *whose)
            if operation is not Operation.EXISTS:
                self._add("kvdock_bytes_total", 0, *labels, *whose)
        self._add("kvdock_restored_pages_total", 0, event.pool, *whose)
        self._add("kvdock_restored_prefix_pages_total", 0, *whose)
        for ended in REQUEST_OUTCOMES:
            self._add("kvdock_requests_total", 0, ended, *whose)

    def _labels(self, origin: events.Origin) -> Whose:
        """Return the labels of an attachment; they stay few."""
        if len(self._models) < MOST_MODELS:
            self._models.add(origin.model)
        model = origin.model if origin.model in self._models else OTHER_MODELS
        found = (origin.rank, model)
        if len(self._origins) < _MOST_ORIGINS:
            self._origins[origin] = found
        return found

    def _count(self, event: events.BatchEnded, whose: Whose) -> None:
        labels = (event.backend, event.pool, event.operation)
        self._sample("kvdock_batch_seconds", event.seconds, *labels, *whose)
        if event.nbytes:
            self._add("kvdock_bytes_total", event.nbytes, *labels, *whose)
        for outcome, keys in event.outcomes.items():
            name = outcome.name.lower()
            self._add("kvdock_keys_total", keys, *labels, name, *whose)

    def _watch(self, event: events.BatchEnded, whose: Whose) -> None:
        """Notice a pool that is stored and found, and of which no page is loaded."""
        moved = sum(n for one, n in event.outcomes.items() if one.name == "OK")
        if not moved:
            return
        seen = self._unrestored.setdefault((event.pool, *whose), Counter())
        if seen["get"]:
            return
        seen[event.operation] += moved
        if event.operation == "get" and seen["said"]:
            self._set(NEVER_RESTORED, 0, event.pool, *whose)
        elif not seen["said"] and min(seen["put"], seen["exists"]) >= MANY_PAGES:
            seen["said"] = 1
            self._set(NEVER_RESTORED, 1, event.pool, *whose)
            log.warning(
                "%d pages of pool %s were stored and %d found again, and none was ever "
                "restored: another pool of the same prefixes lacks its pages, or the "
                "engine asks for others than it stores",
                seen["put"],
                event.pool,
                seen["exists"],
            )

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
            self._set(_RATIO, ratio, *whose)


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

    def _write(self, name: str, value: float, *labels: str) -> None:
        # Not kept: another attachment of this process may have ended the series.
        self._metrics[name].labels(*labels).set(value)

    def _end(self, name: str, *labels: str) -> None:
        super()._end(name, *labels)
        # Files of several processes keep a series for good: there it ends at 0.
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
            self._metrics[name].remove(*labels)

    def _sample(self, name: str, value: float, *labels: str) -> None:
        self._series_of("observe", name, labels)(value)


@attrs.frozen
class MetricDelta:
    """The values that one series of a metric got since it was taken the last time.

    Args:
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

    def _write(self, name: str, value: float, *labels: str) -> None:
        with self._lock:
            self._gauges[name, *labels] = float(value)

    def _sample(self, name: str, value: float, *labels: str) -> None:
        series = (name, *labels)
        with self._lock:
            if series not in self._samples:
                self._samples[series] = deque(maxlen=_SAMPLES)
            self._samples[series].append(value)


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
    build=lambda _: Metrics(),
    needs="kvdock[metrics]",
)

"""The core's metrics in vLLM's own registry.

The scheduler's process has no registry that is scraped; vLLM carries what changed
there to the process that has one.
"""

from __future__ import annotations

from typing import Any

from kvdock.observers.metrics import METRICS, MetricDeltas, MetricKind

PREFIX = "vllm:"
"""How vLLM's metrics begin; kvdock's own names follow."""


def metric_definitions() -> dict[str, Any]:
    """Return the core's metrics as vLLM declares its own."""
    from vllm.v1.kv_offload.base import (  # noqa: PLC0415 - the engine
        OffloadingCounterMetadata,
        OffloadingGaugeMetadata,
        OffloadingHistogramMetadata,
    )

    found: dict[str, Any] = {}
    for metric in METRICS:
        given = {"documentation": metric.about, "labelnames": metric.labels}
        match metric.kind:
            case MetricKind.COUNTER:
                made = OffloadingCounterMetadata(**given)
            case MetricKind.GAUGE:
                made = OffloadingGaugeMetadata(**given)
            case MetricKind.HISTOGRAM:
                made = OffloadingHistogramMetadata(**given, buckets=metric.buckets)
        found[PREFIX + metric.name] = made
    return found


def take(deltas: MetricDeltas) -> Any:  # noqa: ANN401 - vLLM's OffloadingConnectorStats or None
    """Return what has changed since the last call; None where nothing has."""
    changed = deltas.take()
    if not changed:
        return None
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (  # noqa: PLC0415 - the engine
        OffloadingConnectorStats,
    )

    stats = OffloadingConnectorStats()
    for one in changed:
        name = PREFIX + one.name
        for value in one.values:
            match one.kind:
                case MetricKind.COUNTER:
                    stats.increase_counter(name, value, one.labels)
                case MetricKind.GAUGE:
                    stats.set_gauge(name, value, one.labels)
                case MetricKind.HISTOGRAM:
                    stats.observe_histogram(name, value, one.labels)
    return stats

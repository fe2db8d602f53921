"""Counts of pages, for vLLM's own registry of metrics.

The scheduler's process has no registry that is scraped; vLLM carries the counts to
the one that has.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from kvdock import Outcome

if TYPE_CHECKING:
    from kvdock import TransferFuture

PAGES = "vllm:kvdock_pages"
SECONDS = "vllm:kvdock_transfer_seconds"
BUCKETS = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 3.0, 10.0)

COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {PAGES: ("Pages by how they ended.", ("pool", "operation", "outcome"))}
)
HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...]]] = MappingProxyType(
    {
        SECONDS: (
            "From the submission of a job's pages of one pool to their end.",
            ("pool", "operation"),
        )
    }
)


def metric_definitions() -> dict[str, Any]:
    """Return the metrics as vLLM declares them."""
    from vllm.v1.kv_offload.base import (  # noqa: PLC0415 - the engine
        OffloadingCounterMetadata,
        OffloadingHistogramMetadata,
    )

    counters = {
        name: OffloadingCounterMetadata(documentation=about, labelnames=labels)
        for name, (about, labels) in COUNTERS.items()
    }
    histograms = {
        name: OffloadingHistogramMetadata(
            documentation=about, labelnames=labels, buckets=BUCKETS
        )
        for name, (about, labels) in HISTOGRAMS.items()
    }
    return {**counters, **histograms}


class PageCounts:
    """What became of pages since it was last taken, and over the whole life."""

    def __init__(self) -> None:
        self.total: Counter[tuple[str, str, str]] = Counter()
        self._new: Counter[tuple[str, str, str]] = Counter()
        self._seconds: list[tuple[float, tuple[str, str]]] = []

    def add(self, promotion: bool, transfers: Iterable[TransferFuture]) -> None:  # noqa: FBT001 - vLLM's word
        """Count the pages of ended transfers."""
        operation = "load" if promotion else "store"
        for transfer in transfers:
            counts = np.bincount(transfer.outcomes).tolist()
            for code, count in enumerate(counts):
                if count:
                    label = (transfer.pool, operation, Outcome(code).name.lower())
                    self._new[label] += count
                    self.total[label] += count
            self._seconds.append((transfer.seconds, (transfer.pool, operation)))

    def take(self) -> Any:  # noqa: ANN401 - vLLM's OffloadingConnectorStats or None
        """Return what is new, and begin again; None where nothing is."""
        if not self._seconds:
            return None
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (  # noqa: PLC0415 - the engine
            OffloadingConnectorStats,
        )

        counts, self._new = self._new, Counter()
        seconds, self._seconds = self._seconds, []
        stats = OffloadingConnectorStats()
        for label, count in counts.items():
            stats.increase_counter(PAGES, count, label)
        for value, spent_on in seconds:
            stats.observe_histogram(SECONDS, value, spent_on)
        return stats

"""Names of metrics are a promise: code, reference and dashboard agree."""

from __future__ import annotations

import json
import re
from pathlib import Path

from prometheus_client import CollectorRegistry

from kvdock.batch import Outcome
from kvdock.observers.metrics import Metrics

DOCS = Path(__file__).parents[3] / "docs"
_NAME = re.compile(r"kvdock_[a-z_]+")
_SUFFIXES = ("_bucket", "_count", "_sum")


def exported() -> dict[str, list[str]]:
    registry = CollectorRegistry()
    metrics = Metrics(registry)
    del metrics
    return {
        name: list(collector._labelnames)  # type: ignore[attr-defined]  # the library shows them nowhere else
        for collector, names in registry._collector_to_names.items()
        for name in names
        if name.endswith("_total") or not name.endswith(("_created", *_SUFFIXES))
        if f"{name}_total" not in names
    }


def test_the_reference_lists_every_metric_with_its_labels() -> None:
    rows = re.findall(
        r"^\| `(kvdock_\w+)` \| \w+ \|([\w, ]*)\|",
        (DOCS / "reference" / "metrics.md").read_text(),
        re.MULTILINE,
    )
    documented = {name: labels.replace(",", "").split() for name, labels in rows}
    assert documented == exported()


def test_the_reference_lists_every_outcome() -> None:
    text = (DOCS / "reference" / "metrics.md").read_text()
    assert all(f"`{outcome.name.lower()}`" in text for outcome in Outcome)


def test_the_dashboard_asks_for_metrics_that_there_are_and_for_all_of_them() -> None:
    board = json.loads((DOCS / "grafana" / "kvdock.json").read_text())
    asked = {
        name.removesuffix("_bucket")
        for panel in board["panels"]
        for target in panel["targets"]
        for name in _NAME.findall(target["expr"])
    }
    assert asked == set(exported())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])

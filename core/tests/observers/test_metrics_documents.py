"""Names of metrics are a promise: code, reference and dashboard agree."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml
from prometheus_client import CollectorRegistry

from kvdock.batch import Outcome
from kvdock.observers.metrics import ORIGIN, Metrics

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


def alerts() -> list[dict[str, Any]]:
    """Return the alert rules; YAML that is written without an anchor or a block."""
    found = yaml.safe_load((DOCS / "prometheus" / "alerts.yml").read_text())
    return [rule for group in found["groups"] for rule in group["rules"]]


def test_the_reference_lists_every_metric_with_its_labels() -> None:
    rows = re.findall(
        r"^\| `(kvdock_\w+)` \| \w+ \|([\w, ]*)\|",
        (DOCS / "reference" / "metrics.md").read_text(),
        re.MULTILINE,
    )
    documented = {name: labels.replace(",", "").split() for name, labels in rows}
    # The two labels that every series has are described once.
    assert {name: [*labels, *ORIGIN] for name, labels in documented.items()} == (
        exported()
    )


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


def test_the_dashboard_can_be_narrowed_to_an_instance_a_rank_and_a_pool() -> None:
    board = json.loads((DOCS / "grafana" / "kvdock.json").read_text())
    names = {one["name"] for one in board["templating"]["list"]}
    assert {"instance", "rank", "pool", "backend"} <= names
    for panel in board["panels"]:
        for target in panel["targets"]:
            series = target["expr"].count("kvdock_")
            assert target["expr"].count('rank=~"$rank"') == series
            assert target["expr"].count('instance=~"$instance"') == series


def test_alerts_ask_for_metrics_that_there_are_and_link_their_page() -> None:
    known = {f"{name}{end}" for name in exported() for end in ("", *_SUFFIXES)}
    pages = (DOCS / "how-to" / "alerts.md").read_text()
    for rule in alerts():
        assert set(_NAME.findall(rule["expr"])) <= known
        page, _, heading = rule["annotations"]["runbook_url"].partition("#")
        assert page == "{{ $externalLabels.kvdock_docs }}/how-to/alerts.html"
        assert f"## {rule['alert']}\n" in pages
        assert heading == rule["alert"].lower()
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"]["summary"]


def test_every_alert_has_a_trial_in_which_it_fires() -> None:
    trials = yaml.safe_load((DOCS / "prometheus" / "alerts_test.yml").read_text())
    fired = {
        name
        for trial in trials["tests"]
        for asked in trial.get("promql_expr_test", ())
        for sample in asked["exp_samples"]
        for name in re.findall(r'alertname="(\w+)"', sample["labels"])
    } | {
        asked["alertname"]
        for trial in trials["tests"]
        for asked in trial.get("alert_rule_test", ())
        if asked["exp_alerts"]
    }
    assert fired == {rule["alert"] for rule in alerts()}

"""Counters begin at 0 when a pool is attached, and gauges end when it is detached."""

from __future__ import annotations

from prometheus_client import CollectorRegistry
from shelf import Engine, Shelf, attention, patient
from tiered import Tiers

from kvdock.batch import Outcome
from kvdock.events import MemoryHeld, Origin, PagesRestored, PoolsDetached
from kvdock.observers.metrics import METRICS, MetricDeltas, MetricKind, Metrics


def test_every_outcome_of_a_stored_pool_is_shown_at_0_when_it_is_attached() -> None:
    registry, deltas = CollectorRegistry(), MetricDeltas()
    observers: list[object] = [Metrics(registry), deltas]
    engine = Engine([Shelf()], (attention(),), patient(), observers=observers)
    with engine.attachment:
        shown = {
            (sample.labels["operation"], sample.labels["outcome"]): sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "kvdock_keys_total"
        }
        told = [one for one in deltas.take() if one.name == "kvdock_keys_total"]
    wanted = {
        (operation, outcome.name.lower()): 0.0
        for operation in ("exists", "put", "get")
        for outcome in Outcome
    }
    assert shown == wanted
    carried = {one.labels[2:4]: one.values for one in told}
    assert carried == dict.fromkeys(wanted, (0.0,))


def test_every_tier_of_a_pool_is_shown_at_0_when_it_is_attached() -> None:
    registry = CollectorRegistry()
    tiers = Tiers((Shelf("near"), Shelf("far")), observers=[Metrics(registry)])
    with tiers.cache:
        for backend in ("near", "far"):
            labels = {"backend": backend, "pool": "kv", "operation": "get"}
            labels |= {"outcome": "corrupt", "rank": "0", "model": "m"}
            assert registry.get_sample_value("kvdock_keys_total", labels) == 0


GAUGES = {metric.name for metric in METRICS if metric.kind is MetricKind.GAUGE}


def test_no_gauge_of_an_attachment_is_left_after_it() -> None:
    registry, deltas = CollectorRegistry(), MetricDeltas()
    observers: list[object] = [Metrics(registry), deltas]

    def shown() -> set[str]:
        return {
            sample.name
            for family in registry.collect()
            for sample in family.samples
            if sample.name in GAUGES
        }

    for _ in range(2):
        engine = Engine([Shelf()], (attention(),), patient(), observers=observers)
        with engine.attachment:
            engine.attachment.notify(PagesRestored(pages={}, target=4, draft=2))
            assert {"kvdock_pool_route_info", "kvdock_draft_restored_ratio"} < shown()
            deltas.take()
        assert shown() <= {"kvdock_plugin_info"}
        last = {one.name: one.values[-1] for one in deltas.take() if one.name in GAUGES}
        assert last.pop("kvdock_draft_restored_ratio") == 1
        assert last
        assert set(last.values()) == {0}


def test_what_a_library_still_holds_is_shown_after_the_attachment() -> None:
    registry = CollectorRegistry()
    metrics, origin = Metrics(registry), Origin(model="m")
    for batches, value in ((2, 2), (0, 0)):
        metrics.kvdock_observe(MemoryHeld(backend="b", batches=batches), origin)
        metrics.kvdock_observe(PoolsDetached(), origin)
        labels = {"backend": "b", "rank": "0", "model": "m"}
        left = registry.get_sample_value("kvdock_held_batches", labels)
        assert left == (value or None)

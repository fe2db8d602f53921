"""Metrics as data: the same values as in a registry, once each."""

from __future__ import annotations

import threading
from collections import defaultdict

import pytest
from prometheus_client import CollectorRegistry
from shelf import Engine, Shelf, attention, draft, patient

from kvdock.batch import Operation, Outcome
from kvdock.events import (
    BatchEnded,
    MemoryHeld,
    Origin,
    PagesRestored,
    PoolsDetached,
)
from kvdock.observers import metrics
from kvdock.observers.metrics import (
    METRICS,
    MetricDelta,
    MetricDeltas,
    MetricKind,
    Metrics,
)


def test_summed_up_they_are_what_a_registry_shows() -> None:
    registry, deltas = CollectorRegistry(), MetricDeltas()
    observers: list[object] = [Metrics(registry), deltas]
    engine = Engine([Shelf()], (attention(), draft()), patient(), observers=observers)
    with engine.attachment as cache:
        names = engine.store(3)
        damaged = next(key for key in engine.shelf.objects if f"/{names[2]}.kv" in key)
        engine.shelf.objects[damaged] = bytes(len(engine.shelf.objects[damaged]))
        cache.exists(names)
        cache.get(names, engine.where(range(3)))
        assert cache.wait_idle(60)
        compare(registry, deltas)


def compare(registry: CollectorRegistry, deltas: MetricDeltas) -> None:
    """Check that each of them shows what the other does."""
    known = {one.name: one for one in METRICS}
    compared = set()
    for delta in deltas.take():
        metric = known[delta.name]
        assert delta.kind is metric.kind
        labels = dict(zip(metric.labels, delta.labels, strict=True))
        if delta.kind is MetricKind.HISTOGRAM:
            count = registry.get_sample_value(f"{delta.name}_count", labels)
            total = registry.get_sample_value(f"{delta.name}_sum", labels)
            assert count == len(delta.values)
            assert total == pytest.approx(sum(delta.values))
        else:
            (value,) = delta.values
            assert registry.get_sample_value(delta.name, labels) == value
        compared.add((delta.name, delta.labels))
    shown = {
        (
            sample.name.removesuffix("_count"),
            tuple(sample.labels.values()),
        ): sample.value
        for family in registry.collect()
        for sample in family.samples
        if not sample.name.endswith(("_created", "_bucket", "_sum"))
    }
    # What nothing has happened to yet is shown as 0, and is not a change.
    assert compared <= shown.keys()
    assert not any(shown[series] for series in shown.keys() - compared)


def ended(keys: int) -> BatchEnded:
    return BatchEnded(
        backend="b", pool="p", operation=Operation.GET,
        outcomes={Outcome.OK: keys}, nbytes=8 * keys, seconds=0.5,
    )  # fmt: skip


def by_name(taken: tuple[MetricDelta, ...]) -> dict[str, list[tuple[float, ...]]]:
    found = defaultdict(list)
    for one in taken:
        found[one.name].append(one.values)
    return dict(found)


def test_what_was_taken_is_not_taken_again() -> None:
    deltas = MetricDeltas()
    deltas.kvdock_observe(ended(2), Origin())
    deltas.kvdock_observe(ended(3), Origin())
    assert by_name(deltas.take()) == {
        "kvdock_keys_total": [(5,)],
        "kvdock_bytes_total": [(40,)],
        "kvdock_batch_seconds": [(0.5, 0.5)],
    }
    assert deltas.take() == ()
    deltas.kvdock_observe(ended(1), Origin())
    assert by_name(deltas.take())["kvdock_keys_total"] == [(1,)]


def test_nothing_is_lost_between_threads() -> None:
    deltas, taken = MetricDeltas(), 0.0

    def observe() -> None:
        for _ in range(500):
            deltas.kvdock_observe(ended(1), Origin())

    threads = [threading.Thread(target=observe) for _ in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        taken += sum(n for (n,) in by_name(deltas.take()).get("kvdock_keys_total", []))
    for thread in threads:
        thread.join()
    taken += sum(n for (n,) in by_name(deltas.take()).get("kvdock_keys_total", []))
    assert taken == 2000


def test_samples_that_are_not_taken_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics, "_SAMPLES", 3)
    deltas = MetricDeltas()
    for _ in range(5):
        deltas.kvdock_observe(ended(1), Origin())
    assert by_name(deltas.take())["kvdock_batch_seconds"] == [(0.5,) * 3]


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

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from shelf import Engine, Shelf, hashes, patient
from tiered import NAMES, Tiers

from kvdock.events import requested_by
from kvdock.observers.tracing import Tracing

if TYPE_CHECKING:
    from kvdock.batch import Batch, BatchResult


def traced() -> tuple[InMemorySpanExporter, TracerProvider]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return exporter, provider


def test_a_batch_is_a_span_below_the_engines_own() -> None:
    exporter, provider = traced()
    engine = Engine(observers=[Tracing(provider)], core=patient())
    tracer = provider.get_tracer("engine")
    with engine.attachment, tracer.start_as_current_span("prefill") as above:
        engine.store(2)
    [span] = [one for one in exporter.get_finished_spans() if "kvdock" in one.name]
    assert span.name == "kvdock.put"
    assert span.parent is not None
    assert span.parent.span_id == above.get_span_context().span_id
    assert span.attributes is not None
    assert span.attributes["kvdock.pool"] == "kv"
    assert span.attributes["kvdock.keys_ok"] == 2


def test_a_batch_that_raises_is_a_failed_span_and_still_a_miss() -> None:
    exporter, provider = traced()
    engine = Engine(observers=[Tracing(provider)], core=patient())

    def fail(_: Batch) -> BatchResult:
        raise RuntimeError("boom")

    with engine.attachment as cache:
        engine.shelf.trouble = fail
        assert cache.exists(hashes(1)).best == 0
    [span] = exporter.get_finished_spans()
    assert span.status.status_code is trace.StatusCode.ERROR
    assert span.events[0].name == "exception"


def test_without_an_sdk_spans_change_nothing() -> None:
    engine = Engine(observers=[Tracing()], core=patient())
    with engine.attachment:
        engine.store(1)


def test_the_batches_of_a_request_hang_under_one_span_from_first_to_last() -> None:
    exporter, provider = traced()
    engine = Engine(observers=[Tracing(provider)], core=patient())
    with engine.attachment as cache:
        engine.store(2)
        for request in ("one", "two", "one"):
            with requested_by(request):
                cache.exists(hashes(2))
                cache.get(hashes(2), engine.where([0, 1]))
    spans = exporter.get_finished_spans()
    whole = {
        one.attributes["kvdock.request"]: one
        for one in spans
        if one.name == "kvdock.request" and one.attributes
    }
    assert set(whole) == {"one", "two"}
    for request, batches in (("one", 4), ("two", 2)):
        above = whole[request]
        mine = [
            one
            for one in spans
            if one.parent and one.parent.span_id == above.context.span_id
        ]
        assert len(mine) == batches
        starts = [one.start_time or 0 for one in mine]
        ends = [one.end_time or 0 for one in mine]
        assert (above.start_time or 0) <= min(starts)
        assert max(ends) <= (above.end_time or 0)
    assert sum(one.parent is None for one in spans) == 3


def test_a_request_is_one_span_through_its_lookup_the_tiers_and_the_load() -> None:
    exporter, provider = traced()
    near, far = Shelf("near"), Shelf("far")
    tiers = Tiers((near, far), observers=(Tracing(provider),))
    tiers.stored()
    near.objects.clear()
    exporter.clear()
    with requested_by("r"):
        assert tiers.cache.exists(NAMES).best == len(NAMES)
        assert tiers.get() == len(NAMES)
    tiers.cache.close()
    (whole,) = [
        one for one in exporter.get_finished_spans() if one.name == "kvdock.request"
    ]
    steps = [
        (one.name, (one.attributes or {})["kvdock.backend"])
        for one in exporter.get_finished_spans()
        if one.parent and one.parent.span_id == whole.context.span_id
    ]
    # A page is loaded from where the lookup found it.
    assert steps == [
        ("kvdock.exists", "near"), ("kvdock.exists", "far"), ("kvdock.get", "far"),
    ]  # fmt: skip


def test_requests_that_are_idle_or_too_many_are_ended() -> None:
    exporter, provider = traced()
    tracing = Tracing(provider)
    for number in range(1030):
        with requested_by(f"r{number}"):
            span = tracing._request_span()
            assert span is not None
    assert len(exporter.get_finished_spans()) == 6
    tracing._requests["r6"].last_ns = 0
    with requested_by("last"):
        tracing._request_span()
    ended = {
        dict(one.attributes or {})["kvdock.request"]
        for one in exporter.get_finished_spans()
    }
    assert ended == {f"r{number}" for number in range(7)}

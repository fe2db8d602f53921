from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from shelf import Engine, hashes, patient

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
    with engine.attachment as cache, tracer.start_as_current_span("prefill") as above:
        engine.fill(hashes(2), [0, 1])
        cache.put(hashes(2), engine.where([0, 1]))
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
    with engine.attachment as cache:
        engine.fill(hashes(1), [0])
        assert cache.put(hashes(1), engine.where([0])).pages == 1

"""A span for each batch, through OpenTelemetry's API alone.

Without an SDK in the process the spans cost next to nothing and go nowhere.
The core carries the engine's context to its threads, so a batch's span hangs
under whatever span the engine was in.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import attrs

from kvdock.batch import Batch, BatchResult
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.observer import Observer


@attrs.frozen(kw_only=True)
class TracingSettings:
    """Where spans go is set up in the process, by OpenTelemetry's own means."""


class Tracing:
    """The hooks.

    Args:
        provider: A tracer provider; None for the process's own.
    """

    def __init__(self, provider: Any = None) -> None:  # noqa: ANN401 - the library's class
        from opentelemetry import trace  # noqa: PLC0415 - an extra

        self._tracer = trace.get_tracer("kvdock", tracer_provider=provider)
        self._error = trace.StatusCode.ERROR

    @hookimpl(wrapper=True)
    def kvdock_batch_io(
        self, batch: Batch
    ) -> Generator[None, BatchResult, BatchResult]:
        """Put a span around the backend's call."""
        span = self._tracer.start_span(f"kvdock.{batch.operation}")
        if not span.is_recording():
            return (yield)
        span.set_attributes(
            {
                "kvdock.pool": batch.pool,
                "kvdock.operation": str(batch.operation),
                "kvdock.keys": len(batch),
                "kvdock.bytes": int(batch.object_bytes.sum()),
            }
        )
        try:
            result = yield
            if isinstance(result, BatchResult):
                span.set_attribute("kvdock.keys_ok", int(result.ok.sum()))
        except BaseException as error:
            span.record_exception(error)
            span.set_status(self._error, str(error))
            raise
        else:
            return result
        finally:
            span.end()


observer = Observer(
    name="tracing",
    summary="an OpenTelemetry span for each batch",
    settings=TracingSettings,
    build=lambda _: Tracing(),
    needs="kvdock[tracing]",
)

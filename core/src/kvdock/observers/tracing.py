"""A span for each request and each batch, through OpenTelemetry's API alone.

Without an SDK in the process the spans cost next to nothing and go nowhere.
The core carries the engine's context to its threads, so a batch's span hangs
under that of its request, and this one under whatever span the engine was in.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Generator
from copy import copy
from typing import Any

import attrs

from kvdock.batch import Batch, BatchResult
from kvdock.events import Event, PoolsDetached, current_request
from kvdock.plugin.hookspecs import hookimpl
from kvdock.plugin.observer import Observer

_IDLE_NS = 10 * 10**9
"""A request without a batch for so long has ended, at the end of its last one."""
_MOST_REQUESTS = 1024


@attrs.define(eq=False)
class _RequestSpan:
    """The span of one request: from its first batch to the end of its last one."""

    span: Any
    context: Any
    last_ns: int


class Tracing:
    """The hooks.

    Args:
        provider: A tracer provider; None for the process's own.
    """

    def __init__(self, provider: Any = None) -> None:  # noqa: ANN401 - the library's class
        from opentelemetry import trace  # noqa: PLC0415 - an extra

        self._tracer = trace.get_tracer("kvdock", tracer_provider=provider)
        self._error = trace.StatusCode.ERROR
        self._within = trace.set_span_in_context
        self._requests: OrderedDict[str, _RequestSpan] = OrderedDict()
        self._lock = threading.Lock()
        self._backend = ""

    def for_backend(self, name: str) -> Tracing:
        """Return the hooks around one backend, which is one tier of several."""
        mine = copy(self)
        mine._backend = name  # noqa: SLF001 - a copy of itself
        return mine

    def _request_span(self) -> _RequestSpan | None:
        """Return the span of the request that a batch belongs to, if it is known."""
        request, now_ns = current_request(), time.time_ns()
        with self._lock:
            found = self._requests.get(request)
            if not request or found:
                return found
            span = self._tracer.start_span("kvdock.request")
            if not span.is_recording():
                return None
            span.set_attribute("kvdock.request", request)
            found = _RequestSpan(span, self._within(span), now_ns)
            self._requests[request] = found
            self._end(now_ns - _IDLE_NS, _MOST_REQUESTS)
            return found

    def _end(self, before_ns: int, most: int) -> None:
        """End the spans that are idle since then, and those over a number."""
        for request, one in [*self._requests.items()]:
            if one.last_ns >= before_ns and len(self._requests) <= most:
                break
            one.span.end(end_time=one.last_ns)
            del self._requests[request]

    @hookimpl
    def kvdock_observe(self, event: Event) -> None:
        """End all spans with the attachment."""
        if isinstance(event, PoolsDetached):
            with self._lock:
                self._end(0, 0)

    @hookimpl(wrapper=True)
    def kvdock_batch_io(
        self, batch: Batch
    ) -> Generator[None, BatchResult, BatchResult]:
        """Put a span around the backend's call."""
        above = self._request_span()
        span = self._tracer.start_span(
            f"kvdock.{batch.operation}", context=above.context if above else None
        )
        if not span.is_recording():
            return (yield)
        span.set_attributes(
            {
                "kvdock.backend": self._backend,
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
            if above is not None:
                above.last_ns = time.time_ns()


observer = Observer(
    name="tracing",
    summary="an OpenTelemetry span for each request and batch",
    build=lambda _: Tracing(),
    needs="kvdock[tracing]",
)

"""Spans of a server's requests.

Each request has a span while the log handles it: an HTTP request, a gRPC call, or a write over a WebSocket. The span
continues the client's trace (`traceparent`). If the `traceparent` is invalid, the span starts a new trace, as W3C Trace
Context requires.
Health checks, metrics, and connections that stay open have no span.

Only a server with tracing sets `AuthGate.tracer`, and only then does this module import OpenTelemetry.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from oncelog.engine.tracing import Tracer

if TYPE_CHECKING:
    from opentelemetry.trace import Span


class RequestTracer:
    """Creates the spans of a server's requests."""

    def __init__(self, tracer: Tracer) -> None:
        from opentelemetry import propagate, trace  # noqa: PLC0415 - see above

        self._otel = tracer.otel
        self._trace = trace
        self._extract = propagate.extract
        self.header_names = tuple(sorted(propagate.get_global_textmap().fields))
        """Names of the headers that carry a trace context. `OTEL_PROPAGATORS` selects them."""

    def start(self, name: str, carrier: Mapping[str, str], attributes: Mapping[str, Any]) -> "RequestSpan":
        """Start the span of a request. `carrier` contains the client's trace context, if the client sent one."""
        kind = self._trace.SpanKind.SERVER
        return RequestSpan(self._trace, self._otel.start_span(name, self._extract(carrier), kind, attributes))


class RequestSpan:
    """The span of one request."""

    def __init__(self, trace: Any, span: "Span") -> None:
        self._trace = trace
        self._span = span

    def activate(self) -> AbstractContextManager[Any]:
        """Return a context manager that makes this span the parent of the spans started in its block."""
        manager: AbstractContextManager[Any] = self._trace.use_span(
            self._span, record_exception=False, set_status_on_exception=False
        )
        return manager

    def end(self, error: str = "", *, is_fault: bool = False, **attributes: Any) -> None:
        """End the span. `error` is the kind of failure, and `is_fault` says whether the server caused it.

        In names of attributes, `__` stands for a dot.
        """
        for name, value in attributes.items():
            self._span.set_attribute(name.replace("__", "."), value)
        if error:
            self._span.set_attribute("error.type", error)
        if is_fault:
            self._span.set_status(self._trace.Status(self._trace.StatusCode.ERROR))
        self._span.end()

"""OpenTelemetry's SDK with an exporter in memory, and the spans that it has received."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

TRACE_ID: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
TRACEPARENT: Final = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
"""A sampled trace context of a client, from the examples of W3C Trace Context."""
UNSAMPLED: Final = f"00-{TRACE_ID}-00f067aa0ba902b7-00"
INVALID: Final = (
    "",
    "nonsense",
    f"00-{TRACE_ID}-00f067aa0ba902b7",
    f"00-{'0' * 32}-00f067aa0ba902b7-01",
    f"00-{TRACE_ID}-{'0' * 16}-01",
    f"ff-{TRACE_ID}-00f067aa0ba902b7-01",
    f"00-{TRACE_ID.upper()}é-00f067aa0ba902b7-01",
)
"""Values that W3C Trace Context requires a receiver to ignore."""


class Traces:
    """A tracer provider, and its spans."""

    def __init__(self, sampler: Sampler | None = None) -> None:
        self.provider = TracerProvider(sampler, shutdown_on_exit=False)
        self._exporter = InMemorySpanExporter()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def named(self, name: str) -> list[ReadableSpan]:
        """Return all finished spans with a name, in the order of their end."""
        return [span for span in self._exporter.get_finished_spans() if span.name == name]

    def names(self) -> list[str]:
        return [span.name for span in self._exporter.get_finished_spans()]

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Run the block in a span of the application."""
        with self.provider.get_tracer("application").start_as_current_span(name):
            yield


def traceparent(span: ReadableSpan) -> str:
    context = span.get_span_context()
    assert context is not None
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def trace_id(span: ReadableSpan) -> str:
    return traceparent(span).split("-")[1]


def span_id(span: ReadableSpan) -> str:
    return traceparent(span).split("-")[2]


def parent_id(span: ReadableSpan) -> str:
    """Return the id of the parent span, or "" for the first span of a trace."""
    return "" if span.parent is None else f"{span.parent.span_id:016x}"


def link_ids(span: ReadableSpan) -> set[str]:
    """Return the ids of the linked spans."""
    return {f"{link.context.span_id:016x}" for link in span.links}

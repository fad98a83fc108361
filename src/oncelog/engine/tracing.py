"""OpenTelemetry spans of a log: group commits and deliveries.

Tracing is off unless the log is opened with it; this module imports OpenTelemetry only then. The committer remembers
the span in which a caller submits a write. The span of a group commit is a child of the first of these spans and has a
link to each of them, because a batch has writes of several traces. Records keep both contexts (`RecordTrace`), so that
the spans of their delivery, in any process, continue the trace of the request and link to the commit.

A span exists only for sampled requests. A write whose trace is not sampled costs one lookup of the current span.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from oncelog.core.values import Record
from oncelog.errors import SettingsError
from oncelog.storage.store import BatchResult, BatchTraces

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, TracerProvider

INSTALL: Final = "pip install 'oncelog[opentelemetry]'"
LINKS_MAX: Final = 128
"""Maximum number of links in a span. The SDK has the same default limit."""


class Tracer:
    """Creates the spans of one log. Raises SettingsError if OpenTelemetry is not installed."""

    def __init__(self, provider: "TracerProvider | None" = None) -> None:
        """Use the tracer provider, or the global one of the process for None."""
        try:
            from opentelemetry import trace  # noqa: PLC0415 - the extra may be missing, and most logs have no tracing
            from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415
                TraceContextTextMapPropagator,
            )

            from oncelog.version import __version__  # noqa: PLC0415 - reads the package's metadata
        except ImportError as error:
            raise SettingsError(f"tracing needs OpenTelemetry: {INSTALL}") from error
        self._trace = trace
        self._extract = TraceContextTextMapPropagator().extract
        self.otel = trace.get_tracer("oncelog", __version__, provider)
        """OpenTelemetry's own tracer."""

    def get_submitter(self) -> "Span | None":
        """Return the span in which the caller submits a write, or None if its trace is not sampled."""
        span = self._trace.get_current_span()
        context = span.get_span_context()
        return span if context.trace_flags.sampled and context.is_valid else None

    def start_commit(self, submitters: Sequence[tuple["Span | None", int]]) -> "CommitSpan | None":
        """Start the span of a group commit, from the span and the number of items of each request in the batch.

        Returns None if no request is traced.
        """
        spans = {span.get_span_context().span_id: span for span, _ in submitters if span is not None}
        if not spans:
            return None
        traced = list(spans.values())
        span = self.otel.start_span(
            "oncelog.commit",
            self._trace.set_span_in_context(traced[0]),
            attributes={"oncelog.requests": len(submitters), "oncelog.items": sum(items for _, items in submitters)},
            links=self._to_links(one.get_span_context() for one in traced[:LINKS_MAX]),
        )
        contexts = chain.from_iterable([_format(span)] * items for span, items in submitters)
        return CommitSpan(span, traced, BatchTraces(_format(span), list(contexts)))

    def start_delivery(self, name: str, records: Iterable[Record], attributes: Mapping[str, Any]) -> "Span | None":
        """Start the span of a delivery: a child of the first traced request, with links to the requests and commits.

        Returns None if no record has a trace.
        """
        traces = [record.trace for record in records if record.trace is not None]
        if not traces:
            return None
        texts = dict.fromkeys(text for trace in traces for text in (trace.traceparent, trace.commit))
        contexts = [self._extract({"traceparent": text}) for text in list(texts)[:LINKS_MAX]]
        spans = map(self._trace.get_current_span, contexts)
        return self.otel.start_span(
            name,
            contexts[0],
            attributes={**attributes, "oncelog.traced_records": len(traces)},
            links=self._to_links(span.get_span_context() for span in spans),
        )

    def _to_links(self, contexts: Iterable["SpanContext"]) -> list[Any]:
        return [self._trace.Link(context) for context in contexts if context.is_valid]


class CommitSpan:
    """The span of one group commit."""

    def __init__(self, span: "Span", submitters: Sequence["Span"], traces: BatchTraces) -> None:
        self._span = span
        self._submitters = submitters
        self.traces = traces
        """The contexts that the store saves with the records."""

    def __enter__(self) -> None:
        """Begin the commit."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """End the span, with the error of a batch that failed."""
        if error is not None:
            from opentelemetry.trace import Status, StatusCode  # noqa: PLC0415 - see `Tracer`

            self._span.set_attribute("error.type", type(error).__name__)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()

    def describe(self, result: BatchResult) -> None:
        """Add the attributes of a durable batch to the span.

        The spans of the submitters get a link to this span, except for the first one, which is its parent.
        """
        records = result.changes.records
        self._span.set_attribute("oncelog.records", len(records))
        self._span.set_attribute("oncelog.sync_ms", round(1000 * result.sync_s, 3))
        if records:
            self._span.set_attribute("oncelog.lane", records[0].lane)
            self._span.set_attribute("oncelog.position", records[0].position)
        context = self._span.get_span_context()
        for submitter in self._submitters[1:]:
            if submitter.is_recording():
                submitter.add_link(context)


def _format(span: "Span | None") -> str:
    """Return the context of a span as a `traceparent`, or "" for None."""
    if span is None:
        return ""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

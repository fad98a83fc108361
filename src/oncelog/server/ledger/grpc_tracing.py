"""Spans of gRPC calls, and of the writes of a stream."""

from collections.abc import Mapping
from typing import Any

import grpc

from oncelog import error_codes
from oncelog.server.ledger.grpc_codec import GRPC_STATUS, SERVICE
from oncelog.server.tracing import RequestSpan, RequestTracer


def get_trace_headers(tracer: RequestTracer | None, context: Any) -> dict[str, str]:
    """Return the trace context in the metadata of a call, or nothing without tracing."""
    sent: dict[str, str] = {}
    if tracer is not None:
        for name, value in context.invocation_metadata() or ():
            if name in tracer.header_names:
                sent[name] = f"{sent[name]},{value}" if name in sent else str(value)  # two values make an invalid one
    return sent


def start_call_span(tracer: RequestTracer, method: str, headers: Mapping[str, str]) -> RequestSpan:
    """Start the span of a call, or of a write of a stream, which continues the trace in `headers`."""
    attributes = {"rpc.system": "grpc", "rpc.service": SERVICE, "rpc.method": method}
    return tracer.start(f"{SERVICE}/{method}", headers, attributes)


def end_call_span(span: RequestSpan, status: grpc.StatusCode) -> None:
    """End the span of a call or a write with its status."""
    is_fault = status is GRPC_STATUS[error_codes.SERVER_ERROR]
    error = "" if status is grpc.StatusCode.OK else status.name
    span.end(error, is_fault=is_fault, rpc__grpc__status_code=status.value[0])

"""Exports a server's spans with OpenTelemetry's SDK, which reads the standard `OTEL_` environment variables."""

import asyncio
import os
import threading
from contextlib import suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Final

from oncelog.engine.tracing import INSTALL
from oncelog.errors import SettingsError
from oncelog.server import logger
from oncelog.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

EXPORT_WAIT_S: Final = 3.0
"""How long a stopping server waits for the export of its last spans. An unreachable collector reaches this limit."""
EXPORTERS_GROUP: Final = "opentelemetry_traces_exporter"
"""Entry point group in which OpenTelemetry packages register their exporters."""


class TraceExport:
    """The tracer provider of a server, and the shutdown of its export."""

    def __init__(self, endpoint: str | None) -> None:
        """Use the provider of the process if the application has set one; otherwise create one that exports.

        Raises SettingsError if OpenTelemetry's SDK or the exporter is not installed.
        """
        try:
            from opentelemetry import trace  # noqa: PLC0415 - only a server with tracing imports OpenTelemetry
            from opentelemetry.sdk.trace import TracerProvider as SdkProvider  # noqa: PLC0415
        except ImportError as error:
            raise SettingsError(f"tracing.enabled needs OpenTelemetry: {INSTALL}") from error
        self._own: SdkProvider | None = None
        self.provider: TracerProvider = trace.get_tracer_provider()
        if isinstance(self.provider, trace.ProxyTracerProvider):
            self.provider = self._own = _build_provider(endpoint)

    async def close(self) -> None:
        """Export the last spans, and stop. A provider that belongs to the application is left running."""
        own, self._own = self._own, None
        if own is None:
            return
        loop, is_done = asyncio.get_running_loop(), asyncio.Event()

        def shut_down() -> None:
            own.shutdown()
            with suppress(RuntimeError):  # the server has stopped waiting, and its loop is closed
                loop.call_soon_threadsafe(is_done.set)

        # Use a daemon thread: the export may wait for an unreachable collector for longer than the server does.
        threading.Thread(target=shut_down, name="oncelog-traces", daemon=True).start()
        try:
            await asyncio.wait_for(is_done.wait(), EXPORT_WAIT_S)
        except TimeoutError:
            logger.warning("the last spans were not exported: the collector does not answer")


def _build_provider(endpoint: str | None) -> Any:
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415 - as above
    from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
    from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415

    attributes = {"service.version": __version__}
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes["service.name"] = "oncelog"
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    for exporter in _load_exporters(endpoint):
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return provider


def _load_exporters(endpoint: str | None) -> list[Any]:
    """Return the exporters that `tracing.endpoint` or `OTEL_TRACES_EXPORTER` selects."""
    if endpoint is not None:
        return [_find_exporter("otlp_proto_http")(endpoint=f"{endpoint.rstrip('/')}/v1/traces")]
    names = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    return [
        _find_exporter(_get_otlp_name() if name == "otlp" else name)()
        for name in map(str.strip, names.split(","))
        if name not in ("none", "")
    ]


def _get_otlp_name() -> str:
    protocols = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
    protocol = next(filter(None, map(os.environ.get, protocols)), "http/protobuf")
    return "otlp_proto_grpc" if protocol == "grpc" else "otlp_proto_http"


def _find_exporter(name: str) -> Any:
    found = list(entry_points(group=EXPORTERS_GROUP, name=name))
    if not found:
        package = f"opentelemetry-exporter-{name.replace('_', '-')}"
        raise SettingsError(
            f"no OpenTelemetry exporter named {name} is installed: install {package}, or select another one with "
            "OTEL_TRACES_EXPORTER and OTEL_EXPORTER_OTLP_PROTOCOL"
        )
    return found[0].load()

"""A server exports its spans to an OpenTelemetry collector."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

import oncelog
from cli.server_process import DEVELOPMENT, server_process
from cli.server_process import oncelog as run_command
from deadlines import WAIT_S, soon, until
from oncelog.errors import SettingsError
from oncelog.server import trace_export
from oncelog.server.settings import TracingSettings
from server.running_server import item, serving
from traces import TRACE_ID, TRACEPARENT


class Collector:
    """A collector that receives OTLP over HTTP, like OpenTelemetry's collector."""

    def __init__(self) -> None:
        self.spans: dict[str, Any] = {}
        """Received spans by name."""
        self.resource: dict[str, str] = {}
        self.paths: list[str] = []
        self.url = ""
        self.is_requested = asyncio.Event()
        self.is_released = asyncio.Event()
        """While this event is not set, the collector hangs: it answers no request."""
        self.is_released.set()

    async def receive(self, request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        self.is_requested.set()
        await self.is_released.wait()
        self.paths.append(request.path)
        for resource_spans in sent.resource_spans:
            self.resource |= {one.key: one.value.string_value for one in resource_spans.resource.attributes}
            for scope in resource_spans.scope_spans:
                self.spans |= {span.name: span for span in scope.spans}
        return web.Response(content_type="application/x-protobuf")


@asynccontextmanager
async def collecting() -> AsyncIterator[Collector]:
    collector = Collector()
    app = web.Application()
    app.router.add_post("/{path:.*}", collector.receive)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    collector.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield collector
    finally:
        await runner.cleanup()


async def test_stopping_server_has_exported_all_spans(tmp_path: Path) -> None:
    async with collecting() as collector:
        tracing = TracingSettings(enabled=True, endpoint=f"{collector.url}/")
        async with serving(tmp_path, tracing=tracing) as served:
            answer = await served.submit(item(1), headers={"traceparent": TRACEPARENT})
            assert answer.status == 200
    assert {"POST /v1/events", "oncelog.commit"} <= set(collector.spans)
    assert {span.trace_id.hex() for span in collector.spans.values()} == {TRACE_ID}
    assert set(collector.paths) == {"/v1/traces"}
    assert collector.resource["service.name"] == "oncelog"
    assert collector.resource["service.version"] == oncelog.__version__


async def test_environment_variables_select_collector_service_and_sampler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_SERVICE_NAME", "shop-log")
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
        async with serving(tmp_path, tracing=TracingSettings(enabled=True)) as served:
            assert (await served.submit(item(1))).status == 200
            assert (await served.submit(item(2), headers={"traceparent": TRACEPARENT})).status == 200
    assert {span.trace_id.hex() for span in collector.spans.values()} == {TRACE_ID}
    assert collector.resource["service.name"] == "shop-log"


async def test_hanging_collector_delays_neither_writes_nor_the_stop_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(trace_export, "EXPORT_WAIT_S", 0.01)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", str(WAIT_S))
    async with collecting() as collector:
        collector.is_released.clear()
        try:
            tracing = TracingSettings(enabled=True, endpoint=collector.url)
            async with serving(tmp_path, tracing=tracing) as served:
                assert (await served.submit(item(1))).status == 200
            assert "the last spans were not exported" in caplog.text
            assert not collector.spans
            await soon(collector.is_requested.wait())
            assert not collector.spans, "the export still hangs"
        finally:
            collector.is_released.set()
        await until(lambda: "oncelog.commit" in collector.spans)


async def test_serve_exports_spans_by_setting(tmp_path: Path) -> None:
    async with collecting() as collector:
        options = ("--set=tracing.enabled=true", f"--set=tracing.endpoint={collector.url}")
        async with server_process(tmp_path, *DEVELOPMENT, *options) as server, aiohttp.ClientSession() as session:
            request = session.post(
                f"{server.url}/v1/events", json={"events": [item(1)]}, headers={"traceparent": TRACEPARENT}
            )
            assert (await soon(request)).status == 200
            assert await asyncio.to_thread(server.stop) == 0
    assert {"POST /v1/events", "oncelog.commit"} <= set(collector.spans)


def test_serve_refuses_an_endpoint_that_is_not_a_url() -> None:
    result = run_command("serve", *DEVELOPMENT, "--set=tracing.endpoint=ftp://collector")
    assert result.returncode != 0
    assert "tracing.endpoint must have the form http://host[:port][/path]" in result.stderr


@pytest.mark.parametrize("endpoint", ["collector:4318", "http://", "http://user:secret@host", "http://host?x=1", ""])
def test_endpoint_must_be_a_url_without_credentials(endpoint: str) -> None:
    with pytest.raises(SettingsError, match="endpoint must have the form") as caught:
        TracingSettings(endpoint=endpoint)
    assert "secret" not in str(caught.value)


async def test_missing_exporter_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin_json")
    with pytest.raises(SettingsError, match="install opentelemetry-exporter-zipkin-json, or select another"):
        async with serving(tmp_path, tracing=TracingSettings(enabled=True)):
            raise AssertionError("the server must not start")


async def test_exporters_can_be_turned_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    async with serving(tmp_path, tracing=TracingSettings(enabled=True)) as served:
        assert (await served.submit(item(1))).status == 200


async def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(
        SettingsError, match=r"tracing.enabled needs OpenTelemetry: pip install 'oncelog\[opentelemetry\]'"
    ):
        async with serving(tmp_path, tracing=TracingSettings(enabled=True)):
            raise AssertionError("the server must not start")
    with pytest.raises(SettingsError, match=r"tracing needs OpenTelemetry: pip install 'oncelog\[opentelemetry\]'"):
        oncelog.open(tmp_path / "t.db", tracing=True)

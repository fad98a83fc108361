"""Access to metrics: anonymous callers see neither tenant names nor usage."""

import asyncio
import logging
import threading
from asyncio import open_connection
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deadlines import WAIT_S, soon, turns, until
from oncelog import Tenant
from oncelog.errors import SettingsError, StoreUnavailableError
from oncelog.server import operator_endpoints
from oncelog.server.limits import METRICS_CONNECTIONS_MAX
from oncelog.server.settings import GeneralSettings
from oncelog.storage.figures import LogFigures, read_figures
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.inspect.sqlite import FileView
from oncelog.storage.sqlite import database_file
from oncelog.testing.clock import ManualClock
from server.auth.auth_material import token
from server.running_server import serving

TENANTS = (Tenant("acme", records_max=5),)
SHOWN = b'oncelog_tenant_records_max{tenant="acme"} 5.0'


async def test_metrics_need_a_credential_with_the_grant(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, tenants=TENANTS) as served:
        anonymous = await served.get("/metrics")
        assert anonymous.refusal == (401, "auth_failed")
        other = await served.get("/metrics", credential=token(grants={"read": ["acme/*"], "write": ["*"]}))
        assert other.refusal == (403, "forbidden")
        assert b"acme" not in anonymous.body + other.body
        for grant in ("oncelog/metrics", "oncelog/*", "*"):
            scraped = await served.get("/metrics", credential=token(sub="prometheus", grants={"read": [grant]}))
            assert scraped.status == 200
            assert SHOWN in scraped.body


async def test_metrics_are_public_in_development_mode_or_by_setting(tmp_path: Path) -> None:
    async with serving(tmp_path, tenants=TENANTS) as served:
        assert SHOWN in (await served.get("/metrics")).body
    async with serving(tmp_path, tokens=True, tenants=TENANTS, metrics_public=True) as served:
        assert b"oncelog_queue_items 0.0" in (await served.get("/metrics")).body


async def test_public_metrics_show_names_only_to_callers_with_the_grant(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, tenants=TENANTS, metrics_public=True) as served:
        await served.server.log.commit_cursor("acme-mailer", 0)
        anonymous = await served.get("/metrics")
        assert anonymous.status == 200
        assert b"acme" not in anonymous.body
        assert b"oncelog_consumers 1.0" in anonymous.body
        scraped = await served.get("/metrics", credential=token(grants={"read": ["oncelog/metrics"]}))
        assert SHOWN in scraped.body
        assert b'oncelog_consumer_lag_records{consumer="acme-mailer",stream=""} ' in scraped.body
        other = await served.get("/metrics", credential=token(grants={"read": ["acme/*"]}))
        assert other.refusal == (403, "forbidden")
        assert (await served.get("/metrics", credential="wrong")).refusal == (401, "auth_failed")


async def test_metrics_port_serves_only_metrics_and_health(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, tenants=TENANTS, metrics_port=0) as served:
        inner = f"http://127.0.0.1:{served.server.metrics_listener.port}"
        assert served.server.metrics_listener.port not in (0, served.port)
        async with served.session.get(f"{inner}/metrics") as response:
            assert SHOWN in await response.read()
            assert response.headers["Server"] == "oncelog"
        for path, status in (("/healthz", 200), ("/readyz", 200), ("/v1/events", 404), ("/openapi.json", 404)):
            async with served.session.get(inner + path) as response:
                assert response.status == status
        good = token(grants={"read": ["*"]})
        assert (await served.get("/metrics", credential=good)).status == 404


@pytest.mark.rule("CO-27")
async def test_metrics_port_limits_its_connections(tmp_path: Path) -> None:
    clock = ManualClock(0)
    async with serving(tmp_path, metrics_port=0, clock=clock) as served, AsyncExitStack() as stack:
        listener = served.server.metrics_listener
        opened = [await open_connection("127.0.0.1", listener.port) for _ in range(METRICS_CONNECTIONS_MAX)]
        await until(lambda: len(listener._limiter) == METRICS_CONNECTIONS_MAX)
        for _, writer in opened:
            stack.callback(writer.close)
        async with served.session.get(f"http://127.0.0.1:{listener.port}/metrics") as response:
            shown = (await response.read()).decode()
        assert await soon(opened[0][0].read()) == b""
        for reason, count in (("connections_max", 0), ("evicted", 1), ("timeout", 0)):
            assert f'oncelog_connections_refused_total{{reason="{reason}"}} {count}.0' in shown
        assert "oncelog_unauthenticated_connections 0.0" in shown
        clock.advance(served.server.settings.api_limits.connect_timeout_ms + 1)
        listener.close_expired()
        assert await soon(opened[1][0].read()) == b""
        assert len(listener._limiter) == 0


async def test_metrics_port_in_use_is_refused_at_start(tmp_path: Path) -> None:
    async with serving(tmp_path, metrics_port=0) as served:
        port = served.server.metrics_listener.port
        with pytest.raises(SettingsError, match=f"cannot listen for metrics on 127.0.0.1:{port}"):
            async with serving(tmp_path, metrics_port=port):
                pass


@pytest.mark.parametrize("wrong", [{"metrics_port": 65_536}, {"metrics_port": -1}, {"metrics_host": "a b"}])
def test_settings_of_the_metrics_port_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(SettingsError, match=next(iter(wrong))):
        GeneralSettings(**wrong)  # type: ignore[arg-type]


async def test_figures_need_a_credential_with_the_grant(tmp_path: Path) -> None:
    async with serving(tmp_path, tokens=True, tenants=TENANTS) as served:
        anonymous = await served.get("/v1/stats")
        assert anonymous.refusal == (401, "auth_failed")
        other = await served.get("/v1/stats", credential=token(grants={"read": ["acme/*"], "write": ["*"]}))
        assert other.refusal == (403, "forbidden")
        assert b"acme" not in anonymous.body + other.body
        found = await served.get("/v1/stats", credential=token(grants={"read": ["oncelog/metrics"]}))
        assert found.status == 200
        assert found.json["tenants"][0] | {"bytes": 0, "records": 0} == {
            **msgspec.structs.asdict(TENANTS[0]),
            "bytes": 0,
            "records": 0,
        }


async def test_requests_for_figures_share_a_reading_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = []

    def read(log: str, *, is_open_here: bool) -> LogFigures:
        readings.append(log)
        if len(readings) == 2:
            raise StoreUnavailableError("the disk does not answer")
        return read_figures(log, is_open_here=is_open_here)

    monkeypatch.setattr(operator_endpoints, "read_figures", read)
    clock = ManualClock()
    async with serving(tmp_path, clock=clock) as served:
        operators: Any = served.server._operators
        first, second = await asyncio.gather(operators._read_stats(None), operators._read_stats(None))
        assert first == second
        clock.advance(operator_endpoints.STATS_SHARED_MS - 1)
        assert (await served.get("/v1/stats")).body == first
        assert len(readings) == 1
        clock.advance(1)
        unreadable = await served.get("/v1/stats")
        assert (unreadable.refusal, unreadable.headers["Retry-After"]) == ((503, "server_busy"), "1")
        assert (await served.get("/v1/stats")).status == 200, "an error is not shared"
        assert len(readings) == 3
        counted = {labels for labels in served.server.counts.requests if labels[0] in {"events", "operators"}}
        assert counted == {("operators", "http", "ok"), ("operators", "http", "server_busy")}


async def test_request_at_the_end_of_a_reading_shares_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readings = []

    def read(log: str, *, is_open_here: bool) -> LogFigures:
        readings.append(log)
        return read_figures(log, is_open_here=is_open_here)

    monkeypatch.setattr(operator_endpoints, "read_figures", read)
    clock = ManualClock()
    clock.advance(10 * operator_endpoints.STATS_SHARED_MS)
    async with serving(tmp_path, clock=clock) as served:
        operators: Any = served.server._operators
        first = asyncio.ensure_future(operators._read_stats(None))
        await asyncio.sleep(0)
        while not operators._stats.done():  # before the callbacks of the reading run
            await turns(1)
        assert await operators._read_stats(None) == await first
    assert len(readings) == 1


async def test_unreadable_size_of_the_file_makes_the_figures_unavailable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def read(log: str, *, is_open_here: bool) -> LogFigures:
        with create_inspector(log, is_open_here=is_open_here).open_view() as view:
            assert isinstance(view, FileView)
            view._path = tmp_path / "missing.db"
            view.get_sizes()
        raise AssertionError

    monkeypatch.setattr(operator_endpoints, "read_figures", read)
    caplog.set_level(logging.DEBUG, "oncelog.doors")  # the level if an earlier test reported an outage
    async with serving(tmp_path) as served:
        assert (await served.get("/v1/stats")).refusal == (503, "server_busy")
    assert "missing.db cannot be read: No such file or directory" in caplog.text
    assert "Traceback" not in caplog.text


async def test_request_for_figures_does_not_wait_longer_for_the_store_than_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings, may_read = [], threading.Event()

    def read(log: str, *, is_open_here: bool) -> LogFigures:
        readings.append(log)
        assert may_read.wait(WAIT_S)
        return read_figures(log, is_open_here=is_open_here)

    monkeypatch.setattr(operator_endpoints, "read_figures", read)
    async with serving(tmp_path, clock=ManualClock()) as served:
        with monkeypatch.context() as impatient:
            impatient.setattr(operator_endpoints, "STATS_TIMEOUT_S", 0.001)
            waited = await served.get("/v1/stats")
        assert (waited.refusal, waited.headers["Retry-After"]) == ((503, "server_busy"), "1")
        may_read.set()
        assert (await served.get("/v1/stats")).status == 200
    assert len(readings) == 1, "the first reading continues"


async def test_figures_leave_the_open_file_to_sqlite_without_a_list_of_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: str) -> bytes:
        raise AssertionError(f"closing {path} would drop the locks of this process")

    async with serving(tmp_path) as served:
        monkeypatch.setattr(database_file, "_is_locked_by_process", lambda _: False)
        monkeypatch.setattr(database_file, "_read_header", refuse)
        assert (await served.get("/v1/stats")).status == 200

"""Every API refuses new writes with a full disk, in read-only mode and above a tenant quota."""

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from cli.server_process import ServerProcess, oncelog
from cli.server_process import serving as process
from databases import BOTH_STORES, SQLITE
from deadlines import WAIT_S, soon, until
from oncelog.client import Client
from oncelog.client.deltas import DeltasClient
from oncelog.client.ledger import LedgerClient
from oncelog.core.limits import QUOTA_RETRY_AFTER_MS
from oncelog.core.operations import SetEntity
from oncelog.core.tenants import Tenant
from oncelog.engine import committer
from oncelog.engine.write_gate import DISK_DEFAULTS, RETRY_AFTER_MS
from oncelog.storage.sqlite.database_file import SqliteDriver
from oncelog.testing.clock import ManualClock
from server.chat.chat_servers import ChatServer, message_uuid
from server.deltas.delta_servers import Gateway, change, refusal
from server.ledger.ledger_servers import LedgerServer
from server.ledger.ledger_transports import GRPC, HTTP, CallError, code, expect_success, put
from server.ledger.write_streams import open_stream, write_of
from server.running_server import Serving, item, serving

Refusal = tuple[str, dict[str, Any]]
"""The code and details of an error."""
Write = Callable[[int], Awaitable[Refusal | None]]
"""Sends the write with this number, and returns the error or None. Equal numbers send equal writes."""

WAYS: Final = (
    "events ws",
    "events http",
    "ledger grpc",
    "ledger stream",
    "ledger http",
    "deltas",
    "chat ws",
    "chat http",
)
MIB: Final = 2**20


@asynccontextmanager
async def write_functions_of(served: Serving) -> AsyncIterator[dict[str, Write]]:  # noqa: C901 - one function per API
    """Return a write function for each of the server's APIs."""
    socket = await served.connected()
    ledger = LedgerServer(served, GRPC)
    stream = open_stream(ledger)
    chats = ChatServer(served)
    await chats.create("acme", "ann")
    device = await chats.connect("ann")
    gateway = Gateway(served.session, served.url, "acme")

    async def by_socket(number: int) -> Refusal | None:
        payload = await socket.request("submit_events", {"events": [item(number, "acme/a")]})
        return (payload["code"], payload["details"]) if "code" in payload else None

    async def by_http(number: int) -> Refusal | None:
        answer = await served.submit(item(number, "acme/b"))
        return None if answer.status == 200 else (answer.error["code"], answer.error["details"])

    def by_ledger(kind: str) -> Write:
        async def write(number: int) -> Refusal | None:
            to = ledger.ledger("acme", kind, f"client-{number}").through(ledger.wire(kind))
            try:
                answer = await to.write(1, put("k", b"v"), key=number.to_bytes(16, "big"))
            except CallError as error:
                return error.code, dict(error.details)
            if code(answer) != "ALREADY_COMMITTED":  # the answer to a retry that the store recognizes
                expect_success(answer)
            return None

        return write

    async def by_stream(number: int) -> Refusal | None:
        write = write_of(1, put("k", b"v"), organization="acme", vault="stream", client_id=f"client-{number}")
        (answer,) = await stream.request({**write, "idempotency_key": number.to_bytes(16, "big")})
        if isinstance(answer, CallError):
            return answer.code, dict(answer.details)
        if code(answer) != "ALREADY_COMMITTED":
            expect_success(answer)
        return None

    async def by_delta(number: int) -> Refusal | None:
        answer = await gateway.push(change(number, a=number))
        if answer.status == 200:
            return None
        refusal(answer)
        return answer.json["code"].lower(), answer.json

    async def by_device(number: int) -> Refusal | None:
        answer = await device.send("acme", number)
        return (answer["code"].lower(), answer) if answer["type"] == "error" else None

    async def by_message(number: int) -> Refusal | None:
        body = {"client_message_id": message_uuid(number), "content": "hello"}
        answer = await chats.http("POST", "/v1/chats/acme/messages", "ann", body)
        error = answer.json.get("error", {})
        return None if answer.status in (200, 201) else (error["code"].lower(), error)

    try:
        yield {
            "events ws": by_socket,
            "events http": by_http,
            "ledger grpc": by_ledger(GRPC),
            "ledger stream": by_stream,
            "ledger http": by_ledger(HTTP),
            "deltas": by_delta,
            "chat ws": by_device,
            "chat http": by_message,
        }
    finally:
        await ledger.close()


# --- read-only ---------------------------------------------------------------------------------------------


@BOTH_STORES
@pytest.mark.rule("CO-15", "CO-18", "CO-30")
async def test_read_only_server_refuses_new_writes_in_every_api_and_answers_retries(tmp_path: Path) -> None:
    async with serving(tmp_path, cache_entries_max=0) as served, write_functions_of(served) as write_functions:
        assert list(write_functions) == list(WAYS)
        for number, write in enumerate(write_functions.values(), 1):
            assert await write(number) is None
        served.server.log.set_read_only()
        for number, write in enumerate(write_functions.values(), 1):
            word, details = (await write(number + 100)) or ("", {})
            assert word == "read_only"
            assert str(details.get("retry_after_ms", details.get("retryAfterMs"))) == str(RETRY_AFTER_MS)
            assert await write(number) is None, "a retry"
        answer = await served.submit(item(200, "acme/b"))
        assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
        assert (await served.page("acme/a", "acme/b")).status == 200
        gateway = Gateway(served.session, served.url, "acme")
        assert await gateway.compact(keep=0)
        assert await served.server.log.erase(partition="acme/a") == 1
        ready = await served.get("/readyz")
        assert (ready.status, ready.json["read_only"]) == (200, "an operator has made the log read-only")
        assert metric(await measured(served), "oncelog_read_only", reason="operator") == 1
        served.server.log.set_read_only(False)
        for number, write in enumerate(write_functions.values(), 1):
            assert await write(number + 100) is None
        assert "read_only" not in (await served.get("/readyz")).json
        assert metric(await measured(served), "oncelog_read_only", reason="operator") == 0


async def test_server_is_read_only_while_the_disk_is_nearly_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 300 * MIB
    monkeypatch.setattr(SqliteDriver, "get_free_bytes", lambda *_: free)
    disk = replace(DISK_DEFAULTS, look_ms=1)
    async with serving(tmp_path, disk=disk) as served, write_functions_of(served) as write_functions:
        for number, write in enumerate(write_functions.values(), 1):
            assert await write(number) is None
        free = 256 * MIB - 1
        for number, write in enumerate(write_functions.values(), 1):
            assert ((await write(number + 100)) or ("",))[0] == "read_only"
            assert await write(number) is None
        found = await measured(served)
        assert metric(found, "oncelog_read_only", reason="free") == 1
        assert free - MIB < metric(found, "oncelog_disk_free_bytes") <= free
        free = 270 * MIB
        assert ((await write_functions["events ws"](101)) or ("",))[0] == "read_only", (
            "writes resume at a tenth more free space"
        )
        free = 300 * MIB
        for number, write in enumerate(write_functions.values(), 1):
            assert await write(number + 100) is None


# --- quotas ------------------------------------------------------------------------------------------------

TENANTS: Final = ("acme", "ledger/acme", "deltas/acme", "chat/acme")


def tenant_of(way: str) -> str:
    return {"events": "acme", "ledger": "ledger/acme", "deltas": "deltas/acme", "chat": "chat/acme"}[
        way.split(maxsplit=1)[0]
    ]


@BOTH_STORES
@pytest.mark.rule("CO-15", "CO-18", "CO-30")
@pytest.mark.parametrize("limit", ["records_max", "bytes_max", "new_writes_per_second_max"])
async def test_every_api_reports_tenant_limit_and_usage_for_an_exceeded_quota(tmp_path: Path, limit: str) -> None:
    # The clock is stopped, so the rate allows no further write as time passes.
    async with (
        serving(tmp_path, clock=ManualClock(), cache_entries_max=0) as served,
        write_functions_of(served) as write_functions,
    ):
        log = served.server.log
        await log.set_tenants([Tenant(prefix) for prefix in TENANTS])
        for number, write in enumerate(write_functions.values(), 1):
            assert await write(number) is None
        has = {tenant.prefix: usage for tenant, usage in await log.usage()}
        assert {prefix: usage.records for prefix, usage in has.items()} == dict(zip(TENANTS, (2, 3, 1, 4), strict=True))
        if limit == "new_writes_per_second_max":
            await log.set_tenants([Tenant(prefix, new_writes_per_second_max=1) for prefix in TENANTS])
            for way in ("events http", "ledger http", "deltas", "chat http"):
                assert await write_functions[way](50) is None
        else:
            field = limit.removesuffix("_max")
            await log.set_tenants([Tenant(prefix, **{limit: getattr(has[prefix], field)}) for prefix in TENANTS])
        for number, (way, write) in enumerate(write_functions.items(), 1):
            assert await write(number) is None, "a retry"
            word, details = (await write(number + 100)) or ("", {})
            wait_ms = int(details["retry_after_ms"] if "retry_after_ms" in details else details["retryAfterMs"])
            assert (details["tenant"], details["quota"]) == (tenant_of(way), limit)
            if limit == "new_writes_per_second_max":
                expected = "server_busy" if way == "events ws" else "rate_limited"  # the WebSocket remains open
                assert (word, str(details["limit"])) == (expected, "1")
                assert 1 <= wait_ms <= 1000
            else:
                used = getattr(has[tenant_of(way)], limit.removesuffix("_max"))
                assert (word, wait_ms) == ("quota_exceeded", QUOTA_RETRY_AFTER_MS)
                assert (str(details["limit"]), str(details["usage"])) == (str(used), str(used))
        assert (await served.submit(item(300, "elsewhere"))).status == 200
        if limit == "bytes_max":
            assert (await served.submit(item(301, "acme/x"))).refusal == (507, "quota_exceeded")
            assert await log.erase(partition="acme/b") == 1
            assert (await served.submit(item(1, "acme/b"))).status == 200, "erasure frees quota"


async def test_tenant_usage_and_quotas_are_exported_as_metrics(tmp_path: Path) -> None:
    tenants = (Tenant("acme", bytes_max=1000, records_max=5), Tenant("empty"))
    async with serving(tmp_path, tenants=tenants) as served:
        await served.commit(item(1, "acme"), item(2, "other"))
        found = await measured(served)
        assert metric(found, "oncelog_tenant_records", tenant="acme") == 1
        assert metric(found, "oncelog_tenant_records", tenant="empty") == 0
        assert 0 < metric(found, "oncelog_tenant_bytes", tenant="acme") < 1000
        assert metric(found, "oncelog_tenant_bytes_max", tenant="acme") == 1000
        assert metric(found, "oncelog_tenant_records_max", tenant="acme") == 5
    async with serving(tmp_path) as served:  # a server without tenants in its settings
        assert await served.server.log.usage() == []


# --- reload --------------------------------------------------------------------------------------


class Operator:
    """Edits the settings file of a server process and reads the server's state."""

    def __init__(self, served: ServerProcess, config: Path, session: aiohttp.ClientSession) -> None:
        self._served = served
        self._config = config
        self._session = session

    async def get(self, path: str) -> str:
        """Return the page. Retry while the server is not ready, which can take a moment on a slow machine."""
        async with asyncio.timeout(WAIT_S):
            while True:
                async with self._session.get(self._served.url + path) as response:
                    if response.status == 200:
                        return await response.text()

    async def submit(self, number: int) -> tuple[int, str]:
        """Submit an event and return the status and body of the answer."""
        body = {"events": [item(number, "acme")]}
        async with self._session.post(f"{self._served.url}/v1/events", json=body) as response:
            return response.status, await response.text()

    def reload(self, settings: str) -> None:
        """Write the settings file and send SIGHUP."""
        self._config.write_text(f"development = true\n{settings}")
        self._served.process.send_signal(signal.SIGHUP)

    async def until_shown(self, path: str, text: str, is_shown: bool = True) -> None:
        """Poll until the page shows the text, or no longer shows it if `is_shown` is false."""
        seen = ""

        async def is_so() -> bool:
            nonlocal seen
            seen = await self.get(path)
            return (text in seen) is is_shown

        await until(is_so, lambda: seen)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "oncelog.toml"
    path.write_text("development = true\n")
    return path


QUOTA: Final = '[[tenants]]\nprefix = "acme"\nrecords_max = 1\n'
BY_OPERATOR: Final = "an operator has made the log read-only"


async def test_sighup_reloads_the_read_only_switch_and_the_quotas(tmp_path: Path, config: Path) -> None:
    with process(tmp_path, "--config", str(config), "--quiet") as served:
        async with aiohttp.ClientSession() as session:
            operator = Operator(served, config, session)
            assert (await operator.submit(1))[0] == 200
            operator.reload("read_only = true")
            await operator.until_shown("/readyz", BY_OPERATOR)
            operator.reload("")
            await operator.until_shown("/readyz", "an operator", is_shown=False)
            operator.reload(QUOTA)
            await operator.until_shown("/metrics", 'oncelog_tenant_records_max{tenant="acme"} 1.0')
            operator.reload("read_only = 7")  # invalid settings have no effect
            operator.reload(f"read_only = true\n{QUOTA}")
            await operator.until_shown("/readyz", BY_OPERATOR)
            operator.reload(QUOTA)
            await operator.until_shown("/readyz", "an operator", is_shown=False)
            status, body = await operator.submit(2)
        assert status == 507
        assert "records_max of the tenant 'acme' is 1; it uses 1, and this request adds 1" in body
        shown = (await asyncio.to_thread(oncelog, "stats", served.store, "--json")).stdout
        [acme] = json.loads(shown)["tenants"]
        assert (acme["prefix"], acme["records"], acme["records_max"]) == ("acme", 1, 1)


async def test_command_line_read_only_overrides_the_file_at_startup_and_on_sighup(tmp_path: Path, config: Path) -> None:
    with process(tmp_path, "--config", str(config), "--quiet", "--read-only") as served:
        async with aiohttp.ClientSession() as session:
            operator = Operator(served, config, session)
            status, body = await operator.submit(1)
            assert status == 503
            assert f"new writes are refused for now: {BY_OPERATOR}" in body
            operator.reload(f"read_only = false\n{QUOTA}")
            # The quota is in the same file and is applied after the read-only switch.
            await operator.until_shown("/metrics", 'oncelog_tenant_records_max{tenant="acme"}')
            assert BY_OPERATOR in await operator.get("/readyz")


# --- clients retry -------------------------------------------------------------------------


@pytest.mark.stores(SQLITE)
async def test_clients_retry_while_the_server_is_read_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "RETRY_AFTER_READ_ONLY_MS", 5)
    async with serving(tmp_path) as served:
        log = served.server.log
        async with (
            Client(served.url, path=str(tmp_path / "events-client.db"), partitions=["acme"]) as events,
            LedgerClient(
                served.server.grpc_address, path=tmp_path / "ledger.db", organization="acme", client_id="app"
            ) as ledger,
            DeltasClient(served.url, "shop", path=str(tmp_path / "rows.db"), client_id="till") as deltas,
        ):
            log.set_read_only()
            pending = await events.submit({"type": "one"})
            written = asyncio.ensure_future(ledger.write(SetEntity("k", b"v")))
            await deltas.put("t", "r", {"a": 1})
            refused = served.server.counts
            await until(lambda: refused.requests["deltas", "http", "read_only"] > 1)
            await until(lambda: refused.requests["ledger", "grpc", "read_only"] > 1)
            log.set_read_only(False)
            await soon(pending.outcome())
            await soon(written)
            await soon(deltas.synced())


# --- metrics -----------------------------------------------------------------------------------------------


async def measured(served: Serving) -> str:
    return (await served.get("/metrics")).body.decode()


def metric(text: str, name: str, **labels: str) -> float:
    (found,) = [
        one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
        if one.name == name and one.labels == labels
    ]
    return found


async def test_last_quota_change_wins_while_usage_is_being_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first = (Tenant("a", bytes_max=10),)
    async with serving(tmp_path, tenants=first) as served:
        server, log = served.server, served.server.log
        counted, set_tenants = asyncio.Event(), log.set_tenants

        async def count_slowly(tenants: Sequence[Tenant], actor: str) -> bool:
            await counted.wait()
            return await set_tenants(tenants, actor)

        monkeypatch.setattr(log, "set_tenants", count_slowly)
        for bytes_max in (20, 30):
            server._reloader.apply_settings(replace(server.settings, tenants=(Tenant("a", bytes_max=bytes_max),)))
        counted.set()
        await until(lambda: server._reloader._tenants_task is None)
        assert [tenant.bytes_max for tenant, _ in await log.usage()] == [30]
        assert metric(await measured(served), "oncelog_tenant_bytes_max", tenant="a") == 30
        assert await set_tenants([])  # as if by another server
        server._reloader.apply_settings(server.settings)
        await until(lambda: server._reloader._tenants_task is None)
        assert [tenant.bytes_max for tenant, _ in await log.usage()] == [30], "the same settings restore the quota"
        assert "of 1 tenants, 1 were removed or changed" in caplog.text
        server._reloader.apply_settings(replace(server.settings, tenants=()))
        await until(lambda: server._reloader._tenants_task is None)
        assert "oncelog_tenant_bytes_max" not in await measured(served)

"""What every door says of new writes that are not taken: no room, an operator's word, a tenant's quota."""

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families

from cli.served import WAIT_S, Served, oncelog
from cli.served import serving as process
from databases import BOTH_STORES, SQLITE
from doors.chat.chat_doors import Door as ChatDoor
from doors.chat.chat_doors import message_uuid
from doors.deltas.delta_doors import Gateway, change, refusal
from doors.ledger.ledger_doors import Door
from doors.ledger.wires import GRPC, HTTP, CallError, code, put, success
from doors.serving import Serving, item, run, serving, soon, until
from oncelog.client import Client
from oncelog.client.deltas import DeltasClient
from oncelog.client.ledger import LedgerClient
from oncelog.core.limits import QUOTA_RETRY_AFTER_MS
from oncelog.core.operations import SetEntity
from oncelog.core.tenants import Tenant
from oncelog.doors.settings import DiskSettings
from oncelog.engine import committer
from oncelog.engine.room import RETRY_AFTER_MS
from oncelog.stores.sqlite.files import SqliteDriver

Told = tuple[str, dict[str, Any]]
"""Code and details of an error."""
Write = Callable[[int], Awaitable[Told | None]]
"""Makes a write of that number, the same for the same; gives the error, or None for an answer."""

WAYS: Final = ("events ws", "events http", "ledger grpc", "ledger http", "deltas", "chat ws", "chat http")
MIB: Final = 2**20


@asynccontextmanager
async def ways(served: Serving) -> AsyncIterator[dict[str, Write]]:  # noqa: C901 - one function a door
    """All doors of a server."""
    socket = await served.connected()
    ledger = Door(served, GRPC)
    chats = ChatDoor(served)
    await chats.create("acme", "ann")
    device = await chats.device("ann")
    gateway = Gateway(served.session, served.url, "acme")

    async def by_socket(number: int) -> Told | None:
        payload = await socket.ask("submit_events", {"events": [item(number, "acme/a")]})
        return (payload["code"], payload["details"]) if "code" in payload else None

    async def by_http(number: int) -> Told | None:
        answer = await served.submit(item(number, "acme/b"))
        return None if answer.status == 200 else (answer.error["code"], answer.error["details"])

    def by_ledger(kind: str) -> Write:
        async def write(number: int) -> Told | None:
            to = ledger.ledger("acme", kind, f"client-{number}").through(ledger.wire(kind))
            try:
                answer = await to.write(1, put("k", b"v"), key=number.to_bytes(16, "big"))
            except CallError as error:
                return error.code, dict(error.details)
            if code(answer) != "ALREADY_COMMITTED":  # which is what a retry is told by the store
                success(answer)
            return None

        return write

    async def by_delta(number: int) -> Told | None:
        answer = await gateway.push(change(number, a=number))
        if answer.status == 200:
            return None
        refusal(answer)
        return answer.json["code"].lower(), answer.json

    async def by_device(number: int) -> Told | None:
        answer = await device.send("acme", number)
        return (answer["code"].lower(), answer) if answer["type"] == "error" else None

    async def by_message(number: int) -> Told | None:
        body = {"client_message_id": message_uuid(number), "content": "hello"}
        answer = await chats.http("POST", "/v1/chats/acme/messages", "ann", body)
        told = answer.json.get("error", {})
        return None if answer.status in (200, 201) else (told["code"].lower(), told)

    try:
        yield {
            "events ws": by_socket,
            "events http": by_http,
            "ledger grpc": by_ledger(GRPC),
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
def test_a_server_that_takes_nothing_new_says_so_at_every_door_and_answers_what_is_known(tmp_path: Path) -> None:
    async def main() -> None:
        async with serving(tmp_path, cache_entries_max=0) as served, ways(served) as doors:
            assert list(doors) == list(WAYS)
            for number, write in enumerate(doors.values(), 1):
                assert await write(number) is None
            served.server.log.set_read_only()
            for number, write in enumerate(doors.values(), 1):
                word, details = (await write(number + 100)) or ("", {})
                assert word == "read_only"
                assert str(details.get("retry_after_ms", details.get("retryAfterMs"))) == str(RETRY_AFTER_MS)
                assert await write(number) is None, "known"
            answer = await served.submit(item(200, "acme/b"))
            assert (answer.status, answer.headers["Retry-After"]) == (503, "5")
            assert (await served.page("acme/a", "acme/b")).status == 200
            gateway = Gateway(served.session, served.url, "acme")
            assert await gateway.compact(keep=0)
            assert await served.server.log.erase(partition="acme/a") == 1
            ready = await served.get("/readyz")
            assert (ready.status, ready.json["read_only"]) == (200, "an operator has set it so")
            assert metric(await measured(served), "oncelog_read_only", reason="operator") == 1
            served.server.log.set_read_only(False)
            for number, write in enumerate(doors.values(), 1):
                assert await write(number + 100) is None
            assert "read_only" not in (await served.get("/readyz")).json
            assert metric(await measured(served), "oncelog_read_only", reason="operator") == 0

    run(main())


def test_a_server_notices_that_its_disk_is_nearly_full_and_that_it_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 300 * MIB
    monkeypatch.setattr(SqliteDriver, "free_bytes", lambda *_: free)

    async def main() -> None:
        nonlocal free
        disk = DiskSettings(look_ms=1)
        async with serving(tmp_path, disk=disk) as served, ways(served) as doors:
            for number, write in enumerate(doors.values(), 1):
                assert await write(number) is None
            free = 256 * MIB - 1
            for number, write in enumerate(doors.values(), 1):
                assert ((await write(number + 100)) or ("",))[0] == "read_only"
                assert await write(number) is None
            found = await measured(served)
            assert metric(found, "oncelog_read_only", reason="free") == 1
            assert free - MIB < metric(found, "oncelog_disk_free_bytes") <= free
            free = 270 * MIB
            assert ((await doors["events ws"](101)) or ("",))[0] == "read_only", "not before there is a tenth more"
            free = 300 * MIB
            for number, write in enumerate(doors.values(), 1):
                assert await write(number + 100) is None

    run(main())


# --- quotas ------------------------------------------------------------------------------------------------

TENANTS: Final = ("acme", "ledger/acme", "deltas/acme", "chat/acme")


def tenant_of(way: str) -> str:
    return {"events": "acme", "ledger": "ledger/acme", "deltas": "deltas/acme", "chat": "chat/acme"}[
        way.split(maxsplit=1)[0]
    ]


@BOTH_STORES
@pytest.mark.rule("CO-15", "CO-18", "CO-30")
@pytest.mark.parametrize("limit", ["records_max", "bytes_max", "new_writes_per_second_max"])
def test_every_door_says_whose_quota_it_is_how_much_and_how_much_there_is(tmp_path: Path, limit: str) -> None:
    async def main() -> None:
        async with serving(tmp_path, cache_entries_max=0) as served, ways(served) as doors:
            log = served.server.log
            await log.set_tenants([Tenant(prefix) for prefix in TENANTS])
            for number, write in enumerate(doors.values(), 1):
                assert await write(number) is None
            has = {tenant.prefix: usage for tenant, usage in await log.usage()}
            assert {prefix: usage.records for prefix, usage in has.items()} == dict(
                zip(TENANTS, (2, 2, 1, 2), strict=True)
            )
            if limit == "new_writes_per_second_max":
                await log.set_tenants([Tenant(prefix, new_writes_per_second_max=1) for prefix in TENANTS])
                for way in ("events http", "ledger http", "deltas", "chat http"):
                    assert await doors[way](50) is None
            else:
                field = limit.removesuffix("_max")
                await log.set_tenants([Tenant(prefix, **{limit: getattr(has[prefix], field)}) for prefix in TENANTS])
            for number, (way, write) in enumerate(doors.items(), 1):
                assert await write(number) is None, "known"
                word, details = (await write(number + 100)) or ("", {})
                wait_ms = int(details["retry_after_ms"] if "retry_after_ms" in details else details["retryAfterMs"])
                assert (details["tenant"], details["quota"]) == (tenant_of(way), limit)
                if limit == "new_writes_per_second_max":
                    assert (word, str(details["limit"])) == ("rate_limited", "1")
                    assert 1 <= wait_ms <= 1000
                else:
                    used = getattr(has[tenant_of(way)], limit.removesuffix("_max"))
                    assert (word, wait_ms) == ("quota_exceeded", QUOTA_RETRY_AFTER_MS)
                    assert (str(details["limit"]), str(details["usage"])) == (str(used), str(used))
            assert (await served.submit(item(300, "elsewhere"))).status == 200
            if limit == "bytes_max":
                assert (await served.submit(item(301, "acme/x"))).refusal == (507, "quota_exceeded")
                assert await log.erase(partition="acme/b") == 1
                assert (await served.submit(item(1, "acme/b"))).status == 200, "there is room again"

    run(main())


def test_quotas_are_settings_and_what_tenants_have_is_measured(tmp_path: Path) -> None:
    async def main() -> None:
        tenants = (Tenant("acme", bytes_max=1000, records_max=5), Tenant("empty"))
        async with serving(tmp_path, tenants=tenants) as served:
            await served.commit(item(1, "acme"), item(2, "other"))
            found = await measured(served)
            assert metric(found, "oncelog_tenant_records", tenant="acme") == 1
            assert metric(found, "oncelog_tenant_records", tenant="empty") == 0
            assert 0 < metric(found, "oncelog_tenant_bytes", tenant="acme") < 1000
            assert metric(found, "oncelog_tenant_bytes_max", tenant="acme") == 1000
            assert metric(found, "oncelog_tenant_records_max", tenant="acme") == 5
        async with serving(tmp_path) as served:  # whose settings have none
            assert await served.server.log.usage() == []

    run(main())


# --- an operator's hand --------------------------------------------------------------------------------------


def test_sighup_takes_the_switch_and_the_quotas_anew(tmp_path: Path) -> None:
    config = tmp_path / "oncelog.toml"
    config.write_text("development = true\n")

    async def main(served: Served) -> None:
        async with aiohttp.ClientSession() as session:

            async def shows(path: str, text: str) -> bool:
                async with session.get(served.url + path) as response:
                    return text in await response.text()

            async def become(settings: str, path: str, text: str, is_there: bool = True) -> None:
                config.write_text(f"development = true\n{settings}")
                served.process.send_signal(signal.SIGHUP)
                async with asyncio.timeout(WAIT_S):
                    while await shows(path, text) is not is_there:
                        pass

            await become("read_only = true", "/readyz", "an operator has set it so")
            await become("", "/readyz", "an operator", is_there=False)
            await become(QUOTA, "/metrics", 'oncelog_tenant_records_max{tenant="acme"} 1.0')
            # What is wrong changes nothing, and the next that is right does.
            config.write_text("development = true\nread_only = 7")
            served.process.send_signal(signal.SIGHUP)
            await become(f"read_only = true\n{QUOTA}", "/readyz", "an operator has set it so")
            await become(QUOTA, "/readyz", "an operator", is_there=False)

    with process(tmp_path, "--config", str(config), "--quiet") as served:
        assert submit(served, 1)[0] == 200
        run(main(served))
        status, told = submit(served, 2)
        assert status == 507
        assert "records_max of the tenant 'acme' is 1; it has 1, and this is 1 more" in told
        shown = oncelog("stats", served.store).stdout
        assert "tenant 'acme': " in shown
        assert ", 1 records of 1" in shown


def test_a_switch_of_the_command_line_wins_over_the_file_at_sighup_too(tmp_path: Path) -> None:
    config = tmp_path / "oncelog.toml"
    config.write_text("development = true\n")

    async def main(served: Served) -> None:
        async with aiohttp.ClientSession() as session, asyncio.timeout(WAIT_S):

            async def shown(path: str) -> str:
                async with session.get(served.url + path) as response:
                    return await response.text()

            config.write_text(f"development = true\nread_only = false\n{QUOTA}")
            served.process.send_signal(signal.SIGHUP)
            # The quota is of the same file, and is taken after the switch would be.
            while 'oncelog_tenant_records_max{tenant="acme"}' not in await shown("/metrics"):
                pass
            assert "an operator has set it so" in await shown("/readyz")

    with process(tmp_path, "--config", str(config), "--quiet", "--read-only") as served:
        run(main(served))


QUOTA: Final = '[[tenants]]\nprefix = "acme"\nrecords_max = 1\n'


def submit(served: Served, number: int) -> tuple[int, str]:
    """Status and body of what a server in another process says to an event."""

    async def main() -> tuple[int, str]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{served.url}/v1/events", json={"events": [item(number, "acme")]}) as response,
        ):
            return response.status, await response.text()

    return run(main())


def test_serve_read_only_takes_nothing_new(tmp_path: Path) -> None:
    with process(tmp_path, "--development", "--quiet", "--read-only") as served:
        status, told = submit(served, 1)
        assert status == 503
        assert "no new writes are taken for now: an operator has set it so" in told


# --- clients go on by themselves -------------------------------------------------------------------------


@pytest.mark.stores(SQLITE)
def test_clients_wait_and_go_on_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer, "RETRY_AFTER_READ_ONLY_MS", 5)

    async def main() -> None:
        async with serving(tmp_path) as served:
            log = served.server.log
            async with (
                Client(served.url, store=str(tmp_path / "events-client.db"), partitions=["acme"]) as events,
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

    run(main())


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


def test_quotas_that_are_changed_while_the_log_is_counted_are_those_wanted_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        first = (Tenant("a", bytes_max=10),)
        async with serving(tmp_path, tenants=first) as served:
            server, log = served.server, served.server.log
            counted, set_tenants = asyncio.Event(), log.set_tenants

            async def slow(tenants: Sequence[Tenant]) -> bool:
                await counted.wait()
                return await set_tenants(tenants)

            monkeypatch.setattr(log, "set_tenants", slow)
            for bytes_max in (20, 30):
                server._change(replace(server.settings, tenants=(Tenant("a", bytes_max=bytes_max),)))
            counted.set()
            await until(lambda: server._counting is None)
            assert [tenant.bytes_max for tenant, _ in await log.usage()] == [30]
            assert metric(await measured(served), "oncelog_tenant_bytes_max", tenant="a") == 30
            assert await set_tenants([])  # by another server
            server._change(server.settings)
            await until(lambda: server._counting is None)
            assert [tenant.bytes_max for tenant, _ in await log.usage()] == [30], "though the settings are the same"
            assert "of 1 tenants 1 are gone or changed" in caplog.text
            server._change(replace(server.settings, tenants=()))
            await until(lambda: server._counting is None)
            assert "oncelog_tenant_bytes_max" not in await measured(served)

    run(main())

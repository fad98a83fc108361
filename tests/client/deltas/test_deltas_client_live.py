"""The deltas client against a real server, with clients in one process and in several."""

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import pytest

from cli.server_process import server_process
from client.deltas.deltas_clients import HERE, SHORT, UNREACHABLE_URL, client_of, rows_of
from client.deltas.faulty_relay import FaultyRelay
from databases import BOTH_STORES
from deadlines import soon, until
from oncelog.client.deltas import (
    ConnectionState,
    DeltaRefusedError,
    DeltasClient,
    DeltasLimits,
    Edits,
    UpdatesLostError,
)
from oncelog.client.deltas.codec import OutboxEntry
from oncelog.client.deltas.store import DeltasStore
from oncelog.client.runtime.client import get_wall_ms
from oncelog.core.values import Rate
from oncelog.errors import ClientError, ClosedError
from oncelog.testing.clock import ManualClock
from scripts import read_line, run_until_killed, start_script
from server.running_server import Serving, api_key, serving


async def server_rows(served: Serving, table: str = "products") -> dict[tuple[str, str], Any]:
    answer = await served.get(f"/v1/sync/shop/rows/{table}?limit=1000")
    assert answer.status == 200, answer.body
    return {(table, row["rowId"]): row["columns"] for row in answer.json["rows"]}


async def compact(served: Serving, keep: int = 0) -> None:
    answer = await served.request("POST", "/v1/sync/shop/compact", json={"keep": keep})
    assert answer.status == 200, answer.body


async def deltas_count(url: str) -> int:
    """Return the number of deltas that the gateway has."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/sync/shop/pull?limit=1000") as response:
        answer = await response.json()
        assert not answer["hasMore"]
        return int(answer["cursor"])


# --- two clients


@BOTH_STORES
@pytest.mark.rule("DE-7")
async def test_edits_of_one_client_reach_the_other(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as served,
        client_of(served.url, tmp_path / "ann.db", "ann") as ann,
        client_of(served.url, tmp_path / "bob.db", "bob") as bob,
    ):
        seen, own = bob.changes("products"), ann.changes()
        made = await ann.put("products", "p1", {"name": "Tea", "price": 3.5})
        assert made is not None
        assert await ann.put("products", "p1", {"price": 3.5}) is None
        mine = await soon(anext(own))
        assert (mine.is_local, mine.before, mine.after) == (True, None, {"name": "Tea", "price": 3.5})
        change = await soon(anext(seen))
        assert (change.table, change.row_id, change.is_local) == ("products", "p1", False)
        assert (change.before, change.after) == (None, {"name": "Tea", "price": 3.5})
        await bob.put("products", "p1", {"price": 4})
        assert (await soon(anext(seen))).is_local
        theirs = await soon(anext(own))
        assert (theirs.is_local, theirs.before, theirs.after) == (
            False, {"name": "Tea", "price": 3.5}, {"name": "Tea", "price": 4}
        )  # fmt: skip
        await ann.delete("products", "p1")
        assert await ann.delete("products", "p1") is None
        gone = await soon(anext(seen))
        assert (gone.before, gone.after) == ({"name": "Tea", "price": 4}, None)
        assert await bob.row("products", "p1") is None
        await soon(ann.synced())
        status = await soon(ann.until_status(lambda status: status.state is ConnectionState.LIVE))
        assert (status.pending, status.cursor, status.last_error) == (0, 3, None)
        assert await server_rows(served) == {}
        await own.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(own)
    with pytest.raises(StopAsyncIteration):
        await anext(seen)
    assert ann.status().state is ConnectionState.CLOSED
    with pytest.raises(ClosedError):
        await ann.put("products", "p1", {})


@pytest.mark.rule("DE-6")
async def test_offline_edits_are_pushed_in_several_requests(tmp_path: Path) -> None:
    limits = DeltasLimits(**SHORT, push_deltas_max=7, page_deltas=3)
    async with client_of(UNREACHABLE_URL, tmp_path / "ann.db", "ann", limits=limits) as ann:
        for number in range(50):
            await ann.put("products", f"{number:02}", {"number": number})
        assert len(await ann.pending()) == ann.status().pending == 50
        status = await soon(ann.until_status(lambda status: status.last_error is not None))
        assert status.state is ConnectionState.OFFLINE
    async with (
        serving(tmp_path) as served,
        client_of(served.url, tmp_path / "ann.db", "ann", limits=limits) as ann,
        client_of(served.url, client_id="bob", limits=limits) as bob,
    ):
        await soon(ann.synced())
        await soon(bob.synced())
        assert ann.status().pending == 0
        assert len(await rows_of(bob)) == 50
        assert await rows_of(bob) == await rows_of(ann) == await server_rows(served)


async def test_pushes_are_split_when_the_gateway_refuses_their_size(tmp_path: Path) -> None:
    async with client_of(UNREACHABLE_URL, tmp_path / "ann.db", "ann") as ann:
        for number in range(30):
            await ann.put("products", str(number), {"text": "x" * 500})
    async with (
        serving(tmp_path, frame_bytes_max=4000) as served,
        client_of(served.url, tmp_path / "ann.db", "ann") as ann,
    ):
        await soon(ann.synced())
        assert len(await server_rows(served)) == 30
        large = await ann.put("products", "large", {"text": "x" * 5000})
        refusal = await soon(anext(ann.refusals()))
        assert (refusal.delta_id, refusal.code, refusal.row_id) == (large, "TOO_LARGE", "large")
        await ann.forget_refused()
        await soon(ann.synced())
        assert len(await rows_of(ann)) == 30


async def test_pushes_are_split_when_the_gateway_limits_the_rate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Set the burst to the rate, because the default burst would accept a push of any size after a pause.
    monkeypatch.setattr("oncelog.server.api_service.Rate", lambda per_second, burst: Rate(per_second, per_second))  # noqa: ARG005
    clock = ManualClock()
    async with (
        serving(tmp_path, clock=clock, new_events_per_second_max=200) as served,
        client_of(served.url, wall_ms=clock.wall_ms) as ann,
    ):

        def edit_many_rows(edits: Edits) -> None:
            for number in range(450):  # exceeds the burst
                edits.put("products", f"{number:03}", {"number": number})

        await ann.transact(edit_many_rows)
        await soon(ann.until_status(lambda status: "RATE_LIMITED" in str(status.last_error)))
        syncing = asyncio.create_task(soon(ann.synced()))
        while not syncing.done():
            clock.advance(1000)
            await asyncio.wait([syncing], timeout=0.01)
        await syncing
        assert ann.status().pending == 0
        assert await rows_of(ann) == await server_rows(served)


# --- refusals


def schema_file(directory: Path, **tables: Any) -> str:
    path = directory / "schemas.json"
    path.write_text(json.dumps({"shop": tables}))
    return str(path)


@BOTH_STORES
@pytest.mark.rule("DE-6")
async def test_refused_delta_blocks_only_later_deltas(tmp_path: Path) -> None:
    schemas = schema_file(tmp_path, products={"price": "number"})
    async with client_of(UNREACHABLE_URL, tmp_path / "ann.db", "ann") as ann:
        await ann.put("products", "1", {"price": 1})
        bad = await ann.put("products", "1", {"price": "much"})
        await ann.put("products", "2", {"price": 2})
    async with (
        serving(tmp_path, deltas_schemas=schemas) as served,
        client_of(served.url, tmp_path / "ann.db", "ann") as ann,
    ):
        refusals = ann.refusals()
        refusal = await soon(anext(refusals))
        assert (refusal.delta_id, refusal.table, refusal.row_id) == (bad, "products", "1")
        assert refusal.code == "INVALID"
        assert "price" in refusal.message
        await soon(ann.until_status(lambda status: status.pending == 2))
        assert await server_rows(served) == {("products", "1"): {"price": 1}}
        with pytest.raises(DeltaRefusedError, match="INVALID") as raised:
            await soon(ann.synced())
        assert raised.value.refusal.delta_id == bad
        assert ([one.delta_id for one in ann.refused()], ann.status().refused) == ([bad], 1)
        for call in (ann.send_again("00" * 32), ann.forget_refused("00" * 32)):
            with pytest.raises(ClientError, match=r"no refused delta has the id 0{64}"):
                await call
        assert await ann.row("products", "1") == {"price": "much"}
        with pytest.raises(ClientError, match="1 of the deltas are not in the outbox"):
            await ann.withdraw("00" * 32)
        with pytest.raises(ClientError, match="64 hexadecimal digits"):
            await ann.withdraw("x")
        changes = ann.changes()
        assert bad is not None
        await ann.withdraw(bad)
        await soon(ann.synced())
        await ann.forget_refused()
        change = await soon(anext(changes))
        assert (change.before, change.after, change.is_local) == ({"price": "much"}, {"price": 1}, False)
        assert await rows_of(ann) == await server_rows(served)
        assert ann.status().refusal is None
        assert not ann.status().is_resetting
        assert len(await rows_of(ann)) == 2


async def test_delta_withdrawn_while_the_next_push_is_read_is_not_pushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    limits = DeltasLimits(**{**SHORT, "refused_pause_ms_min": 600_000, "refused_pause_ms_max": 600_000})
    async with client_of(UNREACHABLE_URL, tmp_path / "ann.db", "ann") as ann:
        bad = await ann.put("products", "1", {"price": "much"})
    assert bad is not None
    list_pending = DeltasStore.list_pending

    def list_and_withdraw(store: DeltasStore, *bounds: Any) -> list[OutboxEntry]:
        found = list_pending(store, *bounds)
        if store.discard([bytes.fromhex(bad)]):
            loop.call_soon_threadsafe(ann._pusher.on_discarded)
        return found

    monkeypatch.setattr(DeltasStore, "list_pending", list_and_withdraw)
    async with (
        serving(tmp_path, deltas_schemas=schema_file(tmp_path, products={"price": "number"})) as served,
        client_of(served.url, tmp_path / "ann.db", "ann", limits=limits) as ann,
    ):
        await soon(ann.synced())
        assert ann.status().refusal is None
        assert await server_rows(served) == {}


async def test_refusal_is_cleared_when_the_delta_is_accepted(tmp_path: Path) -> None:
    limits = DeltasLimits(**{**SHORT, "refused_pause_ms_min": 600_000, "refused_pause_ms_max": 600_000})
    schemas = schema_file(tmp_path, products={"price": "number"})
    async with (
        serving(tmp_path, deltas_schemas=schemas) as served,
        client_of(served.url, tmp_path / "ann.db", "ann", limits=limits) as ann,
    ):
        await ann.put("products", "1", {"name": "Tea"})
        await soon(ann.until_status(lambda status: status.refusal is not None))
        schema_file(tmp_path, products={"name": "text"})
        served.server.reload()
        await ann.send_again(ann.refused()[0].delta_id)
        await soon(ann.until_status(lambda status: status.refusal is None))
        await soon(ann.until_settled())
        await soon(ann.synced())
        assert await server_rows(served) == {("products", "1"): {"name": "Tea"}}


async def test_refused_credentials_are_reported_and_retried(tmp_path: Path) -> None:
    async with serving(tmp_path, api_keys=True) as served:
        token = "wrong"  # noqa: S105
        async with client_of(served.url, tmp_path / "ann.db", "ann", token=lambda: token) as ann:
            await ann.put("products", "1", {"name": "Tea"})
            status = await soon(ann.until_status(lambda status: status.state is ConnectionState.REFUSED))
            assert status.refusal is None
            assert "AUTH_FAILED" in str(status.last_error)
            rights = ["deltas/shop"]
            token = api_key(served, "ann", read=rights, write=rights).text
            await soon(ann.synced())
            status = await soon(ann.until_status(lambda status: status.state is ConnectionState.LIVE))
            assert status.pending == 0
            other = api_key(served, "bob", read=rights, write=rights).text
            async with client_of(served.url, client_id="carl", token=other) as carl:
                await carl.put("products", "1", {"name": "Tea"})
                assert (await soon(anext(carl.refusals()))).code == "FORBIDDEN"


@pytest.mark.rule("DE-8")
async def test_client_with_a_fast_clock_waits_for_the_gateway_clock(tmp_path: Path) -> None:
    clock = ManualClock()
    async with serving(tmp_path, clock=clock) as served:
        ahead = 0
        async with client_of(served.url, tmp_path / "ann.db", "ann", wall_ms=lambda: clock.wall_ms() + ahead) as ann:
            await ann.put("products", "1", {"name": "Tea"})
            await soon(ann.synced())
            ahead = 60_000
            await ann.put("products", "2", {"name": "Tea"})
            status = await soon(ann.until_status(lambda status: status.clock_wait_ms > 0))
            assert (status.clock_wait_ms, status.pending, status.refusal) == (55_000, 1, None)
            clock.advance(59_000)
            await soon(ann.synced())
            assert ann.status().clock_wait_ms == 0
            assert len(await server_rows(served)) == 2


@pytest.mark.rule("DE-8")
async def test_client_with_a_slow_clock_does_not_lose_edits(tmp_path: Path) -> None:
    async with (
        serving(tmp_path) as served,
        client_of(served.url, client_id="ann", wall_ms=lambda: get_wall_ms() + 4000) as ann,
        client_of(served.url, client_id="bob", wall_ms=lambda: get_wall_ms() - 86_400_000) as bob,
    ):
        await ann.put("products", "1", {"name": "Tea"})
        await soon(ann.synced())
        await soon(bob.synced())
        await bob.put("products", "1", {"name": "Coffee"})
        await soon(bob.synced())
        await soon(ann.synced())
        assert await ann.row("products", "1") == {"name": "Coffee"}


# --- compaction and history changes


@BOTH_STORES
@pytest.mark.rule("DE-12")
async def test_client_behind_the_compaction_reads_a_snapshot(tmp_path: Path) -> None:
    limits = DeltasLimits(**SHORT, page_rows=2)
    async with serving(tmp_path) as served, client_of(served.url, tmp_path / "ann.db", "ann") as ann:
        async with client_of(served.url, tmp_path / "bob.db", "bob", limits=limits) as bob:
            await ann.put("products", "0", {"name": "old", "kept": True})
            await soon(ann.synced())
            await soon(bob.synced())
        for number in range(7):
            await ann.put("products", str(number), {"name": f"new {number}"})
        await ann.delete("products", "3")
        await soon(ann.synced())
        await compact(served)
        async with client_of(UNREACHABLE_URL, tmp_path / "bob.db", "bob", limits=limits) as bob:
            await bob.put("products", "5", {"mine": 1})
        async with client_of(served.url, tmp_path / "bob.db", "bob", limits=limits) as bob:
            await soon(bob.synced())
            assert bob.status().history_change is None
            await soon(ann.synced())
            assert await rows_of(bob) == await rows_of(ann) == await server_rows(served)
            assert await bob.row("products", "5") == {"name": "new 5", "mine": 1}
            assert await bob.row("products", "0") == {"name": "new 0", "kept": True}
            await ann.put("products", "8", {"name": "live"})
            await soon(ann.synced())
            await until(lambda: bob.status().cursor == ann.status().cursor)
            assert await bob.row("products", "8") == {"name": "live"}


@BOTH_STORES
async def test_changed_history_replaces_the_rows_and_keeps_the_outbox(tmp_path: Path) -> None:
    path = tmp_path / "ann.db"
    async with serving(tmp_path) as served, client_of(served.url, path, "ann") as ann:
        for number in range(5):
            await ann.put("products", str(number), {"name": "first"})
        await soon(ann.synced())
        known = ann.status().epoch
    async with client_of(UNREACHABLE_URL, path, "ann") as ann:
        await ann.put("products", "1", {"name": "mine"})
        assert await ann.row("products", "0") == {"name": "first"}
    other = tmp_path / "other"
    other.mkdir()
    async with serving(other) as served:
        async with client_of(served.url, client_id="bob", wall_ms=lambda: get_wall_ms() - 60_000) as bob:
            await bob.put("products", "1", {"name": "theirs", "price": 1})
            await soon(bob.synced())
        async with client_of(served.url, path, "ann") as ann:
            changed = await soon(anext(ann.history_changes()))
            assert (changed.known_epoch, changed.known_cursor) == (known, 5)
            assert changed.epoch == ann.status().epoch != known
            await soon(ann.synced())
            assert await rows_of(ann) == await server_rows(served)
            assert await rows_of(ann) == {("products", "1"): {"name": "mine", "price": 1}}
            assert ann.status().history_change == changed


# --- readers of changes


async def test_slow_reader_of_changes_gets_changes_lost_error() -> None:
    limits = DeltasLimits(**SHORT, changes_max=3, changes_bytes_max=1000)
    async with client_of(UNREACHABLE_URL, limits=limits) as ann:
        slow, other = ann.changes(), ann.changes("others")
        for number in range(4):
            await ann.put("products", str(number), {})
        with pytest.raises(UpdatesLostError, match="changes_max is 3"):
            await soon(anext(slow))
        with pytest.raises(UpdatesLostError):
            await anext(slow)
        await ann.put("others", "1", {"text": "x" * 2000})
        with pytest.raises(UpdatesLostError, match="changes_bytes_max is 1000"):
            await soon(anext(other))


# --- killed processes


@BOTH_STORES
@pytest.mark.rule("DE-4")
@pytest.mark.rule("DE-11")
@pytest.mark.parametrize("moment", ["unsent", "unanswered"])
async def test_killed_client_pushes_its_outbox_once(tmp_path: Path, moment: str) -> None:
    path = tmp_path / "ann.db"
    async with server_process(tmp_path) as server:
        url = server.url
        await asyncio.to_thread(run_until_killed, HERE / "deltas_client_worker.py", url, path, moment, 20)
        assert (await deltas_count(url) > 0) is (moment == "unanswered")
        async with client_of(url, path, "till-1") as ann:
            assert ann.status().pending == 20
            await soon(ann.synced())
            assert await rows_of(ann) == {("products", f"{one:04}"): {"number": one} for one in range(20)}
            assert ann.status().cursor == await deltas_count(url) == 20


@BOTH_STORES
@pytest.mark.rule("DE-4")
async def test_clients_and_server_converge_after_repeated_kills(tmp_path: Path) -> None:
    reported = set[str]()
    storm = HERE / "deltas_storm_worker.py"
    async with server_process(tmp_path) as server:
        server.kill()  # The workers start and are killed while the server is down.
        for lives in range(2):
            with (
                start_script(storm, server.url, tmp_path / "ann.db", "ann-1", lives) as ann_worker,
                start_script(storm, server.url, tmp_path / "bob.db", "bob-1", lives) as bob_worker,
            ):
                for _ in range(2):
                    server.start()
                    for _ in range(15):
                        reported |= {read_line(ann_worker), read_line(bob_worker)}
                    server.kill()
                for worker in (ann_worker, bob_worker):
                    worker.kill()
                    assert worker.stdout is not None
                    reported |= {line for line in worker.stdout.read().split("\n")[:-1] if line}
        assert len(reported) >= 2 * 2 * 2 * 15
        server.start()
        async with (
            client_of(server.url, tmp_path / "ann.db", "ann-1") as ann,
            client_of(server.url, tmp_path / "bob.db", "bob-1") as bob,
            client_of(server.url, client_id="new") as new,
        ):
            for one in (ann, bob, ann, new):
                await soon(one.synced())
            rows = await rows_of(new)
            assert rows == await rows_of(ann) == await rows_of(bob)
            assert {("products", name) for name in reported} <= rows.keys()
            assert len({one.status().cursor for one in (ann, bob, new)}) == 1


# --- faulty network


@BOTH_STORES
@pytest.mark.rule("DE-7")
@pytest.mark.parametrize("seed", range(3))
async def test_clients_with_clock_skew_converge_over_a_faulty_network(tmp_path: Path, seed: int, is_soak: bool) -> None:
    print(f"seed {seed}")  # noqa: T201 - pytest shows it where the test fails
    chance = Random(seed)
    limits = DeltasLimits(**SHORT, push_deltas_max=5, page_deltas=4, page_rows=3)
    async with serving(tmp_path) as served, FaultyRelay(served.url, seed).run() as relay:

        def open_client(name: str, ahead_ms: int) -> DeltasClient:
            return client_of(
                relay.url,
                tmp_path / f"{name}.db",
                name,
                limits=limits,
                wall_ms=lambda: get_wall_ms() + ahead_ms,
                chance=Random(seed),
            )

        async def edit_rows(name: str, ahead_ms: int) -> None:
            for _ in range(3):
                async with open_client(name, ahead_ms) as client:
                    for number in range(20 if is_soak else 10):
                        row_id = chance.choice("abcdef")
                        if chance.random() < 0.2:
                            await client.delete("products", row_id)
                        else:
                            await client.put("products", row_id, {chance.choice("xyz"): f"{name} {number}"})
                        if chance.random() < 0.1:
                            await compact(served, keep=chance.randint(0, 5))
                    await client.put("products", name, {"is": "alive"})
                    if chance.random() < 0.5:
                        await soon(client.synced())

        await asyncio.gather(edit_rows("ann", -3000), edit_rows("bob", 0), edit_rows("carl", 3000))
        async with open_client("ann", -3000) as ann:
            while not all(relay.done[what] for what in ("lost", "doubled", "late", "answer lost")):
                await ann.put("products", "a", {"x": str(relay.done)})
                await soon(ann.synced())
        relay.is_calm = True
        async with open_client("ann", -3000) as ann, open_client("bob", 0) as bob, open_client("carl", 3000) as carl:
            for one in (ann, bob, carl, ann, bob, carl):
                await soon(one.synced())
            rows = await server_rows(served)
            assert {("products", name) for name in ("ann", "bob", "carl")} <= rows.keys()
            assert await rows_of(ann) == await rows_of(bob) == await rows_of(carl) == rows
            assert {one.status().pending for one in (ann, bob, carl)} == {0}

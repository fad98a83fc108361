"""Clients of a gateway that drops deleted rows: no write is lost or blocked, and no deleted row is restored (DE-13)."""

from pathlib import Path
from typing import Any

import pytest

from client.deltas.deltas_clients import UNREACHABLE_URL, client_of, rows_of
from client.deltas.model_gateway import ModelGateway
from client.deltas.model_transport import ModelWire
from client.deltas.test_deltas_client_live import server_rows
from databases import BOTH_STORES
from deadlines import soon
from oncelog.client.deltas import ConnectionState
from server.running_server import Serving, serving


async def drop_tombstones(served: Serving, rows: int) -> None:
    body = {"keep": 0, "tombstoneAgeMs": 0}
    answer = await served.request("POST", "/v1/sync/shop/compact", json=body)
    assert (answer.status, answer.json["droppedRows"]) == (200, rows), answer.body


@BOTH_STORES
@pytest.mark.rule("DE-13", "DE-12")
async def test_client_that_missed_a_dropped_delete_removes_the_row(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client_of(served.url, tmp_path / "bob.db", "bob") as bob:
        async with client_of(served.url, tmp_path / "ann.db", "ann") as ann:
            await ann.put("products", "gone", {"name": "Tea"})
            await ann.put("products", "kept", {"name": "Coffee"})
            await soon(ann.synced())
        await soon(bob.synced())
        await bob.delete("products", "gone")
        await soon(bob.synced())
        await drop_tombstones(served, 1)
        async with client_of(served.url, tmp_path / "ann.db", "ann") as ann:
            await soon(ann.synced())
            assert await rows_of(ann) == await rows_of(bob) == {("products", "kept"): {"name": "Coffee"}}
            status = await soon(ann.until_status(lambda status: status.state is ConnectionState.LIVE))
            assert (status.history_change, status.refusal, status.is_resetting) == (None, None, False)
            assert (
                await soon(bob.until_status(lambda status: status.state is ConnectionState.LIVE))
            ).history_change is None


@BOTH_STORES
@pytest.mark.rule("DE-13", "DE-4", "DE-7")
async def test_older_unsent_edit_of_a_dropped_row_is_acknowledged_and_undone(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client_of(served.url, tmp_path / "bob.db", "bob") as bob:
        async with client_of(served.url, tmp_path / "ann.db", "ann") as ann:
            await ann.put("products", "gone", {"name": "Tea"})
            await soon(ann.synced())
        await soon(bob.synced())
        async with client_of(UNREACHABLE_URL, tmp_path / "ann.db", "ann") as ann:
            await ann.put("products", "gone", {"price": 9})
            await ann.put("products", "new", {"price": 9})
        await bob.delete("products", "gone")
        await soon(bob.synced())
        await drop_tombstones(served, 1)
        async with client_of(served.url, tmp_path / "ann.db", "ann") as ann:
            await soon(ann.synced())
            assert (await rows_of(ann), await rows_of(bob)) == ({}, {}), "both edits are below the horizon"
            assert (ann.status().pending, ann.status().refusal) == (0, None)
            await ann.put("products", "gone", {"price": 10})
            await soon(ann.synced())
            await soon(bob.synced())
            expected = {("products", "gone"): {"price": 10}}
            assert await rows_of(ann) == await rows_of(bob) == await server_rows(served) == expected


@pytest.mark.rule("DE-13")
async def test_client_clock_is_never_behind_the_horizon(tmp_path: Path) -> None:
    """Even a machine whose clock is a day behind can edit rows that were dropped."""
    async with serving(tmp_path) as served, client_of(served.url, client_id="bob") as bob:
        await bob.put("products", "gone", {"name": "Tea"})
        await bob.delete("products", "gone")
        await soon(bob.synced())
        await drop_tombstones(served, 1)
        async with client_of(served.url, client_id="ann", wall_ms=lambda: 1_000_000) as ann:
            await soon(ann.synced())
            await ann.put("products", "gone", {"price": 1})
            await soon(ann.synced())
            assert await server_rows(served) == {("products", "gone"): {"price": 1}}


@pytest.mark.rule("DE-13", "DE-12")
async def test_snapshot_is_restarted_when_rows_are_dropped_while_it_is_read() -> None:
    gateway = ModelGateway()
    wire = ModelWire(gateway)
    async with client_of(
        UNREACHABLE_URL, wire=ModelWire(gateway), client_id="bob", wall_ms=lambda: gateway.now_ms
    ) as bob:
        for number in range(1200):
            await bob.put("products", f"{number:04}", {"n": number})
        await bob.delete("products", "1100")
        await soon(bob.synced())
    gateway.compact(0)

    async def drop(name: str) -> Any:
        if name == "snapshot" and wire.requests.count("snapshot") == 2:
            gateway.drop_tombstones(lambda: True)

    wire.before = drop
    async with client_of(UNREACHABLE_URL, wire=wire, wall_ms=lambda: gateway.now_ms) as ann:
        await soon(ann.synced())
        assert gateway.horizon is not None
        assert await rows_of(ann) == gateway.rows()
        assert ann.status().history_change is None

"""Client status: all clients have the same states and fields."""

import asyncio
import threading
from pathlib import Path

import pytest

from client.events import event_clients
from client.ledger.ledgers import UNREACHABLE_ADDRESS, address_of, expect_written, ledger_of
from deadlines import soon, until
from oncelog.client import Client, ConnectionState, chat, deltas, ledger
from oncelog.client.ledger import set_entity
from oncelog.client.ledger.entries import StoreChanges
from oncelog.client.ledger.store import LedgerStore
from oncelog.client.runtime.values import BaseStatus
from oncelog.errors import ClosedError
from server.running_server import serving


def test_all_clients_share_the_states_and_the_fields() -> None:
    assert ConnectionState is chat.ConnectionState is deltas.ConnectionState is ledger.ConnectionState
    assert ConnectionState["NOT_LET_IN"] is ConnectionState.REFUSED
    for package in (chat, deltas, ledger):
        assert issubclass(package.Status, BaseStatus)


async def test_events_client_waits_for_a_status(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, event_clients.client_of(served.url, partitions=()) as client:
        status = await soon(client.until_status(lambda one: one.is_connected))
        assert (status.state, status.pending, status.last_error) == (ConnectionState.LIVE, 0, None)
    assert client.status().state is ConnectionState.CLOSED
    with pytest.raises(ClosedError):
        await client.until_status(lambda _: True)


async def test_client_that_was_never_opened_is_closed() -> None:
    client: Client = event_clients.client_of(event_clients.UNREACHABLE_URL)
    assert client.status().state is ConnectionState.CLOSED
    assert ledger_of(UNREACHABLE_ADDRESS).status().state is ConnectionState.CLOSED


async def test_ledger_scope_reports_an_unreachable_server_and_pending_writes() -> None:
    async with ledger_of(UNREACHABLE_ADDRESS) as client:
        assert client.scope("acme", "other").status().state is ConnectionState.LIVE
        writing = asyncio.ensure_future(client.write(set_entity("a", b"1")))
        status = await soon(client.until_status(lambda one: one.last_error is not None))
        assert (status.state, status.pending, status.is_connected) == (ConnectionState.OFFLINE, 1, False)
    assert (client.status().state, client.status().pending) == (ConnectionState.CLOSED, 1)
    with pytest.raises(ClosedError):
        await writing


async def test_write_whose_save_outlasts_the_close_remains_pending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_saving, may_finish = threading.Event(), threading.Event()
    save = LedgerStore.save

    def save_slowly(store: LedgerStore, scope_id: int, changes: StoreChanges) -> None:
        is_saving.set()
        may_finish.wait()
        save(store, scope_id, changes)

    monkeypatch.setattr(LedgerStore, "save", save_slowly)
    path = tmp_path / "ledger.db"
    client = ledger_of(UNREACHABLE_ADDRESS, path)
    async with client:
        writing = asyncio.ensure_future(client.write(set_entity("a", b"1")))
        await until(is_saving.is_set)
        closing = asyncio.ensure_future(client.close())
        await until(lambda: client.status().state is ConnectionState.CLOSED)
        may_finish.set()
        await soon(closing)
    assert client.status().pending == 1
    with pytest.raises(ClosedError):
        await writing
    async with ledger_of(UNREACHABLE_ADDRESS, path) as client:
        assert len(await client.pending()) == 1


async def test_ledger_client_waits_for_its_writes_and_ends_pauses_on_request(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, ledger_of(address_of(served)) as client:
        client.reconnect_now()  # no effect without a pause
        writing = asyncio.ensure_future(client.write(set_entity("a", b"1")))
        await soon(client.until_settled())
        expect_written(await soon(writing))
        await soon(client.until_live())
        client.reconnect_now()
    with pytest.raises(ClosedError):
        await client.until_settled()
    with pytest.raises(ClosedError):
        client.reconnect_now()


async def test_ledger_scope_is_live_while_its_writes_are_answered(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, ledger_of(address_of(served)) as client:
        expect_written(await soon(client.write(set_entity("a", b"1"))))
        status = client.status()
        assert (status.state, status.pending, status.last_error) == (ConnectionState.LIVE, 0, None)

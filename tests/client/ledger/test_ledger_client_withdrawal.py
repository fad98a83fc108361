"""Withdrawal of pending writes: a withdrawn write no longer blocks later writes of its scope."""

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from client.ledger.ledgers import UNREACHABLE_ADDRESS, address_of, expect_written, keys_of, ledger_of
from databases import BOTH_STORES
from deadlines import soon, turns, until
from oncelog.client.ledger import BlockingLedgerClient, set_entity
from oncelog.errors import ClientError, ServerRefusedError, SettingsError
from server.running_server import serving

KEY = UUID(int=17)


@BOTH_STORES
@pytest.mark.rule("LG-23")
async def test_withdrawn_write_does_not_block_later_writes(tmp_path: Path) -> None:
    """The client cannot tell whether the refused write was committed, because a different write took the sequence."""
    path = tmp_path / "client.db"
    async with ledger_of(UNREACHABLE_ADDRESS, path) as ledger:
        with pytest.raises(TimeoutError):
            await ledger.write(set_entity("large", b"1" * 100), key=KEY, timeout_s=0.01)
    async with serving(tmp_path, entity_value_bytes_max=50) as served:
        address = address_of(served)
        async with ledger_of(address) as other:
            assert expect_written(await soon(other.write(set_entity("a", b"1")))).sequence == 1
        async with ledger_of(address, path) as ledger:
            with pytest.raises(ServerRefusedError, match="must have at most 50 bytes"):
                await soon(ledger.recovered())
            later = asyncio.create_task(ledger.write(set_entity("b", b"1")))
            await turns()
            assert [one.key == KEY for one in await ledger.pending()] == [True, False]
            assert await soon(ledger.withdraw(KEY)) is False
            assert expect_written(await soon(later)).sequence == 2
            (recovered,) = await soon(ledger.recovered())
            assert (recovered.key, recovered.outcome) == (KEY, None)
            assert await keys_of(ledger) == ["a", "b"]
        async with ledger_of(address, path) as ledger:
            assert await soon(ledger.recovered()) == []


@pytest.mark.rule("LG-23")
async def test_withdrawn_write_that_was_never_sent_is_certainly_not_written(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    async with ledger_of(UNREACHABLE_ADDRESS, path) as ledger:
        waiting = [asyncio.create_task(ledger.write(set_entity("a", b"1"), key=KEY)) for _ in range(2)]
        await until(ledger.pending)
        assert await soon(ledger.withdraw(KEY.bytes)) is True
        for task in waiting:
            with pytest.raises(ClientError, match=f"withdrew the write {KEY}"):
                await soon(task)
        assert await ledger.pending() == []
        with pytest.raises(ClientError, match=f"no pending write has the key {KEY}"):
            await ledger.withdraw(KEY)
        with pytest.raises(SettingsError, match="key must be a UUID"):
            await ledger.withdraw(b"short")
    async with ledger_of(UNREACHABLE_ADDRESS, path) as ledger:
        assert await ledger.pending() == []


@pytest.mark.rule("LG-23")
def test_blocking_client_withdraws_writes_of_an_earlier_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"path": tmp_path / "client.db", "organization": "acme", "client_id": "billing-1"}
    with BlockingLedgerClient(UNREACHABLE_ADDRESS, **options) as ledger, pytest.raises(TimeoutError):
        ledger.write(set_entity("a", b"1"), key=KEY, timeout_s=0.01)
    with BlockingLedgerClient(UNREACHABLE_ADDRESS, **options) as ledger:
        assert [one.key for one in ledger.pending()] == [KEY]
        assert ledger.withdraw(KEY) is False  # an earlier run may have sent the write
        assert ledger.pending() == []

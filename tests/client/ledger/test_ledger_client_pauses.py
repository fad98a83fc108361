"""The ledger client's pauses between attempts."""

import asyncio
from pathlib import Path

import pytest

from cli.server_process import server_process
from client.ledger.ledgers import UNREACHABLE_ADDRESS, address_of, expect_written, ledger_of
from deadlines import soon, until
from oncelog import error_codes
from oncelog.client.ledger import LedgerLimits, set_entity
from oncelog.client.ledger.transport import LedgerTransport
from oncelog.client.runtime.backoff import Backoff
from oncelog.errors import LostError, ServerRefusedError
from server.running_server import serving

LONG_MS = 600_000
LONG = LedgerLimits(pause_ms_min=LONG_MS, pause_ms_max=LONG_MS, reconnect_ms_max=1)
"""Pause that is longer than any test."""


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Durations of all pauses in seconds, recorded when a pause starts."""
    started: list[float] = []
    sleep = Backoff.sleep

    async def record_pause(self: Backoff, seconds: float) -> bool:
        started.append(seconds)
        return await sleep(self, seconds)

    monkeypatch.setattr(Backoff, "sleep", record_pause)
    return started


async def first_pause_ms(pauses: list[float]) -> float:
    await until(lambda: pauses)
    return 1000 * pauses[0]


async def call_unreachable(*_: object) -> None:
    raise LostError("the outcome is unknown")


async def test_restarted_server_ends_the_pause_before_the_next_attempt(tmp_path: Path, pauses: list[float]) -> None:
    async with (
        server_process(tmp_path, grpc=True) as server,
        ledger_of(server.rpc_address, limits=LONG) as ledger,
    ):
        expect_written(await soon(ledger.write(set_entity("a", b"1"))))
        await asyncio.to_thread(server.kill)
        writing = asyncio.ensure_future(ledger.write(set_entity("b", b"1")))
        await first_pause_ms(pauses)
        await asyncio.to_thread(server.start)
        assert expect_written(await soon(writing)).sequence == 2


async def test_pause_while_the_server_is_unreachable_is_bounded_by_reconnect_ms_max(pauses: list[float]) -> None:
    limits = LedgerLimits(pause_ms_min=LONG_MS, pause_ms_max=LONG_MS, reconnect_ms_max=LONG_MS // 2)
    async with ledger_of(UNREACHABLE_ADDRESS, limits=limits) as ledger:
        writing = asyncio.ensure_future(ledger.write(set_entity("a", b"1")))
        assert LONG_MS / 5 < await first_pause_ms(pauses) <= LONG_MS / 2
        writing.cancel()


@pytest.mark.parametrize("reconnect_ms_max", [1, LONG_MS])
async def test_reconnect_ms_max_does_not_lengthen_shorter_pauses(reconnect_ms_max: int, pauses: list[float]) -> None:
    limits = LedgerLimits(pause_ms_min=1, pause_ms_max=1, reconnect_ms_max=reconnect_ms_max)
    async with ledger_of(UNREACHABLE_ADDRESS, limits=limits) as ledger:
        writing = asyncio.ensure_future(ledger.write(set_entity("a", b"1")))
        assert await first_pause_ms(pauses) <= 1
        writing.cancel()


async def test_pause_is_not_shortened_if_a_reachable_server_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    async with serving(tmp_path) as served, ledger_of(address_of(served), limits=LONG) as ledger:
        await soon(ledger.client_state())
        monkeypatch.setattr(LedgerTransport, "write", call_unreachable)
        writing = asyncio.ensure_future(ledger.write(set_entity("a", b"1")))
        assert await first_pause_ms(pauses) > LONG_MS / 3
        writing.cancel()


async def test_retry_after_of_an_unreachable_server_is_respected(
    monkeypatch: pytest.MonkeyPatch, pauses: list[float]
) -> None:
    """The server sends `retry_after` shortly before it stops."""

    async def refuse_call(*_: object, **__: object) -> None:
        raise ServerRefusedError(error_codes.SERVER_BUSY, "about to stop", LONG_MS)

    monkeypatch.setattr(LedgerTransport, "get_client_state", refuse_call)
    limits = LedgerLimits(pause_ms_min=1, pause_ms_max=1, reconnect_ms_max=1, retry_after_ms_max=LONG_MS)
    async with ledger_of(UNREACHABLE_ADDRESS, limits=limits) as ledger:
        writing = asyncio.ensure_future(ledger.write(set_entity("a", b"1")))
        assert await first_pause_ms(pauses) > LONG_MS * 0.9
        writing.cancel()

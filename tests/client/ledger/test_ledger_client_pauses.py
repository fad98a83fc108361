"""How long a ledger's client waits before it tries again: not long where a server is back, and never all the time."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from client.ledger.ledgers import NOWHERE, address_of, ledger_of, server_process, written
from doors.serving import WAIT_S, run, serving, soon, until
from oncelog import codes
from oncelog.client.ledger import LedgerClient, LedgerLimits, set_entity
from oncelog.client.ledger.entries import Unknown
from oncelog.client.ledger.stream import Stream
from oncelog.client.ledger.wire import Wire
from oncelog.errors import ServerRefusedError

LONG_MS = 600_000
LONG = LedgerLimits(pause_ms_min=LONG_MS, pause_ms_max=LONG_MS, reconnect_ms_max=1)
"""Who waits for the end of such a pause waits for longer than any test."""


def stream_of(ledger: LedgerClient) -> Stream:
    stream = ledger._stream
    assert stream is not None
    return stream


async def pause_s(ledger: LedgerClient) -> float:
    """Until the client looks again, once it waits."""
    await until(lambda: stream_of(ledger)._timer is not None)
    timer = stream_of(ledger)._timer
    assert timer is not None
    return timer.when() - asyncio.get_running_loop().time()


def answering(answer: Unknown) -> Any:
    async def write(*_: object) -> Unknown:
        return answer

    return write


def test_a_server_that_is_back_is_noticed_however_long_the_pause_was_to_be(tmp_path: Path) -> None:
    async def main() -> None:
        store = str(tmp_path / "log.db")
        with server_process(store) as (process, address):
            async with ledger_of(address, limits=LONG) as ledger:
                written(await soon(ledger.write(set_entity("a", b"1"))))
                process.kill()
                await asyncio.to_thread(process.wait)
                writing = asyncio.ensure_future(ledger.write(set_entity("b", b"1")))
                await pause_s(ledger)
                with server_process(store, int(address.rpartition(":")[2])):
                    await asyncio.wait([writing], timeout=WAIT_S)
                    assert written(writing.result()).sequence == 2

    run(main())


def test_a_server_that_is_away_is_not_looked_for_all_the_time() -> None:
    async def main() -> None:
        limits = LedgerLimits(pause_ms_min=LONG_MS, pause_ms_max=LONG_MS, reconnect_ms_max=LONG_MS // 2)
        async with ledger_of(NOWHERE, limits=limits) as ledger:
            writing = asyncio.ensure_future(ledger.write(set_entity("a", b"1")))
            assert LONG_MS / 5 < 1000 * await pause_s(ledger) <= LONG_MS / 2
            writing.cancel()

    run(main())


@pytest.mark.parametrize("reconnect_ms_max", [1, LONG_MS])
def test_the_pauses_of_before_are_not_made_longer(reconnect_ms_max: int) -> None:
    async def main() -> None:
        limits = LedgerLimits(pause_ms_min=1, pause_ms_max=1, reconnect_ms_max=reconnect_ms_max)
        async with ledger_of(NOWHERE, limits=limits) as ledger:
            writing = asyncio.ensure_future(ledger.write(set_entity("a", b"1")))
            assert await pause_s(ledger) <= 0.001
            writing.cancel()

    run(main())


def test_a_server_that_is_there_and_does_not_answer_is_given_the_whole_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with serving(tmp_path) as served, ledger_of(address_of(served), limits=LONG) as ledger:
            await soon(ledger.client_state())
            monkeypatch.setattr(Wire, "write", answering(Unknown("nobody knows")))
            writing = asyncio.ensure_future(ledger.write(set_entity("a", b"1")))
            assert 1000 * await pause_s(ledger) > LONG_MS / 3
            writing.cancel()

    run(main())


def test_a_server_that_is_away_is_given_as_long_as_it_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was about to stop when it said so."""

    async def denied(*_: object, **__: object) -> None:
        raise ServerRefusedError(codes.SERVER_BUSY, "about to stop", LONG_MS)

    monkeypatch.setattr(Wire, "client_state", denied)

    async def main() -> None:
        limits = LedgerLimits(pause_ms_min=1, pause_ms_max=1, reconnect_ms_max=1)
        async with ledger_of(NOWHERE, limits=limits) as ledger:
            writing = asyncio.ensure_future(ledger.write(set_entity("a", b"1")))
            assert 1000 * await pause_s(ledger) > LONG_MS * 0.9
            writing.cancel()

    run(main())

"""The Deltas API on server processes: a server killed around a commit, and two servers that share a log."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp
import pytest
import pytest_asyncio

import server.ledger.hanging_commit_worker
from cli.server_process import DEVELOPMENT, server_process
from databases import BOTH_STORES, SQLITE, log_at
from deadlines import soon
from scripts import read_line, start_script
from server.cli_commands import oncelog
from server.deltas.delta_servers import Gateway, change, count_rows, read_deltas, refusal, rows_of, run_server
from server.deltas.row_model import merge_model
from server.shared_servers import ServerPool, pool_fixture, unique_name

pytestmark = BOTH_STORES

WORKER: Final = str(server.ledger.hanging_commit_worker.__file__)


@asynccontextmanager
async def at(url: str, name: str = "shop") -> AsyncIterator[Gateway]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Gateway(session, url, name)


# --- killed server --------------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-4", "DE-6", "CO-10", "CO-16")
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_server_killed_around_the_commit_stores_a_push_completely_or_not_at_all(
    tmp_path: Path, moment: str
) -> None:
    old = [change(number, a=number) for number in range(1, 4)]
    new = [change(number, f"r{number}", a=number) for number in range(10, 30)]
    async with run_server(tmp_path) as deltas_server:
        await deltas_server.gateway().push_accepted(*old)
        await deltas_server.gateway().compact(upto=2)
        before = await count_rows(tmp_path)
    with start_script(WORKER, log_at(tmp_path / "events.db"), moment) as process:
        url, _ = (await asyncio.to_thread(read_line, process)).split()
        async with at(url) as gateway:
            sent = asyncio.ensure_future(gateway.push(*old, *new))
            assert await asyncio.to_thread(read_line, process) == "there"
            assert not sent.done()
            process.kill()
            process.wait()
            with pytest.raises((aiohttp.ClientError, ConnectionError)):
                await soon(sent)
    async with run_server(tmp_path) as deltas_server:
        gateway = deltas_server.gateway()
        is_there = moment == "after"
        assert (await gateway.snapshot())[1] == (23 if is_there else 3)
        if not is_there:
            assert await count_rows(tmp_path) == before
        expected = [(number, True) for number in (1, 2, 3)] + [(number, is_there) for number in range(4, 24)]
        assert await gateway.push_accepted(*old, *new) == expected
        after = await count_rows(tmp_path)
        assert await gateway.push_accepted(*old, *new) == [(number, True) for number in range(1, 24)]
        assert await count_rows(tmp_path) == after
        assert await gateway.rows() == rows_of(merge_model(old + new))


@pytest.mark.rule("DE-4", "DE-12", "CO-10")
async def test_server_killed_under_load_and_compaction_loses_nothing(tmp_path: Path) -> None:
    many = [change(number, f"r{number % 9}", client=f"c{number % 3}", a=number) for number in range(1, 121)]

    async def push_all(gateway: Gateway) -> None:
        for end in range(10, len(many) + 10, 10):
            await gateway.push_accepted(*many[:end])
            if end % 40 == 10:
                await gateway.compact(keep=15)

    async def push_until_killed(gateway: Gateway) -> None:
        with contextlib.suppress(aiohttp.ClientError, ConnectionError):
            while True:
                await push_all(gateway)

    async with server_process(tmp_path) as served, at(served.url) as gateway:
        pushing = asyncio.ensure_future(push_until_killed(gateway))
        while (await gateway.snapshot())[1] < 40:
            pass
        await asyncio.to_thread(served.kill)
        await soon(pushing)
        await asyncio.to_thread(served.start)
        await push_all(gateway)  # the client resends everything
        assert await gateway.push_accepted(*many) == [(number, True) for number in range(1, 121)]
        assert (await gateway.snapshot())[1] == len(many)
        assert await gateway.rows() == rows_of(merge_model(many))
        assert await asyncio.to_thread(served.stop) == 0
    verified = await oncelog("verify", log_at(tmp_path / "log.db"))
    assert verified.exit_code == 0, verified.output


@pytest.mark.stores(SQLITE)
@pytest.mark.rule("DE-10")
async def test_hangup_signal_reloads_the_schemas(tmp_path: Path) -> None:
    schemas = tmp_path / "schemas.json"
    schemas.write_text("{}", encoding="utf-8")
    arguments = (*DEVELOPMENT, f"--set=deltas_schemas={schemas}")
    async with server_process(tmp_path, *arguments) as served, at(served.url) as gateway:
        await gateway.push_accepted(change(1, a=1))
        schemas.write_text('{"shop": {"t": {"a": "integer"}}}', encoding="utf-8")
        os.kill(served.process.pid, signal.SIGHUP)
        number = 2
        while (await gateway.push(change(number, a="text"))).status == 200:  # until the signal has been handled
            number += 1
            await asyncio.sleep(0.01)
        assert refusal(await gateway.push(change(number, a="text"))) == (422, "INVALID")


# --- two servers ---------------------------------------------------------------------------------------------------


@asynccontextmanager
async def run_server_pair(directory: Path) -> AsyncIterator[list[str]]:
    """Run two servers on one log, one in another process and one in this process, and return their URLs."""
    async with (
        server_process(directory) as served,
        run_server(directory, store=log_at(directory / "log.db")) as deltas_server,
    ):
        yield [served.url, deltas_server.served.url]


pair_pool = pool_fixture(run_server_pair)


@pytest_asyncio.fixture(loop_scope="session")
async def pair(
    session_loop: None, pair_pool: ServerPool[list[str]], store_kind: str, request: pytest.FixtureRequest
) -> AsyncIterator[list[Gateway]]:
    """Clients of two servers for a gateway that only this test uses."""
    async with contextlib.AsyncExitStack() as stack:
        urls = await pair_pool.get(store_kind)
        yield [await stack.enter_async_context(at(url, unique_name(request))) for url in urls]


@pytest.mark.rule("DE-9", "CO-13")
async def test_push_on_one_server_is_delivered_live_by_the_other(pair: list[Gateway]) -> None:
    one, other = pair
    stream, live = await one.stream(), await one.live()
    await stream.connected()
    await live.connect()
    for number in range(1, 6):
        delta = change(number, a=number)
        assert await other.push_accepted(delta) == [(number, False)]
        assert await one.push_accepted(delta) == [(number, True)]
        expected = [{"sequence": number, **delta}]
        assert await read_deltas(stream, 1) == expected
        assert await live.deltas(1) == expected
    assert await one.rows() == await other.rows() == {"r1": {"a": 5}}
    stream.close()
    await soon(live.socket.close())


@pytest.mark.rule("DE-4", "CO-14")
async def test_concurrent_duplicates_on_two_servers_commit_once(pair: list[Gateway]) -> None:
    deltas = [change(number, f"r{number}", a=number) for number in range(1, 11)]
    found = await asyncio.gather(*(pair[number % 2].push_accepted(*deltas) for number in range(12)))
    assert sum(not is_known for results in found for _, is_known in results) == 10
    assert {tuple(sequence for sequence, _ in results) for results in found} == {tuple(range(1, 11))}
    for gateway in pair:
        assert [one["deltaId"] for one in await gateway.pull_all()] == [one["deltaId"] for one in deltas]


@pytest.mark.rule("DE-4", "DE-12", "DE-7")
async def test_compaction_on_one_server_during_pushes_on_the_other(pair: list[Gateway]) -> None:
    one, other = pair
    many = [change(200 - number, f"r{number % 5}", a=number) for number in range(1, 101)]

    async def compact() -> None:
        for _ in range(10):
            await other.compact(keep=5)

    async def push() -> None:
        for place in range(0, 100, 10):
            await one.push_accepted(*many[: place + 10])

    await asyncio.gather(compact(), push())
    for gateway in pair:
        assert await gateway.push_accepted(*many) == [(number, True) for number in range(1, 101)]
        assert await gateway.rows() == rows_of(merge_model(many))

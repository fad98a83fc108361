"""The Ledger API on two concurrent servers, one of them in another process, and on a server that is killed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest
import pytest_asyncio

from cli.server_process import DEVELOPMENT, ServerProcess, server_process
from databases import BOTH_STORES, POSTGRES, address_of, log_at
from deadlines import soon
from oncelog.core.transactions import format_tx_id, ledger_scope
from oncelog.engine.log import open_log
from oncelog.testing.postgres_proxy import PostgresProxy
from scripts import read_line, start_script
from server.ledger.ledger_servers import Connections, LedgerServer, key, run_server
from server.ledger.ledger_transports import (
    WIRES,
    CallError,
    Ledger,
    code,
    expect_failure,
    expect_success,
    put,
    read_blocks,
)
from server.ledger.write_answers import expect_already_committed, outcome, receipt_of, retry_write, write_transactions
from server.shared_servers import ServerPool, pool_fixture, unique_name

pytestmark = BOTH_STORES

WORKER: Final = str(Path(__file__).with_name("hanging_commit_worker.py"))
CALLERS: Final = 20
SET: Final = put("a", b"1")


@asynccontextmanager
async def run_second_server(directory: Path, wire: str) -> AsyncIterator[LedgerServer]:
    """Run a server in this process on the log of another server process."""
    async with run_server(directory, wire, store=log_at(directory / "log.db")) as server:
        yield server


def connect_to(process: ServerProcess, kind: str) -> Connections:
    return Connections(kind, process.url, process.rpc_port)


class Pair:
    """Two servers on one log: the first in this process, the second in another process."""

    def __init__(self, here: Connections, there: Connections) -> None:
        self._servers = (here, there)

    def ledgers(self, kind: str, organization: str) -> list[Ledger]:
        for one in self._servers:
            one.kind = kind
        return [one.ledger(organization, client_id="app") for one in self._servers]


@asynccontextmanager
async def run_server_pair(directory: Path) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        process = await stack.enter_async_context(server_process(directory, grpc=True))
        here = await stack.enter_async_context(run_second_server(directory, WIRES[0]))
        there = connect_to(process, WIRES[0])
        stack.push_async_callback(there.close)
        yield Pair(here, there)


pair_pool = pool_fixture(run_server_pair)


@pytest_asyncio.fixture(loop_scope="session")
async def ledgers(
    session_loop: None, pair_pool: ServerPool[Pair], store_kind: str, wire: str, request: pytest.FixtureRequest
) -> list[Ledger]:
    """Clients of two servers for an organization that only this test uses."""
    return (await pair_pool.get(store_kind)).ledgers(wire, unique_name(request))


# --- concurrent requests on both servers -----------------------------------------------------------------------------


@pytest.mark.rule("CO-14", "LG-6", "LG-10", "LG-11", "LG-13")
@pytest.mark.parametrize("asked", [key(1), b""], ids=["keyed", "unkeyed"])
async def test_identical_concurrent_writes_on_two_servers_commit_once(ledgers: list[Ledger], asked: bytes) -> None:
    calls = [ledgers[number % 2].write(1, SET, key=asked) for number in range(CALLERS)]
    answers = await asyncio.gather(*calls)
    assert len({outcome(answer) for answer in answers}) == 1
    whole = [answer for answer in answers if code(answer) == "OK"]
    assert whole
    assert whole == [whole[0]] * len(whole)
    for ledger in ledgers:
        assert await ledger.transaction_ids() == [whole[0]["committed_tx_id"]]
        assert (await ledger.get_client_state())["last_committed_sequence"] == 1
        assert outcome(await ledger.write(1, SET, key=asked)) == outcome(whole[0])


@pytest.mark.rule("CO-14", "LG-6", "LG-12", "LG-13")
@pytest.mark.parametrize(
    ("is_one_key", "expected"), [(True, "IDEMPOTENCY_KEY_REUSED"), (False, "SEQUENCE_REUSED")], ids=["key", "sequence"]
)
async def test_conflicting_concurrent_writes_on_two_servers_commit_one(
    ledgers: list[Ledger], is_one_key: bool, expected: str
) -> None:
    answers = await asyncio.gather(
        *[
            ledgers[number % 2].write(1, put("a", b"%d" % number), key=key(1 if is_one_key else 1 + number))
            for number in range(CALLERS)
        ]
    )
    assert sorted(map(code, answers)) == sorted(["OK"] + [expected] * (CALLERS - 1))
    (winner,) = [number for number, answer in enumerate(answers) if code(answer) == "OK"]
    for ledger in ledgers:
        assert await ledger.value("a") == b"%d" % winner
        assert len(await ledger.transaction_ids()) == 1


@pytest.mark.rule("LG-4", "LG-5", "LG-6")
async def test_client_sequence_continues_across_servers(ledgers: list[Ledger]) -> None:
    answers = []
    for number in range(1, 13):
        here, there = ledgers[number % 2], ledgers[(number + 1) % 2]
        answers.append(expect_success(await retry_write(here, number)))
        assert outcome(await retry_write(there, number)) == receipt_of(answers[-1])
        assert await there.last_sequence() == number
        gap = expect_failure(await there.write(number + 2, SET, key=key(99)))
        assert (gap["code"], gap["last_committed_sequence"]) == ("SEQUENCE_GAP", number)
    for number in range(1, 13):  # the stored answer, not the answer to the last sequence
        for ledger in ledgers:
            assert outcome(await retry_write(ledger, number)) == receipt_of(answers[number - 1])
    ids = [answer["committed_tx_id"] for answer in answers]
    assert [await ledger.transaction_ids() for ledger in ledgers] == [ids, ids]


@pytest.mark.rule("LG-18", "CO-13")
async def test_block_stream_delivers_blocks_written_on_the_other_server(ledgers: list[Ledger]) -> None:
    one, other = ledgers
    watching = await one.watch_blocks()
    first = expect_success(await other.write(1, SET))
    while (block := (await read_blocks(watching, 1))[0])["header"]["height"] < first["block_height"]:
        pass
    assert block["header"] == first["block_header"]
    for number in range(2, 6):
        answer = expect_success(await (one, other)[number % 2].write(number, SET))
        (block,) = await read_blocks(watching, 1)
        assert block == {
            "header": answer["block_header"],
            "tx_ids": [answer["committed_tx_id"]],
            "epoch": block["epoch"],
        }
    await watching.close()


# --- killed server -------------------------------------------------------------------------------------------------


async def expect_no_answer(sent: Any) -> None:
    """Assert that a write gets no answer because its server is killed."""
    with pytest.raises((CallError, aiohttp.ClientError, ConnectionError)) as raised:
        await soon(sent)
    assert getattr(raised.value, "status", "UNAVAILABLE") == "UNAVAILABLE"


async def stored_ids(path: Path) -> list[str]:
    """Open the log without a server and return the ids of its transactions."""
    async with open_log(log_at(path)) as log:
        records = (await log.read(stream=ledger_scope("acme"))).records
        return [format_tx_id(record.lane, record.position) for record in records]


@pytest.mark.rule("CO-10", "CO-11", "CO-16", "LG-9", "LG-11", "LG-13")
@pytest.mark.parametrize("moment", ["before", "after"])
async def test_server_killed_around_the_commit_stores_a_write_completely_or_not_at_all(
    tmp_path: Path, wire: str, moment: str
) -> None:
    path = tmp_path / "events.db"
    async with run_server(tmp_path, wire) as server:
        answers = await write_transactions(server.ledger(client_id="app"), 2)
    with start_script(WORKER, log_at(path), moment) as process:
        url, port = (await asyncio.to_thread(read_line, process)).split()
        ways = Connections(wire, url, int(port))
        sent = asyncio.ensure_future(retry_write(ways.ledger(client_id="app"), 3))
        assert await asyncio.to_thread(read_line, process) == "there"
        assert not sent.done()
        process.kill()
        process.wait()
        await expect_no_answer(sent)
        await ways.close()
    ids = await stored_ids(path)
    assert ids[:2] == [answer["committed_tx_id"] for answer in answers]
    assert len(ids) == (3 if moment == "after" else 2)
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        again = await retry_write(ledger, 3)
        if moment == "after":
            sequence, tx_id, _ = expect_already_committed(again)
            assert (sequence, tx_id) == (3, ids[2])
            assert expect_already_committed(await retry_write(ledger, 3, with_key=b""))[1] == ids[2]
            assert code(await ledger.write(3, put("x"), key=key(3))) == "IDEMPOTENCY_KEY_REUSED"
        else:
            assert expect_success(again)["assigned_sequence"] == 3
        assert expect_already_committed(await retry_write(ledger, 2)) == receipt_of(answers[1])
        assert await ledger.last_sequence() == 3
        assert expect_success(await retry_write(ledger, 4))["version"] == 4


@pytest.mark.stores(POSTGRES)
@pytest.mark.rule("CO-16", "LG-11")
async def test_server_killed_before_the_database_confirms_the_commit(tmp_path: Path, wire: str) -> None:
    async with (
        PostgresProxy(address_of(tmp_path / "log.db")) as proxy,
        server_process(tmp_path, *DEVELOPMENT, "--store", proxy.address, grpc=True) as process,
    ):
        ways = connect_to(process, wire)
        ledger = ways.ledger(client_id="app")
        (first,) = await write_transactions(ledger, 1)
        answer = proxy.hold("COMMIT")
        sent = asyncio.ensure_future(retry_write(ledger, 2))
        await soon(answer.wait_reached())
        assert not sent.done()
        await asyncio.to_thread(process.kill)
        await expect_no_answer(sent)
        answer.release()
        await ways.close()
    (_, second) = await stored_ids(tmp_path / "log.db")
    async with run_second_server(tmp_path, wire) as other:
        ledger = other.ledger(client_id="app")
        assert expect_already_committed(await retry_write(ledger, 2))[:2] == (2, second)
        assert expect_already_committed(await retry_write(ledger, 1)) == receipt_of(first)
        assert expect_success(await retry_write(ledger, 3))["assigned_sequence"] == 3


@pytest.mark.rule("LG-9", "LG-11", "CO-12")
async def test_restarted_and_second_server_know_all_writes_after_a_kill(tmp_path: Path, wire: str) -> None:
    async with server_process(tmp_path, grpc=True) as process, run_second_server(tmp_path, wire) as other:
        ways = connect_to(process, wire)
        first, second = ways.ledger(client_id="app"), other.ledger(client_id="app")
        answers = await write_transactions(first, 3)
        await asyncio.to_thread(process.kill)
        await ways.close()
        for number in (3, 2, 1):
            assert expect_already_committed(await retry_write(second, number)) == receipt_of(answers[number - 1])
        answers += await write_transactions(second, 1, 4)
        await asyncio.to_thread(process.start)
        ways = connect_to(process, wire)
        back = ways.ledger(client_id="app")
        for number in (4, 1, 3, 2):
            assert expect_already_committed(await retry_write(back, number)) == receipt_of(answers[number - 1])
        answers += await write_transactions(back, 1, 5)
        expected = [answer["committed_tx_id"] for answer in answers]
        assert await back.transaction_ids() == await second.transaction_ids() == expected
        await ways.close()

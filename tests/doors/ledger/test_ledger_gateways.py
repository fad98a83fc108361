"""The ledger on two servers at once, and on one that is killed between its commit and its answer."""

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from crash.processes import started
from databases import BOTH_STORES, POSTGRES, address_of, log_at
from doors.ledger.ledger_doors import Gateway, Ways, gateways, key, opened
from doors.ledger.test_ledger_memory import place, retried
from doors.ledger.test_ledger_sequences import already, written
from doors.ledger.wires import CallError, Json, Ledger, blocks, code, failure, put, success
from doors.serving import run, soon
from oncelog.core.transactions import ledger_scope, tx_id_of
from oncelog.engine.log import open_log
from oncelog.testing.postgres_proxy import PostgresProxy

pytestmark = BOTH_STORES

WORKER: Final = str(Path(__file__).with_name("withheld_worker.py"))
CALLERS: Final = 20
SET: Final = put("a", b"1")


class Pairs(dict[str, list[Gateway]]):
    """Two gateways on one log, by its store; started when the first test needs them."""

    def __init__(self, stack: ExitStack, paths: pytest.TempPathFactory) -> None:
        super().__init__()
        self._stack = stack
        self._paths = paths

    def __missing__(self, kind: str) -> list[Gateway]:
        self[kind] = self._stack.enter_context(gateways(self._paths.mktemp("pair"), 2))
        return self[kind]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pairs]:
    with ExitStack() as stack:
        yield Pairs(stack, tmp_path_factory)


class Pair:
    """Ways to two gateways, for one test."""

    def __init__(self, found: list[Gateway], kind: str, organization: str) -> None:
        self._ways = [one.ways(kind) for one in found]
        self._organization = organization

    async def __aenter__(self) -> list[Ledger]:
        return [ways.ledger(self._organization, client_id="app") for ways in self._ways]

    async def __aexit__(self, *_: object) -> None:
        for ways in self._ways:
            await ways.close()


@pytest.fixture
def pair(pairs: Pairs, store_kind: str, wire: str, tmp_path: Path) -> Pair:
    """With an organization that only this test has."""
    return Pair(pairs[store_kind], wire, tmp_path.name)


def outcome(answer: Json) -> tuple[Any, ...]:
    """Sequence, id and height, of whichever answer."""
    return place(answer) if code(answer) == "OK" else already(answer)


# --- at the same time ---------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-14", "LG-6", "LG-10", "LG-11", "LG-13")
@pytest.mark.parametrize("asked", [key(1), b""], ids=["keyed", "unkeyed"])
def test_of_twenty_requests_at_once_on_two_gateways_one_commits(pair: Pair, asked: bytes) -> None:
    async def main() -> None:
        async with pair as ledgers:
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

    run(main())


@pytest.mark.rule("CO-14", "LG-6", "LG-12", "LG-13")
@pytest.mark.parametrize(
    ("is_one_key", "expected"), [(True, "IDEMPOTENCY_KEY_REUSED"), (False, "SEQUENCE_REUSED")], ids=["key", "sequence"]
)
def test_of_different_writes_with_one_key_or_one_sequence_one_commits(
    pair: Pair, is_one_key: bool, expected: str
) -> None:
    async def main() -> None:
        async with pair as ledgers:
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

    run(main())


@pytest.mark.rule("LG-4", "LG-5", "LG-6")
def test_the_sequence_of_a_client_goes_on_from_gateway_to_gateway(pair: Pair) -> None:
    async def main() -> None:
        async with pair as ledgers:
            answers = []
            for number in range(1, 13):
                here, there = ledgers[number % 2], ledgers[(number + 1) % 2]
                answers.append(success(await retried(here, number)))
                assert outcome(await retried(there, number)) == place(answers[-1])
                assert await there.last_sequence() == number
                gap = failure(await there.write(number + 2, SET, key=key(99)))
                assert (gap["code"], gap["last_committed_sequence"]) == ("SEQUENCE_GAP", number)
            for number in range(1, 13):  # of N−1 the answer of N−1
                for ledger in ledgers:
                    assert outcome(await retried(ledger, number)) == place(answers[number - 1])
            ids = [answer["committed_tx_id"] for answer in answers]
            assert [await ledger.transaction_ids() for ledger in ledgers] == [ids, ids]

    run(main())


@pytest.mark.rule("LG-18", "CO-13")
def test_who_follows_at_one_gateway_gets_what_is_written_at_the_other(pair: Pair) -> None:
    async def main() -> None:
        async with pair as (one, other):
            watching = await one.watch_blocks()
            first = success(await other.write(1, SET))
            while (block := (await blocks(watching, 1))[0])["header"]["height"] < first["block_height"]:
                pass
            assert block["header"] == first["block_header"]
            for number in range(2, 6):
                answer = success(await (one, other)[number % 2].write(number, SET))
                (block,) = await blocks(watching, 1)
                assert block == {
                    "header": answer["block_header"],
                    "tx_ids": [answer["committed_tx_id"]],
                    "epoch": block["epoch"],
                }
            await watching.close()

    run(main())


# --- a server that is killed ---------------------------------------------------------------------------------------


async def lost(sent: Any) -> None:
    """A write whose server is killed gets no answer."""
    with pytest.raises((CallError, aiohttp.ClientError, ConnectionError)) as raised:
        await soon(sent)
    assert getattr(raised.value, "status", "UNAVAILABLE") == "UNAVAILABLE"


async def stored_ids(path: Path) -> list[str]:
    """The transactions that are in the log, by a reader of its own."""
    async with open_log(log_at(path)) as log:
        records = (await log.read(stream=ledger_scope("acme"))).records
        return [tx_id_of(record.lane, record.position) for record in records]


@pytest.mark.rule("CO-10", "CO-11", "CO-16", "LG-9", "LG-11", "LG-13")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_server_that_is_killed_around_its_commit_leaves_all_of_it_or_nothing(
    tmp_path: Path, wire: str, moment: str
) -> None:
    path = tmp_path / "events.db"

    async def main() -> None:
        async with opened(tmp_path, wire) as door:
            answers = await written(door.ledger(client_id="app"), 2)
        with started(WORKER, log_at(path), moment) as process:
            assert process.stdout is not None
            url, port = (await asyncio.to_thread(process.stdout.readline)).split()
            ways = Ways(wire, url.decode(), int(port))
            sent = asyncio.ensure_future(retried(ways.ledger(client_id="app"), 3))
            assert await asyncio.to_thread(process.stdout.readline) == b"there\n"
            assert not sent.done()
            process.kill()
            process.wait()
            await lost(sent)
            await ways.close()
        ids = await stored_ids(path)
        assert ids[:2] == [answer["committed_tx_id"] for answer in answers]
        assert len(ids) == (3 if moment == "after" else 2)
        async with opened(tmp_path, wire) as door:
            ledger = door.ledger(client_id="app")
            again = await retried(ledger, 3)
            if moment == "after":
                sequence, tx_id, _ = already(again)
                assert (sequence, tx_id) == (3, ids[2])
                assert already(await retried(ledger, 3, with_key=b""))[1] == ids[2]
                assert code(await ledger.write(3, put("x"), key=key(3))) == "IDEMPOTENCY_KEY_REUSED"
            else:
                assert success(again)["assigned_sequence"] == 3
            assert already(await retried(ledger, 2)) == place(answers[1])
            assert await ledger.last_sequence() == 3
            assert success(await retried(ledger, 4))["version"] == 4

    run(main())


@pytest.mark.stores(POSTGRES)
@pytest.mark.rule("CO-16", "LG-11")
def test_a_gateway_that_is_killed_before_it_hears_that_its_commit_is_made(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        async with PostgresProxy(address_of(tmp_path / "log.db")) as proxy:
            gateway = await asyncio.to_thread(Gateway, tmp_path, ("--store", proxy.address))
            ways = gateway.ways(wire)
            try:
                ledger = ways.ledger(client_id="app")
                (first,) = await written(ledger, 1)
                answer = proxy.hold("COMMIT")
                sent = asyncio.ensure_future(retried(ledger, 2))
                await soon(answer.reached())
                assert not sent.done()
                gateway.kill()
                await lost(sent)
                answer.let_go()
            finally:
                await ways.close()
                await asyncio.to_thread(gateway.end)
        (_, second) = await stored_ids(tmp_path / "log.db")
        other = await asyncio.to_thread(Gateway, tmp_path)
        ways = other.ways(wire)
        try:
            ledger = ways.ledger(client_id="app")
            assert already(await retried(ledger, 2))[:2] == (2, second)
            assert already(await retried(ledger, 1)) == place(first)
            assert success(await retried(ledger, 3))["assigned_sequence"] == 3
        finally:
            await ways.close()
            await asyncio.to_thread(other.end)

    run(main())


@pytest.mark.rule("LG-9", "LG-11", "CO-12")
def test_after_a_kill_the_same_gateway_and_another_know_everything(tmp_path: Path, wire: str) -> None:
    async def main() -> None:
        ways = [one.ways(wire) for one in found]
        first, second = (one.ledger(client_id="app") for one in ways)
        answers = await written(first, 3)
        await asyncio.to_thread(found[0].kill)
        for number in (3, 2, 1):
            assert already(await retried(second, number)) == place(answers[number - 1])
        answers += await written(second, 1, 4)
        await asyncio.to_thread(found[0].start)
        fresh = found[0].ways(wire)
        back = fresh.ledger(client_id="app")
        for number in (4, 1, 3, 2):
            assert already(await retried(back, number)) == place(answers[number - 1])
        answers += await written(back, 1, 5)
        expected = [answer["committed_tx_id"] for answer in answers]
        assert await back.transaction_ids() == await second.transaction_ids() == expected
        for one in (*ways, fresh):
            await one.close()

    with gateways(tmp_path, 2) as found:
        run(main())

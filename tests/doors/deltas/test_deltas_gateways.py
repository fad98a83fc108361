"""Servers in processes of their own: killed around a commit, and two on one log."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

import doors.ledger.withheld_worker
from cli.served import Served, oncelog, serving
from crash.processes import started
from databases import BOTH_STORES, SQLITE, log_at
from doors.deltas.delta_doors import Gateway, change, opened, refusal, rows_of, stored, streamed
from doors.deltas.row_model import modelled
from doors.serving import run, soon

pytestmark = BOTH_STORES

WORKER: Final = str(doors.ledger.withheld_worker.__file__)


@asynccontextmanager
async def at(url: str, name: str = "shop") -> AsyncIterator[Gateway]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        yield Gateway(session, url, name)


# --- a server that is killed ----------------------------------------------------------------------------------------


@pytest.mark.rule("DE-4", "DE-6", "CO-10", "CO-16")
@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_server_that_is_killed_around_its_commit_leaves_all_of_a_push_or_nothing(tmp_path: Path, moment: str) -> None:
    old = [change(number, a=number) for number in range(1, 4)]
    new = [change(number, f"r{number}", a=number) for number in range(10, 30)]

    async def main() -> None:
        async with opened(tmp_path) as door:
            await door.gateway().pushed(*old)
            await door.gateway().compact(upto=2)
            before = await stored(tmp_path)
        with started(WORKER, log_at(tmp_path / "events.db"), moment) as process:
            assert process.stdout is not None
            url, _ = (await asyncio.to_thread(process.stdout.readline)).split()
            async with at(url.decode()) as gateway:
                sent = asyncio.ensure_future(gateway.push(*old, *new))
                assert await asyncio.to_thread(process.stdout.readline) == b"there\n"
                assert not sent.done()
                process.kill()
                process.wait()
                with pytest.raises((aiohttp.ClientError, ConnectionError)):
                    await soon(sent)
        async with opened(tmp_path) as door:
            gateway = door.gateway()
            is_there = moment == "after"
            assert (await gateway.snapshot())[1] == (23 if is_there else 3)
            if not is_there:
                assert await stored(tmp_path) == before
            expected = [(number, True) for number in (1, 2, 3)] + [(number, is_there) for number in range(4, 24)]
            assert await gateway.pushed(*old, *new) == expected
            after = await stored(tmp_path)
            assert await gateway.pushed(*old, *new) == [(number, True) for number in range(1, 24)]
            assert await stored(tmp_path) == after
            assert await gateway.rows() == rows_of(modelled(old + new))

    run(main())


@pytest.mark.rule("DE-4", "DE-12", "CO-10")
def test_a_server_that_is_killed_under_load_and_compaction(tmp_path: Path) -> None:
    many = [change(number, f"r{number % 9}", client=f"c{number % 3}", a=number) for number in range(1, 121)]

    async def push_all(gateway: Gateway) -> bool:
        """As a client does it: everything that has no answer again, after any failure."""
        try:
            for at_ in range(0, len(many), 10):
                await gateway.pushed(*many[: at_ + 10])
                if at_ % 40 == 0:
                    await gateway.compact(keep=15)
        except (aiohttp.ClientError, ConnectionError, TimeoutError):
            return False
        return True

    async def main(served: Served) -> None:
        async with at(served.url) as gateway:
            pushing = asyncio.ensure_future(push_all(gateway))
            while (await gateway.snapshot())[1] < 40:
                pass
            served.kill()
            assert not await pushing
            await asyncio.to_thread(served.start)
            assert await push_all(gateway)
            assert await gateway.pushed(*many) == [(number, True) for number in range(1, 121)]
            assert (await gateway.snapshot())[1] == len(many)
            assert await gateway.rows() == rows_of(modelled(many))

    with serving(tmp_path) as served:
        run(main(served))
        assert served.stop() == 0
    verified = oncelog("verify", log_at(tmp_path / "log.db"))
    assert verified.returncode == 0, verified.stdout + verified.stderr


@pytest.mark.stores(SQLITE)
@pytest.mark.rule("DE-10")
def test_a_hangup_signal_takes_the_schemas_anew(tmp_path: Path) -> None:
    schemas = tmp_path / "schemas.json"
    schemas.write_text("{}", encoding="utf-8")

    async def main(served: Served) -> None:
        async with at(served.url) as gateway:
            await gateway.pushed(change(1, a=1))
            schemas.write_text('{"shop": {"t": {"a": "integer"}}}', encoding="utf-8")
            os.kill(served.process.pid, signal.SIGHUP)
            number = 2
            while (await gateway.push(change(number, a="text"))).status == 200:  # the signal is on its way
                number += 1
                await asyncio.sleep(0.01)
            assert refusal(await gateway.push(change(number, a="text"))) == (422, "INVALID")

    with serving(tmp_path, "--development", "--quiet", f"--set=deltas_schemas={schemas}") as served:
        run(main(served))


# --- two of them ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, list[str]]]:
    with ExitStack() as stack:

        class Pairs(dict[str, list[str]]):
            """Where two servers on one log are, by its store."""

            def __missing__(self, kind: str) -> list[str]:
                directory = tmp_path_factory.mktemp("pair")
                self[kind] = [stack.enter_context(serving(directory)).url for _ in range(2)]
                return self[kind]

        yield Pairs()


@asynccontextmanager
async def both(urls: list[str], name: str) -> AsyncIterator[list[Gateway]]:
    async with contextlib.AsyncExitStack() as stack:
        yield [await stack.enter_async_context(at(url, name)) for url in urls]


@pytest.mark.rule("DE-9", "CO-13")
def test_what_is_pushed_through_one_is_delivered_live_by_the_other(
    pairs: dict[str, list[str]], store_kind: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with both(pairs[store_kind], tmp_path.name) as (one, other):
            stream, live = await one.stream(), await one.live()
            await stream.connected()
            await live.connect()
            for number in range(1, 6):
                delta = change(number, a=number)
                assert await other.pushed(delta) == [(number, False)]
                assert await one.pushed(delta) == [(number, True)]
                expected = [{"sequence": number, **delta}]
                assert await streamed(stream, 1) == expected
                assert await live.deltas(1) == expected
            assert await one.rows() == await other.rows() == {"r1": {"a": 5}}
            stream.close()
            await soon(live.socket.close())

    run(main())


@pytest.mark.rule("DE-4", "CO-14")
def test_duplicates_pushed_to_both_at_once_commit_once(
    pairs: dict[str, list[str]], store_kind: str, tmp_path: Path
) -> None:
    async def main() -> None:
        async with both(pairs[store_kind], tmp_path.name) as gateways:
            deltas = [change(number, f"r{number}", a=number) for number in range(1, 11)]
            found = await asyncio.gather(*(gateways[number % 2].pushed(*deltas) for number in range(12)))
            assert sum(not is_known for results in found for _, is_known in results) == 10
            assert {tuple(sequence for sequence, _ in results) for results in found} == {tuple(range(1, 11))}
            for gateway in gateways:
                assert [one["deltaId"] for one in await gateway.pull_all()] == [one["deltaId"] for one in deltas]

    run(main())


@pytest.mark.rule("DE-4", "DE-12", "DE-7")
def test_one_compacts_while_the_other_pushes(pairs: dict[str, list[str]], store_kind: str, tmp_path: Path) -> None:
    many = [change(200 - number, f"r{number % 5}", a=number) for number in range(1, 101)]

    async def main() -> None:
        async with both(pairs[store_kind], tmp_path.name) as (one, other):

            async def compact() -> Any:
                for _ in range(10):
                    await other.compact(keep=5)

            async def push() -> Any:
                for place in range(0, 100, 10):
                    await one.pushed(*many[: place + 10])

            await asyncio.gather(compact(), push())
            for gateway in (one, other):
                assert await gateway.pushed(*many) == [(number, True) for number in range(1, 101)]
                assert await gateway.rows() == rows_of(modelled(many))

    run(main())

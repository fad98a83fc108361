"""Four gateways on one database, in a storm: killed, and their sessions cut, most of all in the middle of COMMIT."""

import asyncio
import json
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import asyncpg
import pytest

from crash.observing import say
from crash.processes import started
from gateways import storm_worker
from gateways.checker import COMMITTED, UNKNOWN, History, violations
from gateways.gateway_stores import fetched
from gateways.running import Gateway, gateways
from gateways.storm_worker import planned
from oncelog.testing.postgres_proxy import Fate, Incident, PostgresFaults, PostgresProxy

GATEWAYS = 4
LOADS = 2
CLIENTS = 32
"""Of each load."""
FAULTS = PostgresFaults(refuse_rate=0.05, commit_rate=0.12, cut_rate=0.004)
HEAD = "SELECT position FROM oncelog_lanes WHERE lane = 0"
RUN_S = 1200


@dataclass(frozen=True)
class Size:
    events: int
    """Of each client."""
    kills: int


SMALL = Size(events=20, kills=4)
SOAK = Size(events=300, kills=60)


def wanted(seed: int, size: Size) -> set[str]:
    """All ids that are submitted."""
    return {
        planned(seed, f"load{load}", client, step)[0]
        for load in range(LOADS)
        for client in range(CLIENTS)
        for step in range(size.events)
    }


async def head_of(address: str) -> int:
    ((position,),) = await fetched(address, HEAD)
    return int(position)


async def dump(address: str, directory: Path) -> None:
    rows = await fetched(address, "SELECT position, key, body FROM oncelog_records WHERE lane = 0 ORDER BY position")
    records = [(position, _uuid(key), json.loads(body)["content"]) for position, key, body in rows]
    (directory / "dump.json").write_text(json.dumps({"head": await head_of(address), "records": records}))


def _uuid(key: bytes) -> str:
    text = key.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


async def kill_some(found: list[Gateway], address: str, chance: Random, size: Size, total: int) -> None:
    """Whom, and at which position, follows from the seed."""
    moments = sorted(chance.randint(1, total * 8 // 10) for _ in range(size.kills))
    connection = await asyncpg.connect(address)
    try:
        for moment in moments:
            while await connection.fetchval(HEAD) < moment:  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
            victim = chance.choice(found)
            await asyncio.to_thread(victim.kill)
            await asyncio.to_thread(victim.start)
    finally:
        await connection.close()


async def line_from(process: Any) -> str:
    return str((await asyncio.to_thread(process.stdout.readline)).decode().strip())


async def storm(database: str, directory: Path, seed: int, size: Size) -> list[PostgresProxy]:
    chance = Random(seed)
    async with AsyncExitStack() as stack:
        processes = stack.enter_context(ExitStack())
        proxies = [
            await stack.enter_async_context(PostgresProxy(database, seed=seed + number)) for number in range(GATEWAYS)
        ]
        starting = gateways(*(proxy.address for proxy in proxies))
        found = await asyncio.to_thread(starting.__enter__)
        stack.push_async_exit(lambda *_: asyncio.to_thread(starting.__exit__, None, None, None))
        for proxy in proxies:
            proxy.faults = FAULTS
            proxy.fates.extend(chance.sample(list(Fate), len(Fate)))  # each of them once, and then by chance
        rest = (str(seed), str(CLIENTS), str(size.events), database, *(gateway.url for gateway in found))
        loads = [
            processes.enter_context(started(storm_worker.__file__, str(directory), f"load{load}", *rest))
            for load in range(LOADS)
        ]
        killing = asyncio.create_task(kill_some(found, database, chance, size, len(wanted(seed, size))))
        assert [await line_from(load) for load in loads] == ["done"] * LOADS
        await killing
        for proxy in proxies:
            proxy.calm()
        head = await head_of(database)
        for load in loads:
            assert load.stdin is not None
            load.stdin.write(b"%d\n" % head)
            load.stdin.flush()
        assert [await line_from(load) for load in loads] == ["end"] * LOADS
    return proxies


@pytest.mark.rule("CO-10", "CO-11", "CO-12", "CO-13", "CO-14", "CO-16", "EV-3", "EV-4")
def test_gateways_that_are_killed_and_cut_lose_nothing_and_repeat_nothing(
    database: str, tmp_path: Path, seed: int, is_soak: bool
) -> None:
    size = SOAK if is_soak else SMALL

    async def main() -> None:
        proxies = await storm(database, tmp_path, seed, size)
        await dump(database, tmp_path)
        done = sum((proxy.done for proxy in proxies), start=proxies[0].done.__class__())
        say(f"{size.kills} kills; {dict(done)}")
        assert all(done[fate] for fate in (*Fate, Incident.CUT)), done

    asyncio.run(asyncio.wait_for(main(), RUN_S))
    history = History.load(tmp_path)
    say(f"{len(history.calls)} calls, {sum(call.answer == UNKNOWN for call in history.calls)} without an answer")
    assert violations(history) == []
    assert {record.id for record in history.records} == wanted(seed, size)
    assert len(history.readings) == LOADS * (GATEWAYS + storm_worker.WANDERERS + 1)
    assert len(history.looks) > GATEWAYS
    places = {(call.id, call.gateway) for call in history.calls if call.answer == COMMITTED}
    assert {gateway for _, gateway in places} == set(range(GATEWAYS))
    assert len(places) > len(history.records)  # several gateways have acknowledged the same

"""Several servers share a database during faults: servers are killed, and sessions are cut, mostly during COMMIT."""

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import asyncpg
import pytest

from cli.server_process import ServerProcess
from crash.store_history import say
from deadlines import until
from oncelog.testing.postgres_proxy import CommitFault, Incident, PostgresFaults, PostgresProxy
from scripts import read_line, start_script, write_line
from servers import storm_worker
from servers.checker import COMMITTED, UNKNOWN, History, violations
from servers.server_processes import running_servers
from servers.shared_logs import fetch_rows
from servers.storm_worker import plan_event

LOADS = 2
HEAD = "SELECT position FROM oncelog_lanes WHERE lane = 0"


@dataclass(frozen=True)
class Size:
    servers: int
    clients: int
    """Number of clients per load process."""
    events: int
    """Number of events per client."""
    kills: int
    faults: PostgresFaults


SMALL = Size(3, 8, 12, 2, PostgresFaults(refuse_rate=0.05, commit_rate=0.05, cut_rate=0.002))
SOAK = Size(4, 32, 300, 60, PostgresFaults(refuse_rate=0.05, commit_rate=0.12, cut_rate=0.004))


def expected_ids(seed: int, size: Size) -> set[str]:
    """Return all submitted ids."""
    return {
        plan_event(seed, f"load{load}", client, step)[0]
        for load in range(LOADS)
        for client in range(size.clients)
        for step in range(size.events)
    }


async def read_head(address: str) -> int:
    ((position,),) = await fetch_rows(address, HEAD)
    return int(position)


async def has_reached(connection: Any, position: int) -> bool:
    return bool(await connection.fetchval(HEAD) >= position)


async def dump(address: str, directory: Path) -> None:
    rows = await fetch_rows(address, "SELECT position, key, body FROM oncelog_records WHERE lane = 0 ORDER BY position")
    records = [(position, _uuid(key), json.loads(body)["content"]) for position, key, body in rows]
    (directory / "dump.json").write_text(json.dumps({"head": await read_head(address), "records": records}))


def _uuid(key: bytes) -> str:
    text = key.hex()
    return "-".join((text[:8], text[8:12], text[12:16], text[16:20], text[20:]))


async def kill_servers(found: list[ServerProcess], address: str, chance: Random, size: Size, total: int) -> None:
    """Kill and restart servers. The seed determines the servers, and the log positions at which they are killed."""
    moments = sorted(chance.randint(1, total * 8 // 10) for _ in range(size.kills))
    connection = await asyncpg.connect(address)
    try:
        for moment in moments:
            await until(lambda moment=moment: has_reached(connection, moment))  # type: ignore[misc]
            victim = chance.choice(found)
            await asyncio.to_thread(victim.kill)
            await asyncio.to_thread(victim.start)
    finally:
        await connection.close()


async def ensure_one_cut(proxies: list[PostgresProxy]) -> None:
    """Ensure that at least one session was cut outside COMMIT."""
    if not any(proxy.done[Incident.CUT] for proxy in proxies):
        proxies[0].faults = PostgresFaults(cut_rate=1)
        await until(lambda: proxies[0].done[Incident.CUT])


async def storm(database: str, directory: Path, seed: int, size: Size) -> list[PostgresProxy]:
    chance = Random(seed)
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(PostgresProxy(database, seed=seed + number))
            for number in range(size.servers)
        ]
        found = await stack.enter_async_context(running_servers(*(proxy.address for proxy in proxies)))
        for proxy in proxies:
            proxy.faults = size.faults
            proxy.commit_faults.extend(
                chance.sample(list(CommitFault), len(CommitFault))
            )  # Use each fault once, and then choose faults at random.
        rest = (seed, size.clients, size.events, database, *(server.url for server in found))
        loads = [
            stack.enter_context(start_script(storm_worker.__file__, directory, f"load{load}", *rest))
            for load in range(LOADS)
        ]
        kill_task = asyncio.create_task(kill_servers(found, database, chance, size, len(expected_ids(seed, size))))
        assert [await asyncio.to_thread(read_line, load) for load in loads] == ["done"] * LOADS
        await kill_task
        await ensure_one_cut(proxies)
        for proxy in proxies:
            proxy.calm()
        head = await read_head(database)
        for load in loads:
            write_line(load, str(head))
        assert [await asyncio.to_thread(read_line, load) for load in loads] == ["end"] * LOADS
    return proxies


@pytest.mark.rule("CO-10", "CO-11", "CO-12", "CO-13", "CO-14", "CO-16", "EV-3", "EV-4")
async def test_every_acknowledged_event_is_stored_once_despite_kills_and_cuts(
    database: str, tmp_path: Path, seed: int, is_soak: bool
) -> None:
    size = SOAK if is_soak else SMALL
    proxies = await storm(database, tmp_path, seed, size)
    await dump(database, tmp_path)
    done = sum((proxy.done for proxy in proxies), start=proxies[0].done.__class__())
    say(f"{size.kills} kills; {dict(done)}")
    assert all(done[fate] for fate in (*CommitFault, Incident.CUT)), done
    history = History.load(tmp_path)
    say(f"{len(history.calls)} calls, {sum(call.answer == UNKNOWN for call in history.calls)} without an answer")
    assert violations(history) == []
    assert {record.id for record in history.records} == expected_ids(seed, size)
    assert len(history.readings) == LOADS * (size.servers + storm_worker.ROAMING_READERS + 1)
    assert len(history.head_queries) >= LOADS * storm_worker.HEAD_QUERIES_MIN
    places = {(call.id, call.server) for call in history.calls if call.answer == COMMITTED}
    assert {server for _, server in places} == set(range(size.servers))
    assert len(places) > len(history.records)  # Several servers acknowledged the same events.

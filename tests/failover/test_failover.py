"""Primaries are lost under load on all APIs: no acknowledged write is lost or duplicated, and all clients continue."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path

import aiohttp
import pytest

from crash.store_history import say
from failover import load_worker
from failover.findings import Kept, findings, measure_outage_s, read_records
from failover.load_apis import APIS, Api, Endpoints, RunsByLibrary
from failover.report import write_report
from failover.rounds import FEW, MANY, MOVES, Flow, Kind, Round, run_round
from oncelog.engine.log import open_log
from oncelog.storage.postgres import Timeouts
from oncelog.testing.cluster import Cluster
from scripts import start_script
from servers.server_processes import running_servers

SERVERS = 2
PAUSE_S = 0.1
SOAK_PAUSE_S = 0.03
"""Pause between two writes of a client."""
RETRIED = load_worker.STEPS_MIN
"""Number of steps per client that the test retries at the end."""
LIMITS = {f"postgres_{name}": getattr(Timeouts(), name) for name in Timeouts.__struct_fields__}
"""The default timeouts."""


async def storm(cluster: Cluster, directory: Path, seed: int, kinds: Sequence[Kind], pause_s: float) -> list[Round]:
    """Run all rounds under load until all readers have caught up. The history is written to the directory."""
    rounds = []
    async with running_servers(*[cluster.address] * SERVERS, **LIMITS) as found:
        urls = [server.url for server in found]
        with start_script(load_worker.__file__, directory, seed, pause_s, cluster.address, *urls) as process:
            flow = Flow(process)
            assert await asyncio.to_thread(flow.read_reply) == "ready"
            for kind in kinds:
                rounds.append(await asyncio.to_thread(run_round, kind, cluster, flow))
                say(f"{kind.__name__} is over")
            flow.send_line("stop")
            assert await asyncio.to_thread(flow.read_reply) == "stopped"
            flow.send_line(json.dumps(await heads(cluster.address)))
            assert await asyncio.to_thread(flow.read_reply) == "end"
            await retry_first_writes(cluster.address, urls, directory)
    for one in rounds:
        one.measure_outage_s = measure_outage_s(directory, APIS, one.began_ns, one.ended_ns)
    return rounds


async def heads(address: str) -> dict[str, int]:
    """Return the positions that the readers of each API must reach."""
    found = {}
    for api in APIS:
        kept = await read_records(api, address)
        found[api.name] = max(one.in_lane if api.is_by_lane else one.place for one in kept)
    return found


async def retry_first_writes(address: str, urls: Sequence[str], directory: Path) -> None:
    """Retry writes that an old primary had acknowledged, on the running servers and on a new server.

    The new server has no cached answers, so it must find the writes on the new primary.
    """
    before = {api: await read_records(api, address) for api in APIS}
    async with AsyncExitStack() as stack:
        (fresh,) = await stack.enter_async_context(running_servers(address, **LIMITS))
        session = await stack.enter_async_context(aiohttp.ClientSession())
        log = await stack.enter_async_context(open_log(address))
        places = Endpoints(session, [*urls, fresh.url], [log])
        for api in APIS:
            await retry_all(api, places, directory, before[api])
    assert {api: await read_records(api, address) for api in APIS} == before


async def retry_all(api: type[Api], places: Endpoints, directory: Path, kept: Sequence[Kept]) -> None:
    """Retry the first writes of each client at every server, and assert that positions and run results are the same."""
    in_lane = {one.id: one.in_lane if api.is_by_lane else one.place for one in kept}
    outputs = json.loads((directory / "outputs.json").read_text())
    here = api(places)
    for gateway in range(here.gateways):
        for client, step in product(range(load_worker.CLIENTS), range(RETRIED)):
            found = await here.submit(gateway, client, step)
            assert found == in_lane[here.id(client, step)], f"{api.name}: a retry returned another position"
    if isinstance(here, RunsByLibrary):
        assert len(here.outputs) == load_worker.CLIENTS * RETRIED
        assert here.outputs.items() <= outputs.items()
        bodies = {one.id: json.loads(one.body)["output"] for one in kept}
        assert outputs.items() <= bodies.items()


@pytest.mark.rule("CO-10", "CO-11", "CO-12", "CO-13", "CO-14", "CO-16")
async def test_failover_keeps_every_acknowledged_write_once(
    cluster: Cluster, tmp_path: Path, seed: int, is_soak: bool
) -> None:
    kinds, pause_s = (MANY, SOAK_PAUSE_S) if is_soak else (FEW, PAUSE_S)
    rounds = await storm(cluster, tmp_path, seed, kinds, pause_s)
    found = [one for api in APIS for one in findings(api, tmp_path, await read_records(api, cluster.address))]
    for one in rounds:
        say(f"{one.kind}: moved {one.has_moved}; stood still {one.measure_outage_s}")
    if is_soak:
        write_report(rounds, found, cluster.settings, LIMITS, tmp_path)
    assert found == []
    assert [one.kind for one in rounds if one.has_moved != MOVES[one.kind]] == []

"""Primaries are lost under load from all doors: nothing acknowledged is lost, nothing comes twice, all go on."""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path

import aiohttp
import pytest

from crash.observing import say
from crash.processes import started
from failover import load_worker
from failover.judging import Kept, findings, kept_by, stood_still_s
from failover.load_doors import DOORS, Door, Places, RunsByLibrary
from failover.reporting import write_report
from failover.rounds import FEW, MANY, MOVES, Flow, Kind, Round, done
from gateways.running import gateways
from oncelog.engine.log import open_log
from oncelog.stores.postgres import Timeouts
from oncelog.testing.cluster import Cluster

GATEWAYS = 2
RETRIED = 3
"""Steps of each client that are sent again when all is over."""
LIMITS = {f"postgres_{name}": getattr(Timeouts(), name) for name in Timeouts.__struct_fields__}
"""As an operator has them who sets none."""


def storm(cluster: Cluster, directory: Path, seed: int, kinds: Sequence[Kind]) -> list[Round]:
    """All rounds under load, until all readers have everything. The history is in the directory."""
    with gateways(*[cluster.address] * GATEWAYS, **LIMITS) as found:
        urls = [gateway.url for gateway in found]
        with started(load_worker.__file__, str(directory), str(seed), cluster.address, *urls) as process:
            flow = Flow(process)
            assert flow.heard() == "ready"
            rounds = []
            for kind in kinds:
                rounds.append(done(kind, cluster, flow))
                say(f"{kind.__name__} is over")
            flow.tell("stop")
            assert flow.heard() == "stopped"
            flow.tell(json.dumps(asyncio.run(heads(cluster.address))))
            assert flow.heard() == "end"
            asyncio.run(retried(cluster.address, urls, directory))
    for one in rounds:
        one.stood_still_s = stood_still_s(directory, DOORS, one.began_ns, one.ended_ns)
    return rounds


async def heads(address: str) -> dict[str, int]:
    """Where readers of each door must come to, as its positions are told."""
    found = {}
    for door in DOORS:
        kept = await kept_by(door, address)
        found[door.name] = max(one.in_lane if door.is_by_lane else one.place for one in kept)
    return found


async def retried(address: str, urls: Sequence[str], directory: Path) -> None:
    """What an old primary had acknowledged is sent again: to servers that were there, and to one that is new.

    The new one has no answers in its memory, so that it must find them on the new primary.
    """
    before = {door: await kept_by(door, address) for door in DOORS}
    starting = gateways(address, **LIMITS)
    (fresh,) = await asyncio.to_thread(starting.__enter__)
    try:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(aiohttp.ClientSession())
            log = await stack.enter_async_context(open_log(address))
            places = Places(session, [*urls, fresh.url], [log])
            for door in DOORS:
                await retry_all(door, places, directory, before[door])
    finally:
        await asyncio.to_thread(starting.__exit__, None, None, None)
    assert {door: await kept_by(door, address) for door in DOORS} == before


async def retry_all(door: type[Door], places: Places, directory: Path, kept: Sequence[Kept]) -> None:
    """The first writes of each client, at every gateway: the original place, and of runs the original result too."""
    in_lane = {one.id: one.in_lane if door.is_by_lane else one.place for one in kept}
    outputs = json.loads((directory / "outputs.json").read_text())
    here = door(places)
    for gateway in range(here.gateways):
        for client, step in product(range(load_worker.CLIENTS), range(RETRIED)):
            found = await here.submit(gateway, client, step)
            assert found == in_lane[here.id(client, step)], f"{door.name}: a retry was told another place"
    if isinstance(here, RunsByLibrary):
        assert len(here.outputs) == load_worker.CLIENTS * RETRIED
        assert here.outputs.items() <= outputs.items()
        bodies = {one.id: json.loads(one.body)["output"] for one in kept}
        assert outputs.items() <= bodies.items()


@pytest.mark.rule("CO-10", "CO-11", "CO-12", "CO-13", "CO-14", "CO-16")
def test_a_cluster_that_loses_its_primary_loses_nothing(
    cluster: Cluster, tmp_path: Path, seed: int, is_soak: bool
) -> None:
    kinds = MANY if is_soak else FEW
    rounds = storm(cluster, tmp_path, seed, kinds)
    found = [one for door in DOORS for one in findings(door, tmp_path, asyncio.run(kept_by(door, cluster.address)))]
    for one in rounds:
        say(f"{one.kind}: moved {one.has_moved}; stood still {one.stood_still_s}")
    if is_soak:
        write_report(rounds, found, cluster.settings, LIMITS, tmp_path)
    assert found == []
    assert [one.kind for one in rounds if one.has_moved != MOVES[one.kind]] == []

"""EV-18 from end to end: the npm package `insieme`, unmodified, in Node and in Chromium; the server is killed."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from cli import served as processes
from databases import BOTH_STORES
from insieme.clients import (
    HERE,
    PROJECT,
    Package,
    Python,
    Told,
    browsing,
    card,
    component,
    in_chromium,
    in_node,
    in_python,
    installed,
)

pytestmark = pytest.mark.rule("EV-18")

VERSION = "2.1.0"
TARBALL = "sha512-LTBw2R5Dc4eyqgkDLsFr2TQ4qCIJGivoHxun3j+kiI78HRCW8q/M5fnfLTWqh8+JOoP986ie7+WrBiYsyWlSHg=="
RUN_S = 280
MANY = 400


def run(main: Any) -> None:
    asyncio.run(asyncio.wait_for(main, RUN_S))


def python_item(number: int) -> dict[str, Any]:
    """An event of the first dialect that can be shown in the second."""
    return {
        "id": str(UUID(int=number)),
        "partitions": ["boards/7", f"project/{PROJECT}"],
        "event": {
            "type": "card.added",
            "schemaVersion": 1,
            "payload": {"text": f"python {number}"},
            "meta": {"clientId": "python", "clientTs": number},
        },
    }


def test_what_is_installed_is_what_was_published() -> None:
    component("npm", "npm")
    lock = json.loads((HERE / "package-lock.json").read_text())["packages"]
    assert lock["node_modules/insieme"]["integrity"] == TARBALL
    assert not any("resolved" in one for one in lock.values())
    assert json.loads((installed() / "insieme/package.json").read_text())["version"] == VERSION
    kept = json.loads((installed() / ".package-lock.json").read_text())["packages"]
    for name, one in kept.items():
        assert (one["version"], one["integrity"]) == (lock[name]["version"], lock[name]["integrity"])
    assert set(kept) == set(lock) - {""}


@BOTH_STORES
def test_two_clients_in_node_and_one_in_python_converge_across_a_kill(tmp_path: Path) -> None:
    async def main(served: processes.Served) -> None:
        async with (
            in_node("ada", tmp_path) as ada,
            in_node("bob", tmp_path) as bob,
            in_python("python") as python,
        ):
            for package in (ada, bob):
                await package.open(served.url)
                await package.do("start")
            await python.connect(served.url)
            await asyncio.gather(
                ada.submit(30),
                bob.submit(30, has_ids=True),
                python.submit(*map(python_item, range(30))),
            )
            await _all_know([ada, bob, python], 90)

            # Ada and Python have much in flight when the server is killed, Bob has nothing.
            await asyncio.gather(ada.submit(MANY, "many "), python.submit(*map(python_item, range(100, 150))))
            await python.knows(90 + 60)
            served.kill()
            for package in (ada, bob):
                await package.happened("socket_closed")
            await ada.submit(5, "offline ")
            await bob.submit(5, "offline ", has_ids=True)

            # Bob notices by what he cannot send, and comes back by himself. A client with a batch in flight does not
            # notice, and is to be started again: that is how the package is.
            await asyncio.to_thread(served.start)
            await ada.do("stop")
            await ada.do("start")
            await python.connect(served.url)
            await _all_know([ada, bob, python], 90 + MANY + 50 + 10)
            await _agree([ada, bob], python)

    with processes.serving(tmp_path) as served:
        run(main(served))
        assert served.stop() == 0
        verified = processes.oncelog("verify", served.store)
        assert verified.returncode == 0, verified.stdout


@BOTH_STORES
def test_a_rejected_draft_is_told_and_what_stood_behind_it_is_sent_again(tmp_path: Path) -> None:
    async def main(served: processes.Served) -> None:
        async with in_node("ada", tmp_path) as ada, in_node("bob", tmp_path) as bob:
            for package in (ada, bob):
                await package.open(served.url)
                await package.do("start")
                await package.happened("synced")
            await ada.do("submit", events=[card("first", id="m")])
            await _all_know([ada, bob], 1)
            # Drafts that are handed over together are sent in the order of their ids.
            await bob.do("submit", events=[card("before", id="l"), card("second", id="m"), card("behind", id="n")])
            await _all_know([ada, bob], 3)
            (rejected,) = bob.of("rejected")
            assert (rejected["id"], rejected["reason"]) == ("m", "validation_failed")
            (skipped,) = bob.of("not_processed")
            assert (skipped["id"], skipped["blockedById"]) == ("n", "m")
            assert bob.known == ada.known == {1: "m", 2: "l", 3: "n"}
            assert await bob.do("drafts") == []

    with processes.serving(tmp_path) as served:
        run(main(served))


def test_what_was_made_offline_goes_out_when_a_transport_is_there(tmp_path: Path) -> None:
    async def main(served: processes.Served) -> None:
        async with in_node("ada", tmp_path) as ada, in_node("bob", tmp_path) as bob:
            await bob.open(served.url)
            await bob.do("start")
            await bob.submit(60)
            await bob.knows(60)
            await ada.open(served.url, isOffline=True)
            await ada.do("start")
            await ada.submit(120, has_ids=True)
            await ada.do("goOnline")
            await _all_know([ada, bob], 180)
            assert _kept_alike(await ada.do("committed")) == _kept_alike(await bob.do("committed"))
            assert await ada.do("drafts") == []

    with processes.serving(tmp_path) as served:
        run(main(served))


def test_a_client_in_chromium_converges_with_one_in_node_and_one_in_python_across_a_kill(tmp_path: Path) -> None:
    async def main() -> None:
        async with in_chromium("eve", tmp_path) as page, in_node("ada", tmp_path) as ada:
            with processes.serving(tmp_path, "--development", "--quiet", "--set", f"origins={page.origin}") as served:
                async with browsing(page, tmp_path), in_python("python") as python:
                    eve = page.package
                    for package in (eve, ada):
                        await package.open(served.url)
                        await package.do("start")
                        await package.happened("synced")
                    await python.connect(served.url)
                    await asyncio.gather(
                        eve.submit(30, has_ids=True), ada.submit(30), python.submit(*map(python_item, range(30)))
                    )
                    await _all_know([eve, ada, python], 90)

                    await asyncio.gather(eve.submit(MANY, "many "), python.submit(*map(python_item, range(100, 150))))
                    await python.knows(90 + 60)
                    served.kill()
                    for package in (eve, ada):
                        await package.happened("socket_closed")
                    await eve.submit(5, "offline ", has_ids=True)
                    await ada.submit(5, "offline ")

                    # The page is loaded again while there is no server: what it has not sent is in its database.
                    await eve.do("reload")
                    await page.came()
                    await asyncio.to_thread(served.start)
                    await eve.open(served.url)
                    assert len(await eve.do("drafts")) >= 5
                    await eve.do("start")
                    await python.connect(served.url)
                    await _all_know([eve, ada, python], 90 + MANY + 50 + 10)
                    await _agree([eve, ada], python)

    run(main())


async def _all_know(clients: Sequence[Told], count: int) -> None:
    """Returns when each has been told of exactly so many."""
    await asyncio.gather(*(client.knows(count) for client in clients))
    assert [len(client.known) for client in clients] == [count] * len(clients)


async def _agree(packages: Sequence[Package], python: Python) -> None:
    """They have the same events in the same order, each was told them in order, and nothing is left to send."""
    kept = [_kept_alike(await package.do("committed")) for package in packages]
    assert kept[0] == kept[1]
    assert [(one["committedId"], one["payload"]["text"]) for one in kept[0]] == [
        (number, event["event"]["payload"]["text"]) for number, event in sorted(python.seen.items())
    ]
    assert [one["committedId"] for one in kept[0]] == list(range(1, len(kept[0]) + 1))
    assert len({one["id"] for one in kept[0]}) == len(kept[0])
    for one in kept[0]:
        if not one["id"].startswith(("ada", "bob", "eve")):  # a UUID is the same in both dialects
            assert python.seen[one["committedId"]]["id"] == one["id"]
        assert one["partition"] == "boards/7"
    for client in (*packages, python):
        for numbers in client.runs:
            assert numbers == sorted(set(numbers)), client
    for package in packages:
        assert await package.do("drafts") == []
    assert python.waiting == {}


def _kept_alike(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What all stores of the package keep, of one's own events and of others'."""
    names = ("committedId", "id", "partition", "type", "schemaVersion", "payload", "clientTs", "serverTs")
    return [{name: event[name] for name in names} for event in events]

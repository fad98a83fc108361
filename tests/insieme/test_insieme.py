"""EV-18 from end to end: the npm package `insieme`, unmodified, in Node and in Chromium; the server is killed."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from cli import server_process as processes
from databases import BOTH_STORES
from insieme.clients import (
    HERE,
    PROJECT,
    KnownEvents,
    Package,
    Python,
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
MANY = 400


def python_item(number: int) -> dict[str, Any]:
    """An event of the native dialect that the Insieme dialect can show."""
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


def test_installed_package_is_the_published_one() -> None:
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
async def test_two_node_clients_and_a_python_client_converge_across_a_kill(tmp_path: Path) -> None:
    with processes.serving(tmp_path) as served:
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

            # Ada and Python have many events in flight when the server is killed, Bob has none.
            await asyncio.gather(ada.submit(MANY, "many "), python.submit(*map(python_item, range(100, 150))))
            await python.knows(90 + 60)
            served.kill()
            for package in (ada, bob):
                await package.happened("socket_closed")
            await ada.submit(5, "offline ")
            await bob.submit(5, "offline ", has_ids=True)

            # Bob reconnects by himself when a send fails. A client of the package with a batch in flight does not
            # notice the loss, and must be started again.
            await asyncio.to_thread(served.start)
            await ada.do("stop")
            await ada.do("start")
            await python.connect(served.url)
            await _all_know([ada, bob, python], 90 + MANY + 50 + 10)
            await _agree([ada, bob], python)
        assert served.stop() == 0
        verified = processes.oncelog("verify", served.store)
        assert verified.returncode == 0, verified.stdout


@BOTH_STORES
async def test_rejected_draft_is_reported_and_later_drafts_are_sent_again(tmp_path: Path) -> None:
    with processes.serving(tmp_path) as served:
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


async def test_offline_events_are_sent_when_online(tmp_path: Path) -> None:
    with processes.serving(tmp_path) as served:
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
            assert _common_fields(await ada.do("committed")) == _common_fields(await bob.do("committed"))
            assert await ada.do("drafts") == []


async def test_chromium_node_and_python_clients_converge_across_a_kill(tmp_path: Path) -> None:
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

                # The page is reloaded without a server: its unsent events are in its database.
                await eve.do("reload")
                await page.loaded()
                await asyncio.to_thread(served.start)
                await eve.open(served.url)
                assert len(await eve.do("drafts")) >= 5
                await eve.do("start")
                await python.connect(served.url)
                await _all_know([eve, ada, python], 90 + MANY + 50 + 10)
                await _agree([eve, ada], python)


async def _all_know(clients: Sequence[KnownEvents], count: int) -> None:
    """Wait until each client knows this number of events, and check that none knows more."""
    await asyncio.gather(*(client.knows(count) for client in clients))
    assert [len(client.known) for client in clients] == [count] * len(clients)


async def _agree(packages: Sequence[Package], python: Python) -> None:
    """Check that all have the same events, received them in order, and have nothing left to send."""
    kept = [_common_fields(await package.do("committed")) for package in packages]
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


def _common_fields(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fields that all stores of the package have, for own and received events."""
    names = ("committedId", "id", "partition", "type", "schemaVersion", "payload", "clientTs", "serverTs")
    return [{name: event[name] for name in names} for event in events]

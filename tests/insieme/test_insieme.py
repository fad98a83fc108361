"""EV-18 end to end: the unmodified npm package `insieme` in Node and in Chromium, with a killed server."""

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
    NativeClient,
    Package,
    card,
    chromium_client,
    find_program,
    native_client,
    node_client,
    npm_packages,
    run_chromium,
)

pytestmark = pytest.mark.rule("EV-18")

VERSION = "2.1.0"
TARBALL = "sha512-LTBw2R5Dc4eyqgkDLsFr2TQ4qCIJGivoHxun3j+kiI78HRCW8q/M5fnfLTWqh8+JOoP986ie7+WrBiYsyWlSHg=="
MANY = 400


def native_event(number: int) -> dict[str, Any]:
    """Return an event of the native dialect that the Insieme dialect can represent."""
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
    find_program("npm", "npm")
    lock = json.loads((HERE / "package-lock.json").read_text())["packages"]
    assert lock["node_modules/insieme"]["integrity"] == TARBALL
    assert not any("resolved" in one for one in lock.values())
    assert json.loads((npm_packages() / "insieme/package.json").read_text())["version"] == VERSION
    stored = json.loads((npm_packages() / ".package-lock.json").read_text())["packages"]
    for name, one in stored.items():
        assert (one["version"], one["integrity"]) == (lock[name]["version"], lock[name]["integrity"])
    assert set(stored) == set(lock) - {""}


@BOTH_STORES
async def test_two_node_clients_and_a_python_client_converge_across_a_kill(tmp_path: Path) -> None:
    with processes.serving(tmp_path) as served:
        async with (
            node_client("ada", tmp_path) as ada,
            node_client("bob", tmp_path) as bob,
            native_client("python") as native,
        ):
            for package in (ada, bob):
                await package.open(served.url)
                await package.do("start")
            await native.connect(served.url)
            await asyncio.gather(
                ada.submit(30),
                bob.submit(30, has_ids=True),
                native.submit(*map(native_event, range(30))),
            )
            await wait_until_all_have([ada, bob, native], 90)

            # When the server is killed, Ada and the native client have many events in flight, but Bob has none.
            await asyncio.gather(ada.submit(MANY, "many "), native.submit(*map(native_event, range(100, 150))))
            await native.wait_for_events(90 + 60)
            served.kill()
            for package in (ada, bob):
                await package.wait_for_report("socket_closed")
            await ada.submit(5, "offline ")
            await bob.submit(5, "offline ", has_ids=True)

            # Bob reconnects automatically when a send fails. A package client with a batch in flight does not notice
            # the lost connection, so it must be restarted.
            await asyncio.to_thread(served.start)
            await ada.do("stop")
            await ada.do("start")
            await native.connect(served.url)
            await wait_until_all_have([ada, bob, native], 90 + MANY + 50 + 10)
            await check_agreement([ada, bob], native)
        assert served.stop() == 0
        verified = processes.oncelog("verify", served.store)
        assert verified.returncode == 0, verified.stdout


@BOTH_STORES
async def test_rejected_draft_is_reported_and_later_drafts_are_sent_again(tmp_path: Path) -> None:
    with processes.serving(tmp_path) as served:
        async with node_client("ada", tmp_path) as ada, node_client("bob", tmp_path) as bob:
            for package in (ada, bob):
                await package.open(served.url)
                await package.do("start")
                await package.wait_for_report("synced")
            await ada.do("submit", events=[card("first", id="m")])
            await wait_until_all_have([ada, bob], 1)
            # The package sends drafts of one call in id order.
            await bob.do("submit", events=[card("before", id="l"), card("second", id="m"), card("behind", id="n")])
            await wait_until_all_have([ada, bob], 3)
            (rejected,) = bob.reports("rejected")
            assert (rejected["id"], rejected["reason"]) == ("m", "validation_failed")
            (skipped,) = bob.reports("not_processed")
            assert (skipped["id"], skipped["blockedById"]) == ("n", "m")
            assert bob.known == ada.known == {1: "m", 2: "l", 3: "n"}
            assert await bob.do("drafts") == []


async def test_offline_events_are_sent_when_online(tmp_path: Path) -> None:
    with processes.serving(tmp_path) as served:
        async with node_client("ada", tmp_path) as ada, node_client("bob", tmp_path) as bob:
            await bob.open(served.url)
            await bob.do("start")
            await bob.submit(60)
            await bob.wait_for_events(60)
            await ada.open(served.url, isOffline=True)
            await ada.do("start")
            await ada.submit(120, has_ids=True)
            await ada.do("goOnline")
            await wait_until_all_have([ada, bob], 180)
            assert _common_fields(await ada.do("committed")) == _common_fields(await bob.do("committed"))
            assert await ada.do("drafts") == []


async def test_chromium_node_and_python_clients_converge_across_a_kill(tmp_path: Path) -> None:
    async with chromium_client("eve", tmp_path) as page, node_client("ada", tmp_path) as ada:
        with processes.serving(tmp_path, "--development", "--quiet", "--set", f"origins={page.origin}") as served:
            async with run_chromium(page, tmp_path), native_client("python") as native:
                eve = page.package
                for package in (eve, ada):
                    await package.open(served.url)
                    await package.do("start")
                    await package.wait_for_report("synced")
                await native.connect(served.url)
                await asyncio.gather(
                    eve.submit(30, has_ids=True), ada.submit(30), native.submit(*map(native_event, range(30)))
                )
                await wait_until_all_have([eve, ada, native], 90)

                await asyncio.gather(eve.submit(MANY, "many "), native.submit(*map(native_event, range(100, 150))))
                await native.wait_for_events(90 + 60)
                served.kill()
                for package in (eve, ada):
                    await package.wait_for_report("socket_closed")
                await eve.submit(5, "offline ", has_ids=True)
                await ada.submit(5, "offline ")

                # Reload the page while no server is running. Its unsent events are in the page's database.
                await eve.do("reload")
                await page.loaded()
                await asyncio.to_thread(served.start)
                await eve.open(served.url)
                assert len(await eve.do("drafts")) >= 5
                await eve.do("start")
                await native.connect(served.url)
                await wait_until_all_have([eve, ada, native], 90 + MANY + 50 + 10)
                await check_agreement([eve, ada], native)


async def wait_until_all_have(clients: Sequence[KnownEvents], count: int) -> None:
    """Wait until each client has `count` events, and assert that none has more."""
    await asyncio.gather(*(client.wait_for_events(count) for client in clients))
    assert [len(client.known) for client in clients] == [count] * len(clients)


async def check_agreement(packages: Sequence[Package], native: NativeClient) -> None:
    """Assert that all clients received the same events in order and have nothing left to send."""
    stored = [_common_fields(await package.do("committed")) for package in packages]
    assert stored[0] == stored[1]
    assert [(one["committedId"], one["payload"]["text"]) for one in stored[0]] == [
        (number, event["event"]["payload"]["text"]) for number, event in sorted(native.seen.items())
    ]
    assert [one["committedId"] for one in stored[0]] == list(range(1, len(stored[0]) + 1))
    assert len({one["id"] for one in stored[0]}) == len(stored[0])
    for one in stored[0]:
        if not one["id"].startswith(("ada", "bob", "eve")):  # UUIDs are equal in both dialects.
            assert native.seen[one["committedId"]]["id"] == one["id"]
        assert one["partition"] == "boards/7"
    for client in (*packages, native):
        for numbers in client.runs:
            assert numbers == sorted(set(numbers)), client
    for package in packages:
        assert await package.do("drafts") == []
    assert native.waiting == {}


def _common_fields(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fields that every store of the package has, for own and received events."""
    names = ("committedId", "id", "partition", "type", "schemaVersion", "payload", "clientTs", "serverTs")
    return [{name: event[name] for name in names} for event in events]

"""The unmodified npm package `insieme` and a server restored from a backup (docs/reference/events.md)."""

from pathlib import Path
from typing import Any

import pytest

from cli.server_process import reserve_port
from insieme.clients import Package, card, node_client
from server.cli_commands import oncelog
from server.running_server import serving

pytestmark = pytest.mark.rule("EV-18", "CO-12")


async def start(package: Package, url: str) -> None:
    await package.open(url)
    await package.do("start")
    await package.wait_for_report("synced")


async def restart(package: Package) -> None:
    """Reconnect. The package does not notice a lost connection while it has nothing to send."""
    await package.do("stop")
    await package.do("start")


async def committed_events(package: Package) -> dict[int, str]:
    """Return the committed events in the package's store."""
    return {one["committedId"]: one["id"] for one in await package.do("committed")}


class Backup:
    """Backs up and restores the log in a directory."""

    def __init__(self, directory: Path) -> None:
        self._log, self._copy = str(directory / "events.db"), str(directory / "backup.db")

    async def make(self) -> None:
        await self._run("backup", self._log, self._copy)

    async def restore(self) -> None:
        await self._run("restore", "--force", "--above=100", self._copy, self._log)

    async def _run(self, *arguments: str) -> None:
        done = await oncelog(*arguments)
        assert done.exit_code == 0, done.output


async def test_drafts_commit_after_a_restore_and_the_package_keeps_lost_events(tmp_path: Path) -> None:
    backup = Backup(tmp_path)
    with reserve_port() as port:
        async with (
            node_client("ada", tmp_path) as ada,
            node_client("bob", tmp_path) as bob,
            node_client("cy", tmp_path) as cy,
        ):
            async with serving(tmp_path, port=port) as served:
                url = served.url
                for package in (ada, bob):
                    await start(package, url)
                await ada.do("submit", events=[card(name, id=name) for name in "ab"])
                await bob.wait_for_events(2)
                await backup.make()
                await ada.do("submit", events=[card("gone", id="gone")])
                await ada.wait_for_events(3)
                await bob.wait_for_events(3)
            for package in (ada, bob):
                await package.wait_for_report("socket_closed")
            await ada.do("submit", events=[card(name, id=name) for name in "cd"])
            await backup.restore()
            async with serving(tmp_path, port=port):
                await ada.wait_for_events(5)  # The package has reconnected automatically.
                await restart(bob)
                await bob.wait_for_events(5)
                await bob.do("submit", events=[card("e", id="e")])
                for package in (ada, bob):
                    await package.wait_for_events(6)
                await start(cy, url)
                await cy.wait_for_events(5)
                everything = {1: "a", 2: "b", 102: "c", 103: "d", 104: "e"}
                assert cy.known == await committed_events(cy) == everything
                for package in (ada, bob):
                    assert package.known == await committed_events(package) == {**everything, 3: "gone"}
                    assert await package.do("drafts") == []


async def test_recommitted_event_needs_a_new_store_with_the_old_drafts(tmp_path: Path) -> None:
    """The package refuses a second position for an id: it stops syncing, and its drafts wait in the old store."""
    backup = Backup(tmp_path)
    with reserve_port() as port:
        async with node_client("ada", tmp_path) as ada, node_client("bob", tmp_path) as bob:
            async with serving(tmp_path, port=port) as served:
                url = served.url
                await start(bob, url)
                await backup.make()
                await bob.do("submit", events=[card("again", id="again")])
                await bob.wait_for_events(1)
                await bob.do("stop")
            await backup.restore()
            async with serving(tmp_path, port=port):
                # Ada still has the event as a draft, because it never got the result.
                await start(ada, url)
                await ada.do("submit", events=[card("again", id="again")])
                await ada.wait_for_events(1)
                await bob.do("submit", events=[card(name, id=name) for name in "ab"])
                await bob.do("start")
                await bob.wait_for_report("error", 2)
                for error in bob.reports("error"):
                    assert error["code"] == "client_runtime_error"
                    assert "again: conflicting duplicate" in error["message"]
                drafts: list[Any] = await bob.do("drafts")
                assert [one["id"] for one in drafts] == ["a", "b"]
                await bob.do("stop")
                await bob.open(url)  # Connect again with a new store.
                await bob.do("submit", events=drafts)
                await bob.do("start")
                await bob.wait_for_report("committed", 3)
                await ada.wait_for_events(3)
                assert await committed_events(bob) == await committed_events(ada) == {102: "again", 103: "a", 104: "b"}
                assert await bob.do("drafts") == []

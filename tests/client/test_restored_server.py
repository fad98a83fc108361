"""A server that is restored from a backup, with every client library: no pending write is lost or blocked."""

from pathlib import Path

import pytest

from client.libraries import LIBRARIES
from doors.commands import oncelog
from doors.serving import serving


async def run(*arguments: str) -> None:
    done = await oncelog(*arguments)
    assert done.exit_code == 0, done.output


@pytest.mark.rule("CO-12", "CO-40")
@pytest.mark.parametrize("name", LIBRARIES)
async def test_pending_writes_commit_after_a_restore(tmp_path: Path, name: str) -> None:
    library, path = LIBRARIES[name], tmp_path / "client.db"
    log, backup = str(tmp_path / "events.db"), str(tmp_path / "backup.db")
    async with serving(tmp_path) as served:
        await library.prepare(served)
        async with library.client_of(served, path) as client:
            for text in ("a", "b"):
                assert await library.write(client, text) == ""
            await run("backup", log, backup)
            assert await library.write(client, "gone") == ""
    async with library.client_of(None, path) as client:
        await library.store(client, ["c", "d"])
    await run("restore", "--force", "--above=1000", backup, log)
    async with serving(tmp_path) as served:
        async with library.client_of(served, path) as client:
            await library.accept_history(client)
            assert await library.settle(client) == {}
            assert await library.write(client, "e") == ""
            assert await library.read(served, client) == ["a", "b", "c", "d", "e"]
        async with library.client_of(served, path) as client:
            assert await library.settle(client) == {}
            assert await library.write(client, "f") == ""
            assert (await library.read(served, client))[-1] == "f"

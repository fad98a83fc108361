"""A server that is restored from a backup, with every client library: no pending write is lost or blocked."""

from pathlib import Path

import pytest

from client.deltas import deltas_clients
from client.libraries import LIBRARIES
from deadlines import soon
from server.cli_commands import oncelog
from server.running_server import Serving, api_key, serving


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


@pytest.mark.rule("CO-12", "CO-40")
async def test_deltas_of_a_client_that_may_not_read_commit_after_restores(tmp_path: Path) -> None:
    log, backup, path = str(tmp_path / "events.db"), str(tmp_path / "backup.db"), tmp_path / "client.db"
    async with serving(tmp_path, api_keys=True) as served:
        key = api_key(served, "till-1", write=["deltas/shop"]).text
        await push_all(served, path, key, "a")
        await run("backup", log, backup)
        await push_all(served, path, key, "gone")
    for text in ("b", "c"):  # The same backup replaces both histories.
        await run("restore", "--force", backup, log)
        async with serving(tmp_path, api_keys=True) as served:
            await push_all(served, path, key, text)
    async with serving(tmp_path, api_keys=True) as served:
        reading = api_key(served, "till-1", read=["deltas/shop"], write=["deltas/shop"]).text
        async with deltas_clients.client_of(served.url, path, token=reading) as client:
            await soon(client.synced())
            assert list(await deltas_clients.rows_of(client)) == [("products", "a"), ("products", "c")]


async def push_all(served: Serving, path: Path, key: str, text: str) -> None:
    """Put a row with a push-only client, and wait until the delta is acknowledged."""
    async with deltas_clients.client_of(served.url, path, token=key) as client:
        await client.put("products", text, {"name": text})
        await soon(client.until_status(lambda status: not status.pending))

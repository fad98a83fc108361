"""A move stops if the wait of a COMMIT for the target's standby is cancelled."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cli.sample_log import make_log
from deadlines import WAIT_S
from oncelog.errors import StoreUnavailableError
from oncelog.storage.address import redact_address
from oncelog.storage.migrate import migration
from oncelog.storage.migrate.migration import migrate_log
from oncelog.storage.migrate.target import MigrationTarget
from oncelog.storage.sqlite.moved_marker import load_marker
from oncelog.storage.sqlite.read_transaction import open_read_transaction
from oncelog.testing.postgres import create_schema
from servers.shared_logs import fetch_rows
from servers.standbys import standby_away


def ignore_progress(_: Any) -> None:
    """Ignore progress reports."""


def is_marked(path: Path) -> bool:
    with open_read_transaction(str(path)) as (connection, _):
        return load_marker(connection) is not None


@pytest.mark.rule("CO-11")
@pytest.mark.parametrize("step", ["begin", "replace_side_state", "finish"])
async def test_cancelled_commit_wait_stops_the_move(
    standby_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The server answers COMMIT and shows the data. Only a warning reveals that no standby has the data."""
    path = tmp_path / "log.db"
    await asyncio.to_thread(make_log, path, rounds=1)
    database = str(await create_schema(standby_server))
    original = getattr(MigrationTarget, step)

    async def commit_and_cancel(target: MigrationTarget, *arguments: Any) -> None:
        async with standby_away(database) as operator, asyncio.timeout(WAIT_S):
            doing = asyncio.create_task(original(target, *arguments))
            await operator.cancel(await operator.wait_for_waiting_session())
            await doing

    monkeypatch.setattr(MigrationTarget, step, commit_and_cancel)
    with pytest.raises(StoreUnavailableError, match="COMMIT may not have reached a standby") as caught:
        await migration._migrate_log(str(path), database, ignore_progress)
    assert str(caught.value).startswith(redact_address(database))
    # The file is marked as moved only after all data in the database is durable.
    assert is_marked(path) == (step == "finish")
    monkeypatch.undo()
    moved_again = await asyncio.to_thread(migrate_log, str(path), database, ignore_progress)
    assert moved_again.is_new == (step != "finish")
    assert is_marked(path)
    assert await fetch_rows(database, "SELECT move FROM oncelog_state") == [(None,)]

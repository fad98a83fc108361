"""A log is moved to a server whose COMMITs wait for a standby: a cancelled wait ends the move."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cli.sample import make_log
from gateways.gateway_stores import fetched
from gateways.standbys import standby_away
from oncelog.errors import StoreUnavailableError
from oncelog.stores.address import shown
from oncelog.stores.moving import move, mover
from oncelog.stores.moving.target import Target
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.moved import moved
from oncelog.testing.postgres import fresh_schema
from waiting import WAIT_S


def silent(_: Any) -> None:
    """Ignore progress."""


def is_marked(path: Path) -> bool:
    with looking_at(str(path)) as (connection, _):
        return moved(connection) is not None


@pytest.mark.rule("CO-11")
@pytest.mark.parametrize("step", ["begin", "replace", "end"])
async def test_commit_with_cancelled_wait_ends_the_move(
    standby_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The server answers COMMIT and shows the data; only a warning says that no standby has it."""
    path = tmp_path / "log.db"
    await asyncio.to_thread(make_log, path, rounds=1)
    database = str(await fresh_schema(standby_server))
    original = getattr(Target, step)

    async def cancelled(target: Target, *arguments: Any) -> None:
        async with standby_away(database) as operator, asyncio.timeout(WAIT_S):
            doing = asyncio.create_task(original(target, *arguments))
            await operator.cancel(await operator.first_waiting())
            await doing

    monkeypatch.setattr(Target, step, cancelled)
    with pytest.raises(StoreUnavailableError, match="COMMIT was not waited for") as caught:
        await mover._move(str(path), database, silent)
    assert str(caught.value).startswith(shown(database))
    # The file is marked as moved only after the database has everything durably.
    assert is_marked(path) == (step == "end")
    monkeypatch.undo()
    moved_again = await asyncio.to_thread(move, str(path), database, silent)
    assert moved_again.is_new == (step != "end")
    assert is_marked(path)
    assert await fetched(database, "SELECT move FROM oncelog_state") == [(None,)]

"""A log is moved to a server whose COMMITs wait for a standby: one that was not waited for ends the move."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cli.sample import make_log
from gateways.gateway_stores import fetched, run
from gateways.standbys import BOUND_S, standby_away
from oncelog.errors import StoreUnavailableError
from oncelog.stores.address import shown
from oncelog.stores.moving import move, mover
from oncelog.stores.moving.target import Target
from oncelog.stores.sqlite.looking import looking_at
from oncelog.stores.sqlite.moved import moved
from oncelog.testing.postgres import fresh_schema


def silent(_: Any) -> None:
    """Nobody looks on."""


def is_marked(path: Path) -> bool:
    with looking_at(str(path)) as (connection, _):
        return moved(connection) is not None


@pytest.mark.rule("CO-11")
@pytest.mark.parametrize("step", ["begin", "replace", "end"])
def test_a_commit_whose_waiting_was_cancelled_ends_the_move(
    standby_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """The server says COMMIT, and shows it; that it is on no standby is in a warning."""
    path = tmp_path / "log.db"
    make_log(path, rounds=1)
    database = str(run(fresh_schema(standby_server)))
    original = getattr(Target, step)

    async def cancelled(target: Target, *arguments: Any) -> None:
        async with standby_away(database) as operator, asyncio.timeout(BOUND_S):
            doing = asyncio.create_task(original(target, *arguments))
            await operator.cancel(await operator.first_waiting())
            await doing

    monkeypatch.setattr(Target, step, cancelled)
    with pytest.raises(StoreUnavailableError, match="COMMIT was not waited for") as caught:
        run(mover._move(str(path), database, silent))
    assert str(caught.value).startswith(shown(database))
    # Before the database has all of it for sure the file is not given up.
    assert is_marked(path) == (step == "end")
    monkeypatch.undo()
    assert move(str(path), database, silent).is_new == (step != "end")
    assert is_marked(path)
    assert run(fetched(database, "SELECT move FROM oncelog_state")) == [(None,)]

"""Servers of two versions share one log during an upgrade."""

from pathlib import Path
from typing import Any

import asyncpg
import pytest

from core.item_builders import assert_committed, assert_replayed, event
from databases import BOTH_STORES, POSTGRES, log_at
from deadlines import WAIT_S
from oncelog.engine.log import Log, open_log
from oncelog.errors import NewerSchemaError
from oncelog.storage.postgres import database
from oncelog.storage.postgres.statements import MIGRATIONS, SCHEMA_VERSION
from oncelog.storage.sqlite import database_file
from oncelog.storage.sqlite.statements import load_migrations

NEWER = """
ALTER TABLE oncelog_state ADD COLUMN later text;
CREATE TABLE oncelog_later (lane integer NOT NULL PRIMARY KEY);
"""
"""Migration of a later version: columns and tables that the older version does not use."""


@BOTH_STORES
@pytest.mark.rule("CO-10", "CO-14")
async def test_older_server_works_beside_a_newer_one_until_it_needs_a_new_session(
    tmp_path: Path, store_kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = log_at(tmp_path / "log.db")
    async with open_log(place) as old:
        first = assert_committed(await old.submit(event(1)))
        with monkeypatch.context() as newer:
            patch_newer_version(newer, store_kind)
            async with open_log(place) as new:
                assert assert_replayed(await new.submit(event(1))).receipt == first
                second = assert_committed(await new.submit(event(2)))
                assert assert_replayed(await old.submit(event(2))).receipt == second
                third = assert_committed(await old.submit(event(3)))
                assert assert_replayed(await new.submit(event(3))).receipt == third
                assert [record.position for record in (await old.read()).records] == [1, 2, 3]
        # From here on, a server of the older version cannot open the log.
        with pytest.raises(NewerSchemaError, match="newer Oncelog"):
            async with open_log(place):
                pass
        if store_kind == POSTGRES:
            await end_sessions(old)
            with pytest.raises(NewerSchemaError):
                await old.submit(event(4))
        else:
            assert_committed(await old.submit(event(4)))
    with monkeypatch.context() as newer:
        patch_newer_version(newer, store_kind)
        async with open_log(place) as new:
            assert len((await new.read()).records) == (3 if store_kind == POSTGRES else 4)
            for number in (1, 2, 3):
                assert_replayed(await new.submit(event(number)))


def patch_newer_version(patch: pytest.MonkeyPatch, kind: str) -> None:
    """Patch the package, so that logs opened afterwards get the schema of the next version."""
    if kind == POSTGRES:
        number = SCHEMA_VERSION + 1
        patch.setattr(database, "MIGRATIONS", [*MIGRATIONS, (number, NEWER)])
        patch.setattr(database, "SCHEMA_VERSION", number)
    else:
        number, known = database_file.SCHEMA_VERSION + 1, load_migrations()
        patch.setattr(database_file, "load_migrations", lambda: [*known, (number, NEWER)])
        patch.setattr(database_file, "SCHEMA_VERSION", number)


async def end_sessions(log: Log) -> None:
    """Terminate all sessions of the log, like a restart of the database server."""
    store: Any = log._store
    pids = [session.get_server_pid() for session in store._sessions._servers if not session.is_closed()]
    assert pids
    connection: Any = await asyncpg.connect(store._address)
    try:
        await connection.execute(
            "SELECT pg_terminate_backend(pid, $2) FROM unnest($1::int[]) AS pid", pids, WAIT_S * 1000
        )
    finally:
        await connection.close()

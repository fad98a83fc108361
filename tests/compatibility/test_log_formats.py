"""Logs of every schema version can be opened, keep their history and answer retries."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import pytest

from cli.sample_log import HOUR_MS, START_MS, SetClock, full_event, open_store
from cli.side_state_log import verify
from compatibility.formats import name_versions, restore_dump, unpack
from databases import query
from oncelog.core.values import Committed, Replayed, Request, Verdict
from oncelog.storage.backups import restore
from oncelog.storage.postgres.statements import SCHEMA_VERSION as POSTGRES_VERSION
from oncelog.storage.sqlite.database_file import SCHEMA_VERSION as SQLITE_VERSION
from oncelog.storage.verify.findings import VerificationSummary

SQLITE_LOGS: Final = name_versions("log-sqlite")
POSTGRES_LOGS: Final = name_versions("log-postgres")
NEVER_NEWEST: Final = {2, 7}
"""Schema versions of SQLite that no version of Oncelog has written, because each was added together with the next one.
"""
BLOCKS: Final = "SELECT lane, height, first_position, count, previous, root FROM oncelog_blocks ORDER BY lane, height"
KNOWN_EVENT: Final = full_event(2, ["orders", "customer/1"])
"""An event that is in every log."""
NEW_EVENT: Final = full_event(1_000, ["orders"])
LATER_MS: Final = START_MS + 3 * HOUR_MS

MISSING: Final = "run `PYTHONPATH=tests python -m compatibility.write_files`, and commit the new files"


def test_files_of_every_schema_version_exist() -> None:
    assert set(SQLITE_LOGS) == set(range(1, SQLITE_VERSION + 1)) - NEVER_NEWEST, MISSING
    assert set(POSTGRES_LOGS) == set(range(1, POSTGRES_VERSION + 1)), MISSING


@pytest.mark.parametrize("version", SQLITE_LOGS)
def test_file_of_an_older_schema_is_migrated_with_its_history(version: int, tmp_path: Path) -> None:
    log = unpack(SQLITE_LOGS[version], tmp_path / "log.db")
    assert read(log, "SELECT schema_version FROM oncelog_log") == [(version,)]
    blocks = read(log, BLOCKS)
    assert blocks
    assert_known_and_new_events_are_distinguished(log)
    assert [block for block in blocks if block not in read(log, BLOCKS)] == []
    assert isinstance(verify(log), VerificationSummary)


@pytest.mark.parametrize("version", POSTGRES_LOGS)
def test_database_of_an_older_schema_is_migrated_with_its_history(version: int, tmp_path: Path, database: str) -> None:
    restore_dump(POSTGRES_LOGS[version], database)
    assert query(database, "SELECT schema_version FROM oncelog_log") == [(version,)]
    blocks = query(database, BLOCKS)
    assert blocks
    assert_known_and_new_events_are_distinguished(database)
    assert [block for block in blocks if block not in query(database, BLOCKS)] == []
    assert isinstance(verify(database), VerificationSummary)


@pytest.mark.parametrize("version", SQLITE_LOGS)
def test_backup_of_an_older_schema_is_restored(version: int, tmp_path: Path) -> None:
    backup = unpack(SQLITE_LOGS[version], tmp_path / "backup.db")
    restored = restore(str(backup), str(tmp_path / "log.db"), lambda _: None, full=True, above=1000)
    assert restored.above == 1000
    assert isinstance(verify(tmp_path / "log.db"), VerificationSummary)


def assert_known_and_new_events_are_distinguished(log: Path | str) -> None:
    """Submit a known event and a new one with the current version."""
    known, new = asyncio.run(submit(log))
    assert isinstance(known, Replayed)
    assert isinstance(new, Committed)
    assert known.receipt is not None
    assert known.receipt.position < new.receipt.position


async def submit(log: Path | str) -> list[Verdict]:
    store = open_store(log, SetClock(LATER_MS))
    await store.open()
    try:
        decided = await store.commit([Request((KNOWN_EVENT,)), Request((NEW_EVENT,))])
        return [verdict for (verdict,) in decided.verdicts]
    finally:
        await store.close()


def read(file: Path, statement: str) -> list[tuple[Any, ...]]:
    """Return the rows of a statement, without using the package."""
    with closing(sqlite3.connect(f"{file.as_uri()}?mode=ro", uri=True)) as connection:
        return connection.execute(statement).fetchall()

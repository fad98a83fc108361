"""The ledger client's store: durability, and files that it refuses to open."""

import asyncio
import sqlite3
import threading
from pathlib import Path
from typing import Any

import pytest

from client.ledger.ledgers import HERE, UNREACHABLE_ADDRESS, ledger_of
from client.ledger.model_ledger import operations_of
from deadlines import WAIT_S, soon, until
from oncelog.client.ledger.entries import QueuedWrite, SavedEntry, ScopeState, SettledWrite, StoreChanges
from oncelog.client.ledger.store import LedgerStore
from oncelog.client.ledger.values import Written
from oncelog.core.transactions import encode_operations
from oncelog.errors import (
    CorruptError,
    NewerSchemaError,
    NotALogError,
    SettingsError,
    StoreInUseError,
    StoreUnavailableError,
)
from scripts import read_line, start_script


def entry(number: int, sequence: int) -> QueuedWrite:
    operations = operations_of(str(number), is_conditional=True)
    made = QueuedWrite(number, bytes([number]) * 16, operations, encode_operations(operations), 17)
    made.sequence = sequence
    return made


def open_store(path: Path) -> LedgerStore:
    store = LedgerStore(str(path))
    store.open("billing-1")
    return store


@pytest.mark.rule("LG-19")
def test_saved_writes_are_loaded_when_the_store_is_reopened(tmp_path: Path) -> None:
    store = open_store(tmp_path / "client.db")
    scope = store.load_scope("acme", "main")
    assert (scope.state, scope.pending) == (ScopeState(), [])
    first, second = entry(1, 5), entry(2, 6)
    store.save(scope.id, StoreChanges([SavedEntry(first, 5, 5), SavedEntry(second, 6, 6)], [], ScopeState(4, 0, 6)))
    settled: list[SettledWrite] = [SettledWrite(first, Written("tx", 5))]
    store.save(scope.id, StoreChanges([SavedEntry(second, 5, 3)], settled, ScopeState(5, 4, 6)))
    store.close()
    again = LedgerStore(str(tmp_path / "client.db"))
    assert again.open("billing-1") == [("acme", "main")]
    stored = again.load_scope("acme", "main")
    (found,) = stored.pending
    assert stored.state == ScopeState(last=5, freed=4, highest=6)
    assert (found.number, found.sequence, found.lowest_unknown, found.made_at_ms) == (2, 5, 3, 17)
    assert (found.key, found.operations, found.body) == (second.key, second.operations, second.body)
    assert again.load_scope("acme", "").pending == []
    again.close()


def test_store_is_opened_by_one_client_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    with start_script(HERE / "ledger_lock_worker.py", path) as process:
        assert read_line(process) == "open"
        (tmp_path / "link.db").symlink_to(path)
        for name in ("client.db", "link.db"):
            with pytest.raises(StoreInUseError, match="each needs its own file"):
                open_store(tmp_path / name)
    store = open_store(path)
    with pytest.raises(StoreInUseError):
        open_store(path)
    store.close()
    open_store(path).close()


def test_store_of_a_different_client_id_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path / "client.db").close()
    with pytest.raises(SettingsError, match="belongs to the client 'billing-1', not to 'other'"):
        LedgerStore(str(tmp_path / "client.db")).open("other")


@pytest.mark.parametrize("statement", ["CREATE TABLE mine (a)", "PRAGMA application_id = 7", "PRAGMA user_version = 1"])
def test_database_of_a_different_application_is_refused_and_left_unchanged(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "mine.db"
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    before = path.read_bytes()
    with pytest.raises(NotALogError, match="not a ledger client file"):
        open_store(path)
    assert path.read_bytes() == before
    assert not Path(f"{path}-wal").exists()


def test_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.db"
    path.write_text("hello" * 1000)
    with pytest.raises(NotALogError):
        open_store(path)
    with pytest.raises(StoreUnavailableError):
        open_store(tmp_path / "nowhere" / "client.db")


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    open_store(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 3")
    connection.close()
    with pytest.raises(NewerSchemaError):
        open_store(path)


VERSION_1 = """
CREATE TABLE client (one INTEGER PRIMARY KEY CHECK (one = 1), client_id TEXT NOT NULL) STRICT;
CREATE TABLE scopes (id INTEGER PRIMARY KEY, organization TEXT NOT NULL, vault TEXT NOT NULL,
    last_sequence INTEGER NOT NULL, UNIQUE (organization, vault)) STRICT;
CREATE TABLE pending (scope_id INTEGER NOT NULL REFERENCES scopes (id), number INTEGER NOT NULL, key BLOB NOT NULL,
    sequence INTEGER NOT NULL, body BLOB NOT NULL, made_at_ms INTEGER NOT NULL,
    PRIMARY KEY (scope_id, number)) STRICT, WITHOUT ROWID;
INSERT INTO client VALUES (1, 'billing-1');
INSERT INTO scopes VALUES (1, 'acme', '', 7), (2, 'acme', 'main', 3);
PRAGMA application_id = 1330400323;
PRAGMA user_version = 1;
"""


@pytest.mark.rule("LG-19")
def test_store_of_schema_1_is_migrated_with_safe_assumptions_about_sequences(tmp_path: Path) -> None:
    path, made = tmp_path / "client.db", entry(1, 9)
    connection = sqlite3.connect(path)
    connection.executescript(VERSION_1)
    row = (1, 1, made.key, 9, made.body, 17)
    connection.execute("INSERT INTO pending VALUES (?, ?, ?, ?, ?, ?)", row)
    connection.commit()
    connection.close()
    for _ in range(2):  # the second opening migrates nothing
        store = open_store(path)
        scope, other = store.load_scope("acme", ""), store.load_scope("acme", "main")
        store.close()
        (found,) = scope.pending
        assert (found.sequence, found.lowest_unknown, found.body) == (9, 1, made.body)
        assert scope.state == ScopeState(last=7, freed=9, highest=9)
        assert (other.state, other.pending) == (ScopeState(last=3, freed=4, highest=4), [])


def test_damaged_row_raises_corrupt_error(tmp_path: Path) -> None:
    store = open_store(tmp_path / "client.db")
    scope = store.load_scope("acme", "")
    broken = entry(1, 1)
    broken.body = b"{}"
    store.save(scope.id, StoreChanges([SavedEntry(broken, 1, 1)], [], ScopeState()))
    with pytest.raises(CorruptError):
        store.load_scope("acme", "")
    store.close()


def test_removed_store_file_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    store = open_store(path)
    scope = store.load_scope("acme", "")
    path.unlink()
    with pytest.raises(StoreUnavailableError, match="was removed or replaced"):
        store.save(scope.id, StoreChanges([SavedEntry(entry(1, 1), 1, 1)], [], ScopeState()))
    store.close()
    with pytest.raises(StoreUnavailableError, match="is closed"):
        store.load_scope("acme", "")


@pytest.mark.rule("LG-19")
def test_only_changes_that_must_be_durable_are_synced(tmp_path: Path) -> None:
    store = open_store(tmp_path / "client.db")
    scope = store.load_scope("acme", "")
    modes = []
    for changes in (
        StoreChanges([SavedEntry(entry(1, 1), 1, 1)], [], ScopeState()),
        StoreChanges([], [SettledWrite(entry(1, 1), Written("tx", 1))], ScopeState(1)),
        StoreChanges([], [SettledWrite(entry(1, 1), ValueError())], ScopeState(1)),
    ):
        store.save(scope.id, changes)
        modes.append(store._file.connection.execute("PRAGMA synchronous").fetchone()[0])
    assert modes == [2, 1, 2]
    store.close()


async def test_cancelled_opening_leaves_no_task_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_loading, may_load = threading.Event(), threading.Event()
    load = LedgerStore.load_scope

    def load_later(*arguments: Any) -> Any:
        is_loading.set()
        assert may_load.wait(WAIT_S)
        return load(*arguments)

    monkeypatch.setattr(LedgerStore, "load_scope", load_later)
    client = ledger_of(UNREACHABLE_ADDRESS, tmp_path / "client.db")
    opening = asyncio.create_task(client.__aenter__())
    await until(is_loading.is_set)
    opening.cancel()
    await until(lambda: client._runtime.is_ended)
    may_load.set()
    with pytest.raises(asyncio.CancelledError):
        await soon(opening)
    assert [name for task in asyncio.all_tasks() if (name := task.get_name()).startswith("oncelog ledger")] == []

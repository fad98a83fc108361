"""The store of the ledger client: durability, and files that are refused."""

import sqlite3
from pathlib import Path

import pytest

from client.ledger.ledgers import HERE
from client.ledger.model_ledger import operations_of
from oncelog.client.ledger.entries import Changes, Entry, Settled
from oncelog.client.ledger.store import LedgerStore
from oncelog.client.ledger.values import Written
from oncelog.core.transactions import transaction_body
from oncelog.errors import (
    CorruptError,
    NewerSchemaError,
    NotALogError,
    SettingsError,
    StoreInUseError,
    StoreUnavailableError,
)
from scripts import read_line, start_script


def entry(number: int, sequence: int) -> Entry:
    operations = operations_of(str(number), is_conditional=True)
    made = Entry(number, bytes([number]) * 16, operations, transaction_body(operations), 17)
    made.sequence = sequence
    return made


def opened(path: Path) -> LedgerStore:
    store = LedgerStore(str(path))
    store.open("billing-1")
    return store


@pytest.mark.rule("LG-19")
def test_saved_writes_are_loaded_when_the_store_is_reopened(tmp_path: Path) -> None:
    store = opened(tmp_path / "client.db")
    scope = store.scope("acme", "main")
    assert (scope.last_sequence, scope.pending) == (0, [])
    first, second = entry(1, 5), entry(2, 6)
    store.save(scope.id, Changes([(first, 5), (second, 6)], [], 4))
    store.save(scope.id, Changes([(second, 5)], [Settled(first, Written("tx", 5))], 5))
    store.close()
    again = LedgerStore(str(tmp_path / "client.db"))
    assert again.open("billing-1") == [("acme", "main")]
    kept = again.scope("acme", "main")
    (found,) = kept.pending
    assert (kept.last_sequence, found.number, found.sequence, found.made_at_ms) == (5, 2, 5, 17)
    assert (found.key, found.operations, found.body) == (second.key, second.operations, second.body)
    assert again.scope("acme", "").pending == []
    again.close()


def test_store_is_opened_by_one_client_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    with start_script(HERE / "ledger_holding_worker.py", path) as process:
        assert read_line(process) == "open"
        (tmp_path / "link.db").symlink_to(path)
        for name in ("client.db", "link.db"):
            with pytest.raises(StoreInUseError, match="each needs its own file"):
                opened(tmp_path / name)
    store = opened(path)
    with pytest.raises(StoreInUseError):
        opened(path)
    store.close()
    opened(path).close()


def test_store_of_another_client_id_is_refused(tmp_path: Path) -> None:
    opened(tmp_path / "client.db").close()
    with pytest.raises(SettingsError, match="belongs to the client 'billing-1', not to 'other'"):
        LedgerStore(str(tmp_path / "client.db")).open("other")


@pytest.mark.parametrize("statement", ["CREATE TABLE mine (a)", "PRAGMA application_id = 7", "PRAGMA user_version = 1"])
def test_database_of_another_application_is_refused_unchanged(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "mine.db"
    with sqlite3.connect(path) as connection:
        connection.execute(statement)
    connection.close()
    before = path.read_bytes()
    with pytest.raises(NotALogError, match="no file of a ledger's client"):
        opened(path)
    assert path.read_bytes() == before
    assert not Path(f"{path}-wal").exists()


def test_file_that_is_not_a_database_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text.db"
    path.write_text("hello" * 1000)
    with pytest.raises(NotALogError):
        opened(path)
    with pytest.raises(StoreUnavailableError):
        opened(tmp_path / "nowhere" / "client.db")


def test_newer_schema_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    opened(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute("PRAGMA user_version = 2")
    connection.close()
    with pytest.raises(NewerSchemaError):
        opened(path)


def test_damaged_row_raises_corrupt_error(tmp_path: Path) -> None:
    store = opened(tmp_path / "client.db")
    scope = store.scope("acme", "")
    broken = entry(1, 1)
    broken.body = b"{}"
    store.save(scope.id, Changes([(broken, 1)], [], 0))
    with pytest.raises(CorruptError):
        store.scope("acme", "")
    store.close()


def test_removed_store_file_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "client.db"
    store = opened(path)
    scope = store.scope("acme", "")
    path.unlink()
    with pytest.raises(StoreUnavailableError, match="was removed or replaced"):
        store.save(scope.id, Changes([(entry(1, 1), 1)], [], 0))
    store.close()
    with pytest.raises(StoreUnavailableError, match="is closed"):
        store.scope("acme", "")


@pytest.mark.rule("LG-19")
def test_only_changes_that_must_be_durable_are_synced(tmp_path: Path) -> None:
    store = opened(tmp_path / "client.db")
    scope = store.scope("acme", "")
    assert store._connection is not None
    modes = []
    for changes in (
        Changes([(entry(1, 1), 1)], [], 0),
        Changes([], [Settled(entry(1, 1), Written("tx", 1))], 1),
        Changes([], [Settled(entry(1, 1), ValueError())], 1),
    ):
        store.save(scope.id, changes)
        modes.append(store._connection.execute("PRAGMA synchronous").fetchone()[0])
    assert modes == [2, 1, 2]
    store.close()

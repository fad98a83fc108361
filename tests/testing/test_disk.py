"""The simulated disk: the writes that survive, the writes that are lost, and failures."""

import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from threading import Thread

import apsw
import pytest

from oncelog.testing.disk import SECTOR_BYTES, Disk, DiskConnection, Fault
from oncelog.testing.disk_files import FileWrite

NAME = "log.db"
SEEDS: tuple[int | None, ...] = (None, *range(20))
ROWS = 3
"""Rows per transaction. Each row is on separate pages, so that a test detects a partial transaction."""


@pytest.fixture
def disk() -> Iterator[Disk]:
    with Disk() as disk:
        yield disk


def open_database(disk: Disk) -> DiskConnection:
    connection = disk.connect(NAME)
    assert connection.execute("PRAGMA journal_mode=WAL").fetchone() == ("wal",)
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE IF NOT EXISTS entry (batch INTEGER, body BLOB)")
    return connection


def write(connection: DiskConnection, batch: int) -> None:
    connection.execute("BEGIN IMMEDIATE")
    connection.executemany("INSERT INTO entry VALUES (?, ?)", [(batch, bytes([batch]) * 5000)] * ROWS)
    connection.execute("COMMIT")


def batches(disk: Disk) -> list[int]:
    """Return the stored batches. Assert that each batch is complete and the database is intact."""
    connection = disk.connect(NAME)
    assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    if not connection.execute("SELECT 1 FROM sqlite_schema").fetchall():
        return []
    found = connection.execute("SELECT batch, count(*), min(body), max(body) FROM entry GROUP BY batch").fetchall()
    for batch, rows, least, greatest in found:
        assert (rows, least, greatest) == (ROWS, bytes([batch]) * 5000, bytes([batch]) * 5000)
    connection.close()
    return [row[0] for row in found]


def run_transactions(disk: Disk, committed: list[int]) -> None:
    """Commit three transactions with a checkpoint in between. Append each acknowledged batch to `committed`."""
    connection = open_database(disk)
    for batch in (1, 2, 3):
        write(connection, batch)
        committed.append(batch)
        if batch == 2:
            connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
    connection.close()


def count_during_run(counter: Callable[[Disk], int]) -> int:
    with Disk() as disk:
        run_transactions(disk, [])
        return counter(disk)


def error_code_of(action: Callable[[], object]) -> sqlite3.Error:
    with pytest.raises(sqlite3.Error) as caught:
        action()
    return caught.value


def is_whole(found: list[int], committed: list[int]) -> bool:
    return found in (committed, [*committed, len(committed) + 1])


@pytest.mark.parametrize("seed", SEEDS)
def test_committed_transactions_survive_power_loss_at_every_sync(seed: int | None) -> None:
    syncs = count_during_run(lambda disk: disk.syncs)
    assert syncs > 8
    for number in range(1, syncs + 1):
        committed: list[int] = []
        with Disk() as disk:
            disk.lose_power_at_sync(number, seed)
            # Closing does not report a power loss during its checkpoint.
            if number <= syncs - 2:
                with pytest.raises(sqlite3.OperationalError):
                    run_transactions(disk, committed)
            else:
                run_transactions(disk, committed)
            assert not disk.is_on
            disk.power_on()
            assert is_whole(batches(disk), committed)


@pytest.mark.parametrize("seed", SEEDS)
def test_power_loss_after_the_commit_loses_nothing(disk: Disk, seed: int | None) -> None:
    connection = open_database(disk)
    write(connection, 1)
    write(connection, 2)
    disk.lose_power(seed)
    assert batches(disk) == [1, 2]


def test_uncommitted_transaction_is_lost_at_power_loss(disk: Disk) -> None:
    connection = open_database(disk)
    write(connection, 1)
    connection.execute("PRAGMA cache_size=1")  # The transaction writes pages before it commits.
    connection.execute("BEGIN IMMEDIATE")
    before = disk.allocations
    connection.executemany("INSERT INTO entry VALUES (?, ?)", [(2, bytes(5000))] * 20)
    assert disk.allocations > before
    disk.lose_power(seed=1)
    assert batches(disk) == [1]


def test_commits_without_syncs_are_lost() -> None:
    lost = []
    for seed in SEEDS:
        with Disk() as disk:
            connection = open_database(disk)
            write(connection, 1)
            connection.execute("PRAGMA synchronous=OFF")
            write(connection, 2)
            disk.lose_power(seed)
            found = batches(disk)
            assert found in ([1], [1, 2])
            lost.append(found == [1])
    assert lost[0]
    assert sum(lost) > 10


def content(disk: Disk, directory: Path) -> bytes:
    disk.copy_to(directory)
    return (directory / NAME).read_bytes()


@pytest.mark.parametrize("at_sync", [False, True])
def test_seed_selects_the_pending_writes_that_survive(tmp_path: Path, at_sync: bool) -> None:
    contents = []
    for seed in (None, 5, 5, 6, 7, 8):
        with Disk() as disk:
            connection = disk.connect(NAME)
            connection.execute("CREATE TABLE entry (body BLOB)")
            before = content(disk, tmp_path)
            connection.execute(f"PRAGMA synchronous={'FULL' if at_sync else 'OFF'}")
            if at_sync:
                # The first two syncs are of the journal, and the third is of the database.
                disk.lose_power_at_sync(3, seed)
                with pytest.raises(sqlite3.OperationalError):
                    connection.execute("INSERT INTO entry VALUES (?)", (b"x" * 50000,))
            else:
                connection.execute("INSERT INTO entry VALUES (?)", (b"x" * 50000,))
                disk.lose_power(seed)
            contents.append(content(disk, tmp_path))
    assert contents[0] == before
    assert contents[1] == contents[2]
    assert len(set(contents)) == 5
    kept = sorted({body.count(b"x") for body in contents})
    assert len(kept) > 3
    assert 0 < kept[1] < 25000
    assert kept[-1] < 50000


def test_writes_are_torn_at_sector_boundaries() -> None:
    write = FileWrite(offset=300, data=bytes(range(256)) * 8)
    torn = {write.tear(Random(seed)) for seed in range(50)}
    for part in torn:
        assert part.data == write.data[part.offset - 300 :][: len(part.data)]
        start, end = part.offset, part.offset + len(part.data)
        assert (start == 300) != (end == 300 + 2048)
        assert (end if start == 300 else start) % SECTOR_BYTES == 0
    assert len(torn) == 8
    small = FileWrite(offset=512, data=bytes(512))
    assert small.tear(Random(1)) == small


def test_connections_from_before_the_power_loss_fail(disk: Disk) -> None:
    connection = open_database(disk)
    write(connection, 1)
    rows = connection.execute("SELECT batch FROM entry")
    disk.lose_power()
    for action in (rows.fetchone, lambda: connection.execute("SELECT 1"), lambda: write(connection, 2)):
        error = error_code_of(action)
        assert type(error) is sqlite3.OperationalError
        assert error.sqlite_errorname.startswith("SQLITE_IOERR")
    again = open_database(disk)
    write(again, 2)
    operations = disk.operations
    connection.close()
    assert disk.operations == operations
    again.close()
    assert batches(disk) == [1, 2]


def test_connecting_without_power_fails(disk: Disk) -> None:
    connection = open_database(disk)
    disk.lose_power_at_sync(1)
    error_code_of(lambda: write(connection, 1))
    assert not disk.is_on
    assert error_code_of(lambda: disk.connect(NAME)).sqlite_errorname.startswith("SQLITE_IOERR")
    disk.power_on()
    assert batches(disk) == []


def test_unsynced_deletion_is_undone_at_power_loss() -> None:
    """With a rollback journal, deleting the journal commits the transaction. Only EXTRA then syncs the directory."""
    for synchronous, survives in (("FULL", []), ("EXTRA", [1])):
        with Disk() as disk:
            connection = disk.connect(NAME)
            connection.execute("PRAGMA locking_mode=NORMAL").fetchall()
            connection.execute(f"PRAGMA synchronous={synchronous}")
            connection.execute("CREATE TABLE entry (batch INTEGER, body BLOB)")
            write(connection, 1)
            disk.lose_power()
            assert batches(disk) == survives


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("sticky", [False, True])
def test_fault_at_any_operation_leaves_whole_transactions(fault: Fault, sticky: bool) -> None:
    operations = count_during_run(lambda disk: disk.count(fault))
    assert operations > 30
    names = set()
    for number in range(1, operations + 1):
        committed: list[int] = []
        with Disk() as disk:
            disk.fail_at(number, fault, sticky=sticky)
            try:
                run_transactions(disk, committed)
            except sqlite3.OperationalError as error:
                names.add(error.sqlite_errorname)
            disk.repair()
            disk.close()
            assert is_whole(batches(disk), committed)
    if fault is Fault.FULL:
        assert names == {"SQLITE_FULL"}
    else:
        assert len(names) > 5
        assert all(name.startswith("SQLITE_IOERR") for name in names)


@pytest.mark.parametrize("seed", [None, 1])
def test_power_loss_after_a_fault_leaves_whole_transactions(seed: int | None) -> None:
    for number in range(1, count_during_run(lambda disk: disk.operations) + 1, 3):
        committed: list[int] = []
        with Disk() as disk:
            disk.fail_at(number, Fault.IO_ERROR)
            try:
                run_transactions(disk, committed)
            except sqlite3.OperationalError:
                disk.lose_power(seed)
            assert is_whole(batches(disk), committed)


def test_fault_occurs_once_or_until_repair(disk: Disk) -> None:
    connection = open_database(disk)
    disk.fail_at(1, Fault.FULL)
    error = error_code_of(lambda: write(connection, 1))
    assert (error.sqlite_errorcode, error.sqlite_errorname) == (sqlite3.SQLITE_FULL, "SQLITE_FULL")
    assert str(error) == "database or disk is full"
    assert not connection.in_transaction
    write(connection, 1)
    disk.fail_at(2, Fault.IO_ERROR, sticky=True)
    error = error_code_of(lambda: write(connection, 2))
    assert (error.sqlite_errorcode, error.sqlite_errorname) == (sqlite3.SQLITE_IOERR_WRITE, "SQLITE_IOERR_WRITE")
    assert str(error) == "disk I/O error"
    for _ in range(3):
        assert error_code_of(lambda: write(connection, 2)).sqlite_errorname.startswith("SQLITE_IOERR")
    disk.repair()
    write(connection, 2)
    connection.close()
    assert batches(disk) == [1, 2]


def test_full_disk_can_truncate_and_delete(disk: Disk) -> None:
    connection = open_database(disk)
    write(connection, 1)
    connection.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchall()
    disk.fail_at(1, Fault.FULL, sticky=True)
    before = disk.allocations
    assert connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone() == (0, 0, 0)
    assert disk.allocations == before


def test_operation_numbers_start_at_one(disk: Disk) -> None:
    with pytest.raises(ValueError, match="number 1"):
        disk.fail_at(0, Fault.FULL)
    with pytest.raises(ValueError, match="number 1"):
        disk.lose_power_at_sync(0)
    with pytest.raises(ValueError, match="directory"):
        disk.connect("directory/log.db")


def test_failed_checkpoint_after_the_commit_is_not_reported(disk: Disk) -> None:
    connection = open_database(disk)
    assert connection.execute("PRAGMA wal_autocheckpoint=1").fetchone() == ("1",)
    connection.execute("PRAGMA journal_size_limit=0").fetchall()
    before = disk.operations
    assert connection.execute("INSERT INTO entry VALUES (1, ?)", (bytes(5),)).rowcount == 1
    after_commit = 0
    for number in range(1, disk.operations - before + 1):
        disk.fail_at(number, Fault.IO_ERROR)
        found = connection.execute("SELECT count(*) FROM entry").fetchone()
        assert found is not None
        try:
            assert connection.execute("INSERT INTO entry VALUES (1, ?)", (bytes(5),)).rowcount == 1
            after_commit += 1
            expected = found[0] + 1
        except sqlite3.OperationalError:
            expected = found[0]
        disk.repair()
        assert connection.execute("SELECT count(*) FROM entry").fetchone() == (expected,)
    assert after_commit > 3


def test_rollback_succeeds_on_a_broken_disk(disk: Disk) -> None:
    connection = open_database(disk)
    write(connection, 1)
    connection.execute("PRAGMA cache_size=1")
    for number in range(1, 10):
        connection.execute("BEGIN IMMEDIATE")
        connection.executemany("INSERT INTO entry VALUES (2, ?)", [(bytes(5000),)] * 20)
        disk.fail_at(number, Fault.IO_ERROR, sticky=True)
        connection.execute("ROLLBACK")
        assert not connection.in_transaction
        disk.repair()
    connection.close()
    assert batches(disk) == [1]


def test_files_can_be_copied_out_and_loaded(disk: Disk, tmp_path: Path) -> None:
    connection = open_database(disk)
    write(connection, 1)
    disk.copy_to(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {NAME, f"{NAME}-wal"}
    with Disk() as other:
        other.load(tmp_path / NAME)
        other.lose_power()
        assert batches(other) == [1]
    real = sqlite3.connect(tmp_path / NAME)
    assert real.execute("SELECT DISTINCT batch FROM entry").fetchall() == [(1,)]
    real.close()


def test_disks_are_separate() -> None:
    names = apsw.vfs_names()
    with Disk() as first, Disk() as second:
        connections = open_database(first), open_database(second)  # The reference keeps the disk alive.
        write(connections[0], 1)
        write(connections[1], 2)
        assert len(apsw.vfs_names()) == len(names) + 2
        first.lose_power()
        assert batches(first) == [1]
        second.close()
        assert batches(second) == [2]
        assert connections
    assert apsw.vfs_names() == names


def test_second_connection_finds_the_database_locked(disk: Disk) -> None:
    connection = open_database(disk)
    write(connection, 1)
    second = disk.connect(NAME)
    error = error_code_of(lambda: second.execute("SELECT * FROM entry"))
    assert type(error) is sqlite3.OperationalError
    assert (error.sqlite_errorname, str(error)) == ("SQLITE_BUSY", "database is locked")
    connection.close()
    assert len(second.execute("SELECT * FROM entry").fetchall()) == ROWS


def test_locks_between_readers_and_a_writer_match_sqlite(disk: Disk) -> None:
    first, second = disk.connect(NAME), disk.connect(NAME)
    for connection in (first, second):
        connection.execute("PRAGMA locking_mode=NORMAL").fetchall()
    first.execute("CREATE TABLE entry (batch INTEGER)")
    first.execute("BEGIN IMMEDIATE")
    first.execute("INSERT INTO entry VALUES (1)")
    assert second.execute("SELECT * FROM entry").fetchall() == []
    assert error_code_of(lambda: second.execute("BEGIN IMMEDIATE")).sqlite_errorname == "SQLITE_BUSY"
    second.execute("BEGIN")
    second.execute("SELECT * FROM entry").fetchall()
    assert error_code_of(lambda: first.execute("COMMIT")).sqlite_errorname == "SQLITE_BUSY"
    second.execute("COMMIT")
    first.execute("COMMIT")
    assert second.execute("SELECT * FROM entry").fetchall() == [(1,)]


def run_both() -> Iterator[DiskConnection | sqlite3.Connection]:
    with Disk() as disk:
        yield disk.connect(NAME)
    real = sqlite3.connect(":memory:", isolation_level=None)
    yield real
    real.close()


def test_connection_behaves_like_sqlite3() -> None:
    for connection in run_both():
        cursor = connection.execute("CREATE TABLE t (a INTEGER PRIMARY KEY, b, c NOT NULL)")
        assert (cursor.rowcount, cursor.fetchone(), cursor.fetchall()) == (-1, None, [])
        cursor = connection.executemany("INSERT INTO t VALUES (?, ?, ?)", [(1, b"x", "y"), (2, None, "z")])
        assert cursor.rowcount == 2
        in_transaction = [connection.in_transaction]
        connection.execute("BEGIN")
        in_transaction.append(connection.in_transaction)
        assert in_transaction == [False, True]
        assert connection.execute("-- why\n /* and */ UPDATE t SET b = :b", {"b": 2**62}).rowcount == 2
        assert connection.execute("DELETE FROM t WHERE a > 5").rowcount == 0
        connection.execute("ROLLBACK")
        cursor = connection.execute("SELECT * FROM t ORDER BY a")
        assert (cursor.rowcount, cursor.fetchone()) == (-1, (1, b"x", "y"))
        assert (cursor.fetchmany(5), cursor.fetchone()) == ([(2, None, "z")], None)
        assert list(connection.execute("SELECT a FROM t WHERE a IN (?, ?)", [1, 2])) == [(1,), (2,)]
        assert len(connection.execute("SELECT * FROM t").fetchmany(1)) == 1
        assert connection.execute("INSERT INTO t VALUES (3, 3, 3) RETURNING a").fetchall() == [(3,)]


@pytest.mark.parametrize(
    ("sql", "parameters"),
    [
        ("INSERT INTO t VALUES (1)", ()),
        ("INSERT INTO t VALUES (NULL)", ()),
        ("SELECT * FROM nowhere", ()),
        ("SELEC", ()),
        ("COMMIT", ()),
        ("ROLLBACK", ()),
        ("SELECT zeroblob(2000000000)", ()),
        ("SELECT ?", ()),
    ],
)
def test_errors_match_sqlite3(sql: str, parameters: tuple[int, ...]) -> None:
    seen = []
    for connection in run_both():
        connection.execute("CREATE TABLE t (a INTEGER UNIQUE NOT NULL)")
        connection.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(sqlite3.Error) as caught:
            connection.execute(sql, parameters)
        error = caught.value
        named = not isinstance(error, sqlite3.ProgrammingError)
        seen.append((type(error), str(error), error.sqlite_errorcode, error.sqlite_errorname) if named else type(error))
    assert seen[0] == seen[1]


def test_file_that_is_not_a_database_is_reported(disk: Disk, tmp_path: Path) -> None:
    (tmp_path / NAME).write_bytes(b"no database at all" * 100)
    disk.load(tmp_path / NAME)
    error = error_code_of(lambda: disk.connect(NAME).execute("SELECT * FROM sqlite_schema"))
    assert type(error) is sqlite3.DatabaseError
    assert error.sqlite_errorname == "SQLITE_NOTADB"


def test_closed_connection_raises_programming_error(disk: Disk) -> None:
    connection = open_database(disk)
    connection.close()
    connection.close()
    assert type(error_code_of(lambda: connection.execute("SELECT 1"))) is sqlite3.ProgrammingError


def test_connection_may_be_used_in_a_different_thread(disk: Disk) -> None:
    connection = open_database(disk)
    thread = Thread(target=write, args=(connection, 1))
    thread.start()
    thread.join()
    connection.close()
    assert batches(disk) == [1]


def test_killed_process_keeps_written_data_until_power_loss(disk: Disk) -> None:
    connection = open_database(disk)
    write(connection, 1)
    disk.kill_at_sync(1)
    error_code_of(lambda: write(connection, 2))
    assert not disk.is_on
    disk.power_on()
    assert batches(disk) == [1, 2]

    disk.kill()
    error_code_of(lambda: connection.execute("SELECT 1"))
    assert batches(disk) == [1, 2]


@pytest.mark.parametrize("forgets", [False, True])
def test_data_of_a_failed_sync_is_readable_until_power_loss(forgets: bool) -> None:
    with Disk(forgets_failed_syncs=forgets) as disk:
        connection = open_database(disk)
        write(connection, 1)
        disk.kill_at_sync(1)
        error_code_of(lambda: write(connection, 2))
        disk.power_on()
        # Commit again with a successful sync, but do not close the connection, because closing would checkpoint the
        # log.
        after = open_database(disk)
        write(after, 3)
        assert [row[0] for row in after.execute("SELECT DISTINCT batch FROM entry")] == [1, 2, 3]
        disk.lose_power()
        assert batches(disk) == ([1] if forgets else [1, 2, 3])


def test_first_bytes_of_a_file_can_be_read(disk: Disk) -> None:
    assert disk.head(NAME, 6) is None
    open_database(disk).close()
    assert disk.head(NAME, 6) == b"SQLite"

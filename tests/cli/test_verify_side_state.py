"""`oncelog verify` rebuilds entities, relationships, rows and client sequences, in files and in databases (CO-44)."""

import json
import shutil
import sqlite3
import stat
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

import oncelog
from cli.runner import COMMAND, RUNNER
from cli.sample_log import START_MS
from cli.side_state_log import RandomHistory, Writer, compact, row_delta, verify, write, write_sample
from databases import address_of, query
from oncelog.core.deltas import delta
from oncelog.core.merge import Op
from oncelog.core.operations import DeleteEntity, SetEntity
from oncelog.core.values import Committed
from oncelog.storage.verify.findings import Inconsistency, VerificationSummary, VerifyOptions
from oncelog.storage.verify.verification import verify_log

pytestmark = pytest.mark.rule("CO-44")
DAMAGE = {
    "value": ("UPDATE oncelog_entities SET value = substr(value, 2) WHERE key = 'invoice/1'", "entity 'invoice/1'"),
    "version": ("UPDATE oncelog_entities SET version = version + 1 WHERE key = 'invoice/1'", "entity 'invoice/1'"),
    "older version": ("UPDATE oncelog_entities SET version = 0 WHERE key = 'invoice/1'", "entity 'invoice/1'"),
    "expiry": ("UPDATE oncelog_entities SET expires_at_ms = 5 WHERE key = 'invoice/1'", "entity 'invoice/1'"),
    "no expiry": ("UPDATE oncelog_entities SET expires_at_ms = NULL WHERE key = 'later'", "entity 'later'"),
    "missing entity": ("DELETE FROM oncelog_entities WHERE key = 'invoice/1'", "entity 'invoice/1'"),
    "renamed entity": ("UPDATE oncelog_entities SET key = 'invoice/3' WHERE key = 'invoice/1'", "entity 'invoice/3'"),
    "relationship's version": (
        "UPDATE oncelog_relationships SET version = version + 1 WHERE resource = 'invoice/1'",
        "'invoice/1' 'owner' 'ann'",
    ),
    "missing relationship": (
        "DELETE FROM oncelog_relationships WHERE resource = 'invoice/1'",
        "'invoice/1' 'owner' 'ann'",
    ),
    "renamed relationship": (
        "UPDATE oncelog_relationships SET subject = 'eve' WHERE resource = 'invoice/1'",
        "'invoice/1' 'owner' 'eve'",
    ),
    "missing row": ("DELETE FROM oncelog_rows WHERE row_id = 'r1'", "row 'r1'"),
    "renamed row": ("UPDATE oncelog_rows SET row_id = 'r9' WHERE row_id = 'r1'", "row 'r9'"),
    "missing tombstone": ("DELETE FROM oncelog_rows WHERE row_id = 'r5'", "row 'r5'"),
    "row with the state of another": (
        "UPDATE oncelog_rows SET state = (SELECT state FROM oncelog_rows WHERE row_id = 'r2') WHERE row_id = 'r1'",
        "row 'r1'",
    ),
    "client's sequence": (
        "UPDATE oncelog_clients SET sequence = sequence + 1 WHERE client = 'till1'",
        "client 'till1'",
    ),
    "client's earlier sequence": (
        "UPDATE oncelog_clients SET sequence = sequence - 1 WHERE client = 'till1'",
        "client 'till1'",
    ),
    "client's time": ("UPDATE oncelog_clients SET last_seen_ms = 0 WHERE client = 'till1'", "client 'till1'"),
    "missing client": ("DELETE FROM oncelog_clients WHERE client = 'till1'", "client 'till1'"),
    "renamed client": ("UPDATE oncelog_clients SET client = 'eve' WHERE client = 'till1'", "client 'eve'"),
}
"""Statements that both SQLite and PostgreSQL understand."""


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("side-state") / "log.db"
    write(path, write_sample)
    return path


@pytest.fixture(scope="module")
def template_database(tmp_path_factory: pytest.TempPathFactory) -> str:
    address = address_of(tmp_path_factory.mktemp("side-state"))
    write(address, write_sample)
    return address


@pytest.fixture(params=["file", "database"])
def log(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    """Return a file path or a database address for a new log."""
    return tmp_path / "new.db" if request.param == "file" else address_of(tmp_path)


def execute(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    for statement in statements:
        assert connection.execute(statement).rowcount > 0, statement
    connection.commit()
    connection.close()


def execute_in(log: Path | str, statement: str) -> None:
    if isinstance(log, Path):
        execute(log, statement)
    else:
        query(log, statement)


def entities_of(log: Path | str) -> dict[str, tuple[bytes, int]]:
    statement = "SELECT key, value, erased FROM oncelog_entities"
    if isinstance(log, str):
        return {key: (value, erased) for key, value, erased in query(log, statement)}
    with closing(sqlite3.connect(log)) as connection:
        return {key: (value, erased) for key, value, erased in connection.execute(statement)}


def expect_inconsistency(log: Path | str) -> Inconsistency:
    found = verify(log)
    assert isinstance(found, Inconsistency), found
    return found


def expect_pass(log: Path | str) -> VerificationSummary:
    found = verify(log)
    assert isinstance(found, VerificationSummary), found
    return found


# --- damage -------------------------------------------------------------------------------------------


def test_intact_file_passes_the_rebuild(template: Path) -> None:
    found = expect_pass(template)
    assert found.same == {"clients": 4, "entities": 14, "relationships": 11, "rows": 6}
    assert not any(found.not_checkable.values())


def test_intact_database_passes_the_rebuild(template: Path, template_database: str) -> None:
    assert expect_pass(template_database).same == expect_pass(template).same


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_of_a_file_is_reported(template: Path, tmp_path: Path, damage: str) -> None:
    statement, name = DAMAGE[damage]
    path = Path(shutil.copy(template, tmp_path / "log.db"))
    execute(path, statement)
    assert any(name in one for one in expect_inconsistency(path).findings)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entry_of_a_database_is_reported(template_database: str, damage: str) -> None:
    statement, name = DAMAGE[damage]
    table = statement.split("oncelog_")[1].split()[0]
    query(template_database, f"CREATE TABLE kept AS SELECT * FROM oncelog_{table}")  # noqa: S608
    try:
        query(template_database, statement)
        assert any(name in one for one in expect_inconsistency(template_database).findings)
    finally:
        query(template_database, f"DELETE FROM oncelog_{table}")  # noqa: S608
        query(template_database, f"INSERT INTO oncelog_{table} SELECT * FROM kept")  # noqa: S608
        query(template_database, "DROP TABLE kept")


def test_many_damaged_entities_are_counted_and_some_are_listed(tmp_path: Path) -> None:
    async def work(writer: Writer) -> None:
        for number in range(40):
            await writer.transact("ledger/acme", *[SetEntity(f"e{number}/{one}", b"1") for one in range(10)])

    path = tmp_path / "log.db"
    write(path, work)
    execute(path, "DELETE FROM oncelog_entities WHERE key < 'e2'", "UPDATE oncelog_entities SET value = x'32'")
    found = expect_inconsistency(path)
    assert (found.findings_total, len(found.findings)) == (400, 100)
    done = RUNNER.invoke(COMMAND, ["verify", str(path)])
    assert done.exit_code == 1
    first, *lines, last = done.stdout.splitlines()
    assert first == "inconsistent: 400 entries differ from what the records produce:"
    assert lines[0].endswith("entity 'e0/0' of 'ledger/acme' is missing: the record with sequence 1 set it")
    assert len(lines) == 20
    assert last == "  and 380 more"
    report = json.loads(RUNNER.invoke(COMMAND, ["verify", str(path), "--json"]).stdout)
    assert (report["ok"], report["findings_total"], len(report["findings"])) == (False, 400, 100)


# --- state that the records do not determine ----------------------------------------------------------


def test_missing_expired_entities_and_forgotten_clients_are_accepted(template: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(template, tmp_path / "log.db"))
    execute(path, "DELETE FROM oncelog_entities WHERE key = 'gone'")
    assert expect_pass(path).same["entities"] == 13


def test_state_of_erased_transactions_is_reported_as_not_checkable(log: Path | str) -> None:
    async def work(writer: Writer) -> None:
        for number in range(4):
            await writer.transact("ledger/acme", SetEntity(f"e{number}", b"secret"), SetEntity(f"x{number}", b"1"))
        await writer.transact("ledger/acme", DeleteEntity("x1"), SetEntity("e0", b"new"))
        lane = next(iter(await writer.store.heads()))
        await writer.store.erase(lane, [1, 2])

    write(log, work)
    found = expect_pass(log)
    assert found.same["entities"] == 5  # e0, e2, e3, x2, x3
    assert found.not_checkable["entities"] == 2  # x0, e1
    shown = entities_of(log)
    assert (shown["e1"], shown["x0"], shown["e0"]) == ((b"", 1), (b"", 1), (b"new", 0))
    execute_in(log, "UPDATE oncelog_entities SET erased = 0 WHERE key = 'x0'")  # as in earlier versions
    assert expect_pass(log).not_checkable["entities"] == 2
    execute_in(log, "UPDATE oncelog_entities SET erased = 1 WHERE key = 'e0'")
    assert "entity 'e0'" in expect_inconsistency(log).findings[0]


def test_value_of_an_entity_that_is_marked_as_erased_is_found(log: Path | str) -> None:
    async def work(writer: Writer) -> None:
        await writer.transact("ledger/acme", SetEntity("e", b"secret"))
        lane = next(iter(await writer.store.heads()))
        await writer.store.erase(lane, [1])

    write(log, work)
    value = "x'31'" if isinstance(log, Path) else r"'\x31'"
    execute_in(log, f"UPDATE oncelog_entities SET value = {value}")  # noqa: S608
    assert (
        expect_inconsistency(log)
        .findings[0]
        .endswith("entity 'e' of 'ledger/acme' is marked as erased, but has a value")
    )


def test_damage_is_found_in_a_log_with_erased_transactions(tmp_path: Path) -> None:
    async def work(writer: Writer) -> None:
        await writer.transact("ledger/acme", SetEntity("erased", b"1"), SetEntity("deleted", b"1"))
        await writer.transact("ledger/acme", SetEntity("kept", b"1"), DeleteEntity("deleted"))
        lane = next(iter(await writer.store.heads()))
        await writer.store.erase(lane, [1])

    path = tmp_path / "log.db"
    write(path, work)
    insert = (
        "INSERT INTO oncelog_entities (lane, scope, key, value, version) "
        "SELECT lane, scope, '{}', x'31', {} FROM oncelog_entities WHERE key = 'kept'"
    )
    for statement in (
        "UPDATE oncelog_entities SET value = x'32' WHERE key = 'kept'",
        "DELETE FROM oncelog_entities WHERE key = 'kept'",
        insert.format("deleted", 1),
        insert.format("invented", 2),
        insert.format("invented", 3),
    ):
        copy = Path(shutil.copy(path, tmp_path / "copy.db"))
        execute(copy, statement)
        assert expect_inconsistency(copy).findings_total == 1, statement


def test_rows_compacted_by_an_earlier_version_are_reported_as_not_checkable(log: Path | str) -> None:
    async def work(writer: Writer) -> None:
        hlc = START_MS << 16
        await writer.push("deltas/shop", row_delta(hlc, "r1", a="1"), row_delta(hlc + 1, "r2", a="1"))
        await writer.push("deltas/shop", row_delta(hlc + 2, "r3", a="1"), row_delta(hlc + 3, "r4", Op.DELETE))
        assert await compact(writer, "deltas/shop", 4, has_folds=False) == 1
        await writer.push("deltas/shop", row_delta(hlc + 9, "r2", a="2"), row_delta(hlc + 10, "r5", a="2"))

    write(log, work)
    found = expect_pass(log)
    assert (found.same["rows"], found.not_checkable["rows"]) == (2, 2)


async def write_compacted(writer: Writer) -> None:
    """Compact the deltas of five rows, drop a tombstone, and change one of the rows."""
    hlc = START_MS << 16
    for number in range(1, 6):
        await writer.push("deltas/shop", row_delta(hlc + number, f"r{number}", a="1", b="2"))
    await writer.push("deltas/shop", row_delta(hlc + 8, "r5", Op.DELETE), row_delta(hlc + 9, "r4", Op.DELETE))
    assert await compact(writer, "deltas/shop", 6) == 1
    await writer.push("deltas/shop", row_delta(hlc + 19, "r2", a="2"))


def test_compacted_rows_are_compared_with_the_digest_of_the_compaction(log: Path | str) -> None:
    write(log, write_compacted)
    found = expect_pass(log)
    assert (found.same["rows"], found.not_checkable["rows"]) == (3, 1)  # r2 has a newer delta
    state = "(SELECT state FROM oncelog_rows WHERE row_id = 'r3')"
    execute_in(log, f"UPDATE oncelog_rows SET state = {state} WHERE row_id = 'r1'")  # noqa: S608
    assert "row 'r1' of table 'todos' of 'deltas/shop' differs" in expect_inconsistency(log).findings[0]
    execute_in(log, "DELETE FROM oncelog_rows WHERE row_id = 'r1'")
    assert "row 'r1' of table 'todos' of 'deltas/shop' is missing" in expect_inconsistency(log).findings[0]


def test_row_without_a_compacted_delta_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    write(path, write_compacted)
    execute(
        path,
        "INSERT INTO oncelog_rows (lane, scope, table_name, row_id, state) "
        "SELECT lane, scope, table_name, 'r9', state FROM oncelog_rows WHERE row_id = 'r3'",
    )
    assert (
        "row 'r9' of table 'todos' of 'deltas/shop' is stored, but no delta created it"
        in expect_inconsistency(path).findings[0]
    )


async def test_compaction_commits_digests_and_verify_checks_them(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    now = time.time_ns() // 1_000_000
    async with oncelog.open(path) as log:
        for number in range(20):
            change = row_delta((now << 16) + number, f"r{number % 7}", a=str(number))
            assert isinstance(await log.submit(delta("deltas/shop", change)), Committed)
        await log.compact("deltas/shop", keep=0)
    assert expect_pass(path).same["rows"] == 7
    other = "(SELECT state FROM oncelog_rows WHERE row_id = 'r1')"
    execute(path, f"UPDATE oncelog_rows SET state = {other} WHERE row_id = 'r2'")  # noqa: S608
    assert "row 'r2'" in expect_inconsistency(path).findings[0]
    shown = RUNNER.invoke(COMMAND, ["verify", str(path)])
    assert shown.exit_code == 1


def test_delta_that_lost_to_the_horizon_is_rebuilt(log: Path | str) -> None:
    async def work(writer: Writer) -> None:
        hlc = START_MS << 16
        await writer.push("deltas/shop", row_delta(hlc, "r1", Op.DELETE))
        assert await compact(writer, "deltas/shop", 1) == 1
        await writer.push("deltas/shop", row_delta(hlc - 9, "r1", a="1"), row_delta(hlc - 8, "r2", Op.DELETE))
        await writer.push("deltas/shop", row_delta(hlc - 7, "r3", a="1"), row_delta(hlc + 9, "r3", a="2"))

    write(log, work)
    assert expect_pass(log).same["rows"] == 2


@pytest.mark.parametrize("seed", range(8))
def test_random_history_in_a_file_is_rebuilt(tmp_path: Path, seed: int) -> None:
    path = tmp_path / "log.db"
    write(path, lambda writer: RandomHistory(seed).write(writer, 150))
    found = expect_pass(path)
    assert found.same["entities"] + found.not_checkable["entities"] > 0


@pytest.mark.parametrize("seed", range(100, 102))
def test_random_history_in_a_database_is_rebuilt(database: str, seed: int) -> None:
    write(database, lambda writer: RandomHistory(seed).write(writer, 100))
    expect_pass(database)


def test_restored_log_is_rebuilt(tmp_path: Path) -> None:
    path = tmp_path / "log.db"

    async def work(writer: Writer) -> None:
        await RandomHistory(1).write(writer, 40)
        await writer.store.renew_epoch()
        await RandomHistory(2).write(writer, 40)

    write(path, work)
    assert expect_pass(path).restore_records > 0


# --- the command --------------------------------------------------------------------------------------


def test_rebuilding_can_be_disabled(template: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(template, tmp_path / "log.db"))
    execute(path, DAMAGE["value"][0])
    assert isinstance(verify(path, VerifyOptions(side_state=False)), VerificationSummary)
    assert RUNNER.invoke(COMMAND, ["verify", str(path), "--no-side-state"]).exit_code == 0
    execute(path, DAMAGE["missing client"][0])
    assert isinstance(verify(path, VerifyOptions(side_state=False)), Inconsistency)


def test_temporary_file_is_private_and_has_no_name(template: Path, tmp_path: Path) -> None:
    seen = set()
    for _ in verify_log(template, None, VerifyOptions(temp_dir=str(tmp_path))):
        assert list(tmp_path.iterdir()) == []
        for open_store in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):
                if str(open_store.readlink()).startswith(str(tmp_path)):
                    seen.add(stat.S_IMODE(open_store.stat().st_mode))
    assert seen == {0o600}


def test_summary_counts_the_rebuilt_entries(template: Path) -> None:
    done = RUNNER.invoke(COMMAND, ["verify", str(template), "--quiet"])
    assert "4 clients, 14 entities, 11 relationships, 6 rows match the records" in done.stdout

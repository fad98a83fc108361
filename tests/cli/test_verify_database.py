"""`oncelog verify postgresql://…` finds every change to a database, and accepts an intact log."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import msgspec
import pytest
from msgspec.structs import replace

from cli import sample_log
from cli.damage import IMPOSSIBLE_SIDE_STATE, LogEditor
from cli.runner import COMMAND, RUNNER
from cli.test_verify import AUDIT_RECORDS, BLOBS, NUMBERS, RECORDS, TEXT, change_value
from core.item_builders import result
from databases import address_of, query
from deadlines import wait_until
from oncelog.core.proof import Block, compute_root, encode_record_header, hash_leaf
from oncelog.errors import CorruptError, StoreUnavailableError
from oncelog.storage.inspect.postgres import VALUES_PAGE_ROWS, DatabaseView, open_session
from oncelog.storage.key_hash import hash_identity
from oncelog.storage.postgres.database import load_metadata
from oncelog.storage.postgres.query_driver import run_query
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.queries.records import load_evidence
from oncelog.storage.verify.findings import (
    Inconsistency,
    InconsistencyError,
    StepProgress,
    VerificationSummary,
    decode_exported_head,
)
from oncelog.storage.verify.postgres import EXPECTED_SCHEMA, SHORT_BODY_BYTES_MAX, load_schema
from oncelog.storage.verify.verification import verify, verify_log

HASHES = ("key_hash", "sequence_hash")
ROUNDS = 8
REFUSED = InconsistencyError("a unique index does not let such a change be made")


class DatabaseEditor(LogEditor):
    """Edits a log in a database."""

    def __init__(self, view: DatabaseView) -> None:
        self.view = view
        view.metadata = view.call(load_metadata, "the log")

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        async def fetched(connection: Any) -> list[tuple[Any, ...]]:
            return [tuple(row) for row in await connection.fetch(statement, *parameters)]

        return self.view.call(fetched)

    def verify_after(self, *statements: tuple[str, tuple[Any, ...]]) -> InconsistencyError | None:
        transaction = self.view.call(_begin)
        try:
            changed = [self.view.call(_execute, text, *parameters) for text, parameters in statements]
            assert not all(one.endswith(" 0") for one in changed), statements
            return self.verify()
        except CorruptError as error:
            if not isinstance(error.__cause__, asyncpg.UniqueViolationError):
                raise
            return REFUSED
        finally:
            self.view.call(_roll_back, transaction)

    def verify(self) -> InconsistencyError | None:
        try:
            *_, last = verify(self.view)
        except InconsistencyError as error:
            return error
        assert isinstance(last, VerificationSummary)
        return None


async def _execute(connection: Any, statement: str, *parameters: Any) -> str:
    output: str = await connection.execute(statement, *parameters)
    return output


async def _begin(connection: Any) -> Any:
    transaction = connection.transaction(isolation="repeatable_read")
    await transaction.start()
    return transaction


async def _roll_back(_connection: Any, transaction: Any) -> None:
    await transaction.rollback()


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> str:
    address = address_of(tmp_path_factory.mktemp("verify"))
    sample_log.make_log(address, ROUNDS)
    return address


@pytest.fixture(scope="module")
def editor(template: str) -> Iterator[DatabaseEditor]:
    with open_session(template) as session:
        yield DatabaseEditor(session)


def verify_address(address: str, **given: Any) -> VerificationSummary | Inconsistency:
    *_, last = verify_log(address, **given)
    assert isinstance(last, (VerificationSummary, Inconsistency))
    return last


# --- intact logs --------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18", "CO-41")
def test_intact_log_with_erased_records_passes(database: str) -> None:
    sample_log.make_log(database)
    *progress, last = verify_log(database)
    assert isinstance(last, VerificationSummary)
    assert (last.records, last.lanes, last.erased) == (RECORDS, 5, 10)
    assert last.keys > RECORDS
    assert (last.sealed_keys, last.segments) == (0, 0)
    assert progress
    assert all(isinstance(one, StepProgress) for one in progress)


def test_almost_empty_log_passes(database: str) -> None:
    sample_log.make_log(database, rounds=0)
    last = verify_address(database)
    assert isinstance(last, VerificationSummary)
    assert last.records == 1 + AUDIT_RECORDS


def test_verification_reads_a_snapshot_during_writes(database: str) -> None:
    sample_log.make_log(database, rounds=1)
    findings = verify_log(database)
    assert next(findings) == StepProgress("structure")
    sample_log.append(database, sample_log.full_event(5000, ["orders"]))
    *_, last = findings
    assert isinstance(last, VerificationSummary)
    after = verify_address(database)
    assert isinstance(after, VerificationSummary)
    assert after.records == last.records + 1


def test_stopped_verification_leaves_no_session(database: str) -> None:
    sample_log.make_log(database, rounds=0)
    findings = verify_log(database)
    next(findings)
    findings.close()  # type: ignore[attr-defined]
    schema = database.rpartition("=")[2]
    ours = "SELECT count(*) FROM pg_locks JOIN pg_class ON relation = oid WHERE relnamespace = $1::text::regnamespace"
    # The server ends a session some time after the client closes it.
    wait_until(lambda: query(database, ours, schema) == [(0,)], lambda: f"the session of {schema} still has locks")


def test_several_pages_of_records_and_a_large_body_are_verified(database: str) -> None:
    sample_log.make_log(database, rounds=1)
    many = [result(1000 + number, scope="campaign/7") for number in range(2 * VALUES_PAGE_ROWS + 1)]
    long = result(1, "long", scope="campaign/8")
    sample_log.append(database, *many, msgspec.structs.replace(long, body=os.urandom(SHORT_BODY_BYTES_MAX + 1)))
    assert isinstance(verify_address(database), VerificationSummary)
    change = (
        "UPDATE oncelog_records SET body = overlay(body PLACING '\\x00'::bytea FROM 1) WHERE octet_length(body) > $1"
    )
    query(
        database,
        change.replace("'\\x00'", "set_byte(substring(body FROM 1 FOR 1), 0, get_byte(body, 0) # 1)"),
        SHORT_BODY_BYTES_MAX,
    )
    found = verify_address(database)
    assert isinstance(found, Inconsistency)
    assert "does not match its records" in found.message


# --- records ------------------------------------------------------------------------------------------


def sample_places(editor: DatabaseEditor) -> list[tuple[int, int]]:
    """Return the places of an intact and an erased record under every policy."""
    groups = (
        "SELECT DISTINCT ON (policy, body IS NULL) lane, position FROM oncelog_records ORDER BY policy, body IS NULL"
    )
    return [(lane, position) for lane, position in editor.rows(groups)]


@pytest.mark.rule("LG-18")
def test_changed_column_of_a_record_is_found(editor: DatabaseEditor) -> None:
    changes = 0
    for place in sample_places(editor):
        for column in (*TEXT, *BLOBS, *NUMBERS, *HASHES):
            query = f"SELECT {column} FROM oncelog_records WHERE lane = $1 AND position = $2"  # noqa: S608
            [(value,)] = editor.rows(query, *place)
            others = change_value(value) if column not in HASHES or value is not None else [1]
            nulls = [None] if column in {"salt", "body", "body_hash", *HASHES} and value is not None else []
            for other in [*others, *nulls]:
                change = f"UPDATE oncelog_records SET {column} = $1 WHERE lane = $2 AND position = $3"  # noqa: S608
                found = editor.expect_found(change, other, *place)
                assert found is REFUSED or found.lane == place[0], column
                changes += found is not REFUSED
    assert changes > 300


@pytest.mark.rule("LG-18")
def test_any_changed_or_missing_record_is_found(editor: DatabaseEditor) -> None:
    columns = (*TEXT, *BLOBS, *NUMBERS, *HASHES)
    for number, (lane, position, *values) in enumerate(
        editor.rows(f"SELECT lane, position, {', '.join(columns)} FROM oncelog_records")  # noqa: S608
    ):
        gone = editor.expect_found("DELETE FROM oncelog_records WHERE lane = $1 AND position = $2", lane, position)
        assert (gone.lane, gone.position) == (lane, position)
        column, value = columns[number % len(columns)], values[number % len(columns)]
        other = 1 if column in HASHES and value is None else change_value(value)[-1]
        change = f"UPDATE oncelog_records SET {column} = $1 WHERE lane = $2 AND position = $3"  # noqa: S608
        editor.expect_found(change, other, lane, position)


def test_record_at_a_wrong_position_is_found(editor: DatabaseEditor) -> None:
    move = "UPDATE oncelog_records SET lane = $1, position = $2 WHERE lane = $3 AND position = $4"
    for lane, position in sample_places(editor):
        for other in ((lane + 1, position + 1000), (lane, position + 1000), (-1, -1), (9, 1)):
            editor.expect_found(move, *other, lane, position)
    for one, two in (((0, 1), (0, 2)), ((0, 3), (0, 9)), ((1, 1), (3, 1))):
        found = editor.verify_after((move, (0, 999, *one)), (move, (*one, *two)), (move, (*two, 0, 999)))
        assert found is not None


def test_foreign_record_is_found(editor: DatabaseEditor) -> None:
    columns = ", ".join((*TEXT, *BLOBS, "log_time_ms", "height", "client_sequence", *HASHES))
    insert = (
        f"INSERT INTO oncelog_records (lane, position, sequence, {columns}) "  # noqa: S608
        f"SELECT lane, position + 1, CASE WHEN sequence > 0 THEN 900 ELSE 0 END, {columns} "
        "FROM oncelog_records WHERE lane = $1 AND position = $2"
    )
    for lane, position in editor.rows("SELECT lane, position FROM oncelog_lanes"):
        found = editor.expect_found(insert, lane, position)
        assert (found.lane, found.position) == (lane, position + 1)
        assert "in no block" in str(found)


# --- blocks and heads ---------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
def test_changed_or_missing_block_is_found(editor: DatabaseEditor) -> None:
    columns = ("first_position", "count", "log_time_ms", "previous", "root")
    rows = editor.rows(f"SELECT lane, height, {', '.join(columns)} FROM oncelog_blocks ORDER BY lane, height")  # noqa: S608
    for row in rows:
        found = editor.expect_found("DELETE FROM oncelog_blocks WHERE lane = $1 AND height = $2", *row[:2])
        assert found.lane == row[0]
    for row in rows[::9] + rows[-1:]:
        for column, value in zip(columns, row[2:], strict=True):
            for other in change_value(value):
                change = f"UPDATE oncelog_blocks SET {column} = $1 WHERE lane = $2 AND height = $3"  # noqa: S608
                editor.expect_found(change, other, *row[:2])
        editor.expect_found("UPDATE oncelog_blocks SET height = height + 900 WHERE lane = $1 AND height = $2", *row[:2])
        editor.expect_found("UPDATE oncelog_blocks SET lane = lane + 90 WHERE lane = $1 AND height = $2", *row[:2])
    editor.expect_found("UPDATE oncelog_blocks SET count = 1::bigint << 62 WHERE lane = 0 AND height = 1")


def test_changed_or_missing_head_is_found(editor: DatabaseEditor) -> None:
    for (lane,) in editor.rows("SELECT lane FROM oncelog_lanes"):
        editor.expect_found("DELETE FROM oncelog_lanes WHERE lane = $1", lane)
        editor.expect_found("UPDATE oncelog_lanes SET lane = 77 WHERE lane = $1", lane)
        for column in ("position", "height", "block_hash", "eviction_time_ms"):
            [(value,)] = editor.rows(f"SELECT {column} FROM oncelog_lanes WHERE lane = $1", lane)  # noqa: S608
            for other in change_value(value):
                found = editor.expect_found(f"UPDATE oncelog_lanes SET {column} = $1 WHERE lane = $2", other, lane)  # noqa: S608
                assert found.lane == lane
        editor.expect_found("UPDATE oncelog_lanes SET log_time_ms = 0 WHERE lane = $1", lane)
        editor.expect_found("UPDATE oncelog_lanes SET revision = 1 WHERE lane = $1", lane)
    editor.expect_found("UPDATE oncelog_lanes SET fence = 0 WHERE fence > 0")
    editor.expect_found("INSERT INTO oncelog_lanes SELECT 5, 0, 0, 0, 0, 0, 0, previous FROM oncelog_blocks LIMIT 1")


# --- state derived from the records -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "keys"),
    [
        ("partition_records", ("lane", "partition", "position")),
        ("streams", ("lane", "scope")),
        ("clients", ("lane", "policy", "scope", "client")),
    ],
)
def test_changed_missing_or_extra_index_row_is_found(editor: DatabaseEditor, table: str, keys: tuple[str, ...]) -> None:
    prefix = f"table oncelog_{table}, column "
    columns = [name.removeprefix(prefix) for name in EXPECTED_SCHEMA if name.startswith(prefix)]
    columns = [column for column in columns if column != "digest"]
    rows = editor.rows(f"SELECT {', '.join(columns)} FROM oncelog_{table}")  # noqa: S608
    marks = " AND ".join(f"{column} = ${number}" for number, column in enumerate(columns, 1))
    values = ", ".join(f"${number}" for number in range(1, len(columns) + 1))
    remove = f"DELETE FROM oncelog_{table} WHERE {marks}"  # noqa: S608
    add = f"INSERT INTO oncelog_{table} ({', '.join(columns)}) VALUES ({values}) ON CONFLICT DO NOTHING"  # noqa: S608
    for row in rows[:: max(1, len(rows) // 5)]:
        editor.expect_found(remove, *row)
        for place, column in enumerate(columns):
            for other in change_value(row[place])[:2]:
                changed = (*row[:place], other, *row[place + 1 :])
                if changed not in rows:
                    assert editor.verify_after((remove, row), (add, changed)) is not None, (column, other)
                if column in keys and other not in {one[place] for one in rows}:
                    editor.expect_found(add, *changed)


def test_wrong_partition_row_is_reported(editor: DatabaseEditor) -> None:
    more = "INSERT INTO oncelog_partition_records SELECT lane, 'more', position FROM oncelog_records WHERE lane = 0"
    assert "the index lists the partition 'more' here, but no such record exists" in str(editor.expect_found(more))
    less = "DELETE FROM oncelog_partition_records WHERE partition = 'größe'"
    assert "the record is not found under the partition 'größe'" in str(editor.expect_found(less))


@pytest.mark.parametrize(
    "statement",
    [
        *IMPOSSIBLE_SIDE_STATE,
        "UPDATE oncelog_rates SET full_at_us = 9223372036854775807",
        "UPDATE oncelog_rows SET state = '\\x00'",
    ],
)
def test_impossible_side_state_is_found(editor: DatabaseEditor, statement: str) -> None:
    editor.expect_found(statement)


# --- tables and indexes -------------------------------------------------------------------------------

SUPPRESS = "FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()"


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (
            "DROP TABLE oncelog_rates",
            "the table oncelog_rates is missing; the table",
        ),
        ("CREATE TABLE oncelog_more (x integer)", "the table oncelog_more does not belong to Oncelog"),
        (
            "ALTER TABLE oncelog_rows ADD COLUMN more text",
            "the table oncelog_rows, column more does not belong to Oncelog",
        ),
        ("ALTER TABLE oncelog_rows DROP COLUMN state", "column state is missing"),
        (
            "ALTER TABLE oncelog_records ALTER COLUMN actor TYPE varchar(900)",
            "column actor differs from Oncelog's definition",
        ),
        (
            'ALTER TABLE oncelog_streams ALTER COLUMN scope TYPE text COLLATE "POSIX"',
            "column scope differs from Oncelog's definition",
        ),
        ("ALTER TABLE oncelog_blocks ALTER COLUMN root DROP NOT NULL", "column root differs from Oncelog's definition"),
        (
            "ALTER TABLE oncelog_entities SET UNLOGGED",
            "oncelog_entities, column erased differs from Oncelog",
        ),
        ("DROP INDEX oncelog_records_key", "the index oncelog_records_key is missing"),
        ("ALTER TABLE oncelog_partition_records DROP CONSTRAINT oncelog_partition_records_pkey", "_pkey is missing"),
        (
            "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'oncelog_records_stream'::regclass",
            "the index oncelog_records_stream differs from Oncelog's definition",
        ),
        (
            f"CREATE TRIGGER evil BEFORE UPDATE ON oncelog_members {SUPPRESS}",
            "the trigger evil on oncelog_members does not belong to Oncelog",
        ),
        (
            "CREATE RULE evil AS ON INSERT TO oncelog_records DO ALSO DELETE FROM oncelog_members",
            "the rule evil on oncelog_records does not belong to Oncelog",
        ),
        (
            "CREATE POLICY evil ON oncelog_records USING (lane > 0)",
            "the policy evil on oncelog_records does not belong",
        ),
        ("CREATE VIEW oncelog_evil AS SELECT 1", "the view oncelog_evil does not belong to Oncelog"),
    ],
)
def test_changed_schema_is_found(editor: DatabaseEditor, statement: str, words: str) -> None:
    assert words in str(editor.expect_found(statement))


def test_additional_indexes_and_tables_are_accepted(editor: DatabaseEditor) -> None:
    added = ("CREATE INDEX oncelog_records_actor ON oncelog_records (actor)", ())
    table = ("CREATE TABLE orders (id integer REFERENCES orders2)", ())
    referred = ("CREATE TABLE orders2 (id integer PRIMARY KEY)", ())
    trigger = (
        f"CREATE TRIGGER own BEFORE UPDATE ON orders {SUPPRESS}",
        (),
    )
    assert editor.verify_after(added, referred, table, trigger) is None


def test_expected_schema_matches_the_migrations(template: str) -> None:
    """If they differ, regenerate `sql/shape.json`."""
    with open_session(template) as session:
        found = session.call(_begin)
        shape = load_schema(session)
        session.call(_roll_back, found)
    assert json.dumps(msgspec.to_builtins(EXPECTED_SCHEMA), indent=2) == json.dumps(
        msgspec.to_builtins(shape), indent=2
    )


@pytest.mark.parametrize("change", ["set_byte(index_secret, 3, 1 # get_byte(index_secret, 3))", "'\\x00'::bytea"])
def test_changed_index_secret_is_found(database: str, change: str) -> None:
    sample_log.make_log(database, rounds=1)
    query(database, f"UPDATE oncelog_log SET index_secret = {change}")  # noqa: S608
    assert isinstance(verify_address(database), Inconsistency)


# --- rewritten histories with matching hashes ---------------------------------------------------------


async def _rehash(connection: Any) -> None:
    """Recompute all hashes, as an attacker with write access to the database could."""
    secret = await connection.fetchval("SELECT index_secret FROM oncelog_log")
    previous: dict[int, bytes] = {}
    for row in await connection.fetch(SQL["all_blocks"]):
        block = Block(*row)
        upto = block.first_position + block.count - 1
        proofs = await run_query(connection, load_evidence, block.lane, block.first_position - 1, upto)
        for record in (one.record for one in proofs if one.record.key):
            change = "UPDATE oncelog_records SET key_hash = $1 WHERE lane = $2 AND position = $3"
            await connection.execute(change, hash_identity(secret, record.identity), record.lane, record.position)
        root = compute_root([hash_leaf(encode_record_header(one.record), one.body_hash) for one in proofs])
        block = replace(block, root=root, previous=previous.get(block.lane, bytes(32)))
        previous[block.lane] = block.hash
        await connection.execute(
            "UPDATE oncelog_blocks SET root = $1, previous = $2 WHERE lane = $3 AND height = $4",
            *(block.root, block.previous, block.lane, block.height),
        )
    for lane, newest in previous.items():
        await connection.execute("UPDATE oncelog_lanes SET block_hash = $1 WHERE lane = $2", newest, lane)


def forge(address: str, *statements: str) -> None:
    with open_session(address) as session:
        for statement in statements:
            assert not session.call(_execute, statement).endswith(" 0")
        session.call(_rehash)


def export_head(address: str, path: Path) -> Path:
    done = RUNNER.invoke(COMMAND, ["head", address])
    assert done.exit_code == 0
    path.write_text(done.stdout)
    return path


@pytest.mark.rule("LG-18")
def test_rewritten_history_is_found_with_an_exported_head(database: str, tmp_path: Path) -> None:
    sample_log.make_log(database, rounds=2)
    head = export_head(database, tmp_path / "head.json")
    assert RUNNER.invoke(COMMAND, ["verify", database, "--head", str(head)]).exit_code == 0
    forge(database, "UPDATE oncelog_records SET body = '{}' WHERE lane = 0 AND position = 3")
    assert RUNNER.invoke(COMMAND, ["verify", database]).exit_code == 0
    done = RUNNER.invoke(COMMAND, ["verify", database, "--head", str(head)])
    assert done.exit_code == 1
    assert "lane 0" in done.stdout
    assert "rewritten" in done.stdout


@pytest.mark.rule("LG-18")
def test_truncated_history_is_found_with_an_exported_head(database: str, tmp_path: Path) -> None:
    sample_log.make_log(database, rounds=2)
    older = query(database, "SELECT position, height, block_hash FROM oncelog_lanes WHERE lane = 0")[0]
    sample_log.append(database, sample_log.full_event(5000, ["orders"]))
    head = export_head(database, tmp_path / "head.json")
    assert RUNNER.invoke(COMMAND, ["verify", database, "--head", str(head)]).exit_code == 0
    for table in ("records", "partition_records"):
        query(database, f"DELETE FROM oncelog_{table} WHERE lane = 0 AND position > $1", older[0])  # noqa: S608
    query(database, "DELETE FROM oncelog_blocks WHERE lane = 0 AND height > $1", older[1])
    query(database, "UPDATE oncelog_lanes SET position = $1, height = $2, block_hash = $3 WHERE lane = 0", *older)
    assert RUNNER.invoke(COMMAND, ["verify", database]).exit_code == 0
    done = RUNNER.invoke(COMMAND, ["verify", database, "--head", str(head), "--json"])
    assert done.exit_code == 1
    output = json.loads(done.stdout)
    assert (output["ok"], output["lane"]) == (False, 0)
    assert "the newest records are missing" in output["message"]


@pytest.mark.rule("CO-40")
def test_epoch_that_differs_from_the_exported_head_is_reported(template: str, tmp_path: Path) -> None:
    head = decode_exported_head(export_head(template, tmp_path / "head.json").read_bytes())
    last = verify_address(template, head=replace(head, epoch="0011223344556677"))
    assert isinstance(last, Inconsistency)
    assert "0011223344556677" in last.message


def test_identity_stored_twice_is_found(database: str) -> None:
    sample_log.make_log(database, rounds=5)
    first = "(SELECT key FROM oncelog_records WHERE lane = 0 AND position = 1)"
    forge(database, f"UPDATE oncelog_records SET key = {first} WHERE lane = 0 AND position = 9")  # noqa: S608
    last = verify_address(database)
    assert isinstance(last, Inconsistency)
    assert (last.lane, last.position) == (0, 9)
    assert "the record at position 1 has it" in last.message


# --- the command --------------------------------------------------------------------------------------


def test_verify_prints_one_line(database: str) -> None:
    sample_log.make_log(database, rounds=3)
    done = RUNNER.invoke(COMMAND, ["verify", database])
    assert done.exit_code == 0
    assert re.fullmatch(
        r"ok: 28 records and 4 audit records in 5 lanes, \d+ blocks, \d+ erased, \d+ keys, .*epoch [0-9a-f]{16}\n",
        done.stdout,
    )
    assert done.stderr == ""
    output = json.loads(RUNNER.invoke(COMMAND, ["verify", database, "--json"]).stdout)
    assert (output["ok"], output["records"], output["sealed_keys"]) == (True, 28 + AUDIT_RECORDS, 0)
    query(database, "DELETE FROM oncelog_records WHERE lane = 0 AND position = 4")
    done = RUNNER.invoke(COMMAND, ["verify", database])
    assert done.exit_code == 1
    assert done.stdout == "inconsistent: lane 0, position 4: the record is missing (its block has height 2)\n"


def test_lost_connection_is_not_reported_as_damage(database: str) -> None:
    sample_log.make_log(database, rounds=1)
    findings = verify_log(database)
    next(findings)
    _end_other_sessions(database)
    with pytest.raises(StoreUnavailableError):
        list(findings)


def _end_other_sessions(address: str) -> None:
    locks = "SELECT DISTINCT pid FROM pg_locks JOIN pg_class ON relation = oid WHERE relname = 'oncelog_log'"
    query(address, f"SELECT pg_terminate_backend(pid) FROM ({locks}) AS l WHERE pid <> pg_backend_pid()")  # noqa: S608

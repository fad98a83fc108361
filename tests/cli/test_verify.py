"""`oncelog verify` finds every change to a file, and accepts an intact log."""

import json
import os
import pty
import random
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from cli import sample_log
from cli.damage import IMPOSSIBLE_SIDE_STATE, LogEditor
from cli.processes import Command
from cli.runner import COMMAND, RUNNER
from oncelog.core.proof import Block, compute_root, encode_record_header, hash_leaf
from oncelog.errors import OncelogError
from oncelog.storage.inspect.sqlite import FileView
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.queries.records import load_evidence
from oncelog.storage.record_rows import decode_evidence
from oncelog.storage.sqlite.database_file import load_metadata
from oncelog.storage.sqlite.key_index import index, key_run, segments
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.verify.findings import (
    Inconsistency,
    InconsistencyError,
    StepProgress,
    VerificationSummary,
    decode_exported_head,
)
from oncelog.storage.verify.verification import verify, verify_log

RECORDS = 276
AUDIT_RECORDS = 4
"""One finding for each lane in which members were added."""
TEXT = ("policy", "scope", "client", "actor", "partitions")
BLOBS = ("key", "fingerprint", "salt", "body", "body_hash")
NUMBERS = ("sequence", "log_time_ms", "height", "client_sequence")


class FileEditor(LogEditor):
    """Edits a log in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.connection = sqlite3.connect(path, isolation_level=None)
        self.file: LogMetadata = load_metadata(self.connection, str(path))

    def rows(self, statement: str, *parameters: Any) -> list[tuple[Any, ...]]:
        return self.connection.execute(statement, parameters).fetchall()

    def verify_after(self, *statements: tuple[str, tuple[Any, ...]]) -> InconsistencyError | None:
        self.connection.execute("BEGIN")
        try:
            changed = 0
            for statement, parameters in statements:
                changed += self.connection.execute(statement, parameters).rowcount
            assert changed > 0, statements
            return self.verify()
        finally:
            self.connection.execute("ROLLBACK")

    def verify(self) -> InconsistencyError | None:
        try:
            *_, last = verify(FileView(self.connection, str(self.path), self.file))
        except InconsistencyError as error:
            return error
        finally:
            self.connection.text_factory = str
        assert isinstance(last, VerificationSummary)
        return None


@pytest.fixture(scope="module", autouse=True)
def small_segments() -> Iterator[None]:
    """Use small segments and a fan-out of four, so that a few keys are enough for several runs and merges."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index, "FAN_OUT", 4)
        patched.setattr(segments, "CLEAR_RUNS", 2)
        patched.setattr(key_run, "RUN_KEYS", 5)
        yield


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verify") / "log.db"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(index, "WORK_FACTOR", 20)  # finishes all work on the key index
        sample_log.make_log(path)
    return path


@pytest.fixture
def copy(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(template, tmp_path / "log.db"))


@pytest.fixture
def editor(template: Path) -> Iterator[FileEditor]:
    found = FileEditor(template)
    yield found
    found.connection.close()


def change_value(value: Any) -> list[Any]:
    """Return several slightly changed copies of a value."""
    if value is None:
        return [b"", bytes(32)]
    if isinstance(value, int):
        return [value + 1, value - 1]
    if not value:
        return [value + (b"\0" if isinstance(value, bytes) else "x")]
    if isinstance(value, str):
        return [value + "x", value[:-1] + chr(ord(value[-1]) ^ 1), chr(ord(value[0]) ^ 1) + value[1:]]
    first, last = bytes([value[0] ^ 1]), bytes([value[-1] ^ 128])
    return [value + b"\0", value[:-1], first + value[1:], value[:-1] + last]


# --- intact logs --------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18", "CO-41")
def test_intact_log_with_erased_records_and_sealed_keys_passes(template: Path) -> None:
    *progress, last = verify_log(template)
    assert isinstance(last, VerificationSummary)
    assert (last.records, last.lanes, last.erased) == (RECORDS, 5, 10)
    assert last.keys > last.sealed_keys > 200
    assert last.segments > 2
    assert all(isinstance(one, StepProgress) for one in progress)


def test_log_passes_at_every_step_of_sealing_and_merging(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    seen: set[int] = set()

    def verify_new_jobs() -> None:
        with sqlite3.connect(path) as connection:
            jobs = {level for (level,) in connection.execute("SELECT level FROM oncelog_key_jobs")}
        connection.close()
        if jobs - seen or jobs == {0, 1}:
            *_, last = verify_log(path)
            assert isinstance(last, VerificationSummary), last
        seen.update(jobs)

    sample_log.make_log(path, seal_keys=34, each=verify_new_jobs)
    assert seen == {0, 1}


def test_almost_empty_log_passes(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sample_log.make_log(path, rounds=0)
    with sqlite3.connect(path) as connection:
        assert connection.execute("SELECT count(*) FROM oncelog_records").fetchone() == (1 + AUDIT_RECORDS,)
    connection.close()
    assert isinstance(list(verify_log(path))[-1], VerificationSummary)


# --- records ------------------------------------------------------------------------------------------


def sample_places(editor: FileEditor) -> list[int]:
    """Return the places of an intact and an erased record under every policy."""
    groups = editor.rows("SELECT min(place) FROM oncelog_records GROUP BY policy, body IS NULL")
    return sorted(place for (place,) in groups)


@pytest.mark.rule("LG-18")
def test_changed_column_of_a_record_is_found(editor: FileEditor) -> None:
    changes = 0
    for place in sample_places(editor):
        for column in (*TEXT, *BLOBS, *NUMBERS):
            [(value,)] = editor.rows(f"SELECT {column} FROM oncelog_records WHERE place = ?", place)  # noqa: S608
            nulls = [None] if column in {"salt", "body", "body_hash"} and value is not None else []
            for other in [*change_value(value), *nulls]:
                found = editor.expect_found(f"UPDATE oncelog_records SET {column} = ? WHERE place = ?", other, place)  # noqa: S608
                assert found.lane == place >> 48, found
                changes += 1
    assert changes > 300


@pytest.mark.rule("LG-18")
def test_any_changed_or_missing_record_is_found(editor: FileEditor) -> None:
    columns = (*TEXT, *BLOBS, *NUMBERS)
    for number, (place, *values) in enumerate(
        editor.rows(f"SELECT place, {', '.join(columns)} FROM oncelog_records")  # noqa: S608
    ):
        position = place & (1 << 48) - 1
        gone = editor.expect_found("DELETE FROM oncelog_records WHERE place = ?", place)
        assert (gone.lane, gone.position) == (place >> 48, position)
        if number % 3:
            continue
        column, value = columns[number % len(columns)], values[number % len(columns)]
        other = change_value(value)[-1]
        editor.expect_found(f"UPDATE oncelog_records SET {column} = ? WHERE place = ?", other, place)  # noqa: S608


def test_record_at_a_wrong_position_is_found(editor: FileEditor) -> None:
    for place in sample_places(editor):
        for other in (place + (1 << 48), place + 1000, -place - 1, (9 << 48) + 1, -(2**63)):
            if not editor.rows("SELECT 1 FROM oncelog_records WHERE place = ?", other):
                editor.expect_found("UPDATE oncelog_records SET place = ? WHERE place = ?", other, place)
    swap = "UPDATE oncelog_records SET place = ? WHERE place = ?"
    for one, two in ((1, 2), (3, 30), ((1 << 48) + 1, (2 << 48) + 1)):
        assert editor.verify_after((swap, (999, one)), (swap, (one, two)), (swap, (two, 999))) is not None


def test_foreign_record_is_found(editor: FileEditor) -> None:
    columns = ", ".join(("sequence", *TEXT, *BLOBS, "log_time_ms", "height", "client_sequence"))
    insert = f"INSERT INTO oncelog_records (place, {columns}) SELECT ?, {columns} FROM oncelog_records WHERE place = ?"  # noqa: S608
    for lane, position in editor.rows("SELECT lane, position FROM oncelog_lanes"):
        last = (lane << 48) + position
        found = editor.expect_found(insert, last + 1, last)
        assert (found.lane, found.position) == (lane, position + 1)
        assert "in no block" in str(found)


# --- blocks and heads ---------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
def test_changed_or_missing_block_is_found(editor: FileEditor) -> None:
    columns = ("lane", "height", "first_position", "count", "log_time_ms", "previous", "root")
    rows = editor.rows("SELECT * FROM oncelog_blocks ORDER BY lane, height")
    for row in rows:
        found = editor.expect_found("DELETE FROM oncelog_blocks WHERE lane = ? AND height = ?", *row[:2])
        assert found.lane == row[0]
    for row in rows[::29] + rows[-1:]:
        for column, value in zip(columns[2:], row[2:], strict=True):
            for other in change_value(value):
                editor.expect_found(
                    f"UPDATE oncelog_blocks SET {column} = ? WHERE lane = ? AND height = ?",  # noqa: S608
                    other,
                    *row[:2],
                )
        editor.expect_found("UPDATE oncelog_blocks SET height = height + 900 WHERE lane = ? AND height = ?", *row[:2])
        editor.expect_found("UPDATE oncelog_blocks SET lane = lane + 90 WHERE lane = ? AND height = ?", *row[:2])
    editor.expect_found("UPDATE oncelog_blocks SET count = 1 << 62 WHERE lane = 0 AND height = 1")


def test_changed_or_missing_head_is_found(editor: FileEditor) -> None:
    derived = ("position", "height", "block_hash", "eviction_time_ms", "sealed_position", "sealing_position")
    for (lane,) in editor.rows("SELECT lane FROM oncelog_lanes"):
        editor.expect_found("DELETE FROM oncelog_lanes WHERE lane = ?", lane)
        editor.expect_found("UPDATE oncelog_lanes SET lane = 77 WHERE lane = ?", lane)
        for column in derived:
            [(value,)] = editor.rows(f"SELECT {column} FROM oncelog_lanes WHERE lane = ?", lane)  # noqa: S608
            for other in change_value(value):
                found = editor.expect_found(f"UPDATE oncelog_lanes SET {column} = ? WHERE lane = ?", other, lane)  # noqa: S608
                assert column == "sealed_position" or found.lane == lane
        editor.expect_found("UPDATE oncelog_lanes SET log_time_ms = 0, revision = revision WHERE lane = ?", lane)
        editor.expect_found("UPDATE oncelog_lanes SET revision = 1 WHERE lane = ?", lane)
    editor.expect_found("UPDATE oncelog_lanes SET fence = 0 WHERE lane = 2")
    editor.expect_found("INSERT INTO oncelog_lanes VALUES (5, 0, 0, 0, 0, 0, 0, zeroblob(32), 0, 0)")


# --- state derived from the records -------------------------------------------------------------------


@pytest.mark.parametrize("table", ["partition_records", "stream_records", "key_runs", "streams", "clients"])
def test_changed_missing_or_extra_index_row_is_found(editor: FileEditor, table: str) -> None:
    columns = [row[1] for row in editor.rows(f"PRAGMA table_info(oncelog_{table})")]
    rows = editor.rows(f"SELECT * FROM oncelog_{table}")  # noqa: S608
    marks = " AND ".join(f"{column} = ?" for column in columns)
    for row in rows[:: max(1, len(rows) // 6)]:
        editor.expect_found(f"DELETE FROM oncelog_{table} WHERE {marks}", *row)  # noqa: S608
        for place, column in enumerate(columns):
            for other in change_value(row[place])[:2]:
                changed = (*row[:place], other, *row[place + 1 :])
                if changed not in rows:
                    set_it = f"UPDATE OR REPLACE oncelog_{table} SET {column} = ? WHERE {marks}"  # noqa: S608
                    editor.expect_found(set_it, other, *row)
                    added = f"INSERT OR REPLACE INTO oncelog_{table} VALUES ({', '.join('?' * len(row))})"  # noqa: S608
                    editor.expect_found(added, *changed)


def test_segments_that_differ_from_their_list_are_found(editor: FileEditor) -> None:
    [(segment, level, keys), *_] = editor.rows("SELECT * FROM oncelog_key_segments")
    for statement in (
        f"DELETE FROM oncelog_key_segments WHERE segment = {segment}",  # noqa: S608
        f"UPDATE oncelog_key_segments SET keys = {keys + 1} WHERE segment = {segment}",  # noqa: S608
        f"UPDATE oncelog_key_runs SET segment = 900 WHERE segment = {segment}",  # noqa: S608
        f"INSERT INTO oncelog_key_jobs VALUES ({level + 1}, 900, '[{segment}]', 5, 1)",  # noqa: S608
        "INSERT INTO oncelog_key_jobs VALUES (0, 900, '[]', 5, 1)",
        "UPDATE oncelog_log SET index_secret = zeroblob(32)",
    ):
        if "index_secret" in statement:
            editor.file = replace(editor.file, index_secret=bytes(32))
        assert editor.expect_found(statement)


@pytest.mark.parametrize(
    "statement",
    [
        *IMPOSSIBLE_SIDE_STATE,
        "DROP TABLE oncelog_rates",
        "UPDATE oncelog_rows SET state = x'00'",
        "ALTER TABLE oncelog_rows ADD COLUMN more TEXT",
    ],
)
def test_impossible_side_state_is_found(editor: FileEditor, statement: str) -> None:
    touched = ("UPDATE oncelog_log SET id = 1", ())  # The test changes a row as well, because ALTER changes none.
    assert editor.verify_after((statement, ()), touched, touched) is not None


# --- the schema ---------------------------------------------------------------------------------------

EVIL = "TRIGGER evil AFTER INSERT ON oncelog_records BEGIN DELETE FROM oncelog_members; END"


@pytest.mark.parametrize(
    ("statement", "words"),
    [
        (f"CREATE {EVIL}", "the trigger evil on oncelog_records does not belong to Oncelog"),
        (f"CREATE {EVIL.upper()}", "the trigger EVIL on ONCELOG_RECORDS does not belong to Oncelog"),
        ('CREATE VIEW "oncelog_\x1b[2J" AS SELECT 1', "the view oncelog_\\x1b[2J does not belong to Oncelog"),
        ("CREATE TABLE oncelog_more (x)", "the table oncelog_more does not belong to Oncelog"),
        ("CREATE VIEW oncelog_more AS SELECT 1", "the view oncelog_more does not belong to Oncelog"),
        (
            "CREATE UNIQUE INDEX evil ON oncelog_members (scope, joined)",
            "the index evil on oncelog_members does not belong",
        ),
        ("CREATE INDEX oncelog_more ON orders (x)", "the index oncelog_more on orders does not belong to Oncelog"),
        ("DROP TABLE oncelog_rates", "the table oncelog_rates is missing"),
        ("ALTER TABLE oncelog_rows ADD COLUMN more TEXT", "the table oncelog_rows differs from Oncelog's definition"),
        ("DROP INDEX oncelog_members_member", "the index oncelog_members_member on oncelog_members is missing"),
    ],
)
def test_changed_schema_is_found(copy: Path, statement: str, words: str) -> None:
    change_schema(copy, "CREATE TABLE orders (x)", statement)
    target = copy.with_name("restored.db")
    restore = ["restore", str(copy), str(target)]
    for arguments, status in ((["verify", str(copy)], 1), (restore, 2), ([*restore, "--full"], 2)):
        done = RUNNER.invoke(COMMAND, arguments)
        assert done.exit_code == status
        assert words in done.output
    assert not target.exists()


def test_all_schema_changes_are_listed(copy: Path) -> None:
    change_schema(copy, *(f"CREATE VIEW oncelog_{number:02} AS SELECT 1" for number in range(12)))
    done = RUNNER.invoke(COMMAND, ["verify", str(copy)])
    assert "the view oncelog_00 does not belong to Oncelog; the view oncelog_01 does" in done.output
    assert "; and 2 more\n" in done.output


def test_schema_of_an_application_in_the_file_is_accepted(copy: Path) -> None:
    change_schema(
        copy,
        "CREATE TABLE orders (x UNIQUE)",
        "CREATE INDEX orders_x ON orders (x)",
        "CREATE VIEW orders_of_log AS SELECT * FROM orders, oncelog_heads",
        "CREATE TRIGGER own AFTER INSERT ON orders BEGIN DELETE FROM orders; END",
        "ANALYZE",
    )
    assert RUNNER.invoke(COMMAND, ["verify", str(copy)]).exit_code == 0


def change_schema(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


# --- rewritten histories with matching hashes ---------------------------------------------------------


def rehash(connection: sqlite3.Connection) -> None:
    """Recompute all hashes, as an attacker with write access to the file could."""
    previous: dict[int, bytes] = {}
    for row in connection.execute(SQL["all_blocks"]).fetchall():
        block = Block(*row)
        upto = block.first_position + block.count - 1
        proofs = run_query(connection, load_evidence, block.lane, block.first_position - 1, upto)
        root = compute_root([hash_leaf(encode_record_header(one.record), one.body_hash) for one in proofs])
        block = replace(block, root=root, previous=previous.get(block.lane, bytes(32)))
        previous[block.lane] = block.hash
        connection.execute(
            "UPDATE oncelog_blocks SET root = ?, previous = ? WHERE lane = ? AND height = ?",
            (block.root, block.previous, block.lane, block.height),
        )
    connection.executemany(
        "UPDATE oncelog_lanes SET block_hash = ? WHERE lane = ?", [(one, lane) for lane, one in previous.items()]
    )


def forge(path: Path, *statements: str) -> None:
    connection = sqlite3.connect(path)
    with connection:
        for statement in statements:
            assert connection.execute(statement).rowcount > 0
        rehash(connection)
    connection.close()


def export_head(path: Path) -> str:
    done = RUNNER.invoke(COMMAND, ["head", str(path)])
    assert done.exit_code == 0
    return done.stdout


@pytest.mark.rule("LG-18")
def test_rewritten_history_is_found_with_an_exported_head(copy: Path, tmp_path: Path) -> None:
    head = tmp_path / "head.json"
    head.write_text(export_head(copy))
    assert RUNNER.invoke(COMMAND, ["verify", str(copy), "--head", str(head)]).exit_code == 0
    forge(copy, "UPDATE oncelog_records SET body = x'7b7d' WHERE place = 3")
    assert RUNNER.invoke(COMMAND, ["verify", str(copy)]).exit_code == 0
    done = RUNNER.invoke(COMMAND, ["verify", str(copy), "--head", str(head)])
    assert done.exit_code == 1
    assert "lane 0" in done.stdout
    assert "rewritten" in done.stdout


@pytest.mark.rule("LG-18")
def test_truncated_history_is_found_with_an_exported_head(copy: Path, tmp_path: Path) -> None:
    older = Path(shutil.copy(copy, tmp_path / "older.db"))
    sample_log.append(copy, sample_log.full_event(5000, ["orders"]))
    head = tmp_path / "head.json"
    head.write_text(export_head(copy))
    assert RUNNER.invoke(COMMAND, ["verify", str(older)]).exit_code == 0
    done = RUNNER.invoke(COMMAND, ["verify", str(older), "--head", str(head), "--json"])
    assert done.exit_code == 1
    report = json.loads(done.stdout)
    assert (report["ok"], report["lane"]) == (False, 0)
    assert "the newest records are missing" in report["message"]
    assert RUNNER.invoke(COMMAND, ["verify", str(copy), "--head", str(head)]).exit_code == 0
    sample_log.append(
        copy, sample_log.full_event(5001, ["orders"]), now_ms=sample_log.START_MS + 101 * sample_log.HOUR_MS
    )
    assert RUNNER.invoke(COMMAND, ["verify", str(copy), "--head", str(head)]).exit_code == 0


@pytest.mark.rule("CO-40")
def test_epoch_that_differs_from_the_exported_head_is_reported(copy: Path) -> None:
    head = decode_exported_head(export_head(copy).encode())
    *_, last = verify_log(copy, replace(head, epoch="0011223344556677"))
    assert isinstance(last, Inconsistency)
    assert "0011223344556677" in last.message
    moved = replace(head, lanes=[replace(head.lanes[0], position=head.lanes[0].position - 1)])
    *_, last = verify_log(copy, moved)
    assert isinstance(last, Inconsistency)
    assert "in the exported head" in last.message


def test_identity_stored_twice_is_found(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sample_log.make_log(path, rounds=8, seal_keys=100_000)
    again = "UPDATE oncelog_records SET key = (SELECT key FROM oncelog_records WHERE place = 1) WHERE place = 9"
    forge(path, again)
    *_, last = verify_log(path)
    assert isinstance(last, Inconsistency)
    assert (last.lane, last.position) == (0, 9)
    assert "the record at position 1 has it" in last.message


def test_skipped_or_repeated_client_sequence_is_found(tmp_path: Path) -> None:
    for change in ("client_sequence + 1", "client_sequence - 1"):
        path = tmp_path / f"log{len(change)}{change[-3]}.db"
        sample_log.make_log(path, rounds=8, seal_keys=100_000)
        last = "(SELECT max(place) FROM oncelog_records WHERE client = 'c2')"
        forge(
            path,
            f"UPDATE oncelog_records SET client_sequence = {change} WHERE place = {last}",  # noqa: S608
            f"UPDATE oncelog_clients SET sequence = {change.replace('client_', '')} WHERE client = 'c2'",  # noqa: S608
        )
        *_, found = verify_log(path)
        assert isinstance(found, Inconsistency)
        assert "'c2'" in found.message


# --- damage -------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-18")
def test_flipped_bit_passes_only_if_it_changes_no_record(template: Path, tmp_path: Path) -> None:
    whole = template.read_bytes()
    truth = read_all(template)
    chance = random.Random(20261116)
    found = 0
    damaged = tmp_path / "damaged.db"
    for _ in range(200):
        data = bytearray(whole)
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        damaged.write_bytes(data)
        for suffix in ("-wal", "-shm"):
            Path(f"{damaged}{suffix}").unlink(missing_ok=True)
        try:
            *_, last = verify_log(damaged)
        except OncelogError:
            found += 1
            continue
        if isinstance(last, VerificationSummary):
            assert read_all(damaged) == truth
        else:
            found += 1
    assert found > 50


def read_all(path: Path) -> list[Any]:
    connection = sqlite3.connect(path)
    try:
        return [decode_evidence(row) for row in connection.execute(SQL["all_evidence"])]
    finally:
        connection.close()


def test_damaged_table_names_are_found(copy: Path) -> None:
    whole = copy.read_bytes()
    for name in (b"oncelog_rows", b"oncelog_log", b"oncelog_records"):
        copy.write_bytes(whole.replace(b"CREATE TABLE " + name, b"CRE\x84TE TABLE " + name))
        *_, last = verify_log(copy)
        assert isinstance(last, Inconsistency)


def test_invalid_utf8_in_text_columns_is_found(editor: FileEditor) -> None:
    for column in TEXT:
        found = editor.expect_found(f"UPDATE oncelog_records SET {column} = CAST(x'ff41' AS TEXT) WHERE place = 4")  # noqa: S608
        assert found.lane == 0
        assert str(found).encode()


# --- the command --------------------------------------------------------------------------------------


def test_verify_prints_one_line(template: Path, copy: Path) -> None:
    done = RUNNER.invoke(COMMAND, ["verify", str(template)])
    assert done.exit_code == 0
    assert done.stdout.startswith(
        f"ok: {RECORDS - AUDIT_RECORDS} records and {AUDIT_RECORDS} audit records in 5 lanes, "
    )
    assert done.stderr == ""
    report = json.loads(RUNNER.invoke(COMMAND, ["verify", str(template), "--json"]).stdout)
    assert (report["ok"], report["records"]) == (True, RECORDS)
    connection = sqlite3.connect(copy)
    connection.execute("DELETE FROM oncelog_records WHERE place = 7")
    connection.commit()
    connection.close()
    done = RUNNER.invoke(COMMAND, ["verify", str(copy)])
    assert done.exit_code == 1
    assert done.stdout == "inconsistent: lane 0, position 7: the record is missing (its block has height 4)\n"
    assert "restore a backup that `oncelog verify` accepts" in done.stderr


def test_progress_is_shown_on_a_terminal(template: Path) -> None:
    ours, theirs = pty.openpty()
    with Command("verify", str(template), stdin=None, stderr=theirs) as process:
        report, _ = process.communicate()
    shown = os.read(ours, 10_000)
    os.close(theirs)
    os.close(ours)
    assert process.returncode == 0
    assert b"structure" in shown
    assert report.startswith("ok: ")


def test_files_that_are_not_logs_are_refused_and_not_changed(tmp_path: Path, copy: Path) -> None:
    missing, empty, text, foreign = (tmp_path / name for name in ("missing", "empty", "text", "foreign"))
    empty.touch()
    text.write_text("x" * 5000)
    connection = sqlite3.connect(foreign)
    connection.execute("CREATE TABLE t (x)")
    connection.close()
    newer = sqlite3.connect(copy)
    newer.execute("UPDATE oncelog_log SET schema_version = 99")
    newer.commit()
    newer.close()
    before = sorted(tmp_path.iterdir())
    for path, words in (
        (missing, "does not exist"),
        (tmp_path, "not a file"),
        (empty, "is empty"),
        (text, "not an SQLite database"),
        (foreign, "is an SQLite database, but not a log"),
        (copy, "newer Oncelog"),
    ):
        for command in (["verify"], ["head"], ["stats"], ["clock"], ["clock", "--confirm"], ["show", "0:1"]):
            done = RUNNER.invoke(COMMAND, [command[0], str(path), *command[1:]])
            assert done.exit_code == 2, (path, command)
            assert words in done.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_malformed_exported_head_is_refused(template: Path, tmp_path: Path) -> None:
    malformed_hash = '{"epoch": "x", "lanes": [{"lane": 0, "position": 1, "height": 1, "block_hash": "zz"}]}'
    for text in ("", "{}", malformed_hash, "\xff"):
        head = tmp_path / "head.json"
        head.write_text(text, encoding="latin-1")
        done = RUNNER.invoke(COMMAND, ["verify", str(template), "--head", str(head)])
        assert done.exit_code == 2, text
        assert "not an exported head" in done.stderr

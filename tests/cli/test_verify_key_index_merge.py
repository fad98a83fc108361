"""`oncelog verify` during a key index merge finds errors and accepts leftovers of the merge."""

import json
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from cli import sample_log
from oncelog.storage.sqlite.key_index import key_run
from oncelog.storage.sqlite.key_index.index import KeyIndex
from oncelog.storage.sqlite.key_index.key_run import pack_runs, unpack_run, write_runs
from oncelog.storage.sqlite.statements import SQL
from oncelog.storage.verify.findings import Inconsistency, VerificationSummary
from oncelog.storage.verify.verification import verify_log

TARGET = 3
LAST_OF_TARGET = """DELETE FROM oncelog_key_runs WHERE segment = 3
    AND last = (SELECT max(last) FROM oncelog_key_runs WHERE segment = 3)"""


@pytest.fixture(scope="module", autouse=True)
def small_runs() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(key_run, "RUN_KEYS", 5)
        yield


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with two half-full segments, whose lower keys have already been merged into a third segment."""
    path = tmp_path_factory.mktemp("merging") / "log.db"
    sample_log.make_log(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        # The secret determines the order of hashes. With this secret, the hash that is stored twice is not the last
        # one.
        connection.execute("UPDATE oncelog_log SET index_secret = zeroblob(length(index_secret))")
        index = KeyIndex(connection.execute("SELECT index_secret FROM oncelog_log").fetchone()[0])
        identities = connection.execute(SQL["all_identities"]).fetchall()
        pairs = sorted((one, row[0]) for row in identities for one in index.hash_record(*row[1:]))
        middle = pairs[len(pairs) // 2][0]
        parts = {1: pairs[::2], 2: pairs[1::2], TARGET: [pair for pair in pairs if pair[0] <= middle]}
        for table in ("runs", "segments", "jobs"):
            connection.execute(f"DELETE FROM oncelog_key_{table}")  # noqa: S608
        for segment, part in parts.items():
            write_runs(connection, segment, ([one for one, _ in part], [place for _, place in part]))
            listed = (segment, segment == TARGET, len(pairs) if segment == TARGET else len(part))
            connection.execute("INSERT INTO oncelog_key_segments VALUES (?, ?, ?)", listed)
        job = (TARGET, json.dumps([1, 2]), len(pairs), middle)
        connection.execute("INSERT INTO oncelog_key_jobs VALUES (1, ?, ?, ?, ?)", job)
        connection.execute("UPDATE oncelog_lanes SET sealed_position = position, sealing_position = 0")
    return path


@pytest.fixture
def path(template: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(template, tmp_path / "log.db"))


@pytest.fixture
def connection(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path, isolation_level=None)) as opened:
        yield opened


def find_inconsistency(path: Path) -> str | None:
    """Return the inconsistency that `verify` finds, or None."""
    *_, last = verify_log(path)
    assert isinstance(last, Inconsistency | VerificationSummary)
    return last.message if isinstance(last, Inconsistency) else None


def first_run(connection: sqlite3.Connection, segment: int) -> tuple[int, list[int], list[int]]:
    last, packed = connection.execute(SQL["segment_runs"], (segment,)).fetchone()
    hashes, places = unpack_run(packed)
    return last, list(hashes), list(places)


def test_unfinished_merge_passes_with_and_without_merged_runs(path: Path, connection: sqlite3.Connection) -> None:
    assert find_inconsistency(path) is None
    [cursor] = connection.execute("SELECT cursor FROM oncelog_key_jobs").fetchone()
    assert connection.execute(SQL["drop_runs"], (1, cursor)).rowcount > 5
    assert find_inconsistency(path) is None


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("UPDATE oncelog_key_jobs SET cursor = cursor + (1 << 61)", "was not merged"),
        ("UPDATE oncelog_key_jobs SET cursor = cursor - (1 << 61)", "belongs in another segment"),
        (LAST_OF_TARGET, "was not merged"),
        ("DELETE FROM oncelog_key_runs WHERE segment = 1", "is not in the key index"),
        ("UPDATE oncelog_key_jobs SET keys = 0", "level 1 is inconsistent"),
        ("UPDATE oncelog_key_jobs SET keys = keys + 1", "level 1 is inconsistent"),
        ("UPDATE oncelog_key_jobs SET sources = '[1,2,2]'", "level 1 is inconsistent"),
        ("UPDATE oncelog_key_jobs SET sources = '[1]'", "twice"),
    ],
)
def test_merge_that_contradicts_its_job_is_found(
    path: Path, connection: sqlite3.Connection, statement: str, message: str
) -> None:
    assert connection.execute(statement).rowcount > 0
    assert message in str(find_inconsistency(path))


def test_changed_key_of_a_merge_source_is_found(path: Path, connection: sqlite3.Connection) -> None:
    last, hashes, places = first_run(connection, 1)
    places[0] += 1
    [(_, packed)] = pack_runs((hashes, places))
    connection.execute("UPDATE oncelog_key_runs SET keys = ? WHERE segment = 1 AND last = ?", (packed, last))
    assert "was not merged" in str(find_inconsistency(path))


def test_two_runs_with_the_same_hash_are_found(
    path: Path, connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup reads only one run per hash."""
    monkeypatch.setattr(key_run, "RUN_KEYS", 1000)
    pairs = [
        pair
        for _, packed in connection.execute(SQL["segment_runs"], (TARGET,)).fetchall()
        for pair in zip(*unpack_run(packed), strict=True)
    ]
    at = next(at for at in range(1, len(pairs)) if pairs[at][0] == pairs[at - 1][0])
    connection.execute("DELETE FROM oncelog_key_runs WHERE segment = ?", (TARGET,))
    for part in (pairs[:at], pairs[at:]):
        write_runs(connection, TARGET, ([one for one, _ in part], [place for _, place in part]))
    assert "has two runs for one hash" in str(find_inconsistency(path))

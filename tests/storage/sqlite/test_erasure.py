"""Erased bodies are neither in the file nor in its write-ahead log.

SQLite moves rows between pages to make room and leaves copies in unused space. These logs therefore have rows of all
sizes in several lanes that grow concurrently, and many rows are erased while others are added.
"""

import re
import sqlite3
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from oncelog.core.operations import SetEntity
from oncelog.core.transactions import transaction
from oncelog.core.values import Record, Request
from oncelog.storage.sqlite.database_file import BUSY_TIMEOUT_MS
from oncelog.storage.sqlite.writer import Writer
from storage.sqlite.writers import erase, session_on, write

SIZES = (12, 13, 19, 20, 21, 33, 40, 100, 100, 300, 300, 900, 1500, 3000, 4000, 4100, 5000, 100_000)
SECRET = re.compile(rb"SECRET\d{6}")


def body_of(number: int, size: int) -> bytes:
    return (b"SECRET%06d/" % number * (size // 13 + 1))[:size]


def secrets_on_disk(path: Path) -> set[bytes]:
    return {found for name in path.parent.iterdir() for found in SECRET.findall(name.read_bytes())}


def commit(session: Writer, numbers: Iterable[int], size: int) -> list[Record]:
    items = tuple(replace(write(number), body=body_of(number, size)) for number in numbers)
    return session.commit([Request(items)], None).changes.records


@pytest.mark.rule("CO-41")
@pytest.mark.parametrize("size", [12, 200, 3000, 100_000])
def test_erased_body_is_removed_from_disk(tmp_path: Path, size: int) -> None:
    path = tmp_path / "log.db"
    with session_on(path, 8) as session:
        records = commit(session, range(12), size)
        assert len({record.lane for record in records}) > 1
        erased = {record.body[:12] for record in records[::2]}
        for record in records[::2]:
            assert erase(session, record.lane, [record.position]) == 1
            assert session.scrub()
        assert secrets_on_disk(path) == {record.body[:12] for record in records} - erased
    assert not secrets_on_disk(path) & erased


@pytest.mark.rule("CO-41")
@pytest.mark.parametrize("seed", range(6))
def test_bodies_erased_while_the_log_grows_are_removed_from_disk(tmp_path: Path, seed: int) -> None:
    random = Random(seed)
    path = tmp_path / "log.db"
    kept: dict[int, list[Record]] = {}
    gone: set[bytes] = set()
    with session_on(path, 50) as session:
        for number in range(0, 600, 6):
            for part in (range(number, number + 1), range(number + 1, number + 6)):
                for record in commit(session, part, random.choice(SIZES)):
                    kept.setdefault(record.lane, []).append(record)
            if random.random() < 0.8:
                continue
            for lane, records in kept.items():
                start = random.randrange(len(records)) if records else 0
                chosen = records[start : start + random.choice((1, 5, 30))]
                kept[lane] = [record for record in records if record not in chosen]
                gone |= {record.body[:12] for record in chosen}
                assert erase(session, lane, [record.position for record in chosen]) == len(chosen)
            assert session.scrub()
            assert not secrets_on_disk(path) & gone
        assert session.connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    alive = {record.body[:12] for records in kept.values() for record in records}
    assert len(gone) > 50
    assert secrets_on_disk(path) == alive


@pytest.mark.rule("CO-41")
def test_scrub_reports_bytes_that_a_reader_still_holds(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    with session_on(path, 8) as session, closing(sqlite3.connect(path, isolation_level=None)) as reader:
        (record,) = commit(session, [0], 100)
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM oncelog_records").fetchone()
        assert erase(session, record.lane, [record.position]) == 1
        assert not session.scrub()
        with session._transaction():  # its busy timeout is unchanged
            assert session.connection.execute("PRAGMA busy_timeout").fetchone() == (BUSY_TIMEOUT_MS,)
        assert secrets_on_disk(path) == {b"SECRET000000"}
        reader.execute("COMMIT")
        assert session.scrub()
        assert secrets_on_disk(path) == set()


@pytest.mark.rule("CO-44", "CO-41")
@pytest.mark.parametrize("size", [13, 200, 3000, 100_000])
def test_erased_values_of_entities_are_removed_from_disk(tmp_path: Path, size: int) -> None:
    path = tmp_path / "log.db"
    with session_on(path, 8) as session:
        operations = [SetEntity(f"e{number}", body_of(number, size)) for number in range(12)]
        items = [transaction("ledger/acme", "c", number + 1, [one]) for number, one in enumerate(operations)]
        for item in items:
            (record,) = session.commit([Request((item,))], None).changes.records
            if record.sequence % 2:
                assert erase(session, record.lane, [record.position]) == 1
                assert session.scrub()
        assert values_on_disk(session) == {one.value[:12] for one in operations[1::2]}
    assert secrets_on_disk(path) == {one.value[:12] for one in operations[1::2]}


def values_on_disk(session: Writer) -> set[bytes]:
    return {value[:12] for (value,) in session.connection.execute("SELECT value FROM oncelog_entities") if value}

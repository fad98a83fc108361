"""Migrates a file from an older schema."""

from collections.abc import Callable, Iterator
from typing import Any, Final

from oncelog.sql_files import split_script
from oncelog.storage.sqlite.key_index.key_run import RUN_KEYS, KeyPairs, write_runs
from oncelog.storage.sqlite.statements import SQL, load_migrations

_BATCH_ROWS: Final = 1000 * RUN_KEYS


def migrate_schema(connection: Any, version: int) -> None:
    """Step by step, each in a transaction of its own that also notes the version it leads to."""
    for number, script in load_migrations():
        if number <= version:
            continue
        connection.execute("BEGIN IMMEDIATE")
        try:
            if connection.execute("SELECT schema_version FROM oncelog_log").fetchone()[0] < number:
                for statement in split_script(script):
                    connection.execute(statement)
                if number in _CONVERSIONS:
                    _CONVERSIONS[number](connection)
                connection.execute(SQL["set_schema_version"], (number,))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _pack_keys(connection: Any) -> None:
    """Keys had a row each before there were runs."""
    for (segment,) in connection.execute("SELECT segment FROM oncelog_key_segments").fetchall():
        for keys in _iterate_key_rows(connection, segment):
            write_runs(connection, segment, keys)


def _iterate_key_rows(connection: Any, segment: int) -> Iterator[KeyPairs]:
    """Some at a time, those of one hash together."""
    cursor = connection.execute(
        "SELECT hash, place FROM oncelog_key_rows WHERE segment = ? ORDER BY hash, place", (segment,)
    )
    pairs: list[tuple[int, int]] = []
    while rows := cursor.fetchmany(_BATCH_ROWS):
        pairs += rows
        end = len(pairs)
        while end and pairs[end - 1][0] == pairs[-1][0]:
            end -= 1
        yield [key_hash for key_hash, _ in pairs[:end]], [place for _, place in pairs[:end]]
        del pairs[:end]
    yield [key_hash for key_hash, _ in pairs], [place for _, place in pairs]


_CONVERSIONS: Final[dict[int, Callable[[Any], None]]] = {7: _pack_keys}
"""What no statement can do, after the script of the same number."""

"""Key runs: no key is lost, and keys with equal hashes are in one run."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from random import Random

import pytest

from bench.memory import compute_deep_size
from oncelog.errors import CorruptError
from oncelog.storage.key_hash import HASH_MAX
from oncelog.storage.sqlite import database_file
from oncelog.storage.sqlite.key_index import key_run
from oncelog.storage.sqlite.key_index.key_run import (
    RUN_KEYS,
    find_in_segment,
    pack_runs,
    unpack_hashes,
    unpack_run,
    write_runs,
)
from oncelog.storage.sqlite.key_index.merge import READ_RUNS, SegmentMerge
from oncelog.storage.sqlite.statements import SQL, load_migrations

SEEDS = range(20)


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    """A database with the earlier and the current tables of the key index."""
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        scripts = dict(load_migrations())
        for number in (1, 7):
            made.executescript(scripts[number])
        yield made


def draw_keys(random: Random, count: int, hashes: int = HASH_MAX) -> tuple[list[int], list[int]]:
    """Return sorted keys. With few hashes, several keys share a hash."""
    pairs = sorted({(random.randrange(hashes), random.randrange(1 << 62)) for _ in range(count)})
    return [one for one, _ in pairs], [place for _, place in pairs]


def read_keys(connection: sqlite3.Connection, segment: int) -> list[tuple[int, int]]:
    rows = connection.execute(SQL["segment_runs"], (segment,)).fetchall()
    assert rows == sorted(rows)
    for last, packed in rows:
        assert unpack_run(packed)[0][-1] == last
    every = [set(unpack_run(packed)[0]) for _, packed in rows]
    assert sum(map(len, every)) == len(set().union(*every))  # no hash is in two runs
    return [pair for _, packed in rows for pair in zip(*unpack_run(packed), strict=True)]


@pytest.mark.parametrize("count", [0, 1, RUN_KEYS - 1, RUN_KEYS, RUN_KEYS + 1, 1000])
@pytest.mark.parametrize("hashes", [1, 3, 50, HASH_MAX])
def test_packed_keys_round_trip_and_a_hash_stays_in_one_run(
    connection: sqlite3.Connection, count: int, hashes: int
) -> None:
    keys = draw_keys(Random(count), count, hashes)
    write_runs(connection, 4, keys)
    assert read_keys(connection, 4) == list(zip(*keys, strict=True))
    lengths = [len(packed) // 16 for _, packed in pack_runs(keys)]
    if hashes == HASH_MAX:
        assert max(lengths, default=0) <= RUN_KEYS
        assert max(lengths, default=0) - min(lengths, default=0) <= 1
    assert unpack_hashes(pack_runs(keys)) == keys[0]


def test_run_encoding_does_not_depend_on_byte_order(monkeypatch: pytest.MonkeyPatch) -> None:
    [(last, packed)] = pack_runs(([1, HASH_MAX], [2, 3]))
    assert last == HASH_MAX
    assert packed.hex() == "0100000000000000ffffffffffffff7f02000000000000000300000000000000"
    monkeypatch.setattr(key_run, "_IS_SWAPPED", True)  # as on a machine with the opposite byte order
    assert [*map(list, unpack_run(bytes.fromhex("00000000000000010000000000000002")))] == [[1], [2]]


@pytest.mark.parametrize("seed", SEEDS)
def test_keys_are_found_only_in_their_segment(connection: sqlite3.Connection, seed: int) -> None:
    random = Random(seed)
    keys = draw_keys(random, 500, random.choice((20, 1000, HASH_MAX)))
    write_runs(connection, 2, keys)
    write_runs(connection, 3, draw_keys(random, 100))
    sought = sorted({*keys[0], 0, HASH_MAX, *draw_keys(random, 50)[0]})
    assert sorted(find_in_segment(connection, 2, sought)) == list(zip(*keys, strict=True))
    assert list(find_in_segment(connection, 5, sought)) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_merge_continued_by_several_processes_has_every_key_once(connection: sqlite3.Connection, seed: int) -> None:
    random = Random(seed)
    hashes = random.choice((30, 2000, HASH_MAX))
    sources = range(1, random.choice((2, 5, 17)))
    for source in sources:
        write_runs(connection, source, draw_keys(random, random.choice((0, 1, 300, 900)), hashes))
    every = sorted(pair for source in sources for pair in read_keys(connection, source))
    cursor = -1
    merge = SegmentMerge(99, sources, cursor, len(every))
    is_one = True
    most = 0
    while cursor < hashes:
        cursor = min(hashes, cursor + random.randrange(1, 2 + hashes // 20))
        if random.random() < (0.3 if seed % 2 else 0):
            is_one = is_one and merge.cursor < 0
            merge = SegmentMerge(99, sources, merge.cursor, len(every))  # another process
        merge.advance(connection, cursor)
        most = max(most, compute_deep_size(merge._sources))
        if random.random() < 0.3:
            for source in sources:
                connection.execute(SQL["drop_runs"], (source, cursor))
    assert read_keys(connection, 99) == every
    assert (merge.filter is not None) is is_one
    assert merge.filter is None or all(one in merge.filter for one, _ in every)
    at_once = 2 * READ_RUNS * RUN_KEYS * 16  # more than the limit only for keys with equal hashes
    assert hashes < HASH_MAX or 0 < most < len(sources) * (at_once + 1000)


@pytest.mark.parametrize("packed", [b"", bytes(8), bytes(17), bytes(24)])
def test_run_of_impossible_length_is_reported_as_corrupt(connection: sqlite3.Connection, packed: bytes) -> None:
    connection.execute("INSERT INTO oncelog_key_runs VALUES (1, 5, ?)", (packed,))
    with pytest.raises(CorruptError, match=f"the key index has a run of {len(packed)} bytes"):
        list(find_in_segment(connection, 1, [3]))
    with pytest.raises(CorruptError):
        SegmentMerge(2, [1], -1, 9).advance(connection, 9)
    with pytest.raises(CorruptError):
        unpack_hashes([(5, packed)])


def test_run_whose_last_hash_does_not_match_its_row_is_reported_as_corrupt(connection: sqlite3.Connection) -> None:
    [(last, packed)] = pack_runs(([3, 5], [1, 2]))
    connection.execute("INSERT INTO oncelog_key_runs VALUES (1, ?, ?)", (last + 4, packed))
    assert list(find_in_segment(connection, 1, [3])) == [(3, 1)]
    for look in (
        lambda: list(find_in_segment(connection, 1, [7])),
        lambda: SegmentMerge(2, [1], -1, 9).advance(connection, 9),
        lambda: unpack_hashes([(last + 4, packed)]),
    ):
        with pytest.raises(CorruptError, match="the last hash of a run in the key index does not match its row"):
            look()


@pytest.mark.parametrize("rows_at_once", [1, 10, 1000])
def test_migration_packs_keys_stored_in_rows(
    connection: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(database_file, "_MIGRATION_BATCH_ROWS", rows_at_once)
    random = Random(3)
    segments = {1: draw_keys(random, 200, 40), 2: draw_keys(random, 300), 5: draw_keys(random, 50, 1), 6: ([], [])}
    for segment, keys in segments.items():
        connection.execute("INSERT INTO oncelog_key_segments VALUES (?, 0, ?)", (segment, len(keys[0])))
        rows = [(segment, one, place) for one, place in zip(*keys, strict=True)]
        connection.executemany("INSERT INTO oncelog_key_rows VALUES (?, ?, ?)", rows)
    database_file._pack_keys(connection)
    for segment, keys in segments.items():
        assert read_keys(connection, segment) == list(zip(*keys, strict=True))

"""The row cache of a writer is never older than the file."""

import itertools
import random
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from oncelog import Condition, DeleteEntity, Must, Relate, SetEntity, Settings, Unrelate, transaction
from oncelog.core.chat import encode_message, message
from oncelog.core.values import (
    Acknowledge,
    Applied,
    Committed,
    Item,
    OpenStream,
    Reason,
    Refused,
    Request,
    SetMember,
    Snapshot,
    Submission,
    Verdict,
)
from oncelog.storage.sqlite import SqliteStore, row_cache
from oncelog.storage.sqlite.database_file import SqliteDriver, connect, load_metadata
from oncelog.storage.sqlite.row_cache import RowCache
from oncelog.storage.sqlite.transaction import StoreTransaction, TransactionOptions
from oncelog.storage.store import Store
from oncelog.testing.clock import ManualClock
from storage.memory_store import MemoryStore

SEED = 20_261_116
CHAT = "chat/a"
KEYS = itertools.count(1)
NAMES = ("user:ann", "user:bob", "user:cyd")


def build_message(sender: str, scope: str = CHAT) -> Submission:
    return message(scope, next(KEYS).to_bytes(16), encode_message("hello", "text/plain"), sender=sender)


def write(sequence: int, *operations: Any, client: str = "c1", scope: str = "ledger/acme") -> Submission:
    return transaction(scope, client, sequence, operations)


async def commit(store: Store, *items: Item) -> list[Verdict]:
    return (await store.commit([Request(items)])).verdicts[0]


@pytest.mark.rule("CO-10", "LG-5")
async def test_row_cache_sees_rows_of_another_process(tmp_path: Path) -> None:
    one, other = (SqliteStore(tmp_path / "log.db", Settings(1)) for _ in range(2))
    await one.open()
    await other.open()
    absent, there = Condition(Must.NOT_EXIST), Condition(Must.EXIST)
    assert isinstance((await commit(one, write(1, SetEntity("a", b"1", condition=absent))))[0], Committed)
    assert isinstance((await commit(other, write(2, SetEntity("a", b"2", condition=there))))[0], Committed)
    # Both writers have now cached the client, the stream and the entity.
    (third,) = await commit(one, write(3, SetEntity("a", b"3", condition=Condition(Must.HAVE_VERSION, version=2))))
    assert isinstance(third, Committed)
    assert third.receipt.sequence == 3
    (gap,) = await commit(other, write(5, DeleteEntity("a")))
    assert isinstance(gap, Refused)
    assert gap.current == 3
    assert isinstance((await commit(other, write(4, DeleteEntity("a"))))[0], Committed)
    assert isinstance((await commit(one, write(5, SetEntity("a", b"", condition=absent))))[0], Committed)
    await one.close()
    await other.close()


async def test_failed_transaction_leaves_nothing_in_the_row_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = SqliteStore(tmp_path / "log.db", Settings(1))
    await store.open()
    await commit(store, write(1, SetEntity("a", b"1")))
    writing = store._file_writer.store_transaction
    staged: list[int] = []

    def fail_commit(*arguments: Any) -> None:
        RowCache.stage(writing._row_cache, *arguments)
        staged.append(1)
        raise sqlite3.OperationalError("disk I/O error")

    with monkeypatch.context() as patch:
        patch.setattr(writing._row_cache, "stage", fail_commit)
        with pytest.raises(Exception, match="disk I/O error"):
            await commit(store, write(2, SetEntity("a", b"2")))
    assert staged
    version = Condition(Must.HAVE_VERSION, version=1)
    (verdict,) = await commit(store, write(2, SetEntity("a", b"3", condition=version)))
    assert isinstance(verdict, Committed)
    await store.close()


def commit_shared(writing: StoreTransaction, connection: sqlite3.Connection, item: Item) -> Verdict:
    """Commit an item in the caller's transaction."""
    connection.execute("BEGIN IMMEDIATE")
    (verdict,) = writing.commit(connection, [Request((item,))], None).verdicts[0]
    connection.execute("COMMIT")
    writing.confirm()
    return verdict


@pytest.mark.rule("CO-12")
async def test_row_cache_is_dropped_when_the_file_is_restored(tmp_path: Path) -> None:
    """The restored file reaches the same number of commits with different content."""
    path = tmp_path / "log.db"

    async def commit_alone(*items: Submission) -> None:
        store = SqliteStore(path, Settings(1))
        await store.open()
        for item in items:
            assert isinstance((await commit(store, item))[0], Committed)
        await store.close()

    await commit_alone(write(1, SetEntity("a", b"")))
    copy = path.read_bytes()
    connection = connect(SqliteDriver(), str(path))
    writing = StoreTransaction(load_metadata(connection, str(path)), TransactionOptions(ManualClock(), bytes))

    for sequence in (2, 3):
        assert isinstance(commit_shared(writing, connection, write(sequence, DeleteEntity("a"))), Committed)
    commits = writing.load_state(connection).commits
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    path.write_bytes(copy)
    await commit_alone(write(2, DeleteEntity("b")))
    connection = connect(SqliteDriver(), str(path))
    assert writing.load_state(connection).commits == commits  # opening the file counts as a commit
    gap = commit_shared(writing, connection, write(4, DeleteEntity("a")))
    assert isinstance(gap, Refused), gap
    assert gap.current == 2
    following = commit_shared(writing, connection, write(3, DeleteEntity("a")))
    assert isinstance(following, Committed)
    assert following.receipt.sequence == 3
    connection.close()


@pytest.mark.parametrize("rows_max", [3, row_cache.ROWS_MAX])
async def test_row_cache_does_not_change_decisions(
    tmp_path: Path, rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes take turns on one file and are compared with a store in memory."""
    monkeypatch.setattr(row_cache, "ROWS_MAX", rows_max)
    chance = random.Random(SEED)

    def operation() -> Any:
        name = chance.choice("abcde")
        kinds = (
            SetEntity(name, bytes(chance.choice((1, 5000))), condition=chance.choice((None, Condition(Must.EXIST)))),
            SetEntity(name, b"", condition=Condition(Must.HAVE_VERSION, version=chance.randrange(9))),
            SetEntity(name, b"x", expires_at_ms=clock.wall_ms() + chance.randrange(50)),
            DeleteEntity(name),
            Relate(name, "owner", chance.choice("xy")),
            Unrelate(name, "owner", chance.choice("xy")),
        )
        return chance.choice(kinds)

    clock = ManualClock()
    stores = [SqliteStore(tmp_path / "log.db", Settings(2, 5), clock=clock, draw=bytes) for _ in range(2)]
    model = MemoryStore(Settings(2, 5), clock=clock, draw=bytes)
    everyone: list[Store] = [*stores, model]
    for store in everyone:
        await store.open()
    last: dict[tuple[str, str], int] = {}
    for _ in range(300):
        clock.advance(chance.choice((0, 1, 40, 3_600_000)))
        batch = []
        for _ in range(chance.randrange(1, 6)):
            who = (chance.choice(("c1", "c2")), chance.choice(("ledger/a", "ledger/b", "ledger/c")))
            number = last.get(who, 0) + chance.choice((1, 1, 1, 0, 2))
            batch.append(write(max(1, number), operation(), operation(), client=who[0], scope=who[1]))
        expected = await commit(model, *batch)
        assert await commit(chance.choice(stores), *batch) == expected, f"seed {SEED}"
        for item, verdict in zip(batch, expected, strict=True):
            if isinstance(verdict, Committed):
                last[item.client, item.scope] = item.client_sequence
            elif isinstance(verdict, Refused) and verdict.reason.value == "sequence_gap":
                last[item.client, item.scope] = verdict.current
    assert await stores[0].heads() == await model.heads()
    for store in everyone:
        await store.close()


@pytest.mark.rule("CH-9")
async def test_writes_of_members_removed_by_another_process_are_refused(tmp_path: Path) -> None:
    one, other = (SqliteStore(tmp_path / "log.db", Settings(1)) for _ in range(2))
    await one.open()
    await other.open()
    await commit(one, OpenStream(CHAT, "user:ann"), SetMember(CHAT, "user:bob"))
    assert isinstance((await commit(one, build_message("user:bob")))[0], Committed)
    assert await commit(other, SetMember(CHAT, "user:bob", present=False)) == [Applied(changed=True)]
    (refused,) = await commit(one, build_message("user:bob"))
    assert isinstance(refused, Refused)
    assert refused.reason is Reason.NOT_A_MEMBER
    assert await commit(other, Acknowledge(CHAT, "user:ann", 1)) == [Applied(changed=True)]
    assert await commit(one, Acknowledge(CHAT, "user:ann", 1)) == [Applied(changed=False)]
    await one.close()
    await other.close()


@pytest.mark.rule("CH-9")
async def test_cached_members_are_dropped_when_the_file_is_restored(tmp_path: Path) -> None:
    """No hash covers members, and the restored file reaches the same number of commits."""
    path, clock = tmp_path / "log.db", ManualClock()

    async def alone(*items: Item) -> None:
        store = SqliteStore(path, Settings(1), clock=clock)
        await store.open()
        await commit(store, *items)
        await store.close()

    await alone(OpenStream(CHAT, "user:ann"))
    copy = path.read_bytes()
    connection = connect(SqliteDriver(), str(path))
    writing = StoreTransaction(load_metadata(connection, str(path)), TransactionOptions(clock, bytes))

    commit_shared(writing, connection, SetMember(CHAT, "user:cyd"))
    commit_shared(writing, connection, SetMember(CHAT, "user:bob"))
    commits = writing.load_state(connection).commits
    connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    connection.close()
    path.write_bytes(copy)
    clock.advance(1)
    await alone(SetMember(CHAT, "user:eve"))
    connection = connect(SqliteDriver(), str(path))
    assert writing.load_state(connection).commits == commits
    refused = commit_shared(writing, connection, build_message("user:bob"))
    assert isinstance(refused, Refused), refused
    assert isinstance(commit_shared(writing, connection, build_message("user:eve")), Committed)
    connection.close()


@pytest.mark.parametrize("rows_max", [3, row_cache.SMALL_ROWS_MAX])
async def test_member_cache_does_not_change_decisions(
    tmp_path: Path, rows_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_cache, "SMALL_ROWS_MAX", rows_max)
    chance = random.Random(SEED)
    clock = ManualClock()

    def item() -> Item:
        scope, who, other = chance.choice("abc"), chance.choice(NAMES), chance.choice(NAMES)
        return chance.choice(
            (
                OpenStream(scope, who),
                SetMember(scope, other, chance.random() < 0.6, who),
                build_message(who, scope),
                build_message(who, scope),
                Acknowledge(scope, who, chance.randrange(20)),
            )
        )

    stores = [SqliteStore(tmp_path / "log.db", Settings(2, 5), clock=clock, draw=bytes) for _ in range(2)]
    model = MemoryStore(Settings(2, 5), clock=clock, draw=bytes)
    everyone: list[Store] = [*stores, model]
    for store in everyone:
        await store.open()
    seen: set[type[Verdict]] = set()
    for _ in range(300):
        clock.advance(chance.choice((0, 1, 40)))
        batch = [item() for _ in range(chance.randrange(1, 6))]
        expected = await commit(model, *batch)
        assert await commit(chance.choice(stores), *batch) == expected, f"seed {SEED}"
        seen.update(map(type, expected))
    assert seen == {Committed, Applied, Refused}
    assert await stores[0].heads() == await model.heads()
    for store in everyone:
        await store.close()


@pytest.mark.parametrize(
    ("table", "rows_max"),
    [("streams", row_cache.ROWS_MAX), *((name, row_cache.SMALL_ROWS_MAX) for name in row_cache.SMALL_TABLES)],
)
def test_row_cache_is_bounded(table: str, rows_max: int) -> None:
    kept = RowCache()
    kept.begin(0, {})
    for start in range(0, rows_max + 1, 100):
        kept.stage({table: [f"s{number}" for number in range(start, start + 100)]}, Snapshot())
        kept.confirm()
        assert len(kept._rows[table]) <= rows_max
    assert len(kept._rows[table]) <= 100

"""A database grows by at most `GROWTH_FACTOR_MAX` bytes for each byte that quotas count, for every kind of write."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from core.item_builders import delta, event, message, transaction
from databases import BOTH_STORES, is_postgres, log_at, query
from oncelog.core.merge import RowDelta
from oncelog.core.operations import Relate, SetEntity
from oncelog.core.stored_bytes import GROWTH_FACTOR_MAX
from oncelog.core.tenants import Tenant
from oncelog.core.values import Acknowledge, Item, OpenStream, Refused, Request, SetMember, Submission
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.store import Store

SCOPE = "t/" + "s" * 500
BATCHES = 40


def small_events(number: int) -> Iterable[Item]:
    for one in range(50):
        yield event(number * 100 + one, partitions=("t",))


def events_with_many_short_partitions(number: int) -> Iterable[Item]:
    for one in range(10):
        names = sorted(["t", *(chr(0x100 + place) for place in range(63))])
        yield event(number * 100 + one, partitions=tuple(names))


def events_with_long_partitions(number: int) -> Iterable[Item]:
    names = sorted(f"t/{number:04}{one:02}{os.urandom(120).hex()}" for one in range(64))
    yield event(number, partitions=tuple(names), actor=os.urandom(250).hex())


def members_of_one_stream(number: int) -> Iterable[Item]:
    for one in range(20):
        yield SetMember("t/chat", f"{number}-{one}-{os.urandom(200).hex()}")


def members_that_join_and_leave(number: int) -> Iterable[Item]:
    yield OpenStream(SCOPE, "ann")
    yield message(number, scope=SCOPE, actor="ann")
    for one in range(20):
        yield SetMember(SCOPE, f"{number}-{one}")
        yield Acknowledge(SCOPE, f"{number}-{one}", 1)
        yield SetMember(SCOPE, f"{number}-{one}", present=False)


def small_entities(number: int) -> Iterable[Item]:
    operations = [SetEntity(f"{number}-{one}", b"") for one in range(200)]
    yield transaction(number, number, *operations, scope=SCOPE)


def short_relationships(number: int) -> Iterable[Item]:
    operations = [Relate(f"{number}-{one}", "r", "s") for one in range(200)]
    yield transaction(number, number, *operations, scope=SCOPE)


def clients_with_long_names(number: int) -> Iterable[Item]:
    for one in range(5):
        yield transaction(1, 1, scope=SCOPE, client=f"{number}-{one}-{os.urandom(200).hex()}")


def small_rows(number: int) -> Iterable[Item]:
    for one in range(50):
        yield row_delta(number * 1000 + one, f"{number}-{one}", 5, ("c",))


def columns_with_stamps_of_long_clients(number: int) -> Iterable[Item]:
    columns = tuple(f"c{one}" for one in range(300))
    yield row_delta(2 * number, f"{number}", 5, columns, "c" * 400)
    yield row_delta(2 * number + 1, f"{number}", 6, columns[:1], "d" * 400)


def row_delta(number: int, row_id: str, hlc: int, columns: tuple[str, ...], client: str = "c") -> Submission:
    made = delta(number, hlc, scope="t/gateway")
    assert made.delta is not None
    values = tuple((name, b"1") for name in columns)
    change = RowDelta(made.delta.op, "t", row_id, client, hlc, values, made.delta.delta_id)
    body = b'{"columns":[%b]}' % b",".join([b'{"column":"%b","value":1}' % name.encode() for name in columns])
    return Submission(
        policy=made.policy, scope=made.scope, key=made.key, fingerprint=b"", client=client, delta=change, body=body
    )


SHAPES: tuple[Callable[[int], Iterable[Item]], ...] = (
    small_events,
    events_with_many_short_partitions,
    events_with_long_partitions,
    members_of_one_stream,
    members_that_join_and_leave,
    small_entities,
    short_relationships,
    clients_with_long_names,
    small_rows,
    columns_with_stamps_of_long_clients,
)


@BOTH_STORES
@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("shape", SHAPES)
async def test_database_grows_within_the_factor_of_counted_bytes(
    tmp_path: Path, shape: Callable[[int], Iterable[Item]]
) -> None:
    path = tmp_path / "log.db"
    store: Store = PostgresStore(log_at(path)) if is_postgres() else SqliteStore(path)
    await store.open()
    await store.set_tenants([Tenant("t")])
    before = size_of(path)
    for number in range(1, BATCHES + 1):
        decided = await store.commit([Request(tuple(shape(number)))])
        assert not [one for verdicts in decided.verdicts for one in verdicts if isinstance(one, Refused)]
    ((_, usage),) = await store.usage()
    await store.scrub()
    grown = size_of(path) - before
    await store.close()
    first_pages = 30 * 8192  # includes tables and indexes
    assert grown - first_pages <= GROWTH_FACTOR_MAX * usage.bytes, f"factor {grown / usage.bytes:.2f}"


def size_of(path: Path) -> int:
    """Return the size of the log's tables and indexes in bytes."""
    if is_postgres():
        statement = (
            "SELECT sum(pg_total_relation_size(c.oid))::bigint FROM pg_class AS c "
            "WHERE c.relnamespace = current_schema()::regnamespace AND c.relkind = 'r'"
        )
        return int(query(log_at(path), statement)[0][0])
    return sum(Path(f"{path}{end}").stat().st_size for end in ("", "-wal") if Path(f"{path}{end}").exists())

"""Usage counted by an earlier version, which counted only bodies, is recounted when a log is opened."""

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from core.item_builders import delta, event, message, transaction
from databases import BOTH_STORES, is_postgres, log_at, query
from oncelog.core.operations import Relate, SetEntity
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import Committed, Item, OpenStream, Reason, Refused, Request, SetMember
from oncelog.errors import ClosedError, StoreUnavailableError
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.queries.sql_store import SqlStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.store import Store
from storage.older_schema import WITHOUT_USAGE_VERSION

TENANTS = [Tenant("acme", bytes_max=100_000), Tenant("chat"), Tenant("gateway"), Tenant("org", records_max=2)]
WRITES: list[Item] = [
    event(1, body=b"12345", partitions=("acme/a", "acme/b")),
    OpenStream("chat/1", "user:ann"),
    SetMember("chat/1", "user:bob"),
    SetMember("chat/1", "user:bob", present=False),
    message(1),
    delta(1, 5, name='"x"'),
    transaction(1, 1, SetEntity("a", b"123"), Relate("a", "b", "c"), body=b"1"),
]


async def read_usage(store: Store) -> dict[str, Usage]:
    return {tenant.prefix: usage for tenant, usage in await store.usage()}


async def open_older(path: Path) -> Store:
    store = store_at(path)
    await store.open()
    return store


def store_at(path: Path) -> Store:
    return PostgresStore(log_at(path)) if is_postgres() else SqliteStore(path)


def execute(path: Path, statement: str) -> None:
    """Execute a statement in the log's database."""
    if is_postgres():
        query(log_at(path), statement)
        return
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(statement)
        connection.commit()


def downgrade(path: Path, usage: dict[str, Usage]) -> None:
    """Revert the log to the schema and the usage of the previous version."""
    for statement in WITHOUT_USAGE_VERSION:
        execute(path, statement)
    execute(path, f"UPDATE oncelog_log SET schema_version = {9 if is_postgres() else 12}")  # noqa: S608
    for prefix in usage:
        execute(path, f"UPDATE oncelog_usage SET bytes = 5, records = 1, full_at_us = 0 WHERE tenant = '{prefix}'")  # noqa: S608


@BOTH_STORES
@pytest.mark.rule("CO-30")
async def test_usage_of_an_earlier_version_is_recounted_when_the_log_is_opened(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    store = await open_older(path)
    await store.set_tenants(TENANTS)
    decided = await store.commit([Request((item,)) for item in WRITES])
    assert not [verdict for (verdict,) in decided.verdicts if isinstance(verdict, Refused)]
    before = await read_usage(store)
    await store.close()
    downgrade(path, before)
    for _ in range(2):
        store = await open_older(path)
        assert await read_usage(store) == before
        assert not await store.set_tenants(TENANTS), "the quotas are unchanged"
        await store.close()
    store = await open_older(path)
    verdicts = (await store.commit([Request((transaction(2, 2),)), Request((transaction(3, 3),))])).verdicts
    assert isinstance(verdicts[0][0], Committed)
    assert isinstance(verdicts[1][0], Refused)
    assert verdicts[1][0].reason is Reason.QUOTA_EXCEEDED
    await store.close()


@BOTH_STORES
async def test_store_is_closed_if_counting_fails_while_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: object) -> None:
        raise StoreUnavailableError("the disk is full")

    path = tmp_path / "log.db"
    store = await open_older(path)
    await store.set_tenants(TENANTS)
    usage = await read_usage(store)
    await store.close()
    downgrade(path, usage)
    monkeypatch.setattr(SqlStore, "set_tenants", fail)
    store = store_at(path)
    with pytest.raises(StoreUnavailableError, match="the disk is full"):
        await store.open()
    with pytest.raises(ClosedError):
        await store.usage()


@BOTH_STORES
@pytest.mark.rule("CO-30")
async def test_processes_that_open_an_older_log_concurrently_recount_it_once(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    store = await open_older(path)
    await store.set_tenants(TENANTS)
    await store.commit([Request((item,)) for item in WRITES])
    before = await read_usage(store)
    await store.close()
    downgrade(path, before)
    one, two = store_at(path), store_at(path)
    await asyncio.gather(one.open(), two.open())
    assert await read_usage(one) == await read_usage(two) == before
    await one.close()
    await two.close()

"""A quota applies across all servers, because they count usage in one row, regardless of the lanes of their commits."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from core.item_builders import transaction
from databases import address_of
from oncelog.core.stored_bytes import submission_bytes
from oncelog.core.tenants import Tenant
from oncelog.core.values import Committed, Reason, Refused, Request
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.queries.tenants import load_count_start, replace_tenants
from oncelog.storage.sqlite.query_driver import run_query
from oncelog.storage.sqlite.writer import Writer
from oncelog.storage.tenants import UsageCount, encode_tenants
from storage.sqlite.writers import session_on

SERVERS = 4
WRITES = 60
TENANT = Tenant("org", records_max=100)


@pytest.mark.rule("CO-30")
async def test_concurrent_commits_to_many_lanes_stay_within_the_quota(tmp_path: Path) -> None:
    address = address_of(tmp_path)
    stores = [PostgresStore(address) for _ in range(SERVERS)]
    for store in stores:
        await store.open()
    await stores[0].set_tenants([TENANT, Tenant("org/1"), Tenant("org/2")])

    async def write_all(store: PostgresStore, server: int) -> list[object]:
        verdicts: list[object] = []
        for number in range(0, WRITES, 3):
            # The streams are in several lanes, which differ per batch, so that the stores wait for each other's lanes.
            items = [
                transaction(1, 1, scope=f"org/{1 + (number + more) % 7}/{server}-{number + more}", body=b"xx")
                for more in range(3)
            ]
            decided = await store.commit([Request((item,)) for item in items])
            verdicts += [verdict for (verdict,) in decided.verdicts]
        return verdicts

    results = await asyncio.gather(*[write_all(store, server) for server, store in enumerate(stores)])
    verdicts = [verdict for one in results for verdict in one]
    committed = [verdict for verdict in verdicts if isinstance(verdict, Committed)]
    refused = [verdict.reason for verdict in verdicts if isinstance(verdict, Refused)]
    assert len(committed) == TENANT.records_max
    assert set(refused) == {Reason.QUOTA_EXCEEDED}
    usage = {tenant.prefix: has for tenant, has in await stores[-1].usage()}
    assert usage["org"].records == 100
    before = usage["org"].bytes
    # Concurrent erasures must release the erased bytes only once.
    heads = await stores[0].heads()
    erased = await asyncio.gather(
        *[store.erase(lane, range(1, head.position + 1)) for lane, head in heads.items() for store in stores]
    )
    assert sum(erased) == 100
    usage = {tenant.prefix: has for tenant, has in await stores[-1].usage()}
    assert usage["org"].bytes == before - 200
    for store in stores:
        await store.close()


@pytest.mark.rule("CO-30")
async def test_usage_of_tenants_set_during_writes_is_complete(tmp_path: Path) -> None:
    address = address_of(tmp_path)
    one, two = PostgresStore(address), PostgresStore(address)
    await one.open()
    await two.open()

    async def write(store: PostgresStore, server: int) -> None:
        for number in range(40):
            item = transaction(1, 1, scope=f"org/{server}-{number}", body=b"12345")
            await store.commit([Request((item,))])
            if number % 10 == 9:
                lane = max(await store.heads())
                await store.erase(lane, [1])

    async def change_tenants() -> None:
        for number in range(12):
            await two.set_tenants([Tenant("org")] if number % 2 else [Tenant("other")])

    await asyncio.gather(write(one, 1), write(two, 2), change_tenants())
    ((tenant, usage),) = await one.usage()
    assert (tenant.prefix, usage.records) == ("org", 80)
    left = 0
    for lane in await one.heads():
        rows = await one._read(sizes, lane)
        left += sum(rows)
    assert usage.bytes == left + 80 * 256
    await one.close()
    await two.close()


async def sizes(connection: object, lane: int) -> list[int]:
    rows = await connection.fetch(  # type: ignore[attr-defined]
        "SELECT coalesce(octet_length(body), 0) + 2 * (octet_length(scope) + octet_length(client) + octet_length(key)) "
        "FROM oncelog_records WHERE lane = $1",
        lane,
    )
    return [row[0] for row in rows]


@pytest.mark.rule("CO-30")
def test_processes_on_one_file_share_a_quota(tmp_path: Path) -> None:
    def count_commits(session: Writer, number: int) -> int:
        item = transaction(1, 1, scope=f"org/{number:02}", body=b"x")
        return sum(isinstance(one, Committed) for one in session.commit([Request((item,))], None).verdicts[0])

    path = tmp_path / "log.db"
    with session_on(path, 50) as one, session_on(path, 50) as two:
        tenants = [Tenant("org", bytes_max=5 * submission_bytes(transaction(1, 1, scope="org/11", body=b"x")))]
        assert count_commits(two, 0) == 1
        begun = run_query(one.connection, load_count_start)
        assert count_commits(two, 1) == 1, "the quota admits a write during the count"
        count = UsageCount(begun, tenants)
        save = partial(replace_tenants, is_last=False)
        assert one.run_write(save, encode_tenants(tenants), count, begun._replace(positions={}), None)
        taken = 2 + sum(
            count_commits(session, number) for number in range(2, 12) for session in (one, two) if number % 2
        )
        assert taken == 5

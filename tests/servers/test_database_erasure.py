"""Erasure in a database: the reported record count, and the time at which `scrub` reports the content as gone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from deadlines import until
from oncelog.engine.log import Log, open_log
from oncelog.testing.postgres_proxy import CommitFault
from servers.shared_logs import event, open_proxied_log
from servers.test_unknown_commit import COMMITTED_FATES, CUTS


@asynccontextmanager
async def snapshot_of(address: str) -> AsyncIterator[Any]:
    """Hold a transaction open with its snapshot."""
    connection = await asyncpg.connect(address)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.fetch("SELECT 1 FROM oncelog_records")
            yield connection
    finally:
        await connection.close()


async def bodies(connection: Any) -> int:
    return int(await connection.fetchval("SELECT count(body) FROM oncelog_records"))


async def write_events(log: Log) -> None:
    await log.submit_many([event(number) for number in (1, 2, 3)])


@pytest.mark.rule("CO-41")
async def test_scrub_reports_that_content_visible_to_an_old_snapshot_is_not_gone(database: str) -> None:
    async with open_log(database) as log:
        await write_events(log)
        async with snapshot_of(database) as old:
            assert await log._store.erase(0, [1, 3]) == 2
            assert not await log._store.scrub()
            assert await bodies(old) == 3
            assert not await log._store.scrub()
        # The snapshot cannot see the content, so `scrub` does not wait for it.
        async with snapshot_of(database) as new:
            assert await bodies(new) == 1
            assert await until(log._store.scrub)


@pytest.mark.rule("CO-41", "CO-16")
@pytest.mark.parametrize("fate", CUTS)
async def test_erasure_with_a_lost_answer_reports_the_erased_count(database: str, fate: CommitFault) -> None:
    """A retry after a COMMIT with unknown outcome may find that the content is already erased."""
    async with open_proxied_log(database) as (proxy, log):
        await write_events(log)
        proxy.commit_faults.append(fate)
        assert await log._store.erase(0, [1, 3]) == 2
        assert proxy.done[fate] == 1
        if fate in COMMITTED_FATES:
            assert await log._store.erasures() == 1
        assert await log._store.erase(0, [1, 3]) == 0
        assert [record.erased for record in (await log.read()).records] == [True, False, True]

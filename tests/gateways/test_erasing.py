"""Erasure in a database: what is counted, and when the content is said to be gone."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import asyncpg
import pytest

from gateways.gateway_stores import event, proxied, run, until
from gateways.test_unknown_commit import CUTS, MADE
from oncelog.engine.log import Log, open_log
from oncelog.testing.postgres_proxy import Fate


@asynccontextmanager
async def snapshot_of(address: str) -> AsyncIterator[Any]:
    """A transaction that goes on seeing what was there when it began."""
    connection = await asyncpg.connect(address)
    try:
        async with connection.transaction(isolation="repeatable_read"):
            await connection.fetch("SELECT 1 FROM oncelog_records")
            yield connection
    finally:
        await connection.close()


async def bodies(connection: Any) -> int:
    return int(await connection.fetchval("SELECT count(body) FROM oncelog_records"))


async def written(log: Log) -> None:
    await log.submit_many([event(number) for number in (1, 2, 3)])


@pytest.mark.rule("CO-41")
def test_content_that_an_old_snapshot_sees_is_not_said_to_be_gone(database: str) -> None:
    async def main() -> None:
        async with open_log(database) as log:
            await written(log)
            async with snapshot_of(database) as old:
                assert await log._store.erase(0, [1, 3]) == 2
                assert not await log._store.scrub()
                assert await bodies(old) == 3
                assert not await log._store.scrub()
            async with snapshot_of(database) as new:  # it cannot see it, and so keeps nobody waiting
                assert await bodies(new) == 1
                assert await until(log._store.scrub)

    run(main())


@pytest.mark.rule("CO-41", "CO-16")
@pytest.mark.parametrize("fate", CUTS)
def test_an_erasure_that_was_cut_counts_what_it_has_erased(database: str, fate: Fate) -> None:
    """Done again because nobody could tell what became of its COMMIT, it may find nothing left to do."""

    async def main() -> None:
        async with proxied(database) as (proxy, log):
            await written(log)
            proxy.fates.append(fate)
            assert await log._store.erase(0, [1, 3]) == 2
            assert proxy.done[fate] == 1
            if fate in MADE:
                assert await log._store.erasures() == 1
            assert await log._store.erase(0, [1, 3]) == 0
            assert [record.erased for record in (await log.read()).records] == [True, False, True]

    run(main())

"""Expired leases are removed from every lane, regardless of how commits are distributed over lanes."""

import pytest

from databases import query
from oncelog.core.limits import LEASE_MEMORY_MS, LEASE_MS_DEFAULT
from oncelog.core.policy import BUILT_IN_POLICIES
from oncelog.core.values import Item, Request, Settings
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.queries.expiry import EXPIRY_INTERVAL_COMMITS
from oncelog.storage.side_state import lane_of_scope
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.writes import CAMPAIGN, claim, event

LANES = 16
LEASES = 20
BUSY = 1_000


async def write(store: PostgresStore, *items: Item) -> None:
    await store.commit([Request(items)])


@pytest.mark.rule("CO-17")
@pytest.mark.parametrize("is_together", [False, True], ids=["alternating", "together"])
async def test_each_lane_is_expired_by_its_own_commits(database: str, is_together: bool) -> None:
    """If commits were counted across all lanes, expiry could always run for the same lane and never for this one."""
    assert lane_of_scope(CAMPAIGN, LANES) != 0
    clock = ManualClock()
    store = PostgresStore(database, Settings(lanes=LANES), clock=clock)
    await store.open()
    try:
        await store.declare(BUILT_IN_POLICIES)
        await write(store, *[claim(number, "holder") for number in range(LEASES)])
        clock.advance(LEASE_MS_DEFAULT + LEASE_MEMORY_MS + 1)
        await store.confirm_clock()
        await write(store, claim(BUSY, "holder"))  # advances the lane's log time
        for number in range(3, 3 * EXPIRY_INTERVAL_COMMITS):
            if is_together:
                await write(store, event(number), claim(BUSY, "holder"))
            else:  # Every 16th commit is in the other lane.
                await write(store, claim(BUSY, "holder") if number % EXPIRY_INTERVAL_COMMITS else event(number))
    finally:
        await store.close()
    assert query(database, "SELECT count(*) FROM oncelog_leases") == [(1,)]

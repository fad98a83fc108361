"""Pages of pulls, rows and snapshots are complete, ordered and free of repeats, even during writes (DE-9)."""

import asyncio
from pathlib import Path

import pytest

from databases import BOTH_STORES
from server.deltas.delta_servers import Json, SharedServer, as_delivered, change, refusal, run_server

pytestmark = BOTH_STORES


@pytest.mark.rule("DE-9")
@pytest.mark.parametrize("limit", [1, 2, 1000])
async def test_pull_returns_each_delta_once_in_arrival_order(shared_server: SharedServer, limit: int) -> None:
    gateway = shared_server.gateway()
    equal = [change(100, f"r{number}", client=f"c{number}", a=1) for number in range(4)]
    await gateway.push_accepted(*equal[:2])
    first = await gateway.pull_all(limit=limit)
    late = [change(1, "r9", a=0), change(99, "r0", a=9), *equal[2:]]
    await gateway.push_accepted(*late, equal[0])
    assert await gateway.pull_all(len(first), limit=limit) == [as_delivered(one, 3 + at) for at, one in enumerate(late)]
    everything = [as_delivered(one, 1 + at) for at, one in enumerate(equal[:2] + late)]
    assert await gateway.pull_all(limit=limit) == everything
    for since in range(7):
        assert await gateway.pull_all(since, limit=limit) == everything[since:]


@pytest.mark.rule("DE-9")
async def test_pulls_during_writes_are_complete_and_without_repeats(shared_server: SharedServer) -> None:
    gateway, writers, each = shared_server.gateway(), 4, 15
    done = asyncio.Event()

    async def write(writer: int) -> None:
        for number in range(each):  # the clocks run backwards, so every delta is late
            fresh = change(1000 - number // 3, f"r{number}", client=f"c{writer}", a=number)
            await gateway.push_accepted(fresh, *([fresh] if number % 2 else []))

    async def read(limit: int) -> list[Json]:
        found: list[Json] = []
        while True:
            is_done = done.is_set()
            page = await gateway.pull(len(found), limit=limit)
            assert len(page["deltas"]) <= limit
            found += page["deltas"]
            assert page["cursor"] == len(found)
            if is_done and not page["hasMore"]:
                return found

    readers = [asyncio.ensure_future(read(limit)) for limit in (1, 3, 100)]
    await asyncio.gather(*map(write, range(writers)))
    done.set()
    first, *others = await asyncio.gather(*readers)
    assert [one["sequence"] for one in first] == list(range(1, writers * each + 1))
    assert len({one["deltaId"] for one in first}) == writers * each
    assert others == [first, first]


@pytest.mark.rule("DE-9")
async def test_page_size_is_limited_to_the_maximum(tmp_path: Path) -> None:
    async with run_server(tmp_path, page_events_default=3, page_events_max=5) as server:
        gateway = server.gateway()
        await gateway.push_accepted(*(change(number, f"r{number}", a=1) for number in range(1, 10)))
        for given, expected in (({}, 3), ({"limit": 4}, 4), ({"limit": 99}, 5), ({"limit": 0}, 1)):
            page = await gateway.pull(**given)
            assert (len(page["deltas"]), page["cursor"], page["hasMore"]) == (expected, expected, True)
            for path in ("rows/t", "snapshot"):
                found = await gateway.ok("GET", path, params=given)
                assert len(found["rows"]) == expected
                assert found["next"]
        assert (await gateway.pull(8))["hasMore"] is False
        assert (await gateway.pull(9))["deltas"] == []


@pytest.mark.rule("DE-9", "CO-40")
async def test_cursor_of_another_history_is_refused(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(change(1, a=1), change(2, a=2))
    epoch = shared_server.server.log.epoch
    assert (await gateway.pull(2, epoch=epoch))["deltas"] == []
    for path, newest in (("pull?since=3", 2), ("live?since=3", 2), ("pull?epoch=other", None)):
        answer = await gateway.request("GET", path)
        assert refusal(answer) == (409, "HISTORY_CHANGED")
        assert answer.json["epoch"] == epoch
        assert answer.json.get("newest") == newest


@pytest.mark.rule("DE-7", "DE-9")
async def test_rows_are_paged_by_row_id_without_deleted_rows(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    ids = ["", "A", "a", "a/1", "b", "é", "\uffff", "\U0001f600"][1:]
    await gateway.push_accepted(*(change(1, name, a=name) for name in reversed(ids)))
    await gateway.push_accepted(change(2, "a", op="DELETE"), change(1, "A", table="u", a=0))
    left = [name for name in ids if name != "a"]
    for limit in (1, 2, 100):
        found = await gateway.rows(limit=limit)
        assert list(found) == left  # in code-point order
        assert found == {name: {"a": name} for name in left}
    assert await gateway.rows("u") == {"A": {"a": 0}}
    rows, cursor = await gateway.snapshot(limit=2)
    assert [(row["table"], row["rowId"]) for row in rows] == [*(("t", name) for name in ids), ("u", "A")]
    assert cursor == len(ids) + 2
    assert [row["rowId"] for row in rows if row["deleted"]] == ["a"]


async def test_gateways_are_independent(shared_server: SharedServer) -> None:
    one, other = shared_server.gateway("a%2Fb"), shared_server.gateway("a")
    delta = change(1, a=1)
    assert await one.push_accepted(delta) == [(1, False)]
    assert await other.pull_all() == []
    assert await other.rows() == {}
    assert await other.push_accepted(delta) == [(1, False)]

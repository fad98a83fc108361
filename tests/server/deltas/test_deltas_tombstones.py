"""Compaction drops old deleted rows, and late deltas do not restore them (DE-13)."""

import asyncio
from pathlib import Path

import pytest

from databases import BOTH_STORES, log_at
from oncelog.core.merge import Op
from oncelog.core.rules.compaction import HORIZON_CLIENT, build_horizon_delete
from server.cli_commands import oncelog
from server.deltas.delta_servers import (
    Gateway,
    Json,
    SharedServer,
    change,
    compaction_answer,
    merge_onto_snapshot,
    refusal,
    rows_of,
    run_server,
)
from server.deltas.row_model import merge_model

pytestmark = BOTH_STORES

ROWS = 500
"""Number of deleted rows. Without dropping, every snapshot would contain all of them."""


def horizon_json(horizon: int, row: str) -> Json:
    """Return the form in which readers get a delta that lost to the horizon."""
    return change(horizon, row, op=Op.DELETE.value, client=HORIZON_CLIENT)


async def replica(gateway: Gateway) -> dict[tuple[str, str], Json]:
    """Return the rows of a new client, which merges a snapshot and then the pull from its cursor."""
    rows, cursor = await gateway.snapshot(limit=3)
    return merge_model(merge_onto_snapshot(rows, await gateway.pull_all(cursor)))


@pytest.mark.rule("DE-13")
async def test_old_deleted_rows_are_dropped_from_the_snapshot(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(change(1, "kept", a=1), *(change(2, f"r{number}", a=1) for number in range(ROWS)))
    await gateway.push_accepted(*(change(3, f"r{number}", op="DELETE") for number in range(ROWS)))
    assert await gateway.compact(keep=0) == compaction_answer(2 * ROWS + 1, 2 * ROWS + 1), "30 days have not passed"
    assert len((await gateway.snapshot())[0]) == ROWS + 1
    assert await gateway.compact(keep=0, tombstoneAgeMs=0) == compaction_answer(0, 2 * ROWS + 1, dropped=ROWS)
    ((kept,), _) = await gateway.snapshot()
    assert kept["rowId"] == "kept"
    assert (await gateway.ok("GET", "snapshot"))["horizon"] == "4"


@pytest.mark.rule("DE-13", "DE-7", "DE-4")
async def test_late_delta_of_a_dropped_row_is_acknowledged_and_loses(tmp_path: Path) -> None:
    """The log verifies, the horizon survives a restart, and readers get the DELETE that the delta lost to."""
    late = [change(2, "gone", b=1), change(3, "never seen", b=1)]
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        await gateway.push_accepted(change(1, "gone", a=1), change(5, "gone", op="DELETE"), change(4, "kept", a=1))
        await gateway.compact(keep=0, tombstoneAgeMs=0)
        assert await gateway.push_accepted(*late) == [(4, False), (5, False)]
        assert await gateway.rows() == {"kept": {"a": 1}}
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        assert await gateway.push_accepted(*late) == [(4, True), (5, True)]
        await gateway.push_accepted(change(4, "gone", c=1), change(7, "gone", d=1), change(5, "gone", e=1))
        assert await gateway.rows() == {"kept": {"a": 1}, "gone": {"d": 1}}
        found = await gateway.pull_all(3)
        assert found == [
            {"sequence": 4, **horizon_json(6, "gone")},
            {"sequence": 5, **horizon_json(6, "never seen")},
            {"sequence": 6, **horizon_json(6, "gone")},
            {"sequence": 7, **change(7, "gone", d=1)},
            {"sequence": 8, **horizon_json(6, "gone")},
        ]
        assert found[0]["deltaId"] == build_horizon_delete(6, "t", "gone").delta_id.hex()
        assert rows_of(await replica(gateway)) == await gateway.rows()
    verified = await oncelog("verify", log_at(tmp_path / "events.db"))
    assert verified.exit_code == 0, verified.output


@pytest.mark.rule("DE-13", "DE-12")
async def test_reader_that_missed_dropped_deletes_must_replace_its_rows(shared_server: SharedServer) -> None:
    """The reader may hold rows that the snapshot lacks. A reader without rows has nothing to replace."""
    gateway = shared_server.gateway()
    await gateway.push_accepted(change(1, "gone", a=1), change(2, "gone", op="DELETE"), change(3, "kept", a=1))
    await gateway.compact(upto=2, tombstoneAgeMs=0)
    assert (await gateway.pull(0))["snapshot"] is True
    answer = await gateway.request("GET", "pull", params={"since": 1})
    assert refusal(answer) == (409, "HISTORY_CHANGED")
    epoch = shared_server.server.log.epoch
    assert (answer.json["snapshot"], answer.json["newest"], answer.json["epoch"]) == (True, 3, epoch)
    assert "replace all rows" in answer.json["error"]
    assert len(await gateway.pull_all(2)) == 1

    stream = await gateway.stream(since=1)
    assert (await stream.next()).kind == "connected"  # type: ignore[union-attr]
    message = await stream.next()
    assert message is not None
    assert (message.kind, message.json["code"], message.json["snapshot"]) == ("error", "HISTORY_CHANGED", True)
    assert await stream.next() is None
    live = await gateway.live()
    assert (await live.connect(since=1))["type"] == "connected"
    frame = await live.receive()
    assert (frame["type"], frame["code"], frame["snapshot"]) == ("error", "HISTORY_CHANGED", True)
    live = await gateway.live()
    await live.connect(since=0)
    assert await live.receive() == {"type": "snapshot"}


@pytest.mark.rule("DE-13", "DE-12")
async def test_snapshot_is_read_again_when_rows_are_dropped_between_its_pages(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(change(1, "a", a=1), change(1, "b", op="DELETE"), change(1, "c", a=1))
    page = await gateway.ok("GET", "snapshot", params={"limit": 1})
    assert page["horizon"] is None
    await gateway.compact(keep=1, tombstoneAgeMs=0)
    answer = await gateway.request("GET", "snapshot", params={"limit": 1, "page": page["next"]})
    assert refusal(answer) == (409, "HISTORY_CHANGED")
    assert answer.json["error"].startswith("page: ")
    rows, cursor = await gateway.snapshot(limit=1)
    assert ([row["rowId"] for row in rows], cursor) == (["a", "c"], 3)


@pytest.mark.rule("DE-13")
async def test_only_compacted_deletes_are_dropped(shared_server: SharedServer) -> None:
    """A reader between the compaction and the newest delta still gets the DELETE."""
    gateway = shared_server.gateway()
    await gateway.push_accepted(change(1, "a", op="DELETE"), change(1, "b", op="DELETE"))
    assert await gateway.compact(keep=1, tombstoneAgeMs=0) == compaction_answer(1, 1, dropped=1)
    assert [row["rowId"] for row in (await gateway.snapshot())[0]] == ["b"]
    assert [one["rowId"] for one in await gateway.pull_all(1)] == ["b"]


@pytest.mark.rule("DE-13")
async def test_lagging_consumer_holds_back_the_drop_and_is_reported(shared_server: SharedServer) -> None:
    gateway, log = shared_server.gateway(), shared_server.server.log
    await gateway.push_accepted(change(1, "a", op="DELETE"), change(1, "b", op="DELETE"))
    await log.commit_cursor("fast", 2, stream=shared_server.scope)
    await log.commit_cursor("slow", 1, stream=shared_server.scope)
    held = {"consumer": "slow", "cursor": 1, "lag": 1}
    assert await gateway.compact(keep=0) == compaction_answer(2, 2), "no consumer holds back a young tombstone"
    assert await gateway.compact(keep=0, tombstoneAgeMs=0) == {**compaction_answer(0, 2, dropped=1), "heldBy": held}
    assert [row["rowId"] for row in (await gateway.snapshot())[0]] == ["b"]
    assert ("slow", 1) in [(one.name, one.lag) for one in await log.consumers() if one.scope == shared_server.scope]
    await log.commit_cursor("slow", None, stream=shared_server.scope)
    assert await gateway.compact(keep=0, tombstoneAgeMs=0) == compaction_answer(0, 2, dropped=1)
    assert (await gateway.snapshot())[0] == []


@pytest.mark.rule("DE-13")
async def test_minimum_age_is_configurable(tmp_path: Path) -> None:
    async with run_server(tmp_path, tombstone_age_ms=0) as server:
        gateway = server.gateway()
        await gateway.push_accepted(change(1, "a", op="DELETE"))
        assert await gateway.compact(keep=0, tombstoneAgeMs=86_400_000) == compaction_answer(1, 1)
        assert await gateway.compact(keep=0) == compaction_answer(0, 1, dropped=1)


@pytest.mark.rule("DE-13")
async def test_one_request_reads_a_bounded_number_of_rows(
    shared_server: SharedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncelog.server.deltas.service.COMPACT_ROWS_MAX", 3)
    gateway = shared_server.gateway()
    await gateway.push_accepted(*(change(1, f"r{number}", op="DELETE") for number in range(7)))
    done = await gateway.compact(keep=0, tombstoneAgeMs=0)
    dropped = [done["droppedRows"]]
    while done["next"]:
        done = await gateway.compact(keep=0, tombstoneAgeMs=0, page=done["next"])
        dropped.append(done["droppedRows"])
    assert dropped == [3, 3, 1]
    assert (await gateway.snapshot())[0] == []


@pytest.mark.rule("DE-13", "DE-10")
@pytest.mark.parametrize("body", [{"tombstoneAgeMs": -1}, {"tombstoneAgeMs": "1"}, {"page": "x"}, {"page": 1}])
async def test_malformed_drop_request_is_refused(shared_server: SharedServer, body: Json) -> None:
    gateway = shared_server.gateway()
    answer = await gateway.request("POST", "compact", json={"keep": 0, **body})
    assert refusal(answer) == (400, "BAD_REQUEST")


@pytest.mark.rule("DE-13", "DE-7")
async def test_deltas_pushed_during_compactions_converge(shared_server: SharedServer) -> None:
    """Clients push, delete and compact concurrently. A new reader then has the same rows as the gateway."""
    gateway = shared_server.gateway()
    pushes = [
        [
            change(10 * clock + writer, f"r{(clock * writer) % 5}", client=f"c{writer}", op=op, **columns)
            for clock in ((7 * step + writer) % 12 for step in range(12))
            for op, columns in ((("DELETE", {}) if clock % 3 == 0 else ("UPDATE", {f"x{writer}": clock})),)
        ]
        for writer in (1, 2, 3)
    ]

    async def push(deltas: list[Json]) -> None:
        for one in deltas:
            await gateway.push_accepted(one)

    async def compact() -> None:
        for _ in range(6):
            await gateway.compact(keep=0, tombstoneAgeMs=0)

    await asyncio.gather(*(push(deltas) for deltas in pushes), compact())
    rows = await gateway.rows()
    assert rows_of(await replica(gateway)) == rows
    everything = merge_model([one for deltas in pushes for one in deltas])
    for row_id, columns in rows.items():
        assert columns.items() <= everything["t", row_id].items()

"""Compaction removes only bodies, and a client that syncs from a snapshot gets the same rows (DE-12, DE-4)."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from databases import BOTH_STORES, log_at
from oncelog.core import policy
from server.cli_commands import oncelog
from server.deltas.delta_servers import (
    Gateway,
    Json,
    SharedServer,
    as_delivered,
    change,
    compaction_answer,
    count_rows,
    merge_onto_snapshot,
    refusal,
    rows_of,
    run_server,
)
from server.deltas.row_model import merge_model

pytestmark = BOTH_STORES

DELTAS = [
    *(change(number, f"r{number % 4}", a=number, **{f"c{number}": number}) for number in range(1, 13)),
    change(20, "r1", op="DELETE"),
    change(5, "r2", client="b", a="lost"),
]


async def sync_new_client(gateway: Gateway, limit: int = 2) -> list[Json]:
    """Return the rows of a new client, which merges a snapshot and then the pull from its cursor."""
    rows, cursor = await gateway.snapshot(limit)
    return merge_onto_snapshot(rows, await gateway.pull_all(cursor, limit=limit))


@pytest.mark.rule("DE-12")
async def test_pull_from_before_the_compaction_requires_a_snapshot(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(*DELTAS)
    rows = await gateway.rows()
    assert await gateway.compact(upto=10) == compaction_answer(10, 10)
    epoch = shared_server.server.log.epoch
    for since in (0, 3, 9):
        page = await gateway.pull(since, limit=5)
        assert page == {"deltas": [], "snapshot": True, "cursor": since, "hasMore": True, "epoch": epoch}
    assert await gateway.pull_all(10) == [as_delivered(DELTAS[at], at + 1) for at in range(10, 14)]
    assert await gateway.rows() == rows == rows_of(merge_model(DELTAS))
    assert merge_model(await sync_new_client(gateway)) == merge_model(DELTAS)


@pytest.mark.rule("DE-12")
async def test_pull_returns_the_deltas_before_an_erased_one_first(shared_server: SharedServer) -> None:
    """With one erased delta, pulls return the deltas before it, and then require a snapshot."""
    gateway = shared_server.gateway()
    await gateway.push_accepted(*DELTAS[:5])
    await shared_server.server.log.erase(
        key=bytes.fromhex(DELTAS[2]["deltaId"]), policy=policy.DELTAS, scope=shared_server.scope
    )
    page = await gateway.pull()
    assert [one["sequence"] for one in page["deltas"]] == [1, 2]
    assert (page["cursor"], page["hasMore"], "snapshot" in page) == (2, True, False)
    assert (await gateway.pull(2))["snapshot"] is True
    assert [one["sequence"] for one in await gateway.pull_all(3)] == [4, 5]


@pytest.mark.rule("DE-12", "DE-4", "CO-41")
async def test_compacted_deltas_are_still_known_and_the_log_verifies(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        await gateway.push_accepted(*DELTAS)
        await gateway.compact(keep=0)
        before = await count_rows(tmp_path), await gateway.snapshot()
        numbered = [(number, True) for number in range(1, 15)]
        assert await gateway.push_accepted(*DELTAS) == numbered
        assert await gateway.push_accepted(*DELTAS) == numbered  # answered from memory
        other = {**DELTAS[0], "op": "DELETE"}
        assert await gateway.push_accepted(other) == [(1, True)]
        assert (await count_rows(tmp_path), await gateway.snapshot()) == before
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        assert await gateway.push_accepted(*DELTAS, other) == [*numbered, (1, True)]
        assert (await count_rows(tmp_path), await gateway.snapshot()) == before
        assert await gateway.rows() == rows_of(merge_model(DELTAS))
        records = (await server.log.read(stream="deltas/shop")).records
        assert [(one.key.hex(), one.erased, one.body) for one in records] == [
            (delta["deltaId"], True, b"") for delta in DELTAS
        ]
    verified = await oncelog("verify", log_at(tmp_path / "events.db"))
    assert verified.exit_code == 0, verified.output


@pytest.mark.rule("DE-12")
async def test_compaction_is_limited_per_request_and_reports_progress(
    shared_server: SharedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncelog.server.deltas.service.COMPACT_DELTAS_MAX", 4)
    monkeypatch.setattr("oncelog.engine.eraser.ERASE_RECORDS", 3)
    gateway = shared_server.gateway()
    assert await gateway.compact(keep=0) == compaction_answer(0, 0)
    await gateway.push_accepted(*DELTAS[:10])
    assert await gateway.compact(upto=9) == compaction_answer(4, 4, has_more=True)
    assert await gateway.compact(keep=1) == compaction_answer(4, 8, has_more=True)
    assert await gateway.compact(keep=1) == compaction_answer(1, 9)
    for body in ({"keep": 1}, {"upto": 3}, {"upto": 0}, {"keep": 99}):
        assert await gateway.compact(**body) == compaction_answer(0, 9)
    assert await gateway.compact(upto=2**53 - 1) == compaction_answer(1, 10)
    await gateway.push_accepted(*DELTAS[10:])
    assert await gateway.compact(keep=3) == compaction_answer(1, 11)
    assert await gateway.rows() == rows_of(merge_model(DELTAS))


@pytest.mark.rule("DE-12")
async def test_interrupted_compaction_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oncelog.engine.eraser.ERASE_RECORDS", 3)
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        await gateway.push_accepted(*DELTAS)
        store: Any = server.log._store
        erase, calls = store.erase, []

        async def failing(*given: Any) -> int:
            calls.append(given)
            if len(calls) == 3:
                raise asyncio.CancelledError
            found: int = await erase(*given)
            return found

        monkeypatch.setattr(store, "erase", failing)
        with pytest.raises(asyncio.CancelledError):
            await server.log.compact("deltas/shop", keep=2)
        monkeypatch.undo()
        assert (await gateway.pull())["snapshot"] is True
        assert [one["sequence"] for one in await gateway.pull_all(6)] == list(range(7, 15))
        assert await gateway.push_accepted(*DELTAS) == [(number, True) for number in range(1, 15)]
        assert await gateway.compact(keep=2) == compaction_answer(6, 12)
        assert merge_model(await sync_new_client(gateway)) == merge_model(DELTAS)


@pytest.mark.rule("DE-12", "DE-10")
@pytest.mark.parametrize(
    "body",
    [b"", b"[]", b"{}", b'{"upto":1,"keep":1}', b'{"upto":-1}', b'{"keep":-1}', b'{"upto":"1"}', b'{"upto":1.5}',
     b'{"upto":1,"x":1}', b'{"upto":1,"upto":2}', b'{"upto":1e400}', b'{"keep":null}', b'{"keep":1,"upto":null}',
     b'{"upto":9007199254740992}', b'{"keep":9007199254740992}'],
)  # fmt: skip
async def test_malformed_compaction_request_is_refused(shared_server: SharedServer, body: bytes) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(DELTAS[0])
    answer = await gateway.request("POST", "compact", data=body, headers={"Content-Type": "application/json"})
    assert refusal(answer) == (400, "BAD_REQUEST")
    assert len(await gateway.pull_all()) == 1


@pytest.mark.rule("DE-12", "DE-7")
async def test_deltas_pushed_between_the_pages_of_a_snapshot_are_pulled_after_it(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(*DELTAS)
    await gateway.compact(keep=0)
    page = await gateway.ok("GET", "snapshot", params={"limit": 1})
    rows, cursor = page["rows"], page["cursor"]
    behind = [change(50, "r0", a="behind"), change(51, "r9", a="new"), change(60, "r2", op="DELETE")]
    await gateway.push_accepted(*behind)
    while page["next"]:
        page = await gateway.ok("GET", "snapshot", params={"limit": 1, "page": page["next"]})
        rows += page["rows"]
        assert page["cursor"] == cursor == len(DELTAS)
    found = merge_onto_snapshot(rows, await gateway.pull_all(cursor, limit=1))
    assert merge_model(found) == merge_model([*DELTAS, *behind])


@pytest.mark.rule("DE-12", "DE-7")
async def test_late_delta_does_not_restore_a_row_deleted_before_the_compaction(
    shared_server: SharedServer,
) -> None:
    gateway = shared_server.gateway()
    await gateway.push_accepted(change(5, a=1), change(9, op="DELETE"))
    await gateway.compact(keep=0)
    rows, cursor = await gateway.snapshot()
    late = change(7, client="late", a="ghost")
    await gateway.push_accepted(late)
    assert await gateway.rows() == {}
    assert merge_model(merge_onto_snapshot(rows, await gateway.pull_all(cursor))) == {}
    await gateway.push_accepted(change(10, client="late", b=1))
    assert await gateway.rows() == {"r1": {"b": 1}}


@pytest.mark.rule("DE-12", "DE-4")
async def test_new_and_repeated_pushes_are_accepted_during_compaction(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    many = [change(number, f"r{number % 7}", a=number) for number in range(1, 301)]
    await gateway.push_accepted(*many[:200])

    async def push_all() -> None:
        for at in range(0, 300, 20):
            known = await gateway.push_accepted(*many[at : at + 20], *many[: at // 2])
            assert all(is_known for _, is_known in known[20:])

    async def compact_all() -> None:
        for _ in range(12):
            await gateway.compact(keep=10)

    await asyncio.gather(push_all(), compact_all(), push_all())
    assert (await gateway.snapshot())[1] == 300
    assert await gateway.push_accepted(*many) == [(number, True) for number in range(1, 301)]
    assert await gateway.rows() == rows_of(merge_model(many))
    assert merge_model(await sync_new_client(gateway)) == merge_model(many)

"""Pushes: accepted, known and refused deltas (DE-1 to DE-6, DE-10)."""

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any, Final

import pytest

from core.delta_faults import FAULTS, GOOD, NOT_JSON, Fault, delta_json, delta_text
from databases import BOTH_STORES
from deadlines import soon, until
from oncelog.core.canonical import canonical
from server.deltas.delta_servers import Gateway, SharedServer, as_delivered, change, count_rows, refusal, run_server

pytestmark = BOTH_STORES

JSON: Final = {"Content-Type": "application/json"}


async def is_empty(gateway: Gateway) -> bool:
    """Whether the gateway has never accepted a delta."""
    return await gateway.pull_all() == [] and (await gateway.snapshot()) == ([], 0)


# --- accepted ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-1", "DE-6")
async def test_pushed_deltas_are_committed_and_pulled_unchanged(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    deltas = [
        change(1, "r1", op="INSERT", name="Tea", price=3.5, tags=["a", {"b": None}]),
        change(2, "r1", price=4),
        change(2**64 - 1 >> 20, "r2", client="c2", op="INSERT"),
        change(3, "\U0001f600 /?%", name='"\\\u0001'),
        change(4, "r1", client="é", op="DELETE"),
    ]
    answer = await gateway.ok("POST", "push", json={"deltas": deltas})
    assert set(answer) == {"committed", "duplicates", "epoch", "previousEpochs", "serverTime", "results"}
    assert (answer["committed"], answer["duplicates"], answer["epoch"]) == (5, 0, shared_server.server.log.epoch)
    assert answer["results"] == [
        {"deltaId": delta["deltaId"], "sequence": number, "duplicate": False} for number, delta in enumerate(deltas, 1)
    ]
    page = await gateway.pull()
    assert page == {
        "deltas": [as_delivered(delta, number) for number, delta in enumerate(deltas, 1)],
        "cursor": 5,
        "hasMore": False,
        "epoch": shared_server.server.log.epoch,
    }
    assert await gateway.rows() == {"r2": {}, "\U0001f600 /?%": {"name": '"\\\u0001'}}


@pytest.mark.rule("DE-2", "DE-10")
async def test_unknown_members_are_dropped_and_negative_zero_is_zero(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    zero = change(1, a=0)
    text = json.dumps({**zero, "deltaType": "x", "retries": 3}).replace('"value": 0', '"value": -0.0')
    assert "-0.0" in text
    answer = await gateway.push_body(f'{{"deltas": [{text}]}}'.encode())
    assert answer.status == 200, answer.body
    assert await gateway.pull_all() == [as_delivered(zero, 1)]
    assert (await gateway.request("GET", "rows/t")).body.count(b'"a":0}') == 1
    assert await gateway.push_accepted(zero) == [(1, True)]


@pytest.mark.rule("DE-6")
async def test_empty_push_and_largest_push_are_accepted(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    assert await gateway.push_accepted() == []
    many = [change(number, f"r{number % 50}", a=number) for number in range(1, 10_001)]
    assert await gateway.push_accepted(*many) == [(number, False) for number in range(1, 10_001)]
    assert await gateway.push_accepted(*many) == [(number, True) for number in range(1, 10_001)]
    answer = await gateway.push(*many, change(10_001, a=1))
    assert refusal(answer) == (413, "TOO_LARGE")
    assert answer.json["error"] == "deltas: must have at most 10000 entries, not 10001"
    assert (await gateway.snapshot())[1] == 10_000


@pytest.mark.rule("CO-21")
async def test_development_mode_accepts_any_credential_and_client_id(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway(credential="whatever")
    deltas = [change(1, client="a", a=1), change(1, client="b", a=1)]
    assert await gateway.push_accepted(*deltas) == [(1, False), (2, False)]


# --- known -----------------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-4")
async def test_known_delta_changes_nothing(tmp_path: Path) -> None:
    winner, loser = change(9, a=1), change(1, a=2, b=3)
    deleted, late = change(7, "r2", op="DELETE"), change(5, "r2", a=1)
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        assert await gateway.push_accepted(winner, loser, loser, deleted, late, late) == [
            (1, False), (2, False), (2, True), (3, False), (4, False), (4, True),
        ]  # fmt: skip
        before = await count_rows(tmp_path), await gateway.snapshot(), await gateway.pull_all()
        for again in ([winner], [loser], [late, deleted], [loser, loser, winner, late]):
            assert all(is_known for _, is_known in await gateway.push_accepted(*again))
        assert (await count_rows(tmp_path), await gateway.snapshot(), await gateway.pull_all()) == before
        assert await gateway.rows() == {"r1": {"a": 1, "b": 3}}
    async with run_server(tmp_path) as server:  # the restarted server has an empty cache
        gateway = server.gateway()
        for _ in range(2):  # known from the store, then from the cache
            assert await gateway.push_accepted(loser, winner, late) == [(2, True), (1, True), (4, True)]
        assert (await count_rows(tmp_path), await gateway.snapshot(), await gateway.pull_all()) == before


@pytest.mark.rule("DE-2", "DE-4")
async def test_delta_with_another_op_is_a_duplicate_and_is_counted(tmp_path: Path) -> None:
    first = change(1, a=1)
    other = {**first, "op": "DELETE"}
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        assert await gateway.push_accepted(first, other) == [(1, False), (1, True)]
        assert await gateway.push_accepted(other, first) == [(1, True), (1, True)]  # from the cache
        assert dict(server.counts.deltas) == {"committed": 1, "known": 1, "known_under_another_op": 2}
        assert await gateway.rows() == {"r1": {"a": 1}}
        assert [delta["op"] for delta in await gateway.pull_all()] == ["UPDATE"]
    async with run_server(tmp_path) as server:
        gateway = server.gateway()
        assert await gateway.push_accepted(other, change(2, a=2)) == [(1, True), (2, False)]  # from the store
        assert await gateway.rows() == {"r1": {"a": 2}}
        text = (await server.served.get("/metrics")).body.decode()
        assert 'oncelog_deltas_total{outcome="committed"} 1.0' in text
        assert 'oncelog_deltas_total{outcome="known_under_another_op"} 1.0' in text
        await gateway.push_accepted(first)
        assert dict(server.counts.deltas) == {"committed": 1, "known": 1, "known_under_another_op": 1}


@pytest.mark.rule("DE-4", "CO-32")
@pytest.mark.parametrize("is_in_memory", [True, False], ids=["memory", "store"])
async def test_known_delta_is_acknowledged_while_the_queue_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    options: dict[str, Any] = {"queue_items_max": 3, "cache_entries_max": 100 if is_in_memory else 0}
    async with run_server(tmp_path, **options) as server:
        gateway = server.gateway()
        known = [change(number, a=number) for number in range(1, 3)]
        await gateway.push_accepted(*known)
        before = await count_rows(tmp_path)
        gate = server.served.hold_commits(monkeypatch)
        waiting = asyncio.ensure_future(gateway.push_accepted(*(change(number, "x", a=0) for number in range(10, 14))))
        await until(lambda: server.log.queue_length == 4)
        inquiries = server.log._committer._known_only_queue
        again = asyncio.ensure_future(gateway.push_accepted(*known))
        await until(lambda: again.done() if is_in_memory else len(inquiries) == 1)
        if is_in_memory:
            body = b'{"deltas":[%b]}' % b",".join(canonical(delta) for delta in known)
            assert (await gateway.push_body(body)).json["duplicates"] == 2  # the pushed deltas in canonical form
        # Only one lookup may wait for the held commit. With a cache, it is the lookup of this push; without a cache, it
        # is the lookup of the retry.
        busy = asyncio.ensure_future(gateway.push(known[0], change(99, a=99)))
        await until(lambda: len(inquiries) == 1 if is_in_memory else busy.done())
        await soon(gate.reached.wait())
        gate.open()
        assert await again == [(1, True), (2, True)]
        answer = await busy
        assert refusal(answer) == (503, "SERVER_BUSY")
        assert answer.json["retryAfterMs"] >= 0
        assert len(await waiting) == 4
        assert len(await gateway.pull_all()) == 6
        grown = {name for name, count in (await count_rows(tmp_path)).items() if count != before.get(name)}
        assert grown  # the four new deltas are stored


# --- refused ----------------------------------------------------------------------------------------------------


@pytest.mark.rule("DE-6", "DE-10", "CO-33")
async def test_invalid_delta_refuses_the_whole_push_with_index_and_path(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()

    async def check(name: str, fault: Fault) -> None:
        body = f'{{"deltas":[{delta_text()},{delta_text(**fault.raw)}]}}'
        answer = await gateway.push_body(body.encode())
        assert refusal(answer) == (400, "BAD_REQUEST"), name
        assert answer.json["error"].startswith(f"deltas[1]{fault.path}"), name
        assert fault.words in answer.json["error"], name
        assert answer.json["index"] == 1, name

    for name, fault in FAULTS.items():
        await check(name, fault)
    for name, text in NOT_JSON.items():
        assert refusal(await gateway.push_body(f'{{"deltas":[{text}]}}'.encode())) == (400, "BAD_REQUEST"), name
    assert await is_empty(gateway)


@pytest.mark.rule("DE-6", "CO-30")
async def test_log_limit_below_the_api_limit_is_reported(tmp_path: Path) -> None:
    lower: dict[str, Any] = {
        "request_items_max": 10,
        "request_events_max": 10,
        "request_members_max": 9,
        "body_bytes_max": 1000,
    }
    async with run_server(tmp_path, **lower) as server:
        gateway = server.gateway()
        deltas = [change(number, f"r{number}", a=1) for number in range(1, 12)]
        answer = await gateway.push(*deltas)
        assert refusal(answer) == (413, "TOO_LARGE")
        assert answer.json["error"] == "deltas: must have at most 10 entries, not 11"
        assert "index" not in answer.json  # no single delta is invalid: a smaller push is accepted
        long = change(9, "long", a="x" * 900)
        answer = await gateway.push(*deltas[:3], long, deltas[4])
        assert refusal(answer) == (413, "TOO_LARGE")
        assert answer.json["index"] == 3
        assert answer.json["error"].startswith("deltas[3]: body must have at most 1000 bytes, not ")
        assert await is_empty(gateway)
        assert await gateway.push_accepted(*deltas[:10]) == [(number, False) for number in range(1, 11)]


@pytest.mark.rule("DE-10")
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"deltas":null}',
        b'{"deltas":{}}',
        b"\xff",
        b"[" * 9999,
    ],
)
async def test_malformed_push_is_refused(shared_server: SharedServer, body: bytes) -> None:
    answer = await shared_server.gateway().push_body(body)
    assert refusal(answer) == (400, "BAD_REQUEST")
    assert answer.json["error"].partition(":")[0] in ("body", "deltas")
    assert "index" not in answer.json


@pytest.mark.rule("DE-10")
@pytest.mark.parametrize("levels", [508, 900, 2000, 100_000])
async def test_too_deeply_nested_value_is_refused(shared_server: SharedServer, levels: int) -> None:
    gateway = shared_server.gateway()
    columns = f'[{{"column":"a","value":{"[" * levels}{"]" * levels}}}]'
    answer = await gateway.push_body(f'{{"deltas":[{delta_text(columns=columns)}]}}'.encode())
    assert refusal(answer) == (400, "BAD_REQUEST")
    assert "nested deeper than 512 levels" in answer.json["error"]
    assert await is_empty(gateway)


@pytest.mark.rule("DE-3")
async def test_wrong_delta_id_is_refused_with_the_expected_one(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    good, other = change(1, a=1), change(2, a=2)
    await gateway.push_accepted(good)
    for forged in (good["deltaId"], "0" * 64, other["deltaId"].upper(), other["deltaId"][:-1], ""):
        answer = await gateway.push(change(3, a=3), {**other, "deltaId": forged})
        assert refusal(answer) == (400, "DELTA_ID_MISMATCH")
        assert answer.json["index"] == 1
        assert answer.json["expected"] == other["deltaId"]
        assert answer.json["error"].startswith("deltas[1].deltaId: does not match the content of the delta")
    assert await gateway.pull_all() == [as_delivered(good, 1)]
    assert await gateway.rows() == {"r1": {"a": 1}}


@pytest.mark.rule("DE-6", "DE-10")
@pytest.mark.parametrize("index", [0, 100, 199])
@pytest.mark.parametrize("fault", ["hlc as a number", "a repeated column", "no deltaId"])
async def test_one_invalid_delta_refuses_a_large_push(shared_server: SharedServer, index: int, fault: str) -> None:
    gateway = shared_server.gateway()
    texts = [json.dumps(change(number, f"r{number}", a=number)) for number in range(1, 201)]
    texts[index] = delta_text(**FAULTS[fault].raw)
    answer = await gateway.push_body(f'{{"deltas":[{",".join(texts)}]}}'.encode())
    assert refusal(answer) == (400, "BAD_REQUEST")
    assert answer.json["index"] == index
    assert answer.json["error"].startswith(f"deltas[{index}]{FAULTS[fault].path}")
    assert await is_empty(gateway)
    texts[index] = json.dumps(delta_json(**GOOD))
    good = await gateway.push_body(f'{{"deltas":[{",".join(texts)}]}}'.encode())
    assert good.json["committed"] == 200


@pytest.mark.rule("DE-10", "CO-30")
async def test_oversized_body_value_or_row_is_refused(tmp_path: Path) -> None:
    async with run_server(tmp_path, frame_bytes_max=3_000_000, column_value_bytes_max=1_000_000) as server:
        gateway = server.gateway()
        answer = await gateway.push(change(1, a="x" * 3_000_000))
        assert refusal(answer) == (413, "TOO_LARGE")
        assert answer.json["limit"] == 3_000_000
        packed = gzip.compress(json.dumps({"deltas": [change(1, a="x" * 3_000_000)]}).encode())
        answer = await gateway.push_body(packed, **{"Content-Encoding": "gzip"})
        assert refusal(answer) == (413, "TOO_LARGE")
        answer = await gateway.push(change(1, b=1, a="x" * 1_000_000))
        assert refusal(answer) == (400, "BAD_REQUEST")
        assert answer.json["error"].startswith("deltas[0].columns[1].value: must have at most 1000000 bytes")
        # The row limit applies to the merged row, regardless of the number of deltas.
        large = [change(number, **{f"c{number}": "x" * 999_990}) for number in range(1, 6)]
        for delta in large[:4]:
            await gateway.push_accepted(delta)
        answer = await gateway.push(change(9, "r2", a=1), large[4])
        assert refusal(answer) == (422, "INVALID")
        assert answer.json["error"] == "deltas[1]: the row's values would have more than 4194304 bytes"
        assert answer.json["index"] == 1
        assert len(await gateway.pull_all()) == 4
        columns = [change(number, "r3", **{f"c{number}_{one}": 0 for one in range(500)}) for number in range(1, 4)]
        await gateway.push_accepted(*columns[:2])
        answer = await gateway.push(columns[2])
        assert refusal(answer) == (422, "INVALID")
        assert "more than 1000 columns" in answer.json["error"]
        assert await gateway.push_accepted(columns[1]) == [(6, True)]


@pytest.mark.rule("DE-10")
async def test_malformed_requests_are_refused_in_the_api_error_format(shared_server: SharedServer) -> None:
    gateway = shared_server.gateway()
    for method, path, status, code in (
        ("GET", "push", 405, "METHOD_NOT_ALLOWED"),
        ("POST", "pull", 405, "METHOD_NOT_ALLOWED"),
        ("DELETE", "rows/t", 405, "METHOD_NOT_ALLOWED"),
        ("GET", "nothing", 404, "UNKNOWN_PATH"),
        ("GET", "rows", 404, "UNKNOWN_PATH"),
    ):
        answer = await gateway.request(method, path, json={})
        assert refusal(answer) == (status, code)
        assert ("Allow" in answer.headers) == (status == 405)
    for headers in ({"Content-Type": "text/plain"}, {**JSON, "Content-Encoding": "compress"}):
        answer = await gateway.request("POST", "push", data=b"{}", headers=headers)
        assert refusal(answer) == (415, "BAD_REQUEST")
    answer = await gateway.push_body(b"no gzip", **{"Content-Encoding": "gzip"})
    assert refusal(answer) == (400, "BAD_REQUEST")
    for name in ("x" * 81, "e\u0301", "a%00b"):
        answer = await shared_server.server.gateway(name).push(change(1, a=1))
        assert refusal(answer) == (400, "BAD_REQUEST"), name
        assert answer.json["error"].startswith("gateway: ")
    for path, field in (
        ("pull?since=-1", "since"),
        ("pull?since=x", "since"),
        ("pull?limit=1.5", "limit"),
        ("pull?sinse=1", "sinse"),
        ("pull?since=1&since=2", "since"),
        ("rows/a-b", "table"),
        ("rows/t?rowId=r1&limit=x", "limit"),
        ("rows/t?rowId=r1&after=%00", "after"),
        ("live?since=x", "since"),
        ("rows/t?after=%00", "after"),
        (f"rows/t?rowId={'x' * 513}", "rowId"),
        ("snapshot?page=%C3%A9", "page"),
        ("snapshot?page=e30", "page"),
        ("snapshot?page=WzEsICJhIiwgIlx1ZDgwMCJd", "page"),
        ("snapshot?page=Wy0xLCAiYSIsICJiIl0", "page"),
    ):
        answer = await gateway.request("GET", path)
        assert refusal(answer) == (400, "BAD_REQUEST"), path
        assert answer.json["error"].startswith(f"{field}: "), answer.body

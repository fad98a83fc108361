"""Values that PostgreSQL rejects, and large values, are refused or stored, and do not affect the rest of the batch."""

import asyncio
import json
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import UUID

import aiohttp
import pytest

import oncelog
from deadlines import soon
from oncelog.core.limits import ROW_BYTES_MAX
from oncelog.core.merge import Op, RowDelta
from oncelog.core.operations import Relate, SetEntity
from oncelog.core.policy import CHAT, DELTAS, EVENTS, LEDGER, RUNS, OnReuse, Order, Policy, kept_for
from oncelog.core.values import (
    Acknowledge,
    Applied,
    Claim,
    Committed,
    Granted,
    Item,
    Reason,
    Refused,
    SetCursor,
    SetMember,
    Submission,
)
from oncelog.engine.log import Log, open_log
from oncelog.engine.outcome import Outcome
from oncelog.engine.read_results import Reading
from oncelog.engine.subscription import Subscription
from oncelog.errors import OncelogError
from server.running_server import Answer, Serving, item, numbers, serving
from servers.shared_logs import event, position_of, positions

NUL = "a\0b"
LARGE = 10 * 2**20


def ledger(**members: Any) -> Submission:
    given = {"scope": "org", "client": "c", "operations": (SetEntity("k", b"1"),), **members}
    return Submission(policy=LEDGER, key=bytes(15) + b"1", fingerprint=b"f", client_sequence=1, **given)


def delta(**members: Any) -> Submission:
    given = {"table": "t", "row_id": "r", "client_id": "c", "hlc": 1, "op": Op.INSERT, "columns": (("n", b"1"),)}
    made = RowDelta(**{"delta_id": bytes(31) + b"1", **given, **members})
    return Submission(policy=DELTAS, scope="gateway", key=made.delta_id, fingerprint=b"", delta=made)


def plain(**members: Any) -> Submission:
    given = {"scope": "", "key": bytes(15) + b"1", "fingerprint": b"f", **members}
    return Submission(policy=EVENTS, **given)


ODD: dict[str, Item] = {
    "an event's scope": plain(scope=NUL),
    "an event's partition": plain(partitions=(NUL,)),
    "an event's client": plain(client=NUL),
    "an event's actor": plain(actor=NUL),
    "an event's body": plain(body=NUL.encode(), fingerprint=NUL.encode(), key=b"\0" * 15 + b"2"),
    "a chat": Submission(policy=CHAT, scope=NUL, key=b"1", fingerprint=b"f", actor="user:a"),
    "an organization": ledger(scope=NUL),
    "a client that numbers": ledger(client=NUL),
    "an entity": ledger(operations=(SetEntity(NUL, b"1"),)),
    "an entity's value": ledger(operations=(SetEntity("k", NUL.encode()),)),
    "a resource": ledger(operations=(Relate(NUL, "r", "s"),)),
    "a relation": ledger(operations=(Relate("r", NUL, "s"),)),
    "a subject": ledger(operations=(Relate("r", "r", NUL),)),
    "a table": delta(table=NUL),
    "a row": delta(row_id=NUL),
    "a column": delta(columns=((NUL, b"1"),)),
    "a client of rows": delta(client_id=NUL),
    "a campaign": Claim(policy=RUNS, scope=NUL, key=bytes(15) + b"1", fingerprint=b"", holder="h"),
    "a holder": Claim(policy=RUNS, scope="s", key=bytes(15) + b"1", fingerprint=b"", holder=NUL),
    "a chat of a member": SetMember(NUL, "m"),
    "a member": SetMember("chat", NUL),
    "a member that acknowledges": Acknowledge("chat", NUL, 1),
    "a consumer": SetCursor(NUL, 0),
    "a stream of a consumer": SetCursor("c", 0, NUL),
}


@pytest.mark.rule("CO-33")
async def test_nul_character_in_any_field_does_not_fail_its_batch(database: str) -> None:
    async with open_log(database) as log:
        for number, (name, odd) in enumerate(ODD.items(), 1):
            items = [event(2 * number), odd, event(2 * number + 1)]
            first, verdict, last = await soon(asyncio.gather(*[log.submit(one) for one in items]))
            assert isinstance(first, Committed), name
            assert isinstance(last, Committed), name
            assert isinstance(verdict, Refused | Committed | Granted | Applied), name
            if isinstance(verdict, Refused):
                assert verdict.reason is Reason.MALFORMED, (name, verdict)
        body = (await log.read(upto=10_000, limit=1000)).records
        assert NUL.encode() in [record.body for record in body]


READINGS: dict[str, Callable[[Log], Any]] = {
    "partition": lambda log: log.read(partition=NUL),
    "partitions": lambda log: log.read(partitions=["a", NUL]),
    "stream": lambda log: log.read(stream=NUL),
    "cursor": lambda log: log.read(after=f"1:{NUL}"),
    "lookup": lambda log: log.lookup(UUID(int=1), scope=NUL),
    "lookup of a client": lambda log: log.lookup(bytes(16), policy=LEDGER, client=NUL),
    "erase": lambda log: log.erase(partition=NUL),
    "erase a stream": lambda log: log.erase(stream=NUL),
    "consumer": lambda log: log.cursor_of(NUL),
    "commit_cursor": lambda log: log.commit_cursor(NUL, 0),
    "subscribe": lambda log: log.subscribe(partitions=[NUL]),
    "policy": lambda log: log.submit(
        Submission(
            policy=Policy(
                name=NUL,
                key_bytes=(1, 16),
                order=Order.STREAM,
                on_reuse=OnReuse.REFUSE,
                retention=kept_for(hours=1),
            ),
            scope="s",
            key=b"k",
            fingerprint=b"f",
        )
    ),
}


@pytest.mark.rule("CO-33")
@pytest.mark.parametrize("name", READINGS)
async def test_read_with_nul_character_raises_no_database_error(database: str, name: str) -> None:
    async with open_log(database) as log:
        try:
            answer = await soon(READINGS[name](log))
        except (OncelogError, ValueError) as error:
            assert "damaged" not in str(error)  # noqa: PT017
            assert type(error).__module__.partition(".")[0] in ("oncelog", "builtins")  # noqa: PT017
        else:
            assert isinstance(answer, Refused | Reading | Outcome | Subscription) or not answer
            assert not getattr(answer, "records", None)
        assert position_of(await log.submit(event(1))) == 1


def items_with_nul() -> list[dict[str, Any]]:
    """Return events in API format, each with a NUL character in a different field."""
    return [
        {**item(100), "id": f"{UUID(int=100)}\0"},
        {**item(101), "partitions": [NUL]},
        {**item(102), "event": {"type": NUL}},
        {**item(103), "event": {"type": "t", NUL: 1}},
        {**item(104), "event": {"type": "t", "text": NUL}},
        {**item(105), NUL: NUL},
        {**item(106), "expected_committed_id": NUL},
    ]


@pytest.mark.rule("CO-33")
async def test_nul_character_over_http_is_refused_or_stored(database: str, tmp_path: Path) -> None:
    async with serving(tmp_path, store=database) as served:
        for number, odd in enumerate(items_with_nul(), 1):
            answer = await served.submit(item(2 * number), odd, item(2 * number + 1))
            if answer.status == 200:
                first, verdict, last = answer.json["results"]
                assert (first["status"], last["status"]) == ("committed", "committed")
                assert verdict["status"] in ("committed", "rejected")
            else:
                assert answer.refusal[0] == 400, answer.body
                assert len(await served.commit(item(2 * number), item(2 * number + 1))) == 2
        assert (await served.submit(item(50), client_id=NUL)).status in (200, 400)
        for query in ({"partition": NUL}, {"partition": "a", "epoch": NUL}, {"partition": "a", "since": NUL}):
            assert (await served.get("/v1/events", params=query)).status in (200, 400, 409)
        assert len(await served.commit(item(51))) == 1


@pytest.mark.rule("CO-33")
async def test_nul_character_over_websocket_is_refused_or_stored(database: str, tmp_path: Path) -> None:
    async with serving(tmp_path, store=database) as served:
        for payload in ({"client_id": NUL}, {"client_id": "c", "token": NUL}):
            await (await served.socket()).request("connect", payload)
        client = await served.connected()
        for number, odd in enumerate(items_with_nul(), 1):
            await client.send("submit_events", {"events": [odd]}, msg_id=NUL)
            assert (await client.receive())["type"] in ("submit_events_result", "error")
            (result,) = await client.submit(item(number))
            assert result["status"] == "committed", odd
        for sync in ({"partitions": [NUL]}, {"partitions": ["a"], "epoch": NUL}):
            await client.send("sync", {"since_committed_id": 0, **sync})
            assert (await client.receive())["type"] in ("sync_response", "error")
        (result,) = await client.submit(item(50))
        assert result["status"] == "committed"


@pytest.mark.rule("CO-33")
async def test_large_values_commit_together_with_small_ones(database: str) -> None:
    text = "ä" * (LARGE // 2)
    items: list[Item] = [
        oncelog.event(UUID(int=1), {"type": "large", "text": text}, ["a"]),
        ledger(operations=(SetEntity("k", b'"' + text.encode() + b'"'),)),
        delta(columns=(("n", b"1" * ROW_BYTES_MAX),)),
    ]
    beyond = delta(delta_id=bytes(31) + b"2", row_id="s", columns=(("n", b"1" * (ROW_BYTES_MAX + 1)),))
    async with open_log(database) as log:
        small = [event(number) for number in range(2, 12)]
        *verdicts, refused = await asyncio.gather(*[log.submit(one) for one in (*items, *small, beyond)])
        assert all(isinstance(verdict, Committed) for verdict in verdicts), verdicts
        assert isinstance(refused, Refused)
        assert refused.reason is Reason.ROW_TOO_LARGE
        records = [record async for record in _all(log)]
        assert len(records[0].body) > LARGE
        assert json.loads(records[0].body)["text"] == text
        assert sorted(await positions(database)) == list(range(1, 12))


async def _all(log: Log) -> Any:
    after: Any = 0
    while True:
        page = await log.read(after=after)
        for record in page.records:
            yield record
        if not page.has_more:
            return
        after = page.cursor


@pytest.mark.rule("CO-33")
async def test_large_value_over_http_is_refused_or_stored(database: str, tmp_path: Path) -> None:
    large = {**item(1), "event": {"type": "large", "text": "x" * LARGE}}
    body = json.dumps({"events": [large]}).encode()

    async def submit_large(served: Serving) -> Answer:
        headers = {"Content-Type": "application/json"}
        return await served.request("POST", "/v1/events", data=BytesIO(body), headers=headers)

    async with serving(tmp_path, store=database) as served:
        answers = await asyncio.gather(submit_large(served), served.commit(item(2), item(3)), return_exceptions=True)
        refused, others = answers
        # If there is no answer, the server has closed the connection before reading the whole body.
        if isinstance(refused, Answer):
            assert refused.status == 413
        else:
            assert isinstance(refused, aiohttp.ClientError)
        assert others == [1, 2]
    async with serving(tmp_path, store=database, frame_bytes_max=2 * LARGE) as served:
        answer, more = await asyncio.gather(submit_large(served), served.commit(item(4), item(5)))
        assert answer.json["results"][0]["status"] == "committed"
        assert len(more) == 2
        first = (await served.page("a", since=0)).json
        assert first["has_more"]  # A page ends when it becomes too large.
        rest = (await served.page("a", since=first["next_since_committed_id"])).json
        assert not rest["has_more"]
        assert numbers([*first["events"], *rest["events"]]) == [1, 2, 3, 4, 5]

"""Writes that the store rejects are refused permanently and individually on every wire."""

import asyncio
from pathlib import Path

import pytest
from msgspec.structs import replace

from core.item_builders import assert_committed, assert_refused, assert_replayed
from databases import BOTH_STORES, log_at
from oncelog.core.values import Mode, Rate, Reason, Submission
from oncelog.engine.log import open_log
from oncelog.errors import StoreUnavailableError
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.writes import event
from server.deltas.delta_servers import Gateway, change
from server.ledger.ledger_servers import key, run_server
from server.ledger.ledger_transports import WIRES, CallError
from server.rejecting_store import MARK, reject_marked_bodies
from server.running_server import item, serving


def unstorable_item(number: int) -> Submission:
    return event(number, MARK)


@BOTH_STORES
@pytest.mark.rule("CO-34", "CO-33")
async def test_only_the_write_that_the_store_rejects_is_refused(tmp_path: Path) -> None:
    place = log_at(tmp_path / "log.db")
    await reject_marked_bodies(place)
    async with open_log(place) as log:
        writes = [unstorable_item(number) if number == 5 else event(number) for number in range(1, 9)]
        verdicts = await asyncio.gather(*map(log.submit, writes))
        for write, verdict in zip(writes, verdicts, strict=True):
            if write.key == unstorable_item(5).key:
                assert "retrying does not help" in assert_refused(verdict, Reason.UNSTORABLE).message
            else:
                assert_committed(verdict)
        assert_refused(await log.submit(unstorable_item(5)), Reason.UNSTORABLE)
        assert len((await log.read()).records) == 7
        assert_committed(await log.submit(event(5)))


@BOTH_STORES
@pytest.mark.rule("CO-34", "CO-33")
async def test_item_that_the_store_rejects_is_refused_according_to_the_request_mode(tmp_path: Path) -> None:
    place = log_at(tmp_path / "log.db")
    await reject_marked_bodies(place)
    async with open_log(place) as log:
        each = await log.submit_many([event(1), unstorable_item(2), event(3), unstorable_item(4), event(5)])
        assert [type(one).__name__ for one in each] == ["Committed", "Refused", "Committed", "Refused", "Committed"]
        until = await log.submit_many(
            [event(11), event(12), unstorable_item(13), event(14), event(15)], Mode.UNTIL_REFUSED
        )
        assert [type(one).__name__ for one in until[:2]] == ["Committed"] * 2
        assert_refused(until[2], Reason.UNSTORABLE)
        assert {assert_refused(one, Reason.NOT_PROCESSED).index for one in until[3:]} == {2}
        together = await log.submit_many([event(21), unstorable_item(22)], Mode.ALL)
        for one in together:
            assert_refused(one, Reason.UNSTORABLE)
        assert len((await log.read()).records) == 5


@BOTH_STORES
@pytest.mark.rule("CO-34", "EV-8")
async def test_split_request_that_exceeds_a_limit_is_retryable_and_its_retry_succeeds_as_a_whole(
    tmp_path: Path,
) -> None:
    place, clock = log_at(tmp_path / "log.db"), ManualClock()
    await reject_marked_bodies(place)
    rate = Rate(per_second=1, burst=3)
    writes = [replace(one, actor="user:ann", rate=rate) for one in (event(1), event(2), unstorable_item(3), event(4))]
    async with open_log(place, clock=clock) as log:
        with pytest.raises(StoreUnavailableError, match=r"a limit was reached .*; submit it again"):
            await log.submit_many(writes, is_admitted_whole=True)
        assert len((await log.read()).records) == 2, "the second half exceeds the rate"
        for one in await log.submit_many(writes[:2], is_admitted_whole=True):
            assert_replayed(one)
        late = await log.submit_many(writes[2:], is_admitted_whole=True)
        assert_refused(late[0], Reason.NOT_PROCESSED)
        assert_refused(late[1], Reason.RATE_LIMITED)
        clock.advance(2000)
        first, second, third, fourth = await log.submit_many(writes, is_admitted_whole=True)
        assert [assert_replayed(one).receipt is not None for one in (first, second)] == [True, True]
        assert_refused(third, Reason.UNSTORABLE)
        assert_committed(fourth)


@BOTH_STORES
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.rule("CO-34")
async def test_ledger_write_that_the_store_rejects_is_an_invalid_argument(tmp_path: Path, wire: str) -> None:
    await reject_marked_bodies(log_at(tmp_path / "events.db"))
    async with run_server(tmp_path, wire) as server:
        ledger = server.ledger(client_id="app")
        with pytest.raises(CallError) as caught:
            await ledger.write(1, {"set_entity": {"key": MARK, "value": b"1"}}, key=key(1))
        assert caught.value.status == "INVALID_ARGUMENT"
        assert caught.value.retry_after_ms is None
        assert "retrying does not help" in caught.value.message
        # No sequence is consumed, and the key remains free.
        answer = await ledger.write(1, {"set_entity": {"key": "a", "value": b"1"}}, key=key(1))
        assert answer["assigned_sequence"] == 1


@BOTH_STORES
@pytest.mark.rule("CO-34")
async def test_event_that_the_store_rejects_is_rejected_over_http_and_websocket(tmp_path: Path) -> None:
    await reject_marked_bodies(log_at(tmp_path / "events.db"))
    async with serving(tmp_path) as served:
        marked = {**item(2), "event": {"type": MARK}}
        answer = await served.submit(item(1), marked, item(3))
        assert [one["status"] for one in answer.json["results"]] == ["committed", "rejected", "committed"]
        assert answer.json["results"][1]["reason"] == "validation_failed"
        client = await served.connected()
        (result,) = await client.submit(marked)
        assert (result["status"], result["reason"]) == ("rejected", "validation_failed")
        (result,) = await client.submit(item(4))
        assert result["status"] == "committed"


@BOTH_STORES
@pytest.mark.rule("CO-34", "DE-6")
async def test_rejected_push_of_several_deltas_blames_no_particular_delta(tmp_path: Path) -> None:
    await reject_marked_bodies(log_at(tmp_path / "events.db"))
    async with serving(tmp_path) as served:
        gateway = Gateway(served.session, served.url, "shop")
        good, unstorable_item = change(1, name="tea"), change(2, name=MARK)
        answer = await gateway.push(good, unstorable_item)
        assert (answer.status, answer.json["code"]) == (413, "TOO_LARGE")
        assert "index" not in answer.json
        assert "the store cannot hold one of these 2 deltas; nothing was written" in answer.json["error"]
        answer = await gateway.push(unstorable_item)
        assert (answer.status, answer.json["code"], answer.json["index"]) == (400, "BAD_REQUEST", 0)
        assert "retrying does not help" in answer.json["error"]
        assert await gateway.push_accepted(good) == [(1, False)]

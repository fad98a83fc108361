"""One connection of the events door: what it is answered, and in which order."""

import asyncio
import random
from typing import Any
from uuid import UUID

import orjson
import pytest

from doors.talking import House, Talk, Tokens, house, item, uuid
from engine.watched import run, turns
from oncelog.core.values import Record
from oncelog.doors.events.hub import Flight
from oncelog.doors.frames import CloseCode, frame
from oncelog.doors.grants import granted
from oncelog.doors.limits import CONNECT_BYTES_MAX, LONG_FRAME_BYTES, DoorLimits
from oncelog.errors import HistoryChangedError, StoreUnavailableError
from oncelog.stores.protocol import Query


def numbers(page: dict[str, Any]) -> list[int]:
    return [event["committed_id"] for event in page["events"]]


def code_of(reply: dict[str, Any]) -> str:
    assert reply["type"] == "error", reply
    code: str = reply["payload"]["code"]
    return code


# --- connect -----------------------------------------------------------------------------------------


@pytest.mark.rule("EV-1")
def test_before_connect_only_connect_is_valid_and_the_connection_is_kept() -> None:
    async def main() -> None:
        async with house() as made:
            talk = made.come()
            for kind, payload in (("sync", {}), ("submit_events", {"events": [item(1)]}), ("hello", {})):
                assert code_of(await talk.ask(kind, payload)) == "bad_request"
            reply = await talk.connect()
            assert reply["type"] == "connected"
            assert reply["payload"] == {
                "client_id": "client-ada",
                "server_last_committed_id": 0,
                "epoch": made.log.epoch,
            }
            assert code_of(await talk.ask("connect", {"token": "ada", "client_id": "x"})) == "bad_request"
            assert talk.wire.closed_with is None
            assert (await talk.submit(item(1)))[0]["committed_id"] == 1

    run(main())


@pytest.mark.rule("EV-1", "EV-2")
@pytest.mark.parametrize(
    ("payload", "version", "code"),
    [
        ({"token": "nobody", "client_id": "x"}, "1.0", "auth_failed"),
        ({"client_id": "x"}, "1.0", "auth_failed"),
        ({"token": "ada", "client_id": "another"}, "1.0", "auth_failed"),
        ({"token": "ada", "client_id": "one"}, "2.0", "protocol_version_unsupported"),
    ],
)
def test_who_is_not_let_in_is_told_and_sent_away(payload: dict[str, str], version: str, code: str) -> None:
    async def main() -> None:
        tokens = Tokens()
        tokens.add("ada", client_id="one")
        async with house(tokens=tokens) as made:
            talk = made.come()
            assert code_of(await talk.ask("connect", payload, protocol_version=version)) == code
            assert talk.wire.closed_with == (CloseCode.POLICY, code)

    run(main())


@pytest.mark.rule("EV-2")
def test_a_reply_echoes_the_id_of_its_request_and_what_is_unknown_is_ignored() -> None:
    async def main() -> None:
        async with house() as made:
            talk = await made.talk()
            for msg_id in ("ü\n", 17, ""):
                await talk.send("submit_events", {"events": [item(1)], "more": {"x": []}}, msg_id=msg_id, extra=None)
                reply = (await talk.wire.arrived(len(talk.messages) + 1))[-1]
                assert reply["msg_id"] == msg_id
                assert reply["protocol_version"] == "1.0"
                assert reply["timestamp"] == made.log.clock.wall_ms()

    run(main())


@pytest.mark.rule("CO-21")
def test_failed_attempts_of_one_address_are_limited() -> None:
    async def main() -> None:
        async with house() as made:
            codes = []
            for _ in range(5):
                talk = made.come()
                codes.append(code_of(await talk.ask("connect", {"token": "nobody", "client_id": "x"})))
            assert codes == ["auth_failed"] * 3 + ["rate_limited"] * 2
            made.log.clock.advance(60_000)
            assert (await made.come().connect())["type"] == "connected"

    run(main())


@pytest.mark.rule("CO-23")
def test_an_expired_token_ends_the_connection_at_its_next_message_or_at_the_next_look() -> None:
    async def main() -> None:
        tokens = Tokens()
        async with house(tokens=tokens) as made:
            now_ms = made.log.clock.wall_ms()
            tokens.add("ada", expires_ms=now_ms + 1000)
            first, second = await made.talk(), await made.talk()
            made.log.clock.advance(999)
            assert (await first.submit(item(1)))[0]["status"] == "committed"
            made.log.clock.advance(1)
            assert code_of(await first.ask("submit_events", {"events": [item(1)]})) == "auth_failed"
            assert first.wire.closed_with == (CloseCode.POLICY, "auth_failed")
            assert second.session.principal is not None
            second.session.renew(tokens.current(second.session.principal, made.log.clock.wall_ms()))
            assert second.wire.closed_with == (CloseCode.POLICY, "auth_failed")

    run(main())


# --- submit ------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-3", "EV-4", "EV-5", "EV-8", "CO-20")
def test_an_event_commits_once_and_another_under_its_id_is_told_so() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            (first,) = await ada.submit(item(1, "b", "a", actor="root"))
            made.log.clock.advance(5000)
            (again,) = await bob.submit(item(1, "a", "b", "a"))
            assert (
                again
                == first
                == {
                    "id": uuid(1),
                    "status": "committed",
                    "committed_id": 1,
                    "status_updated_at": first["status_updated_at"],
                }
            )
            results = await bob.submit(item(2), {**item(1, "a", "b"), "event": {"type": "other"}}, item(3))
            assert [one["status"] for one in results] == ["committed", "rejected", "committed"]
            assert results[1]["reason"] == "validation_failed"
            assert results[1]["errors"] == [
                {"field": "id", "message": "this identity was used for a write with other content; nothing was written"}
            ]
            page = await made.log.read()
            assert [record.actor for record in page.records] == ["user:ada", "user:bob", "user:bob"]
            assert [record.client for record in page.records] == ["client-ada", "client-bob", "client-bob"]

    run(main())


@pytest.mark.rule("EV-7", "EV-9")
@pytest.mark.parametrize(
    ("events", "field"),
    [
        ([item(1), item(2), item(1)], "$.payload.events[2].id"),
        ([{**item(1), "id": uuid(1).replace("0", "A")}, {**item(1), "id": uuid(1).replace("0", "a")}],
         "$.payload.events[1].id"),
        ([item(1), {**item(2), "id": "17"}], "$.payload.events[1].id"),
        ([item(1), {**item(2), "id": 17}], "$.payload.events[1].id"),
        ([item(1), {**item(2), "id": "{00000000-0000-4000-8000-000000000002}"}], "$.payload.events[1].id"),
        ([item(1), {"id": uuid(2), "event": {"type": "t"}}], "$.payload.events[1].partitions"),
        ([item(1), {"id": uuid(2), "partitions": ["a"]}], "$.payload.events[1].event"),
        ([item(1), {**item(2), "partitions": "a"}], "$.payload.events[1].partitions"),
        ([item(1), {**item(2), "expected_committed_id": -1}], "$.payload.events[1].expected_committed_id"),
        ([item(1), {**item(2), "expected_committed_id": True}], "$.payload.events[1].expected_committed_id"),
        ([item(1), None], "$.payload.events[1]"),
        ([], "$.payload.events"),
        ("x", "$.payload.events"),
        ([item(number) for number in range(6)], "$.payload.events"),
    ],
)  # fmt: skip
def test_a_request_that_is_none_is_refused_whole_before_anything_is_done(events: Any, field: str) -> None:
    async def main() -> None:
        async with house(request_events_max=5) as made:
            talk = await made.talk()
            reply = await talk.ask("submit_events", {"events": events})
            assert code_of(reply) == "bad_request"
            assert reply["payload"]["details"] == {"field": field}
            assert reply["payload"]["message"].startswith(f"{field}: ")
            assert made.log.store.batches == []
            assert (await talk.submit(item(1)))[0]["committed_id"] == 1

    run(main())


@pytest.mark.rule("EV-8", "EV-9", "CO-2", "CO-3", "CO-33")
@pytest.mark.parametrize(
    ("bad", "field"),
    [
        (b'"partitions":[],"event":{"type":"t"}', "partitions"),
        (b'"partitions":[""],"event":{"type":"t"}', "partitions"),
        (b'"partitions":["a",7],"event":{"type":"t"}', "partitions[1]"),
        (b'"partitions":["%b"],"event":{"type":"t"}' % (b"x" * 257), "partitions"),
        (b'"partitions":["a\\u0000"],"event":{"type":"t"}', "partitions"),
        (b'"partitions":["\\ud800"],"event":{"type":"t"}', "partitions[0]"),
        (b'"partitions":["a"],"event":[]', "event"),
        (b'"partitions":["a"],"event":{}', "event.type"),
        (b'"partitions":["a"],"event":{"type":""}', "event.type"),
        (b'"partitions":["a"],"event":{"type":5}', "event.type"),
        (b'"partitions":["a"],"event":{"type":"t","n":9007199254740993}', "event.n"),
        (b'"partitions":["a"],"event":{"type":"t","n":1e400}', "event.n"),
        (b'"partitions":["a"],"event":{"type":"t","n":%b}' % (b"9" * 5000), "event.n"),
        (b'"partitions":["a"],"event":{"type":"t","n":{"x":1,"x":1}}', "event.n.x"),
        (b'"partitions":["a"],"event":{"type":"t","type":"t"}', "event.type"),
        (b'"partitions":["a"],"event":{"type":"t","n":"\\udc00"}', "event.n"),
        (b'"partitions":["a"],"event":{"type":"t","n":%b1%b}' % (b"[" * 600, b"]" * 600), None),
    ],
)
def test_one_bad_event_is_rejected_alone_with_its_field(bad: bytes, field: str | None) -> None:
    async def main() -> None:
        async with house() as made:
            talk = await made.talk()
            events = b'{"id":"%b",%b}' % (uuid(2).encode(), bad)
            await talk.raw(
                b'{"type":"submit_events","protocol_version":"1.0","msg_id":"m","payload":{"events":[%b,%b,%b]}}'
                % (orjson.dumps(item(1)), events, orjson.dumps(item(3)))
            )
            reply = await talk.reply("m")
            results = reply["payload"]["results"]
            assert [one["id"] for one in results] == [uuid(1), uuid(2), uuid(3)]
            assert [one["status"] for one in results] == ["committed", "rejected", "committed"]
            assert results[1]["reason"] == "validation_failed"
            (error,) = results[1]["errors"]
            assert error["message"]
            if field is not None:
                assert error["field"] == field

    run(main())


@pytest.mark.rule("EV-8", "CO-33")
def test_an_event_that_is_too_large_is_rejected_alone() -> None:
    async def main() -> None:
        async with house(engine={"body_bytes_max": 100}) as made:
            ada = await made.talk("ada")
            large = item(2, "a", event={"type": "t", "text": "x" * 100})
            results = await ada.submit(item(1, "a"), large, item(3, "a"))
            assert [one["status"] for one in results] == ["committed", "rejected", "committed"]
            assert results[1]["errors"] == [{"field": "event", "message": "must have at most 100 bytes"}]

    run(main())


@pytest.mark.rule("EV-9", "EV-10", "CO-22")
def test_what_may_not_be_written_is_rejected_with_the_same_words_whether_its_id_is_known_or_not() -> None:
    async def main() -> None:
        tokens = Tokens()
        tokens.add("ada")
        tokens.add("eve", granted(["*"], ["public", "eve/*"]))
        async with house(tokens=tokens) as made:
            ada, eve = await made.talk("ada"), await made.talk("eve")
            await ada.submit(item(1, "secret"), item(2, "public"))
            batches = len(made.log.store.batches)
            known, unknown, other = (
                await eve.submit(item(1, "secret")),
                await eve.submit(item(7, "secret")),
                await eve.submit({**item(1, "secret"), "event": {"type": "guess"}}),
            )
            for results in (known, unknown, other):
                del results[0]["id"]
            assert known == unknown == other
            assert known == [
                {
                    "status": "rejected",
                    "reason": "forbidden",
                    "errors": [{"field": "partitions", "message": "not all of them may be written"}],
                }
            ]
            assert len(made.log.store.batches) == batches  # nothing was looked up
            mixed = await eve.submit(item(8, "public", "secret"), item(9, "eve/1"), item(2, "public"))
            assert [one.get("reason", one["status"]) for one in mixed] == ["forbidden", "committed", "committed"]

    run(main())


@pytest.mark.rule("CO-22")
def test_one_whose_right_was_taken_away_gets_the_refusal_for_a_retry_too() -> None:
    async def main() -> None:
        tokens = Tokens()
        tokens.add("ada", granted([], ["a"]))
        async with house(tokens=tokens) as made:
            talk = await made.talk()
            assert (await talk.submit(item(1)))[0]["status"] == "committed"
            tokens.add("ada", granted([], ["b"]))
            talk.session.renew(tokens.known["ada"])
            assert (await talk.submit(item(1)))[0]["reason"] == "forbidden"

    run(main())


@pytest.mark.rule("CO-19", "CO-18")
def test_an_expectation_that_fails_is_told_the_newest_number_and_a_retry_its_answer() -> None:
    async def main() -> None:
        async with house() as made:
            talk = await made.talk()
            await talk.submit(item(1, expected_committed_id=0))
            (stale,) = await talk.submit(item(2, expected_committed_id=0))
            assert stale["status"] == "rejected"
            assert stale["errors"] == [
                {
                    "field": "expected_committed_id",
                    "message": "expected 0 as the newest, but it is 1",
                    "current_committed_id": 1,
                }
            ]
            assert (await talk.submit(item(1, expected_committed_id=0)))[0]["committed_id"] == 1

    run(main())


@pytest.mark.rule("CO-32", "EV-2")
def test_a_full_queue_is_told_as_busy_and_retries_are_still_answered() -> None:
    async def main() -> None:
        async with house(engine={"queue_items_max": 2}) as made:
            talk = await made.talk()
            await talk.submit(item(1))
            made.log.hold_commits()
            waiting = [await talk.send("submit_events", {"events": [item(number)]}) for number in (2, 3)]
            await made.log.gate.reached.wait()
            full = await talk.send("submit_events", {"events": [item(4)]})
            mixed = await talk.send("submit_events", {"events": [item(1), item(5)]})
            retry = await talk.reply(await talk.send("submit_events", {"events": [item(1)]}))
            assert retry["payload"]["results"][0]["committed_id"] == 1
            made.log.gate.open()
            for msg_id in (full, mixed):
                reply = await talk.reply(msg_id)
                assert code_of(reply) == "server_busy"
                assert reply["payload"]["details"]["retry_after_ms"] >= 10
            assert [(await talk.reply(one))["payload"]["results"][0]["committed_id"] for one in waiting] == [2, 3]
            assert talk.wire.closed_with is None
            assert [one["committed_id"] for one in await talk.submit(item(4), item(5))] == [4, 5]

    run(main())


@pytest.mark.rule("CO-30")
def test_a_connection_with_too_much_in_flight_is_told_so_and_kept() -> None:
    async def main() -> None:
        async with house(events_in_flight_max=2) as made:
            talk = await made.talk()
            made.log.hold_commits()
            first = await talk.send("submit_events", {"events": [item(1), item(2)]})
            assert code_of(await talk.ask("submit_events", {"events": [item(3)]})) == "server_busy"
            made.log.gate.open()
            assert (await talk.reply(first))["type"] == "submit_events_result"
            assert (await talk.submit(item(3)))[0]["committed_id"] == 3

    run(main())


@pytest.mark.rule("CO-30", "EV-2")
def test_a_connection_that_sends_too_many_frames_in_a_second_is_sent_away() -> None:
    async def main() -> None:
        async with house(frames_per_second_max=3) as made:
            talk = await made.talk()
            for number in (1, 2):
                assert (await talk.submit(item(number)))[0]["committed_id"] == number
            made.log.clock.advance(1000)
            for number in (1, 2, 3):
                assert (await talk.submit(item(number)))[0]["committed_id"] == number
            await talk.send("submit_events", {"events": [item(4)]})
            reply = (await talk.wire.arrived(7))[-1]
            assert code_of(reply) == "rate_limited"
            assert reply["payload"]["details"] == {"limit": 3, "retry_after_ms": 1000}
            assert talk.wire.closed_with == (CloseCode.POLICY, "rate_limited")

    run(main())


@pytest.mark.rule("CO-15", "CO-18", "EV-2")
def test_new_events_of_an_actor_are_limited_and_retries_are_not() -> None:
    async def main() -> None:
        async with house(new_events_per_second_max=2) as made:
            first, other = await made.talk("ada"), await made.talk("bob")
            await first.submit(item(1), item(2))
            assert (await first.submit(item(1)))[0]["committed_id"] == 1
            assert (await other.submit(item(3)))[0]["committed_id"] == 3
            reply = await first.ask("submit_events", {"events": [item(2), item(4)]})
            assert code_of(reply) == "rate_limited"
            assert reply["payload"]["details"] == {"retry_after_ms": 500}
            assert first.wire.closed_with == (CloseCode.POLICY, "rate_limited")
            made.log.clock.advance(500)
            again = await made.talk("ada")
            assert [one["committed_id"] for one in await again.submit(item(2), item(4))] == [2, 4]

    run(main())


@pytest.mark.rule("CO-15", "CO-30", "EV-8", "EV-9")
def test_of_a_request_beyond_the_limit_as_many_are_taken_as_may_be_and_all_of_it_is_sent_again() -> None:
    async def main() -> None:
        async with house(new_events_per_second_max=2) as made:
            reader = await made.talk("bob")
            await reader.sync()
            events = [item(number) for number in range(1, 6)]
            taken: list[int] = []
            for _ in range(2):
                ada = await made.talk("ada")
                reply = await ada.ask("submit_events", {"events": events})
                assert code_of(reply) == "rate_limited"
                assert reply["payload"]["details"] == {"retry_after_ms": 500}
                assert ada.wire.closed_with == (CloseCode.POLICY, "rate_limited")
                taken.append(made.counts.events_committed)
                made.log.clock.advance(1000)
            assert taken == [2, 4]
            ada = await made.talk("ada")
            assert [one["committed_id"] for one in await ada.submit(*events)] == [1, 2, 3, 4, 5]
            assert (made.counts.events_committed, made.counts.events_replayed) == (5, 4)
            assert not made.counts.events_rejected
            await reader.wire.arrived(7)
            assert reader.story() == ["connected", "sync_response", 1, 2, 3, 4, 5]

    run(main())


@pytest.mark.rule("CO-16", "EV-2")
def test_a_store_that_fails_is_no_success_and_no_failure() -> None:
    async def main() -> None:
        async with house() as made:
            talk = await made.talk()

            async def fail(_: object) -> None:
                raise StoreUnavailableError("the disk is away: /secret/path")

            made.log.store.before_commit = fail
            reply = await talk.ask("submit_events", {"events": [item(1)]})
            assert code_of(reply) == "server_error"
            assert "secret" not in str(reply)
            assert talk.wire.closed_with == (CloseCode.SERVER_ERROR, "server_error")

    run(main())


@pytest.mark.rule("CO-41")
def test_an_erased_event_is_answered_and_shown_as_erased() -> None:
    async def main() -> None:
        async with house() as made:
            talk = await made.talk()
            await talk.submit(item(1))
            await made.log.erase(key=uuid(1))
            (again,) = await talk.submit(item(1))
            assert (again["committed_id"], again["erased"]) == (1, True)
            (event,) = (await talk.sync())["events"]
            assert event["event"] is None
            assert event["erased"] is True

    run(main())


# --- malformed ---------------------------------------------------------------------------------------


@pytest.mark.rule("CO-33", "EV-2", "EV-9")
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"connect"',
        b"\xff\xfe",
        b'{"type":"sync"}',
        b'{"type":5,"protocol_version":"1.0","payload":{}}',
        b'{"type":"sync","protocol_version":1.0,"payload":{}}',
        b'{"type":"sync","protocol_version":"1.0","payload":[]}',
        b'{"type":"sync","type":"sync","protocol_version":"1.0","payload":{}}',
        b'{"type":"sync","protocol_version":"1.0","payload":{"a":1,"a":2},"msg_id":[]}',
        b'{"type":"sy\\u006ec","protocol_version":"1.0","payload":{"partitions":["\\ud800"],"since_committed_id":0}}',
        b'{"type":"sync","protocol_version":"1.0","payload":{"partitions":["a"],"since_committed_id":0.5}}',
        b'{"type":"sync","protocol_version":"1.0","payload":{"partitions":["a"],"since_committed_id":-1}}',
        b'{"type":"sync","protocol_version":"1.0","payload":{"partitions":[],"since_committed_id":0}}',
        b'{"type":"sync","protocol_version":"1.0","payload":{"partitions":["a"],"since_committed_id":0,"limit":"9"}}',
        b'{"type":"sync","protocol_version":"1.0","payload":{"partitions":["a"],"since_committed_id":0,"epoch":9}}',
        b'{"type":"unknown","protocol_version":"1.0","payload":{}}',
        b'{"type":"sync","protocol_version":"1.0","payload":{},"msg_id":"' + b"x" * 300 + b'"}',
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"9" * 10_000,
        b"NaN",
        b'\xef\xbb\xbf{"type":"sync"}',
        b"\x00",
    ],
)
def test_malformed_frames_get_an_error_and_cost_nothing(data: bytes) -> None:
    async def main() -> None:
        async with house() as made:
            talk = await made.talk()
            await talk.raw(data)
            assert code_of((await talk.wire.arrived(2))[-1]) == "bad_request"
            talk.session.receive_binary()
            assert code_of((await talk.wire.arrived(3))[-1]) == "bad_request"
            assert talk.wire.closed_with is None
            assert (await talk.submit(item(1)))[0]["committed_id"] == 1
            assert len(made.log.store.batches) == 1

    run(main())


# --- sync --------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-11", "EV-6")
def test_a_page_has_what_touches_any_of_the_partitions_once_and_in_order() -> None:
    async def main() -> None:
        async with house() as made:
            talk = await made.talk()
            await talk.submit(item(1, "a"), item(2, "b"), item(3, "a", "b"), item(4, "c"), item(5, "caf\u00e9"))
            page = await talk.sync("b", "a", "b")
            assert page["partitions"] == ["a", "b"]
            assert numbers(page) == [1, 2, 3]
            assert page["events"][2] == {
                "id": uuid(3),
                "client_id": "client-ada",
                "partitions": ["a", "b"],
                "committed_id": 3,
                "event": {"type": "t", "n": 3},
                "status_updated_at": page["events"][2]["status_updated_at"],
            }
            assert page["epoch"] == made.log.epoch
            assert numbers(await talk.sync("b", "a", since=2)) == [3]
            assert numbers(await talk.sync("cafe\u0301")) == [5]

    run(main())


@pytest.mark.rule("EV-11", "CO-30")
def test_limits_of_pages_are_clamped() -> None:
    async def main() -> None:
        async with house(page_events_default=2, page_events_max=3) as made:
            talk = await made.talk()
            await talk.submit(*(item(number) for number in range(1, 6)))
            for limit, count in ((None, 2), (-5, 1), (0, 1), (1, 1), (3, 3), (10**15, 3)):
                assert len((await talk.sync(limit=limit))["events"]) == count

    run(main())


@pytest.mark.rule("EV-11", "CO-22")
def test_a_partition_that_may_not_be_read_refuses_all_of_them_and_the_scope_stays() -> None:
    async def main() -> None:
        tokens = Tokens()
        tokens.add("ada")
        tokens.add("eve", granted(["public"]))
        async with house(tokens=tokens) as made:
            ada, eve = await made.talk("ada"), await made.talk("eve")
            await eve.sync("public")
            refused = [
                await eve.ask("sync", {"partitions": [name, "public"], "since_committed_id": 0}) for name in "xy"
            ]
            for reply in refused:
                assert code_of(reply) == "forbidden"
            assert refused[0]["payload"] == refused[1]["payload"]
            await ada.submit(item(1, "public"), item(2, "x"))
            assert (await eve.wire.arrived(5))[-1]["payload"]["committed_id"] == 1

    run(main())


@pytest.mark.rule("CO-40", "EV-2")
def test_a_cursor_of_another_history_is_told_and_the_scope_goes_on() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await bob.sync("a")
            for asked in ({"since_committed_id": 0, "epoch": "another"}, {"since_committed_id": 99}):
                reply = await bob.ask("sync", {"partitions": ["b"], **asked})
                assert code_of(reply) == "history_changed"
                assert reply["payload"]["details"] == {"epoch": made.log.epoch, "server_last_committed_id": 0}
            await ada.submit(item(1, "a"), item(2, "b"))
            await bob.wire.arrived(5)
            assert bob.story() == ["connected", "sync_response", "history_changed", "history_changed", 1]

    run(main())


@pytest.mark.rule("EV-12", "EV-13")
def test_a_cycle_has_one_bound_and_what_came_meanwhile_comes_after_it() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await ada.submit(*(item(number) for number in range(1, 6)))
            page = await bob.sync(limit=2)
            seen = numbers(page)
            number = 5
            while page["has_more"]:
                assert page["sync_to_committed_id"] == 5
                number += 1
                await ada.submit(item(number), item(100 + number, "other"))
                page = await bob.sync(since=page["next_since_committed_id"], limit=2)
                seen += numbers(page)
            assert seen == [1, 2, 3, 4, 5]
            assert page["next_since_committed_id"] == page["sync_to_committed_id"] == 5
            await bob.wire.arrived(6)
            assert bob.story() == ["connected", *["sync_response"] * 3, 6, 8]
            assert bob.session.is_live

    run(main())


@pytest.mark.rule("EV-12")
def test_a_cursor_moves_even_where_nothing_matched() -> None:
    async def main() -> None:
        async with house() as made:
            talk = await made.talk()
            await talk.submit(item(1), item(2))
            page = await talk.sync("empty")
            assert (page["events"], page["next_since_committed_id"], page["has_more"]) == ([], 2, False)

    run(main())


@pytest.mark.rule("EV-13")
def test_a_sync_replaces_the_scope() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await bob.sync("a")
            await ada.submit(item(1, "a"), item(2, "b"))
            await bob.sync("b", since=2)
            await ada.submit(item(3, "a"), item(4, "b"), item(5, "a", "b"))
            await bob.wire.arrived(6)
            assert bob.story() == ["connected", "sync_response", 1, "sync_response", 4, 5]

    run(main())


# --- order -------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-14", "EV-15")
def test_broadcasts_go_to_all_in_scope_but_the_connection_that_submitted() -> None:
    async def main() -> None:
        async with house() as made:
            first, second, bob = await made.talk("ada"), await made.talk("ada"), await made.talk("bob")
            for talk in (first, second, bob):
                await talk.sync("a", "b")
            await first.submit(item(1, "a", "b"))
            await first.submit(item(1, "b", "a"))
            await second.submit(item(1, "a", "b"))
            await bob.submit(item(2, "a"))
            await first.wire.arrived(5)
            assert first.story() == ["connected", "sync_response", [1], [1], 2]
            assert second.story() == ["connected", "sync_response", 1, [1], 2]
            assert bob.story() == ["connected", "sync_response", 1, [2]]
            assert bob.messages[2]["payload"] == {
                "id": uuid(1),
                "client_id": "client-ada",
                "partitions": ["a", "b"],
                "committed_id": 1,
                "event": {"type": "t", "n": 1},
                "status_updated_at": bob.messages[2]["payload"]["status_updated_at"],
            }

    run(main())


@pytest.mark.rule("EV-14")
def test_a_result_stands_between_the_broadcasts_of_lower_and_higher_numbers_of_one_group_commit() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await ada.sync("a")
            await bob.sync("a")
            made.log.hold_commits()
            for number, talk in ((1, bob), (2, ada), (3, bob), (4, ada)):
                await talk.send("submit_events", {"events": [item(number), item(10 + number)]})
            made.log.gate.open()
            await ada.wire.arrived(8)
            await bob.wire.arrived(8)
            assert ada.story()[2:] == [1, 2, [3, 4], 5, 6, [7, 8]]
            assert bob.story()[2:] == [[1, 2], 3, 4, [5, 6], 7, 8]

    run(main())


@pytest.mark.rule("EV-14", "EV-15")
def test_a_conflicting_submission_in_flight_does_not_hide_the_broadcast() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await bob.sync("a")
            made.log.hold_commits()
            await ada.send("submit_events", {"events": [item(1)]})
            await bob.send("submit_events", {"events": [{**item(1), "event": {"type": "other"}}]})
            made.log.gate.open()
            await bob.wire.arrived(4)
            assert sorted(map(str, bob.story()[2:])) == ["1", "['rejected']"]

    run(main())


@pytest.mark.rule("EV-15", "CO-13")
def test_a_commit_of_another_process_is_broadcast_and_not_overtaken() -> None:
    async def main() -> None:
        async with house(engine={"poll_ms": 600_000}) as made:
            ada = await made.talk("ada")
            await ada.sync("a")
            other = await made.talk("bob")
            (submission,) = _submissions(made, item(7))
            await made.log.commit_elsewhere(submission)
            made.log.store.before_read = made.log.gate
            made.log.gate.shut()
            await ada.send("submit_events", {"events": [item(8)]})
            retry = await other.send("submit_events", {"events": [item(7)]})
            await made.log.gate.reached.wait()
            await turns()
            # The answers are known, but number 1 has not been delivered: nobody is told of a higher one before.
            assert ada.story() == ["connected", "sync_response"]
            assert other.story() == ["connected"]
            made.log.gate.open()
            await ada.wire.arrived(4)
            assert ada.story() == ["connected", "sync_response", 1, [2]]
            assert (await other.reply(retry))["payload"]["results"][0]["committed_id"] == 1

    run(main())


def _submissions(made: House, *items: dict[str, Any]) -> list[Any]:
    from oncelog.core.writing import event  # noqa: PLC0415

    return [event(one["id"], one["event"], one["partitions"]) for one in items]


@pytest.mark.rule("EV-13", "EV-14")
def test_answers_that_would_overtake_broadcasts_wait_for_the_end_of_the_cycle() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await bob.submit(item(1), item(2), item(3))
            page = await ada.sync(limit=2)
            await bob.submit(item(4))
            await ada.send("submit_events", {"events": [item(5)]})
            await ada.send("submit_events", {"events": [item(1)]})
            await bob.submit(item(6))
            await ada.send("submit_events", {"events": [item(6)]})
            await turns()
            # A retry of an old one overtakes nothing.
            assert ada.story() == ["connected", "sync_response", [1]]
            await ada.sync(since=page["next_since_committed_id"])
            await bob.submit(item(7))
            await ada.wire.arrived(8)
            assert ada.story() == ["connected", "sync_response", [1], "sync_response", 4, [5], 6, [6], 7]

    run(main())


@pytest.mark.rule("EV-13", "EV-14")
def test_a_cycle_that_nobody_goes_on_with_does_not_keep_answers_for_ever() -> None:
    async def main() -> None:
        async with house(cycle_idle_ms=1) as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await bob.submit(item(1), item(2), item(3))
            await ada.sync(limit=1)
            await bob.submit(item(4))
            await ada.send("submit_events", {"events": [item(5)]})
            await ada.wire.arrived(6)
            assert ada.story() == ["connected", "sync_response", 2, 3, 4, [5]]
            await bob.submit(item(6))
            assert (await ada.wire.arrived(7))[-1]["payload"]["committed_id"] == 6

    run(main())


@pytest.mark.rule("EV-13", "CO-13")
def test_a_store_that_fails_during_a_sync_brings_no_broadcast_that_would_be_lost() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await ada.sync("a")
            made.log.gate.shut()

            async def held_and_refused(_: object) -> None:
                await made.log.gate()
                made.log.store.before_read = _nothing
                raise StoreUnavailableError("away")

            made.log.store.before_read = held_and_refused
            syncing = asyncio.ensure_future(ada.send("sync", {"partitions": ["b"], "since_committed_id": 0}))
            await made.log.gate.reached.wait()
            await bob.submit(item(1, "a"))
            await turns()
            assert ada.story() == ["connected", "sync_response"]
            made.log.gate.open()
            await syncing
            await ada.wire.arrived(3)
            assert ada.story()[2] == "server_error"

    run(main())


async def _nothing(_: object) -> None:
    pass


@pytest.mark.rule("EV-14")
def test_a_result_of_several_events_stands_at_the_highest_whoever_committed_the_others() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await bob.sync("a")
            made.log.hold_commits()
            await ada.send("submit_events", {"events": [item(1)]})
            await ada.send("submit_events", {"events": [item(2)]})
            await bob.send("submit_events", {"events": [item(1), item(3)]})
            made.log.gate.open()
            await bob.wire.arrived(4)
            assert bob.story() == ["connected", "sync_response", 2, [1, 3]]

    run(main())


@pytest.mark.rule("EV-14")
def test_a_place_that_was_kept_moves_to_the_highest_number() -> None:
    """Delivered before the verdict is told, as when the tailer has been reading."""

    async def main() -> None:
        async with house() as made:
            bob = await made.talk("bob")
            await bob.sync("a")
            flight = Flight(bob.session.subscriber)
            flight.waits_for = [(UUID(uuid(1)).bytes, b"1"), (UUID(uuid(3)).bytes, b"3")]
            made.hub.expect(flight)
            made.hub.deliver([_record(made, number) for number in (1, 2)])
            flight.frame, flight.number = frame(b'{"type":"answer","payload":{}}'), 3
            made.hub.answered(flight)
            await turns()
            assert bob.story() == ["connected", "sync_response"]
            made.hub.deliver([_record(made, number) for number in (3, 4)])
            await bob.wire.arrived(5)
            assert bob.story() == ["connected", "sync_response", 2, "answer", 4]
            assert made.hub._flights == {}

    run(main())


def _record(made: House, number: int) -> Record:
    (submission,) = _submissions(made, item(number))
    return Record(0, number, 0, 1, 1, "events", "", submission.key, b"%d" % number, "", "", 0, ("a",), submission.body)


@pytest.mark.rule("CO-22")
def test_a_right_that_is_taken_away_while_a_page_is_read_is_not_used() -> None:
    async def main() -> None:
        tokens = Tokens()
        tokens.add("ada")
        tokens.add("eve", granted(["a", "b"]))
        async with house(tokens=tokens) as made:
            ada, eve = await made.talk("ada"), await made.talk("eve")
            await ada.submit(item(1, "b"))
            await eve.sync("a")
            made.log.gate.shut()
            made.log.store.before_read = made.log.gate
            syncing = asyncio.ensure_future(eve.send("sync", {"partitions": ["b"], "since_committed_id": 0}))
            await made.log.gate.reached.wait()
            tokens.add("eve", granted(["a"]))
            eve.session.renew(tokens.known["eve"])
            made.log.gate.open()
            assert code_of(await eve.reply(await syncing)) == "forbidden"
            await ada.submit(item(2, "b"), item(3, "a"))
            await eve.wire.arrived(4)
            assert eve.story() == ["connected", "sync_response", "forbidden", 3]

    run(main())


@pytest.mark.rule("EV-13")
def test_a_cycle_is_not_given_up_while_its_page_is_being_read() -> None:
    async def main() -> None:
        async with house(cycle_idle_ms=1) as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await bob.submit(*(item(number) for number in range(1, 6)))
            page = await ada.sync(limit=2)
            made.log.gate.shut()
            made.log.store.before_read = made.log.gate
            asked = {"partitions": ["a"], "since_committed_id": page["next_since_committed_id"], "limit": 2}
            syncing = asyncio.ensure_future(ada.send("sync", asked))
            await made.log.gate.reached.wait()
            await ada.raw(
                orjson.dumps({"type": "submit_events", "protocol_version": "1.0", "payload": {"events": [item(6)]}})
            )
            await bob.submit(item(7))
            assert ada.session.subscriber._idle_timer is None
            made.log.gate.open()
            made.log.store.before_read = _nothing
            await syncing
            await ada.sync(since=4)
            await ada.wire.arrived(6)
            assert ada.story()[:4] == ["connected", "sync_response", "sync_response", "sync_response"]
            assert ada.story()[4:] == [[6], 7]

    run(main())


@pytest.mark.rule("EV-13", "EV-14")
def test_a_cycle_that_is_begun_anew_and_then_left_has_neither_gap_nor_overtaking() -> None:
    async def main() -> None:
        async with house(cycle_idle_ms=1) as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await bob.submit(*(item(number) for number in range(1, 6)))
            made.door.limits = DoorLimits(cycle_idle_ms=10**7)
            await ada.sync(limit=2)
            await ada.send("submit_events", {"events": [item(6)]})
            await bob.submit(item(7), item(8))
            made.door.limits = DoorLimits(cycle_idle_ms=1)
            await ada.sync(limit=2)
            await ada.send("submit_events", {"events": [item(9)]})
            await ada.wire.arrived(10)
            assert ada.story() == ["connected", "sync_response", "sync_response", 3, 4, 5, [6], 7, 8, [9]]

    run(main())


@pytest.mark.rule("CO-16")
def test_a_catch_up_that_fails_in_whatever_way_ends_the_connection() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await bob.submit(item(1), item(2))
            page = await ada.sync(limit=1)
            await bob.submit(item(3))

            async def broken(query: Query) -> None:
                if query.after == 2:
                    raise ZeroDivisionError

            made.log.store.before_read = broken
            await ada.sync(since=page["next_since_committed_id"])
            while ada.wire.closed_with is None:
                await turns(1)
            assert ada.wire.closed_with == (CloseCode.SERVER_ERROR, "server_error")

    run(main())


@pytest.mark.rule("CO-33")
def test_one_reader_that_cannot_be_written_to_does_not_silence_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        async with house() as made:
            ada, bad, bob = await made.talk("ada"), await made.talk("cyd"), await made.talk("bob")
            for talk in (bad, bob):
                await talk.sync()

            def broken(_: bytes) -> None:
                raise ZeroDivisionError

            monkeypatch.setattr(bad.wire, "write", broken)
            await ada.submit(item(1))
            await ada.submit(item(2))
            await bob.wire.arrived(4)
            assert bob.story()[2:] == [1, 2]

    run(main())


@pytest.mark.rule("CO-30")
def test_before_connect_long_frames_are_not_read_and_after_it_they_hold_nobody_up() -> None:
    async def main() -> None:
        async with house() as made:
            talk = made.come()
            await talk.raw(b"[" * (CONNECT_BYTES_MAX + 1))
            assert code_of((await talk.wire.arrived(1))[0]) == "bad_request"
            await talk.connect()
            long = item(1)
            long["event"]["text"] = "x" * LONG_FRAME_BYTES
            assert (await talk.submit(long))[0]["committed_id"] == 1
            assert code_of(await talk.ask("submit_events", {"events": [long, long]})) == "bad_request"
            assert code_of(await talk.ask("nothing", long)) == "bad_request"

    run(main())


@pytest.mark.rule("CO-31")
def test_a_wire_that_says_it_has_room_and_has_none_is_not_asked_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def main() -> None:
        async with house() as made:
            ada, slow = await made.talk("ada"), await made.talk("cyd")
            await slow.sync()
            asked = 0

            async def at_once() -> None:
                nonlocal asked
                asked += 1

            monkeypatch.setattr(slow.wire, "drained", at_once)
            slow.wire.is_stuck = True
            await ada.submit(item(1))
            await turns(200)
            assert 1 <= asked <= 3
            slow.wire.unstick()
            assert (await slow.wire.arrived(3))[-1]["payload"]["committed_id"] == 1

    run(main())


def test_nothing_is_kept_for_a_connection_that_has_been_sent_away() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await bob.sync()
            bob.session.finish(CloseCode.GOING_AWAY, "")
            await ada.submit(item(1))
            await turns()
            assert bob.session.outbox.frames == []
            assert made.hub._live == {}

    run(main())


class Crowd:
    """Sessions that submit, sync, page, stop reading and read again, by chance."""

    def __init__(self, made: House, talks: list[Talk], seed: int) -> None:
        self.made = made
        self.talks = talks
        self.chance = random.Random(seed)
        self.cursors = [0] * len(talks)
        self.begun = [False] * len(talks)
        self.ids = 0

    async def act(self) -> None:
        chance, index = self.chance, self.chance.randrange(len(self.talks))
        talk = self.talks[index]
        match chance.randrange(6):
            case 0 | 1 | 2:
                first = self.ids + 1
                self.ids += chance.randint(1, 3)
                numbers = [*range(first, self.ids + 1)]
                if first > 1 and chance.random() < 0.4:  # a retry, or what another one sends too, among new ones
                    numbers.insert(chance.randrange(len(numbers) + 1), chance.randrange(max(1, first - 6), first))
                await talk.send("submit_events", {"events": [item(one, "ab"[one % 2]) for one in numbers]})
            case 3 if not talk.wire.is_stuck and self.is_paging(index):
                await self.page(index, chance.randint(1, 3))
            case 4:
                talk.wire.is_stuck = not talk.wire.is_stuck
                if not talk.wire.is_stuck:
                    talk.wire.unstick()
            case _:
                await turns(chance.randrange(6))

    async def end(self) -> None:
        """Everybody reads, and reads to the end; then one more event shows that all are up to date."""
        for index, talk in enumerate(self.talks):
            talk.wire.unstick()
            while self.is_paging(index):
                await self.page(index, 2)
        (last,) = await self.talks[0].submit(item(10**6, "a"))
        for talk in self.talks[1:]:
            while talk.story()[-1] != last["committed_id"]:
                await turns(1)

    def is_paging(self, index: int) -> bool:
        return not self.begun[index] or self.talks[index].session.subscriber.is_paging

    async def page(self, index: int, limit: int) -> None:
        page = await self.talks[index].sync("a", since=self.cursors[index], limit=limit)
        self.cursors[index], self.begun[index] = page["next_since_committed_id"], True


@pytest.mark.rule("EV-12", "EV-13", "EV-14", "CO-13")
@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_every_reader_gets_everything_once_and_in_order(seed: int) -> None:
    async def main() -> None:
        async with house(engine={"poll_ms": 600_000}, outbox_frames_max=10**6) as made:
            talks = [await made.talk(name) for name in ("ada", "ada", "bob", "cyd")]
            crowd = Crowd(made, talks, seed)
            for _ in range(60):
                await crowd.act()
            await crowd.end()
            everything = {record.position for record in (await made.log.read(partition="a", limit=1000)).records}
            for talk in talks:
                check(talk, everything)

    run(main())


def _retried(talk: Talk) -> set[int]:
    """Numbers that were told more than once, or that others may have committed: those can be broadcast too."""
    return {
        one["committed_id"]
        for message in talk.messages
        if message["type"] == "submit_events_result" and len(message["payload"]["results"]) > 1
        for one in message["payload"]["results"]
    }


def check(talk: Talk, everything: set[int]) -> None:
    """One cycle of pages, then live: all of the partition once, its own events by their answers, and in order."""
    paged: list[int] = []
    live: list[int] = []
    own: set[int] = set()
    newest = 0
    for message in talk.messages:
        payload = message["payload"]
        match message["type"]:
            case "sync_response":
                assert not live
                paged += numbers(payload)
            case "event_broadcast":
                assert payload["committed_id"] > newest, talk.story()
                newest = payload["committed_id"]
                live.append(newest)
            case "submit_events_result":
                told = [one["committed_id"] for one in payload["results"]]
                own.update(told)
                if live:
                    newest = max(newest, *told)  # what comes now must have a higher number
    assert paged == sorted(set(paged))
    assert not set(live) & set(paged)
    assert not set(live) & (own - _retried(talk))
    assert set(paged) | set(live) | (own & everything) == everything, talk.story()


# --- slow readers ------------------------------------------------------------------------------------


@pytest.mark.rule("CO-31", "CO-30")
def test_a_slow_reader_is_warned_then_closed_and_others_are_not_held_up(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with house(outbox_frames_max=10) as made:
            ada, slow, bob = await made.talk("ada"), await made.talk("cyd"), await made.talk("bob")
            await slow.sync()
            await bob.sync()
            slow.wire.is_stuck = True
            for number in range(1, 7):
                await ada.submit(item(number))
            assert made.counts.slow_readers_warned == 1
            assert made.counts.slow_readers_closed == 0
            for number in range(7, 12):
                await ada.submit(item(number))
            assert slow.wire.is_aborted
            assert made.counts.slow_readers_closed == 1
            slow.session.closed()
            await bob.wire.arrived(13)
            assert bob.story()[2:] == list(range(1, 12))
            again = await made.talk("cyd")
            assert numbers(await again.sync(since=0)) == list(range(1, 12))
            assert "a reader is slow" in caplog.text
            assert "a slow reader is closed" in caplog.text

    run(main())


@pytest.mark.rule("CO-31")
def test_a_reader_that_catches_its_breath_gets_all_of_it_in_one_write() -> None:
    async def main() -> None:
        async with house(outbox_frames_max=10) as made:
            ada, slow = await made.talk("ada"), await made.talk("cyd")
            await slow.sync()
            slow.wire.is_stuck = True
            for number in range(1, 8):
                await ada.submit(item(number))
            writes = slow.wire.writes
            slow.wire.unstick()
            await slow.wire.arrived(9)
            assert slow.story()[2:] == list(range(1, 8))
            assert slow.wire.writes == writes + 1
            assert slow.wire.closed_with is None

    run(main())


@pytest.mark.rule("CO-16")
def test_nobody_waits_for_ever_for_a_log_that_cannot_be_read() -> None:
    async def main() -> None:
        async with house(engine={"poll_ms": 600_000}) as made:
            idle, live = await made.talk("ada"), await made.talk("bob")
            await live.sync("a")

            async def changed(_: object) -> None:
                raise HistoryChangedError("another file", "e", 0)

            made.log.store.before_read = changed
            await made.log.commit_elsewhere(*_submissions(made, item(7)))
            await idle.send("submit_events", {"events": [item(8)]})
            while idle.wire.closed_with is None or live.wire.closed_with is None:
                await turns(1)
            assert idle.wire.closed_with == live.wire.closed_with == (CloseCode.SERVER_ERROR, "server_error")
            assert made.hub._flights == {}
            made.log.store.before_read = _nothing
            made.hub.start(await made.log.listen(made.hub))
            back = await made.talk("cyd")
            assert (await back.submit(item(8)))[0]["committed_id"] == 2
            assert (await back.submit(item(9)))[0]["committed_id"] == 3

    run(main())


def test_a_session_that_is_gone_leaves_nothing_behind() -> None:
    async def main() -> None:
        async with house() as made:
            ada, bob = await made.talk("ada"), await made.talk("bob")
            await ada.sync("a", "b")
            made.log.hold_commits()
            await ada.send("submit_events", {"events": [item(1)]})
            ada.session.closed()
            made.log.gate.open()
            await bob.sync("a")
            while made.hub.position < 1:
                await turns(1)
            await turns()
            assert made.hub._flights == {}
            assert set(made.hub._live) == {"a"}
            assert ada.session.outbox.frames == []

    run(main())

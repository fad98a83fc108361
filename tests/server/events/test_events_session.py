"""Sessions of the Events API: connect, submit and malformed messages."""

from typing import Any

import orjson
import pytest
from aiohttp import WSCloseCode

from oncelog.errors import StoreUnavailableError
from oncelog.server.auth.principal import parse_grants
from server.events.event_requests import NO_WRITE_ACCESS
from server.events.event_sessions import Tokens, code_of, item, session_server, uuid

# --- connect -----------------------------------------------------------------------------------------


@pytest.mark.rule("EV-1")
async def test_messages_before_connect_are_refused_and_keep_the_connection_open() -> None:
    async with session_server() as server:
        peer = server.accept()
        for kind, payload in (("sync", {}), ("submit_events", {"events": [item(1)]}), ("hello", {})):
            assert code_of(await peer.request(kind, payload)) == "bad_request"
        reply = await peer.connect()
        assert reply["type"] == "connected"
        assert reply["payload"] == {
            "client_id": "user:ada/client-ada",
            "actor": "user:ada",
            "server_last_committed_id": 0,
            "epoch": server.log.epoch,
        }
        assert code_of(await peer.request("connect", {"token": "ada", "client_id": "x"})) == "bad_request"
        assert peer.wire.closed_with is None
        assert (await peer.submit(item(1)))[0]["committed_id"] == 1


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
async def test_refused_connect_is_answered_and_closes_the_connection(
    payload: dict[str, str], version: str, code: str
) -> None:
    tokens = Tokens()
    tokens.add("ada", client_id="one")
    async with session_server(tokens=tokens) as server:
        peer = server.accept()
        assert code_of(await peer.request("connect", payload, protocol_version=version)) == code
        assert peer.wire.closed_with == (WSCloseCode.POLICY_VIOLATION, code)


@pytest.mark.rule("EV-1")
@pytest.mark.parametrize(("own", "stored"), [("one", "one"), (None, "user:ada")])
async def test_connect_without_a_client_id_uses_the_client_of_the_credential(own: str | None, stored: str) -> None:
    tokens = Tokens()
    tokens.add("ada", client_id=own)
    async with session_server(tokens=tokens) as server:
        reply = await server.accept().request("connect", {"token": "ada"})
        assert reply["payload"]["client_id"] == stored


@pytest.mark.rule("EV-2")
async def test_reply_echoes_the_message_id_and_unknown_members_are_ignored() -> None:
    async with session_server() as server:
        peer = await server.connect()
        for msg_id in ("ü\n", 17, ""):
            await peer.send("submit_events", {"events": [item(1)], "more": {"x": []}}, msg_id=msg_id, extra=None)
            reply = (await peer.wire.wait_for_messages(len(peer.messages) + 1))[-1]
            assert reply["msg_id"] == msg_id
            assert reply["protocol_version"] == "1.0"
            assert reply["timestamp"] == server.log.clock.wall_ms()


@pytest.mark.rule("CO-21")
async def test_failed_connects_per_address_are_rate_limited() -> None:
    async with session_server() as server:
        codes = []
        for _ in range(5):
            peer = server.accept()
            codes.append(code_of(await peer.request("connect", {"token": "nobody", "client_id": "x"})))
        assert codes == ["auth_failed"] * 3 + ["rate_limited"] * 2
        server.log.clock.advance(60_000)
        assert (await server.accept().connect())["type"] == "connected"


@pytest.mark.rule("CO-23")
async def test_expired_token_closes_the_connection_at_the_next_message_or_renewal() -> None:
    tokens = Tokens()
    async with session_server(tokens=tokens) as server:
        now_ms = server.log.clock.wall_ms()
        tokens.add("ada", expires_ms=now_ms + 1000)
        first, second = await server.connect(), await server.connect()
        server.log.clock.advance(999)
        assert (await first.submit(item(1)))[0]["status"] == "committed"
        server.log.clock.advance(1)
        assert code_of(await first.request("submit_events", {"events": [item(1)]})) == "auth_failed"
        assert first.wire.closed_with == (WSCloseCode.POLICY_VIOLATION, "auth_failed")
        assert second.session.principal is not None
        second.session.renew(tokens.refresh_principal(second.session.principal, server.log.clock.wall_ms()))
        assert second.wire.closed_with == (WSCloseCode.POLICY_VIOLATION, "auth_failed")


# --- submit ------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-3", "EV-4", "EV-5", "EV-8", "CO-20")
async def test_event_commits_once_and_different_content_under_its_id_is_rejected() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        (first,) = await ada.submit(item(1, "b", "a", actor="root"))
        server.log.clock.advance(5000)
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
            {
                "field": "id",
                "message": "this identity was used for a write with different content; nothing was written; "
                "use a new id for a new write",
            }
        ]
        page = await server.log.read()
        assert [record.actor for record in page.records] == ["user:ada", "user:bob", "user:bob"]
        assert [record.client for record in page.records] == ["user:ada/client-ada", *["user:bob/client-bob"] * 2]


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
async def test_malformed_submit_is_refused_as_a_whole_before_any_commit(events: Any, field: str) -> None:
    async with session_server(request_events_max=5) as server:
        peer = await server.connect()
        reply = await peer.request("submit_events", {"events": events})
        assert code_of(reply) == "bad_request"
        assert reply["payload"]["details"] == {"field": field}
        assert reply["payload"]["message"].startswith(f"{field}: ")
        assert server.log.store.batches == []
        assert (await peer.submit(item(1)))[0]["committed_id"] == 1


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
async def test_only_the_invalid_event_is_rejected_with_its_field(bad: bytes, field: str | None) -> None:
    async with session_server() as server:
        peer = await server.connect()
        events = b'{"id":"%b",%b}' % (uuid(2).encode(), bad)
        await peer.send_raw(
            b'{"type":"submit_events","protocol_version":"1.0","msg_id":"m","payload":{"events":[%b,%b,%b]}}'
            % (orjson.dumps(item(1)), events, orjson.dumps(item(3)))
        )
        reply = await peer.reply("m")
        results = reply["payload"]["results"]
        assert [one["id"] for one in results] == [uuid(1), uuid(2), uuid(3)]
        assert [one["status"] for one in results] == ["committed", "rejected", "committed"]
        assert results[1]["reason"] == "validation_failed"
        (error,) = results[1]["errors"]
        assert error["message"]
        if field is not None:
            assert error["field"] == field


@pytest.mark.rule("EV-8", "CO-33")
async def test_only_the_oversized_event_is_rejected() -> None:
    async with session_server(engine={"body_bytes_max": 100}) as server:
        ada = await server.connect("ada")
        large = item(2, "a", event={"type": "t", "text": "x" * 100})
        results = await ada.submit(item(1, "a"), large, item(3, "a"))
        assert [one["status"] for one in results] == ["committed", "rejected", "committed"]
        assert results[1]["errors"] == [{"field": "event", "message": "must have at most 100 bytes"}]


@pytest.mark.rule("EV-9", "EV-10", "CO-22")
async def test_forbidden_write_is_rejected_in_the_same_way_for_known_and_unknown_ids() -> None:
    tokens = Tokens()
    tokens.add("ada")
    tokens.add("eve", parse_grants(["*"], ["public", "eve/*"]))
    async with session_server(tokens=tokens) as server:
        ada, eve = await server.connect("ada"), await server.connect("eve")
        await ada.submit(item(1, "secret"), item(2, "public"))
        batches = len(server.log.store.batches)
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
                "errors": [
                    {
                        "field": "partitions",
                        "message": NO_WRITE_ACCESS,
                    }
                ],
            }
        ]
        assert len(server.log.store.batches) == batches  # No event was looked up.
        mixed = await eve.submit(item(8, "public", "secret"), item(9, "eve/1"), item(2, "public"))
        assert [one.get("reason", one["status"]) for one in mixed] == ["forbidden", "committed", "committed"]


@pytest.mark.rule("CO-22")
async def test_retry_after_a_grant_was_removed_is_forbidden() -> None:
    tokens = Tokens()
    tokens.add("ada", parse_grants([], ["a"]))
    async with session_server(tokens=tokens) as server:
        peer = await server.connect()
        assert (await peer.submit(item(1)))[0]["status"] == "committed"
        tokens.add("ada", parse_grants([], ["b"]))
        peer.session.renew(tokens.known["ada"])
        assert (await peer.submit(item(1)))[0]["reason"] == "forbidden"


@pytest.mark.rule("CO-19", "CO-18")
async def test_failed_expectation_reports_the_newest_id_and_a_retry_gets_its_original_result() -> None:
    async with session_server() as server:
        peer = await server.connect()
        await peer.submit(item(1, expected_committed_id=0))
        (stale,) = await peer.submit(item(2, expected_committed_id=0))
        assert stale["status"] == "rejected"
        assert stale["errors"] == [
            {
                "field": "expected_committed_id",
                "message": "the newest position is 1, not 0",
                "current_committed_id": 1,
            }
        ]
        assert (await peer.submit(item(1, expected_committed_id=0)))[0]["committed_id"] == 1


@pytest.mark.rule("CO-32", "EV-2")
async def test_full_queue_refuses_new_events_and_still_answers_retries() -> None:
    async with session_server(engine={"queue_items_max": 2}) as server:
        peer = await server.connect()
        await peer.submit(item(1))
        server.log.hold_commits()
        waiting = [await peer.send("submit_events", {"events": [item(number)]}) for number in (2, 3)]
        await server.log.gate.reached.wait()
        full = await peer.send("submit_events", {"events": [item(4)]})
        mixed = await peer.send("submit_events", {"events": [item(1), item(5)]})
        retry = await peer.send("submit_events", {"events": [item(1)]})
        server.log.gate.open()
        assert (await peer.reply(retry))["payload"]["results"][0]["committed_id"] == 1
        for msg_id in (full, mixed):
            reply = await peer.reply(msg_id)
            assert code_of(reply) == "server_busy"
            assert reply["payload"]["details"]["retry_after_ms"] >= 10
        assert [(await peer.reply(one))["payload"]["results"][0]["committed_id"] for one in waiting] == [2, 3]
        assert peer.wire.closed_with is None
        assert [one["committed_id"] for one in await peer.submit(item(4), item(5))] == [4, 5]


@pytest.mark.rule("CO-30")
async def test_too_many_events_in_flight_are_refused_and_keep_the_connection_open() -> None:
    async with session_server(events_in_flight_max=2) as server:
        peer = await server.connect()
        server.log.hold_commits()
        await peer.send("submit_events", {"events": [item(1), item(2)]})
        busy = await peer.send("submit_events", {"events": [item(3)]})
        server.log.gate.open()
        assert code_of(await peer.reply(busy)) == "server_busy"
        assert peer.received() == ["connected", [1, 2], "server_busy"]
        assert (await peer.submit(item(3)))[0]["committed_id"] == 3


@pytest.mark.rule("CO-30", "EV-2")
async def test_exceeding_the_frame_rate_closes_the_connection() -> None:
    async with session_server(frames_per_second_max=3) as server:
        peer = await server.connect()
        for number in (1, 2):
            assert (await peer.submit(item(number)))[0]["committed_id"] == number
        server.log.clock.advance(1000)
        for number in (1, 2, 3):
            assert (await peer.submit(item(number)))[0]["committed_id"] == number
        reply = await peer.request("submit_events", {"events": [item(4)]})
        assert code_of(reply) == "rate_limited"
        assert reply["payload"]["details"] == {"limit": 3, "retry_after_ms": 1000}
        assert peer.wire.closed_with == (WSCloseCode.POLICY_VIOLATION, "rate_limited")


@pytest.mark.rule("CO-15", "CO-18", "EV-2")
async def test_new_events_per_actor_are_rate_limited_but_retries_are_not() -> None:
    async with session_server(new_events_per_second_max=2) as server:
        first, other = await server.connect("ada"), await server.connect("bob")
        await first.submit(item(1), item(2))
        assert (await first.submit(item(1)))[0]["committed_id"] == 1
        assert (await other.submit(item(3)))[0]["committed_id"] == 3
        reply = await first.request("submit_events", {"events": [item(2), item(4)]})
        assert code_of(reply) == "server_busy"
        assert reply["payload"]["details"] == {"retry_after_ms": 500}
        server.log.clock.advance(500)
        assert [one["committed_id"] for one in await first.submit(item(2), item(4))] == [2, 4]
        assert first.wire.closed_with is None


@pytest.mark.rule("CO-15", "CO-30", "EV-8", "EV-9")
async def test_request_above_the_rate_limit_commits_nothing_and_is_resent_as_a_whole() -> None:
    async with session_server(new_events_per_second_max=5) as server:
        ada, reader = await server.connect("ada"), await server.connect("bob")
        await reader.sync()
        await ada.submit(item(100))
        events = [item(number) for number in range(1, 11)]
        busy = await ada.send("submit_events", {"events": events})
        reply = await ada.reply(busy)
        assert code_of(reply) == "server_busy"
        assert reply["payload"]["details"] == {"retry_after_ms": 200}
        assert server.counts.events_committed == 1
        server.log.clock.advance(200)
        # This request exceeds the burst of 5. The full bucket admits it, and must refill before the next event.
        assert [one["committed_id"] for one in await ada.submit(*events)] == list(range(2, 12))
        late = await ada.request("submit_events", {"events": [item(101)]})
        assert late["payload"]["details"] == {"retry_after_ms": 1200}
        assert not server.counts.events_rejected
        await reader.wire.wait_for_messages(13)
        assert reader.received() == ["connected", "sync_response", *range(1, 12)]
        assert ada.wire.closed_with is None


@pytest.mark.rule("CO-16", "EV-2")
async def test_store_failure_during_commit_closes_the_connection_with_server_error() -> None:
    async with session_server() as server:
        peer = await server.connect()

        async def fail(_: object) -> None:
            raise StoreUnavailableError("the disk is unavailable: /secret/path")

        server.log.store.before_commit = fail
        reply = await peer.request("submit_events", {"events": [item(1)]})
        assert code_of(reply) == "server_error"
        assert "secret" not in str(reply)
        assert peer.wire.closed_with == (WSCloseCode.INTERNAL_ERROR, "server_error")


@pytest.mark.rule("CO-41")
async def test_erased_event_is_answered_and_paged_as_erased() -> None:
    async with session_server() as server:
        peer = await server.connect()
        await peer.submit(item(1))
        await server.log.erase(key=uuid(1))
        (again,) = await peer.submit(item(1))
        assert (again["committed_id"], again["erased"]) == (1, True)
        (event,) = (await peer.sync())["events"]
        assert event["event"] is None
        assert event["erased"] is True


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
async def test_malformed_frame_gets_an_error_and_commits_nothing(data: bytes) -> None:
    async with session_server() as server:
        peer = await server.connect()
        await peer.send_raw(data)
        assert code_of((await peer.wire.wait_for_messages(2))[-1]) == "bad_request"
        peer.session.receive_binary()
        assert code_of((await peer.wire.wait_for_messages(3))[-1]) == "bad_request"
        assert peer.wire.closed_with is None
        assert (await peer.submit(item(1)))[0]["committed_id"] == 1
        assert len(server.log.store.batches) == 1

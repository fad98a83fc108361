"""The Insieme (camel-case) dialect of the Events API, and how its events appear in the native dialect."""

import asyncio
from typing import Any
from uuid import UUID

import orjson
import pytest
from aiohttp import WSCloseCode

from deadlines import turns, until
from oncelog.core.values import Submission
from oncelog.errors import CanonicalError
from oncelog.server.auth.principal import parse_grants
from oncelog.server.events.projects import EVENT_ID_CHARACTERS_MAX, parse_project
from server.events import insieme_sessions as camel
from server.events.event_sessions import Peer, Tokens, code_of, item, session_server, uuid
from server.events.insieme_sessions import PROJECT, CamelPeer, draft
from server.malformed_frames import VALUES

pytestmark = pytest.mark.rule("EV-18")


def ids(events: list[dict[str, Any]]) -> list[str]:
    return [event["id"] for event in events]


MISSING_VERSION = (
    'is missing: every frame needs "protocol_version" (the native dialect) or "protocolVersion" (the dialect of the '
    "npm package insieme), like the first frame of the connection"
)


@pytest.mark.rule("EV-2", "EV-18")
@pytest.mark.parametrize("version", [{}, {"version": "1.0"}])
async def test_frame_of_neither_dialect_gets_an_error_that_lists_both(version: dict[str, str]) -> None:
    async with session_server() as server:
        ada = server.accept()
        await ada.send_raw(orjson.dumps({"type": "connect", "msg_id": "1", "payload": {"client_id": "a"}, **version}))
        reply = await ada.reply("1")
        assert reply["payload"] == {
            "code": "bad_request",
            "message": f"$.protocol_version: {MISSING_VERSION}",
            "details": {"field": "$.protocol_version"},
        }
        assert (await ada.connect())["type"] == "connected"


# --- connect -----------------------------------------------------------------------------------------


async def test_first_frame_selects_the_dialect_of_a_connection() -> None:
    async with session_server() as server:
        ada = camel.accept(server)
        await ada.send_raw(b"no JSON")  # the frame identifies no dialect, so the answer is in the native one
        assert (await ada.wire.wait_for_messages(1))[0]["protocol_version"] == "1.0"
        assert code_of(await ada.request("sync", {})) == "bad_request"
        reply = await ada.connect()
        assert reply["type"] == "connected"
        assert reply["payload"] == {
            "clientId": "user:ada/client-ada",
            "projectId": PROJECT,
            "projectLastCommittedId": 0,
            "actor": "user:ada",
        }
        assert (reply["protocolVersion"], reply["timestamp"]) == ("1.0", server.log.clock.wall_ms())
        assert set(reply) == {"type", "protocolVersion", "msgId", "timestamp", "payload"}
        assert code_of(await ada.request("connect", {})) == "bad_request"
        await ada.send_raw(orjson.dumps({"type": "sync", "protocol_version": "1.0", "payload": {}}))
        assert (await ada.wire.wait_for_messages(5))[-1]["payload"] == {
            "code": "bad_request",
            "message": f"$.protocolVersion: {MISSING_VERSION}",
            "details": {"field": "$.protocolVersion"},
        }
        assert (await ada.submit(draft("e1")))[0]["committedId"] == 1

        bob = await server.connect("bob")
        await bob.send_raw(orjson.dumps({"type": "sync", "protocolVersion": "1.0", "payload": {}, "msg_id": "x"}))
        assert code_of(await bob.reply("x")) == "bad_request"
        assert ada.wire.closed_with is bob.wire.closed_with is None


async def test_unsupported_version_or_bad_token_closes_the_connection() -> None:
    tokens = Tokens()
    tokens.add("ada", client_id="client-ada")
    async with session_server(tokens=tokens) as server:
        for version, token, client, code in (
            ("2.0", "ada", "client-ada", "protocolVersion_unsupported"),
            ("1.0", "nobody", "client-ada", "auth_failed"),
            ("1.0", "ada", "another", "auth_failed"),
        ):
            peer = camel.accept(server)
            payload = {"token": token, "clientId": client, "projectId": PROJECT}
            assert code_of(await peer.request("connect", payload, protocolVersion=version)) == code
            assert peer.wire.closed_with == (WSCloseCode.POLICY_VIOLATION, code)


@pytest.mark.parametrize("project", [None, "", 7, "x" * 300, "a\0b", "e\u0301", "\ud800"])
async def test_project_id_must_be_a_valid_partition_name(project: Any) -> None:
    async with session_server() as server:
        peer = camel.accept(server)
        data = {"token": "ada", "clientId": "c", "projectId": "@"}
        message = {"type": "connect", "protocolVersion": "1.0", "msgId": "1", "payload": data}
        name = b'"\\ud800"' if project == "\ud800" else orjson.dumps(project)
        await peer.send_raw(orjson.dumps(message).replace(b'"@"', name))
        assert code_of(await peer.reply("1")) == "bad_request"
        assert (await peer.connect())["type"] == "connected"


async def test_message_id_must_be_a_string() -> None:
    async with session_server() as server:
        peer = await camel.connected(server)
        await peer.send("sync", {"projectId": PROJECT, "sinceCommittedId": 0}, msgId=17)
        assert code_of((await peer.wire.wait_for_messages(2))[-1]) == "bad_request"
        assert "msgId" not in peer.messages[-1]


# --- submit ------------------------------------------------------------------------------------------


async def test_event_commits_once_per_project_regardless_of_the_client() -> None:
    async with session_server() as server:
        ada, bob = await camel.connected(server, "ada"), await camel.connected(server, "bob")
        other = await camel.connected(server, "cyd", "p2")
        (first,) = await ada.submit(draft("e1"))
        assert first == {
            "id": "e1",
            "status": "committed",
            "committedId": 1,
            "serverTs": server.log.clock.wall_ms(),
        }
        server.log.clock.advance(5000)
        assert await bob.submit(draft("e1", payload={"n": 1.0})) == [first]
        assert (await other.submit(draft("e1", projectId="p2")))[0]["committedId"] == 2
        for changed in (
            {"payload": {"n": 2}},
            {"type": "x"},
            {"schemaVersion": 2},
            {"partition": "b"},
            {"userId": "u"},
            {"meta": {"clientTs": 1}},
            {"meta": {"clientTs": 1_700_000_000_001, "more": 1}},
        ):
            (refused,) = await bob.submit(draft("e1", **changed))
            assert (refused["status"], refused["reason"]) == ("rejected", "validation_failed")
            assert refused["created"] == server.log.clock.wall_ms()
            assert refused["errors"][0]["field"] == "id"
        assert len((await ada.sync())["events"]) == 1


async def test_event_id_is_case_sensitive_and_scoped_to_its_project() -> None:
    async with session_server() as server:
        ada, bob = await camel.connected(server, "ada"), await camel.connected(server, "bob", "p2")
        lower, upper = "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10", "0198F3C2-7D55-7C1E-9A61-2F6F0C1B5A10"
        assert (await ada.submit(draft(lower)))[0]["committedId"] == 1
        assert (await bob.submit(draft(lower, projectId="p2")))[0]["committedId"] == 2
        assert (await ada.submit(draft(upper)))[0]["committedId"] == 3
        assert ids((await ada.sync())["events"]) == [lower, upper]


@pytest.mark.parametrize(
    ("changed", "reason", "field"),
    [
        ({"type": ""}, "validation_failed", "type"),
        ({"type": None}, "validation_failed", "type"),
        ({"schemaVersion": 0}, "validation_failed", "schemaVersion"),
        ({"schemaVersion": 1.5}, "validation_failed", "schemaVersion"),
        ({"schemaVersion": 1e21}, "validation_failed", "schemaVersion"),
        ({"schemaVersion": True}, "validation_failed", "schemaVersion"),
        ({"payload": []}, "validation_failed", "payload"),
        ({"payload": {"n": 2**60}}, "validation_failed", "payload.n"),
        ({"partition": ""}, "validation_failed", "partition"),
        ({"partition": "x" * 257}, "validation_failed", "partition"),
        ({"partition": "e\u0301"}, "validation_failed", "partition"),
        ({"partition": "a\0"}, "validation_failed", "partition"),
        ({"userId": ""}, "validation_failed", "userId"),
        ({"userId": None}, "validation_failed", "userId"),
        ({"projectId": "p2"}, "forbidden", "projectId"),
        ({"projectId": None}, "validation_failed", "projectId"),
        ({"partition": "project/p2"}, "forbidden", "partition"),
        ({"meta": {}}, "validation_failed", "meta.clientTs"),
        ({"meta": {"clientTs": "1"}}, "validation_failed", "meta.clientTs"),
        ({"meta": {"clientTs": 1, "clientId": "client-bob"}}, "forbidden", "meta.clientId"),
    ],
)
async def test_rejected_item_stops_the_rest_of_its_request(changed: dict[str, Any], reason: str, field: str) -> None:
    async with session_server() as server:
        ada = await camel.connected(server)
        results = await ada.submit(draft("e1"), draft("e2", **changed), draft("e3"), draft("e4"))
        assert results[0]["committedId"] == 1
        assert (results[1]["status"], results[1]["reason"]) == ("rejected", reason)
        assert results[1]["errors"][0]["field"] == field
        blocked = {
            "status": "not_processed",
            "reason": "prior_item_failed",
            "blockedById": "e2",
            "created": server.log.clock.wall_ms(),
        }
        assert results[2:] == [{"id": "e3", **blocked}, {"id": "e4", **blocked}]
        assert ids((await ada.sync())["events"]) == ["e1"]
        assert server.counts.events_rejected == {reason: 1, "prior_item_failed": 2}
        assert ada.wire.closed_with is None


async def test_first_refusal_by_the_log_or_the_api_stops_the_request() -> None:
    async with session_server(engine={"body_bytes_max": 400}) as server:
        ada = await camel.connected(server)
        await ada.submit(draft("e1"))
        statuses = ["rejected", "not_processed", "not_processed"]
        results = await ada.submit(draft("e1", 2), draft("e2", type=""), draft("e3"))
        assert [one["status"] for one in results] == statuses
        assert {one.get("blockedById", "e1") for one in results} == {"e1"}
        # Only the event that is too large is refused.
        results = await ada.submit(draft("e1"), draft("e4", payload={"text": "x" * 400}), draft("e5"))
        assert [one["status"] for one in results] == ["committed", *statuses[:2]]
        assert results[1]["errors"] == [{"field": "payload", "message": "must have at most 400 bytes"}]
        (alone,) = await ada.submit(draft("e1", type=""))
        assert alone["status"] == "rejected"
        assert ids((await ada.sync())["events"]) == ["e1"]


async def test_unauthorized_submit_is_refused_without_reading_the_log() -> None:
    tokens = Tokens()
    tokens.add("ada")
    tokens.add("bob", parse_grants(["project/p1"], ["project/p1", "board"]))
    tokens.add("cyd", parse_grants(["project/p1"], ["board", "project/p1/*"]))
    tokens.add("eve", parse_grants(["project/p2"], ["board"]))
    tokens.add("fay", parse_grants([], ["project/p1", "bo*"]))
    async with session_server(tokens=tokens) as server:
        ada, bob, cyd = [await camel.connected(server, name) for name in ("ada", "bob", "cyd")]
        await ada.submit(draft("known"))
        assert (await bob.submit(draft("known")))[0]["committedId"] == 1
        batches = len(server.log.store.batches)
        for peer, partition in ((bob, "other"), (cyd, "board")):
            for event_id in ("known", "unknown"):
                (result,) = await peer.submit(draft(event_id, partition=partition))
                assert (result["status"], result["reason"]) == ("rejected", "forbidden")
                assert result["errors"][0]["field"] == "partition"
        assert len(server.log.store.batches) == batches
        eve, fay = camel.accept(server, "eve"), await camel.connected(server, "fay")
        assert code_of(await eve.connect()) == "forbidden"
        assert (await eve.connect("p2"))["type"] == "connected"
        sync = {"projectId": PROJECT, "sinceCommittedId": 0}
        assert code_of(await eve.request("sync", sync)) == "forbidden"
        assert code_of(await fay.request("sync", sync)) == "forbidden"
        assert (await fay.submit(draft("e2")))[0]["committedId"] == 2
        assert all(one.wire.closed_with is None for one in server.peers)


async def test_malformed_request_is_refused_as_a_whole() -> None:
    async with session_server(request_events_max=2) as server:
        ada = await camel.connected(server)
        good = draft("e1")
        for events in (
            None,
            [],
            ["x"],
            [good, {**good, "id": 5}],
            [good, good],
            [good, draft("e2"), draft("e3")],
        ):
            assert code_of(await ada.request("submit_events", {"events": events})) == "bad_request"
        assert code_of(await ada.request("submit", {})) == "bad_request"
        longest = "é" * EVENT_ID_CHARACTERS_MAX
        assert (await ada.submit(draft(longest)))[0] | {"serverTs": 0} == {
            "id": longest,
            "status": "committed",
            "committedId": 1,
            "serverTs": 0,
        }
        assert ids((await ada.sync())["events"]) == [longest]


@pytest.mark.parametrize("bad_id", ["", "x" * 300, "a\0b", "\ud800", "é\udfff" + "x" * 300])
async def test_unusable_id_rejects_only_its_item(bad_id: str) -> None:
    async with session_server() as server:
        ada = await camel.connected(server)
        first, wrong, behind = await ada.submit(draft("e1"), draft(bad_id), draft("e3"))
        assert (first["id"], first["committedId"]) == ("e1", 1)
        assert (wrong["id"], wrong["status"], wrong["reason"]) == (bad_id, "rejected", "validation_failed")
        assert [error["field"] for error in wrong["errors"]] == ["id"]
        assert (behind["status"], behind["reason"]) == ("not_processed", "prior_item_failed")
        assert behind["blockedById"] == bad_id
        assert (await ada.submit(draft("e3")))[0]["committedId"] == 2
        twice = [draft(bad_id, meta={"clientTs": 1})] * 2
        assert code_of(await ada.request("submit_events", {"events": twice})) == "bad_request"
        assert ada.wire.closed_with is None


async def test_busy_server_answers_server_error_which_the_client_retries() -> None:
    async with session_server() as server:
        ada = await camel.connected(server)
        server.service.auth_gate.is_closing = True
        reply = await ada.request("submit_events", {"events": [draft("e1", meta={"clientTs": 1})]})
        assert code_of(reply) == "server_error"
        assert reply["payload"]["details"] == {"retryAfterMs": 1000}
        assert ada.wire.closed_with == (WSCloseCode.INTERNAL_ERROR, "server_error")


@pytest.mark.rule("CO-15", "CO-30")
async def test_rate_limit_of_an_actor_spans_both_dialects_and_all_projects() -> None:
    async with session_server(new_events_per_second_max=2) as server:
        ada, plain = await camel.connected(server), await server.connect("ada")
        (first,) = await ada.submit(draft("e1"))
        assert (await plain.submit(item(1)))[0]["committed_id"] == 2
        assert await ada.submit(draft("e1")) == [first]
        reply = await ada.request("submit_events", {"events": [draft("e2", meta={"clientTs": 1})]})
        assert code_of(reply) == "server_error"
        assert reply["payload"]["details"] == {"retryAfterMs": 500}
        assert ada.wire.closed_with == (WSCloseCode.INTERNAL_ERROR, "server_error")
        assert code_of(await plain.request("submit_events", {"events": [item(2)]})) == "server_busy"
        server.log.clock.advance(500)
        again = await camel.connected(server)
        assert (await again.submit(draft("e2")))[0]["committedId"] == 3


# --- sync and broadcast ------------------------------------------------------------------------------


async def test_pages_and_broadcasts_return_an_event_as_submitted() -> None:
    async with session_server() as server:
        ada, bob = await camel.connected(server, "ada"), await camel.connected(server, "bob")
        assert await bob.sync() == {
            "projectId": PROJECT,
            "events": [],
            "nextSinceCommittedId": 0,
            "hasMore": False,
            "syncToCommittedId": 0,
        }
        sent = draft('é "1"/2', partition="boards/7 %", userId="u1", payload={"b": [1e21, None], "a": "\u2028"})
        await ada.submit(sent, draft("e2"))
        expected = {
            **sent,
            "committedId": 1,
            "serverTs": server.log.clock.wall_ms(),
            "meta": {**sent["meta"], "clientId": "user:ada/client-ada"},
            "actor": "user:ada",
        }
        broadcast = (await bob.wire.wait_for_messages(4))[2]
        assert (broadcast["type"], "msgId" in broadcast) == ("event_broadcast", False)
        assert broadcast["payload"] == expected
        page = await bob.sync(limit=1)
        assert page["events"] == [expected]
        assert (page["nextSinceCommittedId"], page["hasMore"], page["syncToCommittedId"]) == (1, True, 2)
        page = await bob.sync(since=1)
        assert (ids(page["events"]), page["hasMore"], page["nextSinceCommittedId"]) == (["e2"], False, 2)
        assert "userId" not in page["events"][0]


async def test_result_is_ordered_among_the_broadcasts() -> None:
    async with session_server() as server:
        ada, bob = await camel.connected(server, "ada"), await camel.connected(server, "bob")
        plain = await server.connect("cyd")
        for peer in (ada, bob):
            await peer.sync()
        await plain.sync("project/p1")
        first = await ada.send("submit_events", {"events": [draft("a1", meta={"clientTs": 1})]})
        second = await bob.send("submit_events", {"events": [draft("b1", meta={"clientTs": 1})]})
        third = await ada.send("submit_events", {"events": [draft("a2", meta={"clientTs": 1})]})
        for peer, msg_id in ((ada, first), (bob, second), (ada, third)):
            await peer.reply(msg_id)
        for wire in (ada.wire, bob.wire, plain.wire):
            await wire.wait_for_messages(5)
        assert ada.received()[2:] == [[1], 2, [3]]
        assert bob.received()[2:] == [1, [2], 3]
        assert plain.received()[2:] == [1, 2, 3]
        # A retry on another connection of the same client is not broadcast.
        again = await camel.connected(server, "ada")
        assert (await again.submit(draft("a1", meta={"clientTs": 1})))[0]["committedId"] == 1
        await turns()
        assert bob.received()[2:] == [1, [2], 3]


async def test_events_committed_during_paging_follow_the_pages_once() -> None:
    async with session_server() as server:
        ada, bob = await camel.connected(server, "ada"), await camel.connected(server, "bob")
        await ada.submit(*(draft(f"e{number}") for number in range(3)))
        assert (await bob.sync(limit=2))["hasMore"] is True
        await ada.submit(draft("e3"))
        await turns()
        assert bob.received() == ["connected", "sync_response"]
        assert (await bob.sync(since=2, limit=2))["syncToCommittedId"] == 3
        await bob.wire.wait_for_messages(4)
        await ada.submit(draft("e4"))
        await bob.wire.wait_for_messages(5)
        assert bob.received() == ["connected", "sync_response", "sync_response", 4, 5]


async def test_cursor_of_another_history_is_refused_and_the_connection_stays_open() -> None:
    async with session_server() as server:
        ada = await camel.connected(server)
        reply = await ada.request("sync", {"projectId": PROJECT, "sinceCommittedId": 99})
        assert code_of(reply) == "history_changed"
        assert reply["payload"]["details"] == {"epoch": server.log.epoch, "serverLastCommittedId": 0}
        for payload in ({}, {"projectId": PROJECT}, {"projectId": PROJECT, "sinceCommittedId": -1}):
            assert code_of(await ada.request("sync", payload)) == "bad_request"
        assert code_of(await ada.request("sync", {"projectId": "p2", "sinceCommittedId": 0})) == "forbidden"
        assert (await ada.sync())["events"] == []


# --- the other dialect -------------------------------------------------------------------------------


async def test_native_readers_see_both_partitions_and_a_stable_uuid() -> None:
    async with session_server() as server:
        ada, bob = await camel.connected(server, "ada"), await server.connect("bob")
        other = await camel.connected(server, "cyd", "p2")
        await bob.sync("board")
        await ada.submit(draft(uuid(7), userId="u"), draft("e2"))
        await other.submit(draft("e2", projectId="p2"))
        seen = [message["payload"] for message in (await bob.wire.wait_for_messages(5))[2:]]
        assert seen[0] == {
            "id": uuid(7),
            "client_id": "user:ada/client-ada",
            "actor": "user:ada",
            "partitions": ["board", "project/p1"],
            "committed_id": 1,
            "status_updated_at": server.log.clock.wall_ms(),
            "event": {
                "type": "card.added",
                "schemaVersion": 1,
                "payload": {"n": 1},
                "userId": "u",
                "meta": {"clientId": "user:ada/client-ada", "clientTs": 1_700_000_000_001},
            },
        }
        made_ids = [UUID(one["id"]) for one in seen[1:]]
        assert made_ids[0] != made_ids[1]
        assert [(one.version, one.variant) for one in made_ids] == [(8, "specified in RFC 4122")] * 2
        assert (await bob.sync("project/p1"))["events"] == seen[:2]


async def test_native_events_with_the_required_members_are_shown() -> None:
    async with session_server() as server:
        ada, bob = await camel.connected(server, "ada"), await server.connect("bob")
        await ada.sync()
        whole = {
            "type": "t",
            "schemaVersion": 2,
            "payload": {},
            "userId": "u",
            "meta": {"clientId": "x", "clientTs": 5, "z": 1},
        }
        lacking: list[dict[str, Any]] = [
            {"type": "t"},
            {**whole, "schemaVersion": 0},
            {**whole, "schemaVersion": "1"},
            {**whole, "payload": []},
            {**whole, "meta": None},
            {**whole, "userId": 5},
        ]
        for number, event in enumerate(lacking, 1):
            await bob.submit(item(number, "project/p1", event=event))
        shown: list[tuple[list[str], dict[str, Any], str]] = [
            (["project/p1"], whole, "project/p1"),
            (["project/p1", "orders", "zebras"], {**whole, "userId": ""}, "orders"),
            (["a", "project/p1", "project/p2"], {**whole, "more": 1}, "a"),
            (["project/p1", "project/p2"], {**whole, "userId": None, "meta": {"z": 1}}, "project/p2"),
        ]
        for number, (partitions, event, _) in enumerate(shown, 11):
            await bob.submit(item(number, *partitions, event=event))
        await bob.submit(item(20, "project/p10", event=whole), item(21, "project/p1/board", event=whole))
        events = (await ada.sync())["events"]
        assert events == [message["payload"] for message in (await ada.wire.wait_for_messages(6))[2:6]]
        assert [(one["committedId"], one["id"]) for one in events] == [(n, uuid(n + 4)) for n in range(7, 11)]
        assert [one["partition"] for one in events] == [one[2] for one in shown]
        assert [one.get("userId") for one in events] == ["u", None, "u", None]
        assert events[0]["meta"] == {"clientId": "user:bob/client-bob", "clientTs": 5, "z": 1}
        assert events[3]["meta"] == {"z": 1, "clientId": "user:bob/client-bob", "clientTs": events[3]["serverTs"]}
        page = await ada.sync(limit=3)
        assert (page["events"], page["nextSinceCommittedId"], page["hasMore"]) == ([], 3, True)
        await server.log.erase(key=UUID(uuid(11)))
        assert ids((await ada.sync())["events"]) == ids(events[1:])


async def test_same_uuid_in_both_dialects_has_two_separate_submitters() -> None:
    """The same UUID in a project and in the log denotes two events, each with its own submitter."""
    async with session_server() as server:
        ada, bob = await camel.connected(server, "ada"), await server.connect("bob")
        await ada.sync()
        await bob.sync("project/p1")
        sent = draft(uuid(1), meta={"clientTs": 1})
        event = {name: sent[name] for name in ("type", "schemaVersion", "payload", "meta")}
        first = await ada.send("submit_events", {"events": [sent]})
        second = await bob.send("submit_events", {"events": [item(1, "project/p1", "board", event=event)]})
        await asyncio.gather(ada.reply(first), bob.reply(second))
        for peer in (ada, bob):
            await peer.wire.wait_for_messages(4)
        assert ada.received()[2:] == [[1], 2]
        assert bob.received()[2:] == [1, [2]]


async def test_application_validation_failure_stops_the_request() -> None:
    def validate(submission: Submission) -> str | None:
        return "no" if b"bad" in submission.body else None

    async with session_server(engine={"validate": validate}) as server:
        ada = await camel.connected(server)
        results = await ada.submit(draft("e1"), draft("e2", payload={"x": "bad"}), draft("e3"))
        assert [one["status"] for one in results] == ["committed", "rejected", "not_processed"]
        assert results[1]["errors"] == [{"field": "payload", "message": "no"}]


async def test_both_dialects_deliver_the_same_order() -> None:
    async with session_server() as server:
        peers = [await camel.connected(server, name) for name in ("ada", "bob")]
        plain = await server.connect("cyd")
        for peer in peers:
            await peer.sync()
        await plain.sync("project/p1")
        whole = {"type": "t", "schemaVersion": 1, "payload": {}, "meta": {"clientId": "c", "clientTs": 1}}
        await asyncio.gather(
            *(_submit_all(peer, 40) for peer in peers),
            *(plain.submit(item(1000 + number, "project/p1", event=whole)) for number in range(40)),
        )
        readers: list[Peer] = [*peers, plain]
        await until(lambda: all(len(_numbers(reader.received())) == 120 for reader in readers))
        for reader in readers:
            assert _numbers(reader.received()) == list(range(1, 121))


async def _submit_all(peer: CamelPeer, count: int) -> None:
    await asyncio.gather(*(peer.submit(draft(f"{peer.name}-{number}")) for number in range(count)))


def _numbers(received: list[Any]) -> list[int]:
    """Return the committed ids of broadcasts and own results in order of arrival."""
    found: list[int] = []
    for one in received:
        found += [one] if isinstance(one, int) else one if isinstance(one, list) else []
    return found


@pytest.mark.rule("CO-33")
async def test_every_invalid_value_is_answered_and_committed_events_are_readable() -> None:
    async with session_server() as server:
        ada = await camel.connected(server)
        plain = await server.connect("bob")
        meta = {"clientId": ada.client_id, "clientTs": 1, "more": 1}
        submit = {"events": [draft("@", userId="u", meta=meta), draft("#", meta=meta)]}
        sync = {"projectId": PROJECT, "sinceCommittedId": 0, "limit": 1}
        answered = 1
        codes = set()
        for kind, payload in (("submit_events", submit), ("sync", sync)):
            whole = orjson.dumps({"type": kind, "protocolVersion": "1.0", "msgId": "m", "payload": payload})
            for number, text in enumerate(_replace_each_value(whole.decode())):
                await ada.send_raw(text.replace("@", f"a{number}").replace("#", f"b{number}").encode())
                answered += 1
                reply = (await ada.wire.wait_for_messages(answered))[-1]
                if reply["type"] == "error":
                    codes.add(code_of(reply))
                if ada.wire.closed_with is not None:  # unsupported protocol version
                    ada = await camel.connected(server)
                    answered = 1
        assert codes == {"bad_request", "forbidden", "protocolVersion_unsupported"}
        assert len((await ada.sync(limit=1000))["events"]) == len((await plain.sync("project/p1"))["events"])


def _replace_each_value(text: str) -> list[str]:
    """Return the message with each of its values replaced by each of `VALUES`."""
    ends = ",}]"
    spots = [index + 1 for index, character in enumerate(text) if character == ":"]
    found = []
    for at in spots:
        end = min(index for index in range(at, len(text)) if text[index] in ends)
        found += [text[:at] + value + text[end:] for value in VALUES]
    return found


# --- names -------------------------------------------------------------------------------------------


def test_project_scopes_and_event_keys_do_not_collide() -> None:
    assert parse_project("p1").partition == parse_project("p1").scope == "project/p1"
    assert (parse_project("a/b").partition, parse_project("a/b").scope) == ("project/a/b", "project/a%2Fb")
    assert parse_project("a%2Fb").scope == "project/a%252Fb"
    assert parse_project("a").get_partitions("b/c %") == ("b/c %", "project/a")
    assert parse_project("a").get_partitions("project/a") == ("project/a",)
    assert parse_project("a").get_partitions("z") == ("project/a", "z")
    project = parse_project("a")
    for event_id in ("x", "b/c", "%", " ", "ü", "00000000", str(UUID(int=5)), str(UUID(int=2**127)).upper()):
        scope, key = project.to_scope_and_key(event_id)
        assert len(key) == 16
        assert project.to_event_id(scope, key) == event_id
        assert parse_project("a/b").to_scope_and_key(event_id) != (scope, key)
    assert project.to_scope_and_key(str(UUID(int=5))) == ("project/a", UUID(int=5).bytes)
    for bad in ("", "x" * 249, "/" * 83, "e\u0301", "\0"):
        with pytest.raises(CanonicalError):
            parse_project(bad)
    assert parse_project("x" * 248).partition == "project/" + "x" * 248

"""Limits of the Chat API (rates, a full queue, slow readers, connections), shutdown, and expiry of message ids."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp import WSMsgType

from databases import BOTH_STORES
from deadlines import WAIT_S, soon, until
from oncelog import error_codes
from oncelog.errors import SettingsError, StoreUnavailableError
from oncelog.server import websocket
from oncelog.server.chat import codec
from oncelog.server.errors import ApiError
from oncelog.server.limits import ApiLimits
from oncelog.testing.clock import ManualClock
from server.chat.chat_servers import ChatServer, message_uuid, run_server, sequences
from server.running_server import api_key

pytestmark = BOTH_STORES

SHUTDOWN_MS = 600_000
"""Longer than any wait in a test. A shutdown that runs until this deadline therefore fails the test."""


# --- rates ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("CH-11", "CO-15", "CO-30")
async def test_user_rate_limit_applies_only_to_new_messages(tmp_path: Path) -> None:
    clock = ManualClock()
    async with run_server(tmp_path, clock=clock, user_messages_per_second_max=3) as server:
        await server.create("c", "ann", "bob")
        await server.create("d", "ann")
        ann, bob = await server.connect("ann"), await server.connect("bob")
        for number in (1, 2, 3):
            await ann.send_committed("c", number)
        error = await ann.send("c", 4)
        assert (error["type"], error["code"], error["client_message_id"]) == (
            "error",
            "RATE_LIMITED",
            message_uuid(4),
        )
        assert 0 < error["retry_after_ms"] <= 334
        assert [await ann.send_committed("c", number) for number in (1, 2, 3)] == [1, 2, 3]
        assert await bob.send_committed("c", 10) == 4  # the limit is per user
        assert await ann.send_committed("d", 4) == 1  # and per chat
        refused = await server.http(
            "POST", "/v1/chats/c/messages", "ann", {"client_message_id": message_uuid(5), "content": "x"}
        )
        assert (refused.status, refused.json["error"]["code"]) == (429, "RATE_LIMITED")
        assert "Retry-After" in refused.headers
        clock.advance(error["retry_after_ms"])
        assert await ann.send_committed("c", 4) == 5


@pytest.mark.rule("CH-11", "CO-15")
async def test_chat_rate_limit_applies_to_all_users_together(tmp_path: Path) -> None:
    clock = ManualClock()
    async with run_server(tmp_path, clock=clock, chat_messages_per_second_max=4) as server:
        await server.create("c", "ann", "bob")
        await server.create("d", "bob")
        ann, bob = await server.connect("ann"), await server.connect("bob")
        for number in (1, 2, 3):
            await ann.send_committed("c", number)
        assert await bob.send_committed("c", 4) == 4
        for device in (ann, bob):
            error = await device.send("c", 5)
            assert (error["code"], error["retry_after_ms"]) == ("RATE_LIMITED", 250)
        assert await bob.send_committed("c", 4) == 4
        assert await bob.send_committed("d", 5) == 1
        clock.advance(250)
        assert await bob.send_committed("c", 5) == 5


@pytest.mark.rule("CH-11")
async def test_rate_limits_apply_across_servers(tmp_path: Path) -> None:
    clock = ManualClock()
    limits = {"user_messages_per_second_max": 2, "chat_messages_per_second_max": 3}
    async with run_server(tmp_path, clock=clock, **limits) as one, run_server(tmp_path, clock=clock, **limits) as two:
        await one.create("c", "ann", "bob")
        here, there, bob = await one.connect("ann"), await two.connect("ann"), await two.connect("bob")
        await here.send_committed("c", 1)
        await there.send_committed("c", 2)
        for device in (here, there):
            assert (await device.send("c", 3))["code"] == "RATE_LIMITED"
        assert await bob.send_committed("c", 3) == 3
        assert (await bob.send("c", 4))["code"] == "RATE_LIMITED"


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("name", ["user_messages_per_second_max", "chat_messages_per_second_max"])
def test_rate_limit_above_the_maximum_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"{name} must be a whole number from 0 to 1000000"):
        ApiLimits(**{name: 1_000_001})


# --- full queue ----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-32", "CO-15", "CH-4")
async def test_full_queue_refuses_new_messages_and_answers_retries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path, queue_items_max=3) as server:
        await server.create("c", "ann", "bob")
        ann, bob = await server.connect("ann"), await server.connect("bob")
        await ann.send_committed("c", 1)
        gate = server.served.hold_commits(monkeypatch)
        for number in (2, 3, 5, 4, 1):
            said = {"client_message_id": message_uuid(number), "chat_id": "c", "content": "hello"}
            await ann.send_frame("send_message", request_id=str(number), **said)
        await bob.send_frame(
            "send_message", request_id="stranger", client_message_id=message_uuid(1), chat_id="no", content="hello"
        )
        for device in (ann, bob):
            await device.request("ping")  # the server has read the frames before this one
        gate.open()
        answers = {number: await ann.wait_for_frame(request_id=number) for number in ("2", "3", "5", "4", "1")}
        assert [answers[number]["type"] for number in ("2", "3", "5")] == ["send_message_ack"] * 3
        assert answers["4"]["code"] == "BUSY"
        assert answers["4"]["retry_after_ms"] > 0
        assert (answers["1"]["sequence"], answers["1"]["duplicate"]) == (1, True)
        assert (await bob.wait_for_frame(request_id="stranger"))["code"] == "NOT_A_MEMBER"


@pytest.mark.rule("CO-30")
async def test_messages_in_flight_are_limited_per_connection(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path, events_in_flight_max=2) as server:
        await server.create("c", "ann")
        ann = await server.connect("ann")
        gate = server.served.hold_commits(monkeypatch)
        for number in (1, 2):
            await ann.send_frame("send_message", client_message_id=message_uuid(number), chat_id="c", content="x")
        error = await ann.send("c", 3)
        assert (error["code"], error["retry_after_ms"]) == ("BUSY", 100)
        gate.open()
        await ann.wait_for_frames(2, "send_message_ack")
        assert await ann.send_committed("c", 3) == 3


# --- slow readers --------------------------------------------------------------------------------------------


@pytest.mark.rule("CH-11", "CO-31")
async def test_slow_consumer_is_disconnected_and_can_resume_without_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(websocket, "CLOSE_WAIT_S", WAIT_S)  # do not abort before bob has read
    async with run_server(tmp_path, outbox_bytes_max=200_000) as server:
        await server.create("c", "ann", "bob")
        ann, bob = await server.connect("ann", live=False), await server.connect("bob")
        bob.socket._reader._protocol.pause_reading()
        counts, number = server.served.server.counts, 0
        while not counts.slow_readers_closed:
            for _ in range(5):
                number += 1
                said = {"client_message_id": message_uuid(number), "chat_id": "c", "content": "x" * 4000}
                await ann.send_frame("send_message", **said)
            await ann.wait_for_frames(5, "send_message_ack")
        bob.socket._reader._protocol.resume_reading()
        assert await bob.wait_closed() == 1008
        messages = [frame for frame in bob.frames if frame["type"] == "message"]
        assert sequences(messages) == list(range(1, len(messages) + 1))
        assert [frame["type"] for frame in bob.frames[len(messages) :]] == ["error", "connection_closing"]
        assert bob.frames[-2]["code"] == "SLOW_CONSUMER"
        again = await server.connect("bob")
        rest = await again.sync_all("c", len(messages), limit=500)
        assert sequences(messages + rest) == list(range(1, number + 1))
        assert counts.slow_readers_warned


# --- connections -----------------------------------------------------------------------------------------------


@pytest.mark.rule("CH-11")
async def test_stopping_server_sends_a_reconnect_delay(tmp_path: Path) -> None:
    async with run_server(tmp_path, shutdown_ms=SHUTDOWN_MS) as server:
        await server.create("c", "ann")
        ann = await server.connect("ann")
        stopping = asyncio.ensure_future(server.served.server.stop())
        assert await ann.wait_closed() == 1001
        closing = ann.frames[-1]
        assert (closing["type"], bool(closing["reason"])) == ("connection_closing", True)
        assert closing["reconnect_delay_ms"] > 0
        await soon(stopping)


@pytest.mark.rule("CH-11", "CO-11")
async def test_stopping_server_answers_accepted_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with run_server(tmp_path, shutdown_ms=SHUTDOWN_MS) as server:
        await server.create("c", "ann")
        ann = await server.connect("ann")
        (session,) = server.served.server.apis.chat_sessions.connections
        assert session.principal is not None
        gate = server.served.hold_commits(monkeypatch)
        said = {"client_message_id": message_uuid(1), "chat_id": "c", "content": "x"}
        await ann.send_frame("send_message", **said)
        await ann.request("ping")
        stopping = asyncio.ensure_future(server.served.server.stop())
        await until(lambda: server.served.server.is_closing)
        error = await ann.send("c", 2)
        assert (error["code"], error["retry_after_ms"]) == ("SERVER_STOPPING", 1000)
        with pytest.raises(ApiError) as refused:  # a request that arrived before the listener closed
            await soon(server.served.server.apis.chat_service.create("chat/d", [], session.principal))
        assert refused.value.code == error_codes.SERVER_STOPPING
        gate.open()
        assert (await ann.wait_for_frame(type="send_message_ack"))["sequence"] == 1
        assert await ann.wait_closed() == 1001
        await soon(stopping)


@pytest.mark.rule("CH-11")
async def test_connected_frame_reports_the_heartbeat(tmp_path: Path) -> None:
    async with run_server(tmp_path, heartbeat_ms=400) as server:
        device = await server.socket("ann")
        assert (await device.connect())["heartbeat_ms"] == 400


@pytest.mark.rule("CH-11")
async def test_client_that_does_not_answer_pings_is_closed(tmp_path: Path) -> None:
    async with run_server(tmp_path, heartbeat_ms=400) as server:
        url = f"{server.served.url}/v1/chat"
        async with server.served.session.ws_connect(url, autoping=False) as socket:
            await socket.send_json({"type": "connect", "token": "ann", "device_id": "phone"})
            received = {message.type: message for message in [await soon(socket.receive()) for _ in range(2)]}
            assert received.keys() == {WSMsgType.TEXT, WSMsgType.PING}
            assert received[WSMsgType.TEXT].json()["type"] == "connected"
            await until(lambda: len(server.served.server.apis.chat_sessions) == 0)


@pytest.mark.rule("CH-11", "CO-16")
async def test_unreadable_log_closes_all_connections_with_an_error(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        await server.create("c", "ann", "bob")
        ann, bob = await server.connect("ann"), await server.connect("bob")
        tailers = server.served.server.log._tailers._tailers
        for lane in range(1, 17):
            tailers[lane]._fail(StoreUnavailableError("away"))
        for device in (ann, bob):
            assert await device.wait_closed() == 1011
            assert [frame["type"] for frame in device.frames[-2:]] == ["error", "connection_closing"]
            assert device.frames[-2]["code"] == "UNAVAILABLE"
        ann, bob = await server.connect("ann"), await server.connect("bob")
        await ann.send_committed("c", 1)
        assert (await bob.wait_for_frame(type="message"))["sequence"] == 1
        assert [frame["type"] for frame in await bob.take_frames()] == []


@pytest.mark.rule("CO-30")
async def test_sender_entries_are_freed_without_live_devices(tmp_path: Path) -> None:
    """A server without live devices follows no lane, so an entry that waits for its lane would never be freed."""
    async with run_server(tmp_path) as server:
        await server.create("c", "ann")
        senders = server.served.server.apis.chat_hub._senders
        importer = await server.connect("ann", live=False)
        for number in range(1, 21):
            await importer.send_committed("c", number)
        assert not senders
        ann = await server.connect("ann")
        for number in range(21, 41):
            await ann.send_committed("c", number)
        await until(lambda: not senders)  # the server may read the lane after it has sent the answer


@pytest.mark.rule("CO-30")
async def test_message_whose_answer_fails_is_still_counted_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_server(tmp_path) as server:
        await server.create("c", "ann")
        ann = await server.connect("ann")
        (session,) = server.served.server.apis.chat_sessions.connections
        with monkeypatch.context() as broken:
            broken.setattr(codec, "encode_sent", None)
            assert (await ann.send("c", 1))["code"] == "UNAVAILABLE"
        assert session.in_flight_count == 0
        assert (await ann.send("c", 1))["duplicate"] is True
        assert (await ann.send("elsewhere", 2))["code"] == "NOT_A_MEMBER"
        assert session.in_flight_count == 0


@pytest.mark.rule("CH-9", "CO-22", "CO-23")
async def test_revoked_key_closes_its_connection(tmp_path: Path) -> None:
    async with run_server(tmp_path, api_keys=True) as server:
        everything = (["chat/*"], ["chat/*"])
        ann, bob = (api_key(server.served, name, *everything) for name in ("ann", "bob"))
        body = {"chat_id": "c", "members": ["client:bob"]}
        assert (await server.http("POST", "/v1/chats", ann.text, body)).status == 201
        here, there = await server.connect(ann.text), await server.connect(bob.text)
        server.served.server.run_checks()  # nothing has changed
        await here.send_committed("c", 1)
        assert (await there.wait_for_frame(type="message"))["sequence"] == 1
        keys = server.served.api_keys
        assert keys is not None
        keys.revoke(bob.key.id)
        server.served.server.reload()
        assert await there.wait_closed() == 1008
        assert there.frames[-1]["code"] == "AUTH_FAILED"


@pytest.mark.rule("CO-30")
async def test_connection_without_a_connect_frame_is_closed(tmp_path: Path) -> None:
    async with run_server(tmp_path, connect_timeout_ms=50) as server:
        silent = await server.socket("x")
        assert await silent.wait_closed() == 1008


@pytest.mark.rule("CO-30")
async def test_connections_and_frames_are_limited(tmp_path: Path) -> None:
    async with run_server(tmp_path, connections_max=1, frames_per_second_max=3, clock=ManualClock()) as server:
        ann = await server.connect("ann")
        answer = await server.http("GET", "/v1/chat", "ann", headers={"Upgrade": "websocket", "Connection": "Upgrade"})
        assert (answer.status, answer.json["error"]["code"]) == (503, "BUSY")
        plain = await server.http("GET", "/v1/chat", "ann")
        assert (plain.status, plain.json["error"]["code"]) == (426, "INVALID_REQUEST")
        assert (await ann.request("ping"))["type"] == "pong"
        assert (await ann.request("ping"))["type"] == "pong"
        await ann.send_frame("ping")
        error = await ann.receive()
        assert (error["code"], error["limit"], error["retry_after_ms"]) == ("RATE_LIMITED", 3, 1000)


# --- expiry ----------------------------------------------------------------------------------------------------

WEEK_MS = 7 * 24 * 3600 * 1000


@pytest.mark.rule("CH-5", "CO-17")
@pytest.mark.parametrize("is_over_http", [False, True])
async def test_message_id_is_known_for_seven_days(tmp_path: Path, is_over_http: bool) -> None:
    clock = ManualClock()
    async with run_server(tmp_path, clock=clock, clock_jump_ms_max=2**52) as server:

        async def send(number: int, content: str = "hello") -> tuple[int, bool]:
            body = {"client_message_id": message_uuid(number), "content": content}
            if is_over_http:
                answer = (await server.http("POST", "/v1/chats/c/messages", "ann", body)).json
            else:
                answer = await ann.request("send_message", chat_id="c", **body)
            return answer["sequence"], answer["duplicate"]

        await server.create("c", "ann")
        ann = await _reconnected(server)
        assert await send(1) == (1, False)
        clock.advance(WEEK_MS - 1000)
        ann = await _reconnected(server)
        assert await send(1) == (1, True)
        assert await send(2) == (2, False)
        clock.advance(999)
        assert await send(1) == (1, True)
        clock.advance(1)
        assert await send(1, "again") == (3, False)
        assert await send(1, "again") == (3, True)
        assert await send(2) == (2, True)
        stored = await ann.sync_all("c")
        assert [(one["sequence"], one["content"]) for one in stored] == [(1, "hello"), (2, "hello"), (3, "again")]


async def _reconnected(server: ChatServer) -> Any:
    await server.close()
    return await server.connect("ann")

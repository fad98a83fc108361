"""Chats and members: creation, permissions, and refusals that reveal nothing to non-members."""

import asyncio
from pathlib import Path

import pytest

from databases import BOTH_STORES
from server.auth import auth_material
from server.chat.chat_servers import ChatServer, Json, SharedServer, message_uuid, run_server
from server.running_server import api_key

pytestmark = BOTH_STORES


@pytest.mark.rule("CH-9")
async def test_creator_becomes_a_member_and_a_missing_id_is_generated(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    server = shared_server.server
    made = await server.http("POST", "/v1/chats", "ann", {"chat_id": chat, "members": ["user:bob", "client:bot"]})
    roles = {"client:bot": "member", "user:ann": "owner", "user:bob": "member"}
    members = [{"user_id": one, "last_acked_sequence": 0, "role": role} for one, role in roles.items()]
    assert (made.status, made.json) == (
        201,
        {"chat_id": chat, "last_sequence": 0, "members": members, "has_more": False},
    )
    again = await server.http("POST", "/v1/chats", "ann", {"chat_id": chat, "members": ["user:cyn"]})
    assert (again.status, len(again.json["members"])) == (200, 4)
    found = (await server.http("GET", f"/v1/chats/{chat}", "cyn")).json
    assert found == again.json
    nameless = [(await server.http("POST", "/v1/chats", "ann", {})).json["chat_id"] for _ in range(2)]
    assert all(one.startswith("chat_") for one in nameless)
    assert len(set(nameless)) == 2


@pytest.mark.rule("CH-9", "CO-14")
async def test_one_of_many_concurrent_creators_creates_the_chat(
    shared_server: SharedServer,
) -> None:
    chat = shared_server.chat()
    names = [f"n{number}" for number in range(12)]
    answers = await asyncio.gather(
        *[shared_server.server.http("POST", "/v1/chats", one, {"chat_id": chat}) for one in names]
    )
    assert sorted(one.status for one in answers) == [201] + [403] * 11
    winner = names[[one.status for one in answers].index(201)]
    assert list(await shared_server.server.watermarks(chat, winner)) == [f"user:{winner}"]


@pytest.mark.rule("CH-9")
async def test_chat_without_members_cannot_be_created_again(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann")
    ann = await shared_server.server.connect("ann")
    await ann.send_committed(chat, 1, "secret")
    await shared_server.server.set_member(chat, "ann", "ann", present=False)
    for name in ("eve", "ann"):
        answer = await shared_server.server.http("POST", "/v1/chats", name, {"chat_id": chat})
        assert (answer.status, answer.json["error"]["code"]) == (403, "NOT_A_MEMBER")


@pytest.mark.rule("CH-8", "CH-9")
async def test_chats_and_members_are_listed_in_pages(shared_server: SharedServer) -> None:
    name = f"u{shared_server.name}"
    chats = sorted(shared_server.chat(f"-{number:02d}") for number in range(7))
    server = shared_server.server
    for number, chat in enumerate(chats):
        await server.create(chat, name, *(f"m{one}" for one in range(number)))
    device = await server.connect(name)
    for chat in chats[:3]:
        await device.send_committed(chat, 1)
    await device.acknowledge(chats[1], 1)
    await server.wait_for_watermark(chats[1], name, 1)
    found, after = [], ""
    while True:
        page = (await server.http("GET", f"/v1/chats?limit=3{after}", name)).json
        found += page["chats"]
        if "next_after" not in page:
            break
        after = f"&after={page['next_after']}"
    expected = [
        {"chat_id": chat, "last_sequence": int(number < 3), "last_acked_sequence": int(number == 1), "role": "owner"}
        for number, chat in enumerate(chats)
    ]
    assert found == expected
    members, after = [], ""
    while True:
        page = (await server.http("GET", f"/v1/chats/{chats[6]}?limit=2{after}", name)).json
        members += [one["user_id"] for one in page["members"]]
        if "next_after" not in page:
            break
        after = f"&after={page['next_after']}"
    assert members == sorted([f"user:{name}", *(f"user:m{one}" for one in range(6))])


# --- non-members ---------------------------------------------------------------------------------------------


async def send_all_requests(server: ChatServer, name: str, chat: str, number: int) -> list[bytes]:
    """Send every kind of request for a chat and return the answers as bytes, with the test's ids removed."""
    found = []
    device = await server.connect(name)
    uuid = message_uuid(number)
    frames: list[Json] = [
        {"type": "send_message", "client_message_id": uuid, "content": "secret"},
        {"type": "send_message", "client_message_id": uuid, "content": "other"},
        {"type": "sync_request", "last_acked_sequence": 0},
        {"type": "sync_request", "last_acked_sequence": 10**6},
        {"type": "ack", "last_acked_sequence": 0},
        {"type": "ack", "last_acked_sequence": 1},
        {"type": "ack", "last_acked_sequence": 10**6},
    ]
    for frame in frames:
        await device.send_frame(frame.pop("type"), chat_id=chat, request_id="r", **frame)
        message = await device.socket.receive()
        found.append(message.data.replace(chat, "CHAT").replace(uuid, "UUID").encode())
    path = f"/v1/chats/{chat}"
    for method, rest, body in (
        ("GET", "", None),
        ("GET", "/messages", None),
        ("GET", "/messages?before=1", None),
        ("GET", "/messages?after=999", None),
        ("GET", "/delivery", None),
        ("POST", "/messages", {"client_message_id": uuid, "content": "secret"}),
        ("POST", "/ack", {"last_acked_sequence": 1}),
        ("PUT", "/members/user:eve", None),
        ("DELETE", "/members/user:ann", None),
        ("DELETE", "/members/user:missing", None),
    ):
        answer = await server.http(method, path + rest, name, body)
        assert answer.status == 403
        found.append(answer.body)
    assert await device.take_frames() == []
    return found


@pytest.mark.rule("CH-9", "CO-18", "CO-22")
async def test_answers_to_a_non_member_reveal_nothing(shared_server: SharedServer) -> None:
    """Answers are byte-for-byte equal for an active chat, a chat that removed the user, and a nonexistent chat."""
    server = shared_server.server
    full, left, none = (shared_server.chat(suffix) for suffix in ("full", "left", "none"))
    for chat in (full, left):
        await server.create(chat, "ann", "eve")
        ann = await server.connect("ann")
        await ann.send_committed(chat, 1, "secret")
    eve = await server.connect("eve")
    assert await eve.send_committed(left, 2, "secret") == 2
    await server.set_member(left, "ann", "eve", present=False)
    await server.set_member(full, "ann", "eve", present=False)
    answers = [
        await send_all_requests(server, "eve", full, 1),
        await send_all_requests(server, "eve", left, 2),
        await send_all_requests(server, "eve", none, 3),
        await send_all_requests(server, "mallory", full, 1),
    ]
    assert answers[0] == answers[1] == answers[2] == answers[3]
    assert all(b"NOT_A_MEMBER" in one for one in answers[0])
    assert (await server.http("GET", "/v1/chats", "mallory")).json == {"chats": [], "has_more": False}


@pytest.mark.rule("CH-9", "CO-22")
async def test_member_without_grants_is_treated_as_a_non_member(tmp_path: Path) -> None:
    async with run_server(tmp_path, api_keys=True) as server:
        keys = {
            name: api_key(server.served, name, read, write).text
            for name, read, write in (
                ("owner", ["chat/*"], ["chat/*"]),
                ("reader", ["chat/a"], []),
                ("writer", [], ["chat/a"]),
                ("other", ["chat/b"], ["chat/b"]),
            )
        }
        members = [f"client:{name}" for name in keys]
        made = await server.http("POST", "/v1/chats", keys["owner"], {"chat_id": "a", "members": members})
        assert made.status == 201
        assert (await server.http("POST", "/v1/chats", keys["reader"], {"chat_id": "a"})).status == 403
        owner = await server.connect(keys["owner"])
        await owner.send_committed("a", 1)
        mine = {"client_message_id": message_uuid(1), "content": "hello"}
        allowed = {"reader": (False, True), "writer": (True, False), "other": (False, False)}
        for name, (may_write, may_read) in allowed.items():
            device = await server.connect(keys[name])
            sent = await device.request("send_message", chat_id="a", **mine)
            assert (sent["type"] == "send_message_ack") is may_write, name
            assert (await device.sync("a"))["type"] == ("message_batch" if may_read else "error"), name
            sequence = await owner.send_committed("a", 100 + len(name))
            if may_read:
                await device.wait_for_frame(type="message", sequence=sequence)
            else:
                assert await device.take_frames() == [], name
            chats = (await server.http("GET", "/v1/chats", keys[name])).json["chats"]
            assert len(chats) == int(may_read)
            assert (await server.http("GET", "/v1/chats/a", keys[name])).status == (200 if may_read else 403)
            added = await server.http("PUT", "/v1/chats/a/members/user:x", keys[name])
            code = "NOT_AN_OWNER" if may_write else "NOT_A_MEMBER"
            assert (added.status, added.json["error"]["code"]) == (403, code)


@pytest.mark.rule("CH-9", "CO-23")
async def test_expired_token_closes_the_connection(tmp_path: Path) -> None:
    async with run_server(tmp_path, tokens=True) as server:
        token = auth_material.token(sub="ann", grants={"read": ["chat/*"], "write": ["chat/*"]})
        ann = await server.connect(token)
        assert await ann.expect_refusal("send_message", chat_id="c", client_message_id=message_uuid(1), content="x")
        server.served.clock.advance(10**9)  # type: ignore[attr-defined]
        server.served.server.run_checks()
        assert await ann.wait_closed() == 1008
        assert ann.frames[-1]["code"] == "AUTH_FAILED"


@pytest.mark.rule("CO-21")
async def test_invalid_credential_is_refused_and_the_connection_closed(tmp_path: Path) -> None:
    async with run_server(tmp_path, api_keys=True) as server:
        for members in ({"token": "nonsense"}, {"token": None}):
            device = await server.socket("x")
            error = await device.connect(**members)
            assert (error["type"], error["code"]) == ("error", "AUTH_FAILED")
            assert await device.wait_closed() == 1008
        silent = await server.socket("x")
        assert await silent.expect_refusal("ping") == "INVALID_REQUEST"
        assert await silent.expect_refusal("connect", token=7) == "INVALID_REQUEST"
        answer = await server.http("GET", "/v1/chats", "nonsense")
        assert (answer.status, answer.json["error"]["code"]) == (401, "AUTH_FAILED")


@pytest.mark.rule("CO-21")
async def test_token_in_development_mode_is_the_user_name(shared_server: SharedServer) -> None:
    for token, user_id in (
        ("ann", "user:ann"),
        ("A.b_c-9", "user:A.b_c-9"),
        (None, "user:developer"),
        ("a" * 65, "user:developer"),
        ("a b", "user:developer"),
    ):
        device = await shared_server.server.socket("x")
        assert (await device.connect(token=token))["user_id"] == user_id
    again = await device.connect()
    assert (again["code"], again["message"]) == ("INVALID_REQUEST", "already connected")

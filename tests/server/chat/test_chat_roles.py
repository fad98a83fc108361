"""Chat roles: owners and members over HTTP and WebSocket, the limit on new chats, and chats that predate roles."""

import asyncio
from pathlib import Path

import pytest

from databases import BOTH_STORES, is_postgres, log_at
from oncelog.engine.audit import AuditFilter
from oncelog.testing.clock import ManualClock
from server.chat.chat_servers import ChatServer, SharedServer, run_server, sequences
from server.chat.test_chat_invariants import execute
from server.cli_commands import oncelog
from storage.older_schema import WITHOUT_ROLES

pytestmark = BOTH_STORES


async def roles_of(server: ChatServer, chat: str, name: str) -> dict[str, str]:
    answer = await server.http("GET", f"/v1/chats/{chat}", name)
    assert answer.status == 200, answer.body
    return {one["user_id"].removeprefix("user:"): one["role"] for one in answer.json["members"]}


async def set_role(server: ChatServer, chat: str, name: str, member: str, role: object) -> tuple[int, str]:
    """Return the status and the new role, or the status and the error code."""
    answer = await server.http("PUT", f"/v1/chats/{chat}/members/user:{member}", name, {"role": role})
    return answer.status, answer.json["role"] if answer.status == 200 else answer.json["error"]["code"]


async def refusal_of(server: ChatServer, chat: str, name: str, member: str, *, present: bool) -> tuple[int, str]:
    answer = await server.set_member(chat, name, member, present=present)
    return answer.status, answer.json["error"]["code"]


# --- roles ---------------------------------------------------------------------------------------------------


@pytest.mark.rule("CH-19")
async def test_member_cannot_remove_the_creator_or_change_members(shared_server: SharedServer) -> None:
    server, chat = shared_server.server, shared_server.chat()
    await server.create(chat, "ann", "eve", "bob")
    for member, present in (("ann", False), ("bob", False), ("mallory", True), ("bob", True), ("nobody", False)):
        assert await refusal_of(server, chat, "eve", member, present=present) == (403, "NOT_AN_OWNER")
    for member, role in (("eve", "owner"), ("ann", "member"), ("mallory", "member")):
        assert await set_role(server, chat, "eve", member, role) == (403, "NOT_AN_OWNER")
    more = await server.http("POST", "/v1/chats", "eve", {"chat_id": chat, "members": ["user:mallory"]})
    assert (more.status, more.json["error"]["code"]) == (403, "NOT_AN_OWNER")
    assert await roles_of(server, chat, "eve") == {"ann": "owner", "bob": "member", "eve": "member"}
    left = await server.set_member(chat, "eve", "eve", present=False)
    assert (left.status, left.json) == (200, {"chat_id": chat, "user_id": "user:eve", "present": False})
    assert await refusal_of(server, chat, "eve", "bob", present=False) == (403, "NOT_A_MEMBER")


@pytest.mark.rule("CH-19", "CO-43")
async def test_membership_changes_are_recorded_but_invisible_in_the_chat(shared_server: SharedServer) -> None:
    server, chat = shared_server.server, shared_server.chat()
    await server.create(chat, "ann", "bob")
    ann = await server.connect("ann")
    assert await ann.send_committed(chat, 1) == 1
    for _ in range(2):  # the repeated request changes nothing and is not recorded
        assert (await server.set_member(chat, "ann", "cyn")).status == 200
        assert await set_role(server, chat, "ann", "bob", "owner") == (200, "owner")
    assert (await refusal_of(server, chat, "cyn", "bob", present=False)) == (403, "NOT_AN_OWNER")
    assert (await server.set_member(chat, "ann", "bob", present=False)).status == 200
    assert await ann.send_committed(chat, 2) == 2
    assert sequences(await ann.sync_all(chat)) == [1, 2]
    assert {frame["type"] for frame in await ann.take_frames()} <= {"membership", "message", "watermark"}
    await ann.close()
    # The last owner leaves, and the longest-standing member becomes owner.
    assert (await server.set_member(chat, "ann", "ann", present=False)).status == 200
    page = await server.served.server.log.audit(wanted=AuditFilter(stream=f"chat/{chat}"))
    assert [(one.act, one.actor, one.target, one.details.get("role")) for one in page.entries] == [
        ("member_added", "user:ann", "user:ann", "owner"),
        ("member_added", "user:ann", "user:bob", "member"),
        ("member_added", "user:ann", "user:cyn", "member"),
        ("member_role_changed", "user:ann", "user:bob", "owner"),
        ("member_removed", "user:ann", "user:bob", None),
        ("member_removed", "user:ann", "user:ann", None),
        ("member_role_changed", "user:ann", "user:cyn", "owner"),
    ]


@pytest.mark.rule("CH-19")
async def test_owners_add_and_remove_members_and_appoint_owners(shared_server: SharedServer) -> None:
    server, chat = shared_server.server, shared_server.chat()
    await server.create(chat, "ann", "bob")
    added = await server.set_member(chat, "ann", "cyn")
    assert added.json == {"chat_id": chat, "user_id": "user:cyn", "present": True, "role": "member"}
    assert await set_role(server, chat, "ann", "dan", "owner") == (200, "owner")  # added as an owner
    assert await set_role(server, chat, "ann", "bob", "owner") == (200, "owner")
    assert await set_role(server, chat, "ann", "bob", "owner") == (200, "owner")  # a retry
    assert (await server.set_member(chat, "ann", "bob")).json["role"] == "owner"  # without a role
    assert await set_role(server, chat, "bob", "ann", "member") == (200, "member")
    assert await refusal_of(server, chat, "ann", "bob", present=False) == (403, "NOT_AN_OWNER")
    assert (await server.set_member(chat, "bob", "dan", present=False)).status == 200
    assert (await server.set_member(chat, "bob", "dan")).json["role"] == "member"  # rejoins without the owner role
    assert await set_role(server, chat, "bob", "bob", "member") == (409, "LAST_OWNER")
    assert await roles_of(server, chat, "dan") == {
        "ann": "member",
        "bob": "owner",
        "cyn": "member",
        "dan": "member",
    }
    listed = (await server.http("GET", f"/v1/chats?after={chat}-", "ann")).json["chats"]
    assert chat not in {one["chat_id"] for one in listed}
    for name, role in (("ann", "member"), ("bob", "owner")):
        delivery = (await server.http("GET", f"/v1/chats/{chat}/delivery", name)).json["members"]
        assert {one["user_id"]: one["role"] for one in delivery}[f"user:{name}"] == role


@pytest.mark.rule("CH-19")
async def test_retries_of_leaving_and_of_giving_up_a_role_succeed(shared_server: SharedServer) -> None:
    server, chat = shared_server.server, shared_server.chat()
    await server.create(chat, "ann", "bob")
    await set_role(server, chat, "ann", "bob", "owner")
    for _ in range(2):
        assert await set_role(server, chat, "ann", "ann", "member") == (200, "member")
    left = [await server.set_member(chat, "ann", "ann", present=False) for _ in range(2)]
    assert [one.status for one in left] == [200, 200]
    assert left[0].json == left[1].json
    missing = shared_server.chat("missing")
    strangers = [await server.set_member(one, "eve", "eve", present=False) for one in (chat, missing)]
    assert [one.status for one in strangers] == [200, 200]
    assert await roles_of(server, chat, "bob") == {"bob": "owner"}


@pytest.mark.rule("CH-19")
async def test_role_is_set_only_if_the_user_is_a_member(shared_server: SharedServer) -> None:
    server, chat = shared_server.server, shared_server.chat()
    await server.create(chat, "ann", "bob")
    path, naming = f"/v1/chats/{chat}/members/user:bob", {"role": "owner", "only_if_member": True}
    assert (await server.http("PUT", path, "ann", naming)).json["role"] == "owner"
    await server.set_member(chat, "bob", "bob", present=False)
    answer = await server.http("PUT", path, "ann", naming)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["field"]) == (403, "NOT_A_MEMBER", "user_id")
    assert await roles_of(server, chat, "ann") == {"ann": "owner"}
    wrong = await server.http("PUT", path, "ann", {"only_if_member": 1})
    assert (wrong.status, wrong.json["error"]["field"]) == (400, "$.only_if_member")


@pytest.mark.rule("CH-19")
@pytest.mark.parametrize("role", ["admin", "", 1, ["owner"], {"owner": True}, True])
async def test_unknown_role_is_refused_with_a_list_of_the_known_ones(shared_server: SharedServer, role: object) -> None:
    server, chat = shared_server.server, shared_server.chat()
    answer = await server.http("PUT", f"/v1/chats/{chat}/members/user:bob", "ann", {"role": role})
    error = answer.json["error"]
    assert (answer.status, error["code"], error["field"]) == (400, "INVALID_REQUEST", "$.role")
    assert "'owner', 'member'" in error["message"]


@pytest.mark.rule("CH-19")
async def test_oldest_member_becomes_owner_and_devices_are_notified(shared_server: SharedServer) -> None:
    server, chat = shared_server.server, shared_server.chat()
    await server.create(chat, "ann", "zoe", "bob")
    zoe, bob = await server.connect("zoe"), await server.connect("bob")
    await zoe.send_committed(chat, 1)
    await zoe.acknowledge(chat, 1)
    await server.wait_for_watermark(chat, "zoe", 1)
    await server.set_member(chat, "ann", "ann", present=False)
    for device in (zoe, bob):
        told = await device.wait_for_frame(type="membership", chat_id=chat, user_id="user:zoe")
        assert (told["present"], told["role"], told["last_acked_sequence"]) == (True, "owner", 1)
        assert "role" not in await device.wait_for_frame(type="membership", chat_id=chat, user_id="user:ann")
    assert await roles_of(server, chat, "bob") == {"bob": "member", "zoe": "owner"}
    assert await set_role(server, chat, "zoe", "bob", "owner") == (200, "owner")
    told = await zoe.wait_for_frame(type="membership", chat_id=chat, user_id="user:bob")
    assert (told["present"], told["role"]) == (True, "owner")
    assert await server.watermarks(chat, "bob") == {"user:bob": 0, "user:zoe": 1}


# --- chats older than roles ---------------------------------------------------------------------------------


@pytest.mark.rule("CH-19")
async def test_members_of_an_older_chat_are_owners_until_one_is_appointed(tmp_path: Path) -> None:
    async with run_server(tmp_path) as server:
        await server.create("old", "ann", "zoe", "bob", "eve")
        await server.create("left", "ann")
        await server.set_member("left", "ann", "ann", present=False)
    await asyncio.to_thread(_remove_roles, tmp_path / "events.db")
    async with run_server(tmp_path) as server:
        assert set((await roles_of(server, "old", "ann")).values()) == {"owner"}
        assert (await server.set_member("old", "eve", "dan")).json["role"] == "owner"
        assert (await server.set_member("old", "bob", "eve", present=False)).status == 200
        assert await set_role(server, "old", "bob", "ann", "member") == (409, "LAST_OWNER")
        assert await set_role(server, "old", "zoe", "ann", "owner") == (200, "owner")
        expected = {"ann": "owner", "bob": "member", "dan": "member", "zoe": "member"}
        assert await roles_of(server, "old", "bob") == expected
        assert await refusal_of(server, "old", "zoe", "ann", present=False) == (403, "NOT_AN_OWNER")
        # The migration preserved the join order: members added by one request joined in the order of their names.
        await server.set_member("old", "ann", "ann", present=False)
        assert await roles_of(server, "old", "bob") == {"bob": "owner", "dan": "member", "zoe": "member"}
        assert (await server.http("POST", "/v1/chats", "ann", {"chat_id": "left"})).status == 403
    verified = await oncelog("verify", log_at(tmp_path / "events.db"))
    assert verified.exit_code == 0, verified.output


def _remove_roles(path: Path) -> None:
    for statement in (
        *WITHOUT_ROLES,
        f"UPDATE oncelog_log SET schema_version = {7 if is_postgres() else 10}",  # noqa: S608
    ):
        execute(path, statement)


@pytest.mark.rule("CH-19", "CO-44")
@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE oncelog_members SET is_owner = 0",
        "UPDATE oncelog_members SET joined = 1",
        "UPDATE oncelog_rosters SET owners = NULL",
        "UPDATE oncelog_rosters SET members = 3",
        "UPDATE oncelog_rosters SET joined = 1",
        "DELETE FROM oncelog_rosters",
    ],
)
async def test_verify_finds_members_and_rosters_that_contradict_the_records(tmp_path: Path, statement: str) -> None:
    async with run_server(tmp_path) as server:
        await server.create("c", "ann", "bob")
    await asyncio.to_thread(execute, tmp_path / "events.db", statement)
    verified = await oncelog("verify", log_at(tmp_path / "events.db"))
    assert (verified.exit_code, "the stream 'chat/c'" in verified.output) == (1, True), verified.output


# --- the limit on new chats ----------------------------------------------------------------------------------


@pytest.mark.rule("CH-19", "CO-30")
async def test_new_chats_per_user_are_limited_but_retries_are_not(tmp_path: Path) -> None:
    clock = ManualClock()
    limits = {"user_chats_per_second_max": 1, "user_chats_burst_max": 2, "clock": clock}
    async with run_server(tmp_path, **limits) as server, run_server(tmp_path, **limits) as other:
        await server.create("a", "ann")
        await other.create("b", "ann")
        refused = await server.http("POST", "/v1/chats", "ann", {"chat_id": "c", "members": ["user:bob"]})
        error = refused.json["error"]
        assert (refused.status, error["code"], error["retry_after_ms"]) == (429, "RATE_LIMITED", 1000)
        for one in (server, other):
            for chat in ("a", "b"):
                assert (await one.http("POST", "/v1/chats", "ann", {"chat_id": chat})).status == 200
        await server.create("d", "bob")
        clock.advance(1000)
        await other.create("c", "ann", "bob")
        assert (await server.http("POST", "/v1/chats", "ann", {})).status == 429


# --- live delivery beyond the chats in memory ----------------------------------------------------------------


@pytest.mark.rule("CH-19", "CH-7", "CO-30")
async def test_chats_created_by_others_do_not_stop_live_delivery(tmp_path: Path) -> None:
    async with run_server(tmp_path, live_chats_max=5) as server:
        await server.create("z-own", "ann", "bob")
        for number in range(6):
            await server.create(f"foreign-{number}", "mallory", "bob")
        ann, bob, mallory = [await server.connect(name) for name in ("ann", "bob", "mallory")]
        second = await server.connect("bob")
        for number in range(3):
            assert await ann.send_committed("z-own", number) == number + 1
            for foreign in range(6):
                await mallory.send_committed(f"foreign-{foreign}", number)
        for device in (bob, second):
            messages = await device.wait_for_frames(21, "message")
            for chat in ("z-own", *(f"foreign-{number}" for number in range(6))):
                assert sequences([one for one in messages if one["chat_id"] == chat]) == [1, 2, 3]
        assert await bob.send_committed("z-own", 100) == 4
        assert (await second.wait_for_frame(type="message"))["sequence"] == 4
        assert not [
            frame for frame in await bob.take_frames() if frame["type"] == "message"
        ]  # the sender has its answer


@pytest.mark.rule("CH-19", "CH-7", "CH-9")
async def test_chats_joined_while_connected_beyond_the_limit_are_delivered(tmp_path: Path) -> None:
    async with run_server(tmp_path, live_chats_max=2) as server:
        bob, mallory = await server.connect("bob"), await server.connect("mallory")
        chats = [f"c{number}" for number in range(6)]
        for chat in chats:
            await server.create(chat, "mallory", "bob")
            assert (await bob.wait_for_frame(type="membership", chat_id=chat, user_id="user:bob"))["present"]
        for number in range(1, 4):
            for chat in chats:
                await mallory.send_committed(chat, number)
        messages = await bob.wait_for_frames(18, "message")
        for chat in chats:
            assert sequences([one for one in messages if one["chat_id"] == chat]) == [1, 2, 3]
        hub = server.served.server.apis.chat_hub
        user = hub._users["user:bob"]
        assert len(user.chats) <= 2
        for chat in chats:  # removed from all chats, so no later message arrives
            await server.set_member(chat, "mallory", "bob", present=False)
            assert not (await bob.wait_for_frame(type="membership", chat_id=chat, user_id="user:bob", present=False))[
                "present"
            ]
            await mallory.send_committed(chat, 9)
        assert not [frame for frame in await bob.take_frames() if frame["type"] == "message"]

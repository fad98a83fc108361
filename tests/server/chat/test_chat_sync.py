"""Sync and history: pages forwards and backwards, and cursors from another chat or history."""

import pytest

from databases import BOTH_STORES
from oncelog.core.policy import CHAT
from server.chat.chat_servers import SharedServer, message_uuid, sequences

pytestmark = BOTH_STORES


async def fill(shared_server: SharedServer, chat: str, number: int) -> None:
    await shared_server.server.create(chat, "ann", "bob")
    ann = await shared_server.server.connect("ann", live=False)
    for one in range(1, number + 1):
        await ann.send_frame("send_message", client_message_id=message_uuid(one), chat_id=chat, content=f"m{one}")
    await ann.wait_for_frames(number, "send_message_ack")


@pytest.mark.rule("CH-6")
async def test_sync_returns_all_messages_after_the_cursor_in_order(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await fill(shared_server, chat, 7)
    bob = await shared_server.server.connect("bob")
    for after in range(8):
        page = await bob.sync(chat, after)
        assert sequences(page["messages"]) == list(range(after + 1, 8))
        expected = {"type": "message_batch", "chat_id": chat, "has_more": False, "next_sequence": 7}
        assert {**expected, "last_sequence": 7}.items() <= page.items()
        assert "cursor_ahead" not in page
        assert page["messages"] == (await bob.request("sync_request", chat_id=chat, last_acked_seq=after))["messages"]
    pages = [await bob.sync(chat, after, limit=3) for after in (0, 3, 6)]
    assert [sequences(page["messages"]) for page in pages] == [[1, 2, 3], [4, 5, 6], [7]]
    assert [(page["has_more"], page["next_sequence"]) for page in pages] == [(True, 3), (True, 6), (False, 7)]


@pytest.mark.rule("CH-6", "CO-30")
async def test_page_size_defaults_to_100_and_is_limited_to_500(
    shared_server: SharedServer,
) -> None:
    chat = shared_server.chat()
    await fill(shared_server, chat, 601)
    bob = await shared_server.server.connect("bob")
    for limit, expected in ((None, 100), (0, 1), (-7, 1), (1, 1), (500, 500), (501, 500), (2**53 - 1, 500)):
        page = await bob.sync(chat, 0, **({} if limit is None else {"limit": limit}))
        assert (len(page["messages"]), page["has_more"], page["next_sequence"]) == (expected, True, expected)
    assert sequences(await bob.sync_all(chat)) == list(range(1, 602))


@pytest.mark.rule("CH-6", "CH-8")
async def test_sync_does_not_acknowledge(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await fill(shared_server, chat, 3)
    bob = await shared_server.server.connect("bob")
    await bob.sync_all(chat)
    await bob.sync(chat, 3)
    assert await shared_server.server.watermarks(chat, "ann") == {"user:ann": 0, "user:bob": 0}


@pytest.mark.rule("CH-6")
async def test_cursor_ahead_of_the_chat_gets_an_empty_batch_with_a_flag(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await fill(shared_server, chat, 2)
    bob = await shared_server.server.connect("bob")
    for after in (3, 2**53 - 1):
        page = await bob.sync(chat, after)
        assert (page["messages"], page["has_more"], page["cursor_ahead"]) == ([], False, True)
        assert (page["next_sequence"], page["last_sequence"]) == (2, 2)
    over_http = await shared_server.server.http("GET", f"/v1/chats/{chat}/messages?after=9", "bob")
    assert over_http.json["cursor_ahead"] is True


@pytest.mark.rule("CO-40")
async def test_cursor_of_another_history_is_refused(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await fill(shared_server, chat, 2)
    bob = await shared_server.server.socket("bob")
    epoch = (await bob.connect())["epoch"]
    assert len((await bob.sync(chat, 0, epoch=epoch))["messages"]) == 2
    error = await bob.sync(chat, 0, epoch="another")
    assert (error["code"], error["epoch"], error["chat_id"]) == ("HISTORY_CHANGED", epoch, chat)
    assert (await bob.sync("nowhere", 0, epoch="another"))["code"] == "NOT_A_MEMBER"
    over_http = await shared_server.server.http("GET", f"/v1/chats/{chat}/messages?epoch=another", "bob")
    assert (over_http.status, over_http.json["error"]["code"]) == (409, "HISTORY_CHANGED")


@pytest.mark.rule("CH-6", "CH-9")
async def test_history_is_read_backwards_over_http_without_a_gap(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await fill(shared_server, chat, 25)
    path = f"/v1/chats/{chat}/messages"
    found: list[int] = []
    query = "?limit=10"
    while query:
        page = (await shared_server.server.http("GET", path + query, "bob")).json
        found = sequences(page["messages"]) + found
        assert page["last_sequence"] == 25
        assert page["has_more"] == ("next_before" in page)
        query = f"?limit=10&before={page['next_before']}" if page["has_more"] else ""
    assert found == list(range(1, 26))
    for query, expected in (
        ("?before=1", []),
        ("?before=0", []),
        ("?before=4", [1, 2, 3]),
        ("?before=99&limit=2", [24, 25]),
        ("?after=22", [23, 24, 25]),
        ("?after=3&limit=2", [4, 5]),
    ):
        answer = await shared_server.server.http("GET", path + query, "bob")
        assert sequences(answer.json["messages"]) == expected, query
        if expected:
            assert answer.json["next_sequence"] == expected[-1], query
    for query in ("?after=1&before=2", "?limit=x", "?after=-1", "?page=1"):
        answer = await shared_server.server.http("GET", path + query, "bob")
        assert (answer.status, answer.json["error"]["code"]) == (400, "INVALID_REQUEST"), query


@pytest.mark.rule("CH-6")
async def test_cursor_of_an_empty_page_skips_no_message(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann")
    path = f"/v1/chats/{chat}/messages"
    queries = ("", "?before=0", "?before=1", "?before=9", "?after=0")
    pages = [(await shared_server.server.http("GET", path + query, "ann")).json for query in queries]
    await (await shared_server.server.connect("ann")).send_committed(chat, 1)
    pages += [
        (await shared_server.server.http("GET", path + query, "ann")).json for query in ("?before=0", "?before=1")
    ]
    for page in pages:
        assert (page["messages"], page["has_more"], page["next_sequence"]) == ([], False, 0)
        found = await shared_server.server.http("GET", f"{path}?after={page['next_sequence']}", "ann")
        assert sequences(found.json["messages"]) == [1]


@pytest.mark.rule("CH-6")
async def test_pages_of_long_messages_are_complete_in_both_directions(shared_server: SharedServer) -> None:
    """Pages of the log are limited in bytes, and each byte of these messages takes six bytes in JSON."""
    chat = shared_server.chat()
    await shared_server.server.create(chat, "ann")
    ann = await shared_server.server.connect("ann", live=False)
    for one in range(1, 401):
        await ann.send_frame("send_message", client_message_id=message_uuid(one), chat_id=chat, content="\x01" * 4096)
    await ann.wait_for_frames(400, "send_message_ack")
    page = (await shared_server.server.http("GET", f"/v1/chats/{chat}/messages?limit=500", "ann")).json
    assert sequences(page["messages"]) == list(range(1, 401))
    assert sequences(await ann.sync_all(chat, limit=500)) == list(range(1, 401))


@pytest.mark.rule("CO-41")
async def test_erased_message_keeps_its_sequence(shared_server: SharedServer) -> None:
    chat = shared_server.chat()
    await fill(shared_server, chat, 3)
    log = shared_server.server.served.server.log
    assert await log.erase(key=message_uuid(2), policy=CHAT, scope=f"chat/{chat}") == 1
    bob, ann = await shared_server.server.connect("bob"), await shared_server.server.connect("ann")
    stored = await bob.sync_all(chat)
    assert sequences(stored) == [1, 2, 3]
    assert (stored[1]["content"], stored[1]["content_type"], stored[1]["erased"]) == (None, None, True)
    again = await ann.send(chat, 2, "m2")
    assert (again["sequence"], again["duplicate"], again["erased"]) == (2, True, True)

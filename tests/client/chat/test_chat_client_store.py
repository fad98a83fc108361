"""The chat client's store (durability and ownership) and settings."""

from pathlib import Path

import pytest

from client.chat.chat_clients import HERE, UNREACHABLE_URL, client_of
from oncelog.client.chat.chat_state import ChangeSet, SavedChat
from oncelog.client.chat.store import ChatStore
from oncelog.client.chat.values import Member, Message, OutboxMessage, Refused, Sent, SettledMessage
from oncelog.errors import (
    CanonicalError,
    ClosedError,
    NewerSchemaError,
    NotALogError,
    SettingsError,
    StoreInUseError,
    StoreUnavailableError,
)
from scripts import read_line, start_script


def message(sequence: int, sender_id: str = "user:bob") -> Message:
    return Message(f"msg_{sequence}", "tea", sequence, sender_id, f"id-{sequence}", f"text {sequence}", "then")


def entry(number: int) -> OutboxMessage:
    return OutboxMessage(number, f"own-{number}", "tea", "hello", "text/plain", 5)


def test_written_state_is_loaded_when_the_store_is_reopened(tmp_path: Path) -> None:
    store = ChatStore(str(tmp_path / "ann.db"))
    stored = store.open("phone")
    assert (stored.user_id, stored.device_id, stored.epoch, stored.chats, stored.outbox) == ("", "phone", "", [], [])
    entries = store.assign_numbers([entry(0), entry(1), entry(2)])
    entries = [OutboxMessage(one.number, f"own-{one.number}", *_rest(one)) for one in entries]
    store.save(entries, [], ChangeSet())
    changes = ChangeSet(
        user_and_epoch=("user:ann", "e1"),
        messages=[message(1), message(1), message(3)],
        chats={"tea": SavedChat("tea", True, 1, 2, 1, 0)},
        settled=[
            SettledMessage(entries[0], Sent("msg_1", 1, "then")),
            SettledMessage(entries[1], Refused("NO", "why", was_tried=True)),
        ],
        watermarks=[
            ("tea", "user:bob", 4),
            ("tea", "user:bob", 3),
            ("tea", "user:carl", 1),
            ("tea", "user:carl", None),
        ],
        members={"tea": (Member("user:ann", 2),)},
    )
    store.save([], [], changes)
    store.close()
    store = ChatStore(str(tmp_path / "ann.db"))
    stored = store.open(None)
    assert (stored.user_id, stored.device_id, stored.epoch) == ("user:ann", "phone", "e1")
    (chat,) = stored.chats
    assert (chat.complete_to, chat.fetched_to, chat.received_to, chat.is_member) == (1, 2, 1, True)
    assert stored.outbox == entries[2:]
    ((number, refused),) = stored.refused
    assert (number, refused.client_message_id, refused.outcome) == (2, "own-2", Refused("NO", "why", was_tried=True))
    assert store.load_messages_after("tea", 0, 10, 10) == [message(1), message(3)]
    assert store.load_messages_after("tea", 0, 2, 10) == [message(1)]
    assert store.load_watermarks("tea") == {"user:ann": 2, "user:bob": 4}
    assert store.assign_numbers([entry(0)])[0].number == 4
    store.save([], [2], ChangeSet())
    assert store._load_refused(store._file.connection) == []
    store.close()


def _rest(one: OutboxMessage) -> tuple[str, str, str, int]:
    return one.chat_id, one.content, one.content_type, one.accepted_at_ms


@pytest.mark.rule("CH-12")
def test_own_messages_are_shown_before_missing_ones_arrive() -> None:
    store = ChatStore(":memory:")
    store.open(None)
    store.save([], [], ChangeSet(messages=[message(1), message(3), message(4, "user:ann")]))
    shown, _ = store.load_messages_before("tea", 100, 1, "user:ann", 10)
    assert [one.sequence for one in shown] == [1, 4]
    shown, _ = store.load_messages_before("tea", 4, 3, "user:ann", 1)
    assert [one.sequence for one in shown] == [3]


def test_reset_replaces_the_messages_of_the_old_history() -> None:
    store = ChatStore(":memory:")
    store.open(None)
    store.save([], [], ChangeSet(messages=[message(1), message(2)], watermarks=[("tea", "user:bob", 2)]))
    assert store.load_watermarks("tea") == {}, "watermarks are unknown until all members are listed"
    store.save([], [], ChangeSet(members={"tea": (Member("user:ann", 1),)}, watermarks=[("tea", "user:bob", 2)]))
    assert store.load_watermarks("tea") == {"user:ann": 1, "user:bob": 2}
    store.save([], [], ChangeSet(reset_chats=["tea"], messages=[message(7)]))
    assert [one.sequence for one in store.load_messages_after("tea", 0, 10, 10)] == [7]
    assert store.load_watermarks("tea") == {}
    store.save([], [], ChangeSet(reset_chats=["other"]))
    assert [one.sequence for one in store.load_messages_after("tea", 0, 10, 10)] == [7]
    store.save([], [], ChangeSet(reset_chats=["tea"]))
    assert store.load_messages_after("tea", 0, 10, 10) == []


def test_store_is_used_by_one_device_and_one_process(tmp_path: Path) -> None:
    path = tmp_path / "ann.db"
    with start_script(HERE / "chat_store_holder_worker.py", path) as worker:
        assert read_line(worker) == "open"
        with pytest.raises(StoreInUseError, match="another chat client has"):
            ChatStore(str(path)).open("phone")
    store = ChatStore(str(path))
    with pytest.raises(SettingsError, match="belongs to the device 'phone', not to 'desk'"):
        store.open("desk")
    store.open("phone")
    store.close()
    with pytest.raises(StoreUnavailableError, match="closed"):
        store.load_watermarks("tea")


def test_files_of_other_applications_and_newer_schemas_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.db"
    other.write_text("no database, and long enough to be read as one " * 30)
    with pytest.raises(NotALogError):
        ChatStore(str(other)).open(None)
    newer = tmp_path / "newer.db"
    store = ChatStore(str(newer))
    store.open(None)
    store._file.connection.execute("PRAGMA user_version = 99")
    store.close()
    with pytest.raises(NewerSchemaError, match="chat client"):
        ChatStore(str(newer)).open(None)


@pytest.mark.rule("CH-10")
@pytest.mark.parametrize(
    ("chat_id", "content", "options", "match"),
    [
        ("", "x", {}, "chat_id"),
        ("a/b", "x", {}, "chat_id"),
        ("..", "x", {}, "chat_id"),
        ("a\nb", "x", {}, "chat_id"),
        ("e\u0301", "x", {}, "chat_id"),
        ("x" * 129, "x", {}, "chat_id"),
        ("tea", "", {}, "content_bytes_max"),
        ("tea", "é" * 2049, {}, "content_bytes_max"),
        ("tea", "\ud800", {}, "content"),
        ("tea", 7, {}, "content"),
        ("tea", "x", {"content_type": "é"}, "content_type"),
        ("tea", "x", {"client_message_id": "x"}, "client_message_id"),
        ("tea", "x", {"client_message_id": "d9b2d63d-a233-11e9-8a2e-7f1a0f3b5c2d"}, "version 4"),
    ],
)
async def test_invalid_message_is_refused_before_it_is_stored(
    chat_id: str, content: str, options: dict[str, str], match: str
) -> None:
    async with client_of(UNREACHABLE_URL) as ann:
        with pytest.raises(CanonicalError, match=match):
            await ann.send(chat_id, content, **options)
        assert ann.pending() == []


async def test_single_text_as_members_is_refused() -> None:
    async with client_of(UNREACHABLE_URL) as ann:
        with pytest.raises(CanonicalError, match=r"members: must be a list of strings, not 'user:bob'"):
            await ann.create("tea", members="user:bob")


async def test_client_can_be_opened_only_once() -> None:
    client = client_of(UNREACHABLE_URL)
    with pytest.raises(ClosedError, match="not open"):
        await client.send("tea", "hello")
    await client.close()
    async with client:
        pending = await client.send("tea", "hello")
        with pytest.raises(ClosedError, match="opened only once"):
            await client.__aenter__()
    await client.close()
    with pytest.raises(ClosedError):
        await pending.outcome()
    with pytest.warns(DeprecationWarning, match="Pending.sent is deprecated"), pytest.raises(ClosedError):
        await pending.sent()


def test_invalid_settings_are_refused() -> None:
    for wrong in ({"device_id": ""}, {"limits": 7}, {"token": 7}, {"url": "nowhere"}, {"path": ""}):
        given = {"url": UNREACHABLE_URL, "path": ":memory:", **wrong}
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            client_of(given.pop("url"), **given)  # type: ignore[arg-type]

"""Protocol of the chat client, frame by frame: sync, live messages, sends, acknowledgements and membership."""

import pytest
from msgspec.structs import replace

from client.chat.protocol_driver import EPOCH, ME, ProtocolDriver, chat_at, entry, message
from oncelog.client.chat.sender import ChatPhase
from oncelog.client.chat.values import (
    EXPIRED,
    Arrived,
    ChatLimits,
    Delivery,
    HistoryChange,
    ListedChat,
    Membership,
    Progress,
    Refused,
    Sent,
)
from oncelog.client.runtime.http import CLOSE_TOO_LARGE
from oncelog.errors import LostError, ProtocolError, ServerRefusedError, SettingsError

# --- sync


@pytest.mark.rule("CH-12")
def test_sync_precedes_sends_and_partial_pages_are_not_shown() -> None:
    driver = ProtocolDriver(chat_at(2), page_messages=2)
    driver.protocol.enqueue([entry(1)], 0, was_tried=True)
    driver.begin(ListedChat("tea", 5))
    (first,) = driver.take_sent()
    assert (first["type"], first["last_acked_sequence"], first["limit"], first["epoch"]) == (
        "sync_request",
        2,
        2,
        EPOCH,
    )
    driver.receive_page(first, 3, 4, has_more=True)
    (second,) = driver.take_sent()
    assert (second["type"], second["last_acked_sequence"]) == ("sync_request", 4)
    driver.receive_messages(3)  # late and repeated
    assert driver.chat().complete_to == 2
    kept = driver.changes
    assert [one.sequence for one in kept.messages if one.sequence != 3] == [4]
    assert kept.chats["tea"] == ("tea", True, 2, 4, 0, 0)
    assert not [one for one in kept.updates if isinstance(one, Arrived)]
    driver.receive_page(second, 5)
    assert [one["type"] for one in driver.take_sent()] == ["send_message"]
    assert driver.chat().complete_to == 5
    assert Arrived("tea", 5) in driver.changes.updates


@pytest.mark.rule("CH-12")
def test_interrupted_sync_continues_where_it_stopped() -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 9))
    driver.receive_page(driver.take_sent()[0], 1, 2, has_more=True)
    driver.protocol.disconnect()
    driver.begin(ListedChat("tea", 9))
    assert driver.take_sent()[0]["last_acked_sequence"] == 2


@pytest.mark.rule("CH-12")
def test_message_found_by_the_sync_is_not_sent_again() -> None:
    driver = ProtocolDriver(chat_at(0))
    driver.protocol.enqueue([entry(1), entry(2)], 0, was_tried=True)
    driver.begin(ListedChat("tea", 1))
    (request,) = driver.take_sent()
    mine = {**message(1), "sender_id": ME, "client_message_id": "id-1", "content": "text 1"}
    driver.receive(
        "message_batch", request_id=request["request_id"], chat_id="tea", messages=[mine], has_more=False,
        next_sequence=1,
    )  # fmt: skip
    assert [one["client_message_id"] for one in driver.take_sent()] == ["id-2"]
    (settled,) = driver.changes.settled
    assert settled.outcome == Sent("msg_1", 1, "2026-01-30T14:30:00.000Z", duplicate=True)


def test_chat_without_new_messages_needs_no_sync() -> None:
    driver = ProtocolDriver(chat_at(5))
    driver.protocol.enqueue([entry(1)], 0)
    driver.begin(ListedChat("tea", 5))
    assert [one["type"] for one in driver.take_sent()] == ["send_message"]
    assert driver.protocol.is_live


def test_at_most_syncs_max_chats_are_synced_concurrently() -> None:
    driver = ProtocolDriver(syncs_max=2).begin(*(ListedChat(f"chat {number}", 1) for number in range(5)))
    requests = driver.take_sent()
    assert len(requests) == 2
    driver.receive_page(requests[0], 1)
    assert [one["chat_id"] for one in driver.take_sent()] == ["chat 2"]
    assert not driver.protocol.is_live


# --- live messages


@pytest.mark.rule("CH-7")
def test_live_messages_are_ordered_and_repeated_ones_dropped() -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 0))
    driver.receive_messages(2, 2, 3, 1, 1, 3)
    assert driver.chat().complete_to == 3
    assert [one.sequence for one in driver.changes.messages] == [2, 3, 1]
    assert driver.advance(1000) == []


@pytest.mark.rule("CH-7")
@pytest.mark.rule("CH-12")
def test_gap_is_requested_and_sequences_that_do_not_exist_block_nothing() -> None:
    driver = ProtocolDriver(chat_at(4), gap_wait_ms=100).begin(ListedChat("tea", 4))
    driver.receive_messages(7)
    assert driver.protocol.next_at_ms == 100
    assert driver.chat().complete_to == 4
    assert driver.advance(99) == []
    (request,) = driver.advance(1)
    assert request["last_acked_sequence"] == 4
    driver.receive_messages(8)
    driver.receive_page(request, 6, 7)  # sequence 5 does not exist
    assert driver.chat().complete_to == 8
    assert driver.advance(1000) == []


@pytest.mark.rule("CH-7")
def test_gap_filled_by_a_late_message_is_not_requested() -> None:
    driver = ProtocolDriver(chat_at(4), gap_wait_ms=100).begin(ListedChat("tea", 4))
    driver.receive_messages(6)
    driver.now_ms = 50
    driver.receive_messages(5)
    assert driver.chat().complete_to == 6
    assert driver.advance(1000) == []


def test_messages_above_ahead_max_are_read_again_by_the_sync() -> None:
    driver = ProtocolDriver(chat_at(0), ahead_max=2).begin(ListedChat("tea", 0))
    driver.receive_messages(3, 4, 5, 6)
    assert [one.sequence for one in driver.changes.messages] == [3, 4]
    (request,) = driver.advance(100)
    driver.receive_messages(8)
    driver.receive_page(request, 1, 2, 3, 4, 5, 6)
    assert driver.chat().complete_to == 6
    (request,) = driver.advance(100)
    assert request["last_acked_sequence"] == 6


@pytest.mark.rule("CH-7")
def test_missed_message_is_found_by_the_periodic_check() -> None:
    driver = ProtocolDriver(chat_at(4), check_ms=1000).begin(ListedChat("tea", 4))
    assert driver.advance(999) == []
    wanted = [driver.protocol.wants_list]
    driver.advance(1)
    assert [*wanted, driver.protocol.wants_list] == [False, True]
    driver.receive_list(ListedChat("tea", 5))
    assert driver.take_sent()[0]["last_acked_sequence"] == 4


def test_message_of_an_unknown_chat_starts_a_sync() -> None:
    driver = ProtocolDriver().begin()
    driver.receive_messages(3)
    (request,) = driver.advance(1000)
    assert (request["chat_id"], request["last_acked_sequence"]) == ("tea", 0)


# --- sends


@pytest.mark.rule("CH-12")
def test_own_message_is_stored_with_its_ack_despite_a_gap() -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 0))
    driver.protocol.enqueue([entry(1)], 0)
    (request,) = driver.take_sent()
    driver.receive_ack(request, 3)
    changes = driver.changes
    (kept,) = changes.messages
    assert (kept.sequence, kept.sender_id, kept.content, kept.message_id) == (3, ME, "text 1", "msg_3")
    assert isinstance(changes.updates[0], Progress)
    assert driver.chat().complete_to == 0
    assert driver.advance(100)[0]["type"] == "sync_request"


def test_messages_are_sent_in_order_up_to_in_flight_max() -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 0))
    driver.protocol.enqueue([entry(1), entry(2), entry(3)], 0)
    (request,) = driver.take_sent()
    driver.receive_ack(request, 1)
    driver.receive_ack(request, 1)  # repeated
    (request,) = driver.take_sent()
    assert request["client_message_id"] == "id-2"
    driver = ProtocolDriver(chat_at(0), in_flight_max=2).begin(ListedChat("tea", 0))
    driver.protocol.enqueue([entry(1), entry(2), entry(3)], 0)
    assert [one["client_message_id"] for one in driver.take_sent()] == ["id-1", "id-2"]


@pytest.mark.rule("CH-12")
@pytest.mark.parametrize("code", ["RATE_LIMITED", "BUSY", "UNAVAILABLE", "READ_ONLY", "QUOTA_EXCEEDED"])
def test_temporary_refusal_is_retried_with_growing_pauses(code: str) -> None:
    driver = ProtocolDriver(chat_at(0), pause_ms_min=100, pause_ms_max=1000).begin(ListedChat("tea", 0))
    driver.protocol.enqueue([entry(1), entry(2)], 0)
    pauses = []
    for _ in range(5):
        (request,) = driver.take_sent() or driver.advance((driver.protocol.next_at_ms or 0) - driver.now_ms)
        assert request["client_message_id"] == "id-1"
        driver.receive("error", request_id=request["request_id"], code=code, message="", retry_after_ms=60)
        pauses.append((driver.protocol.next_at_ms or 0) - driver.now_ms)
    assert all(pause >= 60 for pause in pauses)
    assert pauses[4] > 400
    (request,) = driver.advance(pauses[-1])
    driver.receive_ack(request, 1)
    assert [one["client_message_id"] for one in driver.take_sent()] == ["id-2"]


@pytest.mark.parametrize("code", ["NOT_A_MEMBER", "INVALID_MESSAGE", "MESSAGE_TOO_LARGE", "SOMETHING_NEW"])
def test_permanent_refusal_does_not_block_the_next_message(code: str) -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 0))
    driver.protocol.enqueue([entry(1), entry(2)], 0)
    (request,) = driver.take_sent()
    driver.receive("error", request_id=request["request_id"], code=code, message="no")
    assert driver.changes.settled[0].outcome == Refused(code, "no", was_tried=False)
    assert [one["client_message_id"] for one in driver.take_sent()] == ["id-2"]


def test_largest_message_in_flight_is_refused_if_a_frame_is_too_large() -> None:
    driver = ProtocolDriver(chat_at(0), chat_at(0, chat_id="tee")).begin(ListedChat("tea", 0), ListedChat("tee", 0))
    driver.protocol.enqueue([entry(1), replace(entry(2, "tee"), content="é" * 10), entry(3, "tee")], 0)
    assert [one["client_message_id"] for one in driver.take_sent()] == ["id-1", "id-2"]
    driver.protocol.disconnect(CLOSE_TOO_LARGE)
    (settled,) = driver.changes.settled
    assert (settled.entry.client_message_id, settled.outcome.code) == ("id-2", "MESSAGE_TOO_LARGE")  # type: ignore[union-attr]
    driver.begin(ListedChat("tea", 0), ListedChat("tee", 0))
    assert [one["client_message_id"] for one in driver.take_sent()] == ["id-1", "id-3"]
    driver.protocol.disconnect(1001)
    assert driver.changes.settled == []
    ProtocolDriver(chat_at(0)).protocol.disconnect(CLOSE_TOO_LARGE)  # nothing is in flight


def test_refusal_after_an_earlier_attempt_is_marked_as_tried() -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 0))
    driver.protocol.enqueue([entry(1)], 0)
    driver.protocol.disconnect()
    driver.begin()
    (request,) = driver.take_sent()
    driver.receive("error", request_id=request["request_id"], code="NOT_A_MEMBER", message="no")
    assert driver.changes.settled[0].outcome == Refused("NOT_A_MEMBER", "no", was_tried=True)
    assert not driver.chat().is_member


@pytest.mark.rule("CH-12")
def test_sync_looks_for_an_expired_message_before_it_is_refused() -> None:
    driver = ProtocolDriver(chat_at(0), remembered_ms=1000)
    driver.now_ms = 1000
    driver.protocol.enqueue([entry(1), entry(2), entry(3, accepted_at_ms=1)], 0, was_tried=True)
    driver.begin(ListedChat("tea", 1))
    (request,) = driver.take_sent()
    mine = {**message(1), "sender_id": ME, "client_message_id": "id-1", "content": "text 1"}
    driver.receive(
        "message_batch", request_id=request["request_id"], chat_id="tea", messages=[mine], has_more=False,
        next_sequence=1,
    )  # fmt: skip
    assert [one["client_message_id"] for one in driver.take_sent()] == ["id-3"]
    first, second = driver.changes.settled
    assert isinstance(first.outcome, Sent)
    assert isinstance(second.outcome, Refused)
    assert (second.entry.number, second.outcome.code, second.outcome.was_tried) == (2, EXPIRED, True)


def test_reused_id_loads_the_stored_message() -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 0))
    driver.protocol.enqueue([entry(1)], 0)
    (request,) = driver.take_sent()
    driver.receive_ack(request, 1, duplicate=True, content_mismatch=True)
    assert driver.changes.messages == []
    (request,) = driver.advance(100)
    driver.receive_page(request, 1)
    assert driver.changes.messages[0].content == "text 1"


def test_sender_does_not_show_its_erased_message() -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 0))
    driver.protocol.enqueue([entry(1)], 0)
    driver.receive_ack(driver.take_sent()[0], 1, duplicate=True, erased=True)
    assert driver.changes.messages[0].content is None


# --- acks


@pytest.mark.rule("CH-12")
def test_acks_are_batched_and_repeated_after_a_lost_connection() -> None:
    driver = ProtocolDriver(chat_at(5), ack_wait_ms=50).begin(ListedChat("tea", 5))
    for sequence in (1, 2, 3):
        driver.protocol.mark_received("tea", sequence, 0, driver.now_ms)
    assert driver.changes.chats["tea"] == ("tea", True, 5, 5, 3, 0)
    assert driver.advance(49) == []
    (ack,) = driver.advance(1)
    assert (ack["type"], ack["last_acked_sequence"]) == ("ack", 3)
    driver.protocol.mark_received("tea", 2, 0, driver.now_ms)
    assert driver.advance(1000) == []
    driver.protocol.disconnect()
    driver.begin(ListedChat("tea", 5, 1))
    assert driver.advance(50)[0]["last_acked_sequence"] == 3
    driver.protocol.disconnect()
    driver.begin(ListedChat("tea", 5, 4))  # a different device has acknowledged up to 4
    assert driver.advance(50) == []
    driver.protocol.mark_received("tea", 5, 0, driver.now_ms)
    driver.protocol.flush()
    assert driver.take_sent()[0]["last_acked_sequence"] == 5


def test_position_of_an_earlier_history_is_ignored() -> None:
    driver = ProtocolDriver(chat_at(5), epoch="e0").begin(ListedChat("tea", 0))
    driver.protocol.mark_received("tea", 5, 0, 0)
    assert driver.chat().received_to == 0


def test_refused_ack_requests_the_chat_list() -> None:
    driver = ProtocolDriver(chat_at(5), ack_wait_ms=1).begin(ListedChat("tea", 5))
    driver.protocol.mark_received("tea", 5, 0, 0)
    (ack,) = driver.advance(1)
    driver.receive("error", request_id=ack["request_id"], code="INVALID_ACK", message="beyond the last")
    assert driver.protocol.wants_list
    driver.receive_list(ListedChat("tea", 3))
    (request,) = driver.take_sent()
    driver.receive(
        "message_batch", request_id=request["request_id"], chat_id="tea", messages=[], has_more=False, next_sequence=3,
        cursor_ahead=True,
    )  # fmt: skip
    changes = driver.changes
    assert changes.reset_chats == ["tea"]
    assert HistoryChange(EPOCH, EPOCH, "tea") in changes.updates
    assert driver.take_sent()[0]["last_acked_sequence"] == 0


# --- chats and members


def test_chats_and_members_are_added_and_removed() -> None:
    driver = ProtocolDriver(chat_at(1), chat_at(1, chat_id="old")).begin(ListedChat("tea", 1))
    assert driver.changes.updates == [Membership("old", ME, present=False)]
    driver.take_sent()
    driver.receive("membership", chat_id="new", user_id=ME, present=True)
    assert driver.take_sent()[0]["chat_id"] == "new"
    driver.receive("membership", chat_id="new", user_id=ME, present=True)
    driver.receive("membership", chat_id="tea", user_id="user:bob", present=True)
    driver.receive("delivery", chat_id="tea", user_id="user:bob", last_acked_sequence=1)
    driver.receive("membership", chat_id="tea", user_id=ME, present=False)
    changes = driver.changes
    assert changes.updates == [
        Membership("new", ME, present=True),
        Membership("tea", "user:bob", present=True),
        Delivery("tea", "user:bob", 1),
        Membership("tea", ME, present=False),
    ]
    assert changes.watermarks == [("tea", "user:bob", 0), ("tea", "user:bob", 1)]


@pytest.mark.rule("CH-19")
def test_own_role_follows_frames_and_the_list_of_chats() -> None:
    driver = ProtocolDriver(chat_at(1)).begin(ListedChat("tea", 1, role="member"))
    chat = driver.protocol.chats["tea"]
    assert (chat.role, driver.changes.updates) == ("member", [])
    for role in ("owner", "owner"):  # the second frame changes nothing
        driver.receive("membership", chat_id="tea", user_id=ME, present=True, role=role)
    driver.receive("membership", chat_id="tea", user_id=ME, present=True)  # sent by a server without roles
    assert (chat.role, driver.changes.updates) == ("owner", [Membership("tea", ME, present=True, role="owner")])
    driver.protocol.apply_list([ListedChat("tea", 1, role="member")], 0)  # changed while the client was disconnected
    assert driver.changes.updates == [Membership("tea", ME, present=True, role="member")]
    driver.receive("membership", chat_id="tea", user_id=ME, present=False)
    assert chat.role is None


@pytest.mark.rule("CH-8")
def test_returning_member_keeps_the_acknowledged_sequence() -> None:
    driver = ProtocolDriver(chat_at(3)).begin(ListedChat("tea", 3))
    driver.receive("membership", chat_id="tea", user_id="user:bob", present=False)
    driver.receive("membership", chat_id="tea", user_id="user:bob", present=True, last_acked_sequence=2)
    assert driver.changes.watermarks == [("tea", "user:bob", None), ("tea", "user:bob", 2)]


def test_membership_change_during_a_list_request_is_kept() -> None:
    driver = ProtocolDriver().begin()
    driver.protocol.start_list()
    driver.receive("membership", chat_id="new", user_id=ME, present=True)
    driver.protocol.apply_list([], 0)
    assert driver.chat("new").is_member
    driver.protocol.start_list()
    driver.receive("membership", chat_id="new", user_id=ME, present=False)
    driver.protocol.apply_list([ListedChat("new", 0)], 0)
    assert not driver.chat("new").is_member


def test_message_to_a_chat_without_membership_is_refused_by_the_server() -> None:
    driver = ProtocolDriver().begin()
    driver.protocol.enqueue([entry(1)], 0)
    (request,) = driver.take_sent()
    assert request["type"] == "sync_request"
    driver.receive("error", request_id=request["request_id"], code="NOT_A_MEMBER", message="no")
    assert driver.changes.settled[0].outcome == Refused("NOT_A_MEMBER", "no")
    assert driver.protocol.is_live
    driver.receive("membership", chat_id="tea", user_id=ME, present=True)
    driver.take_sent()
    driver.protocol.enqueue([entry(2)], 0)
    driver.receive("membership", chat_id="tea", user_id=ME, present=False)


# --- end of a connection


@pytest.mark.rule("CH-12")
def test_changed_epoch_resets_the_chats() -> None:
    driver = ProtocolDriver(chat_at(5, 3), epoch="e0")
    driver.protocol.enqueue([entry(1)], 0, was_tried=True)
    driver.begin(ListedChat("tea", 2))
    changes = driver.changes
    assert changes.reset_chats == ["tea"]
    assert changes.user_and_epoch == (ME, EPOCH)
    assert changes.updates[0] == HistoryChange("e0", EPOCH)
    assert changes.chats["tea"] == ("tea", True, 0, 0, 0, 1)
    assert driver.take_sent()[0]["last_acked_sequence"] == 0
    assert len(driver.chat().queue) == 1


def test_store_of_a_different_user_is_refused() -> None:
    driver = ProtocolDriver(user_id="user:bob")
    driver.protocol.connect("ann", 0)
    with pytest.raises(ServerRefusedError, match="WRONG_USER"):
        driver.receive("connected", user_id=ME, epoch=EPOCH)
    assert driver.protocol.phase is ChatPhase.CONNECTING


def test_connection_closing_sets_the_reconnect_delay() -> None:
    driver = ProtocolDriver().begin()
    with pytest.raises(LostError, match="stopping"):
        driver.receive("connection_closing", reason="stopping", reconnect_delay_ms=700)
    driver.protocol.disconnect()
    assert driver.protocol.reconnect_ms == 700
    assert driver.protocol.next_at_ms is None


@pytest.mark.parametrize("code", ["AUTH_FAILED", "SLOW_CONSUMER", "SERVER_STOPPING", "HISTORY_CHANGED"])
def test_fatal_errors_end_the_connection(code: str) -> None:
    driver = ProtocolDriver().begin()
    with pytest.raises(ServerRefusedError, match=code):
        driver.receive("error", code=code, message="")
    driver.protocol.enqueue([entry(1)], 0)
    (request,) = driver.take_sent()
    with pytest.raises(ServerRefusedError, match=code):
        driver.receive("error", request_id=request["request_id"], code=code, message="")
    driver.protocol.connect("ann", 0)
    with pytest.raises(ServerRefusedError, match="INVALID_REQUEST"):
        driver.receive("error", code="INVALID_REQUEST", message="")


def test_temporarily_refused_sync_is_retried() -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 2))
    (request,) = driver.take_sent()
    driver.receive("error", request_id=request["request_id"], code="BUSY", message="", retry_after_ms=70)
    driver.receive_messages(3)  # does not cancel the retry
    assert driver.advance(60) == []
    assert not driver.protocol.is_live
    assert driver.advance(200)[0]["type"] == "sync_request"


def test_repeated_and_outdated_frames_are_ignored() -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 1))
    (request,) = driver.take_sent()
    driver.receive_page(request, 1)
    before = driver.changes.messages
    driver.receive_page(request, 1)
    driver.receive("connected", user_id=ME, epoch="e9")
    driver.receive("error", code="INVALID_REQUEST", message="already connected")
    driver.receive("error", request_id="77", code="BUSY", message="")
    driver.receive("pong")
    driver.receive("something_new", members=[1])
    assert len(before) == 1
    assert not driver.changes
    assert driver.protocol.is_live
    driver.protocol.disconnect()
    driver.receive_messages(9)
    assert not driver.changes


@pytest.mark.parametrize(
    "data", ["", "x", "[]", '{"type": 1}', '{"type":"message"}', b"\xff", '{"type":"message_batch"}', "[" * 9999]
)
def test_malformed_frame_is_a_protocol_error(data: str | bytes) -> None:
    driver = ProtocolDriver().begin()
    with pytest.raises(ProtocolError):
        driver.protocol.receive(data, 0)


@pytest.mark.parametrize(
    ("sequences", "has_more", "following"),
    [((2, 1), False, 2), ((1, 1), False, 1), ((1, 2), False, 1), ((), True, 0), ((0,), False, 1)],
)
def test_malformed_page_is_a_protocol_error(sequences: tuple[int, ...], has_more: bool, following: int) -> None:
    driver = ProtocolDriver(chat_at(0)).begin(ListedChat("tea", 1))
    (request,) = driver.take_sent()
    with pytest.raises(ProtocolError):
        driver.receive_page(request, *sequences, has_more=has_more, following=following)


def test_invalid_limits_are_refused() -> None:
    for wrong in ({"page_messages": 501}, {"pause_ms_min": 2, "pause_ms_max": 1}, {"check_ms": 0}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            ChatLimits(**wrong)

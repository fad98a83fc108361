"""What the client of chats decides, frame by frame."""

import json
from random import Random
from typing import Any

import pytest

from oncelog.client.chat.changes import Changes
from oncelog.client.chat.chats import Chat
from oncelog.client.chat.limits import ChatLimits
from oncelog.client.chat.protocol import Phase, Protocol
from oncelog.client.chat.values import (
    EXPIRED,
    Arrived,
    Delivery,
    Entry,
    HistoryChange,
    Listed,
    Member,
    Membership,
    Progress,
    Refused,
    Sent,
)
from oncelog.errors import LostError, ProtocolError, ServerRefusedError, SettingsError

ME = "user:ann"
EPOCH = "e1"
NEVER = 10**9


def entry(number: int, chat_id: str = "tea", accepted_at_ms: int = 0) -> Entry:
    return Entry(number, f"id-{number}", chat_id, f"text {number}", "text/plain", accepted_at_ms)


class Talk:
    """A protocol, and a server that says what a test says."""

    def __init__(self, *chats: Chat, user_id: str = ME, epoch: str = EPOCH, **limits: Any) -> None:
        self.limits = ChatLimits(**{"check_ms": NEVER, **limits})
        self.protocol = Protocol("phone", user_id, epoch, chats, self.limits, Random(0))
        self.now_ms = 0

    def begin(self, *listed: Listed) -> "Talk":
        self.protocol.begin("ann", 0)
        assert self.said() == [{"type": "connect", "token": "ann", "device_id": "phone"}]
        self.hear("connected", user_id=ME, epoch=EPOCH, heartbeat_ms=1)
        assert self.protocol.wants_list
        self.listed(*listed)
        return self

    def listed(self, *listed: Listed) -> None:
        self.protocol.list_asked()
        self.protocol.listed(listed, self.now_ms)

    def said(self) -> list[dict[str, Any]]:
        frames = [json.loads(one) for one in self.protocol.outgoing]
        self.protocol.outgoing.clear()
        return frames

    def hear(self, kind: str, **members: Any) -> None:
        self.protocol.receive(json.dumps({"type": kind, **members}), self.now_ms)

    def live(self, *sequences: int, chat_id: str = "tea", **members: Any) -> None:
        for sequence in sequences:
            self.hear("message", **{**message(sequence, chat_id), **members})

    def batch(
        self, request: dict[str, Any], *sequences: int, has_more: bool = False, following: int | None = None
    ) -> None:
        after = request["last_acked_sequence"]
        self.hear(
            "message_batch",
            request_id=request["request_id"],
            chat_id=request["chat_id"],
            messages=[message(one, request["chat_id"]) for one in sequences],
            has_more=has_more,
            next_sequence=following if following is not None else max((after, *sequences)),
            last_sequence=99,
        )

    def ack(self, request: dict[str, Any], sequence: int, **members: Any) -> None:
        self.hear("send_message_ack", **{**acked(request, sequence), **members})

    def wait(self, ms: int) -> list[dict[str, Any]]:
        self.now_ms += ms
        self.protocol.tick(self.now_ms)
        return self.said()

    @property
    def changes(self) -> Changes:
        return self.protocol.take_changes()

    def chat(self, chat_id: str = "tea") -> Chat:
        return self.protocol.chats[chat_id]


def message(sequence: int, chat_id: str = "tea") -> dict[str, Any]:
    return {
        "message_id": f"msg_{sequence}", "chat_id": chat_id, "sequence": sequence, "sender_id": "user:bob",
        "client_message_id": f"theirs-{sequence}", "content": f"text {sequence}", "content_type": "text/plain",
        "created_at": "2026-01-30T14:30:00.000Z",
    }  # fmt: skip


def acked(request: dict[str, Any], sequence: int) -> dict[str, Any]:
    asked = {name: request[name] for name in ("request_id", "client_message_id", "chat_id")}
    created = "2026-01-30T14:30:00.000Z"
    return {**asked, "message_id": f"msg_{sequence}", "sequence": sequence, "created_at": created, "duplicate": False}


def at(complete_to: int, received_to: int = 0, chat_id: str = "tea") -> Chat:
    return Chat(chat_id, complete_to=complete_to, fetched_to=complete_to, received_to=received_to)


# --- catching up


@pytest.mark.rule("CH-12")
def test_a_catch_up_comes_before_what_is_sent_and_is_not_shown_half_done() -> None:
    talk = Talk(at(2), page_messages=2)
    talk.protocol.offer([entry(1)], 0, was_tried=True)
    talk.begin(Listed("tea", 5))
    (first,) = talk.said()
    assert (first["type"], first["last_acked_sequence"], first["limit"], first["epoch"]) == (
        "sync_request",
        2,
        2,
        EPOCH,
    )
    talk.batch(first, 3, 4, has_more=True)
    (second,) = talk.said()
    assert (second["type"], second["last_acked_sequence"]) == ("sync_request", 4)
    talk.live(3)  # late, and doubled
    assert talk.chat().complete_to == 2
    kept = talk.changes
    assert [one.sequence for one in kept.messages if one.sequence != 3] == [4]
    assert kept.chats["tea"] == ("tea", True, 2, 4, 0)
    assert not [one for one in kept.updates if isinstance(one, Arrived)]
    talk.batch(second, 5)
    assert [one["type"] for one in talk.said()] == ["send_message"]
    assert talk.chat().complete_to == 5
    assert Arrived("tea", 5) in talk.changes.updates


@pytest.mark.rule("CH-12")
def test_a_catch_up_that_was_cut_goes_on_where_it_was() -> None:
    talk = Talk(at(0)).begin(Listed("tea", 9))
    talk.batch(talk.said()[0], 1, 2, has_more=True)
    talk.protocol.lost()
    talk.begin(Listed("tea", 9))
    assert talk.said()[0]["last_acked_sequence"] == 2


@pytest.mark.rule("CH-12")
def test_what_an_earlier_attempt_has_brought_there_is_not_sent_again() -> None:
    talk = Talk(at(0))
    talk.protocol.offer([entry(1), entry(2)], 0, was_tried=True)
    talk.begin(Listed("tea", 1))
    (request,) = talk.said()
    mine = {**message(1), "sender_id": ME, "client_message_id": "id-1", "content": "text 1"}
    talk.hear(
        "message_batch", request_id=request["request_id"], chat_id="tea", messages=[mine], has_more=False,
        next_sequence=1,
    )  # fmt: skip
    assert [one["client_message_id"] for one in talk.said()] == ["id-2"]
    (settled,) = talk.changes.settled
    assert settled.outcome == Sent("msg_1", 1, "2026-01-30T14:30:00.000Z", duplicate=True)


def test_a_chat_in_which_nothing_is_new_needs_no_sync() -> None:
    talk = Talk(at(5))
    talk.protocol.offer([entry(1)], 0)
    talk.begin(Listed("tea", 5))
    assert [one["type"] for one in talk.said()] == ["send_message"]
    assert talk.protocol.is_live


def test_so_many_chats_are_caught_up_with_at_a_time() -> None:
    talk = Talk(syncs_max=2).begin(*(Listed(f"chat {number}", 1) for number in range(5)))
    asked = talk.said()
    assert len(asked) == 2
    talk.batch(asked[0], 1)
    assert [one["chat_id"] for one in talk.said()] == ["chat 2"]
    assert not talk.protocol.is_live


# --- live messages


@pytest.mark.rule("CH-7")
def test_messages_in_any_order_are_put_in_order_and_repeats_dropped() -> None:
    talk = Talk(at(0)).begin(Listed("tea", 0))
    talk.live(2, 2, 3, 1, 1, 3)
    assert talk.chat().complete_to == 3
    assert [one.sequence for one in talk.changes.messages] == [2, 3, 1]
    assert talk.wait(1000) == []


@pytest.mark.rule("CH-7")
@pytest.mark.rule("CH-12")
def test_what_is_missing_is_asked_for_and_what_does_not_exist_holds_nothing_back() -> None:
    talk = Talk(at(4), gap_wait_ms=100).begin(Listed("tea", 4))
    talk.live(7)
    assert talk.protocol.next_at_ms == 100
    assert talk.chat().complete_to == 4
    assert talk.wait(99) == []
    (request,) = talk.wait(1)
    assert request["last_acked_sequence"] == 4
    talk.live(8)
    talk.batch(request, 6, 7)  # there is no 5
    assert talk.chat().complete_to == 8
    assert talk.wait(1000) == []


@pytest.mark.rule("CH-7")
def test_what_comes_late_is_not_asked_for() -> None:
    talk = Talk(at(4), gap_wait_ms=100).begin(Listed("tea", 4))
    talk.live(6)
    talk.now_ms = 50
    talk.live(5)
    assert talk.chat().complete_to == 6
    assert talk.wait(1000) == []


def test_more_than_may_wait_comes_again_with_the_sync() -> None:
    talk = Talk(at(0), ahead_max=2).begin(Listed("tea", 0))
    talk.live(3, 4, 5, 6)
    assert [one.sequence for one in talk.changes.messages] == [3, 4]
    (request,) = talk.wait(100)
    talk.live(8)
    talk.batch(request, 1, 2, 3, 4, 5, 6)
    assert talk.chat().complete_to == 6
    (request,) = talk.wait(100)
    assert request["last_acked_sequence"] == 6


@pytest.mark.rule("CH-7")
def test_a_message_that_was_never_delivered_is_found_by_the_check() -> None:
    talk = Talk(at(4), check_ms=1000).begin(Listed("tea", 4))
    assert talk.wait(999) == []
    wanted = [talk.protocol.wants_list]
    talk.wait(1)
    assert [*wanted, talk.protocol.wants_list] == [False, True]
    talk.listed(Listed("tea", 5))
    assert talk.said()[0]["last_acked_sequence"] == 4


def test_a_message_of_a_chat_that_nobody_told_us_of() -> None:
    talk = Talk().begin()
    talk.live(3)
    (request,) = talk.wait(1000)
    assert (request["chat_id"], request["last_acked_sequence"]) == ("tea", 0)


# --- sending


@pytest.mark.rule("CH-12")
def test_an_own_message_is_there_with_its_ack_though_others_are_missing_before_it() -> None:
    talk = Talk(at(0)).begin(Listed("tea", 0))
    talk.protocol.offer([entry(1)], 0)
    (request,) = talk.said()
    talk.ack(request, 3)
    changes = talk.changes
    (kept,) = changes.messages
    assert (kept.sequence, kept.sender_id, kept.content, kept.message_id) == (3, ME, "text 1", "msg_3")
    assert isinstance(changes.updates[0], Progress)
    assert talk.chat().complete_to == 0
    assert talk.wait(100)[0]["type"] == "sync_request"


def test_one_at_a_time_and_in_order_or_more_if_that_is_wanted() -> None:
    talk = Talk(at(0)).begin(Listed("tea", 0))
    talk.protocol.offer([entry(1), entry(2), entry(3)], 0)
    (request,) = talk.said()
    talk.ack(request, 1)
    talk.ack(request, 1)  # doubled
    (request,) = talk.said()
    assert request["client_message_id"] == "id-2"
    talk = Talk(at(0), in_flight_max=2).begin(Listed("tea", 0))
    talk.protocol.offer([entry(1), entry(2), entry(3)], 0)
    assert [one["client_message_id"] for one in talk.said()] == ["id-1", "id-2"]


@pytest.mark.rule("CH-12")
@pytest.mark.parametrize("code", ["RATE_LIMITED", "BUSY", "UNAVAILABLE", "READ_ONLY", "QUOTA_EXCEEDED"])
def test_who_is_sent_away_waits_as_long_as_the_server_says_and_longer_each_time(code: str) -> None:
    talk = Talk(at(0), pause_ms_min=100, pause_ms_max=1000).begin(Listed("tea", 0))
    talk.protocol.offer([entry(1), entry(2)], 0)
    pauses = []
    for _ in range(5):
        (request,) = talk.said() or talk.wait((talk.protocol.next_at_ms or 0) - talk.now_ms)
        assert request["client_message_id"] == "id-1"
        talk.hear("error", request_id=request["request_id"], code=code, message="", retry_after_ms=60)
        pauses.append((talk.protocol.next_at_ms or 0) - talk.now_ms)
    assert all(pause >= 60 for pause in pauses)
    assert pauses[4] > 400
    (request,) = talk.wait(pauses[-1])
    talk.ack(request, 1)
    assert [one["client_message_id"] for one in talk.said()] == ["id-2"]


@pytest.mark.parametrize("code", ["NOT_A_MEMBER", "INVALID_MESSAGE", "MESSAGE_TOO_LARGE", "SOMETHING_NEW"])
def test_what_is_refused_for_good_does_not_hold_back_the_next(code: str) -> None:
    talk = Talk(at(0)).begin(Listed("tea", 0))
    talk.protocol.offer([entry(1), entry(2)], 0)
    (request,) = talk.said()
    talk.hear("error", request_id=request["request_id"], code=code, message="no")
    assert talk.changes.settled[0].outcome == Refused(code, "no", was_tried=False)
    assert [one["client_message_id"] for one in talk.said()] == ["id-2"]


def test_what_was_sent_before_may_be_there_though_it_is_refused_now() -> None:
    talk = Talk(at(0)).begin(Listed("tea", 0))
    talk.protocol.offer([entry(1)], 0)
    talk.protocol.lost()
    talk.begin()
    (request,) = talk.said()
    talk.hear("error", request_id=request["request_id"], code="NOT_A_MEMBER", message="no")
    assert talk.changes.settled[0].outcome == Refused("NOT_A_MEMBER", "no", was_tried=True)
    assert not talk.chat().is_member


@pytest.mark.rule("CH-12")
def test_what_is_older_than_ids_are_remembered_is_looked_for_and_then_told() -> None:
    talk = Talk(at(0), remembered_ms=1000)
    talk.now_ms = 1000
    talk.protocol.offer([entry(1), entry(2), entry(3, accepted_at_ms=1)], 0, was_tried=True)
    talk.begin(Listed("tea", 1))
    (request,) = talk.said()
    mine = {**message(1), "sender_id": ME, "client_message_id": "id-1", "content": "text 1"}
    talk.hear(
        "message_batch", request_id=request["request_id"], chat_id="tea", messages=[mine], has_more=False,
        next_sequence=1,
    )  # fmt: skip
    assert [one["client_message_id"] for one in talk.said()] == ["id-3"]
    first, second = talk.changes.settled
    assert isinstance(first.outcome, Sent)
    assert isinstance(second.outcome, Refused)
    assert (second.entry.number, second.outcome.code, second.outcome.was_tried) == (2, EXPIRED, True)


def test_an_id_that_was_used_for_something_else_brings_what_is_there() -> None:
    talk = Talk(at(0)).begin(Listed("tea", 0))
    talk.protocol.offer([entry(1)], 0)
    (request,) = talk.said()
    talk.ack(request, 1, duplicate=True, content_mismatch=True)
    assert talk.changes.messages == []
    (request,) = talk.wait(100)
    talk.batch(request, 1)
    assert talk.changes.messages[0].content == "text 1"


def test_what_was_erased_is_not_shown_by_who_has_sent_it() -> None:
    talk = Talk(at(0)).begin(Listed("tea", 0))
    talk.protocol.offer([entry(1)], 0)
    talk.ack(talk.said()[0], 1, duplicate=True, erased=True)
    assert talk.changes.messages[0].content is None


# --- acknowledging


@pytest.mark.rule("CH-12")
def test_what_is_received_is_acknowledged_together_and_again_where_it_may_be_lost() -> None:
    talk = Talk(at(5), ack_wait_ms=50).begin(Listed("tea", 5))
    for sequence in (1, 2, 3):
        talk.protocol.received("tea", sequence, 0, talk.now_ms)
    assert talk.changes.chats["tea"] == ("tea", True, 5, 5, 3)
    assert talk.wait(49) == []
    (ack,) = talk.wait(1)
    assert (ack["type"], ack["last_acked_sequence"]) == ("ack", 3)
    talk.protocol.received("tea", 2, 0, talk.now_ms)
    assert talk.wait(1000) == []
    talk.protocol.lost()
    talk.begin(Listed("tea", 5, 1))
    assert talk.wait(50)[0]["last_acked_sequence"] == 3
    talk.protocol.lost()
    talk.begin(Listed("tea", 5, 4))  # another device was further
    assert talk.wait(50) == []
    talk.protocol.received("tea", 5, 0, talk.now_ms)
    talk.protocol.flush()
    assert talk.said()[0]["last_acked_sequence"] == 5


def test_what_was_received_of_another_history_does_not_count() -> None:
    talk = Talk(at(5), epoch="e0").begin(Listed("tea", 0))
    talk.protocol.received("tea", 5, 0, 0)
    assert talk.chat().received_to == 0


def test_an_acknowledgement_that_is_refused_has_the_list_looked_at() -> None:
    talk = Talk(at(5), ack_wait_ms=1).begin(Listed("tea", 5))
    talk.protocol.received("tea", 5, 0, 0)
    (ack,) = talk.wait(1)
    talk.hear("error", request_id=ack["request_id"], code="INVALID_ACK", message="beyond the last")
    assert talk.protocol.wants_list
    talk.listed(Listed("tea", 3))
    (request,) = talk.said()
    talk.hear(
        "message_batch", request_id=request["request_id"], chat_id="tea", messages=[], has_more=False, next_sequence=3,
        cursor_ahead=True,
    )  # fmt: skip
    changes = talk.changes
    assert changes.reset_chats == ["tea"]
    assert HistoryChange(EPOCH, EPOCH, "tea") in changes.updates
    assert talk.said()[0]["last_acked_sequence"] == 0


# --- chats and members


def test_chats_come_and_go() -> None:
    talk = Talk(at(1), at(1, chat_id="old")).begin(Listed("tea", 1))
    assert talk.changes.updates == [Membership("old", ME, present=False)]
    talk.said()
    talk.hear("membership", chat_id="new", user_id=ME, present=True)
    assert talk.said()[0]["chat_id"] == "new"
    talk.hear("membership", chat_id="new", user_id=ME, present=True)
    talk.hear("membership", chat_id="tea", user_id="user:bob", present=True)
    talk.hear("delivery", chat_id="tea", user_id="user:bob", last_acked_sequence=1)
    talk.hear("membership", chat_id="tea", user_id=ME, present=False)
    changes = talk.changes
    assert changes.updates == [
        Membership("new", ME, present=True),
        Membership("tea", "user:bob", present=True),
        Delivery("tea", "user:bob", 1),
        Membership("tea", ME, present=False),
    ]
    assert changes.watermarks == [("tea", "user:bob", 0), ("tea", "user:bob", 1)]


@pytest.mark.rule("CH-8")
def test_whoever_comes_back_has_received_what_he_had() -> None:
    talk = Talk(at(3)).begin(Listed("tea", 3))
    talk.hear("membership", chat_id="tea", user_id="user:bob", present=False)
    talk.hear("membership", chat_id="tea", user_id="user:bob", present=True, last_acked_sequence=2)
    assert talk.changes.watermarks == [("tea", "user:bob", None), ("tea", "user:bob", 2)]
    talk.protocol.counted("tea", (Member(ME, 3),))
    assert talk.changes.members == {"tea": (Member(ME, 3),)}


def test_a_chat_that_was_joined_while_the_list_was_on_its_way_is_not_left() -> None:
    talk = Talk().begin()
    talk.protocol.list_asked()
    talk.hear("membership", chat_id="new", user_id=ME, present=True)
    talk.protocol.listed([], 0)
    assert talk.chat("new").is_member
    talk.protocol.list_asked()
    talk.hear("membership", chat_id="new", user_id=ME, present=False)
    talk.protocol.listed([Listed("new", 0)], 0)
    assert not talk.chat("new").is_member


def test_messages_of_a_chat_that_we_are_not_in_are_refused_by_the_server_itself() -> None:
    talk = Talk().begin()
    talk.protocol.offer([entry(1)], 0)
    (request,) = talk.said()
    assert request["type"] == "sync_request"
    talk.hear("error", request_id=request["request_id"], code="NOT_A_MEMBER", message="no")
    assert talk.changes.settled[0].outcome == Refused("NOT_A_MEMBER", "no")
    assert talk.protocol.is_live
    talk.hear("membership", chat_id="tea", user_id=ME, present=True)
    talk.said()
    talk.protocol.offer([entry(2)], 0)
    talk.hear("membership", chat_id="tea", user_id=ME, present=False)


# --- what ends a connection


@pytest.mark.rule("CH-12")
def test_another_epoch_begins_again() -> None:
    talk = Talk(at(5, 3), epoch="e0")
    talk.protocol.offer([entry(1)], 0, was_tried=True)
    talk.begin(Listed("tea", 2))
    changes = talk.changes
    assert changes.is_reset
    assert changes.identity == (ME, EPOCH)
    assert changes.updates[0] == HistoryChange("e0", EPOCH)
    assert changes.chats["tea"] == ("tea", True, 0, 0, 0)
    assert talk.said()[0]["last_acked_sequence"] == 0
    assert talk.protocol.pending == 1


def test_the_file_of_another_user_is_not_used() -> None:
    talk = Talk(user_id="user:bob")
    talk.protocol.begin("ann", 0)
    with pytest.raises(ServerRefusedError, match="WRONG_USER"):
        talk.hear("connected", user_id=ME, epoch=EPOCH)
    assert talk.protocol.phase is Phase.CONNECTING


def test_a_server_that_closes_says_when_to_come_back() -> None:
    talk = Talk().begin()
    with pytest.raises(LostError, match="stopping"):
        talk.hear("connection_closing", reason="stopping", reconnect_delay_ms=700)
    assert talk.protocol.closing_ms == 700
    talk.protocol.lost()
    assert talk.protocol.closing_ms == 0
    assert talk.protocol.next_at_ms is None


@pytest.mark.parametrize("code", ["AUTH_FAILED", "SLOW_CONSUMER", "SERVER_STOPPING", "HISTORY_CHANGED"])
def test_errors_that_end_a_connection(code: str) -> None:
    talk = Talk().begin()
    with pytest.raises(ServerRefusedError, match=code):
        talk.hear("error", code=code, message="")
    talk.protocol.offer([entry(1)], 0)
    (request,) = talk.said()
    with pytest.raises(ServerRefusedError, match=code):
        talk.hear("error", request_id=request["request_id"], code=code, message="")
    talk.protocol.begin("ann", 0)
    with pytest.raises(ServerRefusedError, match="INVALID_REQUEST"):
        talk.hear("error", code="INVALID_REQUEST", message="")


def test_a_sync_that_is_sent_away_is_made_again() -> None:
    talk = Talk(at(0)).begin(Listed("tea", 2))
    (request,) = talk.said()
    talk.hear("error", request_id=request["request_id"], code="BUSY", message="", retry_after_ms=70)
    talk.live(3)  # does not make it forgotten
    assert talk.wait(60) == []
    assert not talk.protocol.is_live
    assert talk.wait(200)[0]["type"] == "sync_request"


def test_what_comes_twice_or_is_of_another_time_does_no_harm() -> None:
    talk = Talk(at(0)).begin(Listed("tea", 1))
    (request,) = talk.said()
    talk.batch(request, 1)
    before = talk.changes.messages
    talk.batch(request, 1)
    talk.hear("connected", user_id=ME, epoch="e9")
    talk.hear("error", code="INVALID_REQUEST", message="already connected")
    talk.hear("error", request_id="77", code="BUSY", message="")
    talk.hear("pong")
    talk.hear("something_new", members=[1])
    assert len(before) == 1
    assert not talk.changes
    assert talk.protocol.is_live
    talk.protocol.lost()
    talk.live(9)
    assert not talk.changes


@pytest.mark.parametrize(
    "data", ["", "x", "[]", '{"type": 1}', '{"type":"message"}', b"\xff", '{"type":"message_batch"}', "[" * 9999]
)
def test_what_no_server_says(data: str | bytes) -> None:
    talk = Talk().begin()
    with pytest.raises(ProtocolError):
        talk.protocol.receive(data, 0)


@pytest.mark.parametrize(
    ("sequences", "has_more", "following"),
    [((2, 1), False, 2), ((1, 1), False, 1), ((1, 2), False, 1), ((), True, 0), ((0,), False, 1)],
)
def test_pages_that_no_server_gives(sequences: tuple[int, ...], has_more: bool, following: int) -> None:
    talk = Talk(at(0)).begin(Listed("tea", 1))
    (request,) = talk.said()
    with pytest.raises(ProtocolError):
        talk.batch(request, *sequences, has_more=has_more, following=following)


def test_limits_are_looked_at() -> None:
    for wrong in ({"page_messages": 501}, {"pause_ms_min": 2, "pause_ms_max": 1}, {"check_ms": 0}):
        with pytest.raises(SettingsError, match=next(iter(wrong))):
            ChatLimits(**wrong)

"""The client's side of the protocol, branch by branch: what a server can say, and what becomes of it."""

import json
from contextlib import nullcontext
from typing import Any

import pytest
from msgspec.structs import replace

from client.model_server import entry_of, frame
from oncelog.client import protocol as protocols
from oncelog.client.protocol import Phase, Protocol
from oncelog.client.values import Committed, Entry, Event, Rejected
from oncelog.client.words import CLOSED_TOO_LARGE
from oncelog.errors import ProtocolError, ServerRefusedError


def sent(protocol: Protocol) -> list[Any]:
    """What the protocol wants to say, and has said by this."""
    frames = [json.loads(one) for one in protocol.outgoing]
    protocol.outgoing.clear()
    return frames


def one_sent(protocol: Protocol, kind: str) -> Any:
    (message,) = sent(protocol)
    assert message["type"] == kind
    return message


def event(number: int, **members: Any) -> dict[str, Any]:
    """An event of another client's, as a server shows it."""
    return {
        "id": entry_of(1000 + number).id,
        "client_id": "other",
        "partitions": ["a"],
        "committed_id": number,
        "event": {"type": "told", "number": number},
        "status_updated_at": 5000 + number,
        **members,
    }


def page(numbers: list[int], following: int, *, has_more: bool = False, upto: int | None = None) -> dict[str, Any]:
    return {
        "partitions": ["a"],
        "events": [event(number) for number in numbers],
        "next_since_committed_id": following,
        "has_more": has_more,
        "sync_to_committed_id": following if upto is None else upto,
        "epoch": "e1",
    }


def result(entry: Entry, number: int, **members: Any) -> dict[str, Any]:
    return {
        "id": entry.id,
        "status": "committed",
        "committed_id": number,
        "status_updated_at": 5000 + number,
        **members,
    }


def error(code: str, msg_id: Any = None, **details: Any) -> str:
    return frame("error", {"code": code, "message": f"it is {code}", "details": details}, msg_id)


def broadcast(protocol: Protocol, *numbers: int) -> None:
    for number in numbers:
        protocol.receive(frame("event_broadcast", event(number)))


def answer(protocol: Protocol, request: Any, *results: dict[str, Any]) -> None:
    protocol.receive(frame("submit_events_result", {"results": results}, request["msg_id"]))


def connected(
    partitions: tuple[str, ...] = ("a",), cursor: int = 0, epoch: str = "", entries: tuple[Entry, ...] = ()
) -> Protocol:
    """A protocol whose first page is asked for."""
    protocol = Protocol("laptop", partitions, cursor, epoch)
    protocol.offer(entries)
    begin(protocol)
    return protocol


def begin(protocol: Protocol, last: int = 0, epoch: str = "e1") -> None:
    protocol.begin("secret")
    asked = one_sent(protocol, "connect")
    told = {"client_id": "laptop", "server_last_committed_id": last, "epoch": epoch}
    protocol.receive(frame("connected", told, asked["msg_id"]))


def live(cursor: int = 0, *entries: Entry) -> Protocol:
    """A protocol that has caught up."""
    protocol = connected(cursor=cursor, entries=entries)
    catch_up(protocol, cursor)
    return protocol


def catch_up(protocol: Protocol, following: int, numbers: list[int] | None = None) -> None:
    asked = one_sent(protocol, "sync")
    protocol.receive(frame("sync_response", page(numbers or [], following), asked["msg_id"]))
    assert protocol.phase is Phase.LIVE


def taken(protocol: Protocol) -> list[int]:
    return [one.committed_id for one in protocol.take_events(1000)[0]]


def outcomes(protocol: Protocol) -> dict[int, Committed | Rejected]:
    return {one.entry.number: one.outcome for one in protocol.take_settled()}


# --- connecting and catching up ------------------------------------------------------------------------


def test_a_connection_begins_with_who_we_are_and_pages_follow() -> None:
    protocol = Protocol("laptop", ("a",), 7, "e1")
    protocol.begin("secret")
    asked = one_sent(protocol, "connect")
    assert asked["payload"] == {"token": "secret", "client_id": "laptop"}
    assert asked["protocol_version"] == "1.0"
    told = {"client_id": "laptop", "server_last_committed_id": 12, "epoch": "e1"}
    protocol.receive(frame("connected", told, asked["msg_id"]))
    assert (protocol.phase, protocol.last_committed_id) == (Phase.CATCHING_UP, 12)
    first = one_sent(protocol, "sync")
    assert first["payload"] == {"partitions": ["a"], "since_committed_id": 7, "limit": 1000, "epoch": "e1"}
    protocol.receive(frame("sync_response", page([8, 9], 9, has_more=True, upto=12), first["msg_id"]))
    second = one_sent(protocol, "sync")
    assert second["payload"]["since_committed_id"] == 9
    assert second["msg_id"] != first["msg_id"]
    assert protocol.take_events(1) == ([_event(8)], 8)
    protocol.receive(frame("sync_response", page([10], 12), second["msg_id"]))
    assert protocol.phase is Phase.LIVE
    assert not protocol.is_waiting
    assert not sent(protocol)
    events, cursor = protocol.take_events(10)
    assert [one.committed_id for one in events] == [9, 10]
    assert cursor == 12, "also where nothing matched"


def _event(number: int) -> Event:
    shown = event(number)
    return Event(**{**shown, "partitions": ("a",)})


def test_without_an_epoch_none_is_sent_and_the_first_is_kept() -> None:
    protocol = connected()
    assert protocol.epoch == "e1"
    assert one_sent(protocol, "sync")["payload"]["epoch"] == "e1"


def test_without_partitions_it_is_live_at_once_and_asks_for_no_page() -> None:
    entry = entry_of(1, "b")
    protocol = connected(partitions=(), entries=(entry,))
    assert protocol.phase is Phase.LIVE
    request = one_sent(protocol, "submit_events")
    answer(protocol, request, result(entry, 4))
    assert outcomes(protocol) == {1: Committed(4, 5004)}
    assert taken(protocol) == []


def test_submissions_wait_until_it_is_live() -> None:
    protocol = connected(entries=(entry_of(1),))
    protocol.offer([entry_of(2)])
    asked = one_sent(protocol, "sync")
    assert protocol.pending == 2
    protocol.receive(frame("sync_response", page([], 0), asked["msg_id"]))
    request = one_sent(protocol, "submit_events")
    assert [one["event"]["number"] for one in request["payload"]["events"]] == [1, 2]
    assert protocol.pending == 2
    assert protocol.is_waiting


def test_what_is_sent_is_what_lies_in_the_outbox() -> None:
    entry = entry_of(1, "b", "a", text='quo"te é', number_=1.5)
    protocol = live(0, entry)
    (item,) = one_sent(protocol, "submit_events")["payload"]["events"]
    assert item == {
        "id": entry.id,
        "partitions": ["a", "b"],
        "event": {"type": "counted", "number": 1, "text": 'quo"te é', "number_": 1.5},
    }


def test_an_expected_number_is_sent_with_its_event() -> None:
    entry = replace(entry_of(1), expected_committed_id=0)
    protocol = live(0, entry)
    (item,) = one_sent(protocol, "submit_events")["payload"]["events"]
    assert item["expected_committed_id"] == 0


def test_another_epoch_at_the_greeting_stops_everything() -> None:
    protocol = Protocol("laptop", ("a",), 5, "e1")
    protocol.offer([entry_of(1)])
    begin(protocol, last=3, epoch="e2")
    change = protocol.history_change
    assert change is not None
    assert (change.known_epoch, change.epoch, change.cursor, change.server_last_committed_id) == ("e1", "e2", 5, 3)
    assert protocol.phase is Phase.HISTORY_CHANGED
    assert not sent(protocol)
    protocol.lost()
    assert protocol.phase is Phase.HISTORY_CHANGED, "also without a connection"
    protocol.offer([entry_of(2)])
    assert not sent(protocol)
    protocol.start_over(2, "e2")
    assert protocol.history_change is None
    begin(protocol, last=3, epoch="e2")
    assert one_sent(protocol, "sync")["payload"]["since_committed_id"] == 2
    assert protocol.pending == 2


def test_a_history_that_is_the_old_one_again_is_no_other() -> None:
    protocol = Protocol("laptop", ("a",), 5, "e1")
    begin(protocol, last=3, epoch="e2")
    begin(protocol, last=9, epoch="e1")
    assert protocol.history_change is None
    catch_up(protocol, 9)


def test_history_changed_as_the_answer_to_a_sync() -> None:
    protocol = connected(cursor=5, epoch="e1")
    asked = one_sent(protocol, "sync")
    protocol.receive(error("history_changed", asked["msg_id"], epoch="e1", server_last_committed_id=2))
    assert protocol.phase is Phase.HISTORY_CHANGED
    change = protocol.history_change
    assert change is not None
    assert (change.epoch, change.cursor, change.server_last_committed_id) == ("e1", 5, 2)
    assert "history_changed" in change.message


def test_start_over_throws_away_what_has_not_been_taken() -> None:
    protocol = live()
    broadcast(protocol, 1, 2)
    protocol.start_over(0, "e1")
    assert protocol.take_events(10) == ([], 0)
    begin(protocol)
    catch_up(protocol, 2, [1, 2])
    assert taken(protocol) == [1, 2]


# --- broadcasts and answers ------------------------------------------------------------------------------


def test_broadcasts_are_taken_once_however_often_they_come() -> None:
    protocol = live()
    broadcast(protocol, 1, 1, 3, 1, 3)
    assert protocol.take_events(10) == ([_event(1), _event(3)], 3)
    protocol.lost()
    begin(protocol)
    asked = one_sent(protocol, "sync")
    assert asked["payload"]["since_committed_id"] == 3


def test_a_broadcast_before_the_sync_is_over_is_no_server() -> None:
    protocol = connected()
    with pytest.raises(ProtocolError, match="before the sync was over"):
        broadcast(protocol, 1)


def test_an_own_event_stands_where_its_answer_does() -> None:
    entry = entry_of(1)
    protocol = live(0, entry)
    request = one_sent(protocol, "submit_events")
    broadcast(protocol, 1, 2)
    assert taken(protocol) == [1, 2], "one alone keeps nothing back"
    answer(protocol, request, result(entry, 3))
    broadcast(protocol, 4)
    events, cursor = protocol.take_events(10)
    assert [one.committed_id for one in events] == [3, 4]
    assert events[0] == Event(entry.id, "laptop", ("a",), 3, {"type": "counted", "number": 1}, 5003)
    assert cursor == 4
    assert outcomes(protocol) == {1: Committed(3, 5003)}


def test_several_own_events_are_put_among_what_came_meanwhile() -> None:
    first, second, third = entry_of(1), entry_of(2), entry_of(3, "b")
    protocol = live(0, first, second, third)
    request = one_sent(protocol, "submit_events")
    broadcast(protocol, 1, 3)
    assert protocol.take_events(10) == ([], 0), "what has to wait moves no cursor"
    answer(protocol, request, result(first, 2), result(second, 4), result(third, 5))
    assert protocol.take_events(10)[0] == [_event(1), *_own(first, 2), _event(3), *_own(second, 4)]
    assert outcomes(protocol).keys() == {1, 2, 3}


def _own(entry: Entry, number: int) -> list[Event]:
    return [Event(entry.id, "laptop", entry.partitions, number, json.loads(entry.body), 5000 + number)]


def test_an_own_event_that_was_also_broadcast_comes_once() -> None:
    first, second = entry_of(1), entry_of(2)
    protocol = live(0, first, second)
    request = one_sent(protocol, "submit_events")
    protocol.receive(frame("event_broadcast", event(1, id=first.id)))
    broadcast(protocol, 2)
    answer(protocol, request, result(first, 1), result(second, 3))
    assert taken(protocol) == [1, 2, 3]


def test_a_retry_of_what_had_arrived_comes_no_second_time() -> None:
    entry = entry_of(1)
    protocol = live(5, entry)
    request = one_sent(protocol, "submit_events")
    answer(protocol, request, result(entry, 4))
    assert protocol.take_events(10) == ([], 5)
    assert outcomes(protocol) == {1: Committed(4, 5004)}


def test_an_answer_moves_the_cursor_also_where_its_events_are_of_other_partitions() -> None:
    entry = entry_of(1, "b")
    protocol = live(5, entry)
    answer(protocol, one_sent(protocol, "submit_events"), result(entry, 9))
    assert protocol.take_events(10) == ([], 9)


def test_an_own_event_that_has_been_erased_has_no_content() -> None:
    entry = entry_of(1)
    protocol = live(0, entry)
    answer(protocol, one_sent(protocol, "submit_events"), result(entry, 1, erased=True))
    ((own,), _) = protocol.take_events(10)
    assert (own.event, own.erased, own.type) == (None, True, "")


def test_one_request_at_a_time_and_the_next_takes_all_that_gathered() -> None:
    entries = [entry_of(number) for number in range(1, 5)]
    protocol = live(0, entries[0])
    first = one_sent(protocol, "submit_events")
    protocol.offer(entries[1:3])
    protocol.offer(entries[3:])
    assert not sent(protocol)
    answer(protocol, first, result(entries[0], 1))
    second = one_sent(protocol, "submit_events")
    assert [one["id"] for one in second["payload"]["events"]] == [one.id for one in entries[1:]]
    answer(protocol, first, result(entries[0], 1))
    assert len(outcomes(protocol)) == 1, "an answer that comes twice"


def test_a_rejected_event_has_its_reason_and_the_others_go_on() -> None:
    bad, good = entry_of(1), entry_of(2)
    protocol = live(0, bad, good)
    errors = [{"field": "expected_committed_id", "message": "it is 7", "current_committed_id": 7}]
    rejected = {"id": bad.id, "status": "rejected", "reason": "validation_failed", "errors": errors}
    answer(protocol, one_sent(protocol, "submit_events"), rejected, result(good, 1))
    found = outcomes(protocol)
    assert isinstance(found[1], Rejected)
    assert found[1].errors[0].current_committed_id == 7
    assert str(found[1]) == "validation_failed; expected_committed_id: it is 7"
    assert found[2] == Committed(1, 5001)
    assert taken(protocol) == [1]


def test_requests_have_a_most_of_events_and_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "REQUEST_BYTES_MAX", 700)
    large = [entry_of(number, text="x" * 150) for number in range(1, 5)]
    protocol = live(0, entry_of(9, text="y" * 1000), *large)
    assert len(one_sent(protocol, "submit_events")["payload"]["events"]) == 1, "larger than that, and alone"
    protocol = live(0, *large)
    assert len(one_sent(protocol, "submit_events")["payload"]["events"]) == 2
    many = [entry_of(number) for number in range(1, protocols.REQUEST_EVENTS_MAX + 2)]
    monkeypatch.setattr(protocols, "REQUEST_BYTES_MAX", 10**9)
    protocol = live(0, *many)
    assert len(one_sent(protocol, "submit_events")["payload"]["events"]) == protocols.REQUEST_EVENTS_MAX


# --- the connection is lost --------------------------------------------------------------------------------


def test_what_was_under_way_is_sent_again_first_and_under_the_same_ids() -> None:
    first, second, third = entry_of(1), entry_of(2), entry_of(3)
    protocol = live(0, first, second)
    one_sent(protocol, "submit_events")
    protocol.offer([third])
    protocol.lost()
    assert (protocol.phase, protocol.pending, protocol.is_waiting) == (Phase.NONE, 3, False)
    begin(protocol)
    catch_up(protocol, 0)
    again = one_sent(protocol, "submit_events")
    assert [one["id"] for one in again["payload"]["events"]] == [first.id, second.id, third.id]


def test_what_was_held_back_comes_again_after_the_connection_is_lost() -> None:
    first, second = entry_of(1), entry_of(2)
    protocol = live(0, first, second)
    one_sent(protocol, "submit_events")
    broadcast(protocol, 2, 4)
    protocol.lost()
    assert protocol.take_events(10) == ([], 0)
    begin(protocol)
    asked = one_sent(protocol, "sync")
    assert asked["payload"]["since_committed_id"] == 0
    own = event(1, id=first.id)
    whole = {**page([], 4), "events": [own, event(2), event(3, id=second.id), event(4)]}
    protocol.receive(frame("sync_response", whole, asked["msg_id"]))
    request = one_sent(protocol, "submit_events")
    answer(protocol, request, result(first, 1), result(second, 3))
    assert taken(protocol) == [1, 2, 3, 4]


def test_a_late_commit_of_the_old_connection_has_its_place() -> None:
    """It is committed after the next connection's sync, and is not broadcast to whom it is answered."""
    first, second = entry_of(1), entry_of(2)
    protocol = live(0, first)
    one_sent(protocol, "submit_events")
    protocol.lost()
    protocol.offer([second])
    begin(protocol)
    catch_up(protocol, 0)
    request = one_sent(protocol, "submit_events")
    broadcast(protocol, 2, 3)  # 1 was committed by the old connection
    answer(protocol, request, result(first, 1), result(second, 4))
    assert taken(protocol) == [1, 2, 3, 4]


# --- answers that are none ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "results",
    [
        [],
        [{"id": entry_of(1).id, "status": "committed", "committed_id": 1}],
        [{"id": entry_of(one).id, "status": "committed", "committed_id": one} for one in (2, 1)],
        [{"id": entry_of(1).id, "status": "committed", "committed_id": 1}, {"id": entry_of(2).id, "status": "maybe"}],
        [
            {"id": entry_of(1).id, "status": "committed", "committed_id": 1},
            {"id": entry_of(2).id, "status": "committed"},
        ],
    ],
    ids=["none", "too few", "other ids", "other status", "no number"],
)
def test_results_that_do_not_fit_lose_nothing(results: list[dict[str, Any]]) -> None:
    first, second = entry_of(1), entry_of(2)
    protocol = live(0, first, second)
    request = one_sent(protocol, "submit_events")
    with pytest.raises(ProtocolError):
        answer(protocol, request, *results)
    protocol.lost()
    assert not protocol.has_settled
    assert protocol.pending == 2
    begin(protocol)
    catch_up(protocol, 0)
    answer(protocol, one_sent(protocol, "submit_events"), result(first, 1), result(second, 2))
    assert outcomes(protocol).keys() == {1, 2}
    assert taken(protocol) == [1, 2]


@pytest.mark.parametrize(
    "garbage",
    [
        "",
        "no JSON",
        "[]",
        "{}",
        b"\xff\xfe",
        '{"type": 7, "payload": {}}',
        '{"type": "event_broadcast"}',
        '{"type": "event_broadcast", "payload": {"id": "x"}}',
        '{"type": "event_broadcast", "payload": {"committed_id": "1"}}',
        '{"type": "connected", "payload": {}}',
        '{"type": "sync_response", "payload": {"events": 1}}',
        '{"type": "error", "payload": null}',
        '{"type": "other", "payload": ' + "[" * 100_000,
        '{"type": "event_broadcast", "payload": {"event": ' + '{"a":' * 100_000,
    ],
)
def test_garbage_is_a_protocol_error(garbage: str | bytes) -> None:
    protocol = live()
    with pytest.raises(ProtocolError):
        protocol.receive(garbage)


def test_messages_and_members_of_a_newer_server_are_ignored() -> None:
    protocol = live()
    before = protocol.answers
    protocol.receive(frame("presence", {"who": ["ada"]}))
    protocol.receive(frame("presence", None, 7))
    assert (protocol.answers, sent(protocol), protocol.phase) == (before, [], Phase.LIVE)
    protocol.receive(frame("event_broadcast", event(1, colour="red")))
    assert taken(protocol) == [1]


# --- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["auth_failed", "rate_limited", "server_error", "protocol_version_unsupported"])
def test_errors_that_end_a_connection_are_raised_with_what_they_say(code: str) -> None:
    protocol = live()
    with pytest.raises(ServerRefusedError, match=code) as caught:
        protocol.receive(error(code, retry_after_ms=70))
    assert (caught.value.code, caught.value.retry_after_ms) == (code, 70)


def test_who_may_not_read_may_still_submit() -> None:
    protocol = connected(entries=(entry_of(1),))
    asked = one_sent(protocol, "sync")
    protocol.receive(error("forbidden", asked["msg_id"]))
    assert protocol.refused_reading == "forbidden: it is forbidden"
    assert protocol.phase is Phase.ASIDE
    request = one_sent(protocol, "submit_events")
    answer(protocol, request, result(entry_of(1), 3))
    assert not sent(protocol), "nothing is asked again by itself"
    protocol.read_again()
    catch_up(protocol, 3, [3])
    assert taken(protocol) == [3]


def test_who_stands_aside_of_a_busy_server_catches_up_meanwhile() -> None:
    protocol = Protocol("laptop", ("a",), 0, "")
    protocol.wants_events = False
    begin(protocol)
    protocol.offer([entry_of(1)])
    request = one_sent(protocol, "submit_events")
    protocol.want_events()
    protocol.receive(error("server_busy", request["msg_id"], retry_after_ms=10**9))
    assert protocol.busy_ms == protocols.BUSY_MS_MAX
    catch_up(protocol, 2, [1, 2])
    assert not sent(protocol)
    protocol.go_on()
    answer(protocol, one_sent(protocol, "submit_events"), result(entry_of(1), 3))
    assert taken(protocol) == [1, 2, 3]


def test_what_was_too_much_is_not_tried_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "CEILING_REQUESTS", 3)
    entries = [entry_of(number) for number in range(1, 60)]
    protocol = live(0, *entries)
    refused, number = 0, 0
    while protocol.pending:
        request = one_sent(protocol, "submit_events")
        items = request["payload"]["events"]
        if len(items) > 8:
            refused += 1
            protocol.receive(error("bad_request", request["msg_id"]))
            continue
        sent_entries = entries[number : number + len(items)]
        answer(protocol, request, *(result(one, number + at) for at, one in enumerate(sent_entries, 1)))
        number += len(items)
    assert refused == 5  # 59, 29, 14, and then once every third request
    assert len(outcomes(protocol)) == 59


def test_a_greeting_that_is_refused_is_raised_and_one_about_a_doubled_message_is_not() -> None:
    protocol = Protocol("laptop", ("a",), 0, "")
    protocol.begin(None)
    asked = one_sent(protocol, "connect")
    with pytest.raises(ServerRefusedError, match="bad_request"):
        protocol.receive(error("bad_request", asked["msg_id"]))
    protocol = live()
    protocol.receive(error("bad_request", "1"))
    assert protocol.phase is Phase.LIVE


def test_a_busy_server_is_asked_again_after_its_pause() -> None:
    entry = entry_of(1)
    protocol = live(0, entry)
    request = one_sent(protocol, "submit_events")
    protocol.receive(error("server_busy", request["msg_id"], retry_after_ms=40))
    assert (protocol.busy_ms, protocol.is_waiting, protocol.pending) == (40, False, 1)
    protocol.offer([entry_of(2)])
    assert not sent(protocol)
    protocol.go_on()
    assert protocol.busy_ms == 0
    again = one_sent(protocol, "submit_events")
    assert [one["id"] for one in again["payload"]["events"]] == [entry.id]
    assert again["msg_id"] != request["msg_id"]
    assert protocol.is_waiting
    protocol.go_on()
    assert not sent(protocol), "once"
    answer(protocol, again, result(entry, 1))
    assert len(one_sent(protocol, "submit_events")["payload"]["events"]) == 1


def test_a_busy_server_that_gives_no_time_is_not_asked_at_once() -> None:
    protocol = live(0, entry_of(1))
    protocol.receive(error("server_busy", one_sent(protocol, "submit_events")["msg_id"]))
    assert protocol.busy_ms == protocols.BUSY_MS_MIN


@pytest.mark.parametrize("entries", [(entry_of(1),), (entry_of(1), entry_of(2))])
def test_what_was_committed_behind_a_busy_answer_has_its_place(entries: tuple[Entry, ...]) -> None:
    """The old connection's request was committed while the new one's was there: it is broadcast to neither."""
    protocol = live(0, *entries)
    request = one_sent(protocol, "submit_events")
    broadcast(protocol, 1)
    protocol.receive(error("server_busy", request["msg_id"]))  # and 2 is ours, by the old connection
    broadcast(protocol, 3)
    protocol.go_on()
    again = one_sent(protocol, "submit_events")
    broadcast(protocol, 4)
    answer(protocol, again, *(result(one, number) for one, number in zip(entries, (2, 5), strict=False)))
    assert taken(protocol) == [1, 2, 3, 4, 5][: 3 + len(entries)]


def test_a_connection_that_is_lost_while_the_server_is_busy_loses_nothing() -> None:
    entry = entry_of(1)
    protocol = live(0, entry)
    protocol.receive(error("server_busy", one_sent(protocol, "submit_events")["msg_id"]))
    broadcast(protocol, 2)
    protocol.lost(CLOSED_TOO_LARGE)
    assert (protocol.pending, protocol.busy_ms, protocol.has_settled) == (1, 0, False)
    begin(protocol)
    assert one_sent(protocol, "sync")["payload"]["since_committed_id"] == 0


@pytest.mark.parametrize("code", ["server_busy", "read_only", "quota_exceeded", "rate_limited"])
def test_what_the_server_said_of_submissions_is_known_until_one_has_an_outcome(code: str) -> None:
    entry = entry_of(1)
    protocol = live(0, entry)
    request = one_sent(protocol, "submit_events")
    with pytest.raises(ServerRefusedError) if code == "rate_limited" else nullcontext():
        protocol.receive(error(code, request["msg_id"]))
    assert str(protocol.hold_ups.last_error).startswith(f"{code}: ")
    protocol.lost()
    begin(protocol)
    catch_up(protocol, 0)
    again = one_sent(protocol, "submit_events")
    assert str(protocol.hold_ups.last_error).startswith(f"{code}: ")
    protocol.receive(error("bad_request", again["msg_id"]))
    assert len(outcomes(protocol)) == 1
    assert protocol.hold_ups.last_error is None


def test_what_is_said_of_anything_else_holds_up_no_submissions() -> None:
    protocol = Protocol("laptop", ("a",), 0, "")
    protocol.offer([entry_of(1)])
    protocol.begin(None)
    with pytest.raises(ServerRefusedError, match="rate_limited"):
        protocol.receive(error("rate_limited", one_sent(protocol, "connect")["msg_id"]))
    assert protocol.hold_ups.last_error is None


def test_a_bad_request_is_divided_until_the_one_at_fault_is_alone() -> None:
    entries = [entry_of(number) for number in range(1, 8)]
    at_fault = entries[4]
    protocol = live(0, *entries)
    committed = 0
    requests = 0
    while protocol.pending:
        requests += 1
        request = one_sent(protocol, "submit_events")
        ids = [one["id"] for one in request["payload"]["events"]]
        if at_fault.id in ids:
            protocol.receive(error("bad_request", request["msg_id"], field="$"))
            continue
        found = [next(entry for entry in entries if entry.id == one) for one in ids]
        answer(protocol, request, *(result(entry, committed + place) for place, entry in enumerate(found, 1)))
        committed += len(found)
    settled = outcomes(protocol)
    assert settled.keys() == set(range(1, 8))
    rejected = settled.pop(5)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == "bad_request"
    assert [one.committed_id for one in settled.values() if isinstance(one, Committed)] == [1, 2, 3, 4, 5, 6]
    assert taken(protocol) == [1, 2, 3, 4, 5, 6]
    assert requests < 12


def test_broadcasts_that_waited_for_a_bad_request_are_not_lost() -> None:
    protocol = live(0, entry_of(1), entry_of(2))
    request = one_sent(protocol, "submit_events")
    broadcast(protocol, 1, 2)
    protocol.receive(error("bad_request", request["msg_id"]))
    assert taken(protocol) == [1, 2]


def test_a_message_that_is_too_large_is_divided_until_the_one_at_fault_is_alone() -> None:
    entries = [entry_of(number) for number in range(1, 6)]
    protocol = live(0, *entries)
    committed = 0
    while protocol.pending:
        request = one_sent(protocol, "submit_events")
        ids = [one["id"] for one in request["payload"]["events"]]
        if entries[1].id in ids:
            protocol.lost(CLOSED_TOO_LARGE)
            begin(protocol)
            catch_up(protocol, committed)
            continue
        found = [next(entry for entry in entries if entry.id == one) for one in ids]
        answer(protocol, request, *(result(entry, committed + place) for place, entry in enumerate(found, 1)))
        committed += len(found)
    settled = outcomes(protocol)
    assert settled.keys() == set(range(1, 6))
    rejected = settled.pop(2)
    assert isinstance(rejected, Rejected)
    assert rejected.reason == protocols.TOO_LARGE
    assert all(isinstance(one, Committed) for one in settled.values())


def test_another_code_of_the_end_rejects_nothing() -> None:
    protocol = live(0, entry_of(1))
    protocol.lost(1001)
    assert (protocol.pending, protocol.has_settled) == (1, False)


# --- frames that come twice ----------------------------------------------------------------------------------


def test_a_page_that_comes_twice_counts_once() -> None:
    protocol = connected()
    asked = one_sent(protocol, "sync")
    told = frame("sync_response", page([1, 2], 2, has_more=True, upto=3), asked["msg_id"])
    protocol.receive(told)
    protocol.receive(told)
    asked = one_sent(protocol, "sync")
    told = frame("sync_response", page([3], 3), asked["msg_id"])
    protocol.receive(told)
    protocol.receive(told)
    assert not sent(protocol)
    assert taken(protocol) == [1, 2, 3]


def test_a_sync_that_was_doubled_on_its_way_brings_what_is_not_broadcast_any_more() -> None:
    protocol = connected()
    asked = one_sent(protocol, "sync")
    protocol.receive(frame("sync_response", page([1], 1), asked["msg_id"]))
    protocol.receive(frame("sync_response", page([1, 2, 3], 4), asked["msg_id"]))
    broadcast(protocol, 5)
    assert protocol.take_events(2)[1] == 2
    assert taken(protocol) == [3, 5]


def test_a_doubled_sync_that_would_have_to_be_gone_on_with_ends_the_connection() -> None:
    protocol = connected()
    asked = one_sent(protocol, "sync")
    protocol.receive(frame("sync_response", page([1], 1), asked["msg_id"]))
    with pytest.raises(ProtocolError, match="not asked for"):
        protocol.receive(frame("sync_response", page([1, 2], 2, has_more=True, upto=9), asked["msg_id"]))


def test_a_greeting_that_comes_twice_counts_once() -> None:
    protocol = live()
    protocol.receive(frame("connected", {"server_last_committed_id": 9, "epoch": "e9"}))
    assert (protocol.phase, protocol.epoch) == (Phase.LIVE, "e1")


# --- those who take are slow ---------------------------------------------------------------------------------


def test_no_further_page_is_asked_for_while_much_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "READY_EVENTS_MAX", 3)
    protocol = connected(entries=(entry_of(1),))
    asked = one_sent(protocol, "sync")
    protocol.receive(frame("sync_response", page([1, 2], 2, has_more=True, upto=9), asked["msg_id"]))
    asked = one_sent(protocol, "sync")
    protocol.receive(frame("sync_response", page([3, 4], 4, has_more=True, upto=9), asked["msg_id"]))
    assert not sent(protocol)
    assert (protocol.ready, protocol.is_waiting, protocol.phase) == (4, False, Phase.CATCHING_UP)
    protocol.take_events(1)
    assert not sent(protocol), "there is no room yet"
    events, cursor = protocol.take_events(1)
    assert ([one.committed_id for one in events], cursor) == ([2], 2)
    assert one_sent(protocol, "sync")["payload"]["since_committed_id"] == 4
    protocol.take_events(1)
    assert not sent(protocol), "it is asked for once"


def test_nor_is_it_after_the_connection_was_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "READY_EVENTS_MAX", 2)
    protocol = live()
    broadcast(protocol, 1, 2, 3)
    protocol.lost()
    begin(protocol)
    assert not sent(protocol)
    assert protocol.phase is Phase.ASIDE
    assert taken(protocol) == [1, 2, 3]
    catch_up(protocol, 3)


def test_who_wants_no_events_submits_all_the_same_and_has_its_own_when_it_syncs() -> None:
    protocol = Protocol("ada", ("a",), 0, "")
    protocol.wants_events = False
    begin(protocol)
    assert protocol.phase is Phase.ASIDE
    entries = [entry_of(1, "a"), entry_of(2, "a")]
    protocol.offer(entries)
    asked = one_sent(protocol, "submit_events")
    protocol.want_events()
    assert not sent(protocol), "the answer would have no place in the order"
    protocol.offer([entry_of(3, "a")])
    answer(protocol, asked, result(entries[0], 7), result(entries[1], 8))
    assert [one.entry.number for one in protocol.take_settled()] == [1, 2]
    assert (protocol.ready, protocol.cursor, protocol.phase) == (0, 0, Phase.CATCHING_UP)
    asked = one_sent(protocol, "sync")
    assert asked["payload"]["since_committed_id"] == 0
    protocol.receive(frame("sync_response", page([6, 7, 8], 8), asked["msg_id"]))
    assert taken(protocol) == [6, 7, 8]
    assert one_sent(protocol, "submit_events")


def test_what_could_not_be_handed_over_is_the_next_again() -> None:
    protocol = live()
    broadcast(protocol, 1, 2, 3)
    events, _ = protocol.take_events(2)
    protocol.put_back(events[1:])
    assert protocol.ready == 2
    assert taken(protocol) == [2, 3]


@pytest.mark.parametrize(
    "told",
    [
        {**page([1], 10**25), "events": []},
        page([3, 2, 4], 4),
        {**page([], 4), "events": [event(5, committed_id=10**25)]},
    ],
)
def test_a_page_that_no_server_gives_is_none(told: dict[str, Any]) -> None:
    protocol = connected()
    asked = one_sent(protocol, "sync")
    with pytest.raises(ProtocolError):
        protocol.receive(frame("sync_response", told, asked["msg_id"]))


@pytest.mark.parametrize("retry_after_ms", [10**25, 10**400, -1])
def test_nor_is_a_pause_that_never_ends(retry_after_ms: int) -> None:
    protocol = live(0, entry_of(1))
    request = one_sent(protocol, "submit_events")
    with pytest.raises(ProtocolError):
        protocol.receive(error("server_busy", request["msg_id"], retry_after_ms=retry_after_ms))

"""Client side of the Events protocol: connecting, broadcasts, answers and lost connections."""

from typing import Any

import pytest
from msgspec.structs import replace

from client.events.model_server import entry_of, frame
from client.events.protocol_frames import (
    answer,
    begin,
    broadcast,
    catch_up,
    connected_protocol,
    error,
    event,
    live_protocol,
    own_events,
    page,
    received_event,
    result,
    take_ids,
    take_one_sent,
    take_outcomes,
    take_sent,
)
from oncelog.client.events import protocol as protocols
from oncelog.client.events.protocol import EventsPhase, EventsProtocol
from oncelog.client.events.values import Committed, Event, Refused
from oncelog.errors import ProtocolError

# --- connecting and catching up ------------------------------------------------------------------------


def test_connection_sends_connect_and_then_reads_pages() -> None:
    protocol = EventsProtocol("laptop", ("a",), 7, "e1")
    protocol.connect("secret")
    request = take_one_sent(protocol, "connect")
    assert request["payload"] == {"token": "secret", "client_id": "laptop"}
    assert request["protocol_version"] == "1.0"
    payload = {"client_id": "laptop", "server_last_committed_id": 12, "epoch": "e1"}
    protocol.receive(frame("connected", payload, request["msg_id"]))
    assert (protocol.phase, protocol.last_committed_id) == (EventsPhase.CATCHING_UP, 12)
    first = take_one_sent(protocol, "sync")
    assert first["payload"] == {"partitions": ["a"], "since_committed_id": 7, "limit": 1000, "epoch": "e1"}
    protocol.receive(frame("sync_response", page([8, 9], 9, has_more=True, upto=12), first["msg_id"]))
    second = take_one_sent(protocol, "sync")
    assert second["payload"]["since_committed_id"] == 9
    assert second["msg_id"] != first["msg_id"]
    assert protocol.take_events(1) == ([received_event(8)], 8)
    protocol.receive(frame("sync_response", page([10], 12), second["msg_id"]))
    assert protocol.phase is EventsPhase.LIVE
    assert not protocol.is_waiting
    assert not take_sent(protocol)
    events, cursor = protocol.take_events(10)
    assert [one.committed_id for one in events] == [9, 10]
    assert cursor == 12, "the cursor advances without matching events"


def test_client_without_an_epoch_keeps_the_first_one() -> None:
    protocol = connected_protocol()
    assert protocol.epoch == "e1"
    assert take_one_sent(protocol, "sync")["payload"]["epoch"] == "e1"


def test_client_without_partitions_is_live_without_a_sync() -> None:
    entry = entry_of(1, "b")
    protocol = connected_protocol(partitions=(), entries=(entry,))
    assert protocol.phase is EventsPhase.LIVE
    request = take_one_sent(protocol, "submit_events")
    answer(protocol, request, result(entry, 4))
    assert take_outcomes(protocol) == {1: Committed(4, 5004)}
    assert take_ids(protocol) == []


def test_submissions_wait_for_the_end_of_the_sync() -> None:
    protocol = connected_protocol(entries=(entry_of(1),))
    protocol.enqueue([entry_of(2)])
    request = take_one_sent(protocol, "sync")
    assert protocol.outbox_count == 2
    protocol.receive(frame("sync_response", page([], 0), request["msg_id"]))
    request = take_one_sent(protocol, "submit_events")
    assert [one["event"]["number"] for one in request["payload"]["events"]] == [1, 2]
    assert protocol.outbox_count == 2
    assert protocol.is_waiting


def test_submitted_event_is_sent_as_stored_in_the_outbox() -> None:
    entry = entry_of(1, "b", "a", text='quo"te é', number_=1.5)
    protocol = live_protocol(0, entry)
    (item,) = take_one_sent(protocol, "submit_events")["payload"]["events"]
    assert item == {
        "id": entry.id,
        "partitions": ["a", "b"],
        "event": {"type": "counted", "number": 1, "text": 'quo"te é', "number_": 1.5},
    }


def test_expected_committed_id_is_sent_with_the_event() -> None:
    entry = replace(entry_of(1), expected_committed_id=0)
    protocol = live_protocol(0, entry)
    (item,) = take_one_sent(protocol, "submit_events")["payload"]["events"]
    assert item["expected_committed_id"] == 0


def test_changed_epoch_on_connect_stops_sync_and_submissions() -> None:
    protocol = EventsProtocol("laptop", ("a",), 5, "e1")
    protocol.enqueue([entry_of(1)])
    begin(protocol, last=3, epoch="e2")
    change = protocol.history_change
    assert change is not None
    assert (change.known_epoch, change.epoch, change.cursor, change.server_last_committed_id) == ("e1", "e2", 5, 3)
    assert protocol.phase is EventsPhase.HISTORY_CHANGED
    assert not take_sent(protocol)
    protocol.disconnect()
    assert protocol.phase is EventsPhase.HISTORY_CHANGED, "the phase is kept while disconnected"
    protocol.enqueue([entry_of(2)])
    assert not take_sent(protocol)
    protocol.start_over(2, "e2")
    assert protocol.history_change is None
    begin(protocol, last=3, epoch="e2")
    assert take_one_sent(protocol, "sync")["payload"]["since_committed_id"] == 2
    assert protocol.outbox_count == 2


def test_history_change_is_cleared_when_the_known_epoch_returns() -> None:
    protocol = EventsProtocol("laptop", ("a",), 5, "e1")
    begin(protocol, last=3, epoch="e2")
    begin(protocol, last=9, epoch="e1")
    assert protocol.history_change is None
    catch_up(protocol, 9)


def test_history_changed_answer_to_a_sync_is_reported() -> None:
    protocol = connected_protocol(cursor=5, epoch="e1")
    request = take_one_sent(protocol, "sync")
    protocol.receive(error("history_changed", request["msg_id"], epoch="e1", server_last_committed_id=2))
    assert protocol.phase is EventsPhase.HISTORY_CHANGED
    change = protocol.history_change
    assert change is not None
    assert (change.epoch, change.cursor, change.server_last_committed_id) == ("e1", 5, 2)
    assert "history_changed" in change.message


def test_start_over_discards_queued_events() -> None:
    protocol = live_protocol()
    broadcast(protocol, 1, 2)
    protocol.start_over(0, "e1")
    assert protocol.take_events(10) == ([], 0)
    begin(protocol)
    catch_up(protocol, 2, [1, 2])
    assert take_ids(protocol) == [1, 2]


# --- broadcasts and answers ------------------------------------------------------------------------------


def test_repeated_broadcasts_are_delivered_once() -> None:
    protocol = live_protocol()
    broadcast(protocol, 1, 1, 3, 1, 3)
    assert protocol.take_events(10) == ([received_event(1), received_event(3)], 3)
    protocol.disconnect()
    begin(protocol)
    request = take_one_sent(protocol, "sync")
    assert request["payload"]["since_committed_id"] == 3


def test_broadcast_before_the_end_of_the_sync_is_a_protocol_error() -> None:
    protocol = connected_protocol()
    with pytest.raises(ProtocolError, match="before the end of the sync"):
        broadcast(protocol, 1)


def test_own_event_is_delivered_at_the_position_of_its_answer() -> None:
    entry = entry_of(1)
    protocol = live_protocol(0, entry)
    request = take_one_sent(protocol, "submit_events")
    broadcast(protocol, 1, 2)
    assert take_ids(protocol) == [1, 2], "a single own event does not delay broadcasts"
    answer(protocol, request, result(entry, 3))
    broadcast(protocol, 4)
    events, cursor = protocol.take_events(10)
    assert [one.committed_id for one in events] == [3, 4]
    assert events[0] == Event(entry.id, "laptop", ("a",), 3, {"type": "counted", "number": 1}, 5003)
    assert cursor == 4
    assert take_outcomes(protocol) == {1: Committed(3, 5003)}


def test_several_own_events_are_merged_with_held_broadcasts() -> None:
    first, second, third = entry_of(1), entry_of(2), entry_of(3, "b")
    protocol = live_protocol(0, first, second, third)
    request = take_one_sent(protocol, "submit_events")
    broadcast(protocol, 1, 3)
    assert protocol.take_events(10) == ([], 0), "held broadcasts do not advance the cursor"
    answer(protocol, request, result(first, 2), result(second, 4), result(third, 5))
    assert protocol.take_events(10)[0] == [
        received_event(1),
        *own_events(first, 2),
        received_event(3),
        *own_events(second, 4),
    ]
    assert take_outcomes(protocol).keys() == {1, 2, 3}


def test_own_event_that_was_also_broadcast_is_delivered_only_once() -> None:
    first, second = entry_of(1), entry_of(2)
    protocol = live_protocol(0, first, second)
    request = take_one_sent(protocol, "submit_events")
    protocol.receive(frame("event_broadcast", event(1, id=first.id)))
    broadcast(protocol, 2)
    answer(protocol, request, result(first, 1), result(second, 3))
    assert take_ids(protocol) == [1, 2, 3]


def test_retry_of_a_received_event_is_not_delivered_again() -> None:
    entry = entry_of(1)
    protocol = live_protocol(5, entry)
    request = take_one_sent(protocol, "submit_events")
    answer(protocol, request, result(entry, 4))
    assert protocol.take_events(10) == ([], 5)
    assert take_outcomes(protocol) == {1: Committed(4, 5004)}


def test_answer_for_unsubscribed_partitions_advances_the_cursor() -> None:
    entry = entry_of(1, "b")
    protocol = live_protocol(5, entry)
    answer(protocol, take_one_sent(protocol, "submit_events"), result(entry, 9))
    assert protocol.take_events(10) == ([], 9)


def test_erased_own_event_has_no_content() -> None:
    entry = entry_of(1)
    protocol = live_protocol(0, entry)
    answer(protocol, take_one_sent(protocol, "submit_events"), result(entry, 1, erased=True))
    ((own,), _) = protocol.take_events(10)
    assert (own.event, own.erased, own.type) == (None, True, "")


def test_one_request_is_in_flight_and_the_next_takes_all_queued_events() -> None:
    entries = [entry_of(number) for number in range(1, 5)]
    protocol = live_protocol(0, entries[0])
    first = take_one_sent(protocol, "submit_events")
    protocol.enqueue(entries[1:3])
    protocol.enqueue(entries[3:])
    assert not take_sent(protocol)
    answer(protocol, first, result(entries[0], 1))
    second = take_one_sent(protocol, "submit_events")
    assert [one["id"] for one in second["payload"]["events"]] == [one.id for one in entries[1:]]
    answer(protocol, first, result(entries[0], 1))
    assert len(take_outcomes(protocol)) == 1, "a repeated answer is ignored"


def test_rejected_event_has_a_reason_and_other_events_commit() -> None:
    bad, good = entry_of(1), entry_of(2)
    protocol = live_protocol(0, bad, good)
    errors = [{"field": "expected_committed_id", "message": "it is 7", "current_committed_id": 7}]
    rejected = {"id": bad.id, "status": "rejected", "reason": "validation_failed", "errors": errors}
    answer(protocol, take_one_sent(protocol, "submit_events"), rejected, result(good, 1))
    found = take_outcomes(protocol)
    assert isinstance(found[1], Refused)
    assert found[1].errors[0].current_committed_id == 7
    assert str(found[1]) == "validation_failed; expected_committed_id: it is 7"
    assert found[2] == Committed(1, 5001)
    assert take_ids(protocol) == [1]


def test_requests_are_limited_in_events_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "REQUEST_BYTES_MAX", 700)
    large = [entry_of(number, text="x" * 150) for number in range(1, 5)]
    protocol = live_protocol(0, entry_of(9, text="y" * 1000), *large)
    assert len(take_one_sent(protocol, "submit_events")["payload"]["events"]) == 1, "an oversized event is sent alone"
    protocol = live_protocol(0, *large)
    assert len(take_one_sent(protocol, "submit_events")["payload"]["events"]) == 2
    many = [entry_of(number) for number in range(1, protocols.REQUEST_EVENTS_MAX + 2)]
    monkeypatch.setattr(protocols, "REQUEST_BYTES_MAX", 10**9)
    protocol = live_protocol(0, *many)
    assert len(take_one_sent(protocol, "submit_events")["payload"]["events"]) == protocols.REQUEST_EVENTS_MAX


# --- lost connections --------------------------------------------------------------------------------


def test_unanswered_submissions_are_sent_again_first_under_the_same_ids() -> None:
    first, second, third = entry_of(1), entry_of(2), entry_of(3)
    protocol = live_protocol(0, first, second)
    take_one_sent(protocol, "submit_events")
    protocol.enqueue([third])
    protocol.disconnect()
    assert (protocol.phase, protocol.outbox_count, protocol.is_waiting) == (EventsPhase.NONE, 3, False)
    begin(protocol)
    catch_up(protocol, 0)
    again = take_one_sent(protocol, "submit_events")
    assert [one["id"] for one in again["payload"]["events"]] == [first.id, second.id, third.id]


def test_held_broadcasts_are_read_again_after_a_lost_connection() -> None:
    first, second = entry_of(1), entry_of(2)
    protocol = live_protocol(0, first, second)
    take_one_sent(protocol, "submit_events")
    broadcast(protocol, 2, 4)
    protocol.disconnect()
    assert protocol.take_events(10) == ([], 0)
    begin(protocol)
    request = take_one_sent(protocol, "sync")
    assert request["payload"]["since_committed_id"] == 0
    own = event(1, id=first.id)
    whole = {**page([], 4), "events": [own, event(2), event(3, id=second.id), event(4)]}
    protocol.receive(frame("sync_response", whole, request["msg_id"]))
    request = take_one_sent(protocol, "submit_events")
    answer(protocol, request, result(first, 1), result(second, 3))
    assert take_ids(protocol) == [1, 2, 3, 4]


def test_late_commit_of_the_old_connection_is_delivered_in_order() -> None:
    """The commit happens after the sync of the new connection, which gets an answer instead of a broadcast."""
    first, second = entry_of(1), entry_of(2)
    protocol = live_protocol(0, first)
    take_one_sent(protocol, "submit_events")
    protocol.disconnect()
    protocol.enqueue([second])
    begin(protocol)
    catch_up(protocol, 0)
    request = take_one_sent(protocol, "submit_events")
    broadcast(protocol, 2, 3)  # event 1 was committed for the old connection
    answer(protocol, request, result(first, 1), result(second, 4))
    assert take_ids(protocol) == [1, 2, 3, 4]


# --- malformed messages ---------------------------------------------------------------------------------


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
    ids=["none", "too few", "other ids", "other status", "no committed id"],
)
def test_malformed_results_do_not_lose_submissions(results: list[dict[str, Any]]) -> None:
    first, second = entry_of(1), entry_of(2)
    protocol = live_protocol(0, first, second)
    request = take_one_sent(protocol, "submit_events")
    with pytest.raises(ProtocolError):
        answer(protocol, request, *results)
    protocol.disconnect()
    assert not protocol.settled
    assert protocol.outbox_count == 2
    begin(protocol)
    catch_up(protocol, 0)
    answer(protocol, take_one_sent(protocol, "submit_events"), result(first, 1), result(second, 2))
    assert take_outcomes(protocol).keys() == {1, 2}
    assert take_ids(protocol) == [1, 2]


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
def test_malformed_message_is_a_protocol_error(garbage: str | bytes) -> None:
    protocol = live_protocol()
    with pytest.raises(ProtocolError):
        protocol.receive(garbage)


def test_unknown_messages_and_members_are_ignored() -> None:
    protocol = live_protocol()
    before = protocol.answer_count
    protocol.receive(frame("presence", {"who": ["ada"]}))
    protocol.receive(frame("presence", None, 7))
    assert (protocol.answer_count, take_sent(protocol), protocol.phase) == (before, [], EventsPhase.LIVE)
    protocol.receive(frame("event_broadcast", event(1, colour="red")))
    assert take_ids(protocol) == [1]

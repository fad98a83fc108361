"""Client side of the Events protocol: errors, busy servers, duplicated frames and a full event queue."""

from contextlib import nullcontext
from typing import Any

import pytest

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
    page,
    result,
    take_ids,
    take_one_sent,
    take_outcomes,
    take_sent,
)
from oncelog.client.events import protocol as protocols
from oncelog.client.events.protocol import EventsPhase, EventsProtocol
from oncelog.client.events.values import Committed, OutboxEntry, Refused
from oncelog.client.runtime.http import CLOSE_TOO_LARGE
from oncelog.errors import ProtocolError, ServerRefusedError

# --- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["auth_failed", "rate_limited", "server_error", "protocol_version_unsupported"])
def test_fatal_errors_are_raised_with_code_and_retry_after(code: str) -> None:
    protocol = live_protocol()
    with pytest.raises(ServerRefusedError, match=code) as caught:
        protocol.receive(error(code, retry_after_ms=70))
    assert (caught.value.code, caught.value.retry_after_ms) == (code, 70)


def test_client_without_read_rights_can_submit() -> None:
    protocol = connected_protocol(entries=(entry_of(1),))
    request = take_one_sent(protocol, "sync")
    protocol.receive(error("forbidden", request["msg_id"]))
    assert protocol.read_error == "forbidden: it is forbidden"
    assert protocol.phase is EventsPhase.ASIDE
    request = take_one_sent(protocol, "submit_events")
    answer(protocol, request, result(entry_of(1), 3))
    assert not take_sent(protocol), "the sync is not repeated automatically"
    protocol.retry_read()
    catch_up(protocol, 3, [3])
    assert take_ids(protocol) == [3]


def test_client_of_a_busy_server_syncs_during_the_pause() -> None:
    protocol = EventsProtocol("laptop", ("a",), 0, "")
    protocol.wants_events = False
    begin(protocol)
    protocol.enqueue([entry_of(1)])
    request = take_one_sent(protocol, "submit_events")
    protocol.want_events()
    protocol.receive(error("server_busy", request["msg_id"], retry_after_ms=10**9))
    assert protocol.busy_ms == protocols.BUSY_MS_MAX
    catch_up(protocol, 2, [1, 2])
    assert not take_sent(protocol)
    protocol.resume()
    answer(protocol, take_one_sent(protocol, "submit_events"), result(entry_of(1), 3))
    assert take_ids(protocol) == [1, 2, 3]


def test_refused_request_size_is_tried_again_only_after_several_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "GROWTH_REQUESTS", 3)
    entries = [entry_of(number) for number in range(1, 60)]
    protocol = live_protocol(0, *entries)
    refused, number = 0, 0
    while protocol.outbox_count:
        request = take_one_sent(protocol, "submit_events")
        items = request["payload"]["events"]
        if len(items) > 8:
            refused += 1
            protocol.receive(error("bad_request", request["msg_id"]))
            continue
        sent_entries = entries[number : number + len(items)]
        answer(protocol, request, *(result(one, number + at) for at, one in enumerate(sent_entries, 1)))
        number += len(items)
    assert refused == 5  # The requests of 59, 29 and 14 events are refused, and then one in every three.
    assert len(take_outcomes(protocol)) == 59


def test_bad_request_is_raised_for_connect_and_ignored_for_other_messages() -> None:
    protocol = EventsProtocol("laptop", ("a",), 0, "")
    protocol.connect(None)
    request = take_one_sent(protocol, "connect")
    with pytest.raises(ServerRefusedError, match="bad_request"):
        protocol.receive(error("bad_request", request["msg_id"]))
    protocol = live_protocol()
    protocol.receive(error("bad_request", "1"))
    assert protocol.phase is EventsPhase.LIVE


def test_submission_to_a_busy_server_is_retried_after_the_pause() -> None:
    entry = entry_of(1)
    protocol = live_protocol(0, entry)
    request = take_one_sent(protocol, "submit_events")
    protocol.receive(error("server_busy", request["msg_id"], retry_after_ms=40))
    assert (protocol.busy_ms, protocol.is_waiting, protocol.outbox_count) == (40, False, 1)
    protocol.enqueue([entry_of(2)])
    assert not take_sent(protocol)
    protocol.resume()
    assert protocol.busy_ms == 0
    again = take_one_sent(protocol, "submit_events")
    assert [one["id"] for one in again["payload"]["events"]] == [entry.id]
    assert again["msg_id"] != request["msg_id"]
    assert protocol.is_waiting
    protocol.resume()
    assert not take_sent(protocol), "the request is sent once"
    answer(protocol, again, result(entry, 1))
    assert len(take_one_sent(protocol, "submit_events")["payload"]["events"]) == 1


def test_busy_answer_without_retry_after_has_a_minimum_pause() -> None:
    protocol = live_protocol(0, entry_of(1))
    protocol.receive(error("server_busy", take_one_sent(protocol, "submit_events")["msg_id"]))
    assert protocol.busy_ms == protocols.BUSY_MS_MIN


@pytest.mark.parametrize("entries", [(entry_of(1),), (entry_of(1), entry_of(2))])
def test_commit_after_a_busy_answer_is_delivered_in_order(entries: tuple[OutboxEntry, ...]) -> None:
    """The old request is committed while the new connection repeats it, so neither connection gets a broadcast."""
    protocol = live_protocol(0, *entries)
    request = take_one_sent(protocol, "submit_events")
    broadcast(protocol, 1)
    protocol.receive(error("server_busy", request["msg_id"]))  # event 2 is committed for the old connection
    broadcast(protocol, 3)
    protocol.resume()
    again = take_one_sent(protocol, "submit_events")
    broadcast(protocol, 4)
    answer(protocol, again, *(result(one, number) for one, number in zip(entries, (2, 5), strict=False)))
    assert take_ids(protocol) == [1, 2, 3, 4, 5][: 3 + len(entries)]


def test_connection_lost_during_a_busy_pause_loses_no_submission() -> None:
    entry = entry_of(1)
    protocol = live_protocol(0, entry)
    protocol.receive(error("server_busy", take_one_sent(protocol, "submit_events")["msg_id"]))
    broadcast(protocol, 2)
    protocol.disconnect(CLOSE_TOO_LARGE)
    assert (protocol.outbox_count, protocol.busy_ms, protocol.settled) == (1, 0, [])
    begin(protocol)
    assert take_one_sent(protocol, "sync")["payload"]["since_committed_id"] == 0


@pytest.mark.parametrize("code", ["server_busy", "read_only", "quota_exceeded", "rate_limited"])
def test_blocked_submission_error_is_kept_until_an_outcome(code: str) -> None:
    entry = entry_of(1)
    protocol = live_protocol(0, entry)
    request = take_one_sent(protocol, "submit_events")
    with pytest.raises(ServerRefusedError) if code == "rate_limited" else nullcontext():
        protocol.receive(error(code, request["msg_id"]))
    assert str(protocol.blocked_writes.last_error).startswith(f"{code}: ")
    protocol.disconnect()
    begin(protocol)
    catch_up(protocol, 0)
    again = take_one_sent(protocol, "submit_events")
    assert str(protocol.blocked_writes.last_error).startswith(f"{code}: ")
    protocol.receive(error("bad_request", again["msg_id"]))
    assert len(take_outcomes(protocol)) == 1
    assert protocol.blocked_writes.last_error is None


def test_error_of_connect_is_not_reported_as_blocked_submissions() -> None:
    protocol = EventsProtocol("laptop", ("a",), 0, "")
    protocol.enqueue([entry_of(1)])
    protocol.connect(None)
    with pytest.raises(ServerRefusedError, match="rate_limited"):
        protocol.receive(error("rate_limited", take_one_sent(protocol, "connect")["msg_id"]))
    assert protocol.blocked_writes.last_error is None


def test_bad_request_is_split_until_the_invalid_event_is_alone() -> None:
    entries = [entry_of(number) for number in range(1, 8)]
    at_fault = entries[4]
    protocol = live_protocol(0, *entries)
    committed = 0
    requests = 0
    while protocol.outbox_count:
        requests += 1
        request = take_one_sent(protocol, "submit_events")
        ids = [one["id"] for one in request["payload"]["events"]]
        if at_fault.id in ids:
            protocol.receive(error("bad_request", request["msg_id"], field="$"))
            continue
        found = [next(entry for entry in entries if entry.id == one) for one in ids]
        answer(protocol, request, *(result(entry, committed + place) for place, entry in enumerate(found, 1)))
        committed += len(found)
    settled = take_outcomes(protocol)
    assert settled.keys() == set(range(1, 8))
    rejected = settled.pop(5)
    assert isinstance(rejected, Refused)
    assert rejected.reason == "bad_request"
    assert [one.committed_id for one in settled.values() if isinstance(one, Committed)] == [1, 2, 3, 4, 5, 6]
    assert take_ids(protocol) == [1, 2, 3, 4, 5, 6]
    assert requests < 12


def test_broadcasts_held_during_a_bad_request_are_delivered() -> None:
    protocol = live_protocol(0, entry_of(1), entry_of(2))
    request = take_one_sent(protocol, "submit_events")
    broadcast(protocol, 1, 2)
    protocol.receive(error("bad_request", request["msg_id"]))
    assert take_ids(protocol) == [1, 2]


def test_too_large_message_is_split_until_the_large_event_is_alone() -> None:
    entries = [entry_of(number) for number in range(1, 6)]
    protocol = live_protocol(0, *entries)
    committed = 0
    while protocol.outbox_count:
        request = take_one_sent(protocol, "submit_events")
        ids = [one["id"] for one in request["payload"]["events"]]
        if entries[1].id in ids:
            protocol.disconnect(CLOSE_TOO_LARGE)
            begin(protocol)
            catch_up(protocol, committed)
            continue
        found = [next(entry for entry in entries if entry.id == one) for one in ids]
        answer(protocol, request, *(result(entry, committed + place) for place, entry in enumerate(found, 1)))
        committed += len(found)
    settled = take_outcomes(protocol)
    assert settled.keys() == set(range(1, 6))
    rejected = settled.pop(2)
    assert isinstance(rejected, Refused)
    assert rejected.reason == protocols.TOO_LARGE
    assert all(isinstance(one, Committed) for one in settled.values())


def test_other_close_codes_reject_no_submission() -> None:
    protocol = live_protocol(0, entry_of(1))
    protocol.disconnect(1001)
    assert (protocol.outbox_count, protocol.settled) == (1, [])


# --- duplicated frames ----------------------------------------------------------------------------------


def test_repeated_page_is_counted_once() -> None:
    protocol = connected_protocol()
    request = take_one_sent(protocol, "sync")
    payload = frame("sync_response", page([1, 2], 2, has_more=True, upto=3), request["msg_id"])
    protocol.receive(payload)
    protocol.receive(payload)
    request = take_one_sent(protocol, "sync")
    payload = frame("sync_response", page([3], 3), request["msg_id"])
    protocol.receive(payload)
    protocol.receive(payload)
    assert not take_sent(protocol)
    assert take_ids(protocol) == [1, 2, 3]


def test_second_answer_to_a_duplicated_sync_is_merged() -> None:
    protocol = connected_protocol()
    request = take_one_sent(protocol, "sync")
    protocol.receive(frame("sync_response", page([1], 1), request["msg_id"]))
    protocol.receive(frame("sync_response", page([1, 2, 3], 4), request["msg_id"]))
    broadcast(protocol, 5)
    assert protocol.take_events(2)[1] == 2
    assert take_ids(protocol) == [3, 5]


def test_incomplete_answer_to_a_duplicated_sync_is_a_protocol_error() -> None:
    protocol = connected_protocol()
    request = take_one_sent(protocol, "sync")
    protocol.receive(frame("sync_response", page([1], 1), request["msg_id"]))
    with pytest.raises(ProtocolError, match="did not request"):
        protocol.receive(frame("sync_response", page([1, 2], 2, has_more=True, upto=9), request["msg_id"]))


def test_repeated_connected_message_is_ignored() -> None:
    protocol = live_protocol()
    protocol.receive(frame("connected", {"server_last_committed_id": 9, "epoch": "e9"}))
    assert (protocol.phase, protocol.epoch) == (EventsPhase.LIVE, "e1")


# --- full event queue ---------------------------------------------------------------------------------


def test_next_page_is_requested_after_the_event_queue_has_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "READY_EVENTS_MAX", 3)
    protocol = connected_protocol(entries=(entry_of(1),))
    request = take_one_sent(protocol, "sync")
    protocol.receive(frame("sync_response", page([1, 2], 2, has_more=True, upto=9), request["msg_id"]))
    request = take_one_sent(protocol, "sync")
    protocol.receive(frame("sync_response", page([3, 4], 4, has_more=True, upto=9), request["msg_id"]))
    assert not take_sent(protocol)
    assert (len(protocol.ready), protocol.is_waiting, protocol.phase) == (4, False, EventsPhase.CATCHING_UP)
    protocol.take_events(1)
    assert not take_sent(protocol), "the queue is still full"
    events, cursor = protocol.take_events(1)
    assert ([one.committed_id for one in events], cursor) == ([2], 2)
    assert take_one_sent(protocol, "sync")["payload"]["since_committed_id"] == 4
    protocol.take_events(1)
    assert not take_sent(protocol), "the page is requested once"


def test_full_event_queue_delays_the_sync_after_a_lost_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocols, "READY_EVENTS_MAX", 2)
    protocol = live_protocol()
    broadcast(protocol, 1, 2, 3)
    protocol.disconnect()
    begin(protocol)
    assert not take_sent(protocol)
    assert protocol.phase is EventsPhase.ASIDE
    assert take_ids(protocol) == [1, 2, 3]
    catch_up(protocol, 3)


def test_client_that_requests_no_events_can_submit_and_later_read_its_own_events() -> None:
    protocol = EventsProtocol("ada", ("a",), 0, "")
    protocol.wants_events = False
    begin(protocol)
    assert protocol.phase is EventsPhase.ASIDE
    entries = [entry_of(1, "a"), entry_of(2, "a")]
    protocol.enqueue(entries)
    request = take_one_sent(protocol, "submit_events")
    protocol.want_events()
    assert not take_sent(protocol), "without a sync the answer would have no position"
    protocol.enqueue([entry_of(3, "a")])
    answer(protocol, request, result(entries[0], 7), result(entries[1], 8))
    assert [one.entry.number for one in protocol.take_settled()] == [1, 2]
    assert (len(protocol.ready), protocol.cursor, protocol.phase) == (0, 0, EventsPhase.CATCHING_UP)
    request = take_one_sent(protocol, "sync")
    assert request["payload"]["since_committed_id"] == 0
    protocol.receive(frame("sync_response", page([6, 7, 8], 8), request["msg_id"]))
    assert take_ids(protocol) == [6, 7, 8]
    assert take_one_sent(protocol, "submit_events")


def test_events_put_back_are_delivered_next() -> None:
    protocol = live_protocol()
    broadcast(protocol, 1, 2, 3)
    events, _ = protocol.take_events(2)
    protocol.return_events(events[1:])
    assert len(protocol.ready) == 2
    assert take_ids(protocol) == [2, 3]


@pytest.mark.parametrize(
    "payload",
    [
        {**page([1], 10**25), "events": []},
        page([3, 2, 4], 4),
        {**page([], 4), "events": [event(5, committed_id=10**25)]},
    ],
)
def test_malformed_page_is_a_protocol_error(payload: dict[str, Any]) -> None:
    protocol = connected_protocol()
    request = take_one_sent(protocol, "sync")
    with pytest.raises(ProtocolError):
        protocol.receive(frame("sync_response", payload, request["msg_id"]))


@pytest.mark.parametrize("retry_after_ms", [10**25, 10**400, -1])
def test_out_of_range_retry_after_is_a_protocol_error(retry_after_ms: int) -> None:
    protocol = live_protocol(0, entry_of(1))
    request = take_one_sent(protocol, "submit_events")
    with pytest.raises(ProtocolError):
        protocol.receive(error("server_busy", request["msg_id"], retry_after_ms=retry_after_ms))

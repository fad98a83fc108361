"""Sessions of the Events API: order of results and broadcasts, during and after a sync cycle."""

import asyncio
from uuid import UUID

import orjson
import pytest
from aiohttp import WSCloseCode

from deadlines import turns, until
from engine.observable_store import do_nothing
from oncelog.core.values import Record
from oncelog.errors import StoreUnavailableError
from oncelog.server.auth.principal import parse_grants
from oncelog.server.events.hub import PendingReply
from oncelog.server.limits import CONNECT_BYTES_MAX, LONG_FRAME_BYTES, ApiLimits
from oncelog.server.send_queue import FULL_POLL_S
from oncelog.server.websocket_frames import encode_frame
from oncelog.storage.store import Query
from server.events.event_sessions import SessionServer, Tokens, code_of, item, session_server, submissions, uuid


@pytest.mark.rule("EV-14", "EV-15")
async def test_broadcast_goes_to_all_subscribers_except_the_submitting_connection() -> None:
    async with session_server() as server:
        first, second, bob = await server.connect("ada"), await server.connect("ada"), await server.connect("bob")
        for peer in (first, second, bob):
            await peer.sync("a", "b")
        await first.submit(item(1, "a", "b"))
        await first.submit(item(1, "b", "a"))
        await second.submit(item(1, "a", "b"))
        await bob.submit(item(2, "a"))
        await first.wire.wait_for_messages(5)
        assert first.received() == ["connected", "sync_response", [1], [1], 2]
        assert second.received() == ["connected", "sync_response", 1, [1], 2]
        assert bob.received() == ["connected", "sync_response", 1, [2]]
        assert bob.messages[2]["payload"] == {
            "id": uuid(1),
            "client_id": "user:ada/client-ada",
            "actor": "user:ada",
            "partitions": ["a", "b"],
            "committed_id": 1,
            "event": {"type": "t", "n": 1},
            "status_updated_at": bob.messages[2]["payload"]["status_updated_at"],
        }


@pytest.mark.rule("EV-14")
async def test_result_is_sent_between_lower_and_higher_broadcasts_of_one_group_commit() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await ada.sync("a")
        await bob.sync("a")
        server.log.hold_commits()
        for number, peer in ((1, bob), (2, ada), (3, bob), (4, ada)):
            await peer.send("submit_events", {"events": [item(number), item(10 + number)]})
        server.log.gate.open()
        await ada.wire.wait_for_messages(8)
        await bob.wire.wait_for_messages(8)
        assert ada.received()[2:] == [1, 2, [3, 4], 5, 6, [7, 8]]
        assert bob.received()[2:] == [[1, 2], 3, 4, [5, 6], 7, 8]


@pytest.mark.rule("EV-14", "EV-15")
async def test_conflicting_submission_in_flight_still_receives_the_broadcast() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.sync("a")
        server.log.hold_commits()
        await ada.send("submit_events", {"events": [item(1)]})
        await bob.send("submit_events", {"events": [{**item(1), "event": {"type": "other"}}]})
        server.log.gate.open()
        await bob.wire.wait_for_messages(4)
        assert sorted(map(str, bob.received()[2:])) == ["1", "['rejected']"]


@pytest.mark.rule("EV-15", "CO-13")
async def test_commit_by_another_process_is_broadcast_before_later_results() -> None:
    async with session_server(engine={"poll_ms": 600_000}) as server:
        ada = await server.connect("ada")
        await ada.sync("a")
        other = await server.connect("bob")
        (submission,) = submissions(item(7))
        await server.log.commit_elsewhere(submission)
        server.log.store.before_read = server.log.gate
        server.log.gate.shut()
        await ada.send("submit_events", {"events": [item(8)]})
        retry = await other.send("submit_events", {"events": [item(7)]})
        await server.log.gate.reached.wait()
        await turns()
        # The results are known, but position 1 is not delivered yet, and no higher position may precede it.
        assert ada.received() == ["connected", "sync_response"]
        assert other.received() == ["connected"]
        server.log.gate.open()
        await ada.wire.wait_for_messages(4)
        assert ada.received() == ["connected", "sync_response", 1, [2]]
        assert (await other.reply(retry))["payload"]["results"][0]["committed_id"] == 1


@pytest.mark.rule("EV-13", "EV-14")
async def test_results_that_would_overtake_broadcasts_wait_for_the_end_of_the_sync_cycle() -> None:
    async with session_server(cycle_idle_ms=10**7) as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.submit(item(1), item(2), item(3))
        page = await ada.sync(limit=2)
        await bob.submit(item(4))
        await ada.send("submit_events", {"events": [item(5)]})
        await ada.send("submit_events", {"events": [item(1)]})
        await bob.submit(item(6))
        await ada.send("submit_events", {"events": [item(6)]})
        await turns()
        # Ada has read event 1, so the result of its retry could not overtake a broadcast, only an earlier result.
        assert ada.received() == ["connected", "sync_response"]
        await ada.sync(since=page["next_since_committed_id"])
        await bob.submit(item(7))
        await ada.wire.wait_for_messages(9)
        assert ada.received() == ["connected", "sync_response", "sync_response", 4, [5], [1], 6, [6], 7]


@pytest.mark.rule("EV-13", "EV-14")
async def test_idle_sync_cycle_expires_and_releases_the_held_results() -> None:
    async with session_server(cycle_idle_ms=1) as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.submit(item(1), item(2), item(3))
        await ada.sync(limit=1)
        await bob.submit(item(4))
        await ada.send("submit_events", {"events": [item(5)]})
        await ada.wire.wait_for_messages(6)
        assert ada.received() == ["connected", "sync_response", 2, 3, 4, [5]]
        await bob.submit(item(6))
        assert (await ada.wire.wait_for_messages(7))[-1]["payload"]["committed_id"] == 6


@pytest.mark.rule("EV-13", "CO-13")
async def test_store_failure_during_a_sync_sends_no_broadcast_before_the_error() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await ada.sync("a")
        server.log.gate.shut()

        async def held_and_refused(_: object) -> None:
            await server.log.gate()
            server.log.store.before_read = do_nothing
            raise StoreUnavailableError("away")

        server.log.store.before_read = held_and_refused
        syncing = asyncio.ensure_future(ada.send("sync", {"partitions": ["b"], "since_committed_id": 0}))
        await server.log.gate.reached.wait()
        await bob.submit(item(1, "a"))
        await turns()
        assert ada.received() == ["connected", "sync_response"]
        server.log.gate.open()
        await syncing
        await ada.wire.wait_for_messages(3)
        assert ada.received()[2] == "server_error"


@pytest.mark.rule("EV-14")
async def test_result_of_several_events_is_ordered_by_its_highest_id() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.sync("a")
        server.log.hold_commits()
        await ada.send("submit_events", {"events": [item(1)]})
        await ada.send("submit_events", {"events": [item(2)]})
        await bob.send("submit_events", {"events": [item(1), item(3)]})
        server.log.gate.open()
        await bob.wire.wait_for_messages(4)
        assert bob.received() == ["connected", "sync_response", 2, [1, 3]]


@pytest.mark.rule("EV-14")
async def test_pending_result_moves_to_its_highest_id() -> None:
    """The tailer delivers the records before the verdict is reported."""
    async with session_server() as server:
        bob = await server.connect("bob")
        await bob.sync("a")
        flight = PendingReply(bob.session.subscriber)
        flight.expected_keys = [(UUID(uuid(1)).bytes, b"1"), (UUID(uuid(3)).bytes, b"3")]
        server.hub.expect_reply(flight)
        server.hub.deliver([_record(server, number) for number in (1, 2)])
        flight.frame, flight.position = encode_frame(b'{"type":"answer","payload":{}}'), 3
        server.hub.settle_reply(flight)
        await turns()
        assert bob.received() == ["connected", "sync_response"]
        server.hub.deliver([_record(server, number) for number in (3, 4)])
        await bob.wire.wait_for_messages(5)
        assert bob.received() == ["connected", "sync_response", 2, "answer", 4]
        assert server.hub._pending_replies == {}


def _record(server: SessionServer, number: int) -> Record:
    (submission,) = submissions(item(number))
    return Record(0, number, 0, 1, 1, "events", "", submission.key, b"%d" % number, "", "", 0, ("a",), submission.body)


@pytest.mark.rule("CO-22")
async def test_page_is_forbidden_if_the_grant_is_removed_while_it_is_read() -> None:
    tokens = Tokens()
    tokens.add("ada")
    tokens.add("eve", parse_grants(["a", "b"]))
    async with session_server(tokens=tokens) as server:
        ada, eve = await server.connect("ada"), await server.connect("eve")
        await ada.submit(item(1, "b"))
        await eve.sync("a")
        server.log.gate.shut()
        server.log.store.before_read = server.log.gate
        syncing = asyncio.ensure_future(eve.send("sync", {"partitions": ["b"], "since_committed_id": 0}))
        await server.log.gate.reached.wait()
        tokens.add("eve", parse_grants(["a"]))
        eve.session.renew(tokens.known["eve"])
        server.log.gate.open()
        assert code_of(await eve.reply(await syncing)) == "forbidden"
        await ada.submit(item(2, "b"), item(3, "a"))
        await eve.wire.wait_for_messages(4)
        assert eve.received() == ["connected", "sync_response", "forbidden", 3]


@pytest.mark.rule("EV-13")
async def test_sync_cycle_does_not_expire_while_its_page_is_read() -> None:
    async with session_server(cycle_idle_ms=10**7) as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.submit(*(item(number) for number in range(1, 6)))
        page = await ada.sync(limit=2)
        server.log.gate.shut()
        server.log.store.before_read = server.log.gate
        asked = {"partitions": ["a"], "since_committed_id": page["next_since_committed_id"], "limit": 2}
        syncing = asyncio.ensure_future(ada.send("sync", asked))
        await server.log.gate.reached.wait()
        server.service.limits = ApiLimits(cycle_idle_ms=1)  # expires immediately, but only while the page is read
        await ada.send_raw(
            orjson.dumps({"type": "submit_events", "protocol_version": "1.0", "payload": {"events": [item(6)]}})
        )
        await bob.submit(item(7))
        assert ada.session.subscriber._idle_timer is None
        server.service.limits = ApiLimits(cycle_idle_ms=10**7)
        server.log.gate.open()
        server.log.store.before_read = do_nothing
        await syncing
        await ada.sync(since=4)
        await ada.wire.wait_for_messages(6)
        assert ada.received()[:4] == ["connected", "sync_response", "sync_response", "sync_response"]
        assert ada.received()[4:] == [[6], 7]


@pytest.mark.rule("EV-13", "EV-14")
async def test_restarted_and_abandoned_sync_cycle_keeps_order_without_gaps() -> None:
    async with session_server(cycle_idle_ms=1) as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.submit(*(item(number) for number in range(1, 6)))
        server.service.limits = ApiLimits(cycle_idle_ms=10**7)
        await ada.sync(limit=2)
        await ada.send("submit_events", {"events": [item(6)]})
        await bob.submit(item(7), item(8))
        server.service.limits = ApiLimits(cycle_idle_ms=1)
        await ada.sync(limit=2)
        await ada.send("submit_events", {"events": [item(9)]})
        await ada.wire.wait_for_messages(10)
        assert ada.received() == ["connected", "sync_response", "sync_response", 3, 4, 5, [6], 7, 8, [9]]


@pytest.mark.rule("CO-16")
async def test_unexpected_failure_during_catch_up_closes_the_connection() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.submit(item(1), item(2))
        page = await ada.sync(limit=1)
        await bob.submit(item(3))

        async def fail_query(query: Query) -> None:
            if query.after == 2:
                raise ZeroDivisionError

        server.log.store.before_read = fail_query
        await ada.sync(since=page["next_since_committed_id"])
        await until(lambda: ada.wire.closed_with is not None)
        assert ada.wire.closed_with == (WSCloseCode.INTERNAL_ERROR, "server_error")


@pytest.mark.rule("CO-33")
async def test_failing_connection_does_not_stop_broadcasts_to_other_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with session_server() as server:
        ada, bad, bob = await server.connect("ada"), await server.connect("cyd"), await server.connect("bob")
        for peer in (bad, bob):
            await peer.sync()

        def fail_write(_: bytes) -> None:
            raise ZeroDivisionError

        monkeypatch.setattr(bad.wire, "write", fail_write)
        await ada.submit(item(1))
        await ada.submit(item(2))
        await bob.wire.wait_for_messages(4)
        assert bob.received()[2:] == [1, 2]


@pytest.mark.rule("CO-30")
async def test_long_frames_are_refused_before_connect_and_parsed_after_it() -> None:
    async with session_server() as server:
        peer = server.accept()
        await peer.send_raw(b"[" * (CONNECT_BYTES_MAX + 1))
        assert code_of((await peer.wire.wait_for_messages(1))[0]) == "bad_request"
        await peer.connect()
        long = item(1)
        long["event"]["text"] = "x" * LONG_FRAME_BYTES
        assert (await peer.submit(long))[0]["committed_id"] == 1
        assert code_of(await peer.request("submit_events", {"events": [long, long]})) == "bad_request"
        assert code_of(await peer.request("nothing", long)) == "bad_request"


@pytest.mark.rule("CO-31")
async def test_full_connection_is_not_polled_in_a_busy_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with session_server() as server:
        ada, slow = await server.connect("ada"), await server.connect("cyd")
        await slow.sync()
        asked = 0

        async def return_immediately() -> None:
            nonlocal asked
            asked += 1

        monkeypatch.setattr(slow.wire, "drain", return_immediately)
        slow.wire.is_stuck = True
        await ada.submit(item(1))
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await turns(200)
        assert 1 <= asked <= 2 + (loop.time() - began_s) / FULL_POLL_S
        slow.wire.unstick()
        assert (await slow.wire.wait_for_messages(3))[-1]["payload"]["committed_id"] == 1


async def test_closed_session_queues_no_frames() -> None:
    async with session_server() as server:
        ada, bob = await server.connect("ada"), await server.connect("bob")
        await bob.sync()
        bob.session.close(WSCloseCode.GOING_AWAY, "")
        await ada.submit(item(1))
        await turns()
        assert bob.session.send_queue.frames == []
        assert server.hub._live == {}

"""Limits of the Events API: every submission commits exactly once, and none blocks later submissions."""

from pathlib import Path

import pytest

from client.events.event_clients import client_of, committed, numbered_draft, take, wait_until_live, wait_until_settled
from databases import BOTH_STORES
from deadlines import soon, until
from oncelog.client import Committed, ConnectionState, Draft, Refused, Status
from oncelog.testing.clock import ManualClock
from server.running_server import serving


@BOTH_STORES
@pytest.mark.rule("EV-8", "EV-17", "CO-15")
async def test_rate_limited_requests_are_sent_again_on_the_same_connection(tmp_path: Path) -> None:
    clock = ManualClock()
    async with (
        serving(tmp_path, clock=clock, new_events_per_second_max=1000) as served,
        client_of(served.url) as client,
    ):
        await wait_until_live(client)
        seen: list[Status] = []
        client.on_status(seen.append)
        counts = served.server.counts
        first = await client.submit_many([Draft(numbered_draft(number)) for number in range(400)])
        await wait_until_settled(client)
        await client.submit_many([Draft(numbered_draft(number)) for number in range(400, 1100)])
        await until(lambda: counts.requests["events", "websocket", "rate_limited"] >= 2)
        assert counts.events_committed in (400, 900), "requests are committed as a whole"
        assert str(client.status().last_error).startswith("server_busy: the rate limit for new writes is exceeded")
        clock.advance(1000)
        await wait_until_settled(client)
        assert await take(client.events(), 1100) == list(range(1, 1101))
        assert all(isinstance(one.result, Committed) for one in first)
        assert not {one.state for one in seen} & {ConnectionState.OFFLINE, ConnectionState.CONNECTING}, (
            "the connection stays open"
        )
        assert counts.events_committed == 1100
        assert counts.events_replayed == 0


@BOTH_STORES
@pytest.mark.rule("EV-8", "EV-17")
async def test_client_recovers_from_the_frame_limit(tmp_path: Path) -> None:
    """The server sends the results of earlier requests, then closes the connection. The client resends the rest."""
    async with (
        serving(tmp_path, clock=ManualClock(), frames_per_second_max=4) as served,
        client_of(served.url) as client,
    ):
        await wait_until_live(client)
        assert [await committed(client, numbered_draft(number)) for number in range(1, 10)] == list(range(1, 10))
        assert await take(client.events(), 9) == list(range(1, 10))
        assert served.server.counts.requests["events", "websocket", "rate_limited"] >= 3


@pytest.mark.rule("EV-8", "EV-17", "CO-30")
async def test_event_above_the_frame_limit_is_rejected_and_later_events_are_committed(tmp_path: Path) -> None:
    async with serving(tmp_path, frame_bytes_max=20_000) as served, client_of(served.url) as client:
        await wait_until_live(client)
        large = await client.submit({"type": "large", "text": "x" * 30_000})
        behind = await client.submit_many([Draft(numbered_draft(number)) for number in range(1, 300)])
        await wait_until_settled(client)
        assert isinstance(large.result, Refused)
        assert large.result.reason == "too_large"
        assert all(isinstance(one.result, Committed) for one in behind)
        assert served.server.counts.requests["events", "websocket", "too_large"] >= 1
        assert served.server.counts.events_committed == 299


@BOTH_STORES
@pytest.mark.rule("EV-8", "EV-14", "EV-17")
async def test_request_in_flight_commits_once_after_own_events_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client does not sync while a request is in flight, so the test closes the connection (1008)."""
    async with serving(tmp_path) as served, client_of(served.url, tmp_path / "client.db") as client:
        events = client.events()
        assert await committed(client, numbered_draft(1)) == 1
        assert await take(events, 1) == [1]
        (session,) = served.server.apis.event_sessions.connections
        gate = served.hold_commits(monkeypatch)
        submissions = [await client.submit(numbered_draft(2))]
        await soon(gate.reached.wait())
        submissions += await client.submit_many(
            [Draft(numbered_draft(3)), Draft(numbered_draft(4))]
        )  # wait for the first submission
        session._close_untracked()
        await until(lambda: served.server.apis.event_sessions.connections - {session})
        gate.open()
        outcomes = [await soon(one.outcome()) for one in submissions]
        assert [one.committed_id for one in outcomes if isinstance(one, Committed)] == [2, 3, 4]
        assert await take(events, 3) == [2, 3, 4]
        assert await committed(client, numbered_draft(5)) == 5
        assert await take(events, 1) == [5]
        assert (client.status().state, client.status().last_error) == (ConnectionState.LIVE, None)
        assert [one["event"]["number"] for one in (await served.page("a")).json["events"]] == [1, 2, 3, 4, 5]

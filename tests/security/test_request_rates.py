"""Rate limits that are enabled by default: requests per actor, and frames per connection."""

from pathlib import Path

import pytest

from oncelog.server.limits import ApiLimits
from oncelog.testing.clock import ManualClock
from server.chat.chat_servers import run_server
from server.running_server import item, serving


@pytest.mark.rule("CO-25", "CO-30")
async def test_requests_per_actor_are_limited_by_default(tmp_path: Path) -> None:
    limits = ApiLimits()
    assert (limits.requests_per_second_max, limits.frames_per_second_max) == (2000, 5000)
    clock = ManualClock()
    async with run_server(tmp_path, clock=clock, requests_per_second_max=2) as server:
        for _ in range(10):  # The burst equals the requests of five seconds.
            assert (await server.http("GET", "/v1/chats", "ann")).status == 200
        late = await server.http("GET", "/v1/chats", "ann")
        assert (late.status, late.json["error"]["code"]) == (429, "RATE_LIMITED")
        assert late.headers["Retry-After"] == "1"
        assert (await server.http("GET", "/v1/chats", "bob")).status == 200, "another actor is not affected"
        clock.advance(500)
        assert (await server.http("GET", "/v1/chats", "ann")).status == 200
        assert (await server.http("GET", "/v1/chats", "ann")).status == 429


@pytest.mark.rule("CO-25", "CO-30")
async def test_request_over_the_rate_writes_nothing_and_is_accepted_later(tmp_path: Path) -> None:
    clock = ManualClock()
    async with serving(tmp_path, clock=clock, requests_per_second_max=1) as served:
        for number in range(1, 6):
            assert (await served.submit(item(number))).status == 200
        assert (await served.submit(item(6))).refusal == (429, "rate_limited")
        assert (await served.server.log.heads())[0].position == 5
        clock.advance(1000)
        assert (await served.submit(item(6))).status == 200


async def test_zero_disables_the_request_rate_limit(tmp_path: Path) -> None:
    async with serving(tmp_path, clock=ManualClock(), requests_per_second_max=0) as served:
        for number in range(1, 20):
            assert (await served.submit(item(number))).status == 200

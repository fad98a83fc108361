"""Client clocks that run ahead of the log (DE-8). The log's clock is manual."""

from pathlib import Path

import pytest

from databases import BOTH_STORES
from oncelog.testing.clock import ManualClock
from server.deltas.delta_servers import MS, change, count_rows, refusal, run_server

pytestmark = BOTH_STORES


@pytest.mark.rule("DE-8", "DE-6", "DE-4")
async def test_delta_more_than_five_seconds_ahead_refuses_the_whole_push(tmp_path: Path) -> None:
    clock = ManualClock()
    now = clock.wall_ms()
    async with run_server(tmp_path, clock=clock) as server:
        gateway = server.gateway()
        known = change(now * MS, a=1)
        ahead = change((now + 5000) * MS + 65_535, a=2)
        assert await gateway.push_accepted(known, ahead) == [(1, False), (2, False)]
        before = await count_rows(tmp_path), await gateway.snapshot()
        far = change((now + 5001) * MS, a=3)
        answer = await gateway.push(known, change(1, "r2", a=1), far, change(2, "r2", a=2))
        assert refusal(answer) == (409, "CLOCK_DRIFT")
        problem = "deltas[2].hlc: the clock is 5001 ms ahead of the log's clock; at most 5000 ms are accepted"
        expected = {"detail": problem, "error": problem, "code": "CLOCK_DRIFT", "index": 2, "serverTime": now}
        assert answer.json.items() >= {**expected, "retryAfterMs": 1, "retry_after_ms": 1}.items()
        assert answer.headers["Retry-After"] == "1"
        assert (await count_rows(tmp_path), await gateway.snapshot()) == before
        assert await gateway.push_accepted(known) == [(1, True)]
        answer = await gateway.push(change((now + 60_000) * MS, a=0))
        assert (answer.json["retryAfterMs"], answer.headers["Retry-After"]) == (55_000, "55")
        clock.advance(1)
        assert await gateway.push_accepted(known, far) == [(1, True), (3, False)]


@pytest.mark.rule("DE-4", "DE-8", "CO-18")
async def test_known_delta_is_acknowledged_regardless_of_its_clock(tmp_path: Path) -> None:
    clock = ManualClock()
    ahead = change((clock.wall_ms() + 5000) * MS, a=1)
    async with run_server(tmp_path, clock=clock) as server:
        await server.gateway().push_accepted(ahead)
    # After a restart only the store knows the delta.
    async with run_server(tmp_path, clock=clock) as server:
        assert await server.gateway().push_accepted(ahead) == [(1, True)]
        largest = change(2**64 - 1, a=2)
        assert refusal(await server.gateway().push(ahead, largest)) == (409, "CLOCK_DRIFT")
        assert await server.gateway().push_accepted(ahead) == [(1, True)]


@pytest.mark.rule("DE-8")
async def test_clock_drift_is_measured_against_log_time(tmp_path: Path) -> None:
    clock = ManualClock()
    now = clock.wall_ms()
    async with run_server(tmp_path, clock=clock) as server:
        gateway = server.gateway()
        assert await gateway.push_accepted(change(1, a=1)) == [(1, False)]
        clock.jump(-2000)
        assert await gateway.push_accepted(change((now + 5000) * MS, a=2)) == [(2, False)]
        assert refusal(await gateway.push(change((now + 5001) * MS, a=3))) == (409, "CLOCK_DRIFT")

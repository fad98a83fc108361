"""The pacing of the load generator of the benchmarks: requests in flight by connection, and overload."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from bench import ws_load
from bench.ws_load import Requests
from deadlines import until

SERVER = os.getpid()


class SimulatedConnection:
    """Passes the answer to each frame to `answered`, which may belong to another connection."""

    def __init__(self, delay_s: float) -> None:
        self._delay_s = delay_s
        self.on_text: Callable[[bytes], None]
        self.on_lost: Callable[[Exception], None]
        self.answered: SimulatedConnection = self
        self.sent = 0
        self.in_flight = 0
        self.in_flight_most = 0

    def send(self, data: bytes) -> None:
        self.sent += 1
        self.in_flight += 1
        self.in_flight_most = max(self.in_flight_most, self.in_flight)
        asyncio.get_running_loop().call_later(self._delay_s, self._answer, data)

    def _answer(self, data: bytes) -> None:
        self.in_flight -= 1
        self.answered.on_text(data)


class NumberedRequests(Requests):
    """Requests whose answers are their ids."""

    def __init__(self, connections: list[Any]) -> None:
        super().__init__(connections)
        self._requests = 0

    def request(self, number: int) -> tuple[str, bytes]:  # noqa: ARG002 - all connections send the same
        self._requests += 1
        return str(self._requests), str(self._requests).encode()

    def answer(self, number: int, text: bytes) -> str:  # noqa: ARG002 - as above
        return text.decode()


async def test_answer_on_another_connection_lets_the_sender_send_again() -> None:
    first, second, third = connections = [SimulatedConnection(0.001 * number) for number in (1, 3, 5)]
    first.answered, second.answered, third.answered = second, third, first
    requests = NumberedRequests(connections)
    found = await requests.keep_busy(SERVER, 4, 0.1)
    assert found.events == len(found.waited) == sum(one.sent for one in connections)
    assert [one.in_flight_most for one in connections] == [4, 4, 4]
    assert [one.in_flight for one in connections] == [0, 0, 0]


async def test_requests_at_a_fixed_rate_are_counted_from_when_they_were_due() -> None:
    connections = [SimulatedConnection(0.02) for _ in range(2)]
    found = await NumberedRequests(connections).pace(SERVER, 500, 0.1)
    assert found.events == len(found.waited) == 50
    assert [one.sent for one in connections] == [25, 25]
    assert min(found.waited) >= 0.02


async def test_rate_that_the_server_does_not_reach_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ws_load, "PACED_IN_FLIGHT_MAX", 1)
    connections = [SimulatedConnection(0.05) for _ in range(2)]
    with pytest.raises(ValueError, match=r"^at 1000 per second, \d\d of 100 requests were not sent$"):
        await NumberedRequests(connections).pace(SERVER, 1000, 0.1)


@pytest.mark.parametrize("is_paced", [True, False])
async def test_lost_connection_ends_a_load(is_paced: bool) -> None:
    connection = SimulatedConnection(3600)
    requests = NumberedRequests([connection])
    load = requests.pace(SERVER, 1000, 60) if is_paced else requests.keep_busy(SERVER, 4, 60)
    task = asyncio.ensure_future(load)
    await until(lambda: connection.sent)
    connection.on_lost(ConnectionError("closed"))
    with pytest.raises(ConnectionError, match="closed"):
        await task

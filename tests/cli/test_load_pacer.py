"""The pacers of `oncelog load` in virtual time: when requests are sent, and from when their latencies count."""

from collections.abc import Callable
from itertools import pairwise

import pytest

from cli.virtual_clock import VirtualClock
from oncelog.cli.load.histogram import LatencyHistogram
from oncelog.cli.load.pacer import EXTRA_TIME_SHARE, PAUSE_S_MIN, ClosedLoopPacer, OpenLoopPacer, Pacer, Schedule

TOLERANCE_S = 1e-6
"""Rounding errors of times."""


class SimulatedServer:
    """Answers requests one after another. The service time may depend on the time at which the service starts."""

    def __init__(self, clock: VirtualClock, service_s: Callable[[float], float]) -> None:
        self._clock = clock
        self._service_s = service_s
        self._free_s = 0.0
        self.pacer: Pacer
        self.sent: list[tuple[int, float, float]] = []
        """Connection, due time and time of each request, relative to the start of the test."""
        self.latencies = LatencyHistogram()
        self.in_flight: dict[int, int] = {}
        self.in_flight_most = 0
        self._start_s = clock.now_s()

    def send(self, connection: int, due_s: float) -> None:
        now_s = self._clock.now_s()
        self.sent.append((connection, due_s - self._start_s, now_s - self._start_s))
        self.in_flight[connection] = self.in_flight.get(connection, 0) + 1
        self.in_flight_most = max(self.in_flight_most, self.in_flight[connection])
        begin_s = max(now_s, self._free_s)
        self._free_s = begin_s + self._service_s(begin_s - self._start_s)
        self._clock.call_at(self._free_s, lambda: self._answer(connection, due_s))

    def _answer(self, connection: int, due_s: float) -> None:
        self.in_flight[connection] -= 1
        self.latencies.record(self._clock.now_s() - due_s)
        self.pacer.finish(connection)

    def percentile_s(self, share: float) -> float:
        seconds = self.latencies.compute_percentile_s(share)
        assert seconds is not None
        return seconds


async def run_open_loop(
    service_s: Callable[[float], float], *, connections: int, in_flight: int, per_s: float, seconds: float
) -> tuple[SimulatedServer, OpenLoopPacer]:
    clock = VirtualClock()
    server = SimulatedServer(clock, service_s)
    schedule = Schedule(clock.now_s(), per_s, seconds)
    pacer = OpenLoopPacer(server.send, connections, in_flight, schedule, clock.now_s, clock.sleep)
    server.pacer = pacer
    await clock.run(pacer.run())
    assert set(server.in_flight.values()) <= {0}
    assert pacer.due == schedule.requests == len(server.sent) + pacer.unsent
    return server, pacer


async def run_closed_loop(
    service_s: Callable[[float], float], *, connections: int, in_flight: int, seconds: float
) -> SimulatedServer:
    clock = VirtualClock()
    server = SimulatedServer(clock, service_s)
    pacer = ClosedLoopPacer(server.send, connections, in_flight, clock.now_s() + seconds, clock.now_s)
    server.pacer = pacer
    await clock.run(pacer.run())
    assert set(server.in_flight.values()) <= {0}
    return server


def stall(service_s: float, from_s: float, to_s: float) -> Callable[[float], float]:
    """Return service times of a server that stalls once."""
    return lambda now_s: service_s + (to_s - now_s if from_s <= now_s < to_s else 0.0)


# --- open loop --------------------------------------------------------------------------------------------


async def test_requests_are_sent_when_due_and_in_turn_on_all_connections() -> None:
    server, pacer = await run_open_loop(lambda _: 0.0, connections=3, in_flight=1, per_s=50, seconds=2)
    assert [connection for connection, _, _ in server.sent] == [number % 3 for number in range(100)]
    assert [due_s for _, due_s, _ in server.sent] == pytest.approx([number / 50 for number in range(100)])
    for _, due_s, sent_s in server.sent:
        assert due_s - TOLERANCE_S <= sent_s <= due_s + PAUSE_S_MIN + TOLERANCE_S
    assert (pacer.late, pacer.unsent) == (0, 0)


async def test_requests_of_a_millisecond_are_sent_together_at_a_high_rate() -> None:
    server, pacer = await run_open_loop(lambda _: 0.0, connections=4, in_flight=100, per_s=20_000, seconds=0.1)
    assert len(server.sent) == 2000
    assert all(sent_s - due_s <= PAUSE_S_MIN + TOLERANCE_S for _, due_s, sent_s in server.sent)
    assert len({sent_s for _, _, sent_s in server.sent}) <= 101
    assert pacer.late == 0


async def test_stall_delays_every_request_that_is_due_during_it() -> None:
    """The closed loop sends nothing during the stall, so its percentiles hide the stall. The open loop shows it."""
    service_s = stall(0.001, 4.0, 5.0)
    server, pacer = await run_open_loop(service_s, connections=2, in_flight=100, per_s=100, seconds=10)
    # 100 of 1,000 requests were due during the second of the stall, evenly distributed.
    assert server.percentile_s(0.89) < 0.2
    assert server.percentile_s(0.95) == pytest.approx(0.5, abs=0.1)
    assert server.percentile_s(0.99) == pytest.approx(0.9, abs=0.1)
    assert server.latencies.max_s == pytest.approx(1.0, abs=0.01)
    assert (pacer.late, pacer.unsent) == (0, 0)

    closed = await run_closed_loop(service_s, connections=2, in_flight=1, seconds=10)
    assert closed.percentile_s(0.999) < 0.01
    assert closed.latencies.max_s > 0.9


async def test_latency_of_late_requests_counts_from_when_they_were_due() -> None:
    """With one request in flight, the requests that are due during a stall are sent after it."""
    service_s = stall(0.001, 4.0, 5.0)
    server, pacer = await run_open_loop(service_s, connections=1, in_flight=1, per_s=100, seconds=10)
    assert server.percentile_s(0.99) == pytest.approx(0.9, abs=0.1)
    assert 99 <= pacer.late <= 115
    assert pacer.unsent == 0
    late = [(due_s, sent_s) for _, due_s, sent_s in server.sent if sent_s - due_s > 0.5]
    # The server catches up at 1,000 requests per second, so requests that were due 0.05 s later are also that late.
    assert all(4.0 <= due_s <= 4.57 and sent_s >= 5.0 for due_s, sent_s in late)
    assert len(late) == pytest.approx(55, abs=2)
    assert all(earlier[1] < later[1] for earlier, later in pairwise(server.sent))


async def test_server_at_half_of_the_rate_leaves_requests_unsent() -> None:
    server, pacer = await run_open_loop(lambda _: 0.02, connections=2, in_flight=5, per_s=100, seconds=10)
    end_s = 10 * (1 + EXTRA_TIME_SHARE)
    # 50 requests per second were answered, and 10 more were in flight.
    assert len(server.sent) == pytest.approx(50 * end_s + 10, abs=2)
    assert pacer.unsent == 1000 - len(server.sent)
    assert pacer.late == pytest.approx(1000 - 20, abs=5)
    assert server.in_flight_most == 5
    assert all(sent_s <= end_s + TOLERANCE_S for _, _, sent_s in server.sent)
    # The last request was sent at 10.5 s and due at 5.25 s. It waited for 10 answers.
    assert server.latencies.max_s == pytest.approx(end_s / 2 + 10 * 0.02, abs=0.1)


@pytest.mark.parametrize(("per_s", "is_reached"), [(95, True), (100, True), (104, True), (107, False), (200, False)])
async def test_rate_is_reached_if_the_server_is_at_most_five_percent_too_slow(per_s: int, is_reached: bool) -> None:
    _, pacer = await run_open_loop(lambda _: 0.01, connections=1, in_flight=1, per_s=per_s, seconds=20)
    assert (pacer.unsent == 0) is is_reached
    assert (pacer.late > 50) is (per_s > 100)


async def test_stalled_connection_delays_only_its_own_requests() -> None:
    clock = VirtualClock()
    sent: list[tuple[int, float]] = []

    def send(connection: int, due_s: float) -> None:
        sent.append((connection, clock.now_s() - due_s))
        answered_s = max(clock.now_s(), 1006.0) if connection == 1 else clock.now_s() + 0.001
        clock.call_at(answered_s, lambda: pacer.finish(connection))

    pacer = OpenLoopPacer(send, 4, 2, Schedule(clock.now_s(), 40, 10), clock.now_s, clock.sleep)
    await clock.run(pacer.run())
    assert max(late_s for connection, late_s in sent if connection != 1) < 0.01
    assert max(late_s for connection, late_s in sent if connection == 1) > 5
    assert (len(sent), pacer.unsent) == (400, 0)


async def test_requests_that_became_due_while_the_client_was_paused_are_sent_at_once() -> None:
    clock = VirtualClock()
    sent: list[tuple[float, float]] = []

    async def sleep(seconds: float) -> None:
        """Sleep 3 seconds too long once."""
        await clock.sleep(seconds + 3 if len(sent) == 20 else seconds)

    def send(connection: int, due_s: float) -> None:
        sent.append((due_s - 1000, clock.now_s() - 1000))
        clock.call_at(clock.now_s(), lambda: pacer.finish(connection))

    pacer = OpenLoopPacer(send, 1, 1000, Schedule(clock.now_s(), 10, 10), clock.now_s, sleep)
    await clock.run(pacer.run())
    together = [due_s for due_s, sent_s in sent if sent_s == pytest.approx(5.0)]
    assert together == pytest.approx([2.0 + number / 10 for number in range(31)])
    assert (len(sent), pacer.late, pacer.unsent) == (100, 0, 0)


# --- closed loop ------------------------------------------------------------------------------------------


async def test_closed_loop_keeps_the_requests_in_flight_until_the_end() -> None:
    server = await run_closed_loop(lambda _: 0.01, connections=3, in_flight=4, seconds=2)
    assert [connection for connection, _, sent_s in server.sent if not sent_s] == [0] * 4 + [1] * 4 + [2] * 4
    assert server.in_flight_most == 4
    assert len(server.sent) == pytest.approx(200 + 12, abs=1)
    assert all(due_s == sent_s < 2 for _, due_s, sent_s in server.sent)
    assert server.percentile_s(0.5) == pytest.approx(12 * 0.01, rel=0.01)


async def test_closed_loop_without_time_sends_nothing() -> None:
    assert (await run_closed_loop(lambda _: 0.01, connections=3, in_flight=4, seconds=0)).sent == []

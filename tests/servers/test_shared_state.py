"""State that servers share in addition to records: leases, consumer cursors and the rate limit for new events."""

import asyncio
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from idempotency.test_once_processes import LONG_LEASE_S, SCRIPT, SHORT_LEASE_S, Worker, runs
from oncelog.core.values import Applied, Refused
from oncelog.engine.log import open_log
from oncelog.testing.clock import ManualClock
from scripts import start_script
from server.running_server import item, serving
from servers.shared_logs import event, limits, position_of

PROCESSES = 4
CALLERS = 25
RATE = 20


@contextmanager
def workers(database: str, path: Path, leases_s: Sequence[float], hold: str) -> Iterator[list[Worker]]:
    """Start processes that call the same function with the same key on one database."""
    with ExitStack() as stack:
        found = [
            Worker(stack.enter_context(start_script(SCRIPT, database, path / "ran", CALLERS, lease_s, hold)))
            for lease_s in leases_s
        ]
        for worker in found:
            assert worker.line() == "ready"
        yield found


@pytest.mark.rule("RU-7", "CO-14")
def test_callers_in_four_processes_run_the_function_once(database: str, tmp_path: Path) -> None:
    with workers(database, tmp_path, [LONG_LEASE_S] * PROCESSES, "no") as found:
        for worker in found:
            worker.go_on()
        answers = [line for worker in found for line in worker.lines()]
    (ran,) = runs(tmp_path)
    assert answers.count(f"got {ran}") == PROCESSES * CALLERS
    assert answers.count("done") == PROCESSES


@pytest.mark.rule("RU-7")
def test_one_process_takes_over_the_lease_of_a_killed_process(database: str, tmp_path: Path) -> None:
    leases_s = [SHORT_LEASE_S] + [LONG_LEASE_S] * (PROCESSES - 1)
    with workers(database, tmp_path, leases_s, "hold") as (first, *others):
        first.go_on()
        assert first.line() == "holding"
        for worker in others:
            worker.go_on()
        first.end_with_signal(signal.SIGKILL)
        answers = [line for worker in others for line in worker.lines()]
    ran = runs(tmp_path)
    assert ran[0] == first.pid
    assert len(ran) == 2
    assert answers.count(f"got {ran[1]}") == len(others) * CALLERS


@pytest.mark.rule("RU-7")
def test_process_frozen_beyond_its_lease_cannot_complete(database: str, tmp_path: Path) -> None:
    with workers(database, tmp_path, [SHORT_LEASE_S, LONG_LEASE_S], "hold") as (first, second):
        first.go_on()
        assert first.line() == "holding"
        first.stop()
        second.go_on()
        assert second.lines() == [f"got {second.pid}"] * CALLERS + ["done"]
        first.end_with_signal(signal.SIGCONT)
        first.go_on()
        assert set(first.lines()) <= {f"got {second.pid}", "raised LeaseLostError", "done"}
    assert runs(tmp_path) == [first.pid, second.pid]


@pytest.mark.rule("CO-42")
async def test_consumer_resumes_through_a_second_log(database: str) -> None:
    async with open_log(database, limits=limits()) as one, open_log(database, limits=limits()) as other:
        for number in range(1, 11):
            assert position_of(await one.submit(event(number))) == number
        assert await one.commit_cursor("reader", 4) == Applied(changed=True)
        async with other.follow(consumer="reader") as records:
            seen = [await anext(records) for _ in range(6)]
        assert [record.position for record in seen] == list(range(5, 11))
        assert await other.commit_cursor("reader", 9) == Applied(changed=True)
        back = await one.commit_cursor("reader", 6)
        assert isinstance(back, Refused) or not back.changed
        (consumer,) = await one.consumers()
        assert (consumer.name, consumer.cursor, consumer.lag) == ("reader", 9, 1)
        moved = await asyncio.gather(
            *[log.commit_cursor("racer", cursor) for cursor in range(1, 11) for log in (one, other)]
        )
        assert all(isinstance(verdict, Applied | Refused) for verdict in moved)
        assert [(found.name, found.cursor) for found in await other.consumers()] == [("racer", 10), ("reader", 9)]


@pytest.mark.rule("CO-15", "CO-30")
async def test_rate_limit_of_new_events_is_shared_by_all_servers(database: str, tmp_path: Path) -> None:
    """Together, the servers accept as many new events as the rate allows. They still answer known events."""
    clock = ManualClock()
    async with (
        serving(tmp_path, store=database, clock=clock, new_events_per_second_max=RATE) as one,
        serving(tmp_path, store=database, clock=clock, new_events_per_second_max=RATE) as other,
    ):
        asked = [(one, other)[number % 2].submit(item(number)) for number in range(1, 4 * RATE + 1)]
        answers = await asyncio.gather(*asked)
        taken = [answer for answer in answers if answer.status == 200]
        limited = [answer for answer in answers if answer.status != 200]
        assert all(answer.refusal == (429, "rate_limited") for answer in limited)
        assert (len(taken), len(limited)) == (RATE, 3 * RATE)
        known = [number for number, answer in enumerate(answers, 1) if answer.status == 200]
        for number in known:
            assert (await other.submit(item(number))).status == 200
            assert (await one.submit(item(number))).status == 200

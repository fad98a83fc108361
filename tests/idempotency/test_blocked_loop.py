"""An async function that blocks the event loop keeps its lease, up to its maximum run time."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import monotonic, time
from typing import Any, Final

import pytest

import oncelog
from cli.processes import Command
from databases import BOTH_STORES, log_at
from deadlines import WAIT_S, soon, until
from engine.observable_store import Gate
from oncelog import LeaseLostError, once, scope_of
from oncelog.core.policy import RUNS
from oncelog.core.values import Lease, Request
from oncelog.engine import lease_watchdog, leases
from oncelog.engine.held_lease import HeldLease
from oncelog.errors import StoreUnavailableError
from oncelog.idempotency.call_key import build_policy
from oncelog.idempotency.once import RETENTION_DEFAULT
from oncelog.storage.store import BatchResult
from oncelog.testing.clock import ManualClock
from scripts import read_line, start_script, write_line

SCRIPT: Final = Path(__file__).with_name("blocked_worker.py")
LEASE_S: Final = 3
"""Long enough that even a busy machine can renew the lease in its second half."""
SHORT_S: Final = 0.2
LONG_S: Final = 600
OUTER: Final = (build_policy("once", "outer", RETENTION_DEFAULT), scope_of("once", "outer"), b"outer")
RUN: Final = (RUNS, scope_of("runs", 12), oncelog.run_key(None, 12, "tool.execute", "dice", None, {}))


@contextmanager
def start_two_workers(path: Path, lease_s: float, run_s_max: float) -> Iterator[tuple[Command, Command]]:
    """Start a process whose tool blocks the event loop, and a process that requests the same results."""
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(start_script(SCRIPT, log_at(path / "app.db"), path / "ran", *arguments))
            for arguments in [(lease_s, run_s_max, "block"), (LONG_S, LONG_S, "no")]
        )
        for worker in (first, second):
            assert read_line(worker) == "ready"
        yield first, second


def pids(path: Path) -> list[int]:
    return [int(pid) for pid in (path / "ran").read_text().split()]


async def list_leases(log: oncelog.Log) -> list[Lease | None]:
    found = [await log.lookup(key, policy=policy, scope=scope) for policy, scope, key in (OUTER, RUN)]
    return [outcome.lease for outcome in found]


@BOTH_STORES
@pytest.mark.rule("RU-14", "RU-7")
async def test_tool_that_blocks_its_event_loop_beyond_the_lease_runs_once(tmp_path: Path) -> None:
    with start_two_workers(tmp_path, LEASE_S, LONG_S) as (first, second):
        write_line(first)
        assert await asyncio.to_thread(read_line, first) == "blocked"
        write_line(second)
        async with oncelog.open(log_at(tmp_path / "app.db")) as log:
            granted = [lease.until_ms for lease in await list_leases(log) if lease is not None]

            async def is_renewed_or_taken_over() -> bool:
                if len(pids(tmp_path)) > 1:
                    return True
                renewed = [lease.until_ms for lease in await list_leases(log) if lease is not None]
                return time() * 1000 > max(granted) and min(renewed) > max(granted)

            await until(is_renewed_or_taken_over)
        assert pids(tmp_path) == [first.pid]
        write_line(first)
        for worker in (first, second):
            lines = [await asyncio.to_thread(read_line, worker) for _ in range(3)]
            assert lines == [f"got {first.pid}", f"got {first.pid}", "done"]
    assert pids(tmp_path) == [first.pid]


@BOTH_STORES
@pytest.mark.rule("RU-14", "RU-7")
def test_blocked_tool_is_taken_over_after_its_maximum_run_time_and_cannot_complete(tmp_path: Path) -> None:
    with start_two_workers(tmp_path, SHORT_S, SHORT_S) as (first, second):
        write_line(first)
        assert read_line(first) == "blocked"
        write_line(second)
        assert [read_line(second) for _ in range(3)] == [f"got {second.pid}", f"got {second.pid}", "done"]
        write_line(first)
        assert read_line(first) == "raised LeaseLostError"
        assert [read_line(first) for _ in range(2)] == [f"got {second.pid}", "done"]
    assert pids(tmp_path) == [first.pid, second.pid]


class BlockedLoop:
    """Blocks the event loop until the watchdog has renewed the leases, after some failed attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: int) -> None:
        self.attempts = 0
        self._failures = failures
        self._renewed = threading.Event()
        self._renew = lease_watchdog.LeaseWatchdog._commit_renewals
        monkeypatch.setattr(lease_watchdog.LeaseWatchdog, "_commit_renewals", self._count_attempts())

    def _count_attempts(self) -> Callable[..., Awaitable[BatchResult]]:
        async def commit(watchdog: lease_watchdog.LeaseWatchdog, held: Sequence[HeldLease]) -> BatchResult:
            self.attempts += 1
            if self.attempts <= self._failures:
                raise StoreUnavailableError("no connection")
            result = await self._renew(watchdog, held)
            self._renewed.set()
            return result

        return commit

    def block(self) -> None:
        assert self._renewed.wait(WAIT_S)


def has_watchdog(log: oncelog.Log) -> bool:
    thread = log._lease_manager._watchdog._thread
    return thread is not None and thread.is_alive()


@BOTH_STORES
@pytest.mark.rule("RU-14")
async def test_watchdog_retries_a_failed_renewal_and_stops_with_the_last_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loop = BlockedLoop(monkeypatch, failures=2)
    log = oncelog.open(log_at(tmp_path / "app.db"), clock=ManualClock())

    @once(log, name="work", lease_s=SHORT_S)
    async def work() -> int:
        loop.block()
        return 1

    with caplog.at_level(logging.INFO, "oncelog.work"):
        async with log:
            assert await work() == 1
            await until(lambda: not has_watchdog(log))
    assert loop.attempts >= 3
    assert caplog.text.count("the event loop is blocked, and its leases are not renewed: no connection") == 1
    assert "a thread renewed 1 leases" in caplog.text


@pytest.mark.rule("RU-14")
async def test_closing_the_log_stops_the_watchdog_during_running_work(tmp_path: Path) -> None:
    log, gate = oncelog.open(tmp_path / "app.db"), Gate()

    @once(log, name="work", lease_s=LONG_S)
    async def work() -> None:
        await gate()

    gate.shut()
    async with log:
        call = asyncio.create_task(work())
        await gate.reached.wait()
        assert has_watchdog(log)
    assert not has_watchdog(log)
    gate.open()
    with pytest.raises(oncelog.ClosedError):
        await call


@pytest.mark.rule("RU-14")
def test_watchdog_stops_with_an_event_loop_whose_log_was_not_closed(tmp_path: Path) -> None:
    log = oncelog.open(tmp_path / "app.db")

    @once(log, name="work", lease_s=SHORT_S)
    async def work() -> None:
        pass

    async def open_and_work() -> None:
        await log.__aenter__()
        await work()

    asyncio.run(open_and_work())
    thread = log._lease_manager._watchdog._thread
    assert thread is not None
    thread.join(WAIT_S)
    assert not has_watchdog(log)


@pytest.mark.rule("RU-14", "RU-7")
async def test_work_beyond_its_maximum_run_time_is_taken_over_in_the_same_process(
    place: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock, gate = ManualClock(), Gate()
    runs: list[int] = []
    log = oncelog.open(place, clock=clock)

    @once(log, name="work", lease_s=0.004, run_s_max=0.001)
    async def work() -> int:
        runs.append(len(runs) + 1)
        number = runs[-1]
        if number == 1:
            await gate()
        return number

    gate.shut()
    async with log:
        first = asyncio.create_task(work())
        await gate.reached.wait()
        second = asyncio.create_task(work())
        await until(lambda: "run_s_max" in caplog.text)
        clock.advance(10)
        assert await soon(second) == 2
        gate.open()
        with pytest.raises(LeaseLostError):
            await first
    assert runs == [1, 2]


@BOTH_STORES
@pytest.mark.rule("RU-14", "CO-14")
async def test_lease_that_was_taken_over_before_its_grant_was_received_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another function can block the event loop between the commit of a claim and its verdict."""
    clock, ahead_s, runs = ManualClock(), [0.0], []
    monkeypatch.setattr(leases, "monotonic", lambda: monotonic() + ahead_s[0])
    logs = [oncelog.open(log_at(tmp_path / "app.db"), clock=clock) for _ in range(2)]

    async with logs[0] as log, logs[1] as other:

        @once(other, name="work", lease_s=LONG_S)
        async def work_elsewhere() -> str:
            runs.append("other")
            return "other"

        @once(log, name="work", lease_s=30)
        async def work() -> str:
            runs.append("own")
            return "own"

        commit = log._store.commit

        async def commit_and_block(batch: Sequence[Request], *arguments: Any) -> object:
            decided = await commit(batch, *arguments)
            monkeypatch.setattr(log._store, "commit", commit)
            clock.advance(30_000)
            assert await work_elsewhere() == "other"
            ahead_s[0] += 30
            return decided

        monkeypatch.setattr(log._store, "commit", commit_and_block)
        assert await work() == "other"
    assert runs == ["other"]

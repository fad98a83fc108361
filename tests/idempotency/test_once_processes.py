"""Several processes call a function with one key. It runs once, and another process takes over after a kill."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from cli.processes import Command
from databases import BOTH_STORES, log_at
from deadlines import wait_until
from scripts import read_line, start_script, write_line

pytestmark = BOTH_STORES

PROCESSES: Final = 4
CALLERS: Final = 25
SHORT_LEASE_S: Final = 0.2
"""Lease of a process that is killed or stopped."""
LONG_LEASE_S: Final = 600
"""Lease of a process that takes over. It must not expire, even on a busy machine."""
SCRIPT: Final = str(Path(__file__).with_name("once_worker.py"))


class Worker:
    def __init__(self, process: Command) -> None:
        self._process = process
        self.pid = process.pid

    def line(self) -> str:
        return read_line(self._process)

    def lines(self) -> list[str]:
        """Read all lines until the process exits."""
        found = []
        while line := self.line():
            found.append(line)
        return found

    def go_on(self) -> None:
        write_line(self._process)

    def end_with_signal(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, how)

    def stop(self) -> None:
        """Tell the process to stop itself when it holds no store lock, and wait until it has stopped."""
        write_line(self._process, "stop")
        status = Path(f"/proc/{self.pid}/stat")
        wait_until(lambda: status.read_text().rpartition(") ")[2].startswith("T"), status.read_text)


@contextmanager
def workers(path: Path, leases_s: Sequence[float], callers: int, hold: str) -> Iterator[list[Worker]]:
    log, ran = log_at(path / "app.db"), str(path / "ran")
    with ExitStack() as stack:
        found = [
            Worker(stack.enter_context(start_script(SCRIPT, log, ran, callers, lease_s, hold))) for lease_s in leases_s
        ]
        for worker in found:
            assert worker.line() == "ready"
        yield found


def runs(path: Path) -> list[int]:
    return [int(pid) for pid in (path / "ran").read_text().split()]


@pytest.mark.rule("RU-7", "CO-14")
def test_concurrent_callers_in_four_processes_run_the_function_once(tmp_path: Path) -> None:
    with workers(tmp_path, [LONG_LEASE_S] * PROCESSES, CALLERS, "no") as all_workers:
        for worker in all_workers:
            worker.go_on()
        answers = [line for worker in all_workers for line in worker.lines()]
    ran = runs(tmp_path)
    assert len(ran) == 1
    assert answers.count(f"got {ran[0]}") == PROCESSES * CALLERS
    assert answers.count("done") == PROCESSES


@pytest.mark.rule("RU-7")
def test_exactly_one_process_takes_over_after_a_kill(tmp_path: Path) -> None:
    with workers(tmp_path, [SHORT_LEASE_S] + [LONG_LEASE_S] * (PROCESSES - 1), CALLERS, "hold") as all_workers:
        first, *others = all_workers
        first.go_on()
        assert first.line() == "holding"
        for worker in others:
            worker.go_on()
        first.end_with_signal()
        answers = [line for worker in others for line in worker.lines()]
    ran = runs(tmp_path)
    assert ran[0] == first.pid
    assert len(ran) == 2
    assert ran[1] != first.pid
    assert answers.count(f"got {ran[1]}") == len(others) * CALLERS


@pytest.mark.rule("RU-7")
def test_stopped_process_cannot_complete_after_a_takeover(tmp_path: Path) -> None:
    with workers(tmp_path, [SHORT_LEASE_S, LONG_LEASE_S], 1, "hold") as (first, second):
        first.go_on()
        assert first.line() == "holding"
        first.stop()
        second.go_on()
        assert second.lines() == [f"got {second.pid}", "done"]
        first.end_with_signal(signal.SIGCONT)
        first.go_on()
        assert first.lines() == ["raised LeaseLostError", "done"]
    assert runs(tmp_path) == [first.pid, second.pid]

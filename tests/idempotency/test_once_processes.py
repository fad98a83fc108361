"""Several processes call one function with one key: it runs once, and passes on when the one that runs it dies."""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import pytest

from crash.processes import started
from databases import BOTH_STORES, log_at

pytestmark = BOTH_STORES

PROCESSES: Final = 4
CALLERS: Final = 25
LEASE_S: Final = 2
"""Longer than whoever takes over needs to complete: beyond it a third would, on a busy machine."""
SCRIPT: Final = str(Path(__file__).with_name("once_worker.py"))


class Worker:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process
        self.pid = process.pid

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().decode().strip()

    def lines(self) -> list[str]:
        """All to the end of the process."""
        found = []
        while line := self.line():
            found.append(line)
        return found

    def go_on(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        os.kill(self.pid, how)


@contextmanager
def workers(path: Path, count: int, callers: int, lease_s: float, hold: str) -> Iterator[list[Worker]]:
    arguments = (log_at(path / "app.db"), str(path / "ran"), str(callers), str(lease_s), hold)
    with ExitStack() as stack:
        found = [Worker(stack.enter_context(started(SCRIPT, *arguments))) for _ in range(count)]
        for worker in found:
            assert worker.line() == "ready"
        yield found


def runs(path: Path) -> list[int]:
    return [int(pid) for pid in (path / "ran").read_text().split()]


@pytest.mark.rule("RU-7", "CO-14")
def test_a_hundred_callers_in_four_processes_run_it_once(tmp_path: Path) -> None:
    with workers(tmp_path, PROCESSES, CALLERS, 30, "no") as all_of_them:
        for worker in all_of_them:
            worker.go_on()
        answers = [line for worker in all_of_them for line in worker.lines()]
    ran = runs(tmp_path)
    assert len(ran) == 1
    assert answers.count(f"got {ran[0]}") == PROCESSES * CALLERS
    assert answers.count("done") == PROCESSES


@pytest.mark.rule("RU-7")
def test_exactly_one_takes_over_from_a_process_that_is_killed(tmp_path: Path) -> None:
    with workers(tmp_path, PROCESSES, CALLERS, LEASE_S, "hold") as all_of_them:
        first, *others = all_of_them
        first.go_on()
        assert first.line() == "holding"
        for worker in others:
            worker.go_on()
        first.end()
        answers = [line for worker in others for line in worker.lines()]
    ran = runs(tmp_path)
    assert ran[0] == first.pid
    assert len(ran) == 2
    assert ran[1] != first.pid
    assert answers.count(f"got {ran[1]}") == len(others) * CALLERS


@pytest.mark.rule("RU-7")
def test_who_comes_back_after_its_lease_cannot_complete(tmp_path: Path) -> None:
    with workers(tmp_path, 2, 1, 0.2, "hold") as (first, second):
        first.go_on()
        assert first.line() == "holding"
        first.end(signal.SIGSTOP)
        second.go_on()
        assert second.lines() == [f"got {second.pid}", "done"]
        first.end(signal.SIGCONT)
        first.go_on()
        assert first.lines() == ["raised LeaseLostError", "done"]
    assert runs(tmp_path) == [first.pid, second.pid]

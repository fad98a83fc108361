"""Several server processes behind the idempotency middleware share one log."""

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Condition, Thread
from typing import Final

import httpx
import pytest

from cli.processes import Command
from databases import POSTGRES, SQLITE, log_at
from deadlines import WAIT_S
from idempotency import asgi_worker
from idempotency.asgi_application import (
    is_replay,
)
from scripts import start_script, write_line

PROCESSES: Final = 3
REQUESTS: Final = 100
LONG_LEASE_S: Final = 600
SHORT_LEASE_S: Final = 0.5
BOTH_FRAMEWORKS_AND_STORES: Final = pytest.mark.parametrize(
    ("kind", "store_kind"), [("starlette", SQLITE), ("fastapi", SQLITE), ("starlette", POSTGRES)], indirect=True
)
"""Combinations that cover each framework and each store once, because starting a process takes seconds."""


class Servers:
    """Server processes on one log. Each has a separate port, so that the test can choose the process for a request."""

    def __init__(self, stack: ExitStack, path: str, kind: str, leases_s: Sequence[float]) -> None:
        self._changed = Condition()
        self._ports: dict[int, int] = {}
        self.lines: Counter[str] = Counter()
        self.running: list[int] = []
        """Numbers of the processes that have started to run the request, in order."""
        self.processes = [
            stack.enter_context(start_script(asgi_worker.__file__, path, kind, lease_s)) for lease_s in leases_s
        ]
        for number, process in enumerate(self.processes):
            Thread(target=self._read_lines, args=(number, process), daemon=True).start()

    async def wait(self, condition: Callable[[], bool]) -> None:
        await asyncio.to_thread(self._wait, condition)

    async def until_ready(self) -> None:
        await self.wait(lambda: len(self._ports) == len(self.processes))

    def finish(self, *numbers: int) -> None:
        """Let the request finish in these processes."""
        for number in numbers:
            write_line(self.processes[number])

    def kill(self, number: int) -> None:
        self.processes[number].kill()
        assert self.processes[number].wait(WAIT_S) == -signal.SIGKILL

    async def send(self, client: httpx.AsyncClient, number: int) -> httpx.Response:
        url = f"http://127.0.0.1:{self._ports[number]}/pay"
        return await client.post(url, headers={"Idempotency-Key": "k"}, json={"amount": 5})

    def _wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), (self.lines, self.running)

    def _read_lines(self, number: int, process: Command) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            word, *more = line.split()
            with self._changed:
                self.lines[word] += 1
                if word == "port":
                    self._ports[number] = int(more[0])
                elif word == "run":
                    self.running.append(number)
                self._changed.notify_all()


def check_one_answer(answers: Sequence[httpx.Response], process: Command) -> None:
    """Assert that all answers come from one run by this process, and that all but one are replays."""
    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert answers[0].json()["process"] == process.pid
    assert sorted(is_replay(answer) for answer in answers) == [False] + [True] * (len(answers) - 1)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=WAIT_S, limits=httpx.Limits(max_connections=None)) as client:
        yield client


@BOTH_FRAMEWORKS_AND_STORES
@pytest.mark.rule("RU-7", "RU-11")
async def test_concurrent_requests_to_three_processes_run_once(
    kind: str, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    with ExitStack() as stack:
        servers = Servers(stack, log_at(tmp_path / "log.db"), kind, [LONG_LEASE_S] * PROCESSES)
        await servers.until_ready()
        sending = [asyncio.ensure_future(servers.send(client, number % PROCESSES)) for number in range(REQUESTS)]
        await servers.wait(lambda: servers.lines["request"] == REQUESTS and bool(servers.running))
        assert not any(task.done() for task in sending)
        servers.finish(*range(PROCESSES))
        answers = await asyncio.gather(*sending)
        assert len(servers.running) == 1
        check_one_answer(answers, servers.processes[servers.running[0]])


@BOTH_FRAMEWORKS_AND_STORES
@pytest.mark.rule("RU-7", "RU-11")
async def test_exactly_one_process_takes_over_the_request_of_a_killed_process(
    kind: str, tmp_path: Path, client: httpx.AsyncClient
) -> None:
    with ExitStack() as stack:
        leases_s = [SHORT_LEASE_S] + [LONG_LEASE_S] * (PROCESSES - 1)
        servers = Servers(stack, log_at(tmp_path / "log.db"), kind, leases_s)
        await servers.until_ready()
        lost = asyncio.ensure_future(servers.send(client, 0))
        await servers.wait(lambda: servers.running == [0])
        servers.kill(0)
        with pytest.raises(httpx.RemoteProtocolError):
            await lost
        others = [asyncio.ensure_future(servers.send(client, 1 + number % 2)) for number in range(20)]
        await servers.wait(lambda: servers.lines["request"] == 21 and len(servers.running) > 1)
        servers.finish(1, 2)
        answers = await asyncio.gather(*others)
        assert len(servers.running) == 2
        check_one_answer(answers, servers.processes[servers.running[1]])

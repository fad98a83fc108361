"""Four processes on one file, two of them killed in between: one order, one outcome for each write, for all of them."""

import asyncio
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from threading import Condition, Thread

import pytest

from crash import shared_worker
from crash.load import SUBMITTERS, WRITES, verdict_in, write_of
from crash.observing import (
    answer_to,
    demand_same_receipts,
    demand_sound,
    demand_stored,
    history_of,
    say,
)
from crash.processes import started
from crash.shared_worker import EVENTS, ROUNDS
from oncelog.core.invariants import Answer, History, Reading
from oncelog.core.values import KeyIdentity, key_identity
from oncelog.stores.sqlite import SqliteStore
from oncelog.stores.sqlite.verifying import verify_file
from oncelog.stores.verifying.findings import Passed

PROCESSES = 4
KILLED = 2
WRITES_EACH = SUBMITTERS * WRITES * ROUNDS
PATIENCE_S = 120
"""How long a process may take before it counts as starved: many times as long as it does."""


class Worker:
    """A process, and all that it has told so far."""

    def __init__(self, stack: ExitStack, name: str, *arguments: object) -> None:
        self.name = name
        self.answers: list[Answer] = []
        self.seen: list[tuple[int, KeyIdentity]] = []
        self.took_s: float | None = None
        self.wrong = b""
        """An answer that it must not get."""
        self.state = "new"
        self._changed = Condition()
        self._process = stack.enter_context(started(shared_worker.__file__, *map(str, arguments)))
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        assert self._process.stdin is not None
        self.wait(lambda: self.state == "ready")
        self._process.stdin.write(b"go\n")
        self._process.stdin.flush()

    def demand_killed(self) -> None:
        self.wait(lambda: self.state == "dead")
        assert self._process.wait(PATIENCE_S) == -signal.SIGKILL

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            told = self._changed.wait_for(lambda: condition() or self.wrong, PATIENCE_S)
            assert not self.wrong, f"{self.name} was answered {self.wrong!r}"
            assert told, f"{self.name} starved: {len(self.answers)} answers"

    def finish(self) -> None:
        self.wait(lambda: self.state in {"end", "dead"})
        assert self._process.wait(PATIENCE_S) == 0
        self._thread.join()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._take(line)
                self._changed.notify_all()
        with self._changed:
            self.state = self.state if self.state == "end" else "dead"
            self._changed.notify_all()

    def _take(self, line: bytes) -> None:
        if line in {b"ready\n", b"end\n"}:
            self.state = line.decode().strip()
        elif line.startswith(b"done"):
            self.took_s = float(line.split()[1])
        elif line.startswith(b"S"):
            _, position, key = line.split()
            self.seen.append((int(position), key_identity(write_of(bytes.fromhex(key.decode())))))
        elif line.startswith(b"?"):
            self.wrong = line
        else:
            self.answers.append(answer_to(*verdict_in(line)))


async def found(path: Path, workers: list[Worker]) -> History:
    answers = [answer for worker in workers for answer in worker.answers]
    readings = [
        Reading(worker.name, 0, 0, EVENTS if worker.state == "end" else len(worker.seen), worker.seen)
        for worker in workers
    ]
    store = SqliteStore(path)
    await store.open()
    try:
        return await history_of(store, answers, readings)
    finally:
        await store.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.rule("CO-12")
@pytest.mark.rule("CO-13")
@pytest.mark.rule("CO-14")
@pytest.mark.parametrize("seal_keys", [0, 64], ids=["as it is", "small segments"])
def test_processes_that_share_a_file_agree_on_everything(
    tmp_path: Path, stack: ExitStack, seed: int, seal_keys: int
) -> None:
    path = tmp_path / "log.db"
    random = Random(seed)
    dying = [random.randint(1, WRITES_EACH - 1) for _ in range(KILLED)] + [0] * (PROCESSES - KILLED)
    alive = [Worker(stack, f"process {one}", path, seal_keys, seed + one, dying[one]) for one in range(PROCESSES)]
    for worker in alive:
        worker.begin()  # all of them at once, on a file that is not there yet
    gone = []
    for number in range(KILLED):
        victim = alive[number]
        victim.demand_killed()
        gone.append(victim)
        alive[number] = Worker(stack, f"{victim.name} again", path, seal_keys, seed + PROCESSES + number, 0)
        alive[number].begin()
    for worker in alive:
        worker.finish()
    say(", ".join(f"{worker.name}: {len(worker.answers)} answers in {worker.took_s} s" for worker in alive))

    assert [len(worker.answers) for worker in alive] == [WRITES_EACH] * PROCESSES
    history = asyncio.run(found(path, [*alive, *gone]))
    demand_sound(history)
    demand_stored(history.answers, history)
    receipts = demand_same_receipts(history.answers)
    assert len(receipts) == len(history.records) == WRITES_EACH
    for worker in alive:
        assert [position for position, _ in worker.seen] == list(range(1, EVENTS + 1))
    *_, last = verify_file(path)
    assert isinstance(last, Passed), last


def test_a_log_waits_for_a_process_that_makes_it_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One is about to set the new file to write-ahead logging when the other is. SQLite does not wait for this."""
    path = tmp_path / "log.db"

    async def opens() -> None:
        store = SqliteStore(path)
        await store.open()
        await store.close()

    asyncio.run(opens())
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN IMMEDIATE")
        waited: list[float] = []

        def wait(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 3:
                other.execute("ROLLBACK")

        monkeypatch.setattr(time, "sleep", wait)
        asyncio.run(opens())
        assert len(waited) == 3

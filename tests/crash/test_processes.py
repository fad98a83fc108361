"""Four processes share one file, and two of them are killed. All agree on one order and on one outcome per write."""

import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from random import Random
from threading import Condition, Thread

import pytest

from core.invariants import Answer, History, ObservedRead
from crash import shared_worker
from crash.load import SUBMITTERS, WRITES, find_write, parse_answer
from crash.shared_worker import count_events
from crash.store_history import (
    build_answer,
    check_same_receipts,
    check_sound,
    check_stored,
    list_submissions,
    read_history,
    say,
)
from deadlines import WAIT_S
from oncelog.core.values import KeyIdentity, key_identity
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.verify.findings import VerificationSummary
from oncelog.storage.verify.verification import verify_log
from scripts import start_script, write_line

PROCESSES = 4
KILLED = 2
ROUNDS = 4
SOAK_ROUNDS = 24


class Worker:
    """A process and the output read so far."""

    def __init__(self, stack: ExitStack, name: str, *arguments: object) -> None:
        self.name = name
        self.answers: list[Answer] = []
        self.seen: list[tuple[int, KeyIdentity]] = []
        self.took_s: float | None = None
        self.wrong = ""
        """Verdicts other than Committed and Replayed."""
        self.state = "new"
        self._changed = Condition()
        self._process = stack.enter_context(start_script(shared_worker.__file__, *arguments))
        self._thread = Thread(target=self._listen, daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self.wait(lambda: self.state == "ready")
        write_line(self._process)

    def check_killed(self) -> None:
        self.wait(lambda: self.state == "dead")
        assert self._process.wait(WAIT_S) == -signal.SIGKILL

    def wait(self, condition: Callable[[], bool]) -> None:
        with self._changed:
            is_over = self._changed.wait_for(lambda: condition() or self.wrong, WAIT_S)
            assert not self.wrong, f"{self.name} was answered {self.wrong!r}"
            assert is_over, f"{self.name} starved: {len(self.answers)} answers"

    def finish(self) -> None:
        self.wait(lambda: self.state in {"end", "dead"})
        assert self._process.wait(WAIT_S) == 0
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

    def _take(self, line: str) -> None:
        if line in {"ready\n", "end\n"}:
            self.state = line.strip()
        elif line.startswith("done"):
            self.took_s = float(line.split()[1])
        elif line.startswith("S"):
            _, position, key = line.split()
            self.seen.append((int(position), key_identity(find_write(bytes.fromhex(key)))))
        elif line.startswith("?"):
            self.wrong = line
        else:
            self.answers.append(build_answer(*parse_answer(line)))


async def read_history_at(path: Path, workers: list[Worker], events: int) -> History:
    answers = [answer for worker in workers for answer in worker.answers]
    readings = [
        ObservedRead(worker.name, 0, 0, events if worker.state == "end" else len(worker.seen), worker.seen)
        for worker in workers
    ]
    store = SqliteStore(path)
    await store.open()
    try:
        return await read_history(store, answers, readings)
    finally:
        await store.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.rule("CO-12")
@pytest.mark.rule("CO-13")
@pytest.mark.rule("CO-14")
@pytest.mark.parametrize("seal_keys", [0, 64], ids=["default segments", "small segments"])
async def test_processes_sharing_a_file_agree_on_order_and_outcomes(
    tmp_path: Path, stack: ExitStack, seed: int, seal_keys: int, is_soak: bool
) -> None:
    rounds = SOAK_ROUNDS if is_soak else ROUNDS
    writes, events = SUBMITTERS * WRITES * rounds, count_events(rounds)
    path = tmp_path / "log.db"
    random = Random(seed)
    dying = [random.randint(1, writes - 1) for _ in range(KILLED)] + [0] * (PROCESSES - KILLED)
    alive = [
        Worker(stack, f"process {one}", path, seal_keys, seed + one, die_after, rounds)
        for one, die_after in enumerate(dying)
    ]
    for worker in alive:
        worker.begin()  # start all at the same time, on a file that does not exist yet
    gone = []
    for number in range(KILLED):
        victim = alive[number]
        victim.check_killed()
        gone.append(victim)
        alive[number] = Worker(stack, f"{victim.name} again", path, seal_keys, seed + PROCESSES + number, 0, rounds)
        alive[number].begin()
    for worker in alive:
        worker.finish()
    say(", ".join(f"{worker.name}: {len(worker.answers)} answers in {worker.took_s} s" for worker in alive))

    assert [len(worker.answers) for worker in alive] == [writes] * PROCESSES
    history = await read_history_at(path, [*alive, *gone], events)
    check_sound(history)
    check_stored(history.answers, history)
    receipts = check_same_receipts(history.answers)
    assert len(receipts) == len(list_submissions(history)) == writes
    for worker in alive:
        assert [position for position, _ in worker.seen] == list(range(1, events + 1))
    *_, last = verify_log(path)
    assert isinstance(last, VerificationSummary), last


async def test_open_waits_for_another_process_that_creates_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both processes switch the new file to write-ahead logging. SQLite does not wait for the lock that this needs."""
    path = tmp_path / "log.db"

    async def open_and_close() -> None:
        store = SqliteStore(path)
        await store.open()
        await store.close()

    await open_and_close()
    with closing(sqlite3.connect(path, isolation_level=None, check_same_thread=False)) as other:
        other.execute("PRAGMA journal_mode = DELETE")
        other.execute("BEGIN IMMEDIATE")
        waited: list[float] = []

        def wait(seconds: float) -> None:
            waited.append(seconds)
            if len(waited) == 3:
                other.execute("ROLLBACK")

        monkeypatch.setattr(time, "sleep", wait)
        await open_and_close()
        assert len(waited) == 3

"""SIGKILL at random moments under load: no acknowledged write is lost, none is stored twice, no position is reused."""

import asyncio
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from cli.processes import Command
from core.invariants import Answer, History
from crash import kill_worker
from crash.load import SUBMITTERS, WRITES, find_write, iterate_round, parse_answer
from crash.store_history import (
    Order,
    build_answer,
    build_reading,
    check_kept,
    check_same_receipts,
    check_sound,
    check_stored,
    get_receipt,
    list_order,
    list_submissions,
    read_history,
    say,
)
from oncelog.core.values import Committed, KeyIdentity, Replayed, key_identity
from oncelog.engine.log import Log
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.verify.findings import VerificationSummary
from oncelog.storage.verify.verification import verify_log
from scripts import read_line, start_script, write_line

ROUNDS = 25
SOAK_ROUNDS = 50
"""All rounds use one growing file, and each round checks the whole file. The total time is therefore quadratic."""
SOAK_FILES = 10
SMALL_SEGMENTS = 64
"""Keys per segment in every second round, so that kills hit sealing and merging."""
ANSWERS = SUBMITTERS * (WRITES + 1)


@pytest.fixture
def workers() -> Iterator[Command]:
    with start_script(kill_worker.__file__) as process:
        yield process


class Output:
    """Answers and records printed by killed processes."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.order: Order = []

    def check(self, history: History) -> None:
        check_sound(history)
        check_stored(self.answers, history)
        check_same_receipts(self.answers)
        check_kept(self.order, history)


def parse(lines: Sequence[str]) -> tuple[list[Answer], dict[int, KeyIdentity]]:
    """Parse the answers and records in the output of a process."""
    answers: list[Answer] = []
    seen: dict[int, KeyIdentity] = {}
    for line in lines:
        if line.startswith("S"):
            _, position, key = line.split()
            assert int(position) == len(seen) + 1, "a follower missed a record or received one twice"
            seen[int(position)] = key_identity(find_write(bytes.fromhex(key)))
        else:
            answers.append(build_answer(*parse_answer(line)))
    return answers, seen


def run_until_killed(workers: Command, path: Path, *numbers: int) -> list[str]:
    """Run a process until it is killed, and return its output."""
    write_line(workers, "\t".join(map(str, (path, *numbers))))
    lines: list[str] = []
    while not (line := read_line(workers)).startswith("ended"):
        assert line, "the parent of the killed processes has ended"
        lines.append(line)
    assert int(line.split()[1]) == -signal.SIGKILL
    return lines


async def reopen_and_resubmit(
    path: Path, round_number: int, output: Output, seen: dict[int, KeyIdentity], seal_keys: int
) -> int:
    """Check the content of the file, then resubmit the whole round as clients would.

    Return the number of writes that were committed without an answer.
    """
    store = SqliteStore(path, seal_keys=seal_keys) if seal_keys else SqliteStore(path)
    async with Log(store) as log:
        found = await read_history(store, output.answers, [build_reading(seen, "killed")], with_keys=False)
        output.check(found)
        acknowledged = {answer.identity: get_receipt(answer.verdict) for answer in output.answers}
        before = {identity for _, _, identity in output.order}
        stored = {identity for _, _, identity in list_order(found)}
        writes = list(iterate_round(round_number))
        for start in range(0, len(writes), SUBMITTERS):
            part = writes[start : start + SUBMITTERS]
            for one, verdict in zip(part, await asyncio.gather(*map(log.submit, part)), strict=True):
                identity = key_identity(one)
                assert isinstance(verdict, Replayed if identity in stored else Committed), (one, verdict)
                assert acknowledged.get(identity, get_receipt(verdict)) == get_receipt(verdict)
                output.answers.append(build_answer(one, verdict))
        whole = await read_history(store, output.answers)
        output.check(whole)
        assert len(list_submissions(whole)) == (round_number + 1) * SUBMITTERS * WRITES
        output.order = list_order(whole)
    return len(stored - before - acknowledged.keys())


async def kill_repeatedly(workers: Command, path: Path, seed: int, rounds: int) -> None:
    """Kill one process per round, all on one file."""
    random = Random(seed)
    output = Output()
    unanswered = 0
    for number in range(rounds):
        seal_keys = SMALL_SEGMENTS if number % 2 else 0
        die_after = random.randint(1, ANSWERS - 1)
        # Answers of earlier rounds are already checked, and `output.order` keeps their positions.
        lines = await asyncio.to_thread(run_until_killed, workers, path, number, seal_keys, die_after)
        output.answers, seen = parse(lines)
        assert len(output.answers) == die_after
        unanswered += await reopen_and_resubmit(path, number, output, seen, seal_keys)
    *_, last = verify_log(path)
    assert isinstance(last, VerificationSummary), last
    say(f"seed {seed}: {rounds} kills, {last.records} records, {last.segments} segments, {unanswered} unanswered")
    assert last.segments > 1
    assert unanswered > 0, "no kill happened between a commit and its answers"


@pytest.mark.rule("CO-10")
@pytest.mark.rule("CO-12")
@pytest.mark.rule("CO-13")
@pytest.mark.rule("CO-16")
async def test_log_of_process_killed_under_load_keeps_every_acknowledged_write_once(
    workers: Command, tmp_path: Path, is_soak: bool, seed: int
) -> None:
    for number in range(SOAK_FILES if is_soak else 1):
        began = time.perf_counter()
        await kill_repeatedly(workers, tmp_path / f"{number}.db", seed + number, SOAK_ROUNDS if is_soak else ROUNDS)
        say(f"{time.perf_counter() - began:.1f} s")

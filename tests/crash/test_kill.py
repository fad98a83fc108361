"""SIGKILL at random moments under load: nothing acknowledged is lost, nothing is there twice, no number is reused."""

import asyncio
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest

from crash import kill_worker
from crash.load import SUBMITTERS, WRITES, round_of, verdict_in, write_of
from crash.observing import (
    Order,
    answer_to,
    by_position,
    demand_kept,
    demand_same_receipts,
    demand_sound,
    demand_stored,
    history_of,
    order_of,
    receipt_in,
    say,
)
from crash.processes import started
from oncelog.core.invariants import Answer, History
from oncelog.core.values import Committed, KeyIdentity, Replayed, key_identity
from oncelog.engine.log import Log
from oncelog.stores.sqlite import SqliteStore
from oncelog.stores.sqlite.verifying import verify_file
from oncelog.stores.verifying.findings import Passed

ROUNDS = 50
"""On one file, so that it grows."""
SMALL_SEGMENTS = 64
"""In every other round, so that kills hit sealing and merging."""
ANSWERS = SUBMITTERS * (WRITES + 1)


@pytest.fixture
def workers() -> Iterator["subprocess.Popen[bytes]"]:
    with started(kill_worker.__file__) as process:
        yield process


class Told:
    """What callers and readers were told, by processes that are gone."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []
        self.order: Order = []

    def read(self, lines: Sequence[bytes]) -> tuple[list[Answer], dict[int, KeyIdentity]]:
        """The answers and the records in what a process wrote."""
        answers: list[Answer] = []
        seen: dict[int, KeyIdentity] = {}
        for line in lines:
            if line.startswith(b"S"):
                _, position, key = line.split()
                assert int(position) == len(seen) + 1, "a follower missed a record, or saw one twice"
                seen[int(position)] = key_identity(write_of(bytes.fromhex(key.decode())))
            else:
                answers.append(answer_to(*verdict_in(line)))
        return answers, seen


def killed(workers: "subprocess.Popen[bytes]", path: Path, number: int, answers: int, seal_keys: int) -> list[bytes]:
    """Has a process work until it has told so many answers, and kills it; gives all that it has told."""
    assert workers.stdin is not None
    assert workers.stdout is not None
    workers.stdin.write(f"{path}\t{number}\t{seal_keys}\n".encode())
    workers.stdin.flush()
    lines: list[bytes] = []
    process, told = 0, 0
    while (line := workers.stdout.readline()) != b"dead\n":
        assert line, "the processes ended by themselves"
        if line.startswith(b"process"):
            process = int(line.split()[1])
        else:
            lines.append(line)
            told += line[:1] in {b"C", b"R"}
        if process and told >= answers:
            os.kill(process, signal.SIGKILL)
            process = 0
    return lines


async def opened_again(path: Path, round_number: int, told: Told, seen: dict[int, KeyIdentity], seal_keys: int) -> int:
    """Looks at what is there, then resubmits the whole round, as its clients would.

    Gives how many writes were committed though nobody had been told.
    """
    store = SqliteStore(path, seal_keys=seal_keys) if seal_keys else SqliteStore(path)
    async with Log(store) as log:
        found = await history_of(store, told.answers, [by_position(seen, "killed")], with_keys=False)
        demand(found, told)
        acknowledged = {answer.identity: receipt_in(answer.verdict) for answer in told.answers}
        before = {identity for _, _, identity in told.order}
        stored = {identity for _, _, identity in order_of(found)}
        writes = list(round_of(round_number))
        for start in range(0, len(writes), SUBMITTERS):
            part = writes[start : start + SUBMITTERS]
            for one, verdict in zip(part, await asyncio.gather(*map(log.submit, part)), strict=True):
                identity = key_identity(one)
                assert isinstance(verdict, Replayed if identity in stored else Committed), (one, verdict)
                assert acknowledged.get(identity, receipt_in(verdict)) == receipt_in(verdict)
                told.answers.append(answer_to(one, verdict))
        whole = await history_of(store, told.answers)
        demand(whole, told)
        assert len(whole.records) == (round_number + 1) * SUBMITTERS * WRITES
        told.order = order_of(whole)
    return len(stored - before - acknowledged.keys())


def demand(history: History, told: Told) -> None:
    demand_sound(history)
    demand_stored(told.answers, history)
    demand_same_receipts(told.answers)
    demand_kept(told.order, history)


def series(workers: "subprocess.Popen[bytes]", path: Path, seed: int) -> None:
    """Rounds on one file."""
    random = Random(seed)
    told = Told()
    unknown = 0
    for number in range(ROUNDS):
        seal_keys = SMALL_SEGMENTS if number % 2 else 0
        # Those of earlier rounds have been checked, and the order that was read then holds their places.
        told.answers, seen = told.read(killed(workers, path, number, random.randint(1, ANSWERS), seal_keys))
        unknown += asyncio.run(opened_again(path, number, told, seen, seal_keys))
    *_, last = verify_file(path)
    assert isinstance(last, Passed), last
    say(f"seed {seed}: {ROUNDS} kills, {last.records} records, {last.segments} segments, {unknown} without an answer")


@pytest.mark.rule("CO-10")
@pytest.mark.rule("CO-12")
@pytest.mark.rule("CO-13")
@pytest.mark.rule("CO-16")
def test_killed_at_random_moments_under_load(
    workers: "subprocess.Popen[bytes]", tmp_path: Path, is_soak: bool, seed: int
) -> None:
    for number in range(10 if is_soak else 1):
        began = time.perf_counter()
        series(workers, tmp_path / f"{number}.db", seed + number)
        say(f"{time.perf_counter() - began:.1f} s")

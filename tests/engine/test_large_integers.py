"""A log that was created when integers beyond ±(2^53−1) were refused keeps its fingerprints and keys."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import oncelog
from engine.large_integers import Place, build_delta, build_event, call_counter, list_writes, unpack
from oncelog.core.values import Committed, Replayed, Submission
from oncelog.engine.log import Log
from oncelog.idempotency.once import work_of
from oncelog.storage.verify.findings import VerificationSummary
from oncelog.storage.verify.verification import verify_log
from oncelog.testing.clock import ManualClock


@pytest.fixture
async def earlier_log(tmp_path: Path) -> AsyncIterator[Log]:
    async with oncelog.open(unpack(tmp_path / "earlier.db"), clock=ManualClock()) as log:
        yield log


async def retry(log: Log, submissions: list[tuple[Submission, Place]]) -> None:
    for submission, place in submissions:
        verdict = await log.submit(submission)
        assert isinstance(verdict, Replayed), submission.body
        assert verdict.receipt is not None
        assert Place.of(verdict.receipt) == place


@pytest.mark.rule("CO-2")
async def test_events_of_the_earlier_log_are_replayed(earlier_log: Log) -> None:
    await retry(earlier_log, [(build_event(write), place) for write, place in list_writes("events")])


@pytest.mark.rule("CO-2", "DE-2")
async def test_deltas_of_the_earlier_log_are_replayed(earlier_log: Log) -> None:
    await retry(earlier_log, [(build_delta(write), place) for write, place in list_writes("deltas")])


@pytest.mark.rule("CO-2")
async def test_calls_of_the_earlier_log_do_not_run_again(earlier_log: Log) -> None:
    remember, ran = call_counter(earlier_log)
    for write, place in list_writes("calls"):
        value = json.loads(write)
        assert await remember(value) == "done"
        work = work_of(remember, value)
        found = await earlier_log.lookup(work.key, policy=work.policy, scope=work.scope)
        assert found.receipt is not None
        assert Place.of(found.receipt) == place
    assert ran == []


@pytest.mark.rule("CO-2")
async def test_earlier_log_accepts_the_new_numbers(earlier_log: Log, tmp_path: Path) -> None:
    first, again = (
        build_event({"id": "0198f3c2-7d55-7c1e-9a61-2f6f0c1b5a10", "partitions": ["a"], "event": event})
        for event in (
            '{"type":"t","v":1e21,"w":9007199254740992}',
            '{"v":1000000000000000000000,"w":9007199254740992.0,"type":"t"}',
        )
    )
    assert isinstance(await earlier_log.submit(first), Committed)
    assert isinstance(await earlier_log.submit(again), Replayed)
    await earlier_log.close()
    *_, last = verify_log(tmp_path / "earlier.db")
    assert isinstance(last, VerificationSummary)

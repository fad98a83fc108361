"""Sample program for type checkers: the types of verdicts, receipts, runs and decorated functions.

mypy checks it in strict mode and reports each `type: ignore` comment that hides no error.
"""

import datetime as dt
import uuid
from decimal import Decimal
from typing import assert_type

from pydantic import BaseModel

import oncelog
from oncelog import client
from oncelog.client import chat, ledger


class Order(BaseModel):
    id: uuid.UUID
    cents: Decimal


async def submit(log: oncelog.Log, item: oncelog.Submission, cursor: oncelog.SetCursor, claim: oncelog.Claim) -> None:
    verdict = await log.append({"type": "tick"}, partitions=["p"])
    assert_type(verdict, oncelog.EventVerdict)
    assert_type(verdict.unwrap(), oncelog.Receipt)
    if not verdict.ok:
        assert_type(verdict, oncelog.Refused)
        return
    assert_type(verdict.receipt.position, int)
    assert_type(await log.submit(oncelog.event(uuid.uuid4(), {"type": "tick"}, ["p"])), oncelog.EventVerdict)

    transaction = oncelog.transaction("ledger/a", "client", 1, [])
    numbered = await log.submit(transaction)
    assert_type(numbered.unwrap(), oncelog.Receipt | None)  # the log can have forgotten it
    _ = numbered.receipt  # type: ignore[union-attr]  # the verdict may be a refusal
    assert_type((await log.submit(item)).unwrap(), oncelog.Receipt | None)

    assert_type(await log.submit(cursor), oncelog.Applied | oncelog.Refused)
    assert_type((await log.submit(cursor)).unwrap(), oncelog.Applied)
    assert_type((await log.submit(claim)).unwrap(), oncelog.Granted | oncelog.Receipt)
    assert_type([one.unwrap() for one in await log.submit_many([oncelog.event("", {}, [])])], list[oncelog.Receipt])
    everything: oncelog.Verdict = await log.submit(item)
    assert_type(everything.ok, bool)


def read_outcomes(event: client.Outcome, message: chat.Outcome, write: ledger.Outcome) -> None:
    assert_type(event.unwrap(), client.Committed)
    assert_type(message.unwrap(), chat.Sent)
    assert_type(write.unwrap(), ledger.Written)
    if event.ok:
        assert_type(event, client.Committed)


def submit_and_wait(log: oncelog.BlockingLog) -> int:
    verdict = log.append({"type": "tick"}, partitions=["p"])
    if isinstance(verdict, oncelog.Replayed):
        assert_type(verdict, oncelog.Replayed[oncelog.Receipt])
    log.append({"type": "tick"})  # type: ignore[call-arg]  # no partitions
    return log.submit(oncelog.event(uuid.uuid4(), {"type": "tick"}, ["p"])).unwrap().position


async def close(log: oncelog.Log) -> None:
    with log:  # type: ignore[attr-defined]
        pass


def handle(log: oncelog.BlockingLog) -> float:
    try:
        log.append({"type": "tick"}, partitions=["p"]).unwrap()
    except oncelog.RetryLaterError as error:
        return error.retry_after_ms / 1000
    except oncelog.RefusedError as error:
        assert_type(error.reason, oncelog.Reason)
    return 0


@oncelog.once(oncelog.open_blocking(":memory:"), name="charge")
def charge(order: Order, at: dt.datetime) -> list[Order]:
    return [order]


@oncelog.once(oncelog.open(":memory:"), name="refund")
async def refund(order: Order) -> Order | None:
    return None


async def run(runs: oncelog.Runs, blocking_runs: oncelog.BlockingRuns, order: Order) -> None:
    charge(order)  # type: ignore[call-arg]
    assert_type(charge(order, dt.datetime.now(dt.UTC)), list[Order])
    assert_type(await refund(order), Order | None)

    async def roll(sides: int) -> Order:
        return order

    def roll_now(sides: int) -> dt.datetime:
        return dt.datetime.now(dt.UTC)

    found = await runs.execute(
        plan_id=None, campaign_id=1, event_type="e", tool_name="t", ruleset_version=None, args={"sides": 6}, tool=roll
    )
    assert_type(found.output, Order)
    same = await runs.execute(
        plan_id=None, campaign_id=1, event_type="e", tool_name="t", ruleset_version=None, args={}, tool=roll_now
    )
    assert_type(same.output, dt.datetime)
    again = blocking_runs.execute(
        plan_id=None, campaign_id=1, event_type="e", tool_name="t", ruleset_version=None, args={}, tool=roll_now
    )
    assert_type(again.output, dt.datetime)
    untyped: oncelog.Run = found
    assert_type(untyped.event.ordinal, int)

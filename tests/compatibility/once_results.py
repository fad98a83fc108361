"""Script: write a log with the results of functions and runs, as `files/once-results-NN.db.xz` contains them.

once_results.py FILE

Run it with the version that the file is to come from.
"""

import datetime as dt
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Final
from uuid import UUID

import oncelog

CALLS: Final[list[str]] = []
"""Names of the functions that have run in this process."""
RUN: Final[dict[str, Any]] = {
    "plan_id": "plan-7",
    "campaign_id": 12,
    "event_type": "tool.execute",
    "tool_name": "dice",
    "ruleset_version": "v1",
    "args": {"sides": 20, "note": None, "name": "e\u0301"},
}


@dataclass
class Invoice:
    number: UUID
    at: dt.datetime
    total: Decimal


def add(first: int, second: int = 2) -> int:
    CALLS.append("add")
    return first + second


def describe(values: list[Any], *, options: dict[str, Any]) -> dict[str, Any]:
    CALLS.append("describe")
    return {"values": values, "options": options}


def bill(invoice: Invoice, tags: set[str], big: int, raw: bytes) -> Invoice:
    CALLS.append("bill")
    return invoice


def fail(code: int) -> int:
    CALLS.append("fail")
    raise ValueError("declined", code)


def roll(sides: int, note: None, name: str) -> dict[str, int]:
    CALLS.append("roll")
    return {"roll": sides}


INVOICE: Final = Invoice(UUID(int=17), dt.datetime(2026, 11, 19, 12, tzinfo=dt.UTC), Decimal("4.50"))


def call_all(log: oncelog.BlockingLog) -> list[Any]:
    """Call each function once, and return all results."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        name, forever = function.__name__, oncelog.FOREVER
        return oncelog.once(log, name=name, retention=forever, remember=[ValueError])(function)

    results: list[Any] = [
        decorate(add)(1),
        decorate(describe)([1, 2.5, "é", None, True, 1e21], options={"b": [], "a": {"\u20ac": -0.5}}),
        decorate(bill)(INVOICE, {"x", "y"}, 2**60, b"raw"),
        oncelog.BlockingRuns(log).execute(**RUN, tool=roll).event.output,
    ]
    try:
        decorate(fail)(7)
    except ValueError as error:
        results.append(error.args)
    return results


if __name__ == "__main__":
    with oncelog.open_blocking(sys.argv[1]) as open_log:
        call_all(open_log)

"""Writes in a log that was created before integers beyond ±(2^53−1) were accepted.

`tests/vectors/earlier_numbers.json` lists the writes with their positions. `tests/vectors/earlier_numbers.db.gz` is the
log itself, compressed with gzip.
"""

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oncelog
from oncelog.core.canonical import parse
from oncelog.core.deltas import decode_delta, delta
from oncelog.core.policy import FOREVER
from oncelog.core.values import Receipt, Submission
from oncelog.engine.log import Log

_FOLDER = Path(__file__).parent.parent / "vectors"
LISTED = _FOLDER / "earlier_numbers.json"
FILE = _FOLDER / "earlier_numbers.db.gz"


@dataclass(frozen=True)
class Place:
    """Lane, position and stream sequence of a write."""

    lane: int
    position: int
    sequence: int

    @classmethod
    def of(cls, receipt: Receipt) -> "Place":
        return cls(receipt.lane, receipt.position, receipt.sequence)


def list_writes(kind: str) -> list[tuple[Any, Place]]:
    """Return all writes of the given kind (`events`, `deltas`, `calls`) with their positions."""
    return [(one["write"], Place(**one["place"])) for one in json.loads(LISTED.read_text(encoding="utf-8"))[kind]]


def unpack(path: Path) -> Path:
    """Write the log's file to `path`."""
    path.write_bytes(gzip.decompress(FILE.read_bytes()))
    return path


def build_event(write: Any) -> Submission:
    """Return the submission of a listed event, parsed from JSON as the server does."""
    return oncelog.event(write["id"], parse(write["event"]), write["partitions"])


def build_delta(write: Any) -> Submission:
    """Return the submission of a listed delta."""
    return delta("gateway", decode_delta(write.encode()))


def call_counter(log: Log) -> tuple[Callable[[Any], Any], list[Any]]:
    """Return a function that runs once per argument, and a list of the arguments of executed calls."""
    ran: list[Any] = []

    @oncelog.once(log, name="remember", retention=FOREVER)
    async def remember(value: Any) -> str:
        ran.append(value)
        return "done"

    return remember, ran

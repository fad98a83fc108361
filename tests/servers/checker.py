"""Check the calls and readings that clients of several servers recorded against the final records.

The checker uses no store, API or log, only files that were written during the run and a dump. All times come from one
clock, in any unit. A history is a directory:

    calls-*.jsonl         one line per event and attempt: client, server, begin, end, and answer
    readings-*.jsonl      one line per received record, in order; one file per reader
    head-queries-*.jsonl  one line per query of the newest position: begin, and result
    dump.json             all records, and the newest position according to the log
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

COMMITTED: Final = "committed"
REFUSED: Final = "refused"
"""The id is stored, but with different content."""
UNKNOWN: Final = "unknown"


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt to submit one event."""

    client: str
    server: int
    id: str
    content: str
    began: int
    ended: int
    answer: str
    position: int = 0
    """Set only if the answer is COMMITTED."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A record that a reader received."""

    position: int
    id: str


@dataclass(frozen=True, slots=True)
class HeadQuery:
    """A query of the newest position."""

    server: int
    began: int
    newest: int


@dataclass(frozen=True, slots=True)
class Stored:
    """A record of the dump."""

    position: int
    id: str
    content: str


@dataclass(slots=True)
class History:
    """All recorded calls, readings and head queries, and the dump."""

    calls: list[Call] = field(default_factory=list)
    readings: dict[str, list[Seen]] = field(default_factory=dict)
    """Received records by reader. Each reader has read from the first to the last record."""
    head_queries: list[HeadQuery] = field(default_factory=list)
    head: int = 0
    records: list[Stored] = field(default_factory=list)

    @classmethod
    def load(cls, directory: Path) -> "History":
        """Load a history from a directory."""
        dump = json.loads((directory / "dump.json").read_text())
        return cls(
            [Call(**line) for path in sorted(directory.glob("calls-*.jsonl")) for line in _lines(path)],
            {path.stem: [Seen(**line) for line in _lines(path)] for path in sorted(directory.glob("readings-*.jsonl"))},
            [HeadQuery(**line) for path in sorted(directory.glob("head-queries-*.jsonl")) for line in _lines(path)],
            dump["head"],
            [Stored(*one) for one in dump["records"]],
        )


def line_of(entry: Call | Seen | HeadQuery) -> str:
    """Return an entry as a line of a history file."""
    return json.dumps(asdict(entry)) + "\n"


def _lines(path: Path) -> Iterator[Any]:
    with path.open() as file:
        for line in file:
            yield json.loads(line)


def violations(history: History) -> list[str]:
    """Return a description of each violation."""
    by_id: dict[str, Stored] = {}
    found = [*_check_dump(history, by_id)]
    found += _check_answers(history.calls, by_id)
    found += _check_order(history.calls, history.records)
    for reader, seen in history.readings.items():
        found += _check_reader(reader, seen, history.records)
    found += _check_head_queries(history)
    return found


def _check_dump(history: History, by_id: dict[str, Stored]) -> Iterator[str]:
    """Check that positions have no gaps, no id is stored twice, and every record was submitted."""
    submitted = {(call.id, call.content) for call in history.calls}
    expected = 1
    for record in history.records:
        if record.position != expected:
            yield f"position {record.position} follows where {expected} is expected"
        expected = record.position + 1
        if record.id in by_id:
            yield f"{record.id} is stored at {by_id[record.id].position} and again at {record.position}"
        by_id.setdefault(record.id, record)
        if (record.id, record.content) not in submitted:
            yield f"{record.id} at {record.position} was never submitted"
    if history.head != expected - 1:
        yield f"the log reports {history.head} as newest position, but the last record is at {expected - 1}"


def _check_answers(calls: Sequence[Call], by_id: Mapping[str, Stored]) -> Iterator[str]:
    """Check that acknowledged events are stored as acknowledged, and refused ids are stored with different content."""
    for call in calls:
        record = by_id.get(call.id)
        if call.answer == COMMITTED:
            if record is None:
                yield f"{call.id} was acknowledged at {call.position} to {call.client}, and is lost"
            elif record.position != call.position:
                yield f"{call.id} was acknowledged at {call.position} to {call.client}, and is at {record.position}"
            elif record.content != call.content:
                yield f"{call.id} was acknowledged to {call.client} with content that differs from the stored content"
        elif call.answer == REFUSED:
            if record is None:
                yield f"{call.id} from {call.client} was refused, but it is not stored"
            elif record.content == call.content:
                yield f"{call.id} from {call.client} was refused, but the stored content is the same"


def _check_order(calls: Sequence[Call], records: Sequence[Stored]) -> Iterator[str]:
    """Check that an event acknowledged before a second one was first submitted precedes the second."""
    began: dict[tuple[str, str], int] = {}
    acknowledged: dict[str, int] = {}
    for call in calls:
        written = (call.id, call.content)
        began[written] = min(call.began, began.get(written, call.began))
        if call.answer == COMMITTED:
            acknowledged[call.id] = min(call.ended, acknowledged.get(call.id, call.ended))
    latest: tuple[int, str] | None = None
    for record in records:
        ended = acknowledged.get(record.id)
        if latest is not None and ended is not None and latest[0] > ended:
            yield f"{record.id} at {record.position} was acknowledged before {latest[1]}, which precedes it, was begun"
        start = began.get((record.id, record.content))
        if start is not None and (latest is None or start > latest[0]):
            latest = start, record.id


def _check_reader(reader: str, seen: Sequence[Seen], records: Sequence[Stored]) -> Iterator[str]:
    """Check that the reader received every record exactly once, in order."""
    last = 0
    for one in seen:
        if one.position <= last:
            yield f"{reader} received {one.position} after {last}"
        last = max(last, one.position)
    received = [(one.position, one.id) for one in seen]
    expected = [(record.position, record.id) for record in records]
    if received != expected:
        place = next(
            (place for place, pair in enumerate(zip(received, expected, strict=False)) if pair[0] != pair[1]), None
        )
        place = min(len(received), len(expected)) if place is None else place
        yield f"{reader} received {received[place : place + 2]} where {expected[place : place + 2]} is expected"


def _check_head_queries(history: History) -> Iterator[str]:
    """Check that every server returns the newest acknowledged position or a later one."""
    acknowledged = sorted((call.ended, call.position) for call in history.calls if call.answer == COMMITTED)
    place = newest = 0
    for query in sorted(history.head_queries, key=lambda query: query.began):
        while place < len(acknowledged) and acknowledged[place][0] < query.began:
            newest = max(newest, acknowledged[place][1])
            place += 1
        if query.newest < newest:
            yield f"server {query.server} returned {query.newest} after {newest} had been acknowledged"

"""The records of each API by plain SQL, the findings of the checker, and how long writes were not acknowledged."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from failover.load_apis import Door
from servers.checker import COMMITTED, History, Seen, violations
from servers.shared_logs import fetched_from_primary

RECORDS = """
    SELECT r.position, r.sequence, r.key, b.root, r.body FROM oncelog_records AS r
    JOIN oncelog_blocks AS b ON b.lane = r.lane AND b.height = r.height WHERE {} ORDER BY r.lane, r.position
"""
SETTLED_NS = 500_000_000
"""An interval that began at most this time before a failure belongs to the failure."""


@dataclass(frozen=True)
class Kept:
    """A record in the database."""

    place: int
    """Position in the order of the API."""
    in_lane: int
    id: str
    root: str
    body: bytes


async def kept_by(door: type[Door], address: str) -> list[Kept]:
    """Return all records of an API, in order."""
    rows = await fetched_from_primary(address, RECORDS.format(door.where))
    return [
        Kept(sequence or position, position, key.hex(), root.hex(), body)
        for position, sequence, key, root, body in rows
    ]


def findings(door: type[Door], directory: Path, kept: Sequence[Kept]) -> list[str]:
    """Return the findings of the checker, with the name of the API."""
    place = directory / door.name
    records = [(one.place, one.id, content_in(door, one.body)) for one in kept]
    (place / "dump.json").write_text(json.dumps({"head": len(kept), "records": records}))
    history = History.load(place)
    if door.is_by_lane:
        history = in_the_stream(history, kept)
    assert history.calls
    assert len(history.readings) > 1
    return [f"{door.name}: {one}" for one in violations(history)]


def content_in(door: type[Door], body: bytes) -> str:
    """Return the written content from a body; of a malformed body, the whole body."""
    try:
        return door.content_in(json.loads(body))
    except (KeyError, TypeError, ValueError):
        return f"malformed body of {door.name}: {body!r}"


def in_the_stream(history: History, kept: Sequence[Kept]) -> History:
    """Translate positions into the order of the API. Readers of blocks know records by the root of the block."""
    places = {one.in_lane: one for one in kept}

    def translated(seen: Seen) -> Seen:
        found = places.get(seen.position)
        if found is None or seen.id not in (found.id, found.root):
            return seen  # a missing record, which the checker reports
        return Seen(found.place, found.id)

    calls = [
        replace(call, position=places[call.position].place)
        if call.answer == COMMITTED and call.position in places
        else call
        for call in history.calls
    ]
    readings = {name: list(map(translated, seen)) for name, seen in history.readings.items()}
    return replace(history, calls=calls, readings=readings)


def stood_still_s(directory: Path, doors: Sequence[type[Door]], began_ns: int, ended_ns: int) -> dict[str, float]:
    """Return, by API, the longest time without a first acknowledgement of a write, around a span of time.

    Retries do not count: a server may answer them from its cache, without a primary.
    """
    found = {}
    for door in doors:
        first: dict[str, int] = {}
        for call in calls_of(directory, door):
            if call["answer"] == COMMITTED:
                first[call["id"]] = min(call["ended"], first.get(call["id"], call["ended"]))
        gaps = [
            later - earlier
            for earlier, later in pairwise(sorted(first.values()))
            if later >= began_ns and began_ns - SETTLED_NS <= earlier <= ended_ns
        ]
        found[door.name] = max(gaps, default=0) / 1e9
    return found


def calls_of(directory: Path, door: type[Door]) -> list[dict[str, Any]]:
    """Return all recorded calls."""
    return [json.loads(line) for line in (directory / door.name / "calls-load.jsonl").read_text().splitlines()]

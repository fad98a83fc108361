"""What became of it: the records of each door by plain SQL, the checker's findings, and how long writes stood still."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from failover.load_doors import Door
from gateways.checker import COMMITTED, History, Seen, violations
from gateways.gateway_stores import fetched

RECORDS = """
    SELECT r.position, r.sequence, r.key, b.root, r.body FROM oncelog_records AS r
    JOIN oncelog_blocks AS b ON b.lane = r.lane AND b.height = r.height WHERE {} ORDER BY r.lane, r.position
"""
SETTLED_NS = 500_000_000
"""What stood still at most so long before something was done to the cluster was of that."""


@dataclass(frozen=True)
class Kept:
    """A record, as the database has it."""

    place: int
    """In the door's order."""
    in_lane: int
    id: str
    root: str
    body: bytes


async def kept_by(door: type[Door], address: str) -> list[Kept]:
    """All records of a door's order, in order."""
    rows = await fetched(address, RECORDS.format(door.where))
    return [
        Kept(sequence or position, position, key.hex(), root.hex(), body)
        for position, sequence, key, root, body in rows
    ]


def findings(door: type[Door], directory: Path, kept: Sequence[Kept]) -> list[str]:
    """Of the checker, with the door's name."""
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
    """What was written, as the database has it now; of a body that is none of this door's, all of it."""
    try:
        return door.content_in(json.loads(body))
    except (KeyError, TypeError, ValueError):
        return f"no body of {door.name}: {body!r}"


def in_the_stream(history: History, kept: Sequence[Kept]) -> History:
    """The same with places in the door's order. Readers that were given blocks knew records by their blocks' roots."""
    places = {one.in_lane: one for one in kept}

    def translated(seen: Seen) -> Seen:
        found = places.get(seen.position)
        if found is None or seen.id not in (found.id, found.root):
            return seen  # nothing such is there, and the checker says so
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
    """By door, the longest time without a write that is acknowledged for the first time, around a span of time.

    Acknowledged again does not count: a gateway may have that in its memory, and needs no primary for it.
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
    """All that were recorded."""
    return [json.loads(line) for line in (directory / door.name / "calls-load.jsonl").read_text().splitlines()]

"""Records of each API read with plain SQL, findings of the checker, and outages of writes."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from failover.load_apis import Api
from servers.checker import COMMITTED, History, Seen, violations
from servers.shared_logs import fetch_rows_from_primary

RECORDS = """
    SELECT r.position, r.sequence, r.key, b.root, r.body FROM oncelog_records AS r
    JOIN oncelog_blocks AS b ON b.lane = r.lane AND b.height = r.height WHERE {} ORDER BY r.lane, r.position
"""
SETTLED_NS = 500_000_000
"""An interval that began at most this long before a failure counts as part of the failure."""


@dataclass(frozen=True)
class Kept:
    """A record in the database."""

    place: int
    """Position in the order of the API."""
    in_lane: int
    id: str
    root: str
    body: bytes


async def read_records(api: type[Api], address: str) -> list[Kept]:
    """Return all records of an API, in order."""
    rows = await fetch_rows_from_primary(address, RECORDS.format(api.where))
    return [
        Kept(sequence or position, position, key.hex(), root.hex(), body)
        for position, sequence, key, root, body in rows
    ]


def findings(api: type[Api], directory: Path, kept: Sequence[Kept]) -> list[str]:
    """Return the findings of the checker, prefixed with the name of the API."""
    place = directory / api.name
    records = [(one.place, one.id, content_in(api, one.body)) for one in kept]
    (place / "dump.json").write_text(json.dumps({"head": len(kept), "records": records}))
    history = History.load(place)
    if api.is_by_lane:
        history = to_api_order(history, kept)
    assert history.calls
    assert len(history.readings) > 1
    return [f"{api.name}: {one}" for one in violations(history)]


def content_in(api: type[Api], body: bytes) -> str:
    """Return the written content from a body, or the whole body if it is malformed."""
    try:
        return api.content_in(json.loads(body))
    except (KeyError, TypeError, ValueError):
        return f"malformed body of {api.name}: {body!r}"


def to_api_order(history: History, kept: Sequence[Kept]) -> History:
    """Translate positions into the order of the API. Readers of blocks identify records by the block's Merkle root."""
    places = {one.in_lane: one for one in kept}

    def translate(seen: Seen) -> Seen:
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
    readings = {name: list(map(translate, seen)) for name, seen in history.readings.items()}
    return replace(history, calls=calls, readings=readings)


def measure_outage_s(directory: Path, apis: Sequence[type[Api]], began_ns: int, ended_ns: int) -> dict[str, float]:
    """Return, for each API, the longest interval without a newly acknowledged write around these times.

    Retries are excluded, because a server can answer them from its cache without a primary.
    """
    found = {}
    for api in apis:
        first: dict[str, int] = {}
        for call in read_calls(directory, api):
            if call["answer"] == COMMITTED:
                first[call["id"]] = min(call["ended"], first.get(call["id"], call["ended"]))
        gaps = [
            later - earlier
            for earlier, later in pairwise(sorted(first.values()))
            if later >= began_ns and began_ns - SETTLED_NS <= earlier <= ended_ns
        ]
        found[api.name] = max(gaps, default=0) / 1e9
    return found


def read_calls(directory: Path, api: type[Api]) -> list[dict[str, Any]]:
    """Return all recorded calls."""
    return [json.loads(line) for line in (directory / api.name / "calls-load.jsonl").read_text().splitlines()]

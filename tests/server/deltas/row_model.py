"""A model of merged rows that follows the text of rule DE-7: it compares all deltas and does not use `core.merge`."""

from collections.abc import Iterable, Sequence
from typing import Any

Json = dict[str, Any]
Rows = dict[tuple[str, str], dict[str, Any]]
"""The columns of existing rows, by table and row id."""


def wins_over(one: Json, other: Json) -> bool:
    """Whether a delta wins over another: by HLC, then by clientId in UTF-16 code units, then by deltaId."""
    if one["hlc"] != other["hlc"]:
        return int(one["hlc"]) > int(other["hlc"])
    if one["clientId"] != other["clientId"]:
        return _code_units(one["clientId"]) > _code_units(other["clientId"])
    return bool(one["deltaId"] > other["deltaId"])


def _code_units(text: str) -> list[int]:
    raw = text.encode("utf-16-le")
    return [int.from_bytes(raw[place : place + 2], "little") for place in range(0, len(raw), 2)]


def merge_model(deltas: Iterable[Json]) -> Rows:
    """Return the rows that exist after all deltas. Of several deltas with the same id, the first counts."""
    taken: dict[tuple[str, str], Json] = {}
    for delta in deltas:
        taken.setdefault((delta["deltaId"], delta.get("part", "")), delta)  # a snapshot splits a delta into parts
    places = {(delta["table"], delta["rowId"]) for delta in taken.values()}
    found = {
        place: _row([delta for delta in taken.values() if (delta["table"], delta["rowId"]) == place])
        for place in places
    }
    return {place: row for place, row in found.items() if row is not None}


def _row(deltas: Sequence[Json]) -> dict[str, Any] | None:
    deletes = [delta for delta in deltas if delta["op"] == "DELETE"]
    alive = [
        delta for delta in deltas if delta["op"] != "DELETE" and all(wins_over(delta, deletion) for deletion in deletes)
    ]
    if not alive:
        return None
    row: dict[str, Any] = {}
    for delta in alive:
        for column in delta["columns"]:
            rivals = [
                other
                for other in alive
                if other["deltaId"] != delta["deltaId"] and column["column"] in map(_name, other["columns"])
            ]
            if all(wins_over(delta, rival) for rival in rivals):
                row[column["column"]] = column["value"]
    return row


def _name(column: Json) -> str:
    return str(column["column"])

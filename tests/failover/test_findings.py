"""`findings` reports violations in a recorded history of each API."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from failover.findings import Kept, findings, stood_still_s
from failover.load_apis import DOORS, Deltas, Door, Ledger, content
from servers.checker import COMMITTED, UNKNOWN, Call, Seen, line_of

S_NS = 1_000_000_000
ENCODED = {1: "MC8x", 2: "MC8y", 3: "MC8z"}
"""The contents of client 0, encoded as values of the ledger."""


def body(door: type[Door], number: int) -> bytes:
    """Return a body as the API stores it."""
    said = content(0, number)
    forms: dict[str, Any] = {
        "events": {"content": said, "type": "said"},
        "ledger": {"operations": [{"set_entity": {"key": f"e0/{number}", "value": ENCODED[number]}}]},
        "deltas": {"clientId": "c0", "columns": [{"column": "said", "value": said}], "op": "UPDATE"},
        "runs": {"args": {"said": said}, "output": "drawn", "plan_id": "c0"},
        "chat": {"content": said, "content_type": "text/plain"},
    }
    return json.dumps(forms[door.name]).encode()


def kept(door: type[Door], *numbers: int) -> list[Kept]:
    """Return records whose lane has other records between them: number 1 of the API is number 10 of the lane."""
    return [
        Kept(place, 10 * number, f"id{number}", f"root{number}", body(door, number))
        for place, number in enumerate(numbers, 1)
    ]


def record(directory: Path, door: type[Door], calls: list[Call], seen: list[Seen]) -> None:
    place = directory / door.name
    place.mkdir()
    (place / "calls-load.jsonl").write_text("".join(map(line_of, calls)))
    for name in ("wanderer", "at-0"):
        (place / f"readings-{name}.jsonl").write_text("".join(map(line_of, seen)))


def call(number: int, position: int, ended: int = 0, answer: str = COMMITTED) -> Call:
    return Call("c", 0, f"id{number}", content(0, number), 0, ended, answer, position)


def position_in(door: type[Door], number: int) -> int:
    return 10 * number if door.is_by_lane else number


def seen_by(door: type[Door], *numbers: int) -> list[Seen]:
    name = "root" if door is Ledger else "id"
    return [Seen(position_in(door, number), f"{name}{number}") for number in numbers]


@pytest.mark.parametrize("door", DOORS)
def test_sound_history_has_no_findings(tmp_path: Path, door: type[Door]) -> None:
    calls = [call(number, position_in(door, number)) for number in (1, 2)] + [call(2, 0, answer=UNKNOWN)]
    record(tmp_path, door, calls, seen_by(door, 1, 2))
    assert findings(door, tmp_path, kept(door, 1, 2)) == []


@pytest.mark.parametrize("door", [Ledger, Deltas])
def test_lost_acknowledged_write_is_found(tmp_path: Path, door: type[Door]) -> None:
    record(
        tmp_path,
        door,
        [call(number, position_in(door, number)) for number in (1, 2)],
        [Seen(position_in(door, 1), "id1")],
    )
    (found,) = findings(door, tmp_path, kept(door, 1))
    assert found.startswith(f"{door.name}: id2 was acknowledged")
    assert found.endswith("is lost")


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("is_readable", [True, False])
def test_body_that_differs_from_the_acknowledged_one_is_found(
    tmp_path: Path, door: type[Door], is_readable: bool
) -> None:
    record(tmp_path, door, [call(number, position_in(door, number)) for number in (1, 2)], seen_by(door, 1, 2))
    first, second = kept(door, 1, 2)
    other = replace(second, body=body(door, 3) if is_readable else b'{"torn":')
    assert findings(door, tmp_path, [first, other]) == [
        f"{door.name}: id2 at 2 was never submitted",
        f"{door.name}: id2 was acknowledged to c with another content than is stored",
    ]


def test_position_assigned_twice_is_found(tmp_path: Path) -> None:
    record(tmp_path, Ledger, [call(1, 10), call(2, 10)], [Seen(10, "root1"), Seen(20, "root2")])
    assert "ledger: id2 was acknowledged at 1 to c, and is at 2" in findings(Ledger, tmp_path, kept(Ledger, 1, 2))


def test_block_that_changed_after_a_reader_received_it_is_found(tmp_path: Path) -> None:
    record(tmp_path, Ledger, [call(1, 10)], [Seen(10, "of the old primary")])
    assert len(findings(Ledger, tmp_path, kept(Ledger, 1))) == 2  # from both readers


def test_acknowledged_retries_do_not_end_an_outage(tmp_path: Path) -> None:
    ends = [(1, 99), (2, 100), (1, 105), (3, 121), (4, 122), (5, 300)]
    record(tmp_path, Deltas, [call(number, number, end * S_NS) for number, end in ends], [])
    began, ended = 100 * S_NS + 1, 122 * S_NS - 1
    assert stood_still_s(tmp_path, [Deltas], began, ended) == {"deltas": 21.0}

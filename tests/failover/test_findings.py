"""`findings` reports violations in a recorded history of each API."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from failover.findings import Kept, findings, measure_outage_s
from failover.load_apis import APIS, Api, Deltas, Ledger, content
from servers.checker import COMMITTED, UNKNOWN, Call, Seen, line_of

S_NS = 1_000_000_000
ENCODED = {1: "MC8x", 2: "MC8y", 3: "MC8z"}
"""The contents of client 0, encoded as ledger values."""


def body(api: type[Api], number: int) -> bytes:
    """Return a body as the API stores it."""
    said = content(0, number)
    forms: dict[str, Any] = {
        "events": {"content": said, "type": "said"},
        "ledger": {"operations": [{"set_entity": {"key": f"e0/{number}", "value": ENCODED[number]}}]},
        "deltas": {"clientId": "c0", "columns": [{"column": "said", "value": said}], "op": "UPDATE"},
        "runs": {"args": {"said": said}, "output": "drawn", "plan_id": "c0"},
        "chat": {"content": said, "content_type": "text/plain"},
    }
    return json.dumps(forms[api.name]).encode()


def kept(api: type[Api], *numbers: int) -> list[Kept]:
    """Return records with other records between them in the lane: record 1 of the API is at position 10 of the lane."""
    return [
        Kept(place, 10 * number, f"id{number}", f"root{number}", body(api, number))
        for place, number in enumerate(numbers, 1)
    ]


def record(directory: Path, api: type[Api], calls: list[Call], seen: list[Seen]) -> None:
    place = directory / api.name
    place.mkdir()
    (place / "calls-load.jsonl").write_text("".join(map(line_of, calls)))
    for name in ("wanderer", "at-0"):
        (place / f"readings-{name}.jsonl").write_text("".join(map(line_of, seen)))


def call(number: int, position: int, ended: int = 0, answer: str = COMMITTED) -> Call:
    return Call("c", 0, f"id{number}", content(0, number), 0, ended, answer, position)


def position_in(api: type[Api], number: int) -> int:
    return 10 * number if api.is_by_lane else number


def seen_by(api: type[Api], *numbers: int) -> list[Seen]:
    name = "root" if api is Ledger else "id"
    return [Seen(position_in(api, number), f"{name}{number}") for number in numbers]


@pytest.mark.parametrize("api", APIS)
def test_sound_history_has_no_findings(tmp_path: Path, api: type[Api]) -> None:
    calls = [call(number, position_in(api, number)) for number in (1, 2)] + [call(2, 0, answer=UNKNOWN)]
    record(tmp_path, api, calls, seen_by(api, 1, 2))
    assert findings(api, tmp_path, kept(api, 1, 2)) == []


@pytest.mark.parametrize("api", [Ledger, Deltas])
def test_lost_acknowledged_write_is_found(tmp_path: Path, api: type[Api]) -> None:
    record(
        tmp_path,
        api,
        [call(number, position_in(api, number)) for number in (1, 2)],
        [Seen(position_in(api, 1), "id1")],
    )
    (found,) = findings(api, tmp_path, kept(api, 1))
    assert found.startswith(f"{api.name}: id2 was acknowledged")
    assert found.endswith("is lost")


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("is_readable", [True, False])
def test_body_that_differs_from_the_acknowledged_one_is_found(
    tmp_path: Path, api: type[Api], is_readable: bool
) -> None:
    record(tmp_path, api, [call(number, position_in(api, number)) for number in (1, 2)], seen_by(api, 1, 2))
    first, second = kept(api, 1, 2)
    other = replace(second, body=body(api, 3) if is_readable else b'{"torn":')
    assert findings(api, tmp_path, [first, other]) == [
        f"{api.name}: id2 at 2 was never submitted",
        f"{api.name}: id2 was acknowledged to c with content that differs from the stored content",
    ]


def test_position_assigned_twice_is_found(tmp_path: Path) -> None:
    record(tmp_path, Ledger, [call(1, 10), call(2, 10)], [Seen(10, "root1"), Seen(20, "root2")])
    assert "ledger: id2 was acknowledged at 1 to c, and is at 2" in findings(Ledger, tmp_path, kept(Ledger, 1, 2))


def test_block_that_changes_after_a_reader_received_it_is_found(tmp_path: Path) -> None:
    record(tmp_path, Ledger, [call(1, 10)], [Seen(10, "of the old primary")])
    assert len(findings(Ledger, tmp_path, kept(Ledger, 1))) == 2  # both readers report it


def test_acknowledged_retries_do_not_end_an_outage(tmp_path: Path) -> None:
    ends = [(1, 99), (2, 100), (1, 105), (3, 121), (4, 122), (5, 300)]
    record(tmp_path, Deltas, [call(number, number, end * S_NS) for number, end in ends], [])
    began, ended = 100 * S_NS + 1, 122 * S_NS - 1
    assert measure_outage_s(tmp_path, [Deltas], began, ended) == {"deltas": 21.0}

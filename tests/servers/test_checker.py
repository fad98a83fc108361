"""The checker reports the violations in a corrupted history, and none in a sound history."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from servers.checker import COMMITTED, REFUSED, UNKNOWN, Call, HeadQuery, History, Seen, Stored, line_of, violations


def sound_history() -> History:
    """Two clients of two servers. `b` was sent twice, one client was refused `c`, and `d` was never acknowledged."""
    calls = [
        Call("ann", 1, "a", "x", 10, 20, COMMITTED, 1),
        Call("ann", 1, "b", "x", 30, 45, UNKNOWN),
        Call("bob", 2, "c", "y", 32, 41, COMMITTED, 3),
        Call("ann", 2, "b", "x", 50, 60, COMMITTED, 2),
        Call("bob", 2, "a", "x", 50, 60, COMMITTED, 1),
        Call("ann", 1, "c", "x", 61, 70, REFUSED),
        Call("bob", 1, "d", "x", 61, 99, UNKNOWN),
    ]
    records = [Stored(1, "a", "x"), Stored(2, "b", "x"), Stored(3, "c", "y"), Stored(4, "d", "x")]
    seen = [Seen(record.position, record.id) for record in records]
    head_queries = [HeadQuery(1, 5, 0), HeadQuery(2, 25, 1), HeadQuery(1, 42, 3), HeadQuery(2, 42, 4)]
    return History(calls, {"reader 1": seen, "reader 2": list(seen)}, head_queries, 4, records)


def remove_record(history: History, position: int) -> None:
    """Remove a record and renumber later records, so that no gap remains."""
    history.records = [
        replace(one, position=one.position - (one.position > position))
        for one in history.records
        if one.position != position
    ]
    history.head -= 1


def lose_acknowledged_record(history: History) -> None:
    remove_record(history, 3)


def lose_record_and_leave_a_gap(history: History) -> None:
    del history.records[2]


def store_id_twice(history: History) -> None:
    history.records.append(Stored(5, "b", "x"))
    history.head = 5


def skip_position(history: History) -> None:
    history.records[3] = Stored(5, "d", "x")
    history.head = 5


def reuse_position(history: History) -> None:
    history.records[3] = Stored(3, "d", "x")


def acknowledge_at_wrong_position(history: History) -> None:
    history.calls[3] = replace(history.calls[3], position=4)


def acknowledge_at_two_positions(history: History) -> None:
    history.calls[4] = replace(history.calls[4], position=2)


def change_content(history: History) -> None:
    history.records[1] = Stored(2, "b", "other")


def store_unsubmitted_record(history: History) -> None:
    history.records.append(Stored(5, "e", "x"))
    history.head = 5


def report_wrong_head(history: History) -> None:
    history.head = 5


def refuse_same_content(history: History) -> None:
    history.calls[5] = replace(history.calls[5], content="y")


def refuse_missing_id(history: History) -> None:
    history.calls.append(Call("ann", 1, "nowhere", "x", 61, 70, REFUSED))


def break_order(history: History) -> None:
    """`b` was first submitted after `c` was acknowledged, but is stored before it."""
    history.calls[1] = replace(history.calls[1], began=42)


def receive_out_of_order(history: History) -> None:
    seen = history.readings["reader 2"]
    seen[1], seen[2] = seen[2], seen[1]


def receive_twice(history: History) -> None:
    history.readings["reader 2"].insert(2, history.readings["reader 2"][1])


def skip_received_record(history: History) -> None:
    del history.readings["reader 1"][1]


def stop_reading_early(history: History) -> None:
    history.readings["reader 1"].pop()


def receive_wrong_id(history: History) -> None:
    history.readings["reader 1"][1] = Seen(2, "c")


def return_old_head(history: History) -> None:
    history.head_queries[2] = HeadQuery(1, 42, 2)


CORRUPTIONS: dict[Callable[[History], None], str] = {
    lose_acknowledged_record: "c was acknowledged at 3 to bob, and is lost",
    lose_record_and_leave_a_gap: "position 4 follows where 3 is expected",
    store_id_twice: "b is stored at 2 and again at 5",
    skip_position: "position 5 follows where 4 is expected",
    reuse_position: "position 3 follows where 4 is expected",
    acknowledge_at_wrong_position: "b was acknowledged at 4 to ann, and is at 2",
    acknowledge_at_two_positions: "a was acknowledged at 2 to bob, and is at 1",
    change_content: "b was acknowledged to ann with content that differs from the stored content",
    store_unsubmitted_record: "e at 5 was never submitted",
    report_wrong_head: "the log reports 5 as newest position, but the last record is at 4",
    refuse_same_content: "c from ann was refused, but the stored content is the same",
    refuse_missing_id: "nowhere from ann was refused, but it is not stored",
    break_order: "c at 3 was acknowledged before b, which precedes it, was begun",
    receive_out_of_order: "reader 2 received 2 after 3",
    receive_twice: "reader 2 received 2 after 2",
    skip_received_record: "reader 1 received [(3, 'c'), (4, 'd')] where [(2, 'b'), (3, 'c')] is expected",
    stop_reading_early: "reader 1 received [] where [(4, 'd')] is expected",
    receive_wrong_id: "reader 1 received [(2, 'c'), (3, 'c')] where [(2, 'b'), (3, 'c')] is expected",
    return_old_head: "server 1 returned 2 after 3 had been acknowledged",
}


def test_sound_history_has_no_violation() -> None:
    assert violations(sound_history()) == []


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_corrupted_history_is_rejected(corrupt: Callable[[History], None]) -> None:
    history = sound_history()
    corrupt(history)
    assert CORRUPTIONS[corrupt] in violations(history)


def test_late_retry_is_not_an_order_violation() -> None:
    history = sound_history()
    history.calls[3] = replace(history.calls[3], began=1000, ended=1001)
    assert violations(history) == []


def test_history_is_loaded_from_its_files(tmp_path: Path) -> None:
    history = sound_history()
    (tmp_path / "calls-1.jsonl").write_text("".join(map(line_of, history.calls[:3])))
    (tmp_path / "calls-2.jsonl").write_text("".join(map(line_of, history.calls[3:])))
    (tmp_path / "head-queries-1.jsonl").write_text("".join(map(line_of, history.head_queries)))
    for reader, seen in history.readings.items():
        (tmp_path / f"readings-{reader}.jsonl").write_text("".join(map(line_of, seen)))
    records = [(one.position, one.id, one.content) for one in history.records]
    (tmp_path / "dump.json").write_text(json.dumps({"head": history.head, "records": records}))
    history.readings = {f"readings-{reader}": seen for reader, seen in history.readings.items()}
    assert History.load(tmp_path) == history

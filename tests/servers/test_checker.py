"""The checker reports the violations of a corrupted history, and none of a sound one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from servers.checker import COMMITTED, REFUSED, UNKNOWN, Call, History, Look, Seen, Stored, line_of, violations


def sound() -> History:
    """Two clients at two servers; `b` was sent twice, `c` refused to one client, `d` never acknowledged."""
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
    looks = [Look(1, 5, 0), Look(2, 25, 1), Look(1, 42, 3), Look(2, 42, 4)]
    return History(calls, {"reader 1": seen, "reader 2": list(seen)}, looks, 4, records)


def without(history: History, position: int) -> None:
    """Remove a record without a trace: later records move up."""
    history.records = [
        replace(one, position=one.position - (one.position > position))
        for one in history.records
        if one.position != position
    ]
    history.head -= 1


def lose_an_acknowledged_one(history: History) -> None:
    without(history, 3)


def lose_and_leave_a_hole(history: History) -> None:
    del history.records[2]


def store_twice(history: History) -> None:
    history.records.append(Stored(5, "b", "x"))
    history.head = 5


def skip_a_position(history: History) -> None:
    history.records[3] = Stored(5, "d", "x")
    history.head = 5


def reuse_a_position(history: History) -> None:
    history.records[3] = Stored(3, "d", "x")


def move_an_acknowledged_one(history: History) -> None:
    history.calls[3] = replace(history.calls[3], position=4)


def acknowledge_twice_at_two_places(history: History) -> None:
    history.calls[4] = replace(history.calls[4], position=2)


def change_the_content(history: History) -> None:
    history.records[1] = Stored(2, "b", "other")


def invent(history: History) -> None:
    history.records.append(Stored(5, "e", "x"))
    history.head = 5


def say_a_wrong_head(history: History) -> None:
    history.head = 5


def refuse_the_same(history: History) -> None:
    history.calls[5] = replace(history.calls[5], content="y")


def refuse_for_nothing(history: History) -> None:
    history.calls.append(Call("ann", 1, "nowhere", "x", 61, 70, REFUSED))


def break_the_order(history: History) -> None:
    """`b` was first submitted after `c` was acknowledged, but precedes it."""
    history.calls[1] = replace(history.calls[1], began=42)


def read_backwards(history: History) -> None:
    seen = history.readings["reader 2"]
    seen[1], seen[2] = seen[2], seen[1]


def read_one_twice(history: History) -> None:
    history.readings["reader 2"].insert(2, history.readings["reader 2"][1])


def skip_in_a_reading(history: History) -> None:
    del history.readings["reader 1"][1]


def end_a_reading_early(history: History) -> None:
    history.readings["reader 1"].pop()


def read_another(history: History) -> None:
    history.readings["reader 1"][1] = Seen(2, "c")


def look_into_the_past(history: History) -> None:
    history.looks[2] = Look(1, 42, 2)


CORRUPTIONS: dict[Callable[[History], None], str] = {
    lose_an_acknowledged_one: "c was acknowledged at 3 to bob, and is lost",
    lose_and_leave_a_hole: "position 4 follows where 3 is expected",
    store_twice: "b is stored at 2 and again at 5",
    skip_a_position: "position 5 follows where 4 is expected",
    reuse_a_position: "position 3 follows where 4 is expected",
    move_an_acknowledged_one: "b was acknowledged at 4 to ann, and is at 2",
    acknowledge_twice_at_two_places: "a was acknowledged at 2 to bob, and is at 1",
    change_the_content: "b was acknowledged to ann with another content than is stored",
    invent: "e at 5 was never submitted",
    say_a_wrong_head: "the log reports 5 as newest position, but the last record is at 4",
    refuse_the_same: "c was refused to ann, although the stored content is the same",
    refuse_for_nothing: "nowhere was refused to ann although it is not stored",
    break_the_order: "c at 3 was acknowledged before b, which precedes it, was begun",
    read_backwards: "reader 2 received 2 after 3",
    read_one_twice: "reader 2 received 2 after 2",
    skip_in_a_reading: "reader 1 received [(3, 'c'), (4, 'd')] where [(2, 'b'), (3, 'c')] is expected",
    end_a_reading_early: "reader 1 received [] where [(4, 'd')] is expected",
    read_another: "reader 1 received [(2, 'c'), (3, 'c')] where [(2, 'b'), (3, 'c')] is expected",
    look_into_the_past: "server 1 returned 2 after 3 had been acknowledged",
}


def test_sound_history_has_no_violation() -> None:
    assert violations(sound()) == []


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda corrupt: corrupt.__name__)
def test_corrupted_history_is_rejected(corrupt: Callable[[History], None]) -> None:
    history = sound()
    corrupt(history)
    assert CORRUPTIONS[corrupt] in violations(history)


def test_late_retry_does_not_violate_the_order() -> None:
    history = sound()
    history.calls[3] = replace(history.calls[3], began=1000, ended=1001)
    assert violations(history) == []


def test_history_is_loaded_from_its_files(tmp_path: Path) -> None:
    history = sound()
    (tmp_path / "calls-1.jsonl").write_text("".join(map(line_of, history.calls[:3])))
    (tmp_path / "calls-2.jsonl").write_text("".join(map(line_of, history.calls[3:])))
    (tmp_path / "looks-1.jsonl").write_text("".join(map(line_of, history.looks)))
    for reader, seen in history.readings.items():
        (tmp_path / f"readings-{reader}.jsonl").write_text("".join(map(line_of, seen)))
    records = [(one.position, one.id, one.content) for one in history.records]
    (tmp_path / "dump.json").write_text(json.dumps({"head": history.head, "records": records}))
    history.readings = {f"readings-{reader}": seen for reader, seen in history.readings.items()}
    assert History.load(tmp_path) == history

"""The checker of histories finds what is wrong in doctored ones, and nothing in a sound one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gateways.checker import COMMITTED, REFUSED, UNKNOWN, Call, History, Look, Seen, Stored, line_of, violations


def sound() -> History:
    """Two clients at two gateways; `b` was sent twice, `c` was refused to one of them, `d` never acknowledged."""
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
    """The record is gone, as if it had never been: those behind it move up."""
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
    """`b` was first submitted after `c` was acknowledged, and stands before it."""
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


DOCTORED: dict[Callable[[History], None], str] = {
    lose_an_acknowledged_one: "c was acknowledged at 3 to bob, and is lost",
    lose_and_leave_a_hole: "position 4 comes where 3 was due",
    store_twice: "b is stored at 2 and again at 5",
    skip_a_position: "position 5 comes where 4 was due",
    reuse_a_position: "position 3 comes where 4 was due",
    move_an_acknowledged_one: "b was acknowledged at 4 to ann, and is at 2",
    acknowledge_twice_at_two_places: "a was acknowledged at 2 to bob, and is at 1",
    change_the_content: "b was acknowledged to ann with another content than is stored",
    invent: "e at 5 is what nobody submitted",
    say_a_wrong_head: "the newest position is said to be 5, and the last record is at 4",
    refuse_the_same: "c was refused to ann, though what is stored is the same",
    refuse_for_nothing: "nowhere was refused to ann for one that is not there",
    break_the_order: "c at 3 was acknowledged before b, which precedes it, was begun",
    read_backwards: "reader 2 was given 2 after 3",
    read_one_twice: "reader 2 was given 2 after 2",
    skip_in_a_reading: "reader 1 was given [(3, 'c'), (4, 'd')] where [(2, 'b'), (3, 'c')] was due",
    end_a_reading_early: "reader 1 was given [] where [(4, 'd')] was due",
    read_another: "reader 1 was given [(2, 'c'), (3, 'c')] where [(2, 'b'), (3, 'c')] was due",
    look_into_the_past: "gateway 1 showed 2 after 3 had been acknowledged",
}


def test_a_sound_history_has_no_violation() -> None:
    assert violations(sound()) == []


@pytest.mark.parametrize("doctor", DOCTORED, ids=lambda doctor: doctor.__name__)
def test_a_doctored_history_is_rejected(doctor: Callable[[History], None]) -> None:
    history = sound()
    doctor(history)
    assert DOCTORED[doctor] in violations(history)


def test_a_retry_that_was_begun_late_is_no_violation_of_the_order() -> None:
    history = sound()
    history.calls[3] = replace(history.calls[3], began=1000, ended=1001)
    assert violations(history) == []


def test_a_history_is_what_its_files_say(tmp_path: Path) -> None:
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

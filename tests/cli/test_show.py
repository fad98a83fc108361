"""`oncelog show` prints the state of a key or a position, with the reason."""

import json
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest

from cli import sample_log
from cli.runner import COMMAND, RUNNER
from core.item_builders import key, result, transaction
from databases import address_of
from oncelog.cli.output import format_utc
from oncelog.core.policy import RUNS
from oncelog.core.values import Claim, Release
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.metadata import DAMAGE_HINT
from oncelog.storage.queries.records import load_heads

HINT = ". If the ID is the text of a key, add --text"


def new_log(kind: str, directory: Path) -> Path | str:
    """Return a file path or a database address for a new log."""
    return directory / "log.db" if kind == "file" else address_of(directory)


@pytest.fixture(scope="module", params=["file", "database"])
def log(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path | str:
    place = new_log(request.param, tmp_path_factory.mktemp("show"))
    sample_log.make_log(place, rounds=12)
    return place


@pytest.fixture(params=["file", "database"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Path | str:
    return new_log(request.param, tmp_path)


def show(log: Path | str, *arguments: str) -> tuple[int, str]:
    done = RUNNER.invoke(COMMAND, ["show", str(log), *arguments])
    assert done.stderr == ""
    return done.exit_code, done.stdout


def show_json(log: Path | str, *arguments: str) -> list[dict[str, Any]]:
    status, output = show(log, *arguments, "--json")
    search: list[dict[str, Any]] = json.loads(output)
    assert status == (3 if len(search) > 1 else 0 if "record" in search[0] else 1)
    return search


def test_show_finds_an_event_by_uuid_by_hex_and_by_position(log: Path | str) -> None:
    [one] = show_json(log, "00000000-0000-0000-0000-000000000006", "--policy", "events")
    assert one["state"] == "committed"
    assert one["policy"] == "events"
    record = one["record"]
    assert (record["lane"], record["position"], record["height"]) == (0, 5, 3)
    assert (record["actor"], record["body"], record["erased"]) == ("user:zoë", None, True)
    assert show_json(log, "0" * 31 + "6", "--policy", "events") == [one] == show_json(log, "0:5")
    status, output = show(log, "0:6")
    assert status == 0
    for words in (
        "committed: committed as position 6",
        "lane 0, position 6",
        "2027-01-15 11:00:00.000 UTC",
        "user:zoë",
        'body:           {"type":"tick","n":7}',
        "height 3, ",
    ):
        assert words in output
    assert "erased:         yes" in show(log, "0:5")[1]


def test_show_searches_every_policy_unless_one_is_given(log: Path | str) -> None:
    identity = key(1).hex()
    assert [one["policy"] for one in show_json(log, identity, "--scope", "campaign/1")] == ["runs"]
    [mine] = show_json(log, identity, "--scope", "campaign/1", "--policy", "chat")
    assert (mine["state"], mine["policy"]) == ("unknown", "chat")
    done = RUNNER.invoke(COMMAND, ["show", str(log), identity, "--policy", "nonsense"])
    assert done.exit_code == 2
    assert "has no policy 'nonsense'" in done.stderr


def test_show_distinguishes_keys_of_different_clients(log: Path | str) -> None:
    identity = key(20).hex()
    [mine] = show_json(log, identity, "--scope", "org/1", "--client", "c1")
    assert (mine["state"], mine["record"]["client_sequence"]) == ("committed", 2)
    [others] = show_json(log, identity, "--scope", "org/1", "--client", "c2")
    assert others["state"] == "unknown"
    for options in ((), ("--scope", "org/1"), ("--client", "c1")):
        assert show_json(log, identity, "--policy", "ledger", *options) == [mine]
    # A write without a key can only be found by position.
    place = next(number for number in range(1, 30) if '"key":""' in show(log, f"3:{number}", "--json")[1])
    assert show_json(log, f"3:{place}")[0]["record"]["client"] == "c2"


def test_show_reports_forgotten_keys(log: Path | str) -> None:
    newest = show_json(log, key(7000, 4).hex(), "--scope", "notes/again")[0]["record"]["position"]
    states = {position: show_json(log, f"2:{position}")[0] for position in range(1, newest)}
    forgotten = [one for one in states.values() if one["record"]["key"] == key(7000, 4).hex()]
    assert len(forgotten) == 11
    assert {one["state"] for one in forgotten} == {"forgotten"}
    assert "a later write was committed under the same key" in forgotten[0]["reason"]


@pytest.mark.rule("LG-15", "LG-16")
def test_show_reports_where_a_ledger_key_was_evicted(place: Path | str) -> None:
    sample_log.make_log(place, rounds=0)
    start_ms = sample_log.START_MS + 200 * sample_log.HOUR_MS
    sample_log.append(place, transaction(100, 1, client="till"), transaction(101, 2, client="till"), now_ms=start_ms)
    for begin in range(1, 71, 10):  # the lane evicts at multiples of 16
        fillers = [transaction(200 + count, count, client="filler") for count in range(begin, begin + 10)]
        sample_log.append(place, *fillers, now_ms=start_ms + begin * sample_log.HOUR_MS)
    identity = key(100).hex()
    [one] = show_json(place, identity)
    lane = one["record"]["lane"]
    due_ms = start_ms + 24 * sample_log.HOUR_MS
    times = {number: show_json(place, f"{lane}:{number}")[0]["record"]["log_time_ms"] for number in (16, 32, 48, 64)}
    position = next(number for number, time_ms in times.items() if time_ms > due_ms)
    assert one["state"] == "forgotten"
    assert one["evicted"] == {"lane": lane, "position": position, "log_time_ms": times[position]}
    status, output = show(place, identity)
    assert status == 0
    first, second, *_ = output.splitlines()
    assert first == (
        f"forgotten: committed as sequence {one['record']['sequence']} of 'org/1', but its key was evicted after "
        "86400000 ms (policy ledger), and so was its client (whose last sequence is now 0): a retry with client "
        "sequence 1 is a new write, a higher one is refused"
    )
    assert second == f"key evicted:    lane {lane}, position {position}, {format_utc(times[position])}"
    # The key is reused, but the earlier record can still be found by position.
    sample_log.append(place, transaction(100, 1, client="till"), now_ms=start_ms + 80 * sample_log.HOUR_MS)
    again = show_json(place, f"{lane}:{one['record']['position']}")[0]
    newest = show_json(place, identity)[0]["record"]["position"]
    assert (again["state"], again["evicted"]) == ("forgotten", one["evicted"])
    assert again["reason"].endswith(f"a later write was committed under the same key, at position {newest}")


@pytest.mark.rule("LG-15", "CO-12")
@pytest.mark.parametrize(("count_before", "evicting"), [(2, 112), (20, 16)])
def test_show_finds_the_eviction_of_a_key_in_a_log_with_a_leap(
    place: Path | str, count_before: int, evicting: int
) -> None:
    sample_log.make_log(place, rounds=0)
    start_ms = sample_log.START_MS + 200 * sample_log.HOUR_MS
    sample_log.append(place, transaction(100, 1, client="till"), now_ms=start_ms)
    fillers = [transaction(200 + count, count, client="filler") for count in range(1, 50)]
    later_ms = start_ms + 25 * sample_log.HOUR_MS
    sample_log.append(place, *fillers[:count_before], now_ms=later_ms)
    assert RUNNER.invoke(COMMAND, ["epoch", str(place), "--renew", "--above=100"]).exit_code == 0
    sample_log.append(place, *fillers[count_before:], now_ms=later_ms)
    # The leap skips the positions up to 100, so the multiples of 16 below have no record and do not evict.
    assert show_json(place, key(100).hex())[0]["evicted"]["position"] == evicting


def test_show_reports_unknown_keys(log: Path | str) -> None:
    status, output = show(log, "abcd")
    assert status == 1
    assert output.startswith(
        "unknown: no record: it was never committed here, or it was refused, which leaves no trace"
    )
    status, output = show(log, "0:1000")
    assert (status, output) == (1, f"unknown: no record: lane 0 has positions 1 to 24{HINT}\n")
    assert show(log, "0:0") == (1, output)
    status, output = show(log, "not an id")
    assert status == 1
    assert output.endswith(", for the key with this text (it is neither a UUID nor hex)\n")


def test_show_distinguishes_missing_and_empty_lanes(place: Path | str) -> None:
    sample_log.make_log(place, rounds=0)
    with create_inspector(str(place)).open_view() as view:
        empty = min({0, 1, 2, 3, 4} - set(view.run_query(load_heads)))
    assert show(place, f"{empty}:1") == (1, f"unknown: no record: lane {empty} is still empty{HINT}\n")
    for lane in (5, 99):
        words = f"unknown: no record: lane {lane} does not exist; the log has lanes 0 to 4{HINT}\n"
        assert show(place, f"{lane}:1") == (1, words)
        assert show_json(place, f"{lane}:1")[0]["state"] == "unknown"


@pytest.mark.parametrize("option", [["--policy", "events"], ["--scope", "chat/1"], ["--client", "c1"]])
def test_show_by_position_refuses_options_of_keys(log: Path | str, option: list[str]) -> None:
    done = RUNNER.invoke(COMMAND, ["show", str(log), "0:1", *option])
    assert done.exit_code == 2
    assert done.stdout == ""
    assert f"0:1 is the place of a record: {option[0]} needs a key." in done.stderr
    assert done.stderr.endswith(" If it is the text of a key, add --text.\n")


def test_show_reports_leases(place: Path | str) -> None:
    sample_log.make_log(place, rounds=1)
    now_ms = time.time_ns() // 1_000_000 + 365 * 24 * sample_log.HOUR_MS
    names = {"policy": RUNS, "scope": "campaign/9", "holder": "worker"}
    for number in (1, 2, 3):
        sample_log.append(place, Claim(key=key(number), fingerprint=b"", **names), now_ms=now_ms)  # type: ignore[arg-type]
    fence = show_json(place, key(2).hex(), "--scope", "campaign/9")[0]["lease"]["fence"]
    failed = Release(key=key(2), fence=fence, failure=b"no luck", **names)  # type: ignore[arg-type]
    sample_log.append(place, failed, result(4, scope="campaign/9"), now_ms=now_ms)
    status, output = show(place, key(1).hex(), "--scope", "campaign/9")
    assert status == 1
    assert output.startswith("leased: no record yet: the work runs under lease 1, which expires in ")
    assert "\nlease:          worker, fence 1, until " in output
    status, output = show(place, key(2).hex(), "--scope", "campaign/9")
    assert status == 1
    assert "the work under lease 2 failed, and no caller has taken it over yet" in output


def test_show_escapes_control_characters_of_a_body(place: Path | str) -> None:
    sample_log.make_log(place, rounds=1)
    sample_log.append(place, result(50, "\x1b[2J", scope="x"), transaction(7, 1, client="c9", body=b"\xff\x00"))
    assert "body (hex):     1b5b324a" in show(place, key(50).hex(), "--scope", "x")[1]
    [one] = show_json(place, key(7).hex(), "--scope", "org/1", "--client", "c9")
    assert (one["record"]["body"], one["record"]["body_is_hex"]) == ("ff00", True)


def test_show_reports_a_damaged_record(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sample_log.make_log(path, rounds=2)
    for change in ("policy = 'nobody'", "partitions = '{'", "actor = CAST(x'ff' AS TEXT)"):
        connection = sqlite3.connect(path)
        connection.execute(f"UPDATE oncelog_records SET {change} WHERE place = 1")  # noqa: S608
        connection.commit()
        connection.close()
        done = RUNNER.invoke(COMMAND, ["show", str(path), "0:1"])
        assert done.exit_code == 2
        assert done.stderr.startswith("oncelog: ")


def test_show_reports_a_missing_record_as_damage(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    sample_log.make_log(path, rounds=2)
    connection = sqlite3.connect(path)
    connection.execute("DELETE FROM oncelog_records WHERE place = 1")
    connection.commit()
    connection.close()
    done = RUNNER.invoke(COMMAND, ["show", str(path), "0:1"])
    assert done.exit_code == 2
    assert done.stderr == f"oncelog: lane 0, position 1: the record is missing; {DAMAGE_HINT}\n"

"""The benchmarks run and compare like with like. Nothing here looks at a time: that is for `make bench`."""

import asyncio
import gc
import random
import re
import socket
import sqlite3
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
import uvloop

from bench import growth, server, server_report, ws_idle
from bench.__main__ import ALONE, BENCHMARKS, Measured, main
from bench.bare import BareFile, batches_of
from bench.disk import directory, file_system, place_for_files
from bench.measure import QUICK, Effort, Measurement, Result, measure
from bench.report import plain, report_of
from bench.server_report import Figures, Series
from bench.wire import EVENTS, PARTITIONS, Slice, WireEvent, uuids, wire_events
from bench.ws_fan_out import Subscriber
from bench.ws_load import PING, PONG, TEXT, Connection, events_of, frame, message, submission
from crash.observing import say
from oncelog import event, open_blocking
from oncelog.stores.sqlite.runs import keys_of

MEASURED = {
    name: benchmark for name, benchmark in BENCHMARKS.items() if isinstance(benchmark, Measured) and name not in ALONE
}


@pytest.mark.parametrize("name", MEASURED)
def test_quick_run_has_a_row_for_every_measurement(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--quick", "--no-save"]) == 0
    _, _, *rows = capsys.readouterr().out.splitlines()
    expected = [measurement.name for measurement in MEASURED[name].measurements(QUICK)]
    assert [row.split("  ")[0] for row in rows] == expected
    assert len(set(expected)) == len(expected)


@pytest.mark.parametrize("name", MEASURED)
def test_contenders_agree(name: str) -> None:
    for measurement in MEASURED[name].measurements(QUICK):
        assert measurement.agree(*measurement.answers()), measurement.name


def test_contenders_that_disagree_are_not_timed() -> None:
    unequal = Measurement("sum", lambda: 1, lambda: 2, "peer")
    with pytest.raises(ValueError) as caught:
        measure(unequal, QUICK)
    assert str(caught.value) == "sum: ours and peer do not agree"


def test_best_times_and_median_of_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    def ours() -> None: ...
    def baseline() -> None: ...

    seconds: dict[Callable[[], object], Iterator[float]] = {
        ours: iter([4e-6, 2e-6, 3e-6]),
        baseline: iter([30e-6, 40e-6, 20e-6]),
    }

    class ScriptedTimer:
        def __init__(self, run: Callable[[], object], setup: object) -> None:
            assert setup is gc.enable
            self.run = run

        def repeat(self, repeat: int, number: int) -> list[float]:
            return [1e-3 * number] * repeat

        def timeit(self, number: int) -> float:
            return next(seconds[self.run]) * number

    monkeypatch.setattr("bench.measure.Timer", ScriptedTimer)
    measurement = Measurement("a", ours, baseline, "peer", count=2)
    result = measure(measurement, Effort(rounds=3, sample_ms=5))
    assert result.ours_us == pytest.approx(1)
    assert result.baseline_us == pytest.approx(10)
    assert result.ratio == pytest.approx(10)
    assert result.median_ratio == pytest.approx(7.5)


def test_long_calls_have_few_rounds_and_what_is_prepared_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    clock = iter(range(1000))

    class CountingTimer:
        def __init__(self, run: Callable[[], object], setup: Callable[[], object]) -> None:
            self.run, self.setup = run, setup

        def timeit(self, number: int) -> float:
            assert number == 1
            self.setup()
            seen.append("began")
            self.run()
            return 10.0 + next(clock)

    def step(name: str) -> Callable[[], None]:
        return lambda: seen.append(name)

    monkeypatch.setattr("bench.measure.Timer", CountingTimer)
    measurement = Measurement(
        "a",
        step("ours"),
        step("baseline"),
        "peer",
        count=10,
        baseline_count=1,
        prepare_ours=step("prepare ours"),
        prepare_baseline=step("prepare baseline"),
        rounds=2,
    )
    result = measure(measurement, Effort(rounds=400, sample_ms=2))
    answered = ["prepare ours", "ours", "prepare baseline", "baseline"]
    sampled = ["prepare ours", "began", "ours", "prepare baseline", "began", "baseline"]
    assert seen == answered + 2 * sampled
    assert result.ours_us == pytest.approx(1e6)
    assert result.baseline_us == pytest.approx(11e6)


@pytest.mark.parametrize(
    ("target_ratio", "target_us", "cells", "is_met", "is_ratio_met"),
    [
        (None, None, [], True, True),
        (8, None, ["≥ 8×", "met"], True, True),
        (8.5, None, ["≥ 8.5×", "NOT MET"], False, False),
        (None, 6, ["< 6 µs", "met"], True, True),
        (None, 5, ["< 5 µs", "NOT MET"], False, True),
        (8, 5, ["≥ 8×, < 5 µs", "NOT MET"], False, True),
    ],
)
def test_targets(
    target_ratio: float | None, target_us: float | None, cells: list[str], is_met: bool, is_ratio_met: bool
) -> None:
    measurement = Measurement("a", int, int, "peer", target_ratio=target_ratio, target_us=target_us)
    result = Result(measurement, ours_us=5, baseline_us=40, ratio=8, median_ratio=7)
    assert (result.is_met, result.is_ratio_met) == (is_met, is_ratio_met)
    times = ["a", "5.00 µs", "40.00 µs peer", "8.00×", "7.00×"]
    for judged, shown in ((True, cells), (False, cells[:1])):
        report = report_of([result], judged=judged)
        assert re.split(r"\s{2,}", plain(report).splitlines()[-1]) == times + shown
        assert report.is_met is (is_ratio_met or not judged)


def test_only_a_missed_ratio_fails_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.__main__.FULL", Effort(rounds=2, sample_ms=0))
    missed_ratio = Measurement("a", int, int, "peer", target_ratio=1e9)
    missed_time = Measurement("b", int, int, "peer", target_us=0)
    monkeypatch.setitem(BENCHMARKS, "ratio", Measured("ratio", lambda _: [missed_time, missed_ratio]))
    monkeypatch.setitem(BENCHMARKS, "time", Measured("time", lambda _: [missed_time]))
    assert main(["time", "--no-save"]) == 0
    assert main(["time", "ratio", "--no-save"]) == 1
    assert main(["ratio", "--quick"]) == 0


def test_page_says_what_ran_and_not_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measurement = Measurement("a", int, int, "peer")
    monkeypatch.setitem(BENCHMARKS, "small", Measured("small", lambda _: [measurement]))
    assert main(["small", "--quick", "--output", str(tmp_path / "new")]) == 0
    page = (tmp_path / "new" / "small.md").read_text()
    assert page.startswith("# Results: small\n\n- date: ")
    assert "- command: `python -m bench small --quick`\n" in page
    assert re.search(r"^- commit: ([0-9a-f]{7,}(\+changes)?|unknown)$", page, re.MULTILINE)
    assert re.search(r"^\| a \| ", page, re.MULTILINE)
    assert str(tmp_path) not in page


def test_unknown_name_is_refused_with_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["cors"])
    assert caught.value.code == 2
    assert "there is no benchmark 'cors'; there is: core" in capsys.readouterr().err


# --- growth ------------------------------------------------------------------------------------------


def test_growth_has_a_row_for_every_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["growth", "--quick", "--records", "1000", "--output", str(tmp_path)]) == 0
    windows, findings = capsys.readouterr().out.split("\n\n")
    assert [row.split()[0] for row in windows.splitlines()[2:]] == ["100", "200", "400", "1000"]
    assert "events/s, 1000 / 100, normalised" in findings
    assert "MET" not in findings
    page = (tmp_path / "growth.md").read_text()
    assert "- command: `python -m bench growth --quick --records 1000`\n" in page
    assert len(re.findall(r"^\| --- \|", page, re.MULTILINE)) == 2


def test_growth_of_too_few_records_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for records in ("999", "-5000", "many"):
        with pytest.raises(SystemExit) as caught:
            main(["growth", "--records", records])
        assert caught.value.code == 2
        assert "must be a whole number from 1000 on" in capsys.readouterr().err


SPEED = growth.Speed(events_per_s=20_000, p50_ms=10, p99_ms=20)
WINDOW = growth.Window(500_000, SPEED, SPEED, index_bytes_a_key=15.5, file_bytes=2**28)
OPENING = growth.Opening(opened_s=1, committed_s=2, replayed_s=3)


@pytest.mark.parametrize(
    ("ours", "bare", "results", "is_met"),
    [
        (SPEED, SPEED, ["met", "met", "met", "met"], True),
        (replace(SPEED, events_per_s=17_000), SPEED, ["NOT MET", "NOT MET", "met", "met"], False),
        (replace(SPEED, p99_ms=41), SPEED, ["met", "met", "NOT MET", "NOT MET"], False),
        # What slows both down is the machine.
        (growth.Speed(10_000, 20, 80), growth.Speed(10_000, 20, 60), ["met", "NOT MET", "met", "NOT MET"], True),
        # What should have been faster has become slower.
        (SPEED, growth.Speed(40_000, 5, 5), ["NOT MET", "met", "NOT MET", "met"], False),
    ],
)
def test_growth_fails_by_what_is_not_the_machines(
    ours: growth.Speed, bare: growth.Speed, results: list[str], is_met: bool
) -> None:
    last = replace(WINDOW, stored=5_000_000, ours=ours, bare=bare)
    report = growth.report_of([WINDOW, last], OPENING, judged=True)
    windows, findings = report.tables
    assert windows.rows[0] == ("500000", "20000", "10.00", "20.00", "20000", "10.00", "20.00", "15.5", "256")
    assert [row[-1] for row in findings.rows] == [*results, "met", "met", "met", "met"]
    assert report.is_met is is_met
    unjudged = growth.report_of([WINDOW, last], OPENING, judged=False)
    assert unjudged.is_met
    assert {row[-1] for row in unjudged.tables[1].rows} == {""}


def test_missed_time_or_memory_is_shown_and_fails_no_growth() -> None:
    large = replace(WINDOW, index_bytes_a_key=17)
    report = growth.report_of([large, large], growth.Opening(5, 6, 7), judged=True)
    assert [row[-1] for row in report.tables[1].rows[4:]] == ["NOT MET"] * 4
    assert report.is_met


# --- the server: its parts, without the peers --------------------------------------------------------


def test_the_parts_of_the_server_that_need_no_peer_run() -> None:
    """They check what they get themselves, as in a run that counts."""
    figures = Figures()
    sizes = replace(server.QUICK_SIZES, slice_s=0.15, idle=20, subscribers=25, stored=2000)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        for part in (server._idle, server._batches, server._catching_up):
            runner.run(part(sizes, figures))
    server._broadcasts(sizes, figures)
    assert (figures.idle, figures.writers, figures.subscribers) == (20, 4, 25)
    every = [*figures.crowd.values(), *figures.batches.values(), *figures.catching_up.values()]
    assert figures.broadcasts is not None
    assert figures.lone_broadcasts is not None
    for one in (*every, figures.broadcasts, figures.lone_broadcasts):
        assert len(one.slices) == 1
        assert one.best > 0
    assert figures.broadcasts.slices[0].events == sizes.subscribers * sizes.broadcasts


def test_the_client_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["client", "--quick", "--no-save"]) == 0
    shown = capsys.readouterr().out
    for name in ("the client, outbox on", "load generator, single events", "the client catches up", "share"):
        assert name in shown


def test_the_gateways_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gateways", "--quick", "--no-save", "--records", "1000"]) == 0
    shown = capsys.readouterr().out
    for name in ("by hand on PostgreSQL", "4 gateways", "one gateway", "events/s, 1000 / 100, normalised"):
        assert name in shown


def test_our_side_of_the_single_events_runs() -> None:
    async def main() -> tuple[Slice, Slice]:
        with directory() as place:
            async with server._ours(place, connections=2, in_flight=3) as ours:
                return await ours.half_load(0.2)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        full, half = runner.run(main())
    assert full.events == len(full.waited) >= 6
    assert half.events == len(half.waited) == round(full.per_s / 2 * 0.2)


def test_a_reader_that_comes_back_must_get_everything() -> None:
    def events(*numbers: int) -> list[dict[str, Any]]:
        return [{"committed_id": one, "event": EVENTS[0], "partitions": [ws_idle.WRITTEN]} for one in numbers]

    ws_idle.demand_all(events(5, 6, 7), since=4, written=3)
    ws_idle.demand_all([], since=4, written=0)
    for wrong in (events(5, 6), events(5, 7, 6), events(5, 5, 6), events(5, 6, 7, 8), events(4, 5, 6)):
        with pytest.raises(ValueError) as caught:
            ws_idle.demand_all(wrong, since=4, written=3)
        assert str(caught.value).startswith("of 3 events behind 4 a reader got ")
    for changed in ({"event": {"type": "another"}}, {"partitions": [ws_idle.NOBODYS]}):
        with pytest.raises(ValueError) as caught:
            ws_idle.demand_all([{**events(5)[0], **changed}], since=4, written=1)
        assert str(caught.value) == "a reader got other events than were written"


# --- the server: frames ------------------------------------------------------------------------------


LENGTHS = (0, 1, 125, 126, 127, 300, 65_535, 65_536, 70_000)
"""Around those where a header has another form."""


def served_frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """As a server sends it: without a mask."""
    length = len(payload)
    if length < 126:
        return bytes((opcode, length)) + payload
    if length < 65_536:
        return bytes((opcode, 126)) + length.to_bytes(2, "big") + payload
    return bytes((opcode, 127)) + length.to_bytes(8, "big") + payload


def pieces(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """As they might arrive: of one byte, of a few, of many."""
    at = 0
    while at < len(data):
        size = chance.choice((1, 2, 3, 10, 500, 20_000))
        yield data[at : at + size]
        at += size


class Written(asyncio.Transport):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))


def opened() -> tuple[Connection, Written, list[bytes], list[str]]:
    """A connection whose server has agreed, what it has sent, the texts it got, and why it was lost."""
    connection, transport = Connection(b"request"), Written()
    texts: list[bytes] = []
    lost: list[str] = []
    connection.connection_made(transport)
    connection.on_text = texts.append
    connection.on_lost = lambda error: lost.append(str(error))
    connection.data_received(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
    return connection, transport, texts, lost


@pytest.mark.parametrize("seed", range(5))
def test_a_connection_hands_over_every_text_however_it_arrives(seed: int) -> None:
    say(f"seed {seed}")
    chance = random.Random(seed)
    sent = [chance.randbytes(chance.choice(LENGTHS)) for _ in range(40)]
    connection, transport, texts, lost = opened()
    data = b""
    for number, payload in enumerate(sent):
        data += served_frame(payload) + (served_frame(b"%d" % number, PING) if number % 10 == 0 else b"")
    for piece in pieces(data, chance):
        connection.data_received(piece)
    assert texts == sent
    assert transport.sent == [frame(b"%d" % number, PONG) for number in range(0, 40, 10)]
    assert lost == []


def test_a_connection_takes_what_comes_with_the_handshake_and_tells_its_end() -> None:
    async def main() -> None:
        connection, transport, texts = Connection(b"request"), Written(), list[bytes]()
        connection.connection_made(transport)
        opening = asyncio.ensure_future(connection.opened())
        await asyncio.sleep(0)
        assert transport.sent == [b"request"]
        connection.on_text = texts.append
        for piece in (b"HTTP/1.1 101 Switching", b" Protocols\r\n\r", b"\n" + served_frame(b"first")):
            connection.data_received(piece)
        await opening
        assert texts == [b"first"]

        refused = Connection(b"request")
        refused.connection_made(transport)
        opening = asyncio.ensure_future(refused.opened())
        await asyncio.sleep(0)
        refused.data_received(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
        with pytest.raises(ConnectionError, match="did not agree to a WebSocket"):
            await opening

    asyncio.run(main())
    connection, _, texts, lost = opened()
    connection.data_received(served_frame(b"text") + served_frame(b"\x03\xe9", 0x88))
    assert texts == [b"text"]
    assert lost == ["frame 0x88 from the server: b'\\x03\\xe9'"]


@pytest.mark.parametrize("seed", range(5))
def test_a_subscriber_counts_every_text_however_it_arrives(seed: int) -> None:
    say(f"seed {seed}")
    chance = random.Random(seed)
    sent = [chance.randbytes(chance.choice([length for length in LENGTHS if length])) for _ in range(40)]
    data = b"".join(map(served_frame, sent))
    buffer = bytearray(30_000)  # smaller than the largest frame
    ours, theirs = socket.socketpair()
    with ours, theirs:
        keeping = Subscriber(ours, keeps=True)
        counted, arrived = 0, 0
        ends = [len(b"".join(map(served_frame, sent[:number]))) for number in range(1, len(sent) + 1)]
        for piece in pieces(data, chance):
            theirs.sendall(piece)
            counted += keeping.receive(buffer, memoryview(buffer))
            arrived += len(piece)
            assert counted == sum(end <= arrived for end in ends)
        assert list(keeping.texts()) == sent
        assert keeping.frames == len(sent)


def test_a_subscriber_answers_pings_and_does_not_go_on_after_the_end() -> None:
    buffer = bytearray(1000)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            subscriber = Subscriber(ours, keeps=False)
            theirs.sendall(served_frame(b"text") + served_frame(b"there?", PING))
            assert subscriber.receive(buffer, memoryview(buffer)) == 1
            assert theirs.recv(1000) == frame(b"there?", PONG)
            theirs.sendall(served_frame(b"\x03\xe9", 0x88))
            with pytest.raises(ConnectionError, match="frame 0x88 from the server"):
                subscriber.receive(buffer, memoryview(buffer))
        with pytest.raises(ConnectionError, match="the server closed"):
            Subscriber(ours, keeps=False).receive(buffer, memoryview(buffer))


@pytest.mark.parametrize("length", LENGTHS)
def test_frames_are_those_of_a_client_with_a_mask_of_zeros(length: int) -> None:
    payload = b"x" * length
    whole = frame(payload)
    assert (whole[0], whole[1] & 0x80) == (TEXT, 0x80)
    head = 2 if length < 126 else 4 if length < 65_536 else 10
    assert whole[head:] == bytes(4) + payload
    if head == 4:
        assert struct.unpack(">H", whole[2:4]) == (length,)
    if head == 10:
        assert struct.unpack(">Q", whole[2:10]) == (length,)


def test_a_submission_is_what_its_events_are() -> None:
    events = [WireEvent(str(UUID(int=number)), f"p{number}", b'{"type":"a","n":%d}' % number) for number in (1, 2)]
    spliced = submission(7, events)
    payload = {
        "events": [
            {"id": one.id, "partitions": [one.partition], "event": msgspec.json.decode(one.body)} for one in events
        ]
    }
    assert msgspec.json.decode(spliced[8:]) == msgspec.json.decode(message("submit_events", 7, payload)[8:])


def test_events_of_the_wire_are_new_ones_spread_over_the_partitions() -> None:
    made = [one for one, _ in zip(wire_events(), range(1000), strict=False)]
    assert {one.partition for one in made} == set(PARTITIONS)
    assert len({one.id for one in made}) == 1000
    assert next(wire_events(["alone"])).partition == "alone"
    assert UUID(next(uuids())).version == 4
    page = b'{"events":[{"committed_id":1},{"committed_id":2}],"next_since_committed_id":2,"sync_to_committed_id":9}'
    assert events_of(page) == 2


# --- the server: the report --------------------------------------------------------------------------


def series(*per_s: float, client_cpu: float = 0.5) -> Series:
    return Series([Slice(round(one), 1.0, [0.001, 0.002], client_cpu, 1.5) for one in per_s])


def seen(**changed: Any) -> Figures:
    """Figures that meet every target."""
    catching_up = {"one partition": series(160_000), "100 partitions, one after the other": series(50_000)}
    figures = Figures(
        connections=64,
        in_flight=16,
        way="a function",
        ways={"one statement": 900.0, "a function": 1000.0},
        single={
            "Oncelog": series(9000, 10_000),
            "NATS JetStream": series(3000, 2500),
            "by hand on PostgreSQL": series(900, 1000),
        },
        half_load=[(Slice(10_000, 1.0, [0.001] * 100, 0.5, 0.5), Slice(5000, 1.0, [0.001] * 100, 0.5, 0.5))],
        writers=16,
        idle=1000,
        crowd={"in a crowd": series(8700, 9600), "alone": series(10_000, 9200)},
        batches={
            "over the WebSocket": series(15_000),
            "in process": series(30_000),
            "in process, prepared beforehand": series(40_000),
        },
        subscribers=1000,
        window=100,
        broadcasts=series(150_000),
        lone_broadcasts=series(50_000),
        catching_up=catching_up,
    )
    return replace(figures, **changed)


def results_of(figures: Figures) -> dict[str, tuple[str, str]]:
    *_, findings = server_report.report_of(figures, judged=True).tables
    return {name: (value, result) for name, value, _, result in findings.rows}


def test_the_report_of_the_server() -> None:
    report = server_report.report_of(seen(), judged=True)
    assert report.is_met
    single, ways, crowd, batches, broadcasts, catching_up, _ = report.tables
    assert [row[0] for row in single.rows][-1] == "Oncelog, half load"
    assert single.rows[0] == ("Oncelog", "10000", "9500", "1.50", "2.00", "0.50", "1.50", "", "")
    assert single.rows[1][-2:] == ("3.33×", "3.50×")
    assert ways.rows == [("one statement", "900", ""), ("a function", "1000", "taken")]
    assert crowd.columns[0] == "single events, 16 writers"
    assert [(row[0], row[1], *row[-2:]) for row in crowd.rows] == [
        ("in a crowd", "9600", "", ""),
        ("alone", "10000", "0.96×", "0.96×"),
    ]
    assert len(batches.rows) == 3
    assert [row[0] for row in broadcasts.rows] == ["to 1000 subscribers", "to 1000 subscribers, one at a time"]
    assert len(catching_up.rows[0]) == len(catching_up.columns) == 7
    assert results_of(seen()) == {
        "single events, Oncelog / NATS JetStream": ("3.33×", "met"),
        "single events, Oncelog / by hand on PostgreSQL": ("10.00×", "met"),
        "p99 at half load, median of rounds": ("1.00 ms", "met"),
        "single events, with 1000 idle connections and a stuck reader / alone, median of rounds": ("0.96×", "met"),
        "single events, with 1000 idle connections and a stuck reader / alone": ("0.96×", ""),
        "batches, WebSocket / in process": ("0.50×", "met"),
        "batches, WebSocket / in process, prepared beforehand": ("0.38×", ""),
        "deliveries": ("150000 a second", "met"),
        "catching up, one partition": ("160000 events a second", "met"),
        "catching up, 100 partitions, one after the other": ("50000 events a second", ""),
    }
    assert "{" not in report.how_to_read
    assert "with 1000 connections that follow a partition nobody writes to" in report.how_to_read


SLOW = Slice(100, 1.0, [0.06] * 100, 0.5, 0.5)


@pytest.mark.parametrize(
    ("changed", "name", "is_met"),
    [
        # Round by round: the best rounds are of other minutes.
        (
            {"crowd": {"in a crowd": series(8900, 12_000), "alone": series(10_000, 13_400)}},
            "single events, with",
            False,
        ),
        ({"batches": {**seen().batches, "in process": series(31_000)}}, "batches, WebSocket / in process", False),
        ({"single": {**seen().single, "NATS JetStream": series(3400, 1)}}, "single events, Oncelog / NATS", False),
        # What depends on the machine is only shown.
        ({"half_load": [(SLOW, SLOW), (SLOW, SLOW)]}, "p99 at half load", True),
        ({"broadcasts": series(149_000)}, "deliveries", True),
        ({"catching_up": {"one partition": series(149_000)}}, "catching up, one partition", True),
    ],
)
def test_only_ratios_fail_a_run_of_the_server(changed: dict[str, Any], name: str, is_met: bool) -> None:
    figures = seen(**changed)
    (missed,) = [one for one, (_, result) in results_of(figures).items() if result == "NOT MET"]
    assert missed.startswith(name)
    assert server_report.report_of(figures, judged=True).is_met is is_met
    unjudged = server_report.report_of(figures, judged=False)
    assert unjudged.is_met
    assert {row[-1] for row in unjudged.tables[-1].rows} == {""}


def test_a_client_that_had_no_more_to_give_is_marked() -> None:
    figures = seen(crowd={"in a crowd": series(10_000, client_cpu=0.9), "alone": series(10_000, client_cpu=0.89)})
    cells = [row[5] for row in server_report.report_of(figures, judged=True).tables[2].rows]
    assert cells == ["0.90 (!)", "0.89"]


# --- the bare loop, and where files are --------------------------------------------------------------


def test_bare_loop_writes_the_rows_of_the_log_in_its_batches(tmp_path: Path) -> None:
    ours, bare = tmp_path / "ours.db", tmp_path / "bare.db"
    with open_blocking(ours) as log:
        for request in (range(3), range(3, 5)):
            log.submit_many([event(UUID(int=number), {"type": "a", "n": number}, ["p"]) for number in request])
    batches = batches_of(ours)
    assert [len(batch.records) for batch in batches] == [3, 2]
    assert [len(batch.records) for batch in batches_of(ours, 1, 4)] == [1, 1, 1, 1]
    with closing(BareFile(bare)) as file:
        assert len(file.insert_timed(batches)) == 2
    for columns in (
        "* FROM oncelog_records",
        "* FROM oncelog_partition_records",
        "first_position, count FROM oncelog_blocks",
    ):
        assert _rows(bare, columns) == _rows(ours, columns)
    assert _rows(bare, "position, height FROM oncelog_lanes") == _rows(ours, "position, height FROM oncelog_lanes")


def test_bare_loop_in_order_of_time_goes_on_where_it_was(tmp_path: Path) -> None:
    ours, bare = tmp_path / "ours.db", tmp_path / "bare.db"
    with open_blocking(ours) as log:
        log.submit_many([event(UUID(int=number), {"type": "a"}, ["p"]) for number in (2, 1, 3)])
    with closing(BareFile(bare)) as file:
        for _ in range(2):
            file.insert_timed(list(file.following(batches_of(ours))))
    assert _rows(bare, "place FROM oncelog_records ORDER BY key") == [(place,) for place in range(1, 7)]
    packed = [keys for (keys,) in _rows(bare, "keys FROM oncelog_key_runs") if isinstance(keys, bytes)]
    assert [[*map(list, keys_of(keys))] for keys in packed] == [[[1, 2, 3]] * 2, [[4, 5, 6]] * 2]
    assert _rows(bare, "height, first_position FROM oncelog_blocks") == [(1, 1), (2, 4)]


def _rows(path: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(path)) as connection:
        return connection.execute(f"SELECT {query}").fetchall()


def test_files_are_not_kept_in_memory_and_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    with directory() as place:
        (place / "a.db").touch()
        assert place.parent == place_for_files()
    assert not place.exists()
    monkeypatch.setattr("bench.disk.tempfile.gettempdir", lambda: "/memory")
    monkeypatch.setattr("bench.disk.file_system", lambda path: "ext4" if path == Path.cwd() else "tmpfs")
    assert place_for_files() == Path.cwd()
    monkeypatch.setattr("bench.disk.file_system", lambda _: "tmpfs")
    assert place_for_files() == Path("/memory")  # then the page says so


def test_file_system_of_a_path() -> None:
    assert file_system(Path("/proc/self")) == "proc"
    assert file_system(Path("/nowhere/at/all")) == file_system(Path("/"))

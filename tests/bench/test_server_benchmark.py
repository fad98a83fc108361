"""Parts of the server benchmark: WebSocket frames, events and the report."""

import asyncio
import random
import socket
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import msgspec
import pytest

from bench import server_report
from bench.server_report import Attribution, Figures, Series
from bench.wire import PARTITIONS, Slice, WireEvent, uuids, wire_events
from bench.ws_fan_out import Subscriber
from bench.ws_load import PING, PONG, TEXT, Connection, events_of, frame, message, submission
from crash.store_history import say
from oncelog.core.latency import LatencySummary
from oncelog.server.latency_report import LatencyWindow
from oncelog.storage.pauses import PauseFigures

# --- the server: frames ------------------------------------------------------------------------------


LENGTHS = (0, 1, 125, 126, 127, 300, 65_535, 65_536, 70_000)
"""Lengths around the boundaries at which the header format changes."""


def served_frame(payload: bytes, opcode: int = TEXT) -> bytes:
    """Return an unmasked frame, in the form in which servers send it."""
    length = len(payload)
    if length < 126:
        return bytes((opcode, length)) + payload
    if length < 65_536:
        return bytes((opcode, 126)) + length.to_bytes(2, "big") + payload
    return bytes((opcode, 127)) + length.to_bytes(8, "big") + payload


def split_randomly(data: bytes, chance: random.Random) -> Iterator[bytes]:
    """Split data into random chunks of one, a few or many bytes."""
    at = 0
    while at < len(data):
        size = chance.choice((1, 2, 3, 10, 500, 20_000))
        yield data[at : at + size]
        at += size


class RecordingTransport(asyncio.Transport):
    """Transport that records written bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))


def open_connection() -> tuple[Connection, RecordingTransport, list[bytes], list[str]]:
    """Return an open connection, its transport, the received texts, and the errors that closed it."""
    connection, transport = Connection(b"request"), RecordingTransport()
    texts: list[bytes] = []
    lost: list[str] = []
    connection.connection_made(transport)
    connection.on_text = texts.append
    connection.on_lost = lambda error: lost.append(str(error))
    connection.data_received(b"HTTP/1.1 101 Switching Protocols\r\n\r\n")
    return connection, transport, texts, lost


@pytest.mark.parametrize("seed", range(5))
def test_connection_delivers_every_text_regardless_of_chunks(seed: int) -> None:
    say(f"seed {seed}")
    chance = random.Random(seed)
    sent = [chance.randbytes(chance.choice(LENGTHS)) for _ in range(40)]
    connection, transport, texts, lost = open_connection()
    data = b""
    for number, payload in enumerate(sent):
        data += served_frame(payload) + (served_frame(b"%d" % number, PING) if number % 10 == 0 else b"")
    for piece in split_randomly(data, chance):
        connection.data_received(piece)
    assert texts == sent
    assert transport.sent == [frame(b"%d" % number, PONG) for number in range(0, 40, 10)]
    assert lost == []


async def test_connection_reads_frames_after_the_handshake_and_reports_its_end() -> None:
    connection, transport, texts = Connection(b"request"), RecordingTransport(), list[bytes]()
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
    with pytest.raises(ConnectionError, match="refused the WebSocket"):
        await opening
    connection, _, texts, lost = open_connection()
    connection.data_received(served_frame(b"text") + served_frame(b"\x03\xe9", 0x88))
    assert texts == [b"text"]
    assert lost == ["frame 0x88 from the server: b'\\x03\\xe9'"]


@pytest.mark.parametrize("seed", range(5))
def test_subscriber_counts_every_text_regardless_of_chunks(seed: int) -> None:
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
        for piece in split_randomly(data, chance):
            theirs.sendall(piece)
            counted += keeping.receive(buffer, memoryview(buffer))
            arrived += len(piece)
            assert counted == sum(end <= arrived for end in ends)
        assert list(keeping.texts()) == sent
        assert keeping.frames == len(sent)


def test_subscriber_answers_pings_and_stops_at_the_end() -> None:
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
def test_frames_have_a_mask_of_zeros(length: int) -> None:
    payload = b"x" * length
    whole = frame(payload)
    assert (whole[0], whole[1] & 0x80) == (TEXT, 0x80)
    head = 2 if length < 126 else 4 if length < 65_536 else 10
    assert whole[head:] == bytes(4) + payload
    if head == 4:
        assert struct.unpack(">H", whole[2:4]) == (length,)
    if head == 10:
        assert struct.unpack(">Q", whole[2:10]) == (length,)


def test_spliced_submission_equals_the_encoded_message() -> None:
    events = [WireEvent(str(UUID(int=number)), f"p{number}", b'{"type":"a","n":%d}' % number) for number in (1, 2)]
    spliced = submission(7, events)
    payload = {
        "events": [
            {"id": one.id, "partitions": [one.partition], "event": msgspec.json.decode(one.body)} for one in events
        ]
    }
    assert msgspec.json.decode(spliced[8:]) == msgspec.json.decode(message("submit_events", 7, payload)[8:])


def test_wire_events_are_unique_and_spread_over_the_partitions() -> None:
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


def latency_window() -> LatencyWindow:
    slowest = {"prepare": 0.0, "commit": 0.75, "gc": 0.25, "merge": 0.0}
    everything = {"prepare": 0.8, "commit": 0.2, "gc": 0.0, "merge": 0.0}
    return LatencyWindow(
        seconds=1.0,
        slowest=LatencySummary(10, above_ms=7.0, mean_ms=8.0, shares=slowest, before_own_commit=0.5),
        all=LatencySummary(1000, above_ms=0.1, mean_ms=2.0, shares=everything, before_own_commit=0.1),
        pauses={"gc": PauseFigures(3, total_ms=6.0, longest_ms=2.5)},
    )


def seen(**changed: Any) -> Figures:
    """Figures that meet every target."""
    catching_up = {"one partition": series(160_000), "100 partitions, one after another": series(50_000)}
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
        attribution=Attribution(Slice(5000, 1.0, [0.002] * 100, 0.5, 0.6), latency_window()),
        writers=16,
        idle=1000,
        crowd={"with idle connections": series(8700, 9600), "alone": series(10_000, 9200)},
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


def test_report_of_the_server_benchmark_lists_figures_and_targets() -> None:
    report = server_report.report_of(seen(), judged=True)
    assert report.is_met
    single, attribution, ways, crowd, batches, broadcasts, catching_up, _ = report.tables
    assert [row[0] for row in single.rows][-2:] == ["Oncelog, half load", "Oncelog, half load, with latency report"]
    assert attribution.rows == [
        ("COMMIT with its sync", "75.0 %", "20.0 %"),
        ("garbage collection", "25.0 %", "0.0 %"),
        ("prepare: plan and save", "0.0 %", "80.0 %"),
        ("mean latency in the server, ms", "8.00", "2.00"),
        ("of that, before the own commit", "50.0 %", "10.0 %"),
        ("writes", "10", "1000"),
        ("pauses: garbage collection", "3 times, longest 2.5 ms", "6 ms"),
    ]
    assert single.rows[0] == ("Oncelog", "10000", "9500", "1.50", "2.00", "0.50", "1.50", "", "")
    assert single.rows[1][-2:] == ("3.33×", "3.50×")
    assert ways.rows == [("one statement", "900", ""), ("a function", "1000", "chosen")]
    assert crowd.columns[0] == "single events, 16 writers"
    assert [(row[0], row[1], *row[-2:]) for row in crowd.rows] == [
        ("with idle connections", "9600", "", ""),
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
        "deliveries": ("150000 per second", "met"),
        "catching up, one partition": ("160000 events per second", "met"),
        "catching up, 100 partitions, one after another": ("50000 events per second", ""),
    }
    assert "{" not in report.how_to_read
    assert "with 1000 connections that follow a partition without writes" in report.how_to_read


SLOW = Slice(100, 1.0, [0.06] * 100, 0.5, 0.5)


@pytest.mark.parametrize(
    ("changed", "name", "is_met"),
    [
        # The report compares each round separately.
        (
            {"crowd": {"with idle connections": series(8900, 12_000), "alone": series(10_000, 13_400)}},
            "single events, with",
            False,
        ),
        ({"batches": {**seen().batches, "in process": series(31_000)}}, "batches, WebSocket / in process", False),
        ({"single": {**seen().single, "NATS JetStream": series(3400, 1)}}, "single events, Oncelog / NATS", False),
        # Results that depend on the machine have no target.
        ({"half_load": [(SLOW, SLOW), (SLOW, SLOW)]}, "p99 at half load", True),
        ({"broadcasts": series(149_000)}, "deliveries", True),
        ({"catching_up": {"one partition": series(149_000)}}, "catching up, one partition", True),
    ],
)
def test_only_missed_ratios_fail_a_server_run(changed: dict[str, Any], name: str, is_met: bool) -> None:
    figures = seen(**changed)
    (missed,) = [one for one, (_, result) in results_of(figures).items() if result == "NOT MET"]
    assert missed.startswith(name)
    assert server_report.report_of(figures, judged=True).is_met is is_met
    unjudged = server_report.report_of(figures, judged=False)
    assert unjudged.is_met
    assert {row[-1] for row in unjudged.tables[-1].rows} == {""}


def test_saturated_load_generator_is_marked() -> None:
    figures = seen(
        crowd={
            "with idle connections": series(10_000, client_cpu=0.9),
            "alone": series(10_000, client_cpu=0.89),
        }
    )
    cells = [row[5] for row in server_report.report_of(figures, judged=True).tables[3].rows]
    assert cells == ["0.90 (!)", "0.89"]

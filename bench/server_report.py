"""Report of the server benchmark."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

from bench.growth import Speed, speed_of
from bench.report import Finding, Report, Table, findings_table
from bench.wire import Slice
from oncelog.server.latency_report import LatencyWindow

CROWDED: Final = "with idle connections"
CLIENT_LIMIT: Final = 0.9
"""CPU share above which the single-threaded client limits the figure."""

CAUSES: Final = {
    "decode": "decode, authorize, canonicalize",
    "gather": "wait for further writes",
    "prepare": "prepare: plan and save",
    "commit": "COMMIT with its sync",
    "settle": "settle: pass on the verdicts",
    "answer": "write the answers",
    "event_loop": "busy event loop",
    "gc": "garbage collection",
    "merge": "merges of the key index",
    "checkpoint": "COMMIT during a checkpoint",
    "other": "not measured",
}
"""What each cause of the latency report is."""
PAUSES: Final = {**CAUSES, "checkpoint": "checkpoints"}
"""The same for pauses. A checkpoint pauses nothing while no COMMIT runs."""
HOW_TO_READ: Final = """\
The servers and their client, one process with one thread, share this machine. All contenders of a table run one after
the other in every round, each for a slice of time. All store their files on the same disk, and acknowledge a write only
when it is synced. `per second` is the best round and `median` the median round. `ratio` is the best round of Oncelog
divided by that of the other contender, and `median ratio` is the median of that ratio over the rounds. If the two
differ much, the machine was busy and the run should be repeated. p50 and p99 are the latencies of the requests of all
rounds. CPU is the average number of busy processors. A client marked with (!) was saturated, so its server could do
more.

Single events: a request is one event of about 300 bytes with a random UUID. Oncelog and NATS have {in_flight} requests
in flight on each of {connections} connections. PostgreSQL has {connections} callers with a connection each, over a
local socket: a connection has one transaction at a time. The benchmark chooses the fastest of three hand-written forms;
the table also shows them with a small pool of connections. The other two do less work than Oncelog. NATS detects a
duplicate by its id for two minutes, and does not compare its content. The tables on PostgreSQL detect it by its id
without a time limit, and have no index by partition, no proofs and no notification of readers.
`half load` runs after the others have stopped. In every round the server gets half of the rate that it has just
reached, on a fixed schedule. The latency of an event starts at its scheduled moment.
`where the time goes at half load` is the latency report of a further server with the same load. A latency starts when
the server begins to decode the event, so it excludes the time in the socket. While an event waits for earlier commits,
it waits for their phases. The rows of pauses count all pauses, including pauses that delayed no event. They show the
number, the longest and the total.

Idle connections: {writers} connections with {in_flight} single events in flight each, all in one partition, on one
server. In every round they run alone first, then with {idle} connections that follow a partition without writes, and
with one reader of the written partition that has stopped reading. Then all except the writers disconnect. The server
must close that reader as a slow one (the writers continue until it does, outside of the measured time), and a new
connection must get everything after the reader's cursor. The speed of the machine changes more from minute to minute
than this effect, so the two are compared round by round.

Batches: requests of 100 events. All contenders have the same number of callers, and each caller waits for its answer.
`in process` builds each submission from a dict (`oncelog.event`), as the server builds it from JSON. `prepared
beforehand` builds the submissions before the measurement.

Broadcasts: each request has one event, which goes to every subscriber. At most {window} events are in flight. The
client polls every 10 ms. A delivery counts when the last byte of its frame has arrived. The benchmark counts the frames
of all subscribers, and afterwards decodes those of every twentieth: they must be the committed events, in order. `one
at a time` submits the next event when all subscribers have the previous one, and polls without a pause; p50 and p99 are
the time until all have it.

Catching up: pages of 1000 from the beginning, each requested after the previous one has arrived, from a file that the
operating system has in memory. p50 and p99 are the latencies of pages.

A missed ratio fails a run. Figures that depend on the machine are only shown."""


@dataclass(frozen=True)
class Series:
    """The slices of one contender."""

    slices: Sequence[Slice]

    @property
    def best(self) -> float:
        return max(one.per_s for one in self.slices)

    @property
    def median(self) -> float:
        return median(one.per_s for one in self.slices)

    @property
    def speed(self) -> Speed:
        return speed_of(self.best, [seconds for one in self.slices for seconds in one.waited])

    def ratios(self, other: "Series") -> tuple[float, float]:
        """Return the ratio of the best rounds and the median ratio to another contender."""
        rounds = [mine.per_s / theirs.per_s for mine, theirs in zip(self.slices, other.slices, strict=True)]
        return self.best / other.best, median(rounds)


@dataclass(frozen=True)
class Attribution:
    """Half load on a server that writes a latency report."""

    measured: Slice
    window: LatencyWindow


@dataclass
class Figures:
    """All measured figures."""

    connections: int = 0
    in_flight: int = 0
    way: str = ""
    """The chosen PostgreSQL form. `ways` has the events per second of each form."""
    ways: dict[str, float] = field(default_factory=dict)
    single: dict[str, Series] = field(default_factory=dict)
    half_load: list[tuple[Slice, Slice]] = field(default_factory=list)
    """Full load and half load, round by round."""
    attribution: Attribution | None = None
    writers: int = 0
    idle: int = 0
    crowd: dict[str, Series] = field(default_factory=dict)
    """Single events with idle connections, and alone."""
    batches: dict[str, Series] = field(default_factory=dict)
    subscribers: int = 0
    window: int = 0
    broadcasts: Series | None = None
    lone_broadcasts: Series | None = None
    catching_up: dict[str, Series] = field(default_factory=dict)


def report_of(figures: Figures, *, judged: bool) -> Report:
    """Return one table for each part, and the table of targets."""
    assert figures.broadcasts is not None
    assert figures.lone_broadcasts is not None
    assert figures.attribution is not None
    findings = list(_findings(figures))
    others = {
        f"to {figures.subscribers} subscribers": figures.broadcasts,
        f"to {figures.subscribers} subscribers, one at a time": figures.lone_broadcasts,
    }
    tables = (
        table(
            "single events",
            {
                **figures.single,
                "Oncelog, half load": Series([half for _, half in figures.half_load]),
                "Oncelog, half load, with latency report": Series([figures.attribution.measured]),
            },
        ),
        attribution_table(figures.attribution.window),
        Table(
            ("by hand on PostgreSQL", "events per second, one slice", ""),
            [(way, f"{per_s:.0f}", "chosen" if way == figures.way else "") for way, per_s in figures.ways.items()],
        ),
        table(f"single events, {figures.writers} writers", figures.crowd),
        table("batches of 100", figures.batches),
        table("broadcasts (deliveries)", others, compared=False),
        table("catching up", figures.catching_up, compared=False),
        findings_table(findings, judged=judged),
    )
    is_met = not judged or all(one.is_met for one in findings if one.fails_run)
    how_to_read = HOW_TO_READ.format(
        connections=figures.connections,
        in_flight=figures.in_flight,
        writers=figures.writers,
        idle=figures.idle,
        window=figures.window,
    )
    return Report(tables, how_to_read, is_met)


def _findings(figures: Figures) -> Iterator[Finding]:
    assert figures.broadcasts is not None
    ours = figures.single["Oncelog"]
    for name, target in (("NATS JetStream", 3), ("by hand on PostgreSQL", 10)):
        ratio, _ = ours.ratios(figures.single[name])
        yield Finding(f"single events, Oncelog / {name}", ratio, "×", f"≥ {target}×", ratio >= target, fails_run=True)
    p99_ms = median(Series([half]).speed.p99_ms for _, half in figures.half_load)
    yield Finding("p99 at half load, median of rounds", p99_ms, " ms", "< 50 ms", p99_ms < 50)
    best, middle = figures.crowd[CROWDED].ratios(figures.crowd["alone"])
    name = f"single events, with {figures.idle} idle connections and a stuck reader / alone"
    yield Finding(f"{name}, median of rounds", middle, "×", "≥ 0.9×", middle >= 0.9, fails_run=True)
    yield Finding(name, best, "×", "", True)
    over_the_wire = figures.batches["over the WebSocket"]
    for name, at_least in (("in process", 0.5), ("in process, prepared beforehand", None)):
        ratio, _ = over_the_wire.ratios(figures.batches[name])
        target_text = "" if at_least is None else f"≥ {at_least}×"
        is_met = at_least is None or ratio >= at_least
        yield Finding(f"batches, WebSocket / {name}", ratio, "×", target_text, is_met, fails_run=True)
    deliveries = figures.broadcasts.best
    yield Finding("deliveries", deliveries, " per second", "≥ 150000", deliveries >= 150_000)
    for name, series in figures.catching_up.items():
        is_judged = name.startswith("one partition")
        yield Finding(
            f"catching up, {name}",
            series.best,
            " events per second",
            "≥ 150000" if is_judged else "",
            series.best >= 150_000 or not is_judged,
        )


def table(name: str, series: dict[str, Series], *, compared: bool = True) -> Table:
    """Return a table that compares the first contender with the others."""
    first, *_ = series.values()
    columns = (name, "per second", "median", "p50 ms", "p99 ms", "client CPU", "server CPU")
    if not compared:
        return Table(columns, [_cells(one, its) for one, its in series.items()])
    rows = []
    for one, its in series.items():
        rows.append(
            (*_cells(one, its), *(("", "") if one.startswith("Oncelog") or its is first else _times(first.ratios(its))))
        )
    return Table((*columns, "ratio", "median ratio"), rows)


def attribution_table(window: LatencyWindow) -> Table:
    """Return where the slowest 1 % of the writes spent their time, and all writes."""
    slowest, everything = window.slowest, window.all
    shares = sorted(slowest.shares.items(), key=lambda item: item[1], reverse=True)
    rows = [
        (CAUSES[name], f"{100 * share:.1f} %", f"{100 * everything.shares[name]:.1f} %")
        for name, share in shares
        if share or everything.shares[name]
    ]
    rows += [
        ("mean latency in the server, ms", f"{slowest.mean_ms:.2f}", f"{everything.mean_ms:.2f}"),
        (
            "of that, before the own commit",
            f"{100 * slowest.before_own_commit:.1f} %",
            f"{100 * everything.before_own_commit:.1f} %",
        ),
        ("writes", str(slowest.requests), str(everything.requests)),
    ]
    rows += [
        (f"pauses: {PAUSES[name]}", f"{one.count} times, longest {one.longest_ms:.1f} ms", f"{one.total_ms:.0f} ms")
        for name, one in window.pauses.items()
    ]
    return Table(("where the time goes at half load", "slowest 1 %", "all writes"), rows)


def _cells(name: str, series: Series) -> tuple[str, ...]:
    speed = series.speed
    client_cpu = fmean(one.client_cpu for one in series.slices)
    return (
        name,
        f"{series.best:.0f}",
        f"{series.median:.0f}",
        f"{speed.p50_ms:.2f}",
        f"{speed.p99_ms:.2f}",
        f"{client_cpu:.2f}{' (!)' if client_cpu >= CLIENT_LIMIT else ''}",
        f"{fmean(one.server_cpu for one in series.slices):.2f}",
    )


def _times(ratios: tuple[float, float]) -> tuple[str, str]:
    ratio, middle = ratios
    return f"{ratio:.2f}×", f"{middle:.2f}×"

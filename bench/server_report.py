"""What the benchmark of the server has seen, as tables."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Final

from bench.growth import Speed, speed_of
from bench.report import Finding, Report, Table, findings_table
from bench.wire import Slice

CLIENT_LIMIT: Final = 0.9
"""Of one processor: a client in one thread that takes more is what limits the figure."""

HOW_TO_READ: Final = """\
Servers and their client, one process with one thread, share this machine. All contenders of a table have a slice of
time in every round, one right after the other; all keep their files on the same disk, and acknowledge a write only
when it is synced to it. `a second` is the best round, `median` the median of the rounds. `ratio` is Oncelog's best
round divided by the other's, the median beside it that of the same ratio round by round: where the two are far apart,
the machine was busy and the run is worth repeating. p50 and p99 are how long requests of all rounds waited. CPU is how
many processors were busy on average; a client marked with (!) had no more to give, so that its server could do more.

Single events: a request is one event of about 300 bytes with a random UUID. Oncelog and NATS have {in_flight} requests
in flight on each of {connections} connections. PostgreSQL has {connections} callers with a connection each, over a
local socket: a connection has one transaction at a time. Of the ways to write it by hand the fastest is taken; what a
small pool of connections makes of them stands beside it. What the others do not do: NATS finds a duplicate by its id
alone, for two minutes, and does not look whether its content is another; the tables on PostgreSQL find it for ever, by
its id alone, and have no index to read a partition by, no proof and nobody who listens.
`half load` is measured after the others have been stopped: in every round half as many events a second as the server
could take right before, at times set beforehand. What an event waits is counted from the time when it was due.

In a crowd: {writers} connections with {in_flight} single events in flight each, all in one partition, on one server.
In every round first alone, then with {idle} connections that follow a partition nobody writes to, and a reader of the
written one that has stopped reading. Then all but the writers leave. The reader must be closed as a slow one (more is
written until it is, outside the time that counts), and a new connection must get everything behind its cursor. What
is to be seen is small beside what the machine's speed changes by from minute to minute: so the two are compared round
by round.

Batches: requests of 100 events by as many callers, each of which waits for its answer. `in process` makes each
submission of a dict (`oncelog.event`), as the server makes it of JSON; beside it the same with submissions that were
prepared before the time began.

Broadcasts: events are submitted one a request and go to every subscriber, at most {window} at once under way; the
client looks every 10 ms what has come. A delivery counts when the last byte of its frame has arrived. All subscribers
are counted, and of every twentieth everything is read afterwards: the right events, in order. `one at a time` submits
the next event when all have the one before, and does not pause; p50 and p99 are how long it took until all had it.

Catching up: pages of 1000 from zero on, the next asked for when the one before is there, from a file that the
operating system has in memory; p50 and p99 are of pages.

Ratios fail a run. What depends on the machine is only shown."""


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
        """How many times faster this is than the other: of the best rounds, and the median round by round."""
        rounds = [mine.per_s / theirs.per_s for mine, theirs in zip(self.slices, other.slices, strict=True)]
        return self.best / other.best, median(rounds)


@dataclass
class Figures:
    """Everything that was seen."""

    connections: int = 0
    in_flight: int = 0
    way: str = ""
    """To write it on PostgreSQL: the one that was taken, and how many events a second each did."""
    ways: dict[str, float] = field(default_factory=dict)
    single: dict[str, Series] = field(default_factory=dict)
    half_load: list[tuple[Slice, Slice]] = field(default_factory=list)
    """All that it could do, and half of that, round by round."""
    writers: int = 0
    idle: int = 0
    crowd: dict[str, Series] = field(default_factory=dict)
    """Single events in a crowd, and alone."""
    batches: dict[str, Series] = field(default_factory=dict)
    subscribers: int = 0
    window: int = 0
    broadcasts: Series | None = None
    lone_broadcasts: Series | None = None
    catching_up: dict[str, Series] = field(default_factory=dict)


def report_of(figures: Figures, *, judged: bool) -> Report:
    """Tables by part, and what was aimed at."""
    assert figures.broadcasts is not None
    assert figures.lone_broadcasts is not None
    findings = list(_findings(figures))
    others = {
        f"to {figures.subscribers} subscribers": figures.broadcasts,
        f"to {figures.subscribers} subscribers, one at a time": figures.lone_broadcasts,
    }
    tables = (
        table(
            "single events", {**figures.single, "Oncelog, half load": Series([half for _, half in figures.half_load])}
        ),
        Table(
            ("by hand on PostgreSQL", "events a second, one slice", ""),
            [(way, f"{per_s:.0f}", "taken" if way == figures.way else "") for way, per_s in figures.ways.items()],
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
    best, middle = figures.crowd["in a crowd"].ratios(figures.crowd["alone"])
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
    yield Finding("deliveries", deliveries, " a second", "≥ 150000", deliveries >= 150_000)
    for name, series in figures.catching_up.items():
        is_judged = name.startswith("one partition")
        yield Finding(
            f"catching up, {name}",
            series.best,
            " events a second",
            "≥ 150000" if is_judged else "",
            series.best >= 150_000 or not is_judged,
        )


def table(name: str, series: dict[str, Series], *, compared: bool = True) -> Table:
    """The first contender is what the others are compared with."""
    first, *_ = series.values()
    columns = (name, "a second", "median", "p50 ms", "p99 ms", "client CPU", "server CPU")
    if not compared:
        return Table(columns, [_cells(one, its) for one, its in series.items()])
    rows = []
    for one, its in series.items():
        rows.append(
            (*_cells(one, its), *(("", "") if one.startswith("Oncelog") or its is first else _times(first.ratios(its))))
        )
    return Table((*columns, "ratio", "median ratio"), rows)


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

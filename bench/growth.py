"""A growing log: does a commit cost more when millions of random keys are stored?

Windows of one growing log cannot alternate. Therefore, an append-only loop (bare.py) runs in slices between the slices
of each window. Its cost does not depend on the stored records, so a slower loop means that the machine has become
slower.
"""

import asyncio
import random
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import quantiles
from typing import Final

import oncelog
from bench.bare import BareFile, Batch, batches_of
from bench.disk import directory
from bench.measure import Effort
from bench.memory import compute_deep_size
from bench.report import Finding, Report, Table, findings_table
from bench.writers import FILL_ITEMS, SUBMITTERS, fill, prepared, submit_all, submit_all_timed
from oncelog import Log, Replayed, Submission
from oncelog.storage.sqlite import SqliteStore

RECORDS_MIN: Final = 1000
PARTS: Final = (0.1, 0.2, 0.4, 1.0)
"""Fractions of the full size at which the windows begin."""
WINDOW_EVENTS: Final = 100_000
SLICES: Final = 10
PROGRESS_RECORDS: Final = 500_000

COLUMNS: Final = (
    "stored",
    "events/s",
    "p50 ms",
    "p99 ms",
    "bare events/s",
    "bare p50 ms",
    "bare p99 ms",
    "index bytes per key",
    "file MiB",
)
HOW_TO_READ: Final = f"""\
A row is a window of commits that begins when the log has this number of events. {SUBMITTERS} tasks submit events of
about 300 bytes with random UUIDs, prepared beforehand, and each waits for its answer; p50 and p99 are the latencies.
Between the windows the log is filled in requests of {FILL_ITEMS}.
`bare` is a loop that inserts the same number of rows, with ascending keys, into the same tables of a separate file, in
transactions of {SUBMITTERS} rows, in slices between those of the log. Its p50 and p99 are the durations of its
transactions. Its work is the same in every row, so `normalised` divides the change of the log by the change of `bare`,
which removes the influence of the machine.
Ratios compare the last row with the first. A missed normalised ratio fails a run; other figures are only shown."""


@dataclass(frozen=True)
class Speed:
    """Speed of one contender in one window."""

    events_per_s: float
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Window:
    """Figures of one window."""

    stored: int
    ours: Speed
    bare: Speed
    index_bytes_a_key: float
    file_bytes: int


@dataclass(frozen=True)
class Opening:
    """Times in seconds since the log began to open."""

    opened_s: float
    committed_s: float
    replayed_s: float


def run(effort: Effort) -> Report:
    """Grow a log to the size of the effort."""
    with directory() as place:
        windows, opening = asyncio.run(_Growth(place, effort.records).run())
    return report_of(windows, opening, judged=not effort.is_quick)


class _Growth:
    """One log, and the bare file."""

    def __init__(self, place: Path, records: int) -> None:
        self._path = place / "growing.db"
        self._bare_path = place / "bare.db"
        self._records = records
        self._chance = random.Random(1)
        self._slice_events = max(1, min(WINDOW_EVENTS, records // 10) // SLICES)
        self._stored = 0
        self._oldest: Submission | None = None
        self._pattern: list[Batch] = []

    async def run(self) -> tuple[list[Window], Opening]:
        windows = []
        store = SqliteStore(self._path)
        with closing(BareFile(self._bare_path)) as bare:
            async with Log(store) as log:
                for part in PARTS:
                    await self._fill(log, round(self._records * part))
                    windows.append(await self._window(log, store, bare))
        return windows, await self._opening()

    async def _fill(self, log: Log, upto: int) -> None:
        while self._stored < upto:
            if self._stored % PROGRESS_RECORDS == 0:
                _print_progress(f"{self._stored} stored …")
            # Grow in whole requests, so that progress lines show round numbers.
            step = min(10 * FILL_ITEMS - self._stored % (10 * FILL_ITEMS), upto - self._stored)
            submissions = prepared(step, self._chance)
            await fill(log, submissions)
            self._oldest = self._oldest or submissions[0]
            self._stored += step
        if not self._pattern:
            size = min(SUBMITTERS, self._slice_events)
            self._pattern = batches_of(self._path, size, self._slice_events // size * size)

    async def _window(self, log: Log, store: SqliteStore, bare: BareFile) -> Window:
        stored = self._stored
        _print_progress(f"commits with {stored} stored …")
        ours_s = bare_s = 0.0
        waited: list[float] = []
        transactions: list[float] = []
        for _ in range(SLICES):
            submissions = prepared(self._slice_events, self._chance)
            began = time.perf_counter()
            waited += await submit_all_timed(log, submissions)
            ours_s += time.perf_counter() - began
            times = bare.insert_timed(list(bare.following(self._pattern)))
            transactions += times
            bare_s += sum(times)
        self._stored += len(waited)
        bare_events = SLICES * sum(len(batch.records) for batch in self._pattern)
        index = store._file_writer.index  # noqa: SLF001
        keys = index.memtable_keys + index.segment_keys
        return Window(
            stored,
            speed_of(len(waited) / ours_s, waited),
            speed_of(bare_events / bare_s, transactions),
            compute_deep_size(index) / keys,
            self._path.stat().st_size,
        )

    async def _opening(self) -> Opening:
        """Measure the time to open the closed file, to commit a new event, and to answer a retry of the oldest."""
        assert self._oldest is not None
        _print_progress(f"opening with {self._stored} stored …")
        [new] = prepared(1, self._chance)
        began = time.perf_counter()
        async with oncelog.open(self._path) as log:
            opened = time.perf_counter()
            await submit_all(log, [new])
            committed = time.perf_counter()
            answer = await log.submit(self._oldest)
            replayed = time.perf_counter()
        if not isinstance(answer, Replayed) or answer.receipt is None or answer.receipt.position != 1:
            raise ValueError(f"a retry of the first event was answered with {answer}")
        return Opening(opened - began, committed - began, replayed - began)


def report_of(windows: Sequence[Window], opening: Opening, *, judged: bool) -> Report:
    """Return the windows and the table of targets."""
    findings = list(_findings(windows, opening))
    is_met = not judged or all(one.is_met for one in findings if one.fails_run)
    tables = Table(COLUMNS, [_cells(window) for window in windows]), findings_table(findings, judged=judged)
    return Report(tables, HOW_TO_READ, is_met)


def _findings(windows: Sequence[Window], opening: Opening) -> list[Finding]:
    first, last = windows[0], windows[-1]
    between = f"{last.stored} / {first.stored}"

    def change(figure: Callable[[Speed], float]) -> tuple[float, float]:
        ours, bare = (figure(last.ours) / figure(first.ours), figure(last.bare) / figure(first.bare))
        return ours, ours / bare

    rate, rate_normalised = change(lambda speed: speed.events_per_s)
    p99, p99_normalised = change(lambda speed: speed.p99_ms)
    return [
        Finding(f"events/s, {between}, normalised", rate_normalised, "×", "≥ 0.9×", rate_normalised >= 0.9, True),
        Finding(f"events/s, {between}, raw", rate, "×", "≥ 0.9×", rate >= 0.9),
        Finding(f"p99, {between}, normalised", p99_normalised, "×", "≤ 2×", p99_normalised <= 2, True),
        Finding(f"p99, {between}, raw", p99, "×", "≤ 2×", p99 <= 2),
        Finding(
            "index in memory, bytes per key",
            last.index_bytes_a_key,
            " bytes",
            "≤ 16 bytes",
            last.index_bytes_a_key <= 16,
        ),
        Finding("open the file", opening.opened_s, " s", "< 5 s", opening.opened_s < 5),
        Finding("… and a commit", opening.committed_s, " s", "< 5 s", opening.committed_s < 5),
        Finding("… and a retry of the oldest", opening.replayed_s, " s", "< 5 s", opening.replayed_s < 5),
    ]


def _cells(window: Window) -> tuple[str, ...]:
    ours, bare = window.ours, window.bare
    return (
        f"{window.stored}",
        f"{ours.events_per_s:.0f}",
        f"{ours.p50_ms:.2f}",
        f"{ours.p99_ms:.2f}",
        f"{bare.events_per_s:.0f}",
        f"{bare.p50_ms:.2f}",
        f"{bare.p99_ms:.2f}",
        f"{window.index_bytes_a_key:.1f}",
        f"{window.file_bytes / 2**20:.0f}",
    )


def speed_of(events_per_s: float, seconds: Sequence[float]) -> Speed:
    """Return a rate with the median and the 99th percentile of the latencies."""
    hundredths = quantiles(seconds, n=100, method="inclusive")
    return Speed(events_per_s, hundredths[49] * 1000, hundredths[98] * 1000)


def _print_progress(what: str) -> None:
    print(f"growth: {what}", file=sys.stderr, flush=True)

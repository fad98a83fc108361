"""The latency report: where the slowest 1 % of the writes spend their time, compared with all writes.

With the setting `latency_report`, the server measures every write that a group commit answers, and every minute writes
a JSON file. Without the setting it measures nothing. The memory that the measurement needs does not depend on the load.

The report replaces only a missing file or an earlier report, never another file that the setting names by mistake. An
earlier report remains until the server has measured a write.

The event loop may prepare the next commit before it writes the answers of the previous one. The recorder therefore
attributes a commit when the next one has ended, or before it writes the report.
"""

import asyncio
import gc
import os
import stat
import time
from collections import deque
from collections.abc import Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from oncelog.core.latency import (
    Cause,
    LatencySummary,
    LatencyTable,
    PhaseTimes,
    RequestTimes,
    Span,
    build_spans,
    split_latency,
)
from oncelog.engine.batch_report import BatchReport
from oncelog.errors import SettingsError
from oncelog.file_modes import OWNER_ONLY, describe_read_error, open_new
from oncelog.server import logger
from oncelog.storage.pauses import PauseFigures, PauseLog

SLOWEST_FRACTION: Final = 0.01
REPORT_BYTES_MAX: Final = 1024 * 1024
"""A larger file is not a report. A report has a few kilobytes."""
INTERVAL_S: Final = 60.0
"""Interval at which the server writes the report."""
TICK_S: Final = 0.005
"""Interval of the timer that detects a busy event loop."""
LATE_S_MIN: Final = 0.001
"""A timer that is later than this shows that the event loop was busy. Timers are exact to a millisecond."""
SAMPLES_MAX: Final = 32
"""How many requests of a commit are split. Requests that arrived one after the other have similar latencies, so one of
several stands for all of them. Splitting every request of large commits would take a tenth of the processor's time."""
SPANS_MAX: Final = 4096
"""How many phases of earlier commits are kept, about 700 commits."""


class LatencyWindow(Struct, frozen=True):
    """The figures of a period."""

    seconds: float
    slowest: LatencySummary
    """The slowest 1 % of the writes."""
    all: LatencySummary
    pauses: dict[str, PauseFigures]
    """All pauses by cause, including pauses that delayed no write."""


class LatencyReport(Struct, frozen=True, omit_defaults=True):
    """Content of the file."""

    since_start: LatencyWindow
    last_minute: LatencyWindow | None = None
    """The last complete minute. Missing in the first one."""


class _Period:
    """Collects the figures of a period."""

    def __init__(self) -> None:
        self.began_s = time.perf_counter()
        self.table = LatencyTable()
        self.pauses: dict[Cause, PauseFigures] = {}

    def add_pauses(self, figures: Mapping[Cause, PauseFigures]) -> None:
        for cause, found in figures.items():
            self.pauses.setdefault(cause, PauseFigures()).add(found)

    def summarize(self) -> LatencyWindow:
        return LatencyWindow(
            seconds=round(time.perf_counter() - self.began_s, 1),
            slowest=self.table.summarize(SLOWEST_FRACTION),
            all=self.table.summarize(),
            pauses={cause.name.lower(): one.rounded() for cause, one in sorted(self.pauses.items())},
        )


class _Commit:
    """A commit whose requests are not attributed yet."""

    __slots__ = ("answered_s", "phases", "requests")

    def __init__(self, phases: PhaseTimes, requests: Sequence[RequestTimes]) -> None:
        self.phases = phases
        self.requests = requests
        self.answered_s = 0.0
        """When the answers were written. 0 before."""


class LatencyRecorder:
    """Measures the writes of a server and writes the report. Used on the event loop's thread."""

    def __init__(self, path: str, pauses: PauseLog) -> None:
        self._path = Path(path)
        self._temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        self._pauses = pauses
        self._spans: deque[Span] = deque(maxlen=SPANS_MAX)
        """The phases of the newest commits, in order and without gaps."""
        self._waiting: deque[_Commit] = deque()
        """Commits that are not attributed yet, at most two or three."""
        self._total, self._period = _Period(), _Period()
        self._last_minute: LatencyWindow | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due_s = self._gc_began_s = 0.0

    # --- start and stop

    def check(self) -> None:
        """Raise SettingsError if the report cannot be written, or would replace another file. Changes no file."""
        self._check_file()
        try:
            self._temporary.unlink(missing_ok=True)
            os.close(open_new(self._temporary, os.O_WRONLY, OWNER_ONLY))
            self._temporary.unlink()
        except OSError as error:
            raise SettingsError(
                f"latency_report: {self._path} cannot be written: {error.strerror}; check the directory and its "
                "permissions"
            ) from error

    def start(self) -> None:
        """Start to measure."""
        gc.callbacks.append(self._note_collection)
        self._tick()

    def stop(self) -> None:
        """Stop measuring, and write the last report if there was a write."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        gc.callbacks.remove(self._note_collection)
        self._pauses.is_on = False
        self._end_period()
        if self._total.table.requests:
            self._try_to_write(self._encode())

    async def run(self) -> None:
        """Write the report every minute after the first write, until cancelled."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self._last_minute = self._end_period()
            if self._total.table.requests:
                await asyncio.to_thread(self._try_to_write, self._encode())

    # --- measurements

    def observe_commit(self, batch: BatchReport) -> None:
        """Record a group commit whose writes have their verdicts."""
        if batch.phases is None or self._timer is None:
            return
        self._spans += batch.phases.list_spans(self._spans[-1][1] if self._spans else 0.0)
        commit = _Commit(batch.phases, batch.requests)
        self._waiting.append(commit)
        # Handles that the verdicts have scheduled run first, and write the answers.
        asyncio.get_running_loop().call_soon(self._note_answers, commit)

    def _note_answers(self, commit: _Commit) -> None:
        commit.answered_s = time.perf_counter()
        while self._waiting[0] is not commit and self._waiting[0].answered_s:
            self._attribute(self._waiting.popleft())

    def _note_collection(self, phase: str, _: Mapping[str, Any]) -> None:
        """Record a garbage collection. The collector calls this in the thread that it runs in."""
        if phase == "start":
            self._gc_began_s = time.perf_counter()
        else:
            self._pauses.add(Cause.GC, self._gc_began_s, time.perf_counter())

    def _tick(self) -> None:
        now_s = time.perf_counter()
        if self._due_s and now_s - self._due_s > LATE_S_MIN:
            self._pauses.add(Cause.EVENT_LOOP, self._due_s, now_s)
        self._due_s = now_s + TICK_S
        self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    # --- attribution

    def _attribute(self, commit: _Commit) -> None:
        if not commit.requests:
            return
        phases = commit.phases
        arrived_s = min([request.arrived_s for request in commit.requests])
        queued_s = min([request.queued_s for request in commit.requests])
        pauses = [pause for pause in self._pauses.list_after(arrived_s) if pause[0] < commit.answered_s]
        spans = build_spans(self._list_spans(queued_s, commit.answered_s), pauses, phases.end_s, commit.answered_s)
        collections = [pause for pause in pauses if pause[2] is Cause.GC]
        count = ceil(len(commit.requests) / SAMPLES_MAX)
        for first in range(0, len(commit.requests), count):
            group = commit.requests[first : first + count]
            request = group[len(group) // 2]
            queue_s = max(0.0, phases.began_s - request.queued_s)
            self._period.table.add(split_latency(request, spans, collections), queue_s, len(group))

    def _list_spans(self, after_s: float, before_s: float) -> list[Span]:
        """Return the phases that overlap a time, in order."""
        found: list[Span] = []
        for span in reversed(self._spans):
            if span[1] <= after_s:
                break
            if span[0] < before_s:
                found.append(span)
        found.reverse()
        return found

    # --- the report

    def _end_period(self) -> LatencyWindow:
        """Start a new period, and return the figures of the one that ends."""
        while self._waiting and self._waiting[0].answered_s:
            self._attribute(self._waiting.popleft())
        ended, self._period = self._period, _Period()
        ended.add_pauses(self._pauses.take_figures())
        self._total.table.merge(ended.table)
        self._total.add_pauses(ended.pauses)
        return ended.summarize()

    def _encode(self) -> bytes:
        report = LatencyReport(self._total.summarize(), self._last_minute)
        return msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"

    def _check_file(self) -> None:
        """Raise SettingsError if the path is neither missing nor an earlier report."""
        try:
            found = self._path.lstat()  # the report would replace a symbolic link, and not its target
            if not stat.S_ISREG(found.st_mode):
                raise self._refuse("is not a regular file")
            if found.st_size > REPORT_BYTES_MAX:
                raise self._refuse("is not a latency report")
            msgspec.json.decode(self._path.read_bytes(), type=LatencyReport)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise SettingsError(f"latency_report: {describe_read_error(str(self._path), error)}") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise self._refuse("is not a latency report") from error

    def _refuse(self, reason: str) -> SettingsError:
        return SettingsError(
            f"latency_report: {self._path} {reason}, and the server replaces only an earlier report; name another "
            "file, or remove this one"
        )

    def _write(self, content: bytes) -> None:
        """Replace the file. A reader never sees an incomplete one. Raises OSError, and SettingsError if the path is now
        another file."""
        self._check_file()
        self._temporary.unlink(missing_ok=True)
        try:
            with os.fdopen(open_new(self._temporary, os.O_WRONLY, OWNER_ONLY), "wb") as file:
                file.write(content)
            self._temporary.replace(self._path)
        finally:
            self._temporary.unlink(missing_ok=True)

    def _try_to_write(self, content: bytes) -> None:
        try:
            self._write(content)
        except OSError as error:
            logger.warning("the latency report %s cannot be written: %s", self._path, error.strerror)
        except SettingsError as error:
            logger.warning("the latency report is not written: %s", error)

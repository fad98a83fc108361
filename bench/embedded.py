"""A log in a file, in one process: commits, retries and reads, compared with bare SQLite on the same tables."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final, TypeVar

import uvloop

import oncelog
from bench.bare import BareFile, Batch, batches_of
from bench.disk import directory
from bench.measure import Effort, Measurement
from bench.writers import PARTITIONS, SUBMITTERS, Event, events, fill, prepared, submit_all
from oncelog import Limits, Log, Replayed, Submission, canonical
from oncelog.storage.sqlite.database_file import SqliteDriver, connect
from oncelog.storage.sqlite.key_index.index import SEAL_KEYS
from oncelog.storage.sqlite.statements import SQL

NewLoop = Callable[[], asyncio.AbstractEventLoop]
RETRIES_AT_ONCE: Final = 500
PAGE: Final = 500
T = TypeVar("T")


@dataclass(frozen=True)
class Sizes:
    """Number of events in each measurement."""

    committed: int
    one_by_one: int
    """Number of events that the baseline commits one by one. Oncelog commits ten times as many."""
    cached: int
    stored: int
    retried: int


FULL: Final = Sizes(committed=3 * SEAL_KEYS, one_by_one=2000, cached=5000, stored=200_000, retried=10_000)
"""The commits are enough to seal two key segments, and the stored keys are enough for a merge."""
QUICK: Final = Sizes(committed=600, one_by_one=20, cached=50, stored=1500, retried=1000)


def measurements(effort: Effort) -> Iterator[Measurement]:
    """Yield all measurements in the order of the table."""
    sizes = QUICK if effort.is_quick else FULL
    chance = random.Random(1)
    with directory() as place:
        yield from _commits(place, prepared(sizes.committed, chance), sizes)
        with _filled(place / "filled.db", sizes.stored, chance) as submissions:
            yield from _retries(place / "filled.db", submissions, sizes, chance)
            yield from _reading(place / "filled.db", sizes)


# --- commits -----------------------------------------------------------------------------------------


class _Commits:
    """Both contenders, with fresh files for every sample."""

    def __init__(
        self, place: Path, submissions: Sequence[Submission], new_loop: NewLoop = uvloop.new_event_loop
    ) -> None:
        self._ours = place / "ours.db"
        self._bare = place / "bare.db"
        self._submissions = submissions
        self._runner = asyncio.Runner(loop_factory=new_loop)
        self._log: Log | None = None
        self._file: BareFile | None = None
        self._batches: list[Batch] = []

    def prepare_ours(self) -> None:
        self._discard()
        self._log = oncelog.open(self._ours)
        self._runner.run(self._log.__aenter__())

    def submit(self) -> int:
        assert self._log is not None
        return self._runner.run(submit_all(self._log, self._submissions))

    def prepare_bulk(self) -> None:
        self._prepare_bare(batches_of(self._ours))

    def prepare_one_by_one(self, count: int) -> None:
        self._prepare_bare(batches_of(self._ours, 1, count))

    def insert(self) -> int:
        assert self._file is not None
        for batch in self._batches:
            self._file.insert(batch)
        return sum(len(batch.records) for batch in self._batches)

    def close(self) -> None:
        self._discard()
        self._runner.close()

    def _prepare_bare(self, batches: list[Batch]) -> None:
        self._discard()
        self._file, self._batches = BareFile(self._bare), batches

    def _discard(self) -> None:
        """Close and remove the files, so that background work of one contender does not slow down the other."""
        if self._log is not None:
            self._runner.run(self._log.close())
            self._log = None
        if self._file is not None:
            self._file.close()
            self._file, self._batches = None, []
            self._ours.unlink()
            self._bare.unlink()


def _commits(place: Path, submissions: Sequence[Submission], sizes: Sizes) -> Iterator[Measurement]:
    for name, new_loop, target_ratio in (
        ("", uvloop.new_event_loop, 0.5),
        (", on asyncio's own event loop", asyncio.new_event_loop, None),
    ):
        with closing(_Commits(place, submissions, new_loop)) as commits:
            yield Measurement(
                f"commit, {SUBMITTERS} submitters{name}",
                commits.submit,
                commits.insert,
                "executemany of the same rows in the same batches",
                count=len(submissions),
                target_ratio=target_ratio,
                prepare_ours=commits.prepare_ours,
                prepare_baseline=commits.prepare_bulk,
                rounds=10,
            )
    fewer = submissions[: 10 * sizes.one_by_one]
    with closing(_Commits(place, fewer)) as commits:
        yield Measurement(
            f"commit, {SUBMITTERS} submitters, the peer one by one",
            commits.submit,
            commits.insert,
            "one transaction per event",
            agree=lambda ours, theirs: (ours, theirs) == (len(fewer), sizes.one_by_one),
            count=len(fewer),
            baseline_count=sizes.one_by_one,
            target_ratio=4,
            prepare_ours=commits.prepare_ours,
            prepare_baseline=partial(commits.prepare_one_by_one, sizes.one_by_one),
            rounds=10,
        )


# --- a filled log ------------------------------------------------------------------------------------


@contextmanager
def _filled(path: Path, count: int, chance: random.Random) -> Iterator[list[Submission]]:
    submissions = prepared(count, chance)

    async def filled() -> None:
        async with oncelog.open(path) as log:
            await fill(log, submissions)

    asyncio.run(filled())
    yield submissions


@contextmanager
def _opened(path: Path, limits: Limits | None = None) -> Iterator[tuple[asyncio.Runner, Log]]:
    with asyncio.Runner() as runner:
        log = oncelog.open(path, limits=limits)
        runner.run(log.__aenter__())
        try:
            yield runner, log
        finally:
            runner.run(log.close())


def _complete(runner: asyncio.Runner, function: Callable[..., Coroutine[Any, Any, T]], *arguments: Any) -> T:
    return runner.run(function(*arguments))


# --- retries -----------------------------------------------------------------------------------------


def _retries(
    path: Path, submissions: Sequence[Submission], sizes: Sizes, chance: random.Random
) -> Iterator[Measurement]:
    known = list(events(sizes.cached, chance))
    by_text = [(str(one.id), one.event, one.partitions) for one in known]
    with _opened(path.with_name("cached.db")) as (runner, log):
        runner.run(fill(log, [oncelog.event(*one) for one in known]))
        for name, retries, target_us in (("", known, 10), (", id as text", by_text, None)):
            yield Measurement(
                f"retry from the cache, with its fingerprint{name}",
                partial(_complete, runner, retry_each, log, retries),
                partial(_hash_each, known),
                "canonical + sha256",
                count=len(known),
                target_us=target_us,
                rounds=50,
            )
    retried = chance.sample(submissions, sizes.retried)
    positions = dict(zip((one.key for one in submissions), range(1, len(submissions) + 1), strict=True))
    places = [(positions[one.key],) for one in retried]
    # This process does not cache these keys, but the operating system may.
    with _opened(path, Limits(cache_entries_max=0)) as (runner, log), closing(_reader(path)) as connection:
        yield Measurement(
            f"retry from the store, {RETRIES_AT_ONCE} at once",
            partial(_complete, runner, retry_at_once, log, retried),
            partial(_select_each, connection, places),
            "SELECT by place, one by one",
            count=len(retried),
            target_us=33.3,
            rounds=20,
        )


async def retry_each(log: Log, known: Sequence[Event]) -> int:
    replayed = 0
    for one in known:
        verdict = await log.submit(oncelog.event(*one))
        replayed += type(verdict) is Replayed
    return replayed


def _hash_each(known: Sequence[Event]) -> int:
    for one in known:
        sha256(canonical(one.event)).digest()
    return len(known)


async def retry_at_once(log: Log, retried: Sequence[Submission]) -> int:
    """Submit retries. Return the sum of their positions, so that results can be compared."""
    total = 0
    for start in range(0, len(retried), RETRIES_AT_ONCE):
        for verdict in await log.submit_many(retried[start : start + RETRIES_AT_ONCE]):
            assert type(verdict) is Replayed
            assert verdict.receipt is not None
            total += verdict.receipt.position
    return total


def _select_each(connection: Any, places: Sequence[tuple[int]]) -> int:
    statement = "SELECT place, log_time_ms, height, key, fingerprint FROM oncelog_records WHERE place = ?"
    return sum(connection.execute(statement, place).fetchone()[0] for place in places)


# --- reading -----------------------------------------------------------------------------------------


def _reading(path: Path, sizes: Sizes) -> Iterator[Measurement]:
    with _opened(path) as (runner, log), closing(_reader(path)) as connection:
        for name, partition, count in (
            ("the whole log", None, sizes.stored),
            ("one partition of ten", PARTITIONS[0], sizes.stored // len(PARTITIONS)),
        ):
            yield Measurement(
                f"read {name}, pages of {PAGE}",
                partial(_complete, runner, read_pages, log, partition),
                partial(_select_pages, connection, partition),
                "the same SELECT, fetchall",
                count=count,
                target_ratio=0.4,
                rounds=10,
            )


async def read_pages(log: Log, partition: str | None) -> tuple[int, int]:
    """Read all pages. Return the number of records and the bytes of their bodies."""
    records = size = 0
    reading = await log.read(partition=partition, limit=PAGE)
    while True:
        records += len(reading.records)
        size += sum(len(record.body) for record in reading.records)
        if not reading.has_more:
            return records, size
        reading = await log.read(partition=partition, after=reading.cursor, upto=reading.upto, limit=PAGE)


def _select_pages(connection: Any, partition: str | None) -> tuple[int, int]:
    records = size = after = 0
    while True:
        if partition is None:
            rows = connection.execute(SQL["lane_page"], (0, after, 2**48 - 1, PAGE)).fetchall()
        else:
            rows = connection.execute(SQL["partition_page"], (0, partition, after, 2**48 - 1, PAGE)).fetchall()
        if not rows:
            return records, size
        records += len(rows)
        size += sum(len(row[-1]) for row in rows)
        after = rows[-1][1]


def _reader(path: Path) -> Any:
    """Return a connection with the settings of a log's readers."""
    return connect(SqliteDriver(), str(path))

"""Eviction is the same on all stores and independent of batching.

A model follows the specification with plain tables: at each position that is a multiple of the interval it removes
all entries last seen longer ago than the time to live. The stores only record the time of each eviction, and must give
the same answers.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import pytest

from crash.store_history import say
from databases import address_of
from oncelog.core.identity import compute_lane
from oncelog.core.operations import SetEntity
from oncelog.core.policy import LEDGER
from oncelog.core.transactions import ledger_scope, transaction
from oncelog.core.values import (
    ClientEntry,
    Committed,
    Refused,
    Replayed,
    Request,
    Settings,
    Submission,
    Verdict,
)
from oncelog.engine.answer_cache import AnswerCache
from oncelog.engine.limits import Limits
from oncelog.engine.state_reader import StateReader
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.store import Store
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.driver import StoreDriver
from storage.memory_store import MemoryStore
from storage.sqlite.writers import QuickDriver

TTL_MS: Final = LEDGER.retention.ttl_ms
STEPS_MS: Final = (0, 0, 0, 1, 1000, TTL_MS // 3, TTL_MS // 2, TTL_MS - 1, TTL_MS, TTL_MS + 1)
SCOPES: Final = (ledger_scope("acme"), ledger_scope("acme", "main"), ledger_scope("other"))
CLIENTS: Final = ("ann", "bob", "cyd")
Outcome = tuple[Any, ...]
OUTCOMES: Final = {"committed", "replayed", "identity_reused", "sequence_gap", "sequence_reused"}
REOPEN_INTERVAL: Final = 9
"""Number of moments after which the stores are reopened."""


class Moment(NamedTuple):
    """Writes with the same time."""

    step_ms: int
    """Time since the previous moment. A negative value sets the clock back."""
    writes: list[Submission]


# --- the model -------------------------------------------------------------------------------------------------------


class Known(NamedTuple):
    fingerprint: bytes
    place: Outcome
    seen_ms: int


class Table:
    """The model of one lane."""

    def __init__(self) -> None:
        self.position = 0
        self.time_ms = 0
        self.clients: dict[tuple[str, str], ClientEntry] = {}
        self.keys: dict[tuple[str, str, bytes], Known] = {}
        self.sequences: dict[tuple[str, str, int], Known] = {}

    def evict(self) -> None:
        """Remove old entries, in the order of the specification, although the order has no effect here."""
        tables: list[tuple[dict[Any, Any], Any]] = [
            (self.clients, lambda entry: entry.last_seen_ms),
            (self.keys, lambda known: known.seen_ms),
        ]
        for table, seen_ms in tables:
            for candidate in sorted(table, key=repr):
                if self.time_ms - seen_ms(table[candidate]) > TTL_MS:
                    del table[candidate]


class Model:
    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._tables: dict[int, Table] = {}
        self._versions: dict[str, int] = {}
        self.evictions: list[tuple[int, int]] = []
        """Lane and position of each eviction."""

    def table(self, scope: str) -> tuple[int, Table]:
        lane = compute_lane(scope, self._settings.lanes)
        return lane, self._tables.setdefault(lane, Table())

    def decide(self, write: Submission, now_ms: int) -> Outcome:
        lane, table = self.table(write.scope)
        client, sequence = (write.scope, write.client), write.client_sequence
        known = table.keys.get((*client, write.key)) if write.key else None
        if known is not None:
            return known.place if known.fingerprint == write.fingerprint else ("identity_reused",)
        entry = table.clients.get(client)
        last = 0 if entry is None else entry.sequence
        if sequence > last + 1:
            return ("sequence_gap", last)
        if sequence <= last:
            old = table.sequences[*client, sequence]  # the stored record determines the answer, regardless of its age
            return old.place if old.fingerprint == write.fingerprint else ("sequence_reused", last)
        self._commit(write, now_ms, lane, table)
        return ("committed", *table.sequences[*client, sequence].place[1:])

    def _commit(self, write: Submission, now_ms: int, lane: int, table: Table) -> None:
        client = (write.scope, write.client)
        table.position += 1
        table.time_ms = max(table.time_ms, now_ms)
        version = self._versions[write.scope] = self._versions.get(write.scope, 0) + 1
        place = ("replayed", lane, table.position, version, table.time_ms, write.client_sequence)
        known = Known(write.fingerprint, place, table.time_ms)
        if write.key:
            table.keys[*client, write.key] = known
        table.sequences[*client, write.client_sequence] = known
        table.clients[client] = ClientEntry(
            sequence=write.client_sequence,
            last_seen_ms=table.time_ms,
            last_key=write.key,
            last_fingerprint=write.fingerprint,
        )
        if table.position % self._settings.eviction_interval == 0:
            self.evictions.append((lane, table.position))
            table.evict()

    def states(self) -> list[ClientEntry | None]:
        return [self.table(scope)[1].clients.get((scope, client)) for scope in SCOPES for client in CLIENTS]


# --- histories -------------------------------------------------------------------------------------------------------


class HistoryGenerator:
    """Generates histories in which clients return after a long time, retry, skip sequences and reuse keys."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.settings = Settings(lanes=self.chance.choice([1, 1, 2]), eviction_interval=self.chance.randint(1, 7))
        self._model = Model(self.settings)
        self._now_ms = ManualClock().wall_ms()
        self._sent: list[Submission] = []

    def history(self, moments: int) -> list[Moment]:
        return [self._moment() for _ in range(moments)]

    def _moment(self) -> Moment:
        step_ms = self.chance.choice(STEPS_MS)
        if self.chance.random() < 0.08:
            step_ms = -self.chance.choice(STEPS_MS[3:])
        self._now_ms += step_ms
        return Moment(step_ms, [self._write() for _ in range(self.chance.randint(1, 6))])

    def _write(self) -> Submission:
        write = self._new() if not self._sent or self.chance.random() < 0.65 else self.chance.choice(self._sent[-12:])
        self._model.decide(write, self._now_ms)
        return write

    def _new(self) -> Submission:
        scope, client = self.chance.choice(SCOPES), self.chance.choice(CLIENTS)
        entry = self._model.table(scope)[1].clients.get((scope, client))
        sequence = 1 if entry is None else entry.sequence + 1
        if self.chance.random() < 0.15:  # as a faulty client would
            sequence = self.chance.choice([1, sequence + 1, max(1, sequence - 1), max(1, sequence - 2)])
        key = b"" if self.chance.random() < 0.2 else b"k" + self.chance.randrange(30).to_bytes(15, "big")
        operation = SetEntity(f"{self.chance.randrange(3)}", b"%d" % self.chance.randrange(4))
        write = transaction(scope, client, sequence, [operation], key=key)
        self._sent.append(write)
        return write


# --- stores ----------------------------------------------------------------------------------------------------------


class Submitter:
    """Submits a history to one store: write by write, one batch per moment, or in batches of random size."""

    def __init__(self, log: StoreDriver, chance: Random | None, is_whole: bool) -> None:
        self.log = log
        self._chance = chance
        self._is_whole = is_whole

    def submit(self, moment: Moment) -> list[Outcome]:
        clock = self.log.clock
        clock.jump(moment.step_ms) if moment.step_ms < 0 else clock.advance(moment.step_ms)
        outcomes: list[Outcome] = []
        for batch in self._batches(moment.writes):
            decided = self.log.commit_batch(*[Request((write,)) for write in batch])
            outcomes += [_outcome(verdict) for verdicts in decided.verdicts for verdict in verdicts]
        return outcomes

    def _batches(self, writes: Sequence[Submission]) -> Iterator[Sequence[Submission]]:
        start = 0
        while start < len(writes):
            size = len(writes) if self._is_whole else 1
            if self._chance is not None:
                size = self._chance.randint(1, len(writes) - start)
            yield writes[start : start + size]
            start += size

    def states(self) -> list[ClientEntry | None]:
        nothing: Any = None
        books = StateReader(self.log.store, AnswerCache(0, 1), nothing, Limits(), lambda: self.log.store)
        return [self.log.run(books.client(scope, client)) for scope in SCOPES for client in CLIENTS]

    def heads(self) -> dict[int, tuple[int, int, int]]:
        return {
            lane: (head.position, head.log_time_ms, head.eviction_time_ms) for lane, head in self.log.heads().items()
        }


def _outcome(verdict: Verdict) -> Outcome:
    """Return a verdict without its block height, which depends on the batches."""
    match verdict:
        case Committed(receipt) | Replayed(receipt):
            if receipt is None:
                return ("forgotten",)
            kind = "committed" if isinstance(verdict, Committed) else "replayed"
            return (
                kind,
                receipt.lane,
                receipt.position,
                receipt.sequence,
                receipt.log_time_ms,
                receipt.client_sequence,
            )
        case Refused(reason):
            named = reason.value
            return (named,) if named == "identity_reused" else (named, verdict.current)
    raise AssertionError(verdict)


@contextmanager
def submitters(path: Path, settings: Settings, seed: int, with_postgres: bool) -> Iterator[dict[str, Submitter]]:
    """Open stores that get single writes, one batch per moment, or batches of random size."""

    def in_memory(clock: ManualClock, its: Settings | None) -> Store:
        return MemoryStore(its, clock=clock, draw=bytes)

    def in_file(name: str) -> Any:
        def made(clock: ManualClock, its: Settings | None) -> Store:
            return SqliteStore(path / name, its, clock=clock, draw=bytes, driver=QuickDriver(), seal_keys=4)

        return made

    def in_database(clock: ManualClock, its: Settings | None) -> Store:
        return PostgresStore(address_of(path), its, clock=clock, draw=bytes, keep_clock_ms=0)

    makers: dict[str, tuple[Any, Random | None, bool]] = {
        "memory, one by one": (in_memory, None, False),
        "memory, any size": (in_memory, Random(seed + 1), False),
        "file, whole": (in_file("whole.db"), None, True),
        "file, any size": (in_file("any.db"), Random(seed + 2), False),
    }
    if with_postgres:
        makers = {"memory, one by one": makers["memory, one by one"]}
        makers["database, any size"] = (in_database, Random(seed + 3), False)
        makers["database, whole"] = (
            lambda clock, its: PostgresStore(address_of(path / "whole"), its, clock=clock, draw=bytes, keep_clock_ms=0),
            None,
            True,
        )
    found: dict[str, Submitter] = {}
    try:
        for name, (make, chance, is_whole) in makers.items():
            is_durable = make is not in_memory
            found[name] = Submitter(StoreDriver(make, settings, is_durable), chance, is_whole)
        yield found
    finally:
        for submitter in found.values():
            submitter.log.close()


def compare(path: Path, seed: int, moments: int, *, is_long: bool, with_postgres: bool) -> None:
    """Submit one history to the model and to all stores, and compare the outcomes after each moment.

    Unless `is_long` is set, the history ends after the first reopening, as soon as every outcome has occurred.
    """
    say(f"seed {seed}")
    path.mkdir()
    author = HistoryGenerator(seed)
    model = Model(author.settings)
    outcomes: set[str] = set()
    now_ms = ManualClock().wall_ms()
    with submitters(path, author.settings, seed, with_postgres) as run_server:
        for number, moment in enumerate(author.history(moments)):
            now_ms += moment.step_ms
            expected = [model.decide(write, now_ms) for write in moment.writes]
            outcomes.update(kind for kind, *_ in expected)
            for name, submitter in run_server.items():
                assert submitter.submit(moment) == expected, (seed, number, name)
                assert submitter.states() == model.states(), (seed, number, name)
            heads = [submitter.heads() for submitter in run_server.values()]
            assert heads == [heads[0]] * len(heads), (seed, number)
            if not is_long and number >= REOPEN_INTERVAL and model.evictions and outcomes == OUTCOMES:
                break
            if number % REOPEN_INTERVAL == REOPEN_INTERVAL - 1:
                for submitter in run_server.values():
                    submitter.log.reopen()
    # If a history lacked an outcome, the test would not cover that outcome.
    assert model.evictions
    assert outcomes == OUTCOMES


@pytest.mark.rule("LG-15", "LG-16", "LG-6", "LG-8", "CO-17")
@pytest.mark.parametrize("seed", range(8))
def test_sqlite_and_memory_stores_evict_like_the_model(tmp_path: Path, seed: int, is_soak: bool) -> None:
    for one in range(seed, 20 if is_soak else seed + 1, 8):
        compare(tmp_path / f"{one}", one, 60, is_long=is_soak, with_postgres=False)


@pytest.mark.rule("LG-15", "LG-16", "LG-6", "LG-8", "CO-17")
@pytest.mark.parametrize("seed", [101, 103])
def test_all_stores_evict_like_the_model(tmp_path: Path, seed: int, is_soak: bool) -> None:
    for one in (seed, seed + 1, seed + 4) if is_soak else (seed,):
        compare(tmp_path / f"{one}", one, 50, is_long=is_soak, with_postgres=True)

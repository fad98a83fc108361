"""For generated histories, SQLite, PostgreSQL and an in-memory store agree on verdicts, hashes and keys.

The histories come from the tests for `plan` (`core.test_plan_model`). Between batches, the clock jumps, bodies are
erased, and the log is closed and reopened. With segments of two keys, SQLite's key index seals and merges throughout.
"""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from core.invariants import Answer, History, find_violations
from core.test_plan_model import HistoryGenerator, Step, draw_user_policies, numbers_below
from crash.store_history import identity_of
from databases import POSTGRES, SQLITE, address_of
from oncelog.core.plan import Validate
from oncelog.core.policy import BUILT_IN_POLICIES, Policy
from oncelog.core.tenants import Tenant
from oncelog.core.values import Record, Request, Settings, Submission, Verdict, key_identity
from oncelog.errors import ClockJumpedError
from oncelog.storage.postgres import PostgresStore
from oncelog.storage.sqlite import SqliteStore
from oncelog.storage.sqlite.key_index import index
from oncelog.storage.store import Store
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.driver import StoreDriver
from oncelog.testing.contract.quotas import get_usage
from storage.memory_store import MemoryStore
from storage.sqlite.writers import QuickDriver

SEAL_KEYS: Final = 2
POSTGRES_EXAMPLES: Final = settings().max_examples // 10
"""A smaller number of examples, because each takes several times as long as on SQLite."""


class Moment(NamedTuple):
    """Events before a batch."""

    is_reopened: bool = False
    is_set: bool = False
    """The wall clock jumps to the time of the batch; otherwise both clocks advance."""
    is_confirmed: bool = False
    erased: int = 0
    """Number of the newest records that are erased."""
    tenants: tuple[Tenant, ...] | None = None
    """New quotas."""


class TimedHistory(NamedTuple):
    """A history that is replayed on two stores."""

    settings: Settings
    policies: tuple[Policy, ...]
    steps: list[Step]
    moments: list[Moment]


@pytest.fixture(autouse=True)
def _small_fan_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge two segments at a time, so that a few keys need several levels."""
    monkeypatch.setattr(index, "FAN_OUT", 2)


# --- generation ------------------------------------------------------------------------------------------


@st.composite
def timed_histories(draw: st.DrawFn, *policies: Policy) -> TimedHistory:
    def below(end: int) -> int:
        return draw(numbers_below(end))

    author = HistoryGenerator(below, policies or draw_user_policies(below))
    return build_timed_history(author, author.history().steps)


def build_timed_history(author: HistoryGenerator, steps: list[Step]) -> TimedHistory:
    has_tenants = author.rarely(2)
    moments = [
        Moment(
            author.rarely(5),
            author.rarely(12),
            author.rarely(12),
            author.below(4) if author.rarely(8) else 0,
            tenants(author) if has_tenants and author.rarely(4) else None,
        )
        for _ in steps
    ]
    return TimedHistory(author.settings, author.policies, steps, moments)


def tenants(author: HistoryGenerator) -> tuple[Tenant, ...]:
    """Return tenants with small quotas that own some streams and partitions of the histories."""
    limits = (0, 0, 300, 1000, 5000)
    return tuple(
        Tenant(
            prefix,
            author.pick(*limits),
            author.pick(0, 0, 3, 20),
            per_second := author.pick(0, 0, 1, 100),
            author.pick(0, 5) if per_second else 0,
        )
        for prefix in ("p", "a", "é", "c", "nobody")
        if not author.rarely(3)
    )


# --- replay ----------------------------------------------------------------------------------------------


class Replayer:
    """Replays a history on one store and collects its answers."""

    def __init__(self, log: StoreDriver) -> None:
        self.log = log
        self.answers: list[Answer] = []

    def apply(self, step: Step, moment: Moment) -> list[list[Verdict]] | str:
        """Apply a step and return its verdicts, or the name of the error."""
        log = self.log
        move_to(log.clock, step.now_ms, moment.is_set)
        if moment.is_reopened:
            log.reopen()
        if moment.is_confirmed:
            log.run(log.store.confirm_clock())
        self.erase(moment.erased)
        if moment.tenants is not None:
            log.run(log.store.set_tenants(moment.tenants))
        return self.commit(step.batch, step.validate)

    def commit(self, batch: list[Request], validate: Validate | None) -> list[list[Verdict]] | str:
        try:
            verdicts = self.log.commit_batch(*batch, validate=validate).verdicts
        except ClockJumpedError as error:
            return f"ClockJumpedError {error.ahead_ms}"
        for request, told in zip(batch, verdicts, strict=True):
            for item, verdict in zip(request.items, told, strict=True):
                if isinstance(item, Submission):
                    answer = Answer(key_identity(item), item.fingerprint, verdict, item.client_sequence)
                    self.answers.append(answer)
        return verdicts

    def erase(self, count: int) -> None:
        log = self.log
        for lane, head in log.heads().items() if count else ():
            log.run(log.store.erase(lane, range(head.position - count + 1, head.position + 1)))


def move_to(clock: ManualClock, now_ms: int, is_set: bool) -> None:
    ms = now_ms - clock.wall_ms()
    if ms < 0 or is_set:
        clock.jump(ms)
    else:
        clock.advance(ms)


@contextmanager
def open_both_stores(kind: str, settings: Settings) -> Iterator[tuple[Replayer, Replayer]]:
    """Open an in-memory store and a store of the given kind."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log.db"

        def in_memory(clock: ManualClock, its: Settings | None) -> Store:
            return MemoryStore(its, clock=clock, draw=bytes)

        def open_durable(clock: ManualClock, its: Settings | None) -> Store:
            if kind == POSTGRES:
                return PostgresStore(address_of(path), its, clock=clock, draw=bytes, keep_clock_ms=0)
            return SqliteStore(path, its, clock=clock, draw=bytes, driver=QuickDriver(), seal_keys=SEAL_KEYS)

        memory = StoreDriver(in_memory, settings, is_durable=False)
        durable = StoreDriver(open_durable, settings, is_durable=True)
        try:
            yield Replayer(memory), Replayer(durable)
        finally:
            memory.close()
            durable.close()


# --- comparison ------------------------------------------------------------------------------------------


def compare(kind: str, timed_history: TimedHistory) -> None:
    with open_both_stores(kind, timed_history.settings) as (memory, durable):
        for number, (step, moment) in enumerate(zip(timed_history.steps, timed_history.moments, strict=True)):
            assert durable.apply(step, moment) == memory.apply(step, moment), f"batch {number}"
        for _ in range(2):
            assert read_store(durable.log) == read_store(memory.log)
            assert check_invariants(durable, timed_history) == []
            durable.log.reopen()
        compare_recounts(memory.log, durable.log)


def compare_recounts(memory: StoreDriver, durable: StoreDriver) -> None:
    """Recount all tenants. The usage may exceed the recount only by expired entities."""
    before, tenants = get_usage(memory), [tenant for tenant, _ in memory.run(memory.store.usage())]
    for log in (memory, durable):
        log.run(log.store.set_tenants([]))
        log.run(log.store.set_tenants(tenants))
    recounted = get_usage(durable)
    assert recounted == get_usage(memory)
    for prefix, (size, records) in before.items():
        assert recounted[prefix][1] == records
        assert recounted[prefix][0] <= size


def read_store(log: StoreDriver) -> dict[str, Any]:
    """Read all content of a store."""
    records = read_all_records(log)
    identities = sorted({identity_of(record) for record in records})
    streams = sorted({record.scope for record in records if record.sequence})
    heads = log.heads()
    return {
        "heads": heads,
        "records": records,
        "streams": [log.read_all(stream=stream, limit=3) for stream in streams],
        "partitions": [log.read_all(lane=lane, partitions=("p",), limit=3) for lane in heads],
        "remembered": log.run(log.store.find_keys(identities)),
        "standings": [log.run(log.store.get_key_status(identity)) for identity in identities[:5]],
        "blocks": [log.run(log.store.block(lane, head.height)) for lane, head in heads.items() if head.height],
        "consumers": log.run(log.store.consumers()),
        "erasures": log.run(log.store.erasures()),
        "usage": log.run(log.store.usage()),
    }


def check_invariants(replayer: Replayer, timed_history: TimedHistory) -> list[Any]:
    """Return violations of the invariants in the records and answers of the store."""
    log = replayer.log
    records = read_all_records(log)
    identities = sorted({identity_of(record) for record in records if record.key})
    remembered = zip(identities, log.run(log.store.find_keys(identities)), strict=True)
    streams = {record.scope: log.read_page(stream=record.scope).newest for record in records if record.sequence}
    history = History(
        records=records,
        settings=timed_history.settings,
        policies={policy.name: policy for policy in timed_history.policies},
        answers=replayer.answers,
        keys={identity: known for identity, known in remembered if known is not None},
        streams=streams,
        positions={lane: head.position for lane, head in log.heads().items()},
    )
    return find_violations(history)


def read_all_records(log: StoreDriver) -> list[Record]:
    return [record for lane in sorted(log.heads()) for record in log.read_all(lane=lane, limit=7)]


# --- the tests -------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-10", "CO-12", "CO-14", "CO-15", "CO-17", "CO-41", "CO-42")
@given(st.one_of(timed_histories(*BUILT_IN_POLICIES), timed_histories()))
def test_memory_and_sqlite_agree_on_generated_histories(timed_history: TimedHistory) -> None:
    compare(SQLITE, timed_history)


@pytest.mark.rule("CO-10", "CO-12", "CO-14", "CO-15", "CO-17", "CO-41", "CO-42")
@settings(max_examples=POSTGRES_EXAMPLES)
@given(st.one_of(timed_histories(*BUILT_IN_POLICIES), timed_histories()))
def test_memory_and_postgres_agree_on_generated_histories(timed_history: TimedHistory) -> None:
    compare(POSTGRES, timed_history)


@pytest.mark.rule("CO-14", "CO-17")
@pytest.mark.parametrize(("kind", "seed"), [*((SQLITE, seed) for seed in range(6)), (POSTGRES, 0), (POSTGRES, 1)])
def test_stores_agree_on_long_histories(kind: str, seed: int) -> None:
    """The histories are long enough for several levels of segments, and use a fixed seed."""
    below = Random(seed).randrange
    policies: Sequence[Policy] = BUILT_IN_POLICIES if seed % 2 else draw_user_policies(below)
    author = HistoryGenerator(below, tuple(policies))
    author.key_count = 200
    steps = [step for _ in range(15) for step in author.history().steps]
    compare(kind, build_timed_history(author, steps))

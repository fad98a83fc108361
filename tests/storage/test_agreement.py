"""SQLite, PostgreSQL and a store of dictionaries agree on generated histories: verdicts, heads, hashes and keys.

The histories come from the tests of `plan` (`core.test_plan_model`). Between the batches the clock jumps, bodies are
erased, and the log is closed and opened again. Segments of two keys keep the key index of SQLite sealing and merging
throughout.
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
"""Fewer, because each takes several times as long as on SQLite."""


class Moment(NamedTuple):
    """Events before a batch."""

    is_reopened: bool = False
    is_set: bool = False
    """The wall clock jumps to the time of the batch; otherwise both clocks advance."""
    is_confirmed: bool = False
    erased: int = 0
    """Number of newest records whose bodies are erased."""
    tenants: tuple[Tenant, ...] | None = None
    """New quotas."""


class Tale(NamedTuple):
    """A history that is replayed on two stores."""

    settings: Settings
    policies: tuple[Policy, ...]
    steps: list[Step]
    moments: list[Moment]


@pytest.fixture(autouse=True)
def _small_fan_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Merge two segments at a time, so that few keys already need several levels."""
    monkeypatch.setattr(index, "FAN_OUT", 2)


# --- generating ------------------------------------------------------------------------------------------


@st.composite
def tales(draw: st.DrawFn, *policies: Policy) -> Tale:
    def below(end: int) -> int:
        return draw(numbers_below(end))

    author = HistoryGenerator(below, policies or draw_user_policies(below))
    return tale_of(author, author.history().steps)


def tale_of(author: HistoryGenerator, steps: list[Step]) -> Tale:
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
    return Tale(author.settings, author.policies, steps, moments)


def tenants(author: HistoryGenerator) -> tuple[Tenant, ...]:
    """Return tenants that own some streams and partitions of the histories, with small quotas."""
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


# --- replaying -------------------------------------------------------------------------------------------


class Teller:
    """Replays a history on one store and collects its answers."""

    def __init__(self, log: StoreDriver) -> None:
        self.log = log
        self.answers: list[Answer] = []

    def tell(self, step: Step, moment: Moment) -> list[list[Verdict]] | str:
        """Return the verdicts, or the name of the error."""
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
def two_stores(kind: str, settings: Settings) -> Iterator[tuple[Teller, Teller]]:
    """Open a store of dictionaries and one of the given kind."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "log.db"

        def in_memory(clock: ManualClock, its: Settings | None) -> Store:
            return MemoryStore(its, clock=clock, draw=bytes)

        def kept(clock: ManualClock, its: Settings | None) -> Store:
            if kind == POSTGRES:
                return PostgresStore(address_of(path), its, clock=clock, draw=bytes, keep_clock_ms=0)
            return SqliteStore(path, its, clock=clock, draw=bytes, driver=QuickDriver(), seal_keys=SEAL_KEYS)

        memory = StoreDriver(in_memory, settings, is_durable=False)
        durable = StoreDriver(kept, settings, is_durable=True)
        try:
            yield Teller(memory), Teller(durable)
        finally:
            memory.close()
            durable.close()


# --- comparing -------------------------------------------------------------------------------------------


def compare(kind: str, tale: Tale) -> None:
    with two_stores(kind, tale.settings) as (memory, durable):
        for number, (step, moment) in enumerate(zip(tale.steps, tale.moments, strict=True)):
            assert durable.tell(step, moment) == memory.tell(step, moment), f"batch {number}"
        for _ in range(2):
            assert told_by(durable.log) == told_by(memory.log)
            assert found_wrong(durable, tale) == []
            durable.log.reopen()
        compare_recounts(memory.log, durable.log)


def compare_recounts(memory: StoreDriver, durable: StoreDriver) -> None:
    """Count all tenants again. Only entities that expire may have been counted with more than is left."""
    before, tenants = get_usage(memory), [tenant for tenant, _ in memory.run(memory.store.usage())]
    for log in (memory, durable):
        log.run(log.store.set_tenants([]))
        log.run(log.store.set_tenants(tenants))
    recounted = get_usage(durable)
    assert recounted == get_usage(memory)
    for prefix, (size, records) in before.items():
        assert recounted[prefix][1] == records
        assert recounted[prefix][0] <= size


def told_by(log: StoreDriver) -> dict[str, Any]:
    """Return everything that can be read from a store."""
    records = all_records(log)
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


def found_wrong(teller: Teller, tale: Tale) -> list[Any]:
    """Return violations of the invariants in the records and answers of the store."""
    log = teller.log
    records = all_records(log)
    identities = sorted({identity_of(record) for record in records if record.key})
    remembered = zip(identities, log.run(log.store.find_keys(identities)), strict=True)
    streams = {record.scope: log.read_page(stream=record.scope).newest for record in records if record.sequence}
    history = History(
        records=records,
        settings=tale.settings,
        policies={policy.name: policy for policy in tale.policies},
        answers=teller.answers,
        keys={identity: known for identity, known in remembered if known is not None},
        streams=streams,
        positions={lane: head.position for lane, head in log.heads().items()},
    )
    return find_violations(history)


def all_records(log: StoreDriver) -> list[Record]:
    return [record for lane in sorted(log.heads()) for record in log.read_all(lane=lane, limit=7)]


# --- the tests -------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-10", "CO-12", "CO-14", "CO-15", "CO-17", "CO-41", "CO-42")
@given(st.one_of(tales(*BUILT_IN_POLICIES), tales()))
def test_memory_and_sqlite_agree_on_generated_histories(tale: Tale) -> None:
    compare(SQLITE, tale)


@pytest.mark.rule("CO-10", "CO-12", "CO-14", "CO-15", "CO-17", "CO-41", "CO-42")
@settings(max_examples=POSTGRES_EXAMPLES)
@given(st.one_of(tales(*BUILT_IN_POLICIES), tales()))
def test_memory_and_postgres_agree_on_generated_histories(tale: Tale) -> None:
    compare(POSTGRES, tale)


@pytest.mark.rule("CO-14", "CO-17")
@pytest.mark.parametrize(("kind", "seed"), [*((SQLITE, seed) for seed in range(6)), (POSTGRES, 0), (POSTGRES, 1)])
def test_stores_agree_on_long_histories(kind: str, seed: int) -> None:
    """Long enough for segments of several levels, from a fixed seed."""
    below = Random(seed).randrange
    policies: Sequence[Policy] = BUILT_IN_POLICIES if seed % 2 else draw_user_policies(below)
    author = HistoryGenerator(below, tuple(policies))
    author.key_count = 200
    steps = [step for _ in range(15) for step in author.history().steps]
    compare(kind, tale_of(author, steps))

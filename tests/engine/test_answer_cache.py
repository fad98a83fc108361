"""The answer cache is bounded, gives complete answers, and does not answer for keys that may be forgotten or erased."""

import asyncio
from pathlib import Path
from typing import Final

import pytest
from msgspec.structs import replace

import oncelog
from databases import BOTH_STORES, log_at
from deadlines import turns, until
from engine.observable_store import WatchedLog, do_nothing
from oncelog import (
    Committed,
    OnReuse,
    Order,
    Policy,
    Reason,
    Replayed,
    StoreUnavailableError,
    Tenant,
    event_scope,
    evicted_after,
    kept_for,
    verify,
)
from oncelog.core.policy import EVENTS, LEDGER, RUNS
from oncelog.core.values import Receipt, Remembered, Request, Submission, key_identity
from oncelog.engine import answer_cache
from oncelog.engine.answer_cache import AnswerCache
from oncelog.testing.clock import START_MS, ManualClock
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.writes import DAY_MS, HOUR_MS, event, identity, key, result, transaction
from storage.memory_store import MemoryStore

FOR_AN_HOUR: Final = Policy(
    name="for-an-hour", key_bytes=(1, 16), order=Order.STREAM, on_reuse=OnReuse.REFUSE, retention=kept_for(hours=1)
)
UNTIL_EVICTED: Final = Policy(
    name="until-evicted",
    key_bytes=(1, 16),
    order=Order.STREAM,
    on_reuse=OnReuse.REFUSE,
    retention=evicted_after(hours=1),
)


def write(policy: Policy, number: int) -> Submission:
    return Submission(policy=policy, scope="s", key=key(number), fingerprint=b"x", body=b"x")


def answer(number: int, log_time_ms: int = 0) -> Remembered:
    return Remembered(Receipt(0, number, 0, log_time_ms, number, 0), b"x")


# --- the cache in isolation ------------------------------------------------------------------------------


@pytest.mark.rule("LG-10", "CO-30")
def test_cache_evicts_the_least_recently_used_answer() -> None:
    cache = AnswerCache(entries_max=3, ttl_ms=DAY_MS)
    one, two, three, four = (identity(event(number)) for number in (1, 2, 3, 4))
    for number, name in enumerate((one, two, three), 1):
        cache.put(name, answer(number))
    assert cache.get(EVENTS, one, 0) == answer(1)
    cache.put(two, answer(2))
    cache.put(four, answer(4))
    assert len(cache.answers) == 3
    assert [name in cache.answers for name in (one, two, three, four)] == [True, True, False, True]


@pytest.mark.rule("CO-30")
def test_cache_of_size_zero_stores_nothing() -> None:
    cache = AnswerCache(entries_max=0, ttl_ms=DAY_MS)
    cache.put(identity(event(1)), answer(1))
    assert len(cache.answers) == 0


@pytest.mark.rule("LG-10")
def test_cached_answer_expires() -> None:
    cache = AnswerCache(entries_max=3, ttl_ms=1000)
    name = identity(event(1))
    cache.put(name, answer(1, log_time_ms=500))
    assert cache.get(EVENTS, name, 1499) is not None
    assert cache.get(EVENTS, name, 1500) is None
    assert name not in cache.answers


@pytest.mark.rule("CO-17", "LG-10")
@pytest.mark.parametrize("policy", [FOR_AN_HOUR, UNTIL_EVICTED, LEDGER])
def test_cache_does_not_answer_after_the_retention_of_the_policy(policy: Policy) -> None:
    cache = AnswerCache(entries_max=3, ttl_ms=100 * DAY_MS)
    name = (policy.name, "s", "", key(1))
    cache.put(name, answer(1, log_time_ms=7))
    assert cache.get(policy, name, 7 + policy.retention.ttl_ms - 1) is not None
    assert cache.get(policy, name, 7 + policy.retention.ttl_ms) is None


@pytest.mark.rule("CO-17")
def test_cache_answers_keys_without_retention_limit() -> None:
    cache = AnswerCache(entries_max=3, ttl_ms=100 * DAY_MS)
    cache.put(identity(event(1)), answer(1))
    assert cache.get(EVENTS, identity(event(1)), 99 * DAY_MS) is not None


@pytest.mark.rule("LG-10", "LG-18")
async def test_cached_answer_has_a_receipt_and_a_valid_proof() -> None:
    store = MemoryStore(clock=ManualClock())
    await store.open()
    cache = AnswerCache(entries_max=100, ttl_ms=DAY_MS)
    items = [transaction(number, number, content=f"t{number}") for number in range(1, 6)]
    items += [event(number) for number in range(1, 4)]
    decided = await store.commit([Request((item,)) for item in items])
    cache.put_batch(decided)
    for record, salt, item in zip(decided.changes.records, decided.salts, items, strict=True):
        remembered = cache.get(item.policy, key_identity(item), START_MS)
        assert remembered is not None
        assert remembered.receipt == record.receipt
        found = cache.find_attestation(record.receipt)
        assert found is not None
        assert found.salt == salt
        assert verify(record, found.salt, found.proof, found.block)
    assert cache.find_attestation(replace(decided.changes.records[0].receipt, height=9)) is None
    cache.clear()  # an erasure must remove the salt
    assert cache.find_attestation(decided.changes.records[0].receipt) is None


# --- in a log --------------------------------------------------------------------------------------------


@pytest.mark.rule("LG-10", "CO-30")
async def test_cached_proof_data_is_bounded() -> None:
    store = MemoryStore(clock=ManualClock())
    await store.open()
    cache = AnswerCache(entries_max=6, ttl_ms=DAY_MS)
    receipts = []
    for first in (1, 5, 9):
        items = [event(number) for number in range(first, first + 4)]
        decided = await store.commit([Request((item,)) for item in items])
        cache.put_batch(decided)
        receipts += [record.receipt for record in decided.changes.records]
    assert len(cache.answers) == 6
    assert [cache.find_attestation(receipt) is not None for receipt in receipts] == [False] * 8 + [True] * 4


@pytest.mark.rule("CO-15", "LG-10")
async def test_retry_is_answered_without_the_store(log: WatchedLog) -> None:
    for item in (event(1), transaction(1, 1), result(1), write(FOR_AN_HOUR, 1)):
        receipt = assert_committed(await log.submit(item))
        commits = len(log.store.batches)
        assert await log.submit(item) == Replayed(receipt)
        assert len(log.store.batches) == commits


@BOTH_STORES
@pytest.mark.rule("CO-15")
async def test_first_retry_after_a_restart_is_answered_from_the_store_and_the_next_from_memory(
    tmp_path: Path,
) -> None:
    path = log_at(tmp_path / "log.db")
    async with oncelog.open(path) as log:
        receipt = assert_committed(await log.submit(event(1)))
    async with oncelog.open(path) as log:
        assert len(log._cache.answers) == 0
        assert await log.submit(event(1)) == Replayed(receipt)
        assert len(log._cache.answers) == 1
        assert await log.submit(event(1)) == Replayed(receipt)


@pytest.mark.rule("CO-17")
@pytest.mark.parametrize(("policy", "expected"), [(FOR_AN_HOUR, Committed), (UNTIL_EVICTED, Replayed)])
async def test_store_decides_retries_that_are_too_old_for_the_cache(
    log: WatchedLog, policy: Policy, expected: type
) -> None:
    await log.submit(write(policy, 1))
    log.clock.advance(HOUR_MS)
    assert isinstance(await log.submit(write(policy, 1)), expected)
    assert len(log.store.batches) == 2


@pytest.mark.rule("CO-17")
async def test_expired_key_stays_expired_after_the_clock_is_set_back(log: WatchedLog) -> None:
    await log.submit(write(FOR_AN_HOUR, 1))
    log.clock.advance(2 * HOUR_MS)
    await log.submit(write(FOR_AN_HOUR, 2))  # log time advances by two hours and does not decrease
    log.clock.jump(-2 * HOUR_MS)
    assert assert_committed(await log.submit(write(FOR_AN_HOUR, 1))).sequence == 3


@pytest.mark.rule("CO-17", "CO-32")
async def test_expired_key_stays_expired_while_the_queue_is_full() -> None:
    async with WatchedLog(queue_items_max=1, cache_entries_max=0) as log:
        await log.submit(write(FOR_AN_HOUR, 1))
        log.clock.advance(2 * HOUR_MS)
        await log.submit(write(FOR_AN_HOUR, 2))
        log.clock.jump(-2 * HOUR_MS)
        log.hold_commits()
        accepted = log.submit_concurrently(event(1))
        await log.gate.reached.wait()
        retry = log.submit_concurrently(write(FOR_AN_HOUR, 1))
        await turns()
        log.gate.open()
        assert_refused(await retry[0], Reason.BUSY)
        await accepted[0]


@pytest.mark.rule("CO-41")
@pytest.mark.parametrize("policy", [EVENTS, RUNS])
async def test_erasure_clears_the_cache(log: WatchedLog, policy: Policy) -> None:
    item = event(1) if policy is EVENTS else result(1)
    receipt = assert_committed(await log.submit(item))
    assert await log.erase(key=item.key, policy=policy, scope=item.scope) == 1
    for _ in range(2):  # from the store, then from memory
        assert await log.submit(item) == Replayed(receipt, erased=True)


@pytest.mark.rule("CO-41")
async def test_answer_decided_before_an_erasure_is_not_cached_after_it(log: WatchedLog) -> None:
    await log.submit(event(1))
    log._cache.clear()
    log.hold_commits()
    first = log.submit_concurrently(event(1))
    await log.gate.reached.wait()
    log.submit_concurrently(event(2))
    await turns()
    log.gate.open()
    log.gate.shut()
    await until(lambda: len(log.store.batches) == 3)  # the first verdict is decided, and the next commit is blocked
    assert await log.erase(key=key(1)) == 1
    log.gate.open()
    await first[0]
    assert assert_replayed(await log.submit(event(1))).erased


@BOTH_STORES
@pytest.mark.rule("CO-41")
async def test_erasure_by_another_process_clears_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_cache, "ERASURES_POLL_MS", 1)
    path = log_at(tmp_path / "log.db")
    async with oncelog.open(path) as one, oncelog.open(path) as other:
        receipt = assert_committed(await one.submit(event(1)))
        assert await other.erase(key=key(1)) == 1
        await until(lambda: len(one._cache.answers) == 0)
        assert await one.submit(event(1)) == Replayed(receipt, erased=True)


@pytest.mark.rule("CO-41")
@pytest.mark.parametrize("error", [StoreUnavailableError("away"), OSError("whatever")])
async def test_failed_poll_for_erasures_is_retried(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer_cache, "ERASURES_POLL_MS", 1)
    failed = asyncio.Event()

    async def fail() -> None:
        failed.set()
        log.store.before_erasures = do_nothing
        raise error

    async with WatchedLog() as log:
        await log.submit(event(1))
        log.store.before_erasures = fail
        await failed.wait()
        await log.store.inner.erase(0, [1])  # by another process
        await until(lambda: len(log._cache.answers) == 0)
        assert assert_replayed(await log.submit(event(1))).erased


@pytest.mark.rule("CO-14", "EV-4")
@pytest.mark.parametrize("tenants", [(), (Tenant("acme", own_ids=True),)], ids=["plain", "own ids"])
async def test_retry_in_the_scope_of_a_tenant_is_answered_from_memory(tenants: tuple[Tenant, ...]) -> None:
    async with WatchedLog() as log:
        await log.set_tenants(tenants)
        retry = event(1, scope=event_scope("acme"), partitions=("acme/x",))
        await log.commit_elsewhere(retry)
        known = assert_replayed(await log.submit(retry))
        asked = len(log.store.batches)
        assert await log.submit(retry) == known
        assert len(log.store.batches) == asked


@pytest.mark.rule("EV-4", "EV-5")
async def test_other_content_under_a_cached_id_is_decided_by_the_store() -> None:
    """Another server committed the event in its tenant's scope; this server caches the same id for another tenant."""
    async with WatchedLog() as log:
        assert_committed(await log.submit(event(1, "of another tenant", partitions=("other/x",))))
        await log.set_tenants((Tenant("acme", own_ids=True),))
        own = event(1, "own", scope=event_scope("acme"), partitions=("acme/x",))
        await log.commit_elsewhere(own)
        known = assert_replayed(await log.submit(replace(own, scope="")))
        assert known == assert_replayed(await log.submit(own))


@pytest.mark.rule("EV-4", "EV-5")
async def test_answer_from_before_the_switch_does_not_hide_a_new_event_with_its_id() -> None:
    async with WatchedLog() as log:
        first = assert_committed(await log.submit(event(1, "before", partitions=("acme/x",))))
        await log.set_tenants((Tenant("acme", own_ids=True),))
        before = event(1, "before", scope=event_scope("acme"), partitions=("acme/x",))
        after = event(1, "after", scope=event_scope("acme"), partitions=("acme/x",))
        assert assert_replayed(await log.submit(before)).receipt == first
        second = assert_committed(await log.submit(after))
        assert [assert_replayed(await log.submit(one)).receipt for one in (before, after, before)] == [
            first,
            second,
            first,
        ]

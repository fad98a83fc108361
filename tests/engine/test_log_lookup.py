"""Lookup of identities, erasure and proofs."""

from typing import Any

import pytest
from msgspec.structs import replace

import oncelog
from engine.observable_store import PAYMENTS, Open, uuid
from oncelog import (
    CHAT,
    LEDGER,
    RUNS,
    Limits,
    Log,
    Outcome,
    Reason,
    Receipt,
    Release,
    Replayed,
    SetMember,
    Settings,
    Status,
    verify,
    verify_header,
)
from oncelog.core.internal_records import is_internal
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.writes import (
    CAMPAIGN,
    CHANNEL,
    DAY_MS,
    ORGANISATION,
    claim,
    event,
    key,
    message,
    result,
    transaction,
)

# --- lookup ----------------------------------------------------------------------------------------------


def describe(outcome: Outcome) -> tuple[Status, str]:
    return outcome.status, outcome.why


async def test_lookup_of_a_committed_key_returns_its_record(open_log: Open) -> None:
    async with open_log() as log:
        receipt = assert_committed(await log.submit(oncelog.event(uuid(1), {"type": "t"}, ["p"])))
        await log.submit(SetMember(CHANNEL, "user:ann"))
        await log.submit(message(1))
        for name in (uuid(1), uuid(1).bytes):
            found = await log.lookup(name)
            assert describe(found) == (Status.COMMITTED, "committed as position 1")
            assert found.receipt == receipt
            assert found.record is not None
            assert found.record.body == b'{"type":"t"}'
        sent = await log.lookup(key(1), policy=CHAT, scope=CHANNEL)
        assert describe(sent) == (Status.COMMITTED, f"committed as sequence 1 of {CHANNEL!r}")
        await log.erase(key=uuid(1))
        assert (await log.lookup(uuid(1))).why.endswith("and its content has been erased since")


async def test_lookup_of_an_uncommitted_key_is_unknown(open_log: Open) -> None:
    async with open_log() as log:
        await log.submit(event(1, expected_position=7))
        for found in (await log.lookup(key(1)), await log.lookup(key(9), policy=CHAT, scope=CHANNEL)):
            assert found.status is Status.UNKNOWN
            assert "it was refused" in found.why
            assert found.record is None


@pytest.mark.rule("CO-17")
async def test_lookup_reports_keys_forgotten_by_age(open_log: Open) -> None:
    clock = ManualClock()
    async with open_log(clock) as log:
        await log.submit(SetMember(CHANNEL, "user:ann"))
        receipt = assert_committed(await log.submit(message(1)))
        clock.advance(7 * DAY_MS - 1)
        assert (await log.lookup(key(1), policy=CHAT, scope=CHANNEL)).status is Status.COMMITTED
        clock.advance(1)
        found = await log.lookup(key(1), policy=CHAT, scope=CHANNEL)
        assert (found.status, found.receipt) == (Status.FORGOTTEN, receipt)
        assert f"forgotten after {7 * DAY_MS} ms (policy chat)" in found.why


@pytest.mark.rule("CO-17", "LG-15")
async def test_lookup_reports_keys_forgotten_by_eviction(open_log: Open) -> None:
    clock = ManualClock()
    async with open_log(clock, settings=Settings(eviction_interval=2)) as log:
        await log.submit(transaction(1, 1))
        clock.advance(DAY_MS + 1)
        found = await log.lookup(key(1), policy=LEDGER, scope=ORGANISATION, client="c1")
        assert found.status is Status.COMMITTED  # old enough, but not evicted yet
        await log.submit(transaction(2, 1, client="c2"))
        found = await log.lookup(key(1), policy=LEDGER, scope=ORGANISATION, client="c1")
        assert found.status is Status.FORGOTTEN
        assert found.why == (
            f"committed as sequence 1 of {ORGANISATION!r}, but its key was evicted after {DAY_MS} ms (policy ledger), "
            "and so was its client (whose last sequence is now 0): a retry with client sequence 1 is a new write, "
            "a higher one is refused"
        )
        other = await log.lookup(key(2), policy=LEDGER, scope=ORGANISATION, client="c2")
        assert other.status is Status.COMMITTED


@pytest.mark.rule("LG-13", "LG-16")
async def test_lookup_of_an_evicted_key_predicts_the_outcome_of_a_retry(open_log: Open) -> None:
    """Retries confirm each statement of the lookup."""

    async def lookup_reason(number: int) -> str:
        found = await log.lookup(key(number), policy=LEDGER, scope=ORGANISATION, client="c1")
        assert found.status is Status.FORGOTTEN
        return found.why

    clock = ManualClock()
    async with open_log(clock, settings=Settings(eviction_interval=2)) as log:
        first, second = transaction(1, 1), transaction(2, 2)
        await log.submit(first)
        await log.submit(second)
        clock.advance(DAY_MS)
        await log.submit(transaction(3, 3))
        clock.advance(1)
        await log.submit(transaction(9, 1, client="c2"))  # position 4 evicts the keys 1 and 2, but not the client
        assert (await lookup_reason(1)).endswith(
            ": a retry with client sequence 1 is answered as already committed if it equals the client's newest "
            "write with that sequence, and refused otherwise; a retry with client sequence 4 is a new write"
        )
        assert isinstance(await log.submit(first), Replayed)
        assert_refused(await log.submit(transaction(1, 1, content="another")), Reason.SEQUENCE_REUSED)
        clock.advance(DAY_MS + 1)
        await log.submit(transaction(10, 2, client="c2"))
        await log.submit(transaction(11, 3, client="c2"))  # position 6 evicts the client
        await log.submit(transaction(4, 1))
        assert "(whose last sequence is now 1): a retry with client sequence 2 is a new write" in await lookup_reason(3)
        assert_refused(await log.submit(transaction(3, 3)), Reason.SEQUENCE_GAP)
        assert_committed(await log.submit(second))


@pytest.mark.rule("RU-5")
async def test_lookup_reports_leases_and_their_outcome(open_log: Open) -> None:
    clock = ManualClock()

    async def lookup_status(number: int) -> tuple[Status, str]:
        return describe(await log.lookup(key(number), policy=RUNS, scope=CAMPAIGN))

    async with open_log(clock) as log:
        for number in (1, 2, 3):
            await log.submit(claim(number, "ann", lease_ms=1000))
        clock.advance(400)
        assert await lookup_status(1) == (
            Status.LEASED,
            "no record yet: the work runs under lease 1, which expires in 600 ms",
        )
        await log.submit(Release(policy=RUNS, scope=CAMPAIGN, key=key(2), holder="ann", fence=2, failure=b"boom"))
        await log.submit(Release(policy=RUNS, scope=CAMPAIGN, key=key(3), holder="ann", fence=3))
        assert await lookup_status(2) == (
            Status.LEASED,
            "no record: the work under lease 2 failed, and no caller has taken it over yet",
        )
        assert await lookup_status(3) == (
            Status.LEASED,
            "no record: the work under lease 3 was released, and no caller has taken it over yet",
        )
        clock.advance(700)
        assert await lookup_status(1) == (
            Status.LEASED,
            "no record: lease 1 expired 100 ms ago, and no caller has taken it over yet",
        )
        await log.submit(result(1, "ann", 1))
        assert (await lookup_status(1))[0] is Status.COMMITTED
        clock.advance(2 * DAY_MS)
        assert (await lookup_status(3))[0] is Status.UNKNOWN


# --- erasure and proofs ----------------------------------------------------------------------------------


async def _has_valid_proof(log: Log, receipt: Receipt) -> bool:
    proven = await log.prove(receipt)
    if proven.record.erased:
        assert proven.salt == b""
        return verify_header(proven.record, proven.body_hash, proven.proof, proven.block)
    return verify(proven.record, proven.salt, proven.proof, proven.block)


@pytest.mark.rule("CO-41", "LG-18")
async def test_erasing_by_key_keeps_position_identity_and_proof(open_log: Open) -> None:
    async with open_log() as log:
        verdicts = await log.submit_many([event(number, f"secret {number}") for number in (1, 2, 3)])
        receipts = [assert_committed(verdict) for verdict in verdicts]
        assert await log.erase(key=key(2)) == 1
        assert await log.erase(key=key(2)) == 0
        assert await log.erase(key=key(9)) == 0
        records = [record for record in (await log.read()).records if not is_internal(record)]
        assert [record.body for record in records] == [b"secret 1", b"", b"secret 3"]
        assert [record.erased for record in records] == [False, True, False]
        assert all([await _has_valid_proof(log, receipt) for receipt in receipts])
        assert await log.submit(event(2, "secret 2")) == Replayed(receipts[1], erased=True)
        assert_refused(await log.submit(event(2, "other")), Reason.IDENTITY_REUSED)
        assert await log.submit(event(3, "secret 3")) == Replayed(receipts[2])


@pytest.mark.rule("CO-41")
async def test_erasing_a_key_erases_every_record_written_under_it(open_log: Open) -> None:
    clock = ManualClock()
    async with open_log(clock=clock) as log:
        await log.submit(SetMember(CHANNEL, "user:ann"))
        for text in ("first", "second"):
            assert_committed(await log.submit(message(1, text)))
            clock.advance(8 * DAY_MS)
        assert await log.erase(key=key(1), policy=CHAT, scope=CHANNEL) == 2
        assert [record.body for record in (await log.read(stream=CHANNEL)).records] == [b"", b""]


@pytest.mark.rule("CO-41")
async def test_erasing_a_partition_erases_exactly_its_records(open_log: Open) -> None:
    async with open_log(policies=[PAYMENTS], limits=Limits(request_items_max=2000)) as log:
        names = [("a",)] * 600 + [("a",), ("b",), ("a", "b")] * 200
        await log.submit_many([event(number, partitions=name) for number, name in enumerate(names, 1)])
        # Records of a stream in another lane can be in the partition too.
        paid = replace(oncelog.write(PAYMENTS, "account/1", b"1", {"to": "ann"}), partitions=("a",))
        receipt = assert_committed(await log.submit(paid))
        assert receipt.lane
        assert await log.erase(partition="a") == 1001
        kept = [record async for record in _read_all(log) if not is_internal(record)]
        assert {record.partitions for record in kept if not record.erased} == {("b",)}
        assert sum(record.erased for record in kept) == 1000
        (payment,) = (await log.read(stream="account/1")).records
        assert payment.erased
        assert assert_replayed(await log.submit(paid)).erased
        assert await log.erase(partition="a") == 0


async def _read_all(log: Log) -> Any:
    page = await log.read()
    while True:
        for record in page.records:
            yield record
        if not page.has_more:
            return
        page = await log.read(after=page.cursor, upto=page.upto)


@pytest.mark.rule("CO-41")
async def test_erasing_a_stream_keeps_other_streams(open_log: Open) -> None:
    async with open_log(settings=Settings(lanes=1)) as log:
        for channel in (CHANNEL, "chat/2"):
            await log.submit(SetMember(channel, "user:ann"))
            await log.submit_many([message(number, scope=channel) for number in (1, 2)])
        await log.submit(event(1))
        assert await log.erase(stream=CHANNEL) == 2
        records = [record for record in (await log.read(lane=1)).records if not is_internal(record)]
        assert [record.erased for record in records] == [True, True, False, False]
        assert assert_replayed(await log.submit(message(1))).erased
        assert not assert_replayed(await log.submit(message(1, scope="chat/2"))).erased


@pytest.mark.rule("LG-18")
async def test_proof_of_an_unknown_receipt_is_refused(open_log: Open) -> None:
    async with open_log() as log:
        receipt = assert_committed(await log.submit(event(1)))
        assert await _has_valid_proof(log, receipt)
        others = [
            replace(receipt, height=2),
            replace(receipt, position=2),
            replace(receipt, lane=3),
            replace(receipt, log_time_ms=receipt.log_time_ms + 1),
        ]
        for other in others:
            with pytest.raises(LookupError):
                await log.prove(other)

"""The log that an application opens: in memory and in a file it gives the same answers."""

import asyncio
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import pytest
from msgspec.structs import replace

import oncelog
from databases import BOTH_STORES, address_of, log_at
from engine.watched import positions, run
from oncelog import (
    CHAT,
    LEDGER,
    RUNS,
    Applied,
    ClosedError,
    Committed,
    Consumer,
    Cursor,
    HistoryChangedError,
    Limits,
    Log,
    Mode,
    OnReuse,
    Order,
    Outcome,
    Policy,
    PolicyError,
    Reason,
    Receipt,
    Refused,
    Release,
    Replayed,
    SetMember,
    Settings,
    SettingsError,
    Status,
    kept_for,
    verify,
    verify_header,
)
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.writes import (
    CAMPAIGN,
    CHANNEL,
    DAY_MS,
    ORGANISATION,
    claim,
    committed,
    event,
    key,
    message,
    refused,
    replayed,
    result,
    transaction,
)

PAYMENTS: Final = Policy(
    name="payments", key_bytes=(1, 64), order=Order.STREAM, on_reuse=OnReuse.REFUSE, retention=kept_for(hours=24)
)
Open = Callable[..., Log]


@pytest.fixture
def open_log(place: str) -> Open:
    """Opens a log on a clock that is moved by hand."""

    def opened(clock: ManualClock | None = None, **more: Any) -> Log:
        return oncelog.open(place, clock=clock or ManualClock(), **more)

    return opened


def uuid(number: int) -> UUID:
    return UUID(int=number)


# --- cursors ---------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-40")
def test_a_cursor_is_kept_as_text() -> None:
    for cursor in (Cursor(0, "abc"), Cursor(17, "ab", "stream/a:b"), Cursor(3, "ab", "lane/3"), Cursor(2**53, "é")):
        assert Cursor.parse(str(cursor)) == cursor


@pytest.mark.rule("CO-40")
@pytest.mark.parametrize("text", ["", ":", "12", ":12", "abc:", "abc:-1", "abc:1.0", "abc:1 ", "abc:x", "abc:٣", "a:²"])
def test_what_is_no_cursor_is_said_to_be_none(text: str) -> None:
    with pytest.raises(ValueError) as raised:
        Cursor.parse(text)
    assert "EPOCH:POSITION" in str(raised.value)


@pytest.mark.rule("CO-40")
def test_a_cursor_of_another_epoch_is_answered_with_what_this_history_has(open_log: Open) -> None:
    async def main() -> None:
        async with open_log(settings=Settings(lanes=1)) as log:
            await log.submit(SetMember(CHANNEL, "user:ann"))
            await log.submit_many([event(number) for number in (1, 2, 3)])
            await log.submit_many([result(number) for number in (1, 2)])
            await log.submit(message(1))
            foreign = Cursor(1, "another")
            reads: list[tuple[int, Any]] = [
                (3, log.read(after=foreign)),
                (3, log.read(partition="p", after=foreign)),
                (3, log.read(lane=1, after=foreign)),
                (2, log.read(stream=CAMPAIGN, after=foreign)),
                (1, anext(log.follow(stream=CHANNEL, after=foreign))),
                (3, log.commit_cursor("c", foreign)),
                (2, log.commit_cursor("c", foreign, stream=CAMPAIGN)),
                (0, log.read(stream="nobody", after=foreign)),
            ]
            for newest, read in reads:
                with pytest.raises(HistoryChangedError) as raised:
                    await read
                assert (raised.value.epoch, raised.value.newest) == (log.epoch, newest)
            assert positions((await log.read(after=Cursor(1, log.epoch))).records) == [2, 3]

    run(main())


@pytest.mark.rule("CO-40")
def test_a_cursor_ahead_of_the_log_is_another_logs(open_log: Open) -> None:
    async def main() -> None:
        async with open_log() as log:
            await log.submit(event(1))
            assert (await log.read(after=1)).records == []
            for after in (2, 2**62, Cursor(2, log.epoch)):
                with pytest.raises(HistoryChangedError) as raised:
                    await log.read(after=after)
                assert raised.value.newest == 1

    run(main())


# --- reading ---------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-11", "EV-12")
@pytest.mark.parametrize("where", [{}, {"partition": "a"}, {"partitions": ["a", "b"]}])
def test_paging_with_a_bound_ends_however_fast_the_log_grows(open_log: Open, where: dict[str, Any]) -> None:
    async def main() -> None:
        async with open_log() as log:
            await log.submit_many([event(number, partitions=("a",)) for number in range(1, 11)])
            await log.submit(event(11, partitions=("c",)))
            page = await log.read(**where, limit=3)
            assert (page.upto, page.newest) == (11, 11)
            seen = positions(page.records)
            pages = 1
            while page.has_more:
                await log.submit_many([event(100 * pages + number, partitions=("a",)) for number in range(10)])
                page = await log.read(**where, after=page.cursor, upto=page.upto, limit=3)
                seen += positions(page.records)
                pages += 1
            assert seen == list(range(1, 12 if not where else 11))
            assert pages == 4
            assert page.cursor == Cursor(11, log.epoch)  # the bound, though the last record of it did not match
            assert page.newest > page.upto

    run(main())


@pytest.mark.rule("EV-12")
def test_a_cursor_moves_though_nothing_matched(open_log: Open) -> None:
    async def main() -> None:
        async with open_log() as log:
            await log.submit_many([event(number, partitions=("a",)) for number in (1, 2)])
            page = await log.read(partition="nobody")
            assert (page.records, page.cursor.position, page.has_more) == ([], 2, False)

    run(main())


@pytest.mark.rule("EV-11", "CO-30")
def test_page_sizes_are_clamped(open_log: Open) -> None:
    async def main() -> None:
        async with open_log(limits=Limits(page_records_max=4, page_bytes_max=20)) as log:
            await log.submit_many([event(number) for number in range(1, 8)])
            for limit, count in ((-5, 1), (0, 1), (1, 1), (3, 3), (4, 4), (5, 4), (10**9, 4)):
                page = await log.read(limit=limit)
                assert len(page.records) == count
                assert page.has_more
            await log.submit_many([event(number, "x" * 15) for number in (8, 9)])
            page = await log.read(after=7)
            assert (positions(page.records), page.has_more) == ([8], True)  # by its bytes, but never empty

    run(main())


@pytest.mark.rule("EV-6", "CO-5")
def test_partitions_are_one_in_all_spellings(open_log: Open) -> None:
    composed, decomposed = unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")

    async def main() -> None:
        async with open_log() as log:
            await log.submit(oncelog.event(uuid(1), {"type": "t"}, [decomposed]))
            for name in (composed, decomposed):
                assert positions((await log.read(partition=name)).records) == [1]
                assert positions((await log.read(partitions=[name, "x"])).records) == [1]
                async with log.follow(partition=name) as records:
                    assert (await anext(records)).partitions == (composed,)
                subscription = await log.subscribe(partitions=[name])
                assert subscription.partitions == frozenset({composed})
            assert await log.erase(partition=decomposed) == 1

    run(main())


def test_what_is_read_is_named_once(open_log: Open) -> None:
    text: Any = "orders"

    async def main() -> None:
        async with open_log() as log:
            with pytest.raises(TypeError, match="use partition"):
                await log.read(partitions=text)
            with pytest.raises(ValueError, match="name one of"):
                await log.read(partition="a", stream="s")
            with pytest.raises(ValueError, match="name one of"):
                log.follow(partitions=["a"], partition="b")
            with pytest.raises(ValueError, match="one of key, partition and stream"):
                await log.erase()
            with pytest.raises(ValueError, match="one of key, partition and stream"):
                await log.erase(key=key(1), partition="a")

    run(main())


# --- named consumers -------------------------------------------------------------------------------------


@pytest.mark.rule("CO-42")
def test_a_consumer_keeps_its_cursor_and_its_lag_is_visible(open_log: Open) -> None:
    async def main() -> None:
        async with open_log() as log:
            await log.submit_many([event(number) for number in range(1, 6)])
            assert await log.cursor_of("mailer") is None
            assert await log.commit_cursor("mailer", 2) == Applied(changed=True)
            assert await log.commit_cursor("mailer", Cursor(3, log.epoch)) == Applied(changed=True)
            assert await log.commit_cursor("mailer", 1) == Applied(changed=False)  # forward only
            assert await log.cursor_of("mailer") == Cursor(3, log.epoch)
            assert await log.consumers() == [Consumer("", "mailer", 3, 2)]
            assert await log.commit_cursor("mailer", 1, rewind=True) == Applied(changed=True)
            assert await log.cursor_of("mailer") == Cursor(1, log.epoch)
            ahead = await log.commit_cursor("mailer", 6)
            assert refused(ahead, Reason.INVALID_CURSOR).current == 5
            assert await log.commit_cursor("mailer", None) == Applied(changed=True)
            assert await log.commit_cursor("mailer", None) == Applied(changed=False)
            assert await log.consumers() == []

    run(main())


@pytest.mark.rule("CO-42")
def test_a_consumer_of_a_stream_counts_its_sequences(open_log: Open) -> None:
    async def main() -> None:
        async with open_log(settings=Settings(lanes=1)) as log:
            await log.submit(SetMember(CHANNEL, "user:ann"))
            await log.submit_many([result(number) for number in range(1, 6)])
            await log.submit_many([message(number) for number in range(1, 4)])
            await log.commit_cursor("bot", 2, stream=CHANNEL)
            await log.commit_cursor("bot", 0)
            assert await log.cursor_of("bot", CHANNEL) == Cursor(2, log.epoch, f"stream/{CHANNEL}")
            assert await log.consumers() == [Consumer("", "bot", 0, 0), Consumer(CHANNEL, "bot", 2, 1)]
            async with log.follow(stream=CHANNEL, consumer="bot") as records:
                assert (await anext(records)).sequence == 3

    run(main())


@pytest.mark.rule("CO-42")
def test_following_as_a_consumer_begins_where_it_was(open_log: Open) -> None:
    async def main() -> None:
        async with open_log() as log:
            await log.submit_many([event(number) for number in range(1, 5)])
            async with log.follow(consumer="mailer") as records:
                first, second = await anext(records), await anext(records)
                assert (first.position, second.position) == (1, 2)
                await log.commit_cursor("mailer", second.position)
            async with log.follow(consumer="mailer") as records:
                assert (await anext(records)).position == 3
            with pytest.raises(ValueError, match="lane 0"):
                await anext(log.follow(lane=1, consumer="mailer"))

    run(main())


# --- what became of an identity ----------------------------------------------------------------------------


def said(outcome: Outcome) -> tuple[Status, str]:
    return outcome.status, outcome.why


def test_what_was_committed_is_found_with_its_record(open_log: Open) -> None:
    async def main() -> None:
        async with open_log() as log:
            receipt = committed(await log.submit(oncelog.event(uuid(1), {"type": "t"}, ["p"])))
            await log.submit(SetMember(CHANNEL, "user:ann"))
            await log.submit(message(1))
            for name in (uuid(1), uuid(1).bytes):
                found = await log.lookup(name)
                assert said(found) == (Status.COMMITTED, "committed as position 1")
                assert found.receipt == receipt
                assert found.record is not None
                assert found.record.body == b'{"type":"t"}'
            sent = await log.lookup(key(1), policy=CHAT, scope=CHANNEL)
            assert said(sent) == (Status.COMMITTED, f"committed as sequence 1 of {CHANNEL!r}")
            await log.erase(key=uuid(1))
            assert (await log.lookup(uuid(1))).why.endswith("and its content has been erased since")

    run(main())


def test_what_is_not_there_is_unknown(open_log: Open) -> None:
    async def main() -> None:
        async with open_log() as log:
            await log.submit(event(1, expected_position=7))
            for found in (await log.lookup(key(1)), await log.lookup(key(9), policy=CHAT, scope=CHANNEL)):
                assert found.status is Status.UNKNOWN
                assert "it was refused" in found.why
                assert found.record is None

    run(main())


@pytest.mark.rule("CO-17")
def test_what_was_forgotten_by_age_is_said_to_be(open_log: Open) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with open_log(clock) as log:
            await log.submit(SetMember(CHANNEL, "user:ann"))
            receipt = committed(await log.submit(message(1)))
            clock.advance(7 * DAY_MS - 1)
            assert (await log.lookup(key(1), policy=CHAT, scope=CHANNEL)).status is Status.COMMITTED
            clock.advance(1)
            found = await log.lookup(key(1), policy=CHAT, scope=CHANNEL)
            assert (found.status, found.receipt) == (Status.FORGOTTEN, receipt)
            assert f"forgotten after {7 * DAY_MS} ms (policy chat)" in found.why

    run(main())


@pytest.mark.rule("CO-17", "LG-15")
def test_what_was_forgotten_by_an_eviction_is_said_to_be(open_log: Open) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with open_log(clock, settings=Settings(eviction_interval=2)) as log:
            await log.submit(transaction(1, 1))
            clock.advance(DAY_MS + 1)
            found = await log.lookup(key(1), policy=LEDGER, scope=ORGANISATION, client="c1")
            assert found.status is Status.COMMITTED  # old enough, but no eviction has been there
            await log.submit(transaction(2, 1, client="c2"))
            found = await log.lookup(key(1), policy=LEDGER, scope=ORGANISATION, client="c1")
            assert found.status is Status.FORGOTTEN
            assert f"by an eviction after {DAY_MS} ms (policy ledger)" in found.why
            other = await log.lookup(key(2), policy=LEDGER, scope=ORGANISATION, client="c2")
            assert other.status is Status.COMMITTED

    run(main())


@pytest.mark.rule("RU-5")
def test_what_is_being_worked_on_is_said_to_be_and_how_it_ended(open_log: Open) -> None:
    async def main() -> None:
        clock = ManualClock()

        async def look(number: int) -> tuple[Status, str]:
            return said(await log.lookup(key(number), policy=RUNS, scope=CAMPAIGN))

        async with open_log(clock) as log:
            for number in (1, 2, 3):
                await log.submit(claim(number, "ann", lease_ms=1000))
            clock.advance(400)
            assert await look(1) == (
                Status.LEASED,
                "no record yet: work on it goes on under lease 1, for 600 ms more",
            )
            await log.submit(Release(policy=RUNS, scope=CAMPAIGN, key=key(2), holder="ann", fence=2, failure=b"boom"))
            await log.submit(Release(policy=RUNS, scope=CAMPAIGN, key=key(3), holder="ann", fence=3))
            assert await look(2) == (
                Status.LEASED,
                "no record: work on it under lease 2 failed, and nobody has taken it over yet",
            )
            assert await look(3) == (
                Status.LEASED,
                "no record: work on it under lease 3 was given up, and nobody has taken it over yet",
            )
            clock.advance(700)
            assert await look(1) == (
                Status.LEASED,
                "no record: lease 1 ended 100 ms ago, and nobody has taken it over yet",
            )
            await log.submit(result(1, "ann", 1))
            assert (await look(1))[0] is Status.COMMITTED
            clock.advance(2 * DAY_MS)
            assert (await look(3))[0] is Status.UNKNOWN

    run(main())


# --- erasure and proofs --------------------------------------------------------------------------------------


async def _is_proven(log: Log, receipt: Receipt) -> bool:
    proven = await log.prove(receipt)
    if proven.record.erased:
        assert proven.salt == b""
        return verify_header(proven.record, proven.body_hash, proven.proof, proven.block)
    return verify(proven.record, proven.salt, proven.proof, proven.block)


@pytest.mark.rule("CO-41", "LG-18")
def test_erasing_by_key_leaves_place_identity_and_proof(open_log: Open) -> None:
    async def main() -> None:
        async with open_log() as log:
            verdicts = await log.submit_many([event(number, f"secret {number}") for number in (1, 2, 3)])
            receipts = [committed(verdict) for verdict in verdicts]
            assert await log.erase(key=key(2)) == 1
            assert await log.erase(key=key(2)) == 0
            assert await log.erase(key=key(9)) == 0
            records = (await log.read()).records
            assert [record.body for record in records] == [b"secret 1", b"", b"secret 3"]
            assert [record.erased for record in records] == [False, True, False]
            assert all([await _is_proven(log, receipt) for receipt in receipts])
            assert await log.submit(event(2, "secret 2")) == Replayed(receipts[1], erased=True)
            refused(await log.submit(event(2, "other")), Reason.IDENTITY_REUSED)
            assert await log.submit(event(3, "secret 3")) == Replayed(receipts[2])

    run(main())


@pytest.mark.rule("CO-41")
def test_erasing_a_key_takes_all_that_was_ever_written_under_it(open_log: Open) -> None:
    async def main() -> None:
        clock = ManualClock()
        async with open_log(clock=clock) as log:
            await log.submit(SetMember(CHANNEL, "user:ann"))
            for text in ("first", "second"):
                committed(await log.submit(message(1, text)))
                clock.advance(8 * DAY_MS)
            assert await log.erase(key=key(1), policy=CHAT, scope=CHANNEL) == 2
            assert [record.body for record in (await log.read(stream=CHANNEL)).records] == [b"", b""]

    run(main())


@pytest.mark.rule("CO-41")
def test_erasing_a_partition_takes_all_of_it_and_nothing_else(open_log: Open) -> None:
    async def main() -> None:
        async with open_log(policies=[PAYMENTS], limits=Limits(request_items_max=2000)) as log:
            names = [("a",)] * 600 + [("a",), ("b",), ("a", "b")] * 200
            await log.submit_many([event(number, partitions=name) for number, name in enumerate(names, 1)])
            # A stream's record may be in a partition too, in another lane.
            paid = replace(oncelog.write(PAYMENTS, "account/1", b"1", {"to": "ann"}), partitions=("a",))
            receipt = committed(await log.submit(paid))
            assert receipt.lane
            assert await log.erase(partition="a") == 1001
            kept = [record async for record in _all(log)]
            assert {record.partitions for record in kept if not record.erased} == {("b",)}
            assert sum(record.erased for record in kept) == 1000
            (payment,) = (await log.read(stream="account/1")).records
            assert payment.erased
            assert replayed(await log.submit(paid)).erased
            assert await log.erase(partition="a") == 0

    run(main())


async def _all(log: Log) -> Any:
    page = await log.read()
    while True:
        for record in page.records:
            yield record
        if not page.has_more:
            return
        page = await log.read(after=page.cursor, upto=page.upto)


@pytest.mark.rule("CO-41")
def test_erasing_a_stream_leaves_the_others(open_log: Open) -> None:
    async def main() -> None:
        async with open_log(settings=Settings(lanes=1)) as log:
            for channel in (CHANNEL, "chat/2"):
                await log.submit(SetMember(channel, "user:ann"))
                await log.submit_many([message(number, scope=channel) for number in (1, 2)])
            await log.submit(event(1))
            assert await log.erase(stream=CHANNEL) == 2
            assert [record.erased for record in (await log.read(lane=1)).records] == [True, True, False, False]
            assert replayed(await log.submit(message(1))).erased
            assert not replayed(await log.submit(message(1, scope="chat/2"))).erased

    run(main())


@pytest.mark.rule("LG-18")
def test_a_receipt_of_another_log_proves_nothing(open_log: Open) -> None:
    async def main() -> None:
        async with open_log() as log:
            receipt = committed(await log.submit(event(1)))
            assert await _is_proven(log, receipt)
            others = [
                replace(receipt, height=2),
                replace(receipt, position=2),
                replace(receipt, lane=3),
                replace(receipt, log_time_ms=receipt.log_time_ms + 1),
            ]
            for other in others:
                with pytest.raises(LookupError):
                    await log.prove(other)

    run(main())


# --- policies ------------------------------------------------------------------------------------------------


def test_a_policy_is_declared_at_open_or_at_first_use(open_log: Open) -> None:
    other = replace(PAYMENTS, retention=kept_for(hours=1))

    async def main() -> None:
        async with open_log(policies=[PAYMENTS]) as log:
            assert log.policies["payments"] == PAYMENTS
            refunds = replace(PAYMENTS, name="refunds")
            assert "refunds" not in log.policies
            committed(await log.submit(oncelog.write(refunds, "a/1", "k", 1)))
            assert log.policies["refunds"] == refunds
            equal = replace(PAYMENTS)
            committed(await log.submit(oncelog.write(equal, "a/1", "k", 1)))
            with pytest.raises(PolicyError, match="under a new name"):
                await log.submit(oncelog.write(other, "a/1", "k", 1))
            with pytest.raises(PolicyError):
                await log.submit_many([event(1), oncelog.write(other, "a/1", "k", 1)])
            assert (await log.read()).records == []

    run(main())


@BOTH_STORES
def test_a_policy_survives_the_log_and_a_contradiction_is_refused_at_open(tmp_path: Path) -> None:
    path = log_at(tmp_path / "log.db")

    async def main() -> None:
        async with oncelog.open(path) as log:
            receipt = committed(await log.submit(oncelog.write(PAYMENTS, "a/1", "k", 1)))
        async with oncelog.open(path) as log:
            assert log.policies["payments"] == PAYMENTS
            assert await log.submit(oncelog.write(PAYMENTS, "a/1", "k", 1)) == Replayed(receipt)
        with pytest.raises(PolicyError):
            async with oncelog.open(path, policies=[replace(PAYMENTS, key_bytes=(1, 32))]):
                pass
        async with oncelog.open(path, policies=[PAYMENTS]) as log:
            assert len((await log.read(stream="a/1")).records) == 1

    run(main())


# --- open and closed -----------------------------------------------------------------------------------------


def _every_call(log: Log) -> list[Any]:
    return [
        log.submit(event(1)),
        log.submit_many([event(1)]),
        log.erase(key=key(1)),
        log.read(),
        anext(log.follow()),
        log.subscribe(),
        log.lookup(key(1)),
        log.prove(Receipt(0, 1, 0, 0, 1, 0)),
        log.heads(),
        log.commit_cursor("c", 1),
        log.cursor_of("c"),
        log.consumers(),
        log.confirm_clock(),
    ]


def test_a_log_that_is_not_open_says_so(open_log: Open) -> None:
    async def main() -> None:
        log = open_log()
        for call in _every_call(log):
            with pytest.raises(ClosedError, match="not open"):
                await call
        await log.close()
        async with log:
            committed(await log.submit(event(1)))
        for call in _every_call(log):
            with pytest.raises(ClosedError, match="not open"):
                await call

    run(main())


def test_a_log_is_opened_once(open_log: Open) -> None:
    async def main() -> None:
        log = open_log()
        async with log:
            with pytest.raises(ClosedError, match="opened once"):
                await log.__aenter__()
            committed(await log.submit(event(1)))
        with pytest.raises(ClosedError, match="opened once"):
            await log.__aenter__()

    run(main())


def test_a_log_that_could_not_be_opened_can_be_tried_again(tmp_path: Path) -> None:
    async def main() -> None:
        log = oncelog.open(tmp_path / "not yet" / "log.db")
        with pytest.raises(oncelog.StoreError):
            await log.__aenter__()
        (tmp_path / "not yet").mkdir()
        async with log:
            committed(await log.submit(event(1)))

    run(main())


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_a_limit_out_of_range_is_refused_at_start(name: str) -> None:
    wrong: list[Any] = [-1, 1.5, "1", None, True]
    for value in wrong:
        with pytest.raises(SettingsError, match=name):
            Limits(**{name: value})


# --- writes --------------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-18", "CO-19")
def test_an_expected_position_is_checked_for_new_writes_only(open_log: Open) -> None:
    async def main() -> None:
        async with open_log() as log:
            first = committed(await log.submit(event(1, expected_position=0)))
            stale = refused(await log.submit(event(2, expected_position=0)), Reason.UNEXPECTED_POSITION)
            assert (stale.field, stale.current) == ("expected_position", 1)
            committed(await log.submit(event(2, expected_position=1)))
            log._cache.clear()
            for _ in range(2):  # from the store, then from memory
                assert await log.submit(event(1, expected_position=0)) == Replayed(first)
            sent = oncelog.write(PAYMENTS, "a/1", "k1", 1, expected_sequence=0)
            committed(await log.submit(sent))
            late = refused(
                await log.submit(oncelog.write(PAYMENTS, "a/1", "k2", 1, expected_sequence=0)),
                Reason.UNEXPECTED_POSITION,
            )
            assert (late.field, late.current) == ("expected_sequence", 1)

    run(main())


@pytest.mark.rule("EV-8", "LG-17")
@pytest.mark.parametrize(
    ("mode", "kinds", "kept"),
    [
        (Mode.EACH, [Committed, Refused, Committed], 3),
        (Mode.UNTIL_REFUSED, [Committed, Refused, Refused], 2),
        (Mode.ALL, [Refused, Refused, Refused], 1),
    ],
)
def test_what_a_refused_item_means_for_the_others(open_log: Open, mode: Mode, kinds: list[type], kept: int) -> None:
    async def main() -> None:
        async with open_log() as log:
            await log.submit(event(1))
            verdicts = await log.submit_many([event(2), event(1, "other"), event(3)], mode)
            assert [type(verdict) for verdict in verdicts] == kinds
            refused(verdicts[1], Reason.IDENTITY_REUSED)
            assert positions((await log.read()).records) == list(range(1, kept + 1))

    run(main())


@BOTH_STORES
@pytest.mark.rule("CO-12", "CO-15")
def test_positions_go_on_after_a_restart_and_retries_are_still_known(tmp_path: Path) -> None:
    path = log_at(tmp_path / "log.db")

    async def main() -> None:
        epochs = set()
        for start in (1, 4, 7):
            async with oncelog.open(path) as log:
                epochs.add(log.epoch)
                for number in range(1, start):
                    assert isinstance(await log.submit(event(number)), Replayed)
                verdicts = await asyncio.gather(*(log.submit(event(start + offset)) for offset in range(3)))
                assert [committed(verdict).position for verdict in verdicts] == [start, start + 1, start + 2]
        assert len(epochs) == 1

    run(main())


async def _history(log: Log, clock: ManualClock) -> list[Any]:
    """A little of everything, and what was said to it."""
    told: list[Any] = [await log.submit(SetMember(CHANNEL, "user:ann"))]
    told += [await log.submit(event(number, partitions=("a",))) for number in (1, 2, 1)]
    told += await log.submit_many([message(1), message(2), message(1, "other")])
    told += await log.submit_many([transaction(1, 1), transaction(2, 3), transaction(3, 2)], Mode.UNTIL_REFUSED)
    told.append(await log.submit(claim(1, "bob")))
    told.append(await log.submit(result(1, "bob", 1)))
    told.append(await log.erase(partition="a"))
    clock.advance(8 * DAY_MS)
    told += [await log.submit(item) for item in (message(1), transaction(1, 1), event(1), result(1))]
    told.append(await log.commit_cursor("c", 1))
    told.append(await log.consumers())
    told.append({lane: replace(head, block_hash=b"") for lane, head in (await log.heads()).items()})
    for where in ({}, {"partition": "a"}, {"stream": CHANNEL}, {"stream": ORGANISATION}, {"lane": 1}):
        page = await log.read(**where, limit=2)
        told.append((page.records, page.cursor.position, page.upto, page.has_more, page.newest))
    told.append(await log.lookup(key(1), policy=CHAT, scope=CHANNEL))
    return told


@pytest.mark.rule("CO-10", "CO-17")
def test_a_log_in_memory_in_a_file_and_in_a_database_give_the_same_answers(tmp_path: Path) -> None:
    async def main() -> None:
        told = []
        for path in (":memory:", str(tmp_path / "log.db"), address_of(tmp_path)):
            clock = ManualClock()
            async with oncelog.open(path, clock=clock, settings=Settings(lanes=2)) as log:
                told.append(await _history(log, clock))
        assert told[0] == told[1] == told[2]

    run(main())

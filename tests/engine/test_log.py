"""The public log gives the same answers in memory, on SQLite and on PostgreSQL."""

import asyncio
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import oncelog
from databases import BOTH_STORES, address_of, log_at
from engine.observable_store import PAYMENTS, Open, positions, uuid
from oncelog import (
    CHAT,
    Applied,
    ClosedError,
    Committed,
    Consumer,
    Cursor,
    HistoryChangedError,
    Limits,
    Log,
    Mode,
    PolicyError,
    Reason,
    Receipt,
    Refused,
    Replayed,
    SetMember,
    Settings,
    SettingsError,
    kept_for,
)
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.assertions import assert_committed, assert_refused
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

# --- cursors ---------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-40")
def test_cursor_text_round_trips() -> None:
    for cursor in (Cursor(0, "abc"), Cursor(17, "ab", "stream/a:b"), Cursor(3, "ab", "lane/3"), Cursor(2**53, "é")):
        assert Cursor.parse(str(cursor)) == cursor


@pytest.mark.rule("CO-40")
@pytest.mark.parametrize("text", ["", ":", "12", ":12", "abc:", "abc:-1", "abc:1.0", "abc:1 ", "abc:x", "abc:٣", "a:²"])
def test_malformed_cursor_text_is_refused(text: str) -> None:
    with pytest.raises(ValueError) as raised:
        Cursor.parse(text)
    assert "EPOCH:POSITION" in str(raised.value)


@pytest.mark.rule("CO-40")
async def test_cursor_of_another_epoch_is_refused_with_the_newest_position(open_log: Open) -> None:
    async with open_log(settings=Settings(lanes=1)) as log:
        await log.submit(SetMember(CHANNEL, "user:ann"))
        await log.submit_many([event(number) for number in (1, 2, 3)])
        await log.submit_many([result(number) for number in (1, 2)])
        await log.submit(message(1))
        foreign = Cursor(1, "another")
        reads: list[tuple[int, Any]] = [
            (3, log.read(after=foreign)),
            (3, log.read(partition="p", after=foreign)),
            (4, log.read(lane=1, after=foreign)),  # includes the audit record of the added member
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


@pytest.mark.rule("CO-40")
async def test_cursor_ahead_of_the_log_is_refused(open_log: Open) -> None:
    async with open_log() as log:
        await log.submit(event(1))
        assert (await log.read(after=1)).records == []
        for after in (2, 2**62, Cursor(2, log.epoch)):
            with pytest.raises(HistoryChangedError) as raised:
                await log.read(after=after)
            assert raised.value.newest == 1


# --- reading ---------------------------------------------------------------------------------------------


@pytest.mark.rule("EV-11", "EV-12")
@pytest.mark.parametrize("where", [{}, {"partition": "a"}, {"partitions": ["a", "b"]}])
async def test_paging_up_to_a_bound_ends_while_the_log_grows(open_log: Open, where: dict[str, Any]) -> None:
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
        assert page.cursor == Cursor(11, log.epoch)  # the upper bound, although the last record did not match
        assert page.newest > page.upto


@pytest.mark.rule("EV-12")
async def test_cursor_advances_when_no_record_matches(open_log: Open) -> None:
    async with open_log() as log:
        await log.submit_many([event(number, partitions=("a",)) for number in (1, 2)])
        page = await log.read(partition="nobody")
        assert (page.records, page.cursor.position, page.has_more) == ([], 2, False)


@pytest.mark.rule("EV-11", "CO-30")
async def test_page_sizes_are_clamped(open_log: Open) -> None:
    async with open_log(limits=Limits(page_records_max=4, page_bytes_max=20)) as log:
        await log.submit_many([event(number) for number in range(1, 8)])
        for limit, count in ((-5, 1), (0, 1), (1, 1), (3, 3), (4, 4), (5, 4), (10**9, 4)):
            page = await log.read(limit=limit)
            assert len(page.records) == count
            assert page.has_more
        await log.submit_many([event(number, "x" * 15) for number in (8, 9)])
        page = await log.read(after=7)
        assert (positions(page.records), page.has_more) == ([8], True)  # limited in bytes, but never empty


@pytest.mark.rule("EV-6", "CO-5")
async def test_partition_names_are_normalized(open_log: Open) -> None:
    composed, decomposed = unicodedata.normalize("NFC", "café"), unicodedata.normalize("NFD", "café")
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


async def test_read_and_erase_accept_only_one_selector(open_log: Open) -> None:
    text: Any = "orders"
    async with open_log() as log:
        with pytest.raises(TypeError, match="use partition"):
            await log.read(partitions=text)
        with pytest.raises(ValueError, match="only one of"):
            await log.read(partition="a", stream="s")
        with pytest.raises(ValueError, match="only one of"):
            log.follow(partitions=["a"], partition="b")
        with pytest.raises(ValueError, match="one of key, partition and stream"):
            await log.erase()
        with pytest.raises(ValueError, match="one of key, partition and stream"):
            await log.erase(key=key(1), partition="a")


# --- named consumers -------------------------------------------------------------------------------------


@pytest.mark.rule("CO-42")
async def test_consumer_cursor_is_stored_with_its_lag(open_log: Open) -> None:
    async with open_log() as log:
        await log.submit_many([event(number) for number in range(1, 6)])
        assert await log.cursor_of("mailer") is None
        assert await log.commit_cursor("mailer", 2) == Applied(changed=True)
        assert await log.commit_cursor("mailer", Cursor(3, log.epoch)) == Applied(changed=True)
        assert await log.commit_cursor("mailer", 1) == Applied(changed=False)  # a cursor only moves forward
        assert await log.cursor_of("mailer") == Cursor(3, log.epoch)
        assert await log.consumers() == [Consumer("", "mailer", 3, 2)]
        assert await log.commit_cursor("mailer", 1, rewind=True) == Applied(changed=True)
        assert await log.cursor_of("mailer") == Cursor(1, log.epoch)
        ahead = await log.commit_cursor("mailer", 6)
        assert assert_refused(ahead, Reason.INVALID_CURSOR).current == 5
        assert await log.commit_cursor("mailer", None) == Applied(changed=True)
        assert await log.commit_cursor("mailer", None) == Applied(changed=False)
        assert await log.consumers() == []


@pytest.mark.rule("CO-42")
async def test_stream_consumer_counts_sequences(open_log: Open) -> None:
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


@pytest.mark.rule("CO-42")
async def test_following_as_a_consumer_starts_at_its_cursor(open_log: Open) -> None:
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


# --- policies --------------------------------------------------------------------------------------------


async def test_policy_is_declared_at_open_or_at_first_use(open_log: Open) -> None:
    other = replace(PAYMENTS, retention=kept_for(hours=1))
    async with open_log(policies=[PAYMENTS]) as log:
        assert log.policies["payments"] == PAYMENTS
        refunds = replace(PAYMENTS, name="refunds")
        assert "refunds" not in log.policies
        assert_committed(await log.submit(oncelog.write(refunds, "a/1", "k", 1)))
        assert log.policies["refunds"] == refunds
        equal = replace(PAYMENTS)
        assert_committed(await log.submit(oncelog.write(equal, "a/1", "k", 1)))
        with pytest.raises(PolicyError, match="under a new name"):
            await log.submit(oncelog.write(other, "a/1", "k", 1))
        with pytest.raises(PolicyError):
            await log.submit_many([event(1), oncelog.write(other, "a/1", "k", 1)])
        assert (await log.read()).records == []


@BOTH_STORES
async def test_policy_is_stored_and_a_different_declaration_is_refused_at_open(tmp_path: Path) -> None:
    path = log_at(tmp_path / "log.db")
    async with oncelog.open(path) as log:
        receipt = assert_committed(await log.submit(oncelog.write(PAYMENTS, "a/1", "k", 1)))
    async with oncelog.open(path) as log:
        assert log.policies["payments"] == PAYMENTS
        assert await log.submit(oncelog.write(PAYMENTS, "a/1", "k", 1)) == Replayed(receipt)
    with pytest.raises(PolicyError):
        async with oncelog.open(path, policies=[replace(PAYMENTS, key_bytes=(1, 32))]):
            pass
    async with oncelog.open(path, policies=[PAYMENTS]) as log:
        assert len((await log.read(stream="a/1")).records) == 1


# --- open and closed -------------------------------------------------------------------------------------


def _calls_of_every_method(log: Log) -> list[Any]:
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


async def test_calls_on_a_log_that_is_not_open_are_refused(open_log: Open) -> None:
    log = open_log()
    for call in _calls_of_every_method(log):
        with pytest.raises(ClosedError, match="not open"):
            await call
    await log.close()
    async with log:
        assert_committed(await log.submit(event(1)))
    for call in _calls_of_every_method(log):
        with pytest.raises(ClosedError, match="not open"):
            await call


async def test_log_can_be_opened_only_once(open_log: Open) -> None:
    log = open_log()
    async with log:
        with pytest.raises(ClosedError, match="opened only once"):
            await log.__aenter__()
        assert_committed(await log.submit(event(1)))
    with pytest.raises(ClosedError, match="opened only once"):
        await log.__aenter__()


async def test_failed_open_can_be_retried(tmp_path: Path) -> None:
    log = oncelog.open(tmp_path / "not yet" / "log.db")
    with pytest.raises(oncelog.StoreError):
        await log.__aenter__()
    (tmp_path / "not yet").mkdir()
    async with log:
        assert_committed(await log.submit(event(1)))


@pytest.mark.rule("CO-30")
@pytest.mark.parametrize("name", Limits.__struct_fields__)
def test_limit_out_of_range_is_refused(name: str) -> None:
    wrong: list[Any] = [-1, 1.5, "1", None, True]
    for value in wrong:
        with pytest.raises(SettingsError, match=name):
            Limits(**{name: value})


# --- writes ----------------------------------------------------------------------------------------------


@pytest.mark.rule("CO-18", "CO-19")
async def test_expected_position_is_checked_only_for_new_writes(open_log: Open) -> None:
    async with open_log() as log:
        first = assert_committed(await log.submit(event(1, expected_position=0)))
        stale = assert_refused(await log.submit(event(2, expected_position=0)), Reason.UNEXPECTED_POSITION)
        assert (stale.field, stale.current) == ("expected_position", 1)
        assert_committed(await log.submit(event(2, expected_position=1)))
        log._cache.clear()
        for _ in range(2):  # from the store, then from memory
            assert await log.submit(event(1, expected_position=0)) == Replayed(first)
        sent = oncelog.write(PAYMENTS, "a/1", "k1", 1, expected_sequence=0)
        assert_committed(await log.submit(sent))
        late = assert_refused(
            await log.submit(oncelog.write(PAYMENTS, "a/1", "k2", 1, expected_sequence=0)),
            Reason.UNEXPECTED_POSITION,
        )
        assert (late.field, late.current) == ("expected_sequence", 1)


@pytest.mark.rule("EV-8", "LG-17")
@pytest.mark.parametrize(
    ("mode", "kinds", "kept"),
    [
        (Mode.EACH, [Committed, Refused, Committed], 3),
        (Mode.UNTIL_REFUSED, [Committed, Refused, Refused], 2),
        (Mode.ALL, [Refused, Refused, Refused], 1),
    ],
)
async def test_request_mode_decides_the_effect_of_a_refused_item_on_others(
    open_log: Open, mode: Mode, kinds: list[type], kept: int
) -> None:
    async with open_log() as log:
        await log.submit(event(1))
        verdicts = await log.submit_many([event(2), event(1, "other"), event(3)], mode)
        assert [type(verdict) for verdict in verdicts] == kinds
        assert_refused(verdicts[1], Reason.IDENTITY_REUSED)
        assert positions((await log.read()).records) == list(range(1, kept + 1))


@BOTH_STORES
@pytest.mark.rule("CO-12", "CO-15")
async def test_positions_continue_and_retries_are_replayed_after_a_restart(tmp_path: Path) -> None:
    path = log_at(tmp_path / "log.db")
    epochs = set()
    for start in (1, 4, 7):
        async with oncelog.open(path) as log:
            epochs.add(log.epoch)
            for number in range(1, start):
                assert isinstance(await log.submit(event(number)), Replayed)
            verdicts = await asyncio.gather(*(log.submit(event(start + offset)) for offset in range(3)))
            assert [assert_committed(verdict).position for verdict in verdicts] == [start, start + 1, start + 2]
    assert len(epochs) == 1


async def _history(log: Log, clock: ManualClock) -> list[Any]:
    """Run writes, reads and lookups of every kind and return the answers."""
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
async def test_memory_sqlite_and_postgres_give_the_same_answers(tmp_path: Path) -> None:
    told = []
    for path in (":memory:", str(tmp_path / "log.db"), address_of(tmp_path)):
        clock = ManualClock()
        async with oncelog.open(path, clock=clock, settings=Settings(lanes=2)) as log:
            told.append(await _history(log, clock))
    assert told[0] == told[1] == told[2]

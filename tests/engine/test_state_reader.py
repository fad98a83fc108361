"""Reads of the current state: clients, entities, relationships and blocks."""

import asyncio
import threading
from contextlib import aclosing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import oncelog
from databases import BOTH_STORES, log_at
from deadlines import until
from oncelog import Condition, DeleteEntity, Must, Relate, SetEntity, Settings, Unrelate, ledger_scope, transaction
from oncelog.errors import ClosedError
from oncelog.storage.store import RelationshipQuery
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.assertions import assert_committed
from oncelog.testing.contract.writes import DAY_MS

ACME = ledger_scope("acme")
pytestmark = BOTH_STORES


def write(sequence: int, *operations: oncelog.Operation, scope: str = ACME, client: str = "c1") -> Any:
    return transaction(scope, client, sequence, operations or (DeleteEntity("nothing"),))


@pytest.mark.rule("LG-8", "LG-9", "LG-16")
async def test_client_sequence_is_kept_until_the_client_is_evicted(tmp_path: Path) -> None:
    clock = ManualClock()
    async with oncelog.open(log_at(tmp_path / "log.db"), settings=Settings(1, 4), clock=clock) as log:
        assert await log.state.client(ACME, "c1") is None
        for sequence in (1, 2):
            assert_committed(await log.submit(write(sequence)))
        entry = await log.state.client(ACME, "c1")
        assert entry is not None
        assert (entry.sequence, entry.last_seen_ms) == (2, clock.wall_ms())
        assert await log.state.client(ledger_scope("acme", "vault"), "c1") is None
        clock.advance(DAY_MS + 1)
        assert_committed(await log.submit(write(1, client="c2")))
        assert await log.state.client(ACME, "c1") == entry  # expired, but not evicted yet
        assert_committed(await log.submit(write(2, client="c2")))  # the fourth write starts an eviction
        assert await log.state.client(ACME, "c1") is None
        assert await log.state.client(ACME, "c2") is not None


@pytest.mark.rule("LG-2")
async def test_entity_is_readable_until_it_expires(tmp_path: Path) -> None:
    clock = ManualClock()
    async with oncelog.open(log_at(tmp_path / "log.db"), clock=clock) as log:
        soon = SetEntity("a", b"1", expires_at_ms=clock.wall_ms() + 10)
        assert_committed(await log.submit(write(1, soon, SetEntity("b", b"2"))))
        clock.advance(9)
        found = await log.state.entity(ACME, "a")
        assert found is not None
        assert (found.value, found.version) == (b"1", 1)
        clock.advance(1)
        assert await log.state.entity(ACME, "a") is None
        assert [key for key, _ in (await log.state.entities(ACME)).entities] == ["b"]
        # From the same time on, a condition treats the entity as absent.
        again = SetEntity("a", b"3", condition=Condition(Must.NOT_EXIST))
        assert_committed(await log.submit(write(2, again)))
        assert (await log.state.entities(ACME, prefix="a", limit=0)).entities[0][1].version == 2


async def test_relationships_can_be_added_and_removed(tmp_path: Path) -> None:
    async with oncelog.open(log_at(tmp_path / "log.db")) as log:
        assert_committed(await log.submit(write(1, Relate("doc", "owner", "ann"), Relate("doc", "reader", "bob"))))
        assert_committed(await log.submit(write(2, Relate("doc", "owner", "ann"), Unrelate("doc", "reader", "bob"))))
        assert await log.state.relationship(ACME, "doc", "owner", "ann") == 1
        assert await log.state.relationship(ACME, "doc", "reader", "bob") is None
        page = await log.state.relationships(RelationshipQuery(scope=ACME, subject="ann"))
        assert (page.relationships, page.has_more) == ([("doc", "owner", "ann", 1)], False)
        with pytest.raises(ValueError, match="a query by relation also needs"):
            await log.state.relationships(RelationshipQuery(scope=ACME, relation="owner"))


async def test_record_is_found_by_lane_and_position(tmp_path: Path) -> None:
    async with oncelog.open(log_at(tmp_path / "log.db")) as log:
        receipt = assert_committed(await log.submit(write(1)))
        found = await log.state.record(receipt.lane, receipt.position)
        assert found is not None
        assert found.receipt == receipt
        assert receipt.lane == log.state.lane(ACME)
        for lane, position in ((receipt.lane, 2), (receipt.lane, 0), (0, 1), (2**15, 1), (receipt.lane, 2**48)):
            assert await log.state.record(lane, position) is None


@pytest.mark.rule("LG-18", "CO-13")
async def test_blocks_of_two_processes_are_followed_once_and_in_order(tmp_path: Path) -> None:
    async with oncelog.open(log_at(tmp_path / "log.db")) as log, oncelog.open(log_at(tmp_path / "log.db")) as other:
        for sequence in range(1, 4):
            assert_committed(await log.submit(write(sequence)))
        seen: list[tuple[int, tuple[int, ...]]] = []
        async with aclosing(log.state.follow_blocks(ACME, 1)) as several:
            sequence = 3
            async for blocks in several:
                seen += [(one.block.height, one.positions) for one in blocks]
                if len(seen) == 12:
                    break
                sequence += 1
                assert_committed(await (log, other)[sequence % 2].submit(write(sequence)))
        assert seen == [(height, (height,)) for height in range(2, 14)]
        every = [one.block for one in await log.state.blocks(ACME)]
        assert all(after.previous == before.hash for before, after in pairwise(every))


async def test_closing_the_log_ends_block_followers(tmp_path: Path) -> None:
    async with oncelog.open(log_at(tmp_path / "log.db")) as log:
        several = log.state.follow_blocks(ACME)
        waiting = asyncio.ensure_future(anext(several))
        await until(lambda: bool(log._tailers._tailers))
        await log.close()
        with pytest.raises(ClosedError):
            await waiting


@pytest.mark.rule("LG-10", "CO-41")
async def test_proof_data_is_cached_until_an_erasure(tmp_path: Path) -> None:
    async with oncelog.open(log_at(tmp_path / "log.db")) as log:
        receipts = [assert_committed(await log.submit(write(sequence))) for sequence in (1, 2)]
        for receipt in receipts:
            attested, proven = log.state.find_attestation(receipt), await log.prove(receipt)
            assert attested is not None
            assert (attested.block, attested.proof, attested.salt) == (proven.block, proven.proof, proven.salt)
            assert attested.actor == proven.record.actor
        assert await log.erase(stream=ACME) == 2
        assert [log.state.find_attestation(receipt) for receipt in receipts] == [None, None]
    async with oncelog.open(log_at(tmp_path / "log.db")) as log:
        assert log.state.find_attestation(receipts[0]) is None


@pytest.mark.rule("CO-41")
async def test_cached_salts_are_dropped_when_another_process_erases_records_without_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oncelog.engine.answer_cache.ERASURES_POLL_MS", 1)
    place = log_at(tmp_path / "log.db")
    async with oncelog.open(place) as log, oncelog.open(place) as other:
        receipt = assert_committed(await log.submit(write(1)))
        assert log.state.find_attestation(receipt) is not None
        assert await other.erase(stream=ACME) == 1
        await until(lambda: log.state.find_attestation(receipt) is None)


def test_blocking_state_reader_returns_the_same_state(tmp_path: Path) -> None:
    with oncelog.open_blocking(log_at(tmp_path / "log.db")) as log:
        receipt = assert_committed(log.submit(write(1, SetEntity("a", b"1"), Relate("doc", "owner", "ann"))))
        books = log.state
        entity, client, record = books.entity(ACME, "a"), books.client(ACME, "c1"), books.record(receipt.lane, 1)
        assert entity is not None
        assert client is not None
        assert record is not None
        assert (entity.value, client.sequence, record.receipt) == (b"1", 1, receipt)
        assert books.entities(ACME).entities == [("a", entity)]
        assert books.relationship(ACME, "doc", "owner", "ann") == 1
        assert len(books.relationships(RelationshipQuery(scope=ACME)).relationships) == 1
        assert books.find_attestation(receipt) is not None
        assert [one.block.height for one in books.blocks(ACME)] == [1]
        assert books.lane(ACME) == receipt.lane
        writing = threading.Thread(target=lambda: log.submit(write(2)))
        heights: list[int] = []
        for blocks in books.follow_blocks(ACME):
            heights += [one.block.height for one in blocks]
            if heights == [1]:
                writing.start()
            if heights[-1] == 2:
                break
        writing.join()
        assert heights == [1, 2]

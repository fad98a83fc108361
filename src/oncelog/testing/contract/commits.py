"""Contract tests for commits: receipts, retries, blocks and atomicity."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

import asyncio
from itertools import pairwise
from pathlib import Path

from msgspec.structs import replace

from oncelog.core.identity import normal_partitions
from oncelog.core.policy import EVENTS, Order, Policy, evicted_after, kept_for
from oncelog.core.proof import NO_HASH, encode_record_header, hash_leaf, prove, verify
from oncelog.core.values import (
    Mode,
    Reason,
    Receipt,
    RecordTrace,
    Remembered,
    Request,
    SetMember,
    Settings,
    Submission,
)
from oncelog.errors import ClosedError, PolicyError, SettingsError
from oncelog.storage.store import BatchTraces, KeyStatus
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.driver import Contract, StoreDriver, list_positions
from oncelog.testing.contract.writes import (
    CAMPAIGN,
    ORGANISATION,
    claim,
    event,
    identity,
    key,
    message,
    result,
    transaction,
)

PAYMENTS = Policy(
    name="payments",
    key_bytes=(1, 64),
    order=Order.STREAM,
    on_reuse=EVENTS.on_reuse,
    retention=evicted_after(hours=24),
)


REQUEST_TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
COMMIT_TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-b7ad6b7169203331-01"


class CommitContract(Contract):
    """Commits of batches, and what a log stores about itself."""

    def test_trace_contexts_of_new_records_are_stored_outside_of_them(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1))
            log.run(log.store.enable_traces())
            batch = [Request((event(1), event(2))), Request((event(3),))]
            traces = BatchTraces(COMMIT_TRACE, [REQUEST_TRACE, REQUEST_TRACE, ""])
            result = log.run(log.store.commit(batch, None, traces))
            expected = [None, RecordTrace(REQUEST_TRACE, COMMIT_TRACE), None]
            assert [record.trace for record in result.changes.records] == expected[1:]
            assert [record.trace for record in log.read_all()] == expected, "a retry changes no context"
            found = log.run(log.store.get_key_status(identity(event(2)))).record
            assert found is not None
            assert found.trace == expected[1]
            log.reopen()
            plain = [replace(record, trace=None) for record in result.changes.records]
            if self.is_durable:
                assert log.read_all()[1:] == plain, "a store without tracing shows no context"
            log.run(log.store.enable_traces())
            assert [record.trace for record in log.read_all()] == expected

    def test_new_write_gets_a_receipt_and_can_be_read(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            batch_result = log.commit_batch(Request((event(1, "hello", actor="user:ann", partitions=("p",)),)))
            receipt = assert_committed(batch_result.verdicts[0][0])
            assert receipt == Receipt(0, 1, 0, log.clock.wall_ms(), 1, 0)
            assert log.read_all() == batch_result.changes.records
            (record,) = log.read_all()
            assert (record.body, record.actor, record.partitions, record.erased) == (
                b"hello",
                "user:ann",
                ("p",),
                False,
            )

    def test_retry_returns_the_first_receipt_and_writes_nothing(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            first = [assert_committed(log(item)) for item in (event(1), transaction(1, 1))]
            before = log.heads()
            log.reopen()
            log.clock.advance(1)
            again = [assert_replayed(log(item)).receipt for item in (event(1), transaction(1, 1))]
            assert (again, log.heads()) == (first, before)

    def test_batch_without_changes_writes_nothing(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(SetMember("chat/1", "user:ann"))
            before = log.heads()
            log.clock.advance(1)
            batch_result = log.commit_batch(Request((SetMember("chat/1", "user:ann"), message(1, actor="user:eve"))))
            assert batch_result.changes.is_empty
            assert log.commit_batch().verdicts == []
            assert log.heads() == before

    def test_known_key_with_other_content_is_refused(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1, "a"))
            log.reopen()
            assert_refused(log(event(1, "b")), Reason.IDENTITY_REUSED)
            assert list_positions(log.read_all()) == [1]

    def test_keys_are_separate_per_policy_scope_and_client(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            items = [event(1), event(1, scope="s"), transaction(1, 1), transaction(1, 1, client="c2"), result(1)]
            for item in items:
                assert_committed(log(item))
            log.reopen()
            for item in items:
                assert_replayed(log(item))

    def test_equal_writes_in_one_batch_commit_once(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            (first,), (second,) = log.commit_batch(Request((event(1),)), Request((event(1),))).verdicts
            assert assert_replayed(second).receipt == assert_committed(first)
            assert list_positions(log.read_all()) == [1]

    def test_equal_concurrent_writes_commit_once(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:

            async def commit_concurrently() -> list[object]:
                batch = [Request((event(1),))]
                batch_result = await asyncio.gather(*[log.store.commit(batch) for _ in range(5)])
                return [type(one.verdicts[0][0]).__name__ for one in batch_result]

            assert sorted(log.run(commit_concurrently()), key=str) == ["Committed"] + ["Replayed"] * 4
            assert list_positions(log.read_all()) == [1]

    def test_all_mode_commits_nothing_when_one_item_is_refused(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1, "a"))
            verdicts = log.commit_items(event(2), event(1, "b"), event(3), mode=Mode.ALL)
            assert_refused(verdicts[0], Reason.NOT_PROCESSED)
            assert_refused(verdicts[1], Reason.IDENTITY_REUSED)
            assert_refused(verdicts[2], Reason.NOT_PROCESSED)
            assert list_positions(log.read_all()) == [1]

    def test_streams_of_a_lane_share_dense_positions(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1)) as log:
            streams = ["a", "b", "a", "c", "b", "a"]
            receipts = [assert_committed(log(write(number, stream))) for number, stream in enumerate(streams)]
            assert [(receipt.lane, receipt.position) for receipt in receipts] == [(1, place) for place in range(1, 7)]
            assert [receipt.sequence for receipt in receipts] == [1, 1, 2, 1, 2, 3]
            assert_committed(log(event(1)))
            assert {lane: head.position for lane, head in log.heads().items()} == {0: 1, 1: 6}

    def test_large_batches_are_stored_completely_and_in_order(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            for start in (0, 300):
                items = tuple(event(start + number, f"{number}", partitions=("p", "q")) for number in range(300))
                assert [assert_committed(commit_item).position for commit_item in log.commit_items(*items)] == [
                    *range(start + 1, start + 301)
                ]
            log.reopen()
            assert [record.key for record in log.read_all(limit=7)] == [key(number) for number in range(600)]
            assert list_positions(log.read_all(partitions=("q",), limit=11)) == [*range(1, 601)]
            assert all(
                assert_replayed(commit_item)
                for commit_item in log.commit_items(*[event(number, f"{number % 300}") for number in range(600)])
            )

    def test_every_record_is_in_a_block_and_blocks_form_a_chain(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=2)) as log:
            for number in range(0, 30, 5):
                items = [write(number + place, f"s{place}") for place in range(3)]
                log.commit_items(*items, *[event(number + place) for place in range(number % 3 + 1)])
            log.reopen()
            for lane, head in log.heads().items():
                proven = chain(log, lane, head.height)
                assert proven == [*range(1, head.position + 1)]

    def test_stored_blocks_equal_the_batch_result(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            batch_result = log.commit_batch(Request((event(1), event(2), transaction(1, 1))))
            assert {lane: log.heads()[lane] for lane in batch_result.changes.heads} == batch_result.changes.heads
            for block in batch_result.sealed.blocks:
                stored, evidence = log.run(log.store.block(block.lane, block.height))
                assert stored == block
                assert [it.record for it in evidence] == [
                    it for it in batch_result.changes.records if it.lane == block.lane
                ]

    def test_missing_block_raises_lookup_error(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1))
            for lane, height in ((0, 0), (0, 2), (1, 1)):
                assert isinstance(log.catch_error(log.store.block(lane, height)), LookupError)

    def test_exception_in_validation_leaves_the_log_unchanged(self, tmp_path: Path) -> None:
        def fail(_: Submission) -> str | None:
            raise ZeroDivisionError

        with self.open_store(tmp_path) as log:
            log(event(1))
            before = log.heads()
            batch = [Request((event(2), transaction(1, 1)))]
            assert isinstance(log.catch_error(log.store.commit(batch, fail)), ZeroDivisionError)
            assert (log.heads(), list_positions(log.read_all())) == (before, [1])
            assert assert_committed(log(event(2))).position == 2
            assert assert_committed(log(transaction(1, 1))).position == 1

    def test_validation_can_refuse_new_writes_but_not_retries(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1))
            old, new = log.commit_items(event(1), event(2), validate=lambda _: "not today")
            assert_replayed(old)
            assert assert_refused(new, Reason.INVALID).message == "not today"

    def test_closed_store_raises_closed_error(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1))
            log.run(log.store.close())
            assert isinstance(log.catch_error(log.store.commit([Request((event(2),))])), ClosedError)
            assert isinstance(log.catch_error(log.store.heads()), ClosedError)

    # --- epoch, settings and policies

    def test_epoch_and_settings_survive_reopening(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=3, eviction_interval=5)) as log:
            epoch = log.store.epoch
            assert epoch
            log.reopen()
            assert (log.store.epoch, log.store.settings) == (epoch, Settings(lanes=3, eviction_interval=5))
            log.reopen(Settings(lanes=3, eviction_interval=5))
            assert (log.store.epoch, log.store.settings) == (epoch, Settings(lanes=3, eviction_interval=5))

    def test_reopening_with_different_settings_is_refused(self, tmp_path: Path) -> None:
        made_with = Settings(lanes=3, eviction_interval=5)
        others = {
            Settings(lanes=4, eviction_interval=5): ("lanes=3", "lanes=4"),
            Settings(lanes=3, eviction_interval=6): ("eviction_interval=5", "eviction_interval=6"),
        }
        with self.open_store(tmp_path, made_with) as log:
            assert_committed(log(event(1)))
            for other, (its, given) in others.items() if self.is_durable else ():
                error = log.catch_reopen_error(other)
                assert isinstance(error, SettingsError)
                assert its in str(error)
                assert given in str(error)
                assert log.store.settings == made_with
                assert_replayed(log(event(1)))

    def test_policies_are_stored_and_must_not_change(self, tmp_path: Path) -> None:
        other = replace(PAYMENTS, retention=kept_for(hours=24))
        with self.open_store(tmp_path) as log:
            assert log.run(log.store.declare([PAYMENTS, EVENTS])) == {"payments": PAYMENTS, "events": EVENTS}
            log.reopen()
            assert log.run(log.store.declare([PAYMENTS])) == {"payments": PAYMENTS, "events": EVENTS}
            assert isinstance(log.catch_error(log.store.declare([other])), PolicyError)
            assert log.run(log.store.declare([])) == {"payments": PAYMENTS, "events": EVENTS}

    def test_conflicting_policies_are_both_refused(self, tmp_path: Path) -> None:
        other = replace(PAYMENTS, retention=kept_for(hours=24))
        with self.open_store(tmp_path) as log:
            assert isinstance(log.catch_error(log.store.declare([PAYMENTS, other])), PolicyError)
            assert log.run(log.store.declare([])) == {}

    def test_find_keys_returns_the_known_keys(self, tmp_path: Path) -> None:
        items = [event(1, "a"), transaction(2, 1, content="b"), event(3)]
        with self.open_store(tmp_path) as log:
            known = [Remembered(assert_committed(log(item)), item.fingerprint) for item in items[:2]]
            log.reopen()
            asked = [identity(item) for item in (*items, items[0])]
            assert log.run(log.store.find_keys(asked)) == [*known, None, known[0]]
            assert log.run(log.store.find_keys([])) == []

    def test_key_status_contains_record_lease_and_head(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            unknown = log.run(log.store.get_key_status(("runs", CAMPAIGN, "", key(1))))
            assert (unknown.record, unknown.lease, unknown.head.position) == (None, None, 0)
            log(claim(1, "h"))
            log.reopen()
            leased = log.run(log.store.get_key_status(identity(claim(1, "h"))))
            assert leased.lease is not None
            assert (leased.lease.holder, leased.lease.fence, leased.head.fence) == ("h", 1, 1)
            receipt = assert_committed(log(result(1, "h", 1)))
            log.reopen()
            done = log.run(log.store.get_key_status(identity(claim(1, "h"))))
            (record,) = log.read_all(stream=CAMPAIGN)
            assert done == KeyStatus(record, None, log.heads()[receipt.lane], done.time_ms, (record.position,))
            assert record.remembered == Remembered(receipt, b"")

    def test_names_and_bodies_round_trip(self, tmp_path: Path) -> None:
        odd = "a\"'\\/\x01\x7f é ￿ \U0001f600 [1,2] -- ;%"
        item = transaction(
            2**128 - 1,
            1,
            scope=odd,
            client=odd,
            actor=odd,
            partitions=normal_partitions((odd, "1", "null")),
            content="y",
            body=bytes(range(256)),
        )
        with self.open_store(tmp_path) as log:
            receipt = assert_committed(log(item))
            log.reopen()
            (record,) = log.read_all(stream=odd)
            assert (record.scope, record.client, record.actor) == (odd, odd, odd)
            assert (record.partitions, record.body, record.key) == (item.partitions, item.body, item.key)
            assert assert_replayed(log(item)).receipt == receipt
            assert assert_replayed(log(transaction(0, 1, scope=odd, client=odd, content="y"))).receipt == receipt
            for partition in item.partitions:
                assert list_positions(log.read_all(lane=receipt.lane, partitions=(partition,))) == [1]

    def test_partitions_not_in_normal_form_are_refused(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            for partitions in (("p", "p"), ("q", "p"), ("",), ("e\u0301",)):
                assert assert_refused(log(event(1, partitions=partitions)), Reason.MALFORMED).field == "partitions"
            assert_committed(log(event(1, partitions=("p", "q"))))
            assert list_positions(log.read_all(partitions=("p", "p", "q"))) == [1]

    def test_write_without_a_key_is_known_by_its_client_sequence(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            receipt = assert_committed(log(transaction(0, 1)))
            assert_committed(log(transaction(0, 2)))
            log.reopen()
            assert assert_replayed(log(transaction(0, 1))).receipt == receipt
            assert_refused(log(transaction(0, 1, content="y")), Reason.SEQUENCE_REUSED)
            assert list_positions(log.read_all(stream=ORGANISATION)) == [1, 2]


def write(number: int, stream: str) -> Submission:
    """Build a write to a stream."""
    return Submission(policy=PAYMENTS, scope=stream, key=key(number + 1), fingerprint=b"", body=b"%d" % number)


def chain(log: StoreDriver, lane: int, height: int) -> list[int]:
    """Check the block chain of a lane up to a height and return the positions of all its records."""
    found = [log.run(log.store.block(lane, number)) for number in range(1, height + 1)]
    proven = []
    for block, evidence in found:
        assert len(evidence) == block.count
        leaves = [
            hash_leaf(encode_record_header(evidence_entry.record), evidence_entry.body_hash)
            for evidence_entry in evidence
        ]
        for evidence_entry, proof in zip(evidence, [prove(leaves, index) for index in range(len(leaves))], strict=True):
            assert verify(evidence_entry.record, evidence_entry.salt, proof, block)
            proven.append(evidence_entry.record.position)
    blocks = [block for block, _ in found]
    assert [block.previous for block in blocks[:1]] == [NO_HASH]
    assert all(after.previous == before.hash for before, after in pairwise(blocks))
    assert log.heads()[lane].block_hash == blocks[-1].hash
    return proven

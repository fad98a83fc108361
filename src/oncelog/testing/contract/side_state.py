"""Contract tests for side state and erasure."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from pathlib import Path

from oncelog.core.merge import Op
from oncelog.core.operations import Condition, DeleteEntity, Must, Relate, SetEntity, Unrelate
from oncelog.core.policy import RUNS
from oncelog.core.proof import encode_record_header, hash_leaf, prove, verify_header
from oncelog.core.values import Acknowledge, Applied, Granted, Mode, Rate, Reason, Release, Renew, Request, SetMember
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.commits import chain
from oncelog.testing.contract.driver import Contract, StoreDriver, list_positions
from oncelog.testing.contract.writes import (
    CAMPAIGN,
    CHANNEL,
    GATEWAY,
    ORGANISATION,
    claim,
    delta,
    event,
    identity,
    key,
    message,
    result,
    transaction,
)


class SideStateContract(Contract):
    """Side state after reopening, rates, leases and erasure."""

    # --- side state after reopening

    def test_client_sequences_continue_after_reopening(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(transaction(1, 1), transaction(2, 2), transaction(1, 1, client="c2"))
            log.reopen()
            assert assert_refused(log(transaction(9, 4)), Reason.SEQUENCE_GAP).current == 2
            assert assert_refused(log(transaction(9, 3, client="c2")), Reason.SEQUENCE_GAP).current == 1
            assert assert_refused(log(transaction(9, 2**64 - 1, client="c3")), Reason.SEQUENCE_GAP).current == 0
            assert assert_committed(log(transaction(3, 3))).client_sequence == 3

    def test_entities_survive_reopening_and_expire_by_log_time(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            soon = log.clock.wall_ms() + 10
            operations = (SetEntity("a", b"1"), SetEntity("b", b"\0\xff", soon), SetEntity("gone", b"x"))
            log(transaction(1, 1, *operations))
            log(transaction(2, 2, DeleteEntity("gone"), SetEntity("é'\"", b"")))
            log.reopen()
            absent = Condition(Must.NOT_EXIST)
            known = assert_refused(log(transaction(3, 3, SetEntity("a", b"2", condition=absent))), Reason.KEY_EXISTS)
            assert (known.current, known.value) == (1, b"1")
            expiring = Condition(Must.HAVE_VALUE, value=b"")
            known = assert_refused(
                log(transaction(3, 3, SetEntity("b", b"2", condition=expiring))), Reason.VALUE_MISMATCH
            )
            assert known.value == b"\0\xff"
            log.clock.advance(10)
            again = [SetEntity(name, b"2", condition=absent) for name in ("b", "gone")]
            assert_committed(log(transaction(3, 3, *again)))
            empty = Condition(Must.HAVE_VERSION, version=2)
            assert_committed(log(transaction(4, 4, SetEntity("é'\"", b"", condition=empty))))

    def test_relationships_keep_the_version_that_created_them(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            doc, other = Relate("doc", "owner", "ann"), Relate("doc", "owner", "eve")
            log(transaction(1, 1, doc))
            log(transaction(2, 2, other))
            log(transaction(3, 3, Unrelate("doc", "owner", "eve")))
            log.reopen()
            changes = log.commit_batch(Request((transaction(4, 4, doc, other),))).changes
            assert changes.relationships == {
                (ORGANISATION, "doc", "owner", "ann"): 1,
                (ORGANISATION, "doc", "owner", "eve"): 4,
            }

    def test_deltas_are_merged_into_stored_rows(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            now = log.clock.wall_ms() << 16
            log.commit_items(delta(1, now + 1, title="a", state="open"), delta(2, now + 5, title="b"))
            log.reopen()
            log(delta(3, now + 3, title="late", state="done"))
            log.reopen()
            changes = log.commit_batch(Request((delta(4, now + 6, note="n"),))).changes
            row = changes.rows[GATEWAY, "todos", "r1"]
            assert row is not None
            assert row.values == {"title": b"b", "state": b"done", "note": b"n"}
            log(delta(5, now + 9, Op.DELETE))
            log.reopen()
            late = log.commit_batch(Request((delta(6, now + 8, title="too late"),))).changes.rows
            assert not any(row.exists for row in late.values() if row is not None)

    def test_leases_can_be_renewed_released_and_completed(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            assert log(claim(1, "h", lease_ms=1000)) == Granted(1, log.clock.wall_ms() + 1000)
            log.reopen()
            assert assert_refused(log(claim(1, "i")), Reason.IN_FLIGHT).current == 1
            log.clock.advance(500)
            renewal = Renew(policy=RUNS, scope=CAMPAIGN, key=key(1), holder="h", fence=1, lease_ms=1000)
            assert log(renewal) == Granted(1, log.clock.wall_ms() + 1000)
            log.reopen()
            failed = Release(policy=RUNS, scope=CAMPAIGN, key=key(1), holder="h", fence=1, failure=b"boom")
            assert log(failed) == Applied(changed=True)
            log.reopen()
            assert assert_refused(log(claim(1, "i", waited_for=1)), Reason.RUN_FAILED).value == b"boom"
            log(claim(1, "i"))
            log.reopen()
            assert_refused(log(result(1, "h", 1)), Reason.LEASE_LOST)
            receipt = assert_committed(log(result(1, "i", 2)))
            log.reopen()
            assert assert_replayed(log(claim(1, "j"))).receipt == receipt
            assert log.run(log.store.get_key_status(identity(claim(1, "j")))).lease is None
            assert log(claim(2, "j")) == Granted(3, log.clock.wall_ms() + 30_000)

    def test_sibling_store_renews_leases_of_the_same_log(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(claim(1, "h", lease_ms=1000))
            sibling = log.store.create_sibling()
            if sibling is None:
                return
            log.run(sibling.open())
            log.clock.advance(900)
            renewal = Renew(policy=RUNS, scope=CAMPAIGN, key=key(1), holder="h", fence=1, lease_ms=1000)
            batch_result = log.run(sibling.commit([Request((renewal,))]))
            assert batch_result.verdicts == [[Granted(1, log.clock.wall_ms() + 1000)]]
            log.clock.advance(900)
            assert_refused(log(claim(1, "i")), Reason.IN_FLIGHT)
            assert_committed(log(result(1, "h", 1)))
            lost = log.run(sibling.commit([Request((renewal,))])).verdicts[0][0]
            assert_refused(lost, Reason.LEASE_LOST)
            assert sibling.epoch == log.store.epoch
            log.run(sibling.close())
            assert_committed(log(event(1)))

    def test_members_and_acknowledgements_survive_reopening(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(SetMember(CHANNEL, "user:ann"), SetMember(CHANNEL, "user:bob"), message(1), message(2))
            log.commit_items(Acknowledge(CHANNEL, "user:ann", 2), SetMember(CHANNEL, "user:bob", present=False))
            log.reopen()
            assert log(Acknowledge(CHANNEL, "user:ann", 2)) == Applied(changed=False)
            assert assert_refused(log(Acknowledge(CHANNEL, "user:ann", 3)), Reason.INVALID_ACKNOWLEDGEMENT).current == 2
            assert_refused(log(message(3, actor="user:bob")), Reason.NOT_A_MEMBER)
            assert assert_committed(log(message(3))).sequence == 3
            assert log(Acknowledge(CHANNEL, "user:ann", 3)) == Applied(changed=True)

    def test_rate_survives_reopening(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            rate = Rate(2, burst=2)
            first = assert_committed(log(event(1, actor="user:zoë'\"", rate=rate)))
            log.reopen()
            second, late = log.commit_items(*[event(number, actor="user:zoë'\"", rate=rate) for number in (2, 3)])
            assert_committed(second)
            assert assert_refused(late, Reason.RATE_LIMITED).retry_after_ms == 500
            log.reopen()
            assert (
                assert_refused(log(event(3, actor="user:zoë'\"", rate=rate)), Reason.RATE_LIMITED).retry_after_ms == 500
            )
            assert assert_replayed(log(event(1, actor="user:zoë'\"", rate=rate))).receipt == first
            assert_committed(log(event(4, actor="user:ann", rate=rate)))
            log.clock.advance(500)
            log.reopen()
            assert_committed(log(event(3, actor="user:zoë'\"", rate=rate)))
            assert_refused(log(event(5, actor="user:zoë'\"", rate=rate)), Reason.RATE_LIMITED)

    def test_each_stream_has_a_separate_rate(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            rate = Rate(1, burst=1)
            log.commit_items(SetMember(CHANNEL, "user:ann"), SetMember("chat/2", "user:ann"))
            assert_committed(log(message(1, rate=rate)))
            log.reopen()
            assert_refused(log(message(2, rate=rate)), Reason.RATE_LIMITED)
            assert_committed(log(message(2, scope="chat/2", rate=rate)))
            assert_committed(log(event(2, actor="user:ann", rate=rate)))

    def test_refused_writes_use_no_rate(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            rate = Rate(1, burst=1)
            log(event(9, "a"))
            verdicts = log.commit_items(event(1, actor="user:ann", rate=rate), event(9, "b"), mode=Mode.ALL)
            assert_refused(verdicts[0], Reason.NOT_PROCESSED)
            assert_refused(log(event(1, actor="user:ann", rate=rate, expected_position=7)), Reason.UNEXPECTED_POSITION)
            log.reopen()
            assert_committed(log(event(1, actor="user:ann", rate=rate)))
            before = log.heads()
            assert_refused(log(event(2, actor="user:ann", rate=rate)), Reason.RATE_LIMITED)
            assert log.heads() == before

    def test_rate_admits_a_request_as_a_whole_or_not_at_all(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            events = [event(number, actor="user:ann", rate=Rate(2, burst=2)) for number in range(1, 6)]
            first = assert_committed(log(events[0]))
            log.reopen()
            before = log.heads()
            skipped, late = log.commit_items(*events[1:3], is_admitted_whole=True)
            assert assert_refused(skipped, Reason.NOT_PROCESSED).index == 1
            assert assert_refused(late, Reason.RATE_LIMITED).retry_after_ms == 500
            assert log.heads() == before
            assert assert_replayed(log.commit_items(*events[:2], is_admitted_whole=True)[0]).receipt == first
            before = log.heads()
            # The request exceeds the burst, so it is admitted only when the bucket is full, and leaves the bucket in
            # debt.
            verdicts = log.commit_items(*events[2:], mode=Mode.UNTIL_REFUSED, is_admitted_whole=True)
            assert assert_refused(verdicts[2], Reason.RATE_LIMITED).retry_after_ms == 1000
            assert log.heads() == before
            log.clock.advance(1000)
            log.reopen()
            assert [
                assert_committed(commit_item).position
                for commit_item in log.commit_items(*events[2:], is_admitted_whole=True)
            ] == [3, 4, 5]
            log.reopen()
            assert (
                assert_refused(
                    log(event(6, actor="user:ann", rate=Rate(2, burst=2))), Reason.RATE_LIMITED
                ).retry_after_ms
                == 1000
            )

    def test_fences_and_revisions_survive_reopening(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            for number in range(1, 4):
                log(claim(number, "h"))
                log.reopen()
            (head,) = log.heads().values()
            assert (head.fence, head.revision, head.position, head.height) == (3, 3, 0, 0)

    # --- erasure

    def test_erased_record_keeps_its_position_and_hashes(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            items = [event(number, f"secret {number}", partitions=("p",)) for number in range(1, 6)]
            log.commit_items(*items)
            before = log.read_all()
            erased = log.run(log.store.erase(0, [2, 4, 4, 99, 0, -1]))
            assert erased == 2
            log.reopen()
            after = log.read_all()
            assert [it.erased for it in after] == [False, True, False, True, False]
            assert [it.body for it in after] == [b"secret 1", b"", b"secret 3", b"", b"secret 5"]
            assert [encode_record_header(it) for it in after] == [encode_record_header(it) for it in before]
            assert list_positions(log.read_all(partitions=("p",))) == [1, 2, 3, 4, 5]
            check_headers(log, 0)

    def test_retry_of_an_erased_write_is_marked(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            receipt = assert_committed(log(event(1)))
            number = assert_committed(log(transaction(1, 1)))
            log.run(log.store.erase(0, [1]))
            log.run(log.store.erase(number.lane, [1]))
            for _ in range(2):
                retry = assert_replayed(log(event(1)))
                assert (retry.receipt, retry.erased) == (receipt, True)
                by_number = assert_replayed(log(transaction(0, 1)))
                assert (by_number.receipt, by_number.erased) == (number, True)
                assert_refused(log(event(1, "other")), Reason.IDENTITY_REUSED)
                (known,) = log.run(log.store.find_keys([identity(event(1))]))
                assert known is not None
                assert known.erased
                key_status = log.run(log.store.get_key_status(identity(event(1))))
                assert key_status.record is not None
                assert (key_status.record.erased, key_status.record.body) == (True, b"")
                log.reopen()

    def test_erasures_are_counted_and_increment_the_revision(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(event(1), event(2), transaction(1, 1))
            before = log.heads()
            assert log.run(log.store.erasures()) == 0
            assert log.run(log.store.erase(0, [1])) == 1
            assert log.run(log.store.erasures()) == 1
            assert log.heads()[0].revision == before[0].revision + 1
            assert log.heads()[0].block_hash == before[0].block_hash
            for lane, places in ((0, [1]), (0, []), (0, [3]), (9, [1])):
                assert log.run(log.store.erase(lane, places)) == 0
            assert log.heads()[0].revision == before[0].revision + 1
            log.reopen()
            assert log.run(log.store.erasures()) == 1
            log.run(log.store.erase(0, [1, 2]))
            assert log.run(log.store.erasures()) == 2

    def test_empty_body_can_be_erased(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1, body=b""))
            assert [it.erased for it in log.read_all()] == [False]
            assert log.run(log.store.erase(0, [1])) == 1
            assert [it.erased for it in log.read_all()] == [True]
            check_headers(log, 0)

    def test_writes_continue_after_an_erasure(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1))
            log.run(log.store.erase(0, [1]))
            assert_committed(log(event(2)))
            assert log.run(log.store.block(0, 2))[0].previous == log.run(log.store.block(0, 1))[0].hash

    def test_erasure_leaves_other_records_unchanged(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(event(1), event(2), transaction(1, 1))
            log.run(log.store.erase(0, [1]))
            lane = next(lane for lane in log.heads() if lane)
            assert chain(log, lane, 1) == [1]
            assert [it.erased for it in log.read_all()] == [True, False]


def check_headers(log: StoreDriver, lane: int) -> None:
    """Verify every record of the lane, erased or not, against its block by the stored body hash."""
    for height in range(1, log.heads()[lane].height + 1):
        block, evidence = log.run(log.store.block(lane, height))
        leaves = [
            hash_leaf(encode_record_header(evidence_entry.record), evidence_entry.body_hash)
            for evidence_entry in evidence
        ]
        for evidence_entry, proof in zip(evidence, [prove(leaves, index) for index in range(len(leaves))], strict=True):
            assert verify_header(evidence_entry.record, evidence_entry.body_hash, proof, block)
            assert evidence_entry.record.erased is (evidence_entry.salt == b"")

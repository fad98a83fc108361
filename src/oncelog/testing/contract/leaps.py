"""Contract tests for leaps: after a restore, numbers continue above every number of the lost history."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from itertools import pairwise
from pathlib import Path

from oncelog.core.internal_records import RESTORE_ACTOR
from oncelog.core.limits import REQUESTED_ABOVE_MAX
from oncelog.core.policy import RESTORE_POLICY
from oncelog.core.rules.leaps import LEAP_MIN, LEAP_PER_SECOND
from oncelog.core.tenants import Tenant
from oncelog.core.values import Acknowledge, Applied, Granted, Reason, Request, SetCursor, SetMember, Settings
from oncelog.errors import ClockJumpedError, SettingsError
from oncelog.storage.metadata import EpochRenewal
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.driver import Contract, StoreDriver, list_positions
from oncelog.testing.contract.writes import CHANNEL, DAY_MS, ORGANISATION, claim, event, message, transaction

ABOVE = 1000
TWO_LANES = Settings(lanes=2)


class LeapContract(Contract):
    """Effects of `renew_epoch`."""

    def test_numbers_continue_above_a_leap(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            before = _fill(log)
            renewed = _renew_epoch(log)
            assert (renewed.above, renewed.old_epoch) == (ABOVE, before)
            log.reopen()
            assert log.store.epoch == renewed.new_epoch != before
            receipt = assert_committed(log(event(4, partitions=("p",))))
            assert (receipt.position, receipt.height) == (ABOVE + 2, ABOVE + 2)
            assert [assert_committed(log(message(number))).sequence for number in (3, 4)] == [ABOVE + 1, ABOVE + 2]
            granted = log(claim(2, "h2"))
            assert isinstance(granted, Granted)
            assert granted.fence == ABOVE + 1
            for lane, head in log.heads().items():
                assert min(head.position, head.height, head.revision) > ABOVE, lane
                assert head.fence >= ABOVE

    def test_previous_epochs_lists_the_epochs_before_each_leap(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            first = _fill(log)
            assert log.run(log.store.previous_epochs()) == ()
            second = _renew_epoch(log).new_epoch
            log.reopen()
            assert log.run(log.store.previous_epochs()) == (first,)
            _renew_epoch(log, 5 * ABOVE)
            log.reopen()
            assert log.run(log.store.previous_epochs()) == (first, second)
            log.run(log.store.erase(0, [ABOVE + 1]))
            assert log.run(log.store.previous_epochs()) == (second,)

    def test_sequences_of_new_streams_start_at_one_after_a_leap(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            log(SetMember("chat/empty", "user:ann"))
            _renew_epoch(log)
            log.commit_items(SetMember("chat/new", "user:ann"))
            log.reopen()
            assert assert_committed(log(message(1, scope="chat/new"))).sequence == 1
            assert assert_committed(log(message(2, scope="chat/new"))).sequence == 2
            # A stream from before the restore may have had messages in the lost history.
            assert assert_committed(log(message(1, scope="chat/empty"))).sequence == ABOVE + 1

    def test_client_sequences_and_known_keys_survive_a_leap(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            first = assert_replayed(log(event(1, partitions=("p",)))).receipt
            _renew_epoch(log)
            log.reopen()
            assert assert_replayed(log(event(1, partitions=("p",)))).receipt == first
            assert first is not None
            assert first.position == 1
            assert_refused(log(transaction(3, 4)), Reason.SEQUENCE_GAP)
            receipt = assert_committed(log(transaction(3, 3)))
            assert (receipt.client_sequence, receipt.sequence) == (3, ABOVE + 1)

    def test_acknowledgements_and_expectations_refer_to_the_last_sequence(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            _renew_epoch(log)
            log.reopen()
            beyond = Acknowledge(CHANNEL, "user:ann", 3)
            assert assert_refused(log(beyond), Reason.INVALID_ACKNOWLEDGEMENT).current == 2
            assert log(Acknowledge(CHANNEL, "user:ann", 2)) == Applied(changed=True)
            stale = message(3, expected_sequence=ABOVE)
            assert assert_refused(log(stale), Reason.UNEXPECTED_POSITION).current == 2
            assert assert_committed(log(message(3, expected_sequence=2))).sequence == ABOVE + 1
            assert log(Acknowledge(CHANNEL, "user:ann", ABOVE + 1)) == Applied(changed=True)

    def test_readers_with_old_cursors_continue_after_the_gap(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            _renew_epoch(log)
            log.reopen()
            log.commit_items(event(4, partitions=("p", "q")), message(3))
            wanted = [1, 2, 3, ABOVE + 1, ABOVE + 2]
            assert list_positions(log.read_all()) == list_positions(log.read_all(limit=1)) == wanted
            assert list_positions(log.read_all(partitions=("p",), limit=1)) == [1, 2, 3, ABOVE + 2]
            assert list_positions(log.read_all(partitions=("q", "p"), limit=2)) == [1, 2, 3, ABOVE + 2]
            # A reader whose cursor is in the lost history.
            assert list_positions(log.read_all(after=5)) == [ABOVE + 1, ABOVE + 2]
            sequences = [record.sequence for record in log.read_all(stream=CHANNEL, limit=1)]
            assert sequences == [1, 2, ABOVE + 1]
            assert [record.sequence for record in log.read_all(stream=CHANNEL, after=4)] == [ABOVE + 1]
            page = log.read_page(after=3, limit=1)
            assert (page.next, page.has_more, page.newest) == (ABOVE + 1, True, ABOVE + 2)

    def test_leap_writes_a_restore_record_to_every_lane(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            renewed = _renew_epoch(log)
            log(event(4))
            log.reopen()
            for lane in range(3):
                record = next(one for one in log.read_all(lane=lane) if one.position == ABOVE + 1)
                assert (record.policy, record.actor, record.height) == (RESTORE_POLICY, RESTORE_ACTOR, ABOVE + 1)
                assert (record.scope, record.sequence, record.partitions, record.key) == ("", 0, (), b"")
                assert renewed.new_epoch.encode() in record.body
                blocks = [one.block for one in log.run(log.store.blocks(lane, 0, 100, ""))]
                assert [block.count for block in blocks if block.height == ABOVE + 1] == [1]
                assert all(after.previous == before.hash for before, after in pairwise(blocks))
                assert log.heads()[lane].block_hash == blocks[-1].hash
                after = log.run(log.store.blocks(lane, ABOVE // 2, 1, ""))
                assert [one.block.height for one in after] == [ABOVE + 1]
            assert isinstance(log.catch_error(log.store.block(0, ABOVE)), LookupError)

    def test_lag_counts_records_not_numbers(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            log.commit_items(SetCursor("all", 1), SetCursor("some", 1, CHANNEL), SetCursor("fresh", 2, CHANNEL))
            _renew_epoch(log)
            log.commit_items(event(4), message(3))
            log(SetCursor("fresh", ABOVE + 1, CHANNEL))
            log.reopen()
            lags = {one.name: one.lag for one in log.run(log.store.consumers())}
            assert lags == {"all": 4, "some": 2, "fresh": 0}

    def test_sequence_counts_exclude_the_gap(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            _renew_epoch(log)
            log.commit_items(message(3), message(4))
            log.reopen()
            back = [log.run(log.store.sequence_before(CHANNEL, ABOVE + 2, count)) for count in range(1, 6)]
            assert back == [ABOVE + 2, ABOVE + 1, 2, 1, 0]
            assert log.run(log.store.sequence_before(CHANNEL, ABOVE, 1)) == 2
            ahead = [log.run(log.store.sequence_after(CHANNEL, 1, count)) for count in (1, 2, 3, 2**53)]
            assert ahead == [2, ABOVE + 1, ABOVE + 2, ABOVE + 2]
            assert log.run(log.store.sequence_after(CHANNEL, ABOVE + 2, 1)) == ABOVE + 2
            assert log.run(log.store.sequence_before("chat/none", 5, 1)) == 0
            assert log.run(log.store.sequence_after("chat/none", 0, 1)) == 0

    def test_new_tenant_counts_records_on_both_sides_of_the_gap(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            _renew_epoch(log)
            log.commit_items(event(4, partitions=("p",)), message(3))
            assert log.run(log.store.set_tenants([Tenant(prefix="p", records_max=100), Tenant(prefix=CHANNEL)]))
            usage = {tenant.prefix: usage.records for tenant, usage in log.run(log.store.usage())}
            assert usage == {"p": 4, CHANNEL: 4}, "three messages and a member"

    def test_second_leap_continues_above_the_first(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            _renew_epoch(log)
            assert_committed(log(event(4)))
            _renew_epoch(log, 5 * ABOVE)
            log.reopen()
            assert assert_committed(log(message(3))).sequence == 5 * ABOVE + 1
            assert assert_committed(log(event(5))).position == 5 * ABOVE + 2
            wanted = [1, 2, 3, ABOVE + 1, ABOVE + 2, 5 * ABOVE + 1, 5 * ABOVE + 2]
            assert list_positions(log.read_all()) == wanted

    def test_default_leap_grows_with_the_time_since_the_last_commit(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            highest = max(max(head.position, head.fence, head.revision) for head in log.heads().values())
            log.clock.advance(90_000)
            assert log.run(log.store.renew_epoch()).above == highest + LEAP_MIN + 90 * LEAP_PER_SECOND

    def test_default_leap_uses_the_steady_clock_if_the_wall_clock_is_behind(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            highest = max(max(head.position, head.fence, head.revision) for head in log.heads().values())
            log.clock.advance(90_000)
            log.clock.jump(-DAY_MS)
            assert log.run(log.store.renew_epoch()).above == highest + LEAP_MIN + 90 * LEAP_PER_SECOND

    def test_leap_succeeds_after_a_clock_jump(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            _fill(log)
            newest = log.heads()[0].log_time_ms
            log.clock.jump(8 * DAY_MS)
            _renew_epoch(log)
            log.reopen()
            assert newest <= log.heads()[0].log_time_ms < newest + DAY_MS
            assert isinstance(log.catch_error(log.store.commit([Request((event(4),))])), ClockJumpedError)
            log.run(log.store.confirm_clock())
            assert assert_committed(log(event(4))).position == ABOVE + 2

    def test_leap_below_the_log_or_above_the_limit_is_refused(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, TWO_LANES) as log:
            epoch = _fill(log)
            heads = log.heads()
            for above in (0, max(head.revision for head in heads.values()) - 1, REQUESTED_ABOVE_MAX + 1):
                assert isinstance(log.catch_error(log.store.renew_epoch(above)), SettingsError), above
            assert (log.store.epoch, log.heads()) == (epoch, heads)
            assert _renew_epoch(log, REQUESTED_ABOVE_MAX).above == REQUESTED_ABOVE_MAX
            assert assert_committed(log(event(4))).position == REQUESTED_ABOVE_MAX + 2
            assert _renew_epoch(log, REQUESTED_ABOVE_MAX + 10).above == REQUESTED_ABOVE_MAX + 10

    def test_leap_skips_evictions(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1, eviction_interval=10)) as log:
            assert_committed(log(transaction(1, 1)))
            log.clock.advance(2 * DAY_MS)
            _renew_epoch(log, 95)
            assert_refused(log(transaction(2, 3)), Reason.SEQUENCE_GAP)  # the client is remembered, at sequence 1
            log.commit_items(*[transaction(number, number, client="other") for number in range(1, 4)])
            assert log.heads()[1].position == 99
            assert_refused(log(transaction(2, 3)), Reason.SEQUENCE_GAP)
            assert assert_committed(log(transaction(4, 4, client="other"))).position == 100
            log.reopen()
            assert assert_committed(log(transaction(9, 1))).client_sequence == 1

    def test_restore_record_at_an_eviction_position_evicts(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1, eviction_interval=10)) as log:
            assert_committed(log(transaction(1, 1)))
            log.clock.advance(2 * DAY_MS)
            _renew_epoch(log, 99)
            log.reopen()
            assert assert_committed(log(transaction(9, 1, scope=ORGANISATION))).position == 101


def _fill(log: StoreDriver) -> str:
    """Commit three events, two messages, two transactions and a lease. Returns the epoch."""
    log.commit_items(*[event(number, partitions=("p",)) for number in (1, 2, 3)])
    log.commit_items(SetMember(CHANNEL, "user:ann"), message(1), message(2))
    log.commit_items(transaction(1, 1), transaction(2, 2), claim(1, "h1"))
    return log.store.epoch


def _renew_epoch(log: StoreDriver, above: int = ABOVE) -> EpochRenewal:
    return log.run(log.store.renew_epoch(above))

"""Contract tests for time: log time never decreases, and a clock jump does not make the log forget keys."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from pathlib import Path

from oncelog.core.values import Reason, Request, SetMember, Settings
from oncelog.errors import ClockJumpedError
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.driver import Contract, StoreDriver
from oncelog.testing.contract.writes import CHANNEL, DAY_MS, HOUR_MS, claim, event, identity, message, transaction


class TimeContract(Contract):
    """Effects of clock changes on a store."""

    def test_log_time_is_the_time_of_the_commit(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            for number in range(3):
                log.clock.advance(1000)
                assert assert_committed(log(event(number))).log_time_ms == log.clock.wall_ms()

    def test_log_time_does_not_decrease_when_the_clock_is_set_back(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            first = assert_committed(log(event(1))).log_time_ms
            log.clock.jump(-HOUR_MS)
            assert assert_committed(log(event(2))).log_time_ms == first
            assert assert_committed(log(transaction(1, 1))).log_time_ms == first
            log.reopen()
            log.clock.advance(1000)
            assert assert_committed(log(event(3))).log_time_ms == first
            log.clock.jump(HOUR_MS)
            assert assert_committed(log(event(4))).log_time_ms == first + 1000

    def test_jump_forward_refuses_new_writes_and_forgets_no_keys(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(eviction_interval=1)) as log:
            prepare(log)
            before = log.heads()
            log.clock.jump(8 * DAY_MS)
            log.reopen()
            for _ in range(2):
                for item in (event(1), transaction(1, 1), message(1)):
                    assert_replayed(log(item))
                side_state = (claim(1, "h"), SetMember(CHANNEL, "user:bob"))
                for new in (event(2), transaction(2, 2), message(2), *side_state):
                    error = log.catch_error(log.store.commit([Request((new,))]))
                    assert isinstance(error, ClockJumpedError)
                    assert error.ahead_ms == 8 * DAY_MS
            assert log.heads() == before
            assert all(log.run(log.store.find_keys([identity(it) for it in (event(1), message(1))])))

    def test_jump_of_25_hours_refuses_new_writes(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(transaction(1, 1))
            log.clock.jump(25 * HOUR_MS)
            assert_replayed(log(transaction(1, 1)))
            assert isinstance(log.catch_error(log.store.commit([Request((event(1),))])), ClockJumpedError)

    def test_elapsed_time_is_not_a_jump(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            prepare(log)
            log.clock.advance(7 * DAY_MS)
            log.reopen()
            assert assert_committed(log(message(1))).sequence == 2
            assert_replayed(log(event(1)))
            (known,) = log.run(log.store.find_keys([identity(message(1))]))
            assert known is not None
            assert known.receipt.sequence == 2

    def test_small_jump_is_accepted(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1))
            log.clock.jump(60_000)
            assert assert_committed(log(event(2))).log_time_ms == log.clock.wall_ms()

    def test_corrected_clock_needs_no_confirmation(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1))
            log.clock.jump(25 * HOUR_MS)
            assert isinstance(log.catch_error(log.store.commit([Request((event(2),))])), ClockJumpedError)
            log.clock.jump(-25 * HOUR_MS)
            log.clock.advance(5)
            assert assert_committed(log(event(2))).log_time_ms == log.clock.wall_ms()

    def test_confirmed_clock_is_accepted(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            prepare(log)
            log.clock.jump(8 * DAY_MS)
            assert isinstance(log.catch_error(log.store.commit([Request((event(2),))])), ClockJumpedError)
            log.run(log.store.confirm_clock())
            log.reopen()
            assert assert_committed(log(event(2))).log_time_ms == log.clock.wall_ms()
            assert assert_committed(log(message(1))).sequence == 2  # the key has expired

    def test_machine_restart_is_not_a_jump(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log(event(1))
            log.clock.advance(1000)
            log.clock.restart()
            log.clock.jump(2 * HOUR_MS)
            log.reopen()
            assert assert_committed(log(event(2))).log_time_ms == log.clock.wall_ms()
            log.clock.jump(2 * HOUR_MS)
            assert isinstance(log.catch_error(log.store.commit([Request((event(3),))])), ClockJumpedError)

    def test_keys_are_evicted_at_a_log_position(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path, Settings(lanes=1, eviction_interval=3)) as log:
            log(transaction(1, 1))
            log.clock.advance(25 * HOUR_MS)
            assert_replayed(log(transaction(1, 1)))
            log.commit_items(transaction(2, 1, client="c2"), transaction(3, 2, client="c2"))
            log.reopen()
            assert assert_committed(log(transaction(1, 1))).position == 4
            assert_refused(log(transaction(1, 1, content="y")), Reason.IDENTITY_REUSED)


def prepare(log: StoreDriver) -> None:
    """Commit a write under each kind of retention."""
    for item in (SetMember(CHANNEL, "user:ann"), event(1), transaction(1, 1), message(1)):
        log(item)

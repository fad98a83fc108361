"""Expiry removes exactly the rows that have expired in log time."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from oncelog.core.limits import LEASE_MEMORY_MS, LEASE_MS_DEFAULT
from oncelog.core.operations import SetEntity
from oncelog.core.policy import BUILT_IN_POLICIES
from oncelog.core.values import Committed, Granted, Rate, Refused, Request, Settings
from oncelog.storage.queries.expiry import EXPIRY_BATCH_ROWS, EXPIRY_INTERVAL_COMMITS
from oncelog.storage.queries.writes import declare_policies
from oncelog.storage.sqlite.transaction import TransactionOptions
from oncelog.storage.sqlite.writer import Writer
from oncelog.testing.clock import ManualClock
from oncelog.testing.contract.writes import DAY_MS, claim, event, transaction
from storage.sqlite.writers import QuickDriver

ROWS: Final = EXPIRY_BATCH_ROWS + 50
"""Number of rows that exceeds one slice of an expiry pass."""


class ExpiringLog:
    """A log with helpers that run expiry."""

    def __init__(self, session: Writer, clock: ManualClock) -> None:
        self.session = session
        self.clock = clock
        self._numbers = itertools.count(100_000)

    def commit(self, *items: Any) -> set[type]:
        return {type(verdict) for verdict in self.session.commit([Request(items)], None).verdicts[0]}

    def run_expiry(self) -> None:
        """Commit often enough for two full expiry passes."""
        for _ in range(EXPIRY_INTERVAL_COMMITS * 2 * (ROWS // EXPIRY_BATCH_ROWS + 2)):
            self.commit(event(next(self._numbers)))

    def rows(self, table: str) -> int:
        return int(self.session.connection.execute(f"SELECT count(*) FROM oncelog_{table}").fetchone()[0])  # noqa: S608

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        self.session.confirm_clock()


@contextmanager
def expiring_log(path: Path) -> Iterator[ExpiringLog]:
    clock = ManualClock()
    session = Writer(str(path), QuickDriver(), TransactionOptions(clock, bytes))
    session.open(Settings(lanes=1, eviction_interval=10))
    session.run_write(declare_policies, BUILT_IN_POLICIES)
    try:
        yield ExpiringLog(session, clock)
    finally:
        session.close()


@pytest.mark.rule("CO-17")
def test_ended_leases_are_removed_once_they_are_no_longer_remembered(tmp_path: Path) -> None:
    with expiring_log(tmp_path / "log.db") as log:
        assert log.commit(*[claim(number, "holder") for number in range(ROWS)]) == {Granted}
        log.advance(LEASE_MS_DEFAULT + LEASE_MEMORY_MS)
        log.commit(claim(ROWS, "holder"))  # advances the log time of the lane
        log.run_expiry()
        assert log.rows("leases") == ROWS + 1
        log.advance(1)
        log.commit(claim(ROWS + 1, "holder"))
        log.run_expiry()
        assert log.rows("leases") == 2


@pytest.mark.rule("CO-17")
def test_evicted_clients_are_removed(tmp_path: Path) -> None:
    with expiring_log(tmp_path / "log.db") as log:
        assert log.commit(*[transaction(number, 1, client=f"c{number}") for number in range(1, ROWS + 1)]) == {
            Committed
        }
        log.advance(DAY_MS)
        log.commit(*[transaction(ROWS + number, number, client="busy") for number in range(1, 21)])
        log.run_expiry()
        assert log.rows("clients") == ROWS + 1  # an age of exactly one day is not too old
        log.advance(1)
        log.commit(*[transaction(ROWS + 20 + number, 20 + number, client="busy") for number in range(1, 21)])
        log.run_expiry()
        assert log.rows("clients") == 1
        assert log.commit(transaction(9999, 1, client="c1")) == {Committed}  # the sequence restarts at 1


@pytest.mark.rule("CO-17")
def test_expired_entities_are_removed(tmp_path: Path) -> None:
    with expiring_log(tmp_path / "log.db") as log:
        end_ms = log.clock.wall_ms() + 1000
        operations = [
            SetEntity(f"entity {number}", b"x", expires_at_ms=end_ms if number % 2 else None) for number in range(ROWS)
        ]
        log.commit(transaction(1, 1, *operations))
        log.advance(999)
        log.commit(transaction(2, 2))
        log.run_expiry()
        assert log.rows("entities") == ROWS
        log.advance(1)
        log.commit(transaction(3, 3))
        log.run_expiry()
        assert log.rows("entities") == ROWS // 2


@pytest.mark.rule("CO-17")
def test_refilled_rate_buckets_are_removed(tmp_path: Path) -> None:
    rate = Rate(1, burst=2)
    with expiring_log(tmp_path / "log.db") as log:
        everybody = [event(number, actor=f"user {number}", rate=rate) for number in range(ROWS)]
        assert log.commit(*everybody) == {Committed}
        assert log.commit(event(ROWS, actor="user 1", rate=rate)) == {Committed}
        log.advance(999)
        log.run_expiry()  # events of this actor advance the log time of the lane
        assert log.rows("rates") == ROWS
        assert log.commit(event(ROWS + 1, actor="user 1", rate=rate)) == {Refused}
        log.advance(1)
        log.run_expiry()
        assert log.rows("rates") == 1
        assert log.commit(event(ROWS + 1, actor="user 1", rate=rate)) == {Committed}
        log.advance(2000)
        log.run_expiry()
        assert log.rows("rates") == 0
        assert log.commit(event(ROWS + 2, actor="user 1", rate=rate)) == {Committed}


def test_undecodable_policy_does_not_stop_commits(tmp_path: Path) -> None:
    """The policy may be from a newer version. Its rows are kept."""
    with expiring_log(tmp_path / "log.db") as log:
        log.commit(transaction(1, 1, client="c1"))
        log.session.connection.execute("UPDATE oncelog_policies SET declaration = '{}' WHERE name = 'ledger'")
        log.advance(2 * DAY_MS)
        log.commit(*[transaction(10 + number, number, client="busy") for number in range(1, 21)])
        log.run_expiry()
        assert log.rows("clients") == 2


def test_expiry_keeps_up_with_large_batches(tmp_path: Path) -> None:
    with expiring_log(tmp_path / "log.db") as log:
        for start in range(0, 40 * ROWS, ROWS):
            log.commit(*[claim(start + number, "holder") for number in range(ROWS)])
        log.advance(LEASE_MS_DEFAULT + LEASE_MEMORY_MS + 1)
        for start in range(40 * ROWS, 120 * ROWS, ROWS):
            log.commit(*[claim(start + number, "holder") for number in range(ROWS)])
        assert log.rows("leases") == 80 * ROWS

"""Event id scopes: an event commits once, even if its writers disagree on which tenants have separate ids."""

import tracemalloc
from itertools import permutations

import pytest

from oncelog.core.limits import PARTITION_CHARACTERS_MAX, PARTITIONS_MAX
from oncelog.core.plan import plan
from oncelog.core.tenants import Tenant, Tenants, event_scope
from oncelog.core.values import Committed, Reason, Receipt, Refused, Replayed, Request, Snapshot, Submission, Verdict
from oncelog.testing.contract.assertions import assert_refused, assert_replayed
from oncelog.testing.contract.writes import event

PARTITIONS: tuple[tuple[str, ...], ...] = (
    ("a/x",),
    ("a/x", "b/x"),
    ("b/x", "c/x"),
    ("a/x", "b/x", "c/x"),
    ("a/x", "other"),
    ("other",),
)


class SwitchedLog:
    """A log whose tenants switch to separate ids one by one, with a server for each version of the settings."""

    def __init__(self) -> None:
        self.snapshot = Snapshot()
        self.servers = [Tenants(())]

    def switch_on(self, prefix: str) -> None:
        known = self.servers[-1].by_prefix.values()
        self.servers.append(Tenants([*known, Tenant(prefix, own_ids=True)]))
        self.snapshot.tenants = self.servers[-1]

    def submit(self, submission: Submission) -> Verdict:
        decided = plan([Request((submission,))], self.snapshot, 1_700_000_000_000)
        self.snapshot.keys = {**self.snapshot.keys, **decided.changes.keys}
        self.snapshot.heads = {**self.snapshot.heads, **decided.changes.heads}
        return decided.verdicts[0][0]

    def submit_by(self, server: Tenants, number: int, partitions: tuple[str, ...]) -> Verdict:
        return self.submit(
            event(number, f"event {number}", scope=server.get_event_scope(partitions), partitions=partitions)
        )


@pytest.mark.rule("EV-4", "EV-5")
@pytest.mark.parametrize("order", list(permutations("abc")), ids="".join)
def test_retry_by_any_server_is_replayed_after_every_switch(order: tuple[str, ...]) -> None:
    log = SwitchedLog()
    committed: dict[int, tuple[tuple[str, ...], Receipt]] = {}
    number = 0
    for prefix in ("", *order):
        if prefix:
            log.switch_on(prefix)
        for first in log.servers:
            for partitions in PARTITIONS:
                number += 1
                # The last server is up to date, so it commits the event if no earlier server has.
                verdicts = [log.submit_by(server, number, partitions) for server in (first, *log.servers)]
                receipts = [verdict.receipt for verdict in verdicts if isinstance(verdict, Committed)]
                assert len(receipts) == 1
                assert all(verdict.reason is Reason.WRONG_SCOPE for verdict in verdicts if isinstance(verdict, Refused))
                assert isinstance(verdicts[-1], Committed | Replayed)
                committed[number] = (partitions, receipts[0])
        for server in log.servers:
            for known, (partitions, receipt) in committed.items():
                assert assert_replayed(log.submit_by(server, known, partitions)).receipt == receipt


def test_refusal_states_the_expected_scope() -> None:
    log = SwitchedLog()
    log.switch_on("a")
    late = assert_refused(log.submit(event(1, partitions=("a/x",))), Reason.WRONG_SCOPE)
    assert (late.field, late.retry_after_ms) == ("scope", 1000)
    assert "belongs in the scope 'tenant/a', not ''" in late.message
    other = assert_refused(log.submit(event(1, scope=event_scope("a"), partitions=("other",))), Reason.WRONG_SCOPE)
    assert "belongs in the scope '', not 'tenant/a'" in other.message


def test_scopes_of_projects_are_not_checked() -> None:
    log = SwitchedLog()
    log.switch_on("a")
    for scope in ("project/p", "tenant/b", "tenant/a/b"):
        assert isinstance(log.submit(event(1, scope=scope, partitions=("a/x",))), Committed)


@pytest.mark.rule("CO-30")
def test_writes_with_many_long_partitions_use_little_memory() -> None:
    tenants = Tenants([Tenant("a", own_ids=True)])
    long = "\U0001f600" * (PARTITION_CHARACTERS_MAX - 10)
    tracemalloc.start()
    try:
        for number in range(300):
            partitions = tuple(f"a/{number}/{one}{long}" for one in range(PARTITIONS_MAX))
            assert tenants.get_event_scope(partitions) == "tenant/a"
            assert [tenant.prefix for tenant in tenants.list_for("", partitions)] == ["a"]
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes < 1_000_000

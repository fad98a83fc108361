"""Contract tests for tenants: every store counts usage in the same way."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from oncelog.core.stored_bytes import submission_bytes
from oncelog.core.tenants import Tenant, Usage
from oncelog.core.values import Committed, Granted, Mode, Reason, Record
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.driver import Contract, StoreDriver
from oncelog.testing.contract.writes import CAMPAIGN, ORGANISATION, claim, event, result, transaction


class QuotasContract(Contract):
    """Storage and rate quotas."""

    def test_log_has_no_tenants_by_default(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            assert_committed(log(event(1, "x" * 60, partitions=("acme",))))
            assert get_usage(log) == {}
            assert not set_tenants(log), "unchanged: the log has no tenants"

    def test_writes_above_a_storage_limit_are_refused_and_retries_are_replayed(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            first = event(1, "1234567", partitions=("acme/orders",))
            fitting = event(3, "123", partitions=("acme/a", "acme/b", "acmes"))
            size, limit = submission_bytes(first), submission_bytes(first) + submission_bytes(fitting)
            assert set_tenants(log, Tenant("acme", bytes_max=limit), Tenant("other", records_max=1))
            receipt = assert_committed(log(first))
            log.reopen()
            late = assert_refused(log(event(2, body=b"x" * limit, partitions=("acme",))), Reason.QUOTA_EXCEEDED)
            assert (late.tenant, late.field, late.limit, late.current) == ("acme", "bytes_max", limit, size)
            assert late.retry_after_ms > 0
            assert_refused(log(event(3, "1234", partitions=("acme/a", "acme/b", "acmes"))), Reason.QUOTA_EXCEEDED)
            assert_committed(log(fitting))
            assert get_usage(log) == {"acme": (limit, 2), "other": (0, 0)}
            assert assert_replayed(log(event(1, "1234567", partitions=("acme/orders",)))).receipt == receipt
            assert_committed(log(event(4, "1", partitions=("other",))))
            late = assert_refused(log(event(5, "", partitions=("other/1",))), Reason.QUOTA_EXCEEDED)
            assert (late.tenant, late.field, late.limit, late.current) == ("other", "records_max", 1, 1)
            assert_committed(log(event(6, "x" * 60, partitions=("nobody",))))
            assert get_usage(log) == recount_usage(log, "acme", "other")

    def test_quota_covers_streams_in_all_lanes(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            fitting = transaction(30, 1, content="12345", scope=ORGANISATION)
            limit = submission_bytes(fitting)
            set_tenants(log, Tenant("org", records_max=20), Tenant("org/1", bytes_max=limit))
            for number in range(1, 21):
                assert_committed(log(transaction(number, 1, content="12", scope=f"org/{number + 1}")))
            assert len(log.heads()) > 1
            assert_refused(log(transaction(30, 1, scope="org/77")), Reason.QUOTA_EXCEEDED)
            assert set_tenants(log, Tenant("org", records_max=30), Tenant("org/1", bytes_max=limit)), (
                "the limit was raised"
            )
            assert_committed(log(fitting))
            assert_refused(log(transaction(31, 2, content="1", scope=ORGANISATION)), Reason.QUOTA_EXCEEDED)
            assert get_usage(log) == recount_usage(log, "org", "org/1")
            assert (get_usage(log)["org"][1], get_usage(log)["org/1"]) == (21, (limit, 1))

    def test_usage_is_counted_for_a_new_tenant_and_dropped_for_a_removed_one(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            log.commit_items(*[event(number, "12345", partitions=("acme/a", "acme/b")) for number in range(1, 8)])
            for number in range(1, 6):
                log(transaction(number, 1, content="abc", scope=f"acme/{number}"))
            log.run(log.store.erase(0, [2, 3]))
            log.reopen()
            set_tenants(log, Tenant("acme"), Tenant("nobody"))
            assert get_usage(log) == recount_usage(log, "acme", "nobody")
            assert get_usage(log)["acme"][1] == 12
            ninth = event(9, "12", partitions=("acme",))
            limit = get_usage(log)["acme"][0] + submission_bytes(ninth) - 1
            set_tenants(log, Tenant("acme", bytes_max=limit), Tenant("nobody"))
            assert_refused(log(ninth), Reason.QUOTA_EXCEEDED)
            set_tenants(log, Tenant("nobody"))
            assert_committed(log(ninth))
            assert get_usage(log) == {"nobody": (0, 0)}
            set_tenants(log, Tenant("acme"))
            assert get_usage(log) == {"acme": (limit + 1, 13)}

    def test_erased_bytes_are_subtracted_once(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            first, second = event(1, body=b"1" * 500, partitions=("acme/a",)), event(2, "12345", partitions=("acme/b",))
            limit = submission_bytes(first) + submission_bytes(second)
            set_tenants(log, Tenant("acme", bytes_max=limit), Tenant("acme/a"))
            log.commit_items(first, second)
            assert_refused(log(event(3, "1", partitions=("acme/b",))), Reason.QUOTA_EXCEEDED)
            for _ in range(2):
                log.run(log.store.erase(0, [1]))
                assert get_usage(log) == {"acme": (limit - 500, 2), "acme/a": (submission_bytes(first) - 500, 1)}
            log.reopen()
            assert_committed(log(event(3, "12345", partitions=("acme/b",))))
            assert_replayed(log(event(1, body=b"1" * 500, partitions=("acme/a",))))
            assert get_usage(log) == recount_usage(log, "acme", "acme/a")

    def test_tenant_rate_covers_all_its_streams_and_partitions(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("org", new_writes_per_second_max=2, new_writes_at_once_max=3))
            for number in range(1, 4):
                assert_committed(log(transaction(number, 1, scope=f"org/{number}")))
            log.reopen()
            late = assert_refused(log(event(1, partitions=("org/events",))), Reason.RATE_LIMITED)
            assert (late.tenant, late.limit, late.retry_after_ms) == ("org", 2, 500)
            assert_replayed(log(transaction(1, 1, scope="org/1")))
            log.clock.advance(500)
            assert_committed(log(event(1, partitions=("org/events",))))
            assert_refused(log(transaction(9, 1, scope="org/9")), Reason.RATE_LIMITED)
            log.clock.advance(500)
            assert_committed(log(transaction(9, 1, scope="org/9")))

    def test_refused_all_mode_request_uses_no_quota(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("acme", records_max=2, new_writes_per_second_max=100))
            events = [event(number, partitions=("acme",)) for number in range(1, 4)]
            assert assert_refused(log.commit_items(*events, mode=Mode.ALL)[2], Reason.QUOTA_EXCEEDED).tenant == "acme"
            assert get_usage(log) == {"acme": (0, 0)}
            assert [type(verdict) for verdict in log.commit_items(*events[:2], mode=Mode.ALL)] == [Committed, Committed]
            assert get_usage(log) == {"acme": (2 * submission_bytes(events[0]), 2)}

    def test_request_admitted_whole_must_fit_all_quotas(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            limits: dict[str, Any] = {"new_writes_per_second_max": 2, "new_writes_at_once_max": 1}
            set_tenants(log, Tenant("acme", records_max=3), Tenant("acme/a", **limits))
            events = [event(number, partitions=("acme/a",)) for number in range(1, 5)]
            verdicts = log.commit_items(*events, is_admitted_whole=True)
            late = assert_refused(verdicts[3], Reason.QUOTA_EXCEEDED)
            assert (late.tenant, late.current) == ("acme", 0), "current excludes the request"
            assert late.message == "records_max of the tenant 'acme' is 3; it uses 0, and this request adds more than 3"
            assert get_usage(log) == {"acme": (0, 0), "acme/a": (0, 0)}
            # Three writes at once exceed the burst and leave the bucket in debt.
            assert [
                assert_committed(commit_item).position
                for commit_item in log.commit_items(*events[:3], is_admitted_whole=True)
            ] == [1, 2, 3]
            late = assert_refused(log(event(5, partitions=("acme/a",))), Reason.QUOTA_EXCEEDED)
            assert late.tenant == "acme"
            set_tenants(log, Tenant("acme/a", **limits))
            late = assert_refused(log.commit_items(*events[2:], is_admitted_whole=True)[1], Reason.RATE_LIMITED)
            assert (late.tenant, late.retry_after_ms) == ("acme/a", 1500)
            log.clock.advance(1500)
            assert assert_committed(log.commit_items(*events[2:], is_admitted_whole=True)[1]).position == 4

    def test_quotas_apply_to_claims_not_to_results(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant(CAMPAIGN, records_max=1, new_writes_per_second_max=2))
            one, two = log(claim(1, "ann")), log(claim(2, "bob"))
            assert isinstance(one, Granted)
            assert isinstance(two, Granted)
            assert_refused(log(claim(3, "cyd")), Reason.RATE_LIMITED)
            assert_committed(log(result(1, "ann", one.fence)))
            log.clock.advance(1000)
            assert assert_refused(log(claim(3, "cyd")), Reason.QUOTA_EXCEEDED).tenant == CAMPAIGN
            assert isinstance(log(claim(2, "bob")), Granted), "a repeated claim"
            assert_committed(log(result(2, "bob", two.fence)))
            assert get_usage(log) == recount_usage(log, CAMPAIGN)
            assert get_usage(log)[CAMPAIGN][1] == 2


def set_tenants(log: StoreDriver, *tenants: Tenant) -> bool:
    """Set the quotas of the log; return whether they changed."""
    return log.run(log.store.set_tenants(tenants))


def get_usage(log: StoreDriver) -> dict[str, tuple[int, int]]:
    """Return the bytes and records that the log reports for each tenant."""
    return {tenant.prefix: (usage.bytes, usage.records) for tenant, usage in log.run(log.store.usage())}


def recount_usage(log: StoreDriver, *prefixes: str) -> dict[str, tuple[int, int]]:
    """Return the usage counted from all records."""
    records = [record for lane in log.heads() for record in log.read_all(lane=lane)]
    found = {prefix: Usage() for prefix in prefixes}
    for prefix in prefixes:
        own = [record for record in records if any(_is_under(name, prefix) for name in _list_names(record))]
        found[prefix] = Usage(sum(map(_count_bytes, own)), len(own))
    return {prefix: (usage.bytes, usage.records) for prefix, usage in found.items()}


def _count_bytes(record: Record) -> int:
    names = [record.scope.encode(), record.client.encode(), record.actor.encode(), record.key]
    partitions = [name.encode() for name in record.partitions]
    return 256 + len(record.body) + 2 * sum(map(len, [*names, *partitions])) + 32 * len(partitions)


def _list_names(record: Record) -> Iterable[str]:
    return (record.scope, *record.partitions) if record.sequence else record.partitions


def _is_under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}/")

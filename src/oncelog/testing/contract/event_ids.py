"""Contract tests for event ids that are unique within a tenant."""

# ruff: noqa: S101, D102 - tests consist of assertions, and their names describe them

from pathlib import Path

from oncelog.core.tenants import Tenant, event_scope
from oncelog.core.values import Reason
from oncelog.errors import SettingsError
from oncelog.testing.contract.assertions import assert_committed, assert_refused, assert_replayed
from oncelog.testing.contract.driver import Contract
from oncelog.testing.contract.quotas import set_tenants
from oncelog.testing.contract.writes import event

ACME = event_scope("acme")
OTHER = event_scope("other")


class EventIdsContract(Contract):
    """Event ids in the scopes of tenants."""

    def test_tenants_with_own_ids_can_use_the_same_id(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("acme", own_ids=True), Tenant("other", own_ids=True))
            first = assert_committed(log(event(1, "a", scope=ACME, partitions=("acme/x",))))
            second = assert_committed(log(event(1, "b", scope=OTHER, partitions=("other/x",))))
            log.reopen()
            assert assert_replayed(log(event(1, "a", scope=ACME, partitions=("acme/x",)))).receipt == first
            assert assert_replayed(log(event(1, "b", scope=OTHER, partitions=("other/x",)))).receipt == second
            assert_refused(log(event(1, "c", scope=ACME, partitions=("acme/x",))), Reason.IDENTITY_REUSED)

    def test_event_from_before_own_ids_remains_known(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            receipt = assert_committed(log(event(1, "a", partitions=("acme/x",))))
            assert_committed(log(event(2, "taken by another tenant", partitions=("other/x",))))
            set_tenants(log, Tenant("acme", own_ids=True))
            log.reopen()
            assert assert_replayed(log(event(1, "a", scope=ACME, partitions=("acme/x",)))).receipt == receipt
            own = assert_committed(log(event(2, "b", scope=ACME, partitions=("acme/x",))))
            assert assert_replayed(log(event(2, "b", scope=ACME, partitions=("acme/x",)))).receipt == own
            log.run(log.store.erase(0, [1]))
            assert assert_replayed(log(event(1, "a", scope=ACME, partitions=("acme/x",)))).erased

    def test_new_event_outside_the_scope_of_its_tenant_is_refused(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            receipt = assert_committed(log(event(1, "a", partitions=("acme/x",))))
            set_tenants(log, Tenant("acme", own_ids=True), Tenant("other", own_ids=True), Tenant("third"))
            late = assert_refused(log(event(2, "b", partitions=("acme/x",))), Reason.WRONG_SCOPE)
            assert late.retry_after_ms > 0
            assert ACME in late.message
            assert assert_replayed(log(event(1, "a", partitions=("acme/x",)))).receipt == receipt
            # Event ids of a tenant without separate ids, or of several tenants, are unique in the whole log.
            assert_committed(log(event(3, "c", partitions=("third",))))
            assert_committed(log(event(4, "d", partitions=("acme/x", "other/x"))))
            assert_refused(log(event(5, "e", partitions=("acme/x", "third"))), Reason.WRONG_SCOPE)
            assert_committed(log(event(5, "e", scope=ACME, partitions=("acme/x", "third"))))
            for number, scope, partitions in (
                (6, ACME, ("third",)),
                (7, ACME, ("other/x",)),
                (8, ACME, ("acme/x", "other/x")),
                (9, OTHER, ("acme/x", "other/x")),
            ):
                assert_refused(log(event(number, scope=scope, partitions=partitions)), Reason.WRONG_SCOPE)

    def test_event_of_several_tenants_commits_once_if_the_first_is_switched_first(self, tmp_path: Path) -> None:
        self._check_event_of_several_tenants(tmp_path, ("acme", "other"))

    def test_event_of_several_tenants_commits_once_if_the_last_is_switched_first(self, tmp_path: Path) -> None:
        self._check_event_of_several_tenants(tmp_path, ("other", "acme"))

    def _check_event_of_several_tenants(self, tmp_path: Path, prefixes: tuple[str, str]) -> None:
        both = ("acme/x", "other/x")
        with self.open_store(tmp_path) as log:
            receipts = [assert_committed(log(event(0, partitions=both)))]
            set_tenants(log, Tenant(prefixes[0], own_ids=True))
            receipts.append(assert_committed(log(event(1, scope=event_scope(prefixes[0]), partitions=both))))
            set_tenants(log, *(Tenant(prefix, own_ids=True) for prefix in prefixes))
            receipts.append(assert_committed(log(event(2, partitions=both))))
            log.reopen()
            for number, receipt in enumerate(receipts):
                for scope in ("", ACME, OTHER):  # one writer per version of the settings
                    assert assert_replayed(log(event(number, scope=scope, partitions=both))).receipt == receipt

    def test_retry_is_replayed_though_another_event_has_its_id_in_the_scope(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            squatted = assert_committed(log(event(1, "of another tenant", partitions=("other/x",))))
            former = assert_committed(log(event(2, "before", partitions=("acme/x",))))
            set_tenants(log, Tenant("acme", own_ids=True))
            own = assert_committed(log(event(1, "own", scope=ACME, partitions=("acme/x",))))
            assert_committed(log(event(2, "after", scope=ACME, partitions=("acme/x",))))
            log.reopen()
            # A writer with outdated tenants submits these in the scope "", where id 1 is the other tenant's event.
            assert assert_replayed(log(event(1, "own", partitions=("acme/x",)))).receipt == own
            assert_refused(log(event(1, "new", partitions=("acme/x",))), Reason.WRONG_SCOPE)
            assert assert_replayed(log(event(1, "of another tenant", partitions=("other/x",)))).receipt == squatted
            assert assert_replayed(log(event(2, "before", scope=ACME, partitions=("acme/x",)))).receipt == former
            assert_refused(log(event(2, "other", scope=ACME, partitions=("acme/x",))), Reason.IDENTITY_REUSED)

    def test_application_scope_may_look_like_a_tenant_scope(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            for number, tenants in enumerate(((), (Tenant("acme"),), (Tenant("acme"), Tenant("other", own_ids=True)))):
                set_tenants(log, *tenants)
                receipt = assert_committed(log(event(number, partitions=("acme/x",))))
                own = assert_committed(log(event(number, scope=ACME, partitions=("acme/x",))))
                log.reopen()
                assert assert_replayed(log(event(number, partitions=("acme/x",)))).receipt == receipt
                assert assert_replayed(log(event(number, scope=ACME, partitions=("acme/x",)))).receipt == own

    def test_own_ids_cannot_be_switched_off(self, tmp_path: Path) -> None:
        with self.open_store(tmp_path) as log:
            set_tenants(log, Tenant("acme", own_ids=True))
            for tenants in ((), (Tenant("acme"),), (Tenant("other", own_ids=True),)):
                error = log.catch_error(log.store.set_tenants(tenants))
                assert isinstance(error, SettingsError)
                assert "must keep own_ids of 'acme'" in str(error)
            assert set_tenants(log, Tenant("acme", records_max=7, own_ids=True))

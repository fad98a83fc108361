"""The contract of ids of events that are unique within a tenant."""

# ruff: noqa: S101, D102 - asserts are what tests are made of, and their names say what they show

from pathlib import Path

from oncelog.core.tenants import Tenant, event_scope
from oncelog.core.values import Reason
from oncelog.errors import SettingsError
from oncelog.testing.contract.driven import Contract
from oncelog.testing.contract.quotas import set_tenants
from oncelog.testing.contract.writes import committed, event, refused, replayed

ACME = event_scope("acme")
OTHER = event_scope("other")


class EventIdsContract(Contract):
    """Ids of events in the scopes of tenants."""

    def test_tenants_with_own_ids_can_use_the_same_id(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as log:
            set_tenants(log, Tenant("acme", own_ids=True), Tenant("other", own_ids=True))
            first = committed(log(event(1, "a", scope=ACME, partitions=("acme/x",))))
            second = committed(log(event(1, "b", scope=OTHER, partitions=("other/x",))))
            log.reopen()
            assert replayed(log(event(1, "a", scope=ACME, partitions=("acme/x",)))).receipt == first
            assert replayed(log(event(1, "b", scope=OTHER, partitions=("other/x",)))).receipt == second
            refused(log(event(1, "c", scope=ACME, partitions=("acme/x",))), Reason.IDENTITY_REUSED)

    def test_event_from_before_own_ids_stays_known(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as log:
            receipt = committed(log(event(1, "a", partitions=("acme/x",))))
            committed(log(event(2, "taken by another tenant", partitions=("other/x",))))
            set_tenants(log, Tenant("acme", own_ids=True))
            log.reopen()
            assert replayed(log(event(1, "a", scope=ACME, partitions=("acme/x",)))).receipt == receipt
            own = committed(log(event(2, "b", scope=ACME, partitions=("acme/x",))))
            assert replayed(log(event(2, "b", scope=ACME, partitions=("acme/x",)))).receipt == own
            log.run(log.store.erase(0, [1]))
            assert replayed(log(event(1, "a", scope=ACME, partitions=("acme/x",)))).erased

    def test_new_event_outside_the_scope_of_its_tenant_is_not_committed(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as log:
            receipt = committed(log(event(1, "a", partitions=("acme/x",))))
            set_tenants(log, Tenant("acme", own_ids=True), Tenant("other", own_ids=True), Tenant("third"))
            late = refused(log(event(2, "b", partitions=("acme/x",))), Reason.BUSY)
            assert late.retry_after_ms > 0
            assert ACME in late.message
            assert replayed(log(event(1, "a", partitions=("acme/x",)))).receipt == receipt
            # Events of no such tenant, or of several, are unique in the whole log.
            committed(log(event(3, "c", partitions=("third",))))
            committed(log(event(4, "d", partitions=("acme/x", "other/x"))))
            refused(log(event(5, "e", partitions=("acme/x", "third"))), Reason.BUSY)
            committed(log(event(5, "e", scope=ACME, partitions=("acme/x", "third"))))

    def test_own_ids_cannot_be_switched_off(self, tmp_path: Path) -> None:
        with self.opened(tmp_path) as log:
            set_tenants(log, Tenant("acme", own_ids=True))
            for tenants in ((), (Tenant("acme"),), (Tenant("other", own_ids=True),)):
                error = log.error_of(log.store.set_tenants(tenants))
                assert isinstance(error, SettingsError)
                assert "must keep own_ids of 'acme'" in str(error)
            assert set_tenants(log, Tenant("acme", records_max=7, own_ids=True))

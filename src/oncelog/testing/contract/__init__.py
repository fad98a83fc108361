"""Contract tests that every store must pass.

    class TestMyStore(StoreContract):
        def make_store(self, tmp_path, clock, settings, draw):
            return MyStore(tmp_path / "log", settings, clock=clock, draw=draw)

pytest collects the tests of the class. They need no plugins and never sleep, because they control the clock.
"""

from oncelog.testing.contract.audit import AuditContract
from oncelog.testing.contract.commits import CommitContract
from oncelog.testing.contract.deltas import DeltasContract
from oncelog.testing.contract.event_ids import EventIdsContract
from oncelog.testing.contract.leaps import LeapContract
from oncelog.testing.contract.ledger import LedgerContract
from oncelog.testing.contract.members import MembersContract
from oncelog.testing.contract.quotas import QuotasContract
from oncelog.testing.contract.reads import ReadContract
from oncelog.testing.contract.roles import RolesContract
from oncelog.testing.contract.side_state import SideStateContract
from oncelog.testing.contract.stored_bytes import StoredBytesContract
from oncelog.testing.contract.time import TimeContract

__all__ = ["StoreContract"]


class StoreContract(
    CommitContract,
    ReadContract,
    SideStateContract,
    TimeContract,
    LedgerContract,
    DeltasContract,
    MembersContract,
    RolesContract,
    QuotasContract,
    EventIdsContract,
    StoredBytesContract,
    LeapContract,
    AuditContract,
):
    """All contract tests. Subclass it under a name that starts with `Test`, and create a store in `make_store`.

    To reopen a log with its content, the tests call `make_store` again with the same directory. Set `is_durable` to
    False for a store that loses its content when it is closed.
    """

"""Damage to files and databases that `oncelog verify` must find."""

from abc import ABC, abstractmethod
from typing import Any, Final

from oncelog.storage.verify.findings import InconsistencyError

IMPOSSIBLE_SIDE_STATE: Final = (
    "DELETE FROM oncelog_policies WHERE name = 'notes'",
    "UPDATE oncelog_policies SET name = 'other' WHERE name = 'notes'",
    "UPDATE oncelog_policies SET declaration = '{' WHERE name = 'notes'",
    "UPDATE oncelog_policies SET declaration = replace(declaration, '16', '15') WHERE name = 'ledger'",
    "UPDATE oncelog_acknowledged SET sequence = 1000",
    "UPDATE oncelog_acknowledged SET scope = 'nowhere'",
    "UPDATE oncelog_consumers SET cursor = 1000 WHERE scope = ''",
    "UPDATE oncelog_consumers SET cursor = 1000 WHERE scope != ''",
    "UPDATE oncelog_consumers SET cursor = -1",
    "UPDATE oncelog_leases SET fence = 99",
    "UPDATE oncelog_leases SET key_hex = 'no'",
    "UPDATE oncelog_rates SET full_at_us = full_at_us + 2000000000000",
    "UPDATE oncelog_rates SET full_at_us = -1",
    "UPDATE oncelog_rates SET lane = lane + 1",
    "UPDATE oncelog_rates SET scope = 'nowhere'",
    "UPDATE oncelog_members SET lane = lane + 1",
    "UPDATE oncelog_entities SET lane = 0",
)
"""Statements that both SQLite and PostgreSQL understand."""


class LogEditor(ABC):
    """Changes a log in a transaction, verifies it, and rolls back."""

    @abstractmethod
    def verify_after(self, *statements: tuple[str, tuple[Any, ...]]) -> InconsistencyError | None:
        """Apply changes, verify the log, and roll back. Return the inconsistency found, or None."""

    def expect_found(self, statement: str, *parameters: Any) -> InconsistencyError:
        found = self.verify_after((statement, parameters))
        assert found is not None, (statement, parameters)
        return found

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
"""In the SQL of SQLite and PostgreSQL."""


class Editable(ABC):
    """A log that is changed in a transaction, verified and rolled back."""

    @abstractmethod
    def contradiction_after(self, *statements: tuple[str, tuple[Any, ...]]) -> InconsistencyError | None:
        """Apply changes, return the contradiction that is found, or None, and roll the changes back."""

    def check_found(self, statement: str, *parameters: Any) -> InconsistencyError:
        lie = self.contradiction_after((statement, parameters))
        assert lie is not None, (statement, parameters)
        return lie

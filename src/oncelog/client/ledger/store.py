"""The SQLite file of a ledger client: the pending writes and the sequences of each scope.

All methods block, and only one thread may call them at a time.
"""

from typing import Final, NamedTuple

from oncelog.client.ledger.entries import QueuedWrite, ScopeState, StoreChanges
from oncelog.client.runtime.outbox import OutboxStore
from oncelog.client.runtime.store_file import StoreSchema
from oncelog.core.transactions import decode_body

SCHEMA: Final = StoreSchema("ledger client", "oncelog.client.ledger", 2, application_id=0x4F4C4C43)  # "OLLC"
SQL: Final = SCHEMA.load_queries()


class StoredScope(NamedTuple):
    """A scope as stored in the file."""

    id: int
    state: ScopeState
    pending: list[QueuedWrite]


class LedgerStore(OutboxStore):
    """Store of one ledger client."""

    _schema = SCHEMA

    def open(self, client_id: str) -> list[tuple[str, str]]:
        """Open the file and return the scopes that have pending writes.

        Raises StoreInUseError or another StoreError, or SettingsError if the file belongs to a different client.
        """
        with self._file.open() as (connection, is_new):
            if is_new:
                connection.execute(SQL["make_client"], (client_id,))
            (known,) = connection.execute(SQL["client"]).fetchone()
            self._check_owner("client", known, client_id)
            self._next_number = connection.execute(SQL["highest_number"]).fetchone()[0] + 1
            return connection.execute(SQL["scopes_pending"]).fetchall()

    # --- scopes

    def load_scope(self, organization: str, vault: str) -> StoredScope:
        """Load a scope, or create it if it is new."""
        with self._file.transaction(is_durable=False) as connection:
            connection.execute(SQL["make_scope"], (organization, vault))
            found = connection.execute(SQL["scope"], (organization, vault)).fetchone()
            rows = connection.execute(SQL["pending"], (found[0],)).fetchall()
            return StoredScope(found[0], ScopeState(*found[1:]), [self._decode_entry(*row) for row in rows])

    def save(self, scope_id: int, changes: StoreChanges) -> None:
        """Save changes in one transaction."""
        with self._file.transaction(is_durable=changes.must_be_durable) as connection:
            connection.executemany(
                SQL["save"],
                [
                    (scope_id, entry.number, entry.key, sequence, lowest, entry.body, entry.made_at_ms)
                    for entry, sequence, lowest in changes.entries
                ],
            )
            connection.executemany(SQL["settle"], [(scope_id, settled.entry.number) for settled in changes.settled])
            connection.execute(SQL["save_state"], (*changes.state, scope_id))

    def _decode_entry(
        self, number: int, key: bytes, sequence: int, lowest: int, body: bytes, made_at_ms: int
    ) -> QueuedWrite:
        with self._file.translate_damage():
            operations = decode_body(body)
        entry = QueuedWrite(number, key, operations, body, made_at_ms)
        entry.sequence = sequence
        entry.mark_unknown(lowest)
        return entry

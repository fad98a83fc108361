"""Where clients stand, held against what they wrote."""

import sqlite3
from typing import Final

from oncelog.core.values import Record
from oncelog.stores.side_state import TABLES
from oncelog.stores.verifying.findings import ContradictionError
from oncelog.stores.verifying.indexes import in_order
from oncelog.stores.verifying.source import Row, Rules, Source

_CLIENTS: Final = next(table for table in TABLES if table.name == "clients")
_CLIENT_KEY: Final = 4
"""Lane, policy, scope and client are the key of a client's entry."""


class ClientBooks:
    """Where each client stands after its newest record. There may be many, so they are kept in a file of their own."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._evictions_ms: dict[int, int] = {}
        self._kept = sqlite3.connect("", isolation_level=None)  # SQLite deletes it when it is closed
        self._kept.execute("PRAGMA journal_mode = OFF")
        self._kept.execute(
            "CREATE TABLE clients (lane, policy, scope, client, sequence, last_seen_ms, last_key, last_fingerprint, "
            "PRIMARY KEY (lane, policy, scope, client)) WITHOUT ROWID"
        )
        self._kept.execute("BEGIN")

    def close(self) -> None:
        """Lets the file go."""
        self._kept.close()

    def take(self, record: Record) -> None:
        """As `Books` says. A client's numbers go up by one, and from 1 again once it has been forgotten."""
        if record.client_sequence:
            identity = (record.lane, record.policy, record.scope, record.client)
            row = self._kept.execute(
                "SELECT sequence, last_seen_ms FROM clients WHERE lane = ? AND policy = ? AND scope = ? AND client = ?",
                identity,
            ).fetchone()
            last = row[0] if row is not None and self._remembers(record.policy, record.lane, row[1]) else 0
            if record.client_sequence != last + 1:
                raise ContradictionError(
                    f"client {record.client!r} of {record.scope!r} has sequence {record.client_sequence} after {last}",
                    record.lane,
                    record.position,
                )
            entry = (record.client_sequence, record.log_time_ms, record.key, record.fingerprint)
            self._kept.execute("INSERT OR REPLACE INTO clients VALUES (?, ?, ?, ?, ?, ?, ?, ?)", (*identity, *entry))
        if record.position % self._rules.settings.eviction_interval == 0:
            self._evictions_ms[record.lane] = record.log_time_ms

    def check(self, source: Source) -> None:
        """The entries that the log keeps, against those of the records: both in one order, side by side."""
        kept = iter(self._kept.execute("SELECT * FROM clients ORDER BY lane, policy, scope, client"))
        wanted = next(kept, None)
        for row in in_order(source.rows_of(_CLIENTS), _CLIENT_KEY, "the table of clients"):
            while wanted is not None and wanted[:_CLIENT_KEY] < row[:_CLIENT_KEY]:
                self._check_absent(wanted)
                wanted = next(kept, None)
            if wanted is None or wanted[:_CLIENT_KEY] != row[:_CLIENT_KEY]:
                raise ContradictionError(f"client {row[3]!r} of {row[2]!r} has an entry, but no record", row[0])
            if wanted != row:
                raise ContradictionError(
                    f"the entry of client {row[3]!r} of {row[2]!r} (sequence {row[4]}) is not that of its newest "
                    f"record (sequence {wanted[4]})",
                    row[0],
                )
            wanted = next(kept, None)
        while wanted is not None:
            self._check_absent(wanted)
            wanted = next(kept, None)

    def _check_absent(self, entry: Row) -> None:
        lane, policy, scope, client, sequence, last_seen_ms, *_ = entry
        if self._remembers(policy, lane, last_seen_ms):
            raise ContradictionError(f"client {client!r} of {scope!r} has no entry, though it got to {sequence}", lane)

    def _remembers(self, policy: str, lane: int, since_ms: int) -> bool:
        # Clients are never forgotten by age alone (Policy says so), so the log time has no part in it.
        eviction_time_ms = self._evictions_ms.get(lane, 0)
        return self._rules.policies[policy].retention.remembers(since_ms, since_ms, eviction_time_ms)

"""Verification of a log in a PostgreSQL database: the schema, and the columns used to look up records."""

from collections.abc import Iterator
from importlib.resources import files
from typing import Any, Final

import msgspec

from oncelog.core.values import Record
from oncelog.storage.inspect.inspector import LogView, RowTuple
from oncelog.storage.inspect.postgres import DatabaseView
from oncelog.storage.key_hash import hash_identity
from oncelog.storage.postgres.side_state_tables import compute_digest
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.record_rows import decode_record
from oncelog.storage.side_state import SideStateTable
from oncelog.storage.verify.findings import InconsistencyError, StepProgress, VerificationSummary, require
from oncelog.storage.verify.indexes import REPORT_ROWS, RowChecksum, check_uniqueness
from oncelog.storage.verify.source import LogState, VerificationSource, check_definitions

SHORT_BODY_BYTES_MAX: Final = 65_536
"""A longer body is fetched alone rather than in a page with others."""
HASHES_PAGE_ROWS: Final = 5000
_POLICY, _SCOPE, _KEY, _CLIENT, _CLIENT_SEQUENCE, _BODY = 5, 6, 7, 10, 11, 13
"""Columns of the statement `all_evidence`."""


EXPECTED_SCHEMA: Final = msgspec.json.decode(
    (files("oncelog.storage.postgres") / "sql" / "shape.json").read_bytes(), type=dict[str, str]
)
"""The definitions that the migrations create, by name as shown in messages."""


def load_schema(view: LogView) -> dict[str, str]:
    """Return the definitions of a log's tables, columns and indexes, and of any objects that affect how they work."""
    definitions = {}
    for table, column, definition in view.iterate_rows("columns"):
        definitions[f"table {table}"] = ""
        definitions[f"table {table}, column {column}"] = definition
    for index, table, definition, is_unique, is_valid in view.iterate_rows("indexes"):
        validity, uniqueness = "" if is_valid else "INVALID ", "UNIQUE " if is_unique else ""
        definitions[f"index {index}"] = f"{validity}{uniqueness}ON {table} USING {definition}"
    for kind, name in view.iterate_rows("additions"):
        definitions[f"{kind} {name}"] = ""
    return definitions


def check_schema(view: LogView) -> None:
    """Compare the schema with the result of the migrations. Added indexes are accepted.

    Triggers, rules and policies are not accepted: they change the effect of writes and reads.
    """
    found = {
        name: definition
        for name, definition in load_schema(view).items()
        if name in EXPECTED_SCHEMA or not name.startswith("index ")
    }
    check_definitions(EXPECTED_SCHEMA, found)


class DatabaseSource(VerificationSource):
    """See `VerificationSource` for the contract of each method."""

    view: DatabaseView

    def __init__(self, view: DatabaseView) -> None:
        self.view = view
        self._secret = view.metadata.index_secret
        self._keys = RowChecksum()
        self._sequences = RowChecksum()

    def check_structure(self) -> Iterator[StepProgress]:
        """See `VerificationSource`.

        Indexes are not compared with their tables: use PostgreSQL's `pg_amcheck` for that.
        """
        check_schema(self.view)
        found = {lane for lane, *_ in self.view.iterate_rows("all_lanes")}
        for lane in range(self.view.metadata.settings.lanes + 1):
            require(lane in found, "has no head", lane)  # writers lock the head of a lane even if it has no records
        return iter(())

    def iterate_table(self, table: SideStateTable) -> Iterator[RowTuple]:
        """See `VerificationSource`. Also compares the digests of long keys."""
        columns = ", ".join(table.columns)
        order = f"ORDER BY lane, {', '.join(table.keys)}"
        if not table.has_long_keys:
            yield from self.view.iterate_pages(f"SELECT {columns} FROM oncelog_{table.name} {order}")  # noqa: S608
            return
        # Select them separately, so that the short keys come from their index without sorting.
        both = [
            f"(SELECT {columns}, digest FROM oncelog_{table.name} WHERE digest IS {nullness} {order})"  # noqa: S608
            for nullness in ("NULL", "NOT NULL")
        ]
        width = 1 + len(table.keys)
        for *row, digest in self.view.iterate_pages(f"{' UNION ALL '.join(both)} {order}"):
            if digest != compute_digest(row[1:width]):
                key = tuple(row[:width])
                raise InconsistencyError(
                    f"the table oncelog_{table.name} has no entry for {key!r} under its digest", row[0]
                )
            yield tuple(row)

    def iterate_evidence(self) -> Iterator[RowTuple]:
        """See `VerificationSource`. Also compares the columns used to look up a record."""
        rows = self.view.iterate_pages(SQL["all_evidence"], SHORT_BODY_BYTES_MAX)
        for *columns, body_bytes, key_hash, sequence_hash in rows:
            if body_bytes is not None and body_bytes > SHORT_BODY_BYTES_MAX:
                [(columns[_BODY],)] = self.view.iterate_rows("body_at", *columns[:2])
            self._check_hashes(columns, key_hash, sequence_hash)
            yield tuple(columns)

    def add(self, record: Record) -> None:
        """Do nothing: `iterate_evidence` has compared the columns."""

    def check_keys(self, state: LogState, summary: VerificationSummary) -> Iterator[StepProgress]:
        """See `VerificationSource`."""
        yield from self._check_hash_index("key_hashes", "standing", self._keys, state)
        yield from self._check_hash_index("sequence_hashes", "standing_by_sequence", self._sequences, state)
        summary.keys = self._keys.rows + self._sequences.rows

    def _check_hashes(self, row: list[Any], key_hash: int | None, sequence_hash: int | None) -> None:
        """Compare the hashes in a record's row with its identities' hashes."""
        policy, scope, key, client, number = (row[i] for i in (_POLICY, _SCOPE, _KEY, _CLIENT, _CLIENT_SEQUENCE))
        by_key, by_sequence = (policy, scope, client if number else "", key), (policy, scope, client, number)
        for is_used, identity, found, checksum, column in (
            (key, by_key, key_hash, self._keys, "key_hash"),
            (number, by_sequence, sequence_hash, self._sequences, "sequence_hash"),
        ):
            if found != (hash_identity(self._secret, identity) if is_used else None):
                raise InconsistencyError(f"the {column} of the record does not match its identity", *row[:2])
            if found is not None:
                checksum.add(found)

    def _check_hash_index(
        self, name: str, records: str, wanted: RowChecksum, state: LogState
    ) -> Iterator[StepProgress]:
        found = RowChecksum(wanted.secret)
        before = checked = -1
        for (stored_hash,) in self.view.iterate_pages(SQL[f"all_{name}"], page_rows=HASHES_PAGE_ROWS):
            if stored_hash < before:
                raise InconsistencyError(f"the index of {name} is out of order")
            if stored_hash == before != checked:
                rows = self.view.iterate_rows(records, stored_hash)
                check_uniqueness(map(decode_record, rows), state, self.get_log_time)
                checked = stored_hash
            before = stored_hash
            found.add(stored_hash)
            if found.rows % REPORT_ROWS == 0:
                yield StepProgress("keys", found.rows, wanted.rows)
        require(
            found == wanted,
            f"the index of {name} does not match the records: REINDEX TABLE oncelog_records rebuilds it",
        )

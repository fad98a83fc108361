"""Compares the hash columns of identities, and their indexes, with the records."""

from collections.abc import Iterator, Mapping
from typing import Final

from oncelog.core.values import Record
from oncelog.storage.key_hash import hash_identity
from oncelog.storage.postgres.read_session import ReadSession
from oncelog.storage.postgres.statements import SQL
from oncelog.storage.record_rows import decode_record
from oncelog.storage.verify.findings import InconsistencyError, StepProgress
from oncelog.storage.verify.identities import check_uniqueness
from oncelog.storage.verify.indexes import REPORT_ROWS, RowChecksum
from oncelog.storage.verify.source import LogRules, RowTuple

HASHES_PAGE_ROWS: Final = 5000
_POLICY, _SCOPE, _KEY, _CLIENT, _CLIENT_SEQUENCE = 5, 6, 7, 10, 11


class HashColumnVerifier:
    """See `Keys` for what each method promises."""

    def __init__(self, session: ReadSession, secret: bytes) -> None:
        self._session = session
        self._secret = secret
        self._keys = RowChecksum()
        self._sequences = RowChecksum()

    def compare(self, row: RowTuple, key_hash: int | None, sequence_hash: int | None) -> None:
        """What a record's row has in its columns, with what is in the record."""
        policy, scope, key, client, number = (row[i] for i in (_POLICY, _SCOPE, _KEY, _CLIENT, _CLIENT_SEQUENCE))
        expected_key_hash = hash_identity(self._secret, (policy, scope, client if number else "", key)) if key else None
        expected_sequence_hash = hash_identity(self._secret, (policy, scope, client, number)) if number else None
        if key_hash != expected_key_hash:
            raise InconsistencyError("the record is not found by its key: key_hash is another one's", *row[:2])
        if sequence_hash != expected_sequence_hash:
            raise InconsistencyError(
                "the record is not found by its client's number: sequence_hash is another one's", *row[:2]
            )
        if key_hash is not None:
            self._keys.add(key_hash)
        if sequence_hash is not None:
            self._sequences.add(sequence_hash)

    def add(self, record: Record) -> None:
        """As `RecordCollector` says. All that there is to know has been compared."""

    def check(self, rules: LogRules) -> Iterator[StepProgress]:
        """As `Keys` says."""
        yield from self._check("all_key_hashes", "standing", self._keys, rules)
        yield from self._check("all_sequence_hashes", "standing_by_sequence", self._sequences, rules)

    def get_counts(self) -> Mapping[str, int]:
        """As `Keys` says."""
        return {"keys": self._keys.rows + self._sequences.rows}

    def _check(self, hashes: str, records: str, wanted: RowChecksum, rules: LogRules) -> Iterator[StepProgress]:
        found = wanted.new_empty()
        before = checked = -1
        for (stored_hash,) in self._session.iterate_rows(SQL[hashes], page_rows=HASHES_PAGE_ROWS):
            if stored_hash < before:
                raise InconsistencyError(f"the index of {hashes.removeprefix('all_')} is out of order")
            if stored_hash == before != checked:
                rows = self._session.iterate_rows(SQL[records], stored_hash)
                check_uniqueness(map(decode_record, rows), rules, self._get_log_time)
                checked = stored_hash
            before = stored_hash
            found.add(stored_hash)
            if found.rows % REPORT_ROWS == 0:
                yield StepProgress("keys", found.rows, wanted.rows)
        if found != wanted:
            raise InconsistencyError(
                f"the index of {hashes.removeprefix('all_')} is not what the records make it: REINDEX TABLE "
                "oncelog_records makes it anew"
            )

    def _get_log_time(self, lane: int, position: int) -> int:
        row = self._session.fetch_first(SQL["log_time_at"], lane, position)
        return row[0] if row else 0

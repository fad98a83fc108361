"""The columns that identities are found by, and their indexes, held against the records."""

from collections.abc import Iterator, Mapping
from typing import Final

from oncelog.core.values import Record
from oncelog.stores.key_hash import hash_of
from oncelog.stores.postgres.looking import Looking
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.rows import record_of
from oncelog.stores.verifying.findings import ContradictionError, Progress
from oncelog.stores.verifying.identities import judge
from oncelog.stores.verifying.indexes import REPORT_ROWS, Tally
from oncelog.stores.verifying.source import Row, Rules

HASHES_PAGE_ROWS: Final = 5000
_POLICY, _SCOPE, _KEY, _CLIENT, _CLIENT_SEQUENCE = 5, 6, 7, 10, 11


class HashColumns:
    """See `Keys` for what each method promises."""

    def __init__(self, session: Looking, secret: bytes) -> None:
        self._session = session
        self._secret = secret
        self._keys = Tally()
        self._sequences = Tally()

    def compare(self, row: Row, key_hash: int | None, sequence_hash: int | None) -> None:
        """What a record's row has in its columns, with what is in the record."""
        policy, scope, key, client, number = (row[i] for i in (_POLICY, _SCOPE, _KEY, _CLIENT, _CLIENT_SEQUENCE))
        of_key = hash_of(self._secret, (policy, scope, client if number else "", key)) if key else None
        of_number = hash_of(self._secret, (policy, scope, client, number)) if number else None
        if key_hash != of_key:
            raise ContradictionError("the record is not found by its key: key_hash is another one's", *row[:2])
        if sequence_hash != of_number:
            raise ContradictionError(
                "the record is not found by its client's number: sequence_hash is another one's", *row[:2]
            )
        if key_hash is not None:
            self._keys.add(key_hash)
        if sequence_hash is not None:
            self._sequences.add(sequence_hash)

    def take(self, record: Record) -> None:
        """As `Books` says. All that there is to know has been compared."""

    def check(self, rules: Rules) -> Iterator[Progress]:
        """As `Keys` says."""
        yield from self._check("all_key_hashes", "standing", self._keys, rules)
        yield from self._check("all_sequence_hashes", "standing_by_sequence", self._sequences, rules)

    def figures(self) -> Mapping[str, int]:
        """As `Keys` says."""
        return {"keys": self._keys.rows + self._sequences.rows}

    def _check(self, hashes: str, records: str, wanted: Tally, rules: Rules) -> Iterator[Progress]:
        found = wanted.like()
        before = judged = -1
        for (one,) in self._session.rows(SQL[hashes], page_rows=HASHES_PAGE_ROWS):
            if one < before:
                raise ContradictionError(f"the index of {hashes.removeprefix('all_')} is out of order")
            if one == before != judged:
                rows = self._session.rows(SQL[records], one)
                judge(map(record_of, rows), rules, self._log_time_at)
                judged = one
            before = one
            found.add(one)
            if found.rows % REPORT_ROWS == 0:
                yield Progress("keys", found.rows, wanted.rows)
        if found != wanted:
            raise ContradictionError(
                f"the index of {hashes.removeprefix('all_')} is not what the records make it: REINDEX TABLE "
                "oncelog_records makes it anew"
            )

    def _log_time_at(self, lane: int, position: int) -> int:
        row = self._session.first(SQL["log_time_at"], lane, position)
        return row[0] if row else 0

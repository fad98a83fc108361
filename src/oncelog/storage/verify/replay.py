"""Rebuilds side state from the records of a log, in a temporary file.

Records come in the order of places. They are replayed in batches on a `BatchState`, as in a commit, so that memory
holds the entries of one batch only.
"""

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from oncelog.core.batch_state import BatchState
from oncelog.core.operations import DeleteEntity, Operation, Unrelate
from oncelog.core.policy import FOLD_POLICY, Policy
from oncelog.core.read_set import ReadSet, add_effects
from oncelog.core.replay import drop_conditions, has_effects, rebuild_submission, replay_record
from oncelog.core.rules.compaction import decode_fold
from oncelog.core.values import Record, Refused, Replayed, Submission, client_identity
from oncelog.storage.verify.findings import InconsistencyError
from oncelog.storage.verify.scratch_database import ScratchDatabase
from oncelog.storage.verify.source import LogState

_BATCH_RECORDS: Final = 1000
_BATCH_BYTES: Final = 4 * 2**20
"""Of bodies, so that a batch of long ones is not held in memory."""


class _PendingRecord(Struct, frozen=True, gc=False):
    record: Record
    submission: Submission
    eviction_time_ms: int
    """Of the last eviction in the lane before the record."""


class SideStateReplay:
    """Replays records. Without effects it replays the sequences of clients only."""

    def __init__(self, state: LogState, scratch: ScratchDatabase, *, with_effects: bool = True) -> None:
        self._state = state
        self._scratch = scratch
        self._with_effects = with_effects
        self._evictions_ms: dict[int, int] = {}
        self._pending: list[_PendingRecord] = []
        self._bytes = 0
        self._unknown_scopes: dict[str, bool] = {}
        """Of the batch: whether the scope has a record whose effects are not known."""

    def add(self, record: Record) -> None:
        """As `RecordCollector` says."""
        if record.policy == FOLD_POLICY and self._with_effects:
            self._add_fold(record)
        policy = self._state.policies.get(record.policy)
        if policy is not None and self._is_needed(policy):
            self._add(record, policy)
        if record.position % self._state.settings.eviction_interval == 0:
            self._evictions_ms[record.lane] = record.log_time_ms

    def _is_needed(self, policy: Policy) -> bool:
        return policy.client_sequence or (self._with_effects and (policy.entities or policy.rows))

    def _add(self, record: Record, policy: Policy) -> None:
        # A record without its body has the sequence of its client, and no effects.
        submission = rebuild_submission(record if self._with_effects else replace(record, erased=True), policy)
        eviction_time_ms = self._evictions_ms.get(record.lane, 0)
        self._pending.append(_PendingRecord(record, submission, eviction_time_ms))
        self._bytes += len(record.body)
        if len(self._pending) >= _BATCH_RECORDS or self._bytes >= _BATCH_BYTES:
            self.flush()

    def _add_fold(self, record: Record) -> None:
        self.flush()
        if not record.erased:
            with self._scratch.translate_errors():
                self._scratch.add_fold(record.lane, decode_fold(record))

    def flush(self) -> None:
        """Replay the records of the batch. Call it after the last record. Raises InconsistencyError."""
        pending, self._pending, self._bytes = self._pending, [], 0
        if pending:
            with self._scratch.translate_errors():
                self._replay_batch(pending)

    def _replay_batch(self, pending: list[_PendingRecord]) -> None:
        needs = ReadSet()
        for pending_record in pending:
            if pending_record.submission.policy.client_sequence:
                needs.clients.add(client_identity(pending_record.submission))
            add_effects(pending_record.submission, needs)
        needs.horizons.clear()
        snapshot = self._scratch.load(needs)
        state = BatchState(snapshot, 0)
        self._unknown_scopes.clear()
        for pending_record in pending:
            self._replay(pending_record, state)
        self._scratch.save(state.collect_changes(), snapshot)

    def _replay(self, pending: _PendingRecord, state: BatchState) -> None:
        record, submission = pending.record, pending.submission
        policy = submission.policy
        if self._with_effects and (policy.entities or policy.rows):
            if not has_effects(submission):
                self._add_unknown(record, policy)
            elif policy.entities and self._has_unknown(record.lane, record.scope):
                submission = drop_conditions(submission)
        answer = replay_record(record, submission, pending.eviction_time_ms, state)
        if isinstance(answer, Refused) and policy.rows and self._has_unknown(record.lane, record.scope):
            # A limit of rows, which columns exceed that an unknown delta has deleted.
            self._add_unknown(record, policy)
        elif answer is not None:
            raise InconsistencyError(_describe_fault(record, answer), record.lane, record.position)
        if submission.delta is not None:
            self._scratch.remove_fold(record.lane, record.scope, submission.delta.table, submission.delta.row_id)
        self._record_deletions(record, submission)

    def _has_unknown(self, lane: int, scope: str) -> bool:
        known = self._unknown_scopes.get(scope)
        if known is None:
            known = self._unknown_scopes[scope] = self._scratch.has_unknown(lane, scope)
        return known

    def _add_unknown(self, record: Record, policy: Policy) -> None:
        delta_id = record.key if policy.rows else None
        self._scratch.add_unknown(record.lane, record.scope, record.sequence, record.erased, delta_id)
        self._unknown_scopes[record.scope] = True

    def _record_deletions(self, record: Record, submission: Submission) -> None:
        """Note deletions, where an entry that is deleted could be that of an unknown record before."""
        names = [name for name in map(get_deleted_name, submission.operations) if name is not None]
        if names and self._has_unknown(record.lane, record.scope):
            self._scratch.add_deletions([(record.lane, record.scope, name, record.sequence) for name in names])


def get_deleted_name(operation: Operation) -> str | None:
    """Return the name that `ScratchDatabase.find_deletion` takes for an operation; None if it deletes nothing."""
    match operation:
        case DeleteEntity(key):
            return join_key(key)
        case Unrelate(resource, relation, subject):
            return join_key(resource, relation, subject)
    return None


def join_key(*key: str) -> str:
    """Return one text for the key of an entity (one part) or of a relationship (three)."""
    return "\0".join(key)  # which no part contains


def _describe_fault(record: Record, answer: Refused | Replayed) -> str:
    if isinstance(answer, Refused) and answer.field != "client_sequence":
        return f"the record of {record.scope!r} could not have been committed: {answer.message}"
    last = f" after {answer.current}" if isinstance(answer, Refused) else ", which is not the next one"
    return f"client {record.client!r} of {record.scope!r} has sequence {record.client_sequence}{last}"

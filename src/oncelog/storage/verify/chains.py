"""Verifies blocks, records and heads by recomputing the hash chain of every lane (docs/reference/proofs.md)."""

import struct
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

import msgspec
from msgspec import Struct

from oncelog.core.internal_records import check_restore_record
from oncelog.core.policy import AUDIT_POLICY, FOLD_POLICY, RESTORE_POLICY, Order
from oncelog.core.proof import HASH_BYTES, NO_HASH, SALT_BYTES, Block, compute_root, encode_record_header, hash_leaf
from oncelog.core.rules.audit import check_audit_record
from oncelog.core.rules.compaction import check_fold_record
from oncelog.core.values import LaneHead, Record
from oncelog.storage.inspect.inspector import RowTuple
from oncelog.storage.metadata import count_records
from oncelog.storage.record_rows import decode_evidence
from oncelog.storage.side_state import lane_of_scope
from oncelog.storage.tenants import encode_partitions
from oncelog.storage.verify.findings import (
    ExportedHead,
    ExportedLane,
    InconsistencyError,
    StepProgress,
    VerificationSummary,
    require,
)
from oncelog.storage.verify.source import LogState, RecordCollector, VerificationSource

_REPORT_RECORDS: Final = 1000
_COLUMN_TYPES: Final = (int, int, int, int, int, str, str, bytes, bytes, str, str, int, str)
"""Types of the columns that precede the body in a row of `VerificationSource.iterate_evidence`."""
_PARTITIONS_COLUMN: Final = 12


class LaneTail(Struct):
    """The end of the verified part of a lane."""

    position: int = 0
    height: int = 0
    log_time_ms: int = 0
    hash: bytes = NO_HASH
    eviction_time_ms: int = 0
    leaps: int = 0
    """How many restore records the part contains."""


class ChainVerifier:
    """Verifies all lanes in one pass over blocks and records."""

    def __init__(
        self,
        source: VerificationSource,
        state: LogState,
        collectors: Sequence[RecordCollector],
        exported: ExportedHead | None,
        summary: VerificationSummary,
    ) -> None:
        self._source = source
        self._state = state
        self._collectors = collectors
        self._exported = {} if exported is None else {mark.lane: mark for mark in exported.lanes}
        self._tails: defaultdict[int, LaneTail] = defaultdict(LaneTail)
        self._lanes_at_export: set[int] = set()
        """Lanes that have a block at the exported head's height."""
        self._summary = summary

    def verify(self) -> Iterator[StepProgress]:
        """Verify blocks, records and heads. Raises InconsistencyError at the first inconsistency."""
        self._check_lanes()
        heads = self._state.heads
        total = count_records(heads, self._state.gaps)
        rows = self._source.iterate_evidence()
        for columns in self._source.view.iterate_rows("all_blocks"):
            yield from self._verify_block(Block(*columns), rows, total)
        beyond = next(rows, None)
        if beyond is not None:
            raise InconsistencyError("a record is in no block", *beyond[:2])
        for lane, head in heads.items():
            self._check_head(lane, head, self._tails[lane])
            self._summary.lanes += head.revision > 0
        self._check_leaps()
        self._check_internal()
        for lane, mark in self._exported.items():
            self._check_export_present(mark, self._tails[lane])

    def _check_lanes(self) -> None:
        newest = self._state.settings.lanes
        for lane in self._state.heads:
            require(0 <= lane <= newest, f"the log has only lanes 0 to {newest}", lane)

    # --- blocks

    def _verify_block(self, block: Block, rows: Iterator[RowTuple], total: int) -> Iterator[StepProgress]:
        require(block.lane in self._state.heads, f"has a block at height {block.height}, but no head", block.lane)
        tail = self._tails[block.lane]
        is_leap = block.first_position - 1 in self._state.leaps
        _check_header(block, tail, is_leap=is_leap)
        tail.leaps += is_leap
        self._summary.restore_records += is_leap
        leaves = []
        for position in range(block.first_position, block.first_position + block.count):
            leaves.append(self._compute_leaf(next(rows, None), block, position))
            if position % self._state.settings.eviction_interval == 0:
                tail.eviction_time_ms = block.log_time_ms
            self._summary.records += 1
            if self._summary.records % _REPORT_RECORDS == 0:
                yield StepProgress("records", self._summary.records, total)
        if compute_root(leaves) != block.root:
            last = block.first_position + block.count - 1
            places = f"position {last}" if block.count == 1 else f"positions {block.first_position} to {last}"
            raise InconsistencyError(
                f"the root of the block at height {block.height} ({places}) does not match its records: "
                "the root or a record in the block has been changed",
                block.lane,
                block.first_position,
            )
        tail.position = block.first_position + block.count - 1
        tail.height, tail.log_time_ms, tail.hash = block.height, block.log_time_ms, block.hash
        self._summary.blocks += 1
        self._compare_exported(block, tail)

    def _compare_exported(self, block: Block, tail: LaneTail) -> None:
        mark = self._exported.get(block.lane)
        if mark is None or mark.height != block.height:
            return
        self._lanes_at_export.add(block.lane)
        require(
            bytes.fromhex(mark.block_hash) == tail.hash,
            f"the hash of the block at height {block.height} differs from the exported head: the history up to "
            f"position {tail.position} has been rewritten since the export",
            block.lane,
            tail.position,
        )
        require(
            mark.position == tail.position,
            f"the block at height {block.height} ends at position {tail.position}, but at {mark.position} in the "
            "exported head",
            block.lane,
            tail.position,
        )

    def _check_export_present(self, mark: ExportedLane, tail: LaneTail) -> None:
        require(
            not mark.height or mark.height >= tail.height or mark.lane in self._lanes_at_export,
            f"has no block at height {mark.height}, which the exported head has (position {mark.position}): "
            "the newest records are missing. The log was restored from an older backup and continues at higher "
            "numbers",
            mark.lane,
            mark.position,
        )
        require(
            mark.height <= tail.height,
            f"ends at position {tail.position}, height {tail.height}, but the exported head has position "
            f"{mark.position}, height {mark.height}: the newest records are missing",
            mark.lane,
            tail.position,
        )

    # --- records

    def _compute_leaf(self, row: RowTuple | None, block: Block, position: int) -> bytes:
        place = (block.lane, position)
        if row is None or row[:2] > place:
            raise InconsistencyError(
                f"the record is missing (its block has height {block.height})", block.lane, position
            )
        if row[:2] < place:
            raise InconsistencyError("a record is in no block", *row[:2])
        _check_columns(row, block.lane, position)
        try:
            evidence = decode_evidence(row)
            header = encode_record_header(evidence.record)
        except (msgspec.MsgspecError, UnicodeError, struct.error) as error:
            raise InconsistencyError(f"the record cannot be read: {error}", block.lane, position) from error
        self._check_record(evidence.record, row[_PARTITIONS_COLUMN], block)
        for collector in self._collectors:
            collector.add(evidence.record)
        self._summary.erased += evidence.record.erased
        return hash_leaf(header, evidence.body_hash)

    def _check_record(self, record: Record, partitions: str, block: Block) -> None:
        fault = self._find_fault(record, block)
        if fault is None and partitions != encode_partitions(record.partitions):
            fault = f"its partitions are encoded as {partitions!r}, which differs from the log's encoding"
        if fault is not None:
            raise InconsistencyError(fault, record.lane, record.position)

    def _find_fault(self, record: Record, block: Block) -> str | None:
        if record.height != block.height:
            return f"the record has height {record.height}, but its block has height {block.height}"
        if record.log_time_ms != block.log_time_ms:
            return f"the record has log time {record.log_time_ms}, but its block has log time {block.log_time_ms}"
        is_leap = record.position - 1 in self._state.leaps
        if is_leap or record.policy == RESTORE_POLICY:
            return _find_leap_fault(record, block, is_leap=is_leap)
        if record.policy == AUDIT_POLICY:
            self._summary.audit_records += 1
            return check_audit_record(record, self._state.settings.lanes)
        if record.policy == FOLD_POLICY:
            return check_fold_record(record, self._state.settings.lanes)
        policy = self._state.policies.get(record.policy)
        if policy is None:
            return f"the policy {record.policy!r} is not declared"
        if (policy.order is Order.STREAM) is not (record.sequence > 0):
            return f"a record of the policy {record.policy!r} cannot have sequence {record.sequence}"
        if policy.client_sequence is not (record.client_sequence > 0):
            return f"a record of the policy {record.policy!r} cannot have client sequence {record.client_sequence}"
        stream = record.scope if policy.order is Order.STREAM else ""
        if lane_of_scope(stream, self._state.settings.lanes) != record.lane:
            return f"a record of {record.scope!r} belongs in another lane"
        return None

    # --- heads

    def _check_leaps(self) -> None:
        """Check that every lane has all leaps, because the lost history may have written to any lane."""
        leaps = self._state.leaps
        for lane in range(self._state.settings.lanes + 1) if leaps else ():
            found = self._tails[lane].leaps
            require(found == len(leaps), f"has {found} restore records, but the log has {len(leaps)} leaps", lane)

    def _check_internal(self) -> None:
        """Check that the index for `oncelog audit` has all audit and restore records."""
        wanted = self._summary.audit_records + self._summary.restore_records
        [(found,)] = self._source.view.iterate_rows("count_internal")
        require(found == wanted, f"the log has {wanted} audit and restore records, but their index has {found}")

    def _check_head(self, lane: int, head: LaneHead, tail: LaneTail) -> None:
        for name, stored, found in (
            ("position", head.position, tail.position),
            ("height", head.height, tail.height),
            ("hash", head.block_hash.hex(), tail.hash.hex()),
            ("time of the last eviction", head.eviction_time_ms, tail.eviction_time_ms),
        ):
            require(
                stored == found,
                f"the head's {name} is {stored}, but {found} according to the records",
                lane,
                tail.position,
            )
        require(
            head.log_time_ms >= tail.log_time_ms,
            f"the head's log time {head.log_time_ms} is before the newest record's log time {tail.log_time_ms}",
            lane,
            tail.position,
        )
        require(
            head.revision >= head.height, f"the head's revision {head.revision} is below its height {head.height}", lane
        )


def _find_leap_fault(record: Record, block: Block, *, is_leap: bool) -> str | None:
    if not is_leap:
        return "a restore record is at a position where the log has no leap"
    if record.policy != RESTORE_POLICY:
        return f"a record of the policy {record.policy!r} is at the position of a restore record"
    if block.count != 1:
        return f"the block of a restore record has {block.count} records, not 1"
    return check_restore_record(record)


def _check_header(block: Block, tail: LaneTail, *, is_leap: bool) -> None:
    if is_leap and block.height == block.first_position > max(tail.position, tail.height):
        tail = LaneTail(block.first_position - 1, block.height - 1, tail.log_time_ms, tail.hash)  # a gap is valid here
    require(
        block.height == tail.height + 1,
        f"the block at height {tail.height + 1} is missing (the next one has height {block.height})",
        block.lane,
        tail.position + 1,
    )
    for is_fault, problem in (
        (not len(block.previous) == len(block.root) == HASH_BYTES, f"has hashes that are not {HASH_BYTES} bytes long"),
        (
            block.previous != tail.hash,
            "does not contain the previous block's hash: one of the two blocks has been changed",
        ),
        (
            block.first_position != tail.position + 1,
            f"begins at position {block.first_position}, not at {tail.position + 1}",
        ),
        (not 1 <= block.count < 1 << 32, f"has an invalid number of records: {block.count}"),
        (
            block.log_time_ms < tail.log_time_ms,
            f"has log time {block.log_time_ms}, but the previous block has {tail.log_time_ms}",
        ),
    ):
        require(not is_fault, f"the block at height {block.height} {problem}", block.lane, tail.position + 1)


def _check_columns(row: RowTuple, lane: int, position: int) -> None:
    """Check that a record has either a salt and a body, or the hash of an erased body."""
    *columns, body, salt, body_hash = row
    require(tuple(map(type, columns)) == _COLUMN_TYPES, "a column has a value of the wrong type", lane, position)
    if body is None:
        require(salt is None, "the record has a salt but no body; an erasure removes both", lane, position)
        require(
            isinstance(body_hash, bytes) and len(body_hash) == HASH_BYTES,
            f"the record is erased, but has no body hash of {HASH_BYTES} bytes",
            lane,
            position,
        )
    elif not isinstance(body, bytes) or not isinstance(salt, bytes) or len(salt) != SALT_BYTES:
        raise InconsistencyError(f"the record has a body, but no salt of {SALT_BYTES} bytes", lane, position)
    elif body_hash is not None:
        raise InconsistencyError("the record has both a body and the hash of an erased body", lane, position)

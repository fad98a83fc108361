"""Verifies a log completely, in one read transaction and in bounded memory.

Whoever can write to a log can also compute hashes: a history that was rewritten from some record on, or cut off, is
consistent in itself. It is found only by a head that was exported before and kept elsewhere.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Final

import msgspec

from oncelog.core.values import LaneHead, Record
from oncelog.errors import CorruptError
from oncelog.storage.key_hash import SECRET_BYTES
from oncelog.storage.metadata import LogMetadata
from oncelog.storage.queries.records import load_gaps, load_leaps
from oncelog.storage.verify.chains import ChainVerifier
from oncelog.storage.verify.comparison import SideStateComparison
from oncelog.storage.verify.findings import (
    DEFAULT_OPTIONS,
    ExportedHead,
    ExportedLane,
    Finding,
    Inconsistency,
    InconsistencyError,
    SideStateError,
    StepProgress,
    VerificationSummary,
    VerifyOptions,
)
from oncelog.storage.verify.indexes import IndexCollector, check_partitions, check_streams
from oncelog.storage.verify.replay import SideStateReplay
from oncelog.storage.verify.scratch_database import ScratchDatabase, list_directories
from oncelog.storage.verify.side_state import check_side_state, decode_policies
from oncelog.storage.verify.source import LogRules, RecordCollector, VerificationSource

_DAMAGE_ERRORS: Final = (msgspec.MsgspecError, ValueError, TypeError, ArithmeticError, LookupError, struct.error)
"""What reading a value raises that no log has written. Each is expected somewhere; here they are all damage."""


def verify(
    source: VerificationSource,
    head: ExportedHead | None = None,
    options: VerifyOptions = DEFAULT_OPTIONS,
    log_directory: str | None = None,
) -> Iterator[Finding]:
    """Goes through a log. The last finding is Passed; raises InconsistencyError at the first lie.

    `log_directory` is the directory of a log in a file: the temporary file is made there unless the options or
    `TMPDIR` name another one.
    """
    with translate_damage():
        yield from _verify(source, head, options, list_directories(options.temp_dir, log_directory))


@contextmanager
def translate_damage() -> Iterator[None]:
    """Raises InconsistencyError for what no log has written."""
    try:
        yield
    except _DAMAGE_ERRORS as error:
        raise InconsistencyError(f"something is stored that no log has written: {error}") from error


def report_inconsistency(findings: Iterator[Finding]) -> Iterator[Finding]:
    """The same with a Lie at the end in place of the error."""
    try:
        yield from findings
    except SideStateError as error:
        named = tuple(_to_printable(finding) for finding in error.findings)
        yield Inconsistency(_to_printable(error), error.lane, findings=named, findings_total=error.total)
    except InconsistencyError as error:
        yield Inconsistency(_to_printable(error), error.lane, error.position)
    except CorruptError as error:
        yield Inconsistency(_to_printable(error))


def export_head(metadata: LogMetadata, heads: Mapping[int, LaneHead]) -> ExportedHead:
    """The newest hashes of all lanes, to be kept elsewhere."""
    lanes = [ExportedLane(lane, head.position, head.height, head.block_hash.hex()) for lane, head in heads.items()]
    return ExportedHead(metadata.epoch, lanes)


class _CombinedCollector:
    def __init__(self, *collectors: RecordCollector) -> None:
        self._collectors = collectors

    def add(self, record: Record) -> None:
        for collector in self._collectors:
            collector.add(record)


def _verify(
    source: VerificationSource, head: ExportedHead | None, options: VerifyOptions, directories: Sequence[str]
) -> Iterator[Finding]:
    yield StepProgress("structure")
    yield from source.check_structure()
    metadata = source.metadata
    if len(metadata.index_secret) != SECRET_BYTES:
        raise InconsistencyError(f"the secret of the key index has not {SECRET_BYTES} bytes")
    policies = decode_policies((name, declaration) for name, declaration in source.iterate_rows("policies"))
    leaps = source.run_query(load_leaps)
    if list(leaps) != sorted(set(leaps)):
        raise InconsistencyError(f"the log's leaps are not in ascending order: {list(leaps)}")
    rules = LogRules(metadata.settings, policies, leaps, source.run_query(load_gaps))
    indexes = IndexCollector()
    marks = {} if head is None else {mark.lane: mark for mark in head.lanes}
    with closing(ScratchDatabase(metadata.settings, directories)) as scratch:
        replay = SideStateReplay(rules, scratch, with_effects=options.side_state)
        chains = ChainVerifier(source, rules, _CombinedCollector(indexes, source.keys, replay), marks)
        yield from chains.verify()
        replay.flush()
        yield from check_partitions(source, indexes)
        yield from check_streams(source, indexes, rules)
        yield from source.keys.check(rules)
        yield from check_side_state(source, rules)
        comparison = SideStateComparison(source, scratch, with_effects=options.side_state)
        yield from comparison.run()
    if head is not None and head.epoch != metadata.epoch:
        raise InconsistencyError(
            f"the log has epoch {metadata.epoch}, the exported head {head.epoch}: the log was restored from a backup "
            "since then, or is another one. (Every block that was exported is there, and has its hash.)"
        )
    yield VerificationSummary(
        records=chains.counts.records,
        restore_records=chains.counts.restore_records,
        audit_records=chains.counts.audit_records,
        lanes=chains.counts.lanes,
        blocks=chains.counts.blocks,
        erased=chains.counts.erased,
        epoch=metadata.epoch,
        same=comparison.same_counts,
        not_checkable=comparison.unknown_counts,
        **source.keys.get_counts(),
    )


def _to_printable(error: CorruptError | str) -> str:
    return str(error).encode("utf-8", "backslashreplace").decode()

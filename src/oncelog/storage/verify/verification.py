"""Verifies a complete log, in one read transaction and in bounded memory.

An attacker with write access to a log can also recompute its hashes, so a rewritten or truncated history is
internally consistent. Only a head that was exported earlier and kept elsewhere reveals the change.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing

from oncelog.core.values import LaneHead
from oncelog.errors import CorruptError
from oncelog.storage.address import import_with_driver
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.inspect.inspector import LogView
from oncelog.storage.inspect.sqlite import FileView
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
    StepProgress,
    VerificationSummary,
    VerifyOptions,
    require,
    translate_damage,
)
from oncelog.storage.verify.indexes import IndexCollector, check_partitions, check_streams
from oncelog.storage.verify.replay import ScratchDatabase, SideStateReplay
from oncelog.storage.verify.side_state import check_side_state, decode_policies
from oncelog.storage.verify.source import LogState, VerificationSource
from oncelog.storage.verify.sqlite import FileSource


def verify_log(
    log: str | os.PathLike[str], head: ExportedHead | None = None, options: VerifyOptions = DEFAULT_OPTIONS
) -> Iterator[Finding]:
    """Verify a log, given by its file path or database address. The log may be in use.

    Yields StepProgress, and at the end a VerificationSummary or the first Inconsistency. While it runs, a file's
    write-ahead log cannot be emptied, and PostgreSQL keeps old row versions.

    Raises NotALogError, NewerSchemaError or StoreUnavailableError if the log cannot be read.
    """
    try:
        with create_inspector(os.fspath(log)).open_view() as view:
            yield from verify(view, head, options)
    except InconsistencyError as error:
        findings = tuple(map(_to_printable, error.findings))
        yield Inconsistency(_to_printable(error), error.lane, error.position, findings, error.findings_total)
    except CorruptError as error:
        yield Inconsistency(_to_printable(error))


def verify(
    view: LogView, head: ExportedHead | None = None, options: VerifyOptions = DEFAULT_OPTIONS
) -> Iterator[Finding]:
    """Like `verify_log`, in an open view. Raises InconsistencyError at the first inconsistency.

    The temporary file is created in the log's directory unless the options or `TMPDIR` specify a different one.
    """
    with translate_damage():
        if isinstance(view, FileView):
            source: VerificationSource = FileSource(view)
        else:
            source = import_with_driver("oncelog.storage.verify.postgres").DatabaseSource(view)
        yield from _verify(source, head, options)


def export_head(metadata: LogMetadata, heads: Mapping[int, LaneHead]) -> ExportedHead:
    """Return the newest hashes of all lanes, to be stored elsewhere."""
    lanes = [ExportedLane(lane, head.position, head.height, head.block_hash.hex()) for lane, head in heads.items()]
    return ExportedHead(metadata.epoch, lanes)


def _verify(source: VerificationSource, head: ExportedHead | None, options: VerifyOptions) -> Iterator[Finding]:
    view, metadata = source.view, source.view.metadata
    yield StepProgress("structure")
    yield from source.check_structure()
    require(
        len(metadata.index_secret) == SECRET_BYTES,
        f"the key index's secret does not have {SECRET_BYTES} bytes",
    )
    policies = decode_policies(view.iterate_rows("policies"))
    leaps = view.run_query(load_leaps)
    require(list(leaps) == sorted(set(leaps)), f"the log's leaps are not in ascending order: {list(leaps)}")
    heads = {lane: LaneHead(*columns) for lane, *columns in view.iterate_rows("all_lanes")}
    state = LogState(metadata.settings, policies, leaps, view.run_query(load_gaps), heads)
    summary = VerificationSummary(epoch=metadata.epoch)
    indexes = IndexCollector()
    with closing(ScratchDatabase(metadata.settings, options.temp_dir, view.directory)) as scratch:
        replay = SideStateReplay(state, scratch, with_effects=options.side_state)
        yield from ChainVerifier(source, state, (indexes, source, replay), head, summary).verify()
        replay.flush()
        yield from check_partitions(source, indexes)
        yield from check_streams(source, indexes, state)
        yield from source.check_keys(state, summary)
        yield from check_side_state(source, state)
        comparison = SideStateComparison(source, state, scratch, summary, with_effects=options.side_state)
        yield from comparison.run()
    if head is not None and head.epoch != metadata.epoch:
        raise InconsistencyError(
            f"the log has epoch {metadata.epoch}, but the exported head has epoch {head.epoch}: the log was restored "
            "from a backup after the export, or it is a different log. The log has every exported block, with the "
            "exported hash."
        )
    yield summary


def _to_printable(error: CorruptError | str) -> str:
    return str(error).encode("utf-8", "backslashreplace").decode()

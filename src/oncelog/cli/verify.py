"""`oncelog verify` and `oncelog head`: check a log, and export the hashes for later checks."""

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from oncelog.cli.output import escape_unprintable, format_record_counts, print_result, style
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, AlwaysJson, AsJson, LogArgument, ProgressMeter, print_message
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.queries.records import load_heads
from oncelog.storage.verify.findings import (
    Inconsistency,
    StepProgress,
    VerificationSummary,
    VerifyOptions,
    decode_exported_head,
)
from oncelog.storage.verify.verification import export_head, verify_log

FINDINGS_SHOWN: Final = 20
"""Most findings that are printed without `--json`, which prints up to `comparison.FINDINGS_MAX`."""


def verify(
    log: LogArgument,
    head: Annotated[
        Path | None,
        typer.Option("--head", help="A head that `oncelog head` printed earlier.", dir_okay=False, exists=True),
    ] = None,
    no_side_state: Annotated[
        bool, typer.Option("--no-side-state", help="Do not rebuild entities, relationships and rows from the records.")
    ] = False,
    temp_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for rebuilding side state. Default: TMPDIR, or the log's directory.",
            file_okay=False,
            exists=True,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not show progress.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check the whole log: hashes, records, indexes and side state.

    Entities, relationships, rows of deltas and client sequences are rebuilt from the records, in a temporary file, and
    compared with the stored ones. The command reports the first contradiction in the history, or all entries that
    differ, and exits with status 1. Only --head detects the loss of the newest records, or a history that was rewritten
    as a whole.

    The log may be in use: the command checks a consistent snapshot of it.

    Example:  oncelog verify orders.db --head orders-head.json

    Example:  oncelog verify postgresql://oncelog@db.example.org/orders
    """
    exported = None if head is None else decode_exported_head(head.read_bytes(), str(head))
    result: Inconsistency | VerificationSummary = Inconsistency("the verification ended early")
    options = VerifyOptions(not no_side_state, None if temp_dir is None else str(temp_dir))
    with ProgressMeter() as meter:
        for finding in verify_log(log, exported, options):
            if isinstance(finding, StepProgress):
                if not quiet:
                    meter(finding)
            else:
                result = finding
    is_whole = isinstance(result, VerificationSummary)
    lines = [format_summary(result)] if isinstance(result, VerificationSummary) else describe_damage(result)
    print_result({"ok": is_whole, **msgspec.structs.asdict(result)}, lines, as_json)
    if not is_whole:
        print_message("if the log is damaged, keep a copy of it and restore a backup that `oncelog verify` accepts")
        raise typer.Exit(EXIT_FOUND_NOTHING)


def format_summary(passed: VerificationSummary) -> str:
    """Format the summary of an undamaged log as one line."""
    sealed = f" ({passed.sealed_keys} in {passed.segments} segments)" if passed.segments else ""
    return (
        f"{style('ok', 'good')}: {format_record_counts(passed.records, passed.restore_records, passed.audit_records)} "
        f"in {passed.lanes} lanes, "
        f"{passed.blocks} blocks, {passed.erased} erased, "
        f"{passed.keys} keys{sealed}, {format_side_state(passed)}epoch {passed.epoch}"
    )


def format_side_state(passed: VerificationSummary) -> str:
    """Format how many side-state entries match the records, and how many could not be checked."""
    same = ", ".join(f"{count} {name}" for name, count in passed.same.items() if count)
    unknown = ", ".join(f"{count} {name}" for name, count in passed.not_checkable.items() if count)
    text = f"{same} match the records, " if same else ""
    return text + (f"not checkable because records are erased or compacted: {unknown}, " if unknown else "")


def describe_damage(inconsistency: Inconsistency) -> list[str]:
    """Return the lines that describe the damage."""
    if not inconsistency.findings:
        return [f"{style('inconsistent', 'bad')}: {escape_unprintable(inconsistency.message)}"]
    shown = inconsistency.findings[:FINDINGS_SHOWN]
    lines = [
        f"{style('inconsistent', 'bad')}: {inconsistency.findings_total} entries differ from what the records produce:"
    ]
    lines += [f"  {escape_unprintable(finding)}" for finding in shown]
    more = inconsistency.findings_total - len(shown)
    return [*lines, f"  and {more} more"] if more else lines


def head(log: LogArgument, as_json: AlwaysJson = False) -> None:
    """Print the newest hash of every lane as JSON: {"epoch", "lanes": [{"lane", "position", "height", "block_hash"}]}.

    Keep it where the log's operator cannot change it, and pass it to `oncelog verify --head`.

    Example:  oncelog head orders.db > orders-head.json

    Example:  oncelog head postgresql://oncelog@db.example.org/orders > orders-head.json
    """
    del as_json
    with create_inspector(log).open_view() as view:
        print_result(export_head(view.metadata, view.run_query(load_heads)), (), as_json=True)

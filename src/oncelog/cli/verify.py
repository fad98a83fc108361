"""`oncelog verify`: is a log what it says it is?"""

from pathlib import Path
from typing import Annotated, Final

import msgspec
import typer

from oncelog.cli.terminal import (
    EXIT_FOUND_NOTHING,
    AsJson,
    LogArgument,
    ProgressMeter,
    escape_unprintable,
    format_record_counts,
    print_json,
    translate_errors,
)
from oncelog.storage.verify.findings import (
    Inconsistency,
    StepProgress,
    VerificationSummary,
    VerifyOptions,
    decode_exported_head,
)
from oncelog.storage.verify.verification import verify_log

FINDINGS_SHOWN: Final = 20
"""Findings that are printed. `--json` prints up to `comparison.FINDINGS_MAX`."""

Head = Annotated[
    Path | None, typer.Option("--head", help="A head that `oncelog head` printed earlier.", dir_okay=False, exists=True)
]


NoSideState = Annotated[
    bool, typer.Option("--no-side-state", help="Do not rebuild entities, relationships and rows from the records.")
]
TempDir = Annotated[
    Path | None,
    typer.Option(
        help="Where side state is rebuilt. If not given: TMPDIR, or the log's directory.", file_okay=False, exists=True
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Do not show progress.")]


def verify(
    log: LogArgument,
    head: Head = None,
    no_side_state: NoSideState = False,
    temp_dir: TempDir = None,
    quiet: Quiet = False,
    as_json: AsJson = False,
) -> None:
    """Goes through a log and says whether it is whole: hashes, records, indexes, all that is kept of clients.

    Entities, relationships, rows of deltas and client sequences are rebuilt from the records, in a temporary file, and
    compared with the stored ones. The first contradiction in the history, or all entries that differ, are reported,
    and the exit status is 1. The loss of the newest records, or a history that was rewritten as a whole, is found only
    with --head.

    The log may be in use meanwhile: it is looked at as it is at this moment.

    Example:  oncelog verify orders.db --head orders-head.json

    Example:  oncelog verify postgresql://oncelog@db.example.org/orders
    """
    with translate_errors():
        exported = None if head is None else decode_exported_head(head.read_bytes())
        result: Inconsistency | VerificationSummary = Inconsistency("the verification did not come to an end")
        options = VerifyOptions(not no_side_state, None if temp_dir is None else str(temp_dir))
        with ProgressMeter() as meter:
            for finding in verify_log(log, exported, options):
                if isinstance(finding, StepProgress):
                    if not quiet:
                        meter(finding)
                else:
                    result = finding
        is_whole = isinstance(result, VerificationSummary)
        if as_json:
            print_json({"ok": is_whole, **msgspec.structs.asdict(result)})
        elif isinstance(result, VerificationSummary):
            typer.echo(format_summary(result))
        else:
            typer.echo("\n".join(describe_damage(result)))
        if not is_whole:
            raise typer.Exit(EXIT_FOUND_NOTHING)


def format_summary(passed: VerificationSummary) -> str:
    """One line for people."""
    sealed = f" ({passed.sealed_keys} in {passed.segments} segments)" if passed.segments else ""
    return (
        f"ok: {format_record_counts(passed.records, passed.restore_records, passed.audit_records)} "
        f"in {passed.lanes} lanes, "
        f"{passed.blocks} blocks, {passed.erased} erased, "
        f"{passed.keys} keys{sealed}, {format_side_state(passed)}epoch {passed.epoch}"
    )


def format_side_state(passed: VerificationSummary) -> str:
    """Return the counts of rebuilt side state, and of what could not be checked."""
    same = ", ".join(f"{count} {name}" for name, count in passed.same.items() if count)
    unknown = ", ".join(f"{count} {name}" for name, count in passed.not_checkable.items() if count)
    text = f"{same} as the records make them, " if same else ""
    return text + (f"not checkable because records are erased or compacted: {unknown}, " if unknown else "")


def describe_damage(inconsistency: Inconsistency) -> list[str]:
    """Return the lines that describe the damage."""
    if not inconsistency.findings:
        return [f"not whole: {escape_unprintable(inconsistency.message)}"]
    shown = inconsistency.findings[:FINDINGS_SHOWN]
    lines = [f"not whole: {inconsistency.findings_total} entries differ from what the records make them:"]
    lines += [f"  {escape_unprintable(finding)}" for finding in shown]
    more = inconsistency.findings_total - len(shown)
    return [*lines, f"  and {more} more"] if more else lines

"""`oncelog backup`, `oncelog restore` and `oncelog epoch`: copy a log, restore a copy, and print or renew the epoch."""

import os
import pwd
from typing import Annotated, Final

import typer

from oncelog.cli.terminal import AsJson, FileArgument, LogArgument, ProgressMeter, print_result
from oncelog.errors import OncelogError
from oncelog.file_modes import parse_file_mode
from oncelog.storage import backups
from oncelog.storage.address import check_scheme, is_address
from oncelog.storage.inspect.factory import create_inspector
from oncelog.storage.metadata import Operator

CLI_ACTOR: Final = "system:cli"


def get_cli_operator() -> Operator:
    """Return the command line as the acting operator, with the user name from the operating system."""
    number = os.getuid()
    try:
        return Operator(CLI_ACTOR, pwd.getpwuid(number).pw_name)
    except KeyError:  # a container may run as a user without a name
        return Operator(CLI_ACTOR, str(number))


Above = Annotated[
    int | None,
    typer.Option(
        "--above",
        help="Continue all numbers above N, which must be at least the highest number in use and at most 2^46.",
        metavar="N",
        min=1,
        show_default=False,
    ),
]

FileMode = Annotated[
    str,
    typer.Option("--file-mode", help="Permissions of the new file: 0600, 0640 or 0660.", metavar="MODE"),
]


def backup(
    file: FileArgument,
    destination: Annotated[str, typer.Argument(help="File for the copy.", metavar="DESTINATION", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    file_mode: FileMode = "0600",
) -> None:
    """Copy a log into one consistent file. The log may be in use. The file appears only when it is complete.

    For files only. Databases have their own tools: pg_dump and pg_basebackup.

    Example:  oncelog backup orders.db backups/orders-monday.db
    """
    _check_files(file, destination)
    mode = parse_file_mode(file_mode)
    with ProgressMeter() as meter:
        copied = backups.backup(file, destination, meter, force=force, file_mode=mode)
    typer.echo(f"{copied.records} records, {copied.bytes} bytes in {destination} (epoch {copied.epoch})")


def restore(
    backup: Annotated[
        str, typer.Argument(help="A file that `oncelog backup` created.", metavar="BACKUP", show_default=False)
    ],
    file: FileArgument,
    full: Annotated[
        bool, typer.Option("--full", help="Verify the whole backup first, not only its newest blocks.")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing log; it is kept as FILE.before-restore-N.")
    ] = False,
    above: Above = None,
    file_mode: FileMode = "0600",
) -> None:
    """Restore a log from a backup, under a new epoch. Stop all programs that use the log first.

    Positions, sequences, block heights and fencing numbers continue above every number that may have been assigned
    after the backup, so that no number is used twice. By default they continue 1,000,000 above the highest number of
    the backup, and 100,000 more for each second since its last commit.

    For files only. After you restore a database with its own tools, give it a new epoch: `oncelog epoch ADDRESS
    --renew`.

    Example:  oncelog restore backups/orders-monday.db orders.db
    """
    _check_files(backup, file)
    mode = parse_file_mode(file_mode)
    with ProgressMeter() as meter:
        restored = backups.restore(
            backup, file, meter, force=force, full=full, above=above, file_mode=mode, operator=get_cli_operator()
        )
    lines = [
        f"{restored.records} records, {restored.bytes} bytes in {file}",
        "" if restored.kept is None else f"the previous log is kept as {restored.kept}",
        f"old epoch: {restored.old_epoch}",
        f"new epoch: {restored.new_epoch}",
        f"numbers continue above {restored.above}",
        (
            "Commits made after the backup are lost, and their numbers are not used again. Readers of the old epoch "
            "receive history_changed: they must drop records at positions that this log does not have, or start again "
            "from 0. Writers can safely retry writes whose outcome is unknown, with the same keys."
        ),
    ]
    typer.echo("\n".join(filter(None, lines)))


def epoch(
    log: LogArgument,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Start a new history after a restore. Stop all programs that use the log first."),
    ] = False,
    above: Above = None,
    as_json: AsJson = False,
) -> None:
    """Print the epoch of a log, which identifies its history. Cursors contain it.

    With --renew the log gets a new epoch, and readers with cursors of the old one get history_changed. Positions,
    sequences, block heights and fencing numbers continue above every number that the lost history may have assigned.
    Use it after restoring a database from a dump or to an earlier point in time, or restoring a file with Litestream or
    from a copy. `oncelog restore` renews the epoch itself.

    Example:  oncelog epoch orders.db

    Example:  oncelog epoch postgresql://oncelog@db.example.org/orders --renew
    """
    inspector = create_inspector(log)
    fields: dict[str, str | int]
    if renew:
        renewed = inspector.renew_epoch(above, get_cli_operator())
        fields = {"epoch": renewed.new_epoch, "old_epoch": renewed.old_epoch, "above": renewed.above}
        lines = [
            f"old epoch: {renewed.old_epoch}",
            f"new epoch: {renewed.new_epoch}",
            f"numbers continue above {renewed.above}",
        ]
    elif above is not None:
        raise OncelogError("--above requires --renew.")
    else:
        with inspector.open_view() as view:
            fields = {"epoch": view.metadata.epoch}
        lines = [str(fields["epoch"])]
    print_result(fields, lines, as_json)


def _check_files(*logs: str) -> None:
    for log in logs:
        check_scheme(log)
    if any(map(is_address, logs)):
        raise OncelogError(
            "back up a log in PostgreSQL with the database's own tools: pg_dump, or pg_basebackup and an archive of "
            "the write-ahead log. After the restore, run `oncelog epoch ADDRESS --renew` before any program uses "
            "the log, so that readers notice it, and `oncelog verify ADDRESS`."
        )

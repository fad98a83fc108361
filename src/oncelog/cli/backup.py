"""`oncelog backup`, `oncelog restore` and `oncelog epoch`."""

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
from oncelog.storage.leaps import Operator

CLI_ACTOR: Final = "system:cli"


def get_cli_operator() -> Operator:
    """Return the command line as the actor, with the name of the operating system's user."""
    number = os.getuid()
    try:
        return Operator(CLI_ACTOR, pwd.getpwuid(number).pw_name)
    except KeyError:  # a container may run as a user without a name
        return Operator(CLI_ACTOR, str(number))


Above = Annotated[
    int | None,
    typer.Option(
        "--above",
        help="Continue all numbers above this one: at least the highest that was given out, at most 2^46.",
        metavar="N",
        min=1,
        show_default=False,
    ),
]

FileMode = Annotated[
    str,
    typer.Option("--file-mode", help="Permissions of the new file: 0600, 0640 or 0660.", metavar="MODE"),
]

_LOST_COMMITS: Final = (
    "Commits after the backup are lost, and their numbers are not used again. Readers of the old epoch get "
    "history_changed: they drop records at positions that this log does not have, or start again from 0. "
    "Writers may send again whatever they are not sure of, under the same identity."
)


def backup(
    file: FileArgument,
    destination: Annotated[str, typer.Argument(help="Where the copy goes.", metavar="DESTINATION", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
    file_mode: FileMode = "0600",
) -> None:
    """Copies a log while it is in use: one file, of one moment, whole and on the disk when it has its name.

    For files. A database has tools of its own: pg_dump and pg_basebackup.

    Example:  oncelog backup orders.db backups/orders-monday.db
    """
    _check_files(file, destination)
    mode = parse_file_mode(file_mode)
    with ProgressMeter() as meter:
        copied = backups.backup(file, destination, meter, force=force, file_mode=mode)
    typer.echo(f"{copied.records} records, {copied.bytes} bytes in {destination} (epoch {copied.epoch})")


def restore(
    backup: Annotated[str, typer.Argument(help="What `oncelog backup` made.", metavar="BACKUP", show_default=False)],
    file: FileArgument,
    full: Annotated[bool, typer.Option("--full", help="Verify all of the backup first, not only its newest.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a log that is there; it is kept as FILE.before-restore-N.")
    ] = False,
    above: Above = None,
    file_mode: FileMode = "0600",
) -> None:
    """Makes a backup the log, under a new epoch. Stop everything that uses the log first.

    Positions, sequences, block heights and fencing numbers continue above every number that may have been given out
    after the backup, so that no number is used twice. By default they continue 1,000,000 above the highest number of
    the backup, and 100,000 more for each second since its last commit.

    For files. After restoring a database with its own tools give it a new epoch: `oncelog epoch ADDRESS --renew`.

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
        "" if restored.kept is None else f"what was there is kept as {restored.kept}",
        f"old epoch: {restored.old_epoch}",
        f"new epoch: {restored.new_epoch}",
        f"numbers continue above {restored.above}",
        _LOST_COMMITS,
    ]
    typer.echo("\n".join(filter(None, lines)))


def epoch(
    log: LogArgument,
    renew: Annotated[
        bool,
        typer.Option("--renew", help="Start a new history after a restore. Stop everything that uses the log first."),
    ] = False,
    above: Above = None,
    as_json: AsJson = False,
) -> None:
    """Prints the epoch of a log: the name of its history, which cursors carry.

    With --renew the log gets a new epoch, and readers whose cursors are of the old one get history_changed. Positions,
    sequences, block heights and fencing numbers continue above every number that the lost history may have given
    out. Do this after a database was restored from a dump or to a moment in the past, or a file by Litestream or by
    a copy. `oncelog restore` does it by itself.

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
        raise OncelogError("--above goes with --renew.")
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
            "a log in a database is backed up with the database's own tools: pg_dump, or pg_basebackup and an archive "
            "of the write-ahead log. After restoring it with them run `oncelog epoch ADDRESS --renew` before anybody "
            "uses it, so that readers are told, and `oncelog verify ADDRESS`."
        )

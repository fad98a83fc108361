"""`oncelog backup` and `oncelog restore`."""

from typing import Annotated

import typer

from oncelog.cli.terminal import File, Meter, ending_well
from oncelog.stores.sqlite import copying


def backup(
    file: File,
    destination: Annotated[str, typer.Argument(help="Where the copy goes.", metavar="DESTINATION", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Overwrite a file that is there.")] = False,
) -> None:
    """Copies a log while it is in use: one file, of one moment, whole and on the disk when it has its name.

    Example:  oncelog backup orders.db backups/orders-monday.db
    """
    with ending_well():
        with Meter() as meter:
            copied = copying.backup(file, destination, meter, force=force)
        typer.echo(f"{copied.records} records, {copied.bytes} bytes in {destination} (epoch {copied.epoch})")


def restore(
    backup: Annotated[str, typer.Argument(help="What `oncelog backup` made.", metavar="BACKUP", show_default=False)],
    file: File,
    full: Annotated[bool, typer.Option("--full", help="Verify all of the backup first, not only its newest.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a log that is there; it is kept as FILE.before-restore-N.")
    ] = False,
) -> None:
    """Makes a backup the log, under a new epoch. Stop everything that uses the log first.

    Example:  oncelog restore backups/orders-monday.db orders.db
    """
    with ending_well():
        with Meter() as meter:
            restored = copying.restore(backup, file, meter, force=force, full=full)
        typer.echo(f"{restored.records} records, {restored.bytes} bytes in {file}")
        if restored.kept is not None:
            typer.echo(f"what was there is kept as {restored.kept}")
        typer.echo(f"old epoch: {restored.old_epoch}")
        typer.echo(f"new epoch: {restored.new_epoch}")
        typer.echo(
            "What was committed after the backup is gone. Readers must not go on from a cursor of the old epoch: they "
            "drop what they have from positions that this log does not have, or start again from 0. Writers may send "
            "again whatever they are not sure of, under the same identity."
        )

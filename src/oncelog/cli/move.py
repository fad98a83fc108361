"""`oncelog move`: move a log from a file into a database."""

from typing import Annotated

import typer

from oncelog.cli.output import print_result
from oncelog.cli.terminal import AsJson, ProgressMeter, interrupt_on_sigterm, print_message
from oncelog.errors import SettingsError, StoreUnavailableError
from oncelog.storage.address import import_with_driver, is_address, redact_address

_RESUME_HINT = "Run the same command again to continue."


def move(
    source: Annotated[str, typer.Argument(help="The log: a file.", metavar="SOURCE", show_default=False)],
    target: Annotated[
        str,
        typer.Argument(
            help="Address of a database without a log: postgresql://…", metavar="TARGET", show_default=False
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Move a log from a file into a PostgreSQL database, with everything in it: epoch, positions, keys, cursors.

    The log may be in use during the move. At the end, the file stops accepting writes. Run the same command again to
    continue after an interruption.

    Example:  oncelog move orders.db postgresql://oncelog@db.example.org/orders
    """
    if is_address(source) or not is_address(target):
        raise SettingsError("a log moves from a file to a database: oncelog move FILE postgresql://…")
    moving = import_with_driver("oncelog.storage.migrate.migration")
    moving.check_migration(source, target)
    try:
        with interrupt_on_sigterm(), ProgressMeter() as meter:
            outcome = moving.migrate_log(source, target, meter)
    except KeyboardInterrupt:
        print_message(f"interrupted. {_RESUME_HINT}")
        raise
    except StoreUnavailableError as error:
        raise StoreUnavailableError(f"{error}. {_RESUME_HINT}") from error.__cause__
    where = f"{redact_address(target)} (epoch {outcome.epoch})"
    lines = [f"{source} has already been moved to {where}"]
    if outcome.is_new:
        lines = [
            f"{outcome.records} records in {outcome.lanes} lanes moved from {source} to {where}",
            f"{source} can still be read, but accepts no more writes: open {redact_address(target)}",
        ]
        if outcome.tables_left:
            lines.append(f"other tables remain in {source}: {', '.join(outcome.tables_left)}")
    print_result(outcome, lines, as_json)

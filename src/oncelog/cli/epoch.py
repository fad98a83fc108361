"""`oncelog epoch`: which history this is."""

from typing import Annotated

import typer

from oncelog.cli.backup import Above, get_cli_operator
from oncelog.cli.terminal import AsJson, LogArgument, print_result
from oncelog.errors import OncelogError
from oncelog.storage.inspect.factory import create_inspector


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

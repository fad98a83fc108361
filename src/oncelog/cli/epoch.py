"""`oncelog epoch`: which history this is."""

from typing import Annotated

import typer

from oncelog.cli.terminal import AsJson, Log, ending_well, print_json
from oncelog.stores.inspecting import inspector_of

Renew = Annotated[bool, typer.Option("--renew", help="Give the log a new epoch. Stop everything that uses it first.")]


def epoch(log: Log, renew: Renew = False, as_json: AsJson = False) -> None:
    """Prints the epoch of a log: the name of its history, which cursors carry.

    With --renew it gets a new one, and readers whose cursors are of the old one are told that history has changed. That
    is needed after a database was restored from a dump or from a moment in the past. `oncelog restore` does it by
    itself.

    Example:  oncelog epoch orders.db

    Example:  oncelog epoch postgresql://oncelog@db.example.org/orders --renew
    """
    with ending_well():
        inspector = inspector_of(log)
        if renew:
            renewed = inspector.renew_epoch()
            said = {"epoch": renewed.new_epoch, "old_epoch": renewed.old_epoch}
            lines = [f"old epoch: {renewed.old_epoch}", f"new epoch: {renewed.new_epoch}"]
        else:
            with inspector.looking() as view:
                said = {"epoch": view.about.epoch}
            lines = [said["epoch"]]
        if as_json:
            print_json(said)
        else:
            typer.echo("\n".join(lines))

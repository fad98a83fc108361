"""`oncelog move`."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from oncelog.cli.terminal import Meter, ending_well, terminated_as_interrupted
from oncelog.errors import SettingsError, StoreUnavailableError
from oncelog.stores.address import is_address, shown, with_driver

_GOES_ON = "Run the same command again, and it goes on."


def move(
    source: Annotated[str, typer.Argument(help="The log, a file.", metavar="SOURCE", show_default=False)],
    target: Annotated[
        str,
        typer.Argument(
            help="Where it goes: postgresql://… of a database without a log.", metavar="TARGET", show_default=False
        ),
    ],
) -> None:
    """Moves a log from a file into a PostgreSQL database, with everything it knows: epoch, positions, keys, cursors.

    The log may be in use until the end; then the file takes no more writes. What was interrupted goes on when the
    command is run again.

    Example:  oncelog move orders.db postgresql://oncelog@db.example.org/orders
    """
    with ending_well():
        if is_address(source) or not is_address(target):
            raise SettingsError("move goes from a file to a database: oncelog move FILE postgresql://…")
        moving = with_driver("oncelog.stores.moving")
        moving.demand_possible(source, target)
        with _told_how_to_go_on(), Meter() as meter:
            outcome = moving.move(source, target, meter)
        where = f"{shown(target)} (epoch {outcome.epoch})"
        if not outcome.is_new:
            typer.echo(f"{source} has been moved to {where} already; nothing is left to do")
            return
        typer.echo(f"{outcome.records} records in {outcome.lanes} lanes moved from {source} to {where}")
        typer.echo(f"{source} can still be read, and takes no more writes: open {shown(target)}")
        if outcome.tables_left:
            typer.echo(f"tables that are not the log's stay in {source}: {', '.join(outcome.tables_left)}")


@contextmanager
def _told_how_to_go_on() -> Iterator[None]:
    try:
        with terminated_as_interrupted():
            yield
    except KeyboardInterrupt:
        typer.echo(f"oncelog: interrupted. {_GOES_ON}", err=True)
        raise
    except StoreUnavailableError as error:
        raise StoreUnavailableError(f"{error}. {_GOES_ON}") from error.__cause__

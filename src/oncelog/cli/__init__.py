"""The command line: one file a command."""

from importlib import metadata
from typing import Annotated

import typer

from oncelog.cli import (
    apikey,
    audit,
    backup,
    clock,
    deltas,
    epoch,
    head,
    key,
    load,
    move,
    proof,
    serve,
    show,
    stats,
    submit,
    tail,
    token,
    verify,
)

app = typer.Typer(
    name="oncelog",
    help="Submit a write any number of times; it commits once, in an order that never changes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"oncelog {metadata.version('oncelog')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        # A callback, because without a command the function itself is not called.
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    del version


app.command()(serve.serve)
app.command()(submit.submit)
app.command()(tail.tail)
app.command()(load.load)
app.command()(verify.verify)
app.command()(audit.audit)
app.command()(head.head)
app.command()(proof.proof)
app.command()(backup.backup)
app.command()(backup.restore)
app.command()(move.move)
app.command()(show.show)
app.command()(stats.stats)
app.command()(clock.clock)
app.command()(epoch.epoch)
app.command()(token.token)
app.add_typer(deltas.app, name="deltas")
app.add_typer(apikey.app, name="apikey")
app.add_typer(key.app, name="key")


def main() -> None:
    """What the `oncelog` script runs."""
    app()

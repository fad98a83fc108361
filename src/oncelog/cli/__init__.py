"""The command line: one file per command."""

import os
import signal
import sys
from typing import Annotated

import typer

import oncelog
from oncelog.cli import (
    audit,
    backup,
    clock,
    completion,
    credentials,
    deltas,
    init,
    key,
    move,
    profile_list,
    proof,
    serve,
    show,
    stats,
    submit,
    tail,
    verify,
)
from oncelog.cli.doctor import command as doctor_command
from oncelog.cli.load import command as load_command
from oncelog.cli.terminal import EPILOG, EXIT_INTERRUPTED, CommandGroup

app = CommandGroup(
    name="oncelog",
    help="Submit a write any number of times; it commits once, in an order that never changes.",
    epilog=EPILOG,
    add_completion=False,  # `oncelog completion` replaces Typer's options
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"oncelog {oncelog.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        # A callback, because Typer does not call this function if no command is given.
        typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    del version


for command in (
    init.init,
    serve.serve,
    doctor_command.doctor,
    submit.submit,
    tail.tail,
    load_command.load,
    verify.verify,
    audit.audit,
    verify.head,
    proof.proof,
    backup.backup,
    backup.restore,
    move.move,
    show.show,
    stats.stats,
    clock.clock,
    backup.epoch,
    credentials.token,
    profile_list.profiles,
    completion.completion,
):
    app.command()(command)
app.add_typer(deltas.app, name="deltas")
app.add_typer(credentials.apikey_app, name="apikey")
app.add_typer(key.app, name="key")


def main() -> None:
    """Run the command line. Ctrl-C ends it at any time without a traceback."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # set by `oncelog_command`
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if completion.COMPLETE_VARIABLE in os.environ:
        completion.enable_completion()
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    finally:
        # Ctrl-C now ends the process directly, because a KeyboardInterrupt during Python's shutdown cannot be handled.
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

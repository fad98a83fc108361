"""What all commands share: how they end, how they say what went wrong, and how far they have come."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Final

import orjson
import typer

from oncelog.errors import OncelogError
from oncelog.stores.sqlite.findings import Progress

FOUND_NOTHING: Final = 1
CANNOT_LOOK: Final = 2
CANNOT_GO_ON: Final = 74
INTERRUPTED: Final = 130

File = Annotated[str, typer.Argument(help="The log.", metavar="FILE", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")]


@contextmanager
def ending_well() -> Iterator[None]:
    """Turns whatever ends a command early into its exit status, and a sentence where there is something to say."""
    try:
        yield
    except BrokenPipeError:
        # Who read our output has enough. Python flushes once more at exit, and that must have somewhere to go.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(0) from None
    except OncelogError as error:
        typer.echo(f"oncelog: {error}", err=True)
        raise typer.Exit(CANNOT_LOOK) from None
    except OSError as error:
        typer.echo(f"oncelog: cannot go on: {error.strerror}", err=True)
        raise typer.Exit(CANNOT_GO_ON) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def print_json(value: Any) -> None:
    """One object, on one line."""
    typer.echo(orjson.dumps(value).decode())


class Meter:
    """Shows on a terminal how far a command has come, on standard error; elsewhere it is silent."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._step = ""

    def __enter__(self) -> "Meter":
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, progress: Progress) -> None:
        """Takes what a step reports."""
        if not sys.stderr.isatty():
            return
        if progress.step != self._step:
            self._end()
            self._step = progress.step
            # Where nobody can tell how long a step takes, its name is all there is to see.
            self._bar = typer.progressbar(length=progress.total or 1, label=progress.step, file=sys.stderr)
            self._bar.__enter__()
        self._bar.update(max(0, progress.done - self._bar.pos))

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None

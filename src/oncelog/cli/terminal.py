"""Exit statuses, errors, signals and progress of all commands."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType
from typing import Annotated, Any, Final, TextIO, TypeVar

import typer
from typer.core import TyperGroup

from oncelog.cli.output import uses_color
from oncelog.errors import OncelogError, StoreUnavailableError
from oncelog.storage.verify.findings import StepProgress

EXIT_OK: Final = 0
EXIT_FOUND_NOTHING: Final = 1
EXIT_CANNOT_READ: Final = 2
EXIT_AMBIGUOUS: Final = 3
EXIT_IO_ERROR: Final = 74
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
"""Exit status of a program killed by SIGPIPE. Not 0, because the reader may have missed output."""
EXIT_STATUSES: Final = {
    EXIT_OK: "the command succeeded",
    EXIT_FOUND_NOTHING: "the command ran, and its result is negative: not found, not consistent, or not accepted",
    EXIT_CANNOT_READ: "the command could not run: wrong arguments or input, or a log or server that cannot be used",
    EXIT_AMBIGUOUS: "show, proof: several writes have the key",
    EXIT_IO_ERROR: "the output could not be written, or the disk is full or failing",
    EXIT_INTERRUPTED: "interrupted",
    EXIT_BROKEN_PIPE: "the reader of the output has exited",
}
"""Exit statuses of all commands, for `oncelog --help`. docs/reference/cli.md explains them."""
_DISK_ERROR_NAMES: Final = ("SQLITE_FULL", "SQLITE_IOERR")
_DISK_ERROR_NUMBERS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)

_VALUE_ERROR_PREFIX: Final = "Value error, "
"""Pydantic, with which Typer checks arguments, puts this text before the message of a ValueError."""

FileArgument = Annotated[str, typer.Argument(help="The log: a file.", metavar="FILE", show_default=False)]
LogArgument = Annotated[
    str, typer.Argument(help="The log: a file, or postgresql://…", metavar="LOG", show_default=False)
]
EPILOG: Final = "\n\n".join(
    ["Exit statuses:", *(f"{status:>3}  {meaning}" for status, meaning in EXIT_STATUSES.items())]
)
Command = TypeVar("Command", bound=Callable[..., Any])
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AlwaysJson = Annotated[bool, typer.Option("--json", help="Print JSON. This command prints nothing else.")]
"""For commands whose only format is JSON, so that programs can pass --json to every command."""


class _Group(TyperGroup):
    """A group whose errors about arguments do not begin with the name of a Python exception."""

    def invoke(self, ctx: Any) -> Any:
        """Invoke a command. Raises typer.BadParameter for an invalid argument of it."""
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix(_VALUE_ERROR_PREFIX)
            raise


class CommandGroup(typer.Typer):
    """A group of commands whose errors are translated into the exit statuses of this module (`translate_errors`)."""

    def __init__(self, *, interrupts_on_sigterm: bool = False, **options: Any) -> None:
        """With `interrupts_on_sigterm`, SIGTERM interrupts the commands as Ctrl-C does."""
        super().__init__(cls=_Group, no_args_is_help=True, **options)
        self._interrupts_on_sigterm = interrupts_on_sigterm

    def command(self, name: str | None = None, **options: Any) -> Callable[[Command], Command]:
        """Like `Typer.command`."""
        register = super().command(name, **options)

        def register_translated(command: Command) -> Command:
            if self._interrupts_on_sigterm:
                command = interrupt_on_sigterm()(command)
            return register(translate_errors()(command))

        return register_translated


@contextmanager
def translate_errors() -> Iterator[None]:
    """Translate an error that aborts a command into a message and an exit status."""
    if sys.stdout is None:  # checked first, before the command has effects that it cannot report
        print_message("standard output must be open")
        raise typer.Exit(EXIT_IO_ERROR)
    try:
        yield
    except BrokenPipeError:
        discard_output(sys.stdout)
        raise typer.Exit(EXIT_BROKEN_PIPE) from None
    except OncelogError as error:
        print_message(str(error))
        raise typer.Exit(EXIT_IO_ERROR if _is_disk_error(error) else EXIT_CANNOT_READ) from None
    except OSError as error:
        print_message(f"cannot continue: {error.strerror}")
        try:
            sys.stdout.flush()
        except OSError:
            discard_output(sys.stdout)
        raise typer.Exit(EXIT_IO_ERROR) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None


def discard_output(stream: TextIO) -> None:
    """Redirect a stream to the null device, to discard what it could not write.

    Python flushes its streams again at exit, and exits with status 120 if that fails.
    """
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, stream.fileno())
    os.close(null)


@contextmanager
def interrupt_on_sigterm() -> Iterator[None]:
    """Make SIGTERM interrupt a command as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, _handle_sigterm)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _handle_sigterm(_: int, frame: FrameType | None) -> None:
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):  # a background process may ignore Ctrl-C, but not SIGTERM
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)  # asyncio's handler cancels the main task


def _is_disk_error(error: OncelogError) -> bool:
    """Whether a full or failing disk caused the error, rather than the command's arguments."""
    cause = error.__cause__
    if isinstance(cause, OSError):
        return cause.errno in _DISK_ERROR_NUMBERS
    name = getattr(cause, "sqlite_errorname", None) or ""
    return isinstance(error, StoreUnavailableError) and name.startswith(_DISK_ERROR_NAMES)


def print_message(sentence: str) -> None:
    """Print a message to standard error. If standard error is closed, only the exit status reports the problem."""
    try:
        name = typer.style("oncelog:", bold=True) if uses_color(sys.stderr) else "oncelog:"
        typer.echo(f"{name} {sentence}", err=True)
    except OSError:
        discard_output(sys.stderr)


class ProgressMeter(AbstractContextManager["ProgressMeter"]):
    """Shows a command's progress on standard error if that is a terminal."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._step = ""
        self._started_s = 0.0

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, progress: StepProgress) -> None:
        """Show the progress of a step."""
        if sys.stderr is None or not sys.stderr.isatty():
            return
        if progress.step != self._step:
            self._end()
            self._step = progress.step
            self._started_s = time.monotonic()
            # Without a known total, the bar can show only the name of the step.
            self._bar = typer.progressbar(length=progress.total or 1, label=progress.step, file=sys.stderr)
            self._bar.__enter__()
        elapsed_s = time.monotonic() - self._started_s
        if progress.done and elapsed_s > 0:
            self._bar.label = f"{progress.step} {progress.done:,} ({progress.done / elapsed_s:,.0f}/s)"
        self._bar.update(max(0, progress.done - self._bar.pos))

    def _end(self) -> None:
        if self._bar is not None:
            self._bar.__exit__(None, None, None)
            self._bar = None

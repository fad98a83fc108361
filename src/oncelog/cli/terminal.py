"""Output, exit statuses and progress of all commands."""

import errno
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime, timedelta
from types import FrameType
from typing import Annotated, Any, Final, TextIO, TypeVar

import msgspec
import orjson
import typer

from oncelog.errors import OncelogError, StoreUnavailableError
from oncelog.storage.verify.findings import StepProgress

EXIT_FOUND_NOTHING: Final = 1
EXIT_CANNOT_READ: Final = 2
EXIT_AMBIGUOUS: Final = 3
EXIT_IO_ERROR: Final = 74
EXIT_INTERRUPTED: Final = 130
EXIT_BROKEN_PIPE: Final = 141
"""Exit status of a program killed by SIGPIPE. Not 0, because the reader may have missed output."""
_DISK_ERROR_NAMES: Final = ("SQLITE_FULL", "SQLITE_IOERR")
_DISK_ERROR_NUMBERS: Final = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_DURATION: Final = re.compile(r"(\d{1,9})([smhd])", re.ASCII)
_UNIT_MS: Final = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}

FileArgument = Annotated[str, typer.Argument(help="The log: a file.", metavar="FILE", show_default=False)]
LogArgument = Annotated[
    str, typer.Argument(help="The log: a file, or postgresql://…", metavar="LOG", show_default=False)
]
Command = TypeVar("Command", bound=Callable[..., Any])
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class CommandGroup(typer.Typer):
    """A group of commands whose errors are translated into the exit statuses of this module (`translate_errors`)."""

    def __init__(self, *, interrupts_on_sigterm: bool = False, **options: Any) -> None:
        """With `interrupts_on_sigterm`, SIGTERM interrupts the commands as Ctrl-C does."""
        super().__init__(no_args_is_help=True, **options)
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
    handler(signal.SIGINT, frame)  # the handler of asyncio cancels the main task


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
        typer.echo(f"oncelog: {sentence}", err=True)
    except OSError:
        discard_output(sys.stderr)


def escape_unprintable(text: str) -> str:
    """Escape all unprintable characters, which could control the terminal."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else f"\\u{ord(character):04x}" for character in text)


def format_record_counts(records: int, restore_records: int, audit_records: int) -> str:
    """Format a record count. Internal records are listed separately, because users count only their own writes."""
    internal = [
        f"{count} {kind} records" for count, kind in ((restore_records, "restore"), (audit_records, "audit")) if count
    ]
    return " and ".join([f"{records - restore_records - audit_records} records", *internal])


def encode_json_line(value: Any) -> bytes:
    """Encode an object as JSON, with a line feed."""
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


def write_lines(lines: Iterable[bytes]) -> None:
    """Write lines, which include their line feeds, to standard output and flush it."""
    sys.stdout.buffer.writelines(lines)
    sys.stdout.buffer.flush()


def format_columns(columns: Iterable[str]) -> bytes:
    """Format columns as a line for human readers, with control characters escaped."""
    return (escape_unprintable("  ".join(columns)).rstrip() + "\n").encode()


def print_result(value: Any, lines: Iterable[str], as_json: bool) -> None:
    """Print a command's result, as JSON on one line for programs or as lines for human readers.

    In JSON, structs become objects.
    """
    if as_json:
        typer.echo(orjson.dumps(value, default=msgspec.to_builtins).decode())
        return
    for line in lines:
        typer.echo(line)


def format_utc(time_ms: int, separator: str = " ", zone: str = " UTC") -> str:
    """Format milliseconds since 1970 as a UTC time, or as a number if the time is outside the calendar."""
    try:
        moment = _EPOCH + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return moment.isoformat(sep=separator, timespec="milliseconds").replace("+00:00", zone)


def parse_utc_ms(text: str) -> int | None:
    """Parse an ISO 8601 time, UTC if it has no offset, into milliseconds since 1970. Return None if it is malformed."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - _EPOCH) // timedelta(milliseconds=1)


def find_duration_ms(text: str) -> int | None:
    """Parse a duration such as `15m` or `30d` into milliseconds. Return None if the text is not a duration."""
    parts = _DURATION.fullmatch(text)
    return None if parts is None else int(parts[1]) * _UNIT_MS[parts[2]]


def parse_duration_ms(text: str) -> int:
    """Like `find_duration_ms`, but raises OncelogError if the text is not a duration."""
    duration_ms = find_duration_ms(text)
    if duration_ms is None:
        raise OncelogError(f"{text!r} is not a duration: write a number and s, m, h or d")
    return duration_ms


def format_duration(duration_ms: int) -> str:
    """Format a duration with its two largest units: `3 d 4 h`, `2 min 5 s`, `0 s`."""
    seconds = duration_ms // 1000
    parts = []
    for name, unit_s in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, unit_s)
        parts.append((count, name))
    first = next((index for index, (count, _) in enumerate(parts) if count), len(parts) - 1)
    return " ".join(f"{count} {name}" for count, name in parts[first : first + 2] if count or name == parts[first][1])


def parse_time_ms(text: str, option: str) -> int | None:
    """Parse a time, or a duration before now, into milliseconds since 1970. Return None for an empty text."""
    if not text:
        return None
    ago_ms = find_duration_ms(text)
    if ago_ms is not None:
        return max(0, round(time.time() * 1000) - ago_ms)
    time_ms = parse_utc_ms(text)
    if time_ms is None:
        raise OncelogError(
            f"{option} must be a time such as 2026-11-18T12:00 (UTC), or a duration such as 24h, not {text!r}"
        )
    return max(0, time_ms)


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

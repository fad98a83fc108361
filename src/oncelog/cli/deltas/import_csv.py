"""`oncelog deltas import`: import the lines of a CSV file as rows of a table, each written once."""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final, Literal

import msgspec
import typer
from msgspec import Struct

from oncelog.cli.deltas.column_types import get_encoder
from oncelog.cli.deltas.csv_file import CsvContent, CsvFile, CsvFormat, WrongLinesError
from oncelog.cli.deltas.gateway import Gateway, Name, PushItem, PushTooLargeError, Timeout, find_refused_item
from oncelog.cli.deltas.rows import Table
from oncelog.cli.files import open_file, write_new_file
from oncelog.cli.line_input import split_batches
from oncelog.cli.output import escape_unprintable, format_utc, print_result
from oncelog.cli.remote import check_text, describe_progress
from oncelog.cli.server_options import Remote, uses_server
from oncelog.cli.terminal import EXIT_FOUND_NOTHING, AsJson, ProgressMeter, print_message
from oncelog.cli.times import parse_utc_ms
from oncelog.client.deltas.codec import GatewayRefusedError
from oncelog.client.deltas.edits import check_identifier
from oncelog.core.deltas import PUSH_DELTAS_MAX, is_identifier
from oncelog.core.hlc import COUNTER_BITS, HLC_MAX, wall_ms
from oncelog.core.limits import NAME_CHARACTERS_MAX
from oncelog.errors import OncelogError
from oncelog.file_modes import describe_read_error
from oncelog.storage.clock import SystemClock
from oncelog.storage.verify.findings import StepProgress

STATE_SUFFIX: Final = ".oncelog-import"
STATE_BYTES_MAX: Final = 1024 * 1024


@uses_server
def import_(  # noqa: PLR0913 - each one is an option
    gateway: Name,
    table: Table,
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE.csv", help="A CSV file; its first line contains the column names.", show_default=False
        ),
    ],
    *,
    row_id: Annotated[str, typer.Option(metavar="COLUMN", help="Column with the row ids.", show_default=False)],
    client_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Client id of the deltas. Default: the profile's client id.", show_default=False
        ),
    ] = None,
    types: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=TYPE,…",
            help="text, integer, number, boolean or json; with ? an empty cell is null. Other columns are text.",
        ),
    ] = None,
    infer: Annotated[bool, typer.Option("--infer", help="Infer the types of other columns from the file.")] = False,
    rename: Annotated[
        list[str] | None,
        typer.Option(metavar="OLD=NEW", help="New name for a column; may be repeated."),
    ] = None,
    empty_null: Annotated[bool, typer.Option("--empty-null", help="An empty cell is null in all columns.")] = False,
    delimiter: Annotated[str, typer.Option(metavar="CHARACTER", help="Field separator; \\t is a tab.")] = ",",
    at: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Clock of all rows, such as 2026-01-31T12:00:00Z; default now."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check the file only; nothing is sent.")] = False,
    batch: Annotated[int, typer.Option(min=1, max=PUSH_DELTAS_MAX, help="Deltas per request.")] = 1000,
    timeout: Timeout = 30.0,
    as_json: AsJson = False,
    remote: Remote,
) -> None:
    """Import a CSV file: each line is an INSERT of a row. The first line names the columns.

    The whole file is checked before anything is sent. During the import, FILE.csv.oncelog-import stores its start time:
    after an interruption run the same command again, and no row is written twice. The exit status is 1 if the
    server refused a row, 2 if the file or an option is wrong or the server cannot be reached.

    Examples:

      oncelog deltas import shop products products.csv --row-id sku --client-id loader --types price=number,stock=integer

      oncelog deltas import shop products products.csv --row-id SKU --client-id loader --infer --rename "Price (EUR)=price" --dry-run
    """  # noqa: E501 - to be copied
    shape = CsvFormat(
        _parse_delimiter(delimiter),
        check_text(row_id, "--row-id"),
        _parse_renames(rename or []),
        _parse_types(types or []),
        infer,
        empty_null,
    )
    client = Gateway(gateway, timeout, remote)
    check_identifier(table, "TABLE")
    if client_id is None:
        raise OncelogError("--client-id is missing")
    if not 1 <= len(check_text(client_id, "--client-id")) <= NAME_CHARACTERS_MAX:
        raise OncelogError(f"--client-id must have 1 to {NAME_CHARACTERS_MAX} characters")
    target = _Target(client.remote.url, gateway, table, client_id)
    start = None if at is None else _parse_start(at)
    with open_file(file) as opened:
        csv = CsvFile(file, opened, shape)
        if dry_run:
            content = _check_file(csv)
            summary = f"{content.rows} rows of {file} can be imported"
            lines = [summary, *(f"  {name}: {kind}" for name, kind in content.types.items())]
            print_result({"rows": content.rows, "types": content.types}, lines, as_json)
            return
        importing = _Import(csv, client, target, shape, batch)
        importing.begin(start)
        asyncio.run(importing.run())
    importing.print(as_json)


# --- options ----------------------------------------------------------------------------------------------


def _parse_delimiter(text: str) -> str:
    text = "\t" if text == "\\t" else text
    if len(text) != 1 or text in '"\r\n\0' or not text.isascii():
        raise OncelogError(f"--delimiter must be one ASCII character other than a quote, not {text!r}")
    return text


def _parse_renames(options: Sequence[str]) -> dict[str, str]:
    renames: dict[str, str] = {}
    for text in options:
        old, _, new = check_text(text, "--rename").rpartition("=")
        if not old or not is_identifier(new):
            raise OncelogError(f"--rename must be OLD=NEW, where NEW consists of letters, digits and _, not {text!r}")
        if old in renames:
            raise OncelogError(f"--rename: {old!r} must not be repeated")
        renames[old] = new
    return renames


def _parse_types(options: Sequence[str]) -> dict[str, str]:
    types: dict[str, str] = {}
    for text in (part for option in options for part in check_text(option, "--types").split(",") if part):
        name, _, kind = text.partition("=")
        try:
            get_encoder(kind)
        except ValueError as error:
            raise OncelogError(f"--types: {text!r} must be NAME=TYPE, and TYPE {error}") from error
        if name in types:
            raise OncelogError(f"--types: {name!r} must not be repeated")
        types[name] = kind
    return types


def _parse_start(text: str) -> int:
    """Parse the --at option into the clock reading of the first row. Raises OncelogError."""
    time_ms = parse_utc_ms(text)
    if time_ms is None:
        raise OncelogError(f"--at must be a time such as 2026-01-31T12:00:00Z, not {text!r}")
    if not 0 <= time_ms << COUNTER_BITS <= HLC_MAX:
        raise OncelogError("--at must not be before 1970")
    return time_ms << COUNTER_BITS


def _format_hlc_time(hlc: int) -> str:
    """Format the time of a clock reading in the format that the --at option accepts."""
    return format_utc(wall_ms(hlc), "T", "Z")


# --- check ------------------------------------------------------------------------------------------------


def _check_file(csv: CsvFile) -> CsvContent:
    """Check the file. Raises OncelogError after printing the malformed lines."""
    try:
        with ProgressMeter() as meter:
            return csv.check(lambda done: meter(StepProgress("checking", done, csv.size)))
    except WrongLinesError as error:
        for fault in error.faults:
            print_message(f"{csv.path}: {escape_unprintable(fault)}")
        raise OncelogError(f"{csv.path}: {error}; nothing was sent") from error
    except OncelogError as error:
        raise OncelogError(f"{csv.path}: {escape_unprintable(str(error))}; nothing was sent") from error


# --- state ------------------------------------------------------------------------------------------------
# The id of a delta depends on its clock, and the clock of an import is its start time. If a crash lost the start time,
# the next run would create different ids and write all rows again. The state is therefore saved before the first
# request, in a file next to the CSV file, and removed when the server has answered for all rows.


class _Target(Struct, frozen=True):
    """The table that receives the rows, and the client that writes them."""

    url: str
    gateway: str
    table: str
    client_id: str


class _ImportState(Struct, frozen=True):
    """State of an import that has started."""

    target: _Target
    shape: CsvFormat
    content: CsvContent
    hlc: int
    """Clock of the first row."""
    version: Literal[1] = 1


def _load_state(path: Path) -> _ImportState | None:
    """Load the state of an interrupted import. Returns None if no import was interrupted. Raises OncelogError."""
    try:
        with path.open("rb") as file:
            text = file.read(STATE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OncelogError(describe_read_error(str(path), error)) from error
    try:
        return msgspec.json.decode(text, type=_ImportState)
    except msgspec.MsgspecError:
        message = f"{path} is not an import state file of this version; move it away if you do not need it"
        raise OncelogError(message) from None


def _save_state(path: Path, state: _ImportState) -> bool:
    """Save a new state. Return False if another import has just saved one. Raises OncelogError."""
    try:
        return write_new_file(path, [msgspec.json.encode(state)])
    except OncelogError as error:
        raise OncelogError(f"{error}; with --at TIME it is not needed") from error


def _check_same(path: Path, state: _ImportState, target: _Target, shape: CsvFormat, csv: CsvFile) -> None:
    """Raise OncelogError if a stored import differs from this one, because its ids would not match the rows."""
    differing = [name for name in target.__struct_fields__ if getattr(target, name) != getattr(state.target, name)]
    differing += [name for name in shape.__struct_fields__ if getattr(shape, name) != getattr(state.shape, name)]
    if (csv.size, csv.compute_hash()) != (state.content.bytes, state.content.sha256):
        differing.append("content of the CSV file")
    if differing:
        names = ", ".join(name.replace("_", " ") for name in differing)
        raise OncelogError(
            f"{path} is the state of an interrupted import that differs from this one in: {names}. Finish that "
            "import, or remove the file to start a new one, which writes all rows again"
        )


# --- import -----------------------------------------------------------------------------------------------


class _Import:
    def __init__(self, csv: CsvFile, gateway: Gateway, target: _Target, shape: CsvFormat, batch: int) -> None:
        self._csv = csv
        self._gateway = gateway
        self._target = target
        self._shape = shape
        self._batch = batch
        self._state_path: Path | None = None
        self._state: _ImportState
        self._is_resumed = False
        self._started_s = 0.0
        self._committed = 0
        self._duplicates = 0

    @property
    def _rows_done(self) -> int:
        return self._committed + self._duplicates

    def begin(self, start: int | None) -> None:
        """Choose the clock of the first row: the time from --at or from an interrupted import, or the current time."""
        if start is not None:
            self._state = _ImportState(self._target, self._shape, _check_file(self._csv), start)
            return
        self._state_path = path = Path(self._csv.path + STATE_SUFFIX)
        saved_state = _load_state(path)
        if saved_state is None:
            # If two imports start together, one of them saves its state first, and the other continues with that state.
            content = _check_file(self._csv)
            self._state = _ImportState(self._target, self._shape, content, SystemClock().wall_ms() << COUNTER_BITS)
            if _save_state(path, self._state):
                return
            saved_state = _load_state(path)
            if saved_state is None:
                raise OncelogError(
                    f"another import of {self._csv.path} has just finished; nothing was sent; run the command again"
                )
        _check_same(path, saved_state, self._target, self._shape, self._csv)
        self._state, self._is_resumed = saved_state, True
        print_message(
            f"continuing the import that was started at {_format_hlc_time(saved_state.hlc)}: "
            "rows in the table are not written again"
        )

    async def run(self) -> None:
        """Push all rows. Remove the saved state at the end, or if nothing can have been written."""
        state = self._state
        self._started_s = time.monotonic()
        total = state.content.rows
        items = self._csv.iterate_deltas(state.content.types, state.target.client_id, state.target.table, state.hlc)
        try:
            with describe_progress(self._describe_interruption), ProgressMeter() as meter:
                async with self._gateway:
                    for batch in split_batches(items, self._batch):
                        self._csv.check_unchanged()
                        await self._push_batch(batch)
                        meter(StepProgress("importing", self._rows_done, total))
        except GatewayRefusedError as error:
            has_row_index = error.index is not None
            print_message(f"{self._describe_progress()}{self._describe_leftover(has_row_index=has_row_index)}")
            raise (typer.Exit(EXIT_FOUND_NOTHING) if has_row_index else OncelogError(str(error))) from error
        self._remove_state()

    async def _push_batch(self, batch: Sequence[PushItem]) -> None:
        """Push a batch. If the server's limits delay it for too long, halve this batch and later ones."""
        at = 0
        while at < len(batch):
            part = batch[at : at + self._batch]
            try:
                results = await self._gateway.push(part, can_divide=True)
            except PushTooLargeError:
                self._batch = len(part) // 2
                continue
            except GatewayRefusedError as error:
                item = find_refused_item(part, error)
                if item is not None:
                    print_message(f"{self._csv.path}: {item.location}: {error}")
                raise
            duplicates = sum(result.duplicate for _, result in results)
            self._duplicates += duplicates
            self._committed += len(results) - duplicates
            at += len(part)

    def _describe_progress(self) -> str:
        return f"{self._rows_done} of {self._state.content.rows} rows are in the table"

    def _describe_interruption(self) -> str:
        with_at = "" if self._state_path is not None else f" with --at {_format_hlc_time(self._state.hlc)}"
        resume = f"Run the same command again{with_at} to continue; no row is written twice."
        return f"{self._describe_progress()}. {resume}"

    def _describe_leftover(self, *, has_row_index: bool) -> str:
        """Describe how to continue after a refusal. Remove the saved state if nothing can have been written.

        The server recognises written rows before it refuses anything, so a refused row was not written.
        """
        if self._state_path is None:
            return ""
        if not self._rows_done and not self._is_resumed and (has_row_index or not self._gateway.retrier.has_retried):
            self._remove_state()
            return ""
        return f"; to change the file, remove {self._state_path} and import all rows again"

    def _remove_state(self) -> None:
        if self._state_path is not None:
            self._state_path.unlink(missing_ok=True)

    def print(self, as_json: bool) -> None:
        """Print how many rows and deltas were imported."""
        took_s = time.monotonic() - self._started_s
        figures = {"rows": self._rows_done, "committed": self._committed, "duplicates": self._duplicates}
        at = _format_hlc_time(self._state.hlc)
        pace = f"{self._rows_done / took_s:.0f} deltas/s" if took_s else ""
        line = (
            f"{self._rows_done} rows of {self._csv.path} are in {self._target.table}: "
            f"{self._committed} deltas written, {self._duplicates} already known ({pace}; at {at})"
        )
        print_result({**figures, "at": at, "took_s": round(took_s, 3)}, [line], as_json)

"""Read a CSV file as rows of a table. Errors contain the line number."""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from hashlib import file_digest, sha256
from io import BufferedReader
from stat import S_ISREG
from typing import Final

from msgspec import Raw, Struct

from oncelog.cli.deltas.column_types import NULLABLE_SUFFIX, TEXT, CellEncoder, TypeGuess, get_encoder
from oncelog.cli.deltas.gateway import PushItem
from oncelog.cli.line_input import LINE_BYTES_MAX
from oncelog.core.deltas import (
    IDENTIFIER_CHARACTERS_MAX,
    ROW_ID_CHARACTERS_MAX,
    DeltaJson,
    encode_delta,
    is_identifier,
    to_row_delta,
)
from oncelog.core.hlc import format_hlc
from oncelog.core.limits import ROW_BYTES_MAX, ROW_COLUMNS_MAX
from oncelog.core.merge import Op
from oncelog.errors import CanonicalError, OncelogError

FAULTS_SHOWN_MAX: Final = 20
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"
_CSV_ERRORS: Final = {
    "new-line character": "a carriage return is not followed by a line feed; every line must end with a line feed",
    "unexpected end of data": 'a quoted field has no closing "',
    "field larger": f'a field is longer than {ROW_BYTES_MAX} characters; perhaps a " is missing',
}
"""Messages for errors of the `csv` module, by the beginning of its error text."""


class CsvFormat(Struct, frozen=True):
    """Options for reading a file. Each of them affects the deltas."""

    delimiter: str
    row_id: str
    renames: dict[str, str]
    types: dict[str, str]
    infers: bool
    empty_null: bool


class CsvContent(Struct, frozen=True):
    """Result of checking a file."""

    bytes: int
    sha256: str
    rows: int
    types: dict[str, str]
    """Types of all columns."""


class WrongLinesError(OncelogError):
    """Some lines cannot be imported. Nothing was sent."""

    def __init__(self, faults: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.faults = faults


class CsvFile:
    """An open file that is read several times. It must not change between reads."""

    def __init__(self, path: str, file: BufferedReader, csv_format: CsvFormat) -> None:
        self.path = path
        self._file = file
        self._format = csv_format
        self._initial_stat = self._read_stat()
        self.size = self._initial_stat[0]

    def check_unchanged(self) -> None:
        """Raise OncelogError if the file has changed since it was opened."""
        if self._read_stat() != self._initial_stat:
            raise OncelogError(f"{self.path} changed while it was being read")

    def _read_stat(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        if not S_ISREG(found.st_mode):
            raise OncelogError(f"{self.path} must be a regular file, which can be read twice")
        return found.st_size, found.st_mtime_ns

    # --- checks before anything is sent

    def compute_hash(self) -> str:
        """Return the SHA-256 of the content in hexadecimal."""
        self._file.seek(0)
        return file_digest(self._file, sha256).hexdigest()

    def check(self, on_progress: Callable[[int], None]) -> CsvContent:
        """Check every line. Raises WrongLinesError with the first malformed lines, or OncelogError."""
        head, records = self._read_header()
        infers, declared = self._format.infers, self._format.types
        guesses = {name: TypeGuess() for name in head.places if infers and name not in declared}
        checks = [
            (place, guesses[name].observe if name in guesses else _build_encoder(name, head.choose_type(name)))
            for name, place in head.places.items()
        ]
        rows, faults = 0, []
        for line, cells in records:
            rows += 1
            try:
                head.check_cells(cells)
                for place, check in checks:
                    check(cells[place])
            except ValueError as error:
                faults.append(f"line {line}: {error}")
                if len(faults) == FAULTS_SHOWN_MAX:
                    raise WrongLinesError(faults, "more lines may be invalid") from None
            if not rows % 1000:
                on_progress(self._file.tell())
        if faults:
            raise WrongLinesError(faults, f"{len(faults)} of {rows} lines with rows are invalid")
        types = {name: head.choose_type(name, guesses.get(name)) for name in head.places}
        content = CsvContent(self.size, self.compute_hash(), rows, types)
        self.check_unchanged()
        return content

    # --- deltas

    def iterate_deltas(self, types: Mapping[str, str], client_id: str, table: str, start: int) -> Iterator[PushItem]:
        """Yield a delta for each row. Raises OncelogError.

        The clock advances by one for each row, so the same file always produces the same deltas.
        """
        head, records = self._read_header()
        columns = [
            (b'{"column":"%b","value":' % name.encode(), _build_encoder(name, types[name]), head.places[name])
            for name in sorted(head.places)  # sorted like the columns of `extract`
        ]
        for number, (line, cells) in enumerate(records):
            try:
                head.check_cells(cells)
                values = [b"%b%b}" % (prefix, kind(cells[place])) for prefix, kind, place in columns]
                delta_json = DeltaJson(
                    client_id,
                    Raw(b"[%b]" % b",".join(values)),
                    "",
                    format_hlc(start + number),
                    Op.INSERT,
                    cells[head.row_id],
                    table,
                )
                delta = to_row_delta(delta_json, delta_json.compute_id(), "$")
            except (ValueError, CanonicalError) as error:
                raise OncelogError(f"line {line}: {error}") from error
            yield PushItem(encode_delta(delta), f"line {line}")

    def _read_header(self) -> tuple["_CsvHeader", Iterator[tuple[int, list[str]]]]:
        records = self._iterate_records()
        return _CsvHeader(next(records, (1, []))[1], self._format), records

    def _iterate_records(self) -> Iterator[tuple[int, list[str]]]:
        """Yield each record as the number of its first line and its fields. Skip empty lines."""
        csv.field_size_limit(ROW_BYTES_MAX)
        reader = csv.reader(self._iterate_lines(), delimiter=self._format.delimiter, strict=True)
        while True:
            line = reader.line_num + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                message = str(error)
                message = next((text for start, text in _CSV_ERRORS.items() if message.startswith(start)), message)
                raise OncelogError(f"line {line}: {message}") from error
            if cells is None:
                return
            if cells:
                yield line, cells

    def _iterate_lines(self) -> Iterator[str]:
        """Yield the lines of the file, decoded from UTF-8. A line that is too long is not read into memory."""
        self._file.seek(0)
        read_line = partial(self._file.readline, LINE_BYTES_MAX + 1)
        for number, line in enumerate(iter(read_line, b""), start=1):
            if len(line) > LINE_BYTES_MAX:
                raise OncelogError(f"line {number}: is longer than {LINE_BYTES_MAX} bytes")
            try:
                text = (line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line).decode()
            except UnicodeDecodeError as error:
                raise OncelogError(f"line {number}: is not UTF-8, at byte {error.start + 1}") from None
            yield text


class _CsvHeader:
    """The header line: the columns of the file and their names in the table. Raises OncelogError."""

    def __init__(self, cells: Sequence[str], csv_format: CsvFormat) -> None:
        self._format = csv_format
        if not cells:
            raise OncelogError("line 1: must contain the column names")
        _check_columns("--row-id", [csv_format.row_id], cells)
        _check_columns("--rename", csv_format.renames, cells)
        self.row_id = cells.index(csv_format.row_id)
        self._names = [csv_format.renames.get(cell, cell) for cell in cells]
        self._check_names(cells)
        self.places = {name: place for place, name in enumerate(self._names) if place != self.row_id}
        """Indexes of the columns that contain values."""
        _check_columns("--types", csv_format.types, [*self.places])

    def _check_names(self, cells: Sequence[str]) -> None:
        seen: set[str] = set()
        for place, name in enumerate(self._names):
            if place != self.row_id and not is_identifier(name):
                raise OncelogError(
                    f"line 1: {name!r} is not a valid column name: a name consists of letters, digits and _, does not "
                    f"begin with a digit, and has at most {IDENTIFIER_CHARACTERS_MAX} characters; choose another name "
                    f'with --rename "{cells[place]}=NAME"'
                )
            if name in seen:
                raise OncelogError(f"line 1: two columns are named {name!r}")
            seen.add(name)
        if len(self._names) - 1 > ROW_COLUMNS_MAX:
            raise OncelogError(f"line 1: a row can have at most {ROW_COLUMNS_MAX} columns, not {len(self._names) - 1}")

    def check_cells(self, cells: Sequence[str]) -> None:
        """Check the number of fields and the row id. Raises ValueError."""
        if len(cells) != len(self._names):
            raise ValueError(f"has {len(cells)} fields, but line 1 has {len(self._names)}")
        text = cells[self.row_id]
        if not text:
            raise ValueError(f"{self._format.row_id}: the row has no id")
        if len(text) > ROW_ID_CHARACTERS_MAX or "\0" in text:
            raise ValueError(
                f"{self._format.row_id}: an id must have at most {ROW_ID_CHARACTERS_MAX} characters and no U+0000"
            )

    def choose_type(self, name: str, guess: TypeGuess | None = None) -> str:
        """Return the type of a column: the guessed one, or the one from the options."""
        chosen = self._format.types.get(name, TEXT) if guess is None else guess.choose_type()
        is_nullable = self._format.empty_null or chosen.endswith(NULLABLE_SUFFIX)
        return chosen.removesuffix(NULLABLE_SUFFIX) + (NULLABLE_SUFFIX if is_nullable else "")


def _build_encoder(name: str, type_name: str) -> CellEncoder:
    """Build the cell encoder of a column. Its errors contain the name of the column."""
    encoder = get_encoder(type_name)

    def encode_cell(text: str) -> bytes:
        try:
            return encoder(text)
        except ValueError as error:
            shown = text if len(text) <= 40 else text[:39] + "…"
            raise ValueError(f"{name}: {shown!r} {error}") from None

    return encode_cell


def _check_columns(option: str, names: Iterable[str], columns: Sequence[str]) -> None:
    for name in names:
        if name not in columns:
            shown = ", ".join([*map(repr, columns[:20]), *(["…"] if len(columns) > 20 else [])]) or "none"
            raise OncelogError(f"{option}: no such column: {name!r}; the file has {shown}")

"""A CSV file as rows of a table, line by line: what is wrong with a line is told with its number."""

import csv
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from stat import S_ISREG
from typing import BinaryIO, Final

from msgspec import Raw, Struct

from oncelog.cli.deltas.kinds import OR_NULL, TEXT, Guess, Kind, kind_of
from oncelog.cli.input import LINE_BYTES_MAX
from oncelog.core.deltas import (
    IDENTIFIER_CHARACTERS_MAX,
    ROW_ID_CHARACTERS_MAX,
    DeltaJson,
    delta_body,
    is_identifier,
    row_delta,
)
from oncelog.core.hlc import hlc_text
from oncelog.core.limits import ROW_BYTES_MAX, ROW_COLUMNS_MAX
from oncelog.core.merge import Op
from oncelog.errors import CanonicalError, OncelogError

FAULTS_TOLD_MAX: Final = 20
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"


class Shape(Struct, frozen=True):
    """How a file is to be read. All of it decides what the deltas say."""

    delimiter: str
    row_id: str
    renames: dict[str, str]
    types: dict[str, str]
    infers: bool
    empty_null: bool


class Content(Struct, frozen=True):
    """What a file was found to have, when it was checked."""

    bytes: int
    sha256: str
    rows: int
    types: dict[str, str]
    """Of every column."""


class Item(Struct, frozen=True):
    """A delta, and the line that it was made of."""

    body: bytes
    line: int


class WrongLinesError(OncelogError):
    """Some lines cannot be imported. Nothing was written."""

    def __init__(self, faults: Sequence[str], message: str) -> None:
        super().__init__(message)
        self.faults = faults


class CsvFile:
    """An open file, which is read several times. It must not change meanwhile."""

    def __init__(self, path: str, file: BinaryIO, shape: Shape) -> None:
        self.path = path
        self._file = file
        self._shape = shape
        self._found = self._state()

    @property
    def size(self) -> int:
        """In bytes."""
        return self._found[0]

    def demand_same(self) -> None:
        """Raises OncelogError if somebody has written to it since it was opened."""
        if self._state() != self._found:
            raise OncelogError(f"{self.path} was changed while it was read")

    def _state(self) -> tuple[int, int]:
        found = os.fstat(self._file.fileno())
        if not S_ISREG(found.st_mode):
            raise OncelogError(f"{self.path} must be a file, which can be read twice")
        return found.st_size, found.st_mtime_ns

    # --- read whole, before anything is sent

    def hash(self, tell: Callable[[int], None]) -> str:
        """Of all its bytes."""
        self._file.seek(0)
        digest, done = sha256(), 0
        while chunk := self._file.read(1024 * 1024):
            digest.update(chunk)
            done += len(chunk)
            tell(done)
        return digest.hexdigest()

    def check(self, tell: Callable[[int], None]) -> Content:
        """Looks at every line. Raises WrongLinesError for the first few that are wrong, OncelogError for the file."""
        digest = sha256()
        lines = _Lines(self._file, digest.update)
        records = self._records(lines)
        head = _Head(next(records, (1, []))[1], self._shape)
        checks = [head.check_of(place) for place in range(len(head.names))]
        rows, faults = 0, []
        for line, cells in records:
            rows += 1
            try:
                head.demand_fields(cells)
                head.demand_row_id(cells)
                for check, cell in zip(checks, cells, strict=True):
                    check(cell)
            except ValueError as error:
                faults.append(f"line {line}: {error}")
                if len(faults) == FAULTS_TOLD_MAX:
                    raise WrongLinesError(faults, "and perhaps more lines are wrong") from None
            if not rows % 1000:
                tell(lines.bytes)
        if faults:
            raise WrongLinesError(faults, f"{len(faults)} of {rows} lines with rows are wrong")
        self.demand_same()
        return Content(self.size, digest.hexdigest(), rows, head.types())

    # --- read in order to be sent

    def deltas(self, types: Mapping[str, str], client_id: str, table: str, start: int) -> Iterator[Item]:
        """One for each row, with a clock that rises by one with each: the same of the same file, whenever it is made.

        Raises OncelogError.
        """
        records = self._records(_Lines(self._file))
        head = _Head(next(records, (1, []))[1], self._shape)
        columns = head.columns(types)
        for number, (line, cells) in enumerate(records):
            try:
                head.demand_fields(cells)
                values = [b"%b%b}" % (prefix, kind(cells[place])) for prefix, kind, place in columns]
                given = DeltaJson(
                    client_id,
                    Raw(b"[%b]" % b",".join(values)),
                    "",
                    hlc_text(start + number),
                    Op.INSERT,
                    cells[head.row_id],
                    table,
                )
                delta = row_delta(given, given.identity(), "$")
            except (ValueError, CanonicalError) as error:
                raise OncelogError(f"line {line}: {error}") from error
            yield Item(delta_body(delta), line)

    def _records(self, lines: "_Lines") -> Iterator[tuple[int, list[str]]]:
        """The fields of each record, and the line on which it begins. Empty lines are none."""
        self._file.seek(0)
        csv.field_size_limit(ROW_BYTES_MAX)
        reader = csv.reader(lines, delimiter=self._shape.delimiter, strict=True)
        while True:
            line = lines.number + 1
            try:
                cells = next(reader, None)
            except csv.Error as error:
                raise OncelogError(f"line {line}: {_explained(str(error))}") from error
            if cells is None:
                return
            if cells:
                yield line, cells


def open_csv(path: str) -> BinaryIO:
    """Raises OncelogError."""
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise OncelogError(f"{path} cannot be read: {error.strerror}") from error


def _explained(words: str) -> str:
    if words.startswith("new-line character"):
        return "a carriage return stands alone: lines must end with a line feed"
    if words.startswith("unexpected end of data"):
        return 'a field begins with " and does not end'
    if words.startswith("field larger"):
        return f'a field is longer than {ROW_BYTES_MAX} characters; perhaps a " is missing'
    return words


class _Lines:
    """The lines of a file in UTF-8, counted. One that is too long does not fill the memory."""

    def __init__(self, file: BinaryIO, see: Callable[[bytes], None] | None = None) -> None:
        self._file = file
        self._see = see
        self.number = 0
        self.bytes = 0

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._file.readline(LINE_BYTES_MAX + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.bytes += len(line)
        if len(line) > LINE_BYTES_MAX:
            raise OncelogError(f"line {self.number}: is longer than {LINE_BYTES_MAX} bytes")
        if self._see is not None:
            self._see(line)
        if self.number == 1:
            line = line.removeprefix(BYTE_ORDER_MARK)
        try:
            return line.decode()
        except UnicodeDecodeError as error:
            raise OncelogError(f"line {self.number}: is not UTF-8, at byte {error.start + 1}") from None


class _Head:
    """The first line: which columns there are, and what they are called in the table. Raises OncelogError."""

    def __init__(self, cells: Sequence[str], shape: Shape) -> None:
        self._shape = shape
        self._guesses: dict[int, Guess] = {}
        if not cells:
            raise OncelogError("line 1: must have the names of the columns")
        if shape.row_id not in cells:
            raise OncelogError(f"--row-id: no column is called {shape.row_id!r}; there are {_listed(cells)}")
        for name in shape.renames:
            if name not in cells:
                raise OncelogError(f"--rename: no column is called {name!r}; there are {_listed(cells)}")
        self.row_id = cells.index(shape.row_id)
        self.names = [shape.renames.get(cell, cell) for cell in cells]
        self._demand_names(cells)
        for name in shape.types:
            if name not in self.names or name == self.names[self.row_id]:
                raise OncelogError(f"--types: no column is called {name!r}; there are {_listed(self._values())}")

    def _demand_names(self, cells: Sequence[str]) -> None:
        seen: set[str] = set()
        for place, name in enumerate(self.names):
            if place != self.row_id and not is_identifier(name):
                raise OncelogError(
                    f"line 1: a column cannot be called {name!r}: a name has letters, digits and _, begins with none "
                    f"of the digits, and has at most {IDENTIFIER_CHARACTERS_MAX} characters; give it another one "
                    f'with --rename "{cells[place]}=NAME"'
                )
            if name in seen:
                raise OncelogError(f"line 1: two columns are called {name!r}")
            seen.add(name)
        if len(self.names) - 1 > ROW_COLUMNS_MAX:
            raise OncelogError(f"line 1: a row has at most {ROW_COLUMNS_MAX} columns, not {len(self.names) - 1}")

    def _values(self) -> list[str]:
        return [name for place, name in enumerate(self.names) if place != self.row_id]

    def demand_fields(self, cells: Sequence[str]) -> None:
        """Raises ValueError."""
        if len(cells) != len(self.names):
            raise ValueError(f"has {len(cells)} fields, and line 1 has {len(self.names)}")

    def demand_row_id(self, cells: Sequence[str]) -> None:
        """Raises ValueError."""
        text = cells[self.row_id]
        if not text:
            raise ValueError(f"{self._shape.row_id}: the row has no id")
        if len(text) > ROW_ID_CHARACTERS_MAX or "\0" in text:
            raise ValueError(
                f"{self._shape.row_id}: an id has at most {ROW_ID_CHARACTERS_MAX} characters, and no U+0000"
            )

    def check_of(self, place: int) -> Callable[[str], object]:
        """What looks at the cells of a column, and raises ValueError."""
        if place == self.row_id:
            return len
        name = self.names[place]
        if self._shape.infers and name not in self._shape.types:
            guess = self._guesses[place] = Guess()
            return guess.see
        return _named(name, kind_of(self._type_of(name)))

    def _type_of(self, name: str) -> str:
        chosen = self._shape.types.get(name, TEXT)
        return chosen + OR_NULL if self._shape.empty_null and not chosen.endswith(OR_NULL) else chosen

    def types(self) -> dict[str, str]:
        """Of each column, those that were found too."""
        found = {self.names[place]: guess.name() for place, guess in self._guesses.items()}
        if self._shape.empty_null:
            found = {name: f"{one.removesuffix(OR_NULL)}{OR_NULL}" for name, one in found.items()}
        return {name: found[name] if name in found else self._type_of(name) for name in self._values()}

    def columns(self, types: Mapping[str, str]) -> list[tuple[bytes, Kind, int]]:
        """How a delta's columns are made, in the order that they have there: as `extract` does it."""
        return [
            (b'{"column":"%b","value":' % name.encode(), _named(name, kind_of(types[name])), self.names.index(name))
            for name in sorted(self._values())
        ]


def _named(name: str, kind: Kind) -> Kind:
    def named(text: str) -> bytes:
        try:
            return kind(text)
        except ValueError as error:
            shown = text if len(text) <= 40 else text[:39] + "…"
            raise ValueError(f"{name}: {shown!r} {error}") from None

    return named


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:20])
    return f"{shown}, …" if len(names) > 20 else shown or "none"

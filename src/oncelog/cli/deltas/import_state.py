"""State of an import, in a file next to the CSV file, so that a repeated command produces the same deltas.

The id of a delta depends on its clock, and the clock of an import is the time of its start. If a crash lost it, the
next run would create other ids and write all rows again. So the state is on the disk before the first request, and is
removed when all rows are answered.
"""

from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from oncelog.cli.deltas.csv_file import CsvContent, CsvFile, CsvFormat
from oncelog.cli.files import write_new_file
from oncelog.errors import OncelogError

SUFFIX: Final = ".oncelog-import"
FILE_BYTES_MAX: Final = 1024 * 1024


class Target(Struct, frozen=True):
    """Where the rows go, and their client."""

    url: str
    gateway: str
    table: str
    client_id: str


class ImportState(Struct, frozen=True):
    """An import that was started."""

    target: Target
    shape: CsvFormat
    content: CsvContent
    hlc: int
    """Clock of the first row."""
    version: Literal[1] = 1


_STATE_DECODER: Final = msgspec.json.Decoder(ImportState)


def load(path: Path) -> ImportState | None:
    """Return the state of an interrupted import; None without one. Raises OncelogError."""
    try:
        with path.open("rb") as file:
            text = file.read(FILE_BYTES_MAX)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OncelogError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return _STATE_DECODER.decode(text)
    except msgspec.MsgspecError:
        message = f"{path} is not the state of an import of this version; move it away if you do not need it"
        raise OncelogError(message) from None


def save(path: Path, state: ImportState) -> bool:
    """Save a new state. Return False if another import has just saved one. Raises OncelogError."""
    try:
        return write_new_file(path, [msgspec.json.encode(state)])
    except OncelogError as error:
        raise OncelogError(f"{error}; with --at TIME it is not needed") from error


def check_same(path: Path, state: ImportState, target: Target, shape: CsvFormat, csv: CsvFile) -> None:
    """Raise OncelogError if a stored import differs from this one: the ids would not fit the rows."""
    differing = [name for name in target.__struct_fields__ if getattr(target, name) != getattr(state.target, name)]
    differing += [name for name in shape.__struct_fields__ if getattr(shape, name) != getattr(state.shape, name)]
    if (csv.size, csv.compute_hash()) != (state.content.bytes, state.content.sha256):
        differing.append("content of the CSV file")
    if differing:
        names = ", ".join(name.replace("_", " ") for name in differing)
        raise OncelogError(
            f"{path} is the state of an interrupted import, from which this one differs in: {names}. Finish that "
            "import, or remove the file to start a new one, which writes all rows again"
        )

"""What an import leaves beside its file while it runs, so that the same command makes the same deltas again.

A delta's id is made of its clock too. The clock of an import is that of its start; if it were lost in a crash, a second
run would make other ids, and write a second set. So it is on the disk before anything is sent, and goes when all is
answered.
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
    """Where the rows go, and whose they are."""

    url: str
    gateway: str
    table: str
    client_id: str


class ImportState(Struct, frozen=True):
    """An import that has begun."""

    target: Target
    shape: CsvFormat
    content: CsvContent
    hlc: int
    """Of its first row."""
    version: Literal[1] = 1


_STATE_DECODER: Final = msgspec.json.Decoder(ImportState)


def load(path: Path) -> ImportState | None:
    """What was begun; None if nothing was. Raises OncelogError."""
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
        message = f"{path} is not what an import of this version leaves; move it away if it is of no use"
        raise OncelogError(message) from None


def save(path: Path, state: ImportState) -> bool:
    """False if somebody else has just begun. Raises OncelogError."""
    try:
        return write_new_file(path, [msgspec.json.encode(state)])
    except OncelogError as error:
        raise OncelogError(f"{error}; --at TIME does without it") from error


def check_same(path: Path, state: ImportState, target: Target, shape: CsvFormat, csv: CsvFile) -> None:
    """Raises OncelogError if another import was begun than this one: its ids would be no good for these rows."""
    differing = [name for name in target.__struct_fields__ if getattr(target, name) != getattr(state.target, name)]
    differing += [name for name in shape.__struct_fields__ if getattr(shape, name) != getattr(state.shape, name)]
    if (csv.size, csv.compute_hash()) != (state.content.bytes, state.content.sha256):
        differing.append("what the CSV file has in it")
    if differing:
        names = ", ".join(name.replace("_", " ") for name in differing)
        raise OncelogError(
            f"{path} is of an import that was begun and not ended, and this one differs from it in: {names}. Run that "
            "one to its end, or remove the file to begin a new import, which writes all rows anew"
        )

"""The mark of a log that has been moved into a database: two that both took writes would be two histories of one epoch.

It is read with the state of the log, inside of every write transaction. So whoever has the file open finds it there
with the next commit, and nothing is written after it. Who only reads the file does not care.
"""

from typing import Any, Final

import msgspec
from msgspec import Struct

from oncelog.errors import CorruptError, MovedError
from oncelog.storage.sqlite.statements import SQL


class MovedMarker(Struct, frozen=True):
    """Where to, when, and by which move."""

    target: str
    """Its address, without a password."""
    moved_ms: int
    move: str
    """The name of the move, which the database knows too, until it is open for writes."""


_MARKER_DECODER: Final = msgspec.json.Decoder(MovedMarker)


def load_marker(connection: Any) -> MovedMarker | None:
    """The mark, if the log has one."""
    (text,) = connection.execute(SQL["moved"]).fetchone()
    return None if text is None else decode_marker(text)


MOVED_SCHEMA_VERSION: Final = 3
"""First schema version that can say that a log was moved."""


def check_not_moved(connection: Any) -> None:
    """Raises MovedError if the log is to be written to elsewhere."""
    marker = load_marker(connection)
    if marker is not None:
        raise build_moved_error(connection, marker)


def build_moved_error(connection: Any, marker: MovedMarker) -> MovedError:
    """What the mark says to somebody who wants to write."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    return MovedError(
        f"{path} has been moved to {marker.target}: open the log there. This file can only be read.", marker.target
    )


def save_marker(connection: Any, marker: MovedMarker | None) -> None:
    """Marks the log, inside a transaction; None takes the mark away."""
    connection.execute(SQL["set_moved"], (None if marker is None else msgspec.json.encode(marker).decode(),))


def decode_marker(text: str) -> MovedMarker:
    """Decode a marker. Raises CorruptError."""
    try:
        return _MARKER_DECODER.decode(text)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the log says that it has been moved, but not where to: {error}") from error

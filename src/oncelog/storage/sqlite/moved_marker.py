"""Marker of a log that has moved into a database. Without it, the file and the database could both accept writes for
one epoch.

Every write transaction reads the marker with the state of the log, so processes that still have the file open notice
the move at their next commit and write nothing after it. Readers of the file ignore the marker.
"""

from typing import Any, Final

import msgspec
from msgspec import Struct

from oncelog.errors import CorruptError, MovedError
from oncelog.storage.sqlite.statements import SQL


class MovedMarker(Struct, frozen=True):
    """Target, time and id of a move."""

    target: str
    """Address of the target, without a password."""
    moved_ms: int
    move: str
    """Id of the move. The target database stores it too, until it accepts writes."""


_MARKER_DECODER: Final = msgspec.json.Decoder(MovedMarker)


def load_marker(connection: Any) -> MovedMarker | None:
    """Return the marker, or None for a log that has not moved."""
    (text,) = connection.execute(SQL["moved"]).fetchone()
    return None if text is None else decode_marker(text)


MOVED_SCHEMA_VERSION: Final = 3
"""First schema version with the marker."""


def check_not_moved(connection: Any) -> None:
    """Raise MovedError if the log has moved."""
    marker = load_marker(connection)
    if marker is not None:
        raise build_moved_error(connection, marker)


def build_moved_error(connection: Any, marker: MovedMarker) -> MovedError:
    """Return the error for a caller that wants to write to a moved log."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    return MovedError(
        f"{path} has been moved to {marker.target}: open the log there. This file is read-only.", marker.target
    )


def save_marker(connection: Any, marker: MovedMarker | None) -> None:
    """Save the marker in the caller's transaction, or remove the saved one (None)."""
    connection.execute(SQL["set_moved"], (None if marker is None else msgspec.json.encode(marker).decode(),))


def decode_marker(text: str) -> MovedMarker:
    """Decode a marker. Raises CorruptError."""
    try:
        return _MARKER_DECODER.decode(text)
    except msgspec.MsgspecError as error:
        raise CorruptError(
            f"the log has been moved, but the marker with its new address is damaged: {error}"
        ) from error

"""The mark of a log that has been moved into a database: two that both took writes would be two histories of one epoch.

It is read with the state of the log, inside of every write transaction. So whoever has the file open finds it there
with the next commit, and nothing is written after it. Who only reads the file does not care.
"""

from typing import Any, Final

import msgspec
from msgspec import Struct

from oncelog.errors import CorruptError, MovedError
from oncelog.stores.sqlite.statements import SQL


class Moved(Struct, frozen=True):
    """Where to, when, and by which move."""

    target: str
    """Its address, without a password."""
    moved_ms: int
    move: str
    """The name of the move, which the database knows too, until it is open for writes."""


_MOVED: Final = msgspec.json.Decoder(Moved)


def moved(connection: Any) -> Moved | None:
    """The mark, if the log has one."""
    (text,) = connection.execute(SQL["moved"]).fetchone()
    return None if text is None else _decoded(text)


MOVED_SCHEMA: Final = 3
"""First schema version that can say that a log was moved."""


def demand_not_moved(connection: Any) -> None:
    """Raises MovedError if the log is to be written to elsewhere."""
    (text,) = connection.execute(SQL["moved"]).fetchone()
    if text is not None:
        raise moved_error(connection, text)


def moved_error(connection: Any, text: str) -> MovedError:
    """What the mark says to somebody who wants to write."""
    path = connection.execute("PRAGMA database_list").fetchone()[2]
    target = _decoded(text).target
    return MovedError(f"{path} has been moved to {target}: open the log there. This file can only be read.", target)


def set_moved(connection: Any, mark: Moved | None) -> None:
    """Marks the log, inside a transaction; None takes the mark away."""
    connection.execute(SQL["set_moved"], (None if mark is None else msgspec.json.encode(mark).decode(),))


def _decoded(text: str) -> Moved:
    try:
        return _MOVED.decode(text)
    except msgspec.MsgspecError as error:
        raise CorruptError(f"the log says that it has been moved, but not where to: {error}") from error

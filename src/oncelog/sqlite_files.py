"""SQLite files of logs and of clients: the identity of an open file, and transactions."""

import logging
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

logger: Final = logging.getLogger("oncelog.sqlite")
"""Logger of SQLite files."""


def get_file_id(path: str) -> tuple[int, int] | None:
    """Return the device and inode of the file at a path, or None if no file exists there.

    If the result changes while a file is open, the file was removed or replaced, and writes to it would be lost.
    """
    try:
        found = os.stat(path)  # noqa: PTH116 - runs in every commit, and takes half the time
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def transaction(connection: Any, begin: str = "BEGIN IMMEDIATE") -> Iterator[None]:
    """Run the block in a transaction. An error in the block or in COMMIT rolls the transaction back."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            roll_back(connection)


def roll_back(connection: Any) -> None:
    """Roll back the open transaction.

    A failure is only logged, because the caller raises the error that caused the rollback.
    """
    try:
        connection.execute("ROLLBACK")
    except sqlite3.Error:
        logger.debug("ROLLBACK failed; the connection will be closed", exc_info=True)

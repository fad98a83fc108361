"""A store that permanently rejects some writes, for tests of the reason `unstorable`."""

import sqlite3
from contextlib import closing
from typing import Final

from databases import is_postgres, query
from oncelog.engine.log import open_log

MARK: Final = "unstorable"


async def reject_marked_bodies(place: str) -> None:
    """Make the store reject records whose body contains the mark, as if a value exceeded one of its limits."""
    async with open_log(place):
        pass
    if is_postgres():
        mark = f"convert_to('{MARK}', 'UTF8')"
        query(place, f"ALTER TABLE oncelog_records ADD CONSTRAINT no_mark CHECK (position({mark} IN body) = 0)")
        return
    with closing(sqlite3.connect(place)) as connection:
        connection.execute(
            f"CREATE TRIGGER no_mark BEFORE INSERT ON oncelog_records WHEN instr(NEW.body, CAST('{MARK}' AS BLOB)) > 0 "
            "BEGIN SELECT RAISE(ABORT, 'no mark'); END"
        )


def remove_rejection(path: str) -> None:
    """Restore the schema of a log file, so that it can be verified."""
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("DROP TRIGGER no_mark")

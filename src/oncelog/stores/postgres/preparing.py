"""The statements of a writer, made known to the server before the session holds anything.

asyncpg makes a statement known at its first use, and waits for the answer without an end of its request: the server
takes that session for a busy one. A gateway that is frozen just there, inside of a transaction, would not be idle in
it, and so no limit of the server would take its lanes away.
"""

from typing import Any, Final

from oncelog.stores.absence import SWEPT
from oncelog.stores.postgres import tables
from oncelog.stores.postgres.connecting import abandoning
from oncelog.stores.postgres.statements import SQL
from oncelog.stores.postgres.sweeping import slices_of

_NAMED: Final = (
    *("state", "keys", "sequences", "save", "save_lanes", "save_clock", "roots", "policies"),
    *("bodies", "erase", "touch_lane", "own_transaction", "declare_policy"),
)
STATEMENTS: Final = (
    *(SQL[name] for name in _NAMED),
    *tables.STATEMENTS,
    *(statement for table in SWEPT for statement in slices_of(table)),
)
"""All that are used while lanes, or the lock of declarations, are held. A session keeps them as long as it lives."""


async def prepare(connection: Any, limit_ms: int) -> None:
    """On a session that is in no transaction. Each may take so long: of a server far away all of them take a while."""
    for statement in STATEMENTS:
        with abandoning(connection, limit_ms):
            # What `prepare` of asyncpg makes known is its caller's alone, and is not found by `execute` and `fetch`.
            await connection._get_statement(statement, None)  # noqa: SLF001

"""Prepares the statements of a writer before its session holds locks.

asyncpg makes a statement known at its first use, and waits for the answer without an end of its request: the server
takes that session for a busy one. A gateway that is frozen just there, inside of a transaction, would not be idle in
it, and so no limit of the server would take its lanes away.
"""

from typing import Any, Final

from oncelog.storage.postgres import side_state_tables
from oncelog.storage.postgres.connection import terminate_after
from oncelog.storage.postgres.statements import SQL

_STATEMENT_NAMES: Final = (
    *("state", "keys", "sequences", "save", "save_lanes", "save_clock", "roots", "policies"),
    *("bodies", "erase", "touch_lane", "own_transaction", "declare_policy"),
)
STATEMENTS: Final = (
    *(SQL[name] for name in _STATEMENT_NAMES),
    *side_state_tables.STATEMENTS,
)
"""All that are used while lanes, or the lock of declarations, are held. A session keeps them as long as it lives."""


async def prepare_statements(connection: Any, limit_ms: int) -> None:
    """On a session that is in no transaction. Each may take so long: of a server far away all of them take a while."""
    for statement in STATEMENTS:
        with terminate_after(connection, limit_ms):
            # What `prepare` of asyncpg makes known is its caller's alone, and is not found by `execute` and `fetch`.
            await connection._get_statement(statement, None)  # noqa: SLF001

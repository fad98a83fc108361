"""Tracing needs rights on its table. A log that lacks them is not opened, and the message says what to run."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import pytest

import oncelog
from oncelog.errors import SettingsError
from traces import Traces

ROLE = "tracing_writer"
RIGHTS = "SELECT, INSERT, UPDATE, DELETE"


@asynccontextmanager
async def limited_role(database: str) -> AsyncIterator[tuple[asyncpg.Connection, str]]:
    """Create a log, and yield the owner's connection and the address for a role that may only use the log's tables."""
    async with oncelog.open(database):
        pass
    connection = await asyncpg.connect(database)
    try:
        schema = await connection.fetchval("SELECT current_schema()")
        await connection.execute(f"CREATE ROLE {ROLE} LOGIN")
        await connection.execute(f"GRANT USAGE ON SCHEMA {schema} TO {ROLE}")
        await connection.execute(f"GRANT {RIGHTS} ON ALL TABLES IN SCHEMA {schema} TO {ROLE}")
        yield connection, database.replace("postgres@", f"{ROLE}@", 1)
    finally:
        await connection.execute(f"DROP OWNED BY {ROLE}")
        await connection.execute(f"DROP ROLE {ROLE}")
        await connection.close()


async def fail_to_open(address: str) -> str:
    with pytest.raises(SettingsError) as caught:
        async with oncelog.open(address, tracing=Traces().provider):
            pass
    return str(caught.value)


async def test_statements_of_the_message_let_a_role_without_rights_trace(database: str) -> None:
    async with limited_role(database) as (owner, address):
        message = await fail_to_open(address)
        assert "may not create. The owner of the log's tables must run: CREATE TABLE" in message
        await owner.execute(message.partition("must run: ")[2])
        schema = await owner.fetchval("SELECT current_schema()")
        await owner.execute(f"REVOKE ALL ON {schema}._oncelog_traces FROM {ROLE}")
        await owner.execute(f"GRANT SELECT, DELETE ON {schema}._oncelog_traces TO {ROLE}")
        message = await fail_to_open(address)
        assert f"tracing needs INSERT, UPDATE on {schema}._oncelog_traces, which the user {ROLE} lacks" in message
        await owner.execute(message.partition("must run: ")[2])
        traces = Traces()
        async with oncelog.open(address, tracing=traces.provider) as log:
            with traces.span("request"):
                (await log.append({"type": "counted"}, partitions=["p"])).unwrap()
            [record] = (await log.read(partition="p")).records
        assert record.trace is not None

"""The database: creates the log's tables, migrates them, and refuses what it cannot read."""

import secrets
from typing import Any

import asyncpg

from oncelog.core.values import LaneHead, RequestedSettings, Settings
from oncelog.errors import CorruptError, NewerSchemaError, NotALogError, SettingsError, StoreError
from oncelog.storage.key_hash import SECRET_BYTES
from oncelog.storage.metadata import LogMetadata, check_settings, new_epoch, new_settings
from oncelog.storage.postgres.statements import MIGRATIONS, SCHEMA_VERSION, SQL


async def create_or_open(
    connection: Any, name: str, settings: Settings | RequestedSettings | None, now_ms: int | None
) -> LogMetadata:
    """Makes the log where there is none, brings an older one up to date, and says what it is.

    Raises SettingsError for settings that a log which is there was not made with; None takes what it has.
    """
    await check_database(connection, name)
    if await connection.fetchval(SQL["is_there"]):
        # Without the lock that all who start need: one that is frozen while it holds it would keep the others out.
        metadata = await load_metadata(connection, name)
        if metadata.schema_version == SCHEMA_VERSION:
            if settings is not None:
                check_settings(name, metadata.settings, settings)
            return metadata
    async with connection.transaction():
        await connection.execute(SQL["alone"])  # gateways that are started together come here together
        if not await connection.fetchval(SQL["is_there"]):
            await create_log(connection, new_settings(settings), now_ms)
        metadata = await load_metadata(connection, name)
        if settings is not None:
            check_settings(name, metadata.settings, settings)
        if metadata.schema_version < SCHEMA_VERSION:
            await migrate_schema(connection, metadata.schema_version)
            metadata = await load_metadata(connection, name)
    return metadata


async def load_metadata(connection: Any, name: str) -> LogMetadata:
    """What the log says about itself. Raises NotALogError, NewerSchemaError and CorruptError; changes nothing.

    Raises StoreError for one that is not whole yet: it is being moved here.
    """
    metadata = await load_any_metadata(connection, name)
    if await connection.fetchval(SQL["move"]) is not None:
        raise StoreError(f"a move from a file into {name} has not ended: run `oncelog move` again")
    return metadata


async def load_any_metadata(connection: Any, name: str) -> LogMetadata:
    """The same of any log, whole or not."""
    if not await connection.fetchval(SQL["is_there"]):
        raise NotALogError(f"{name} has no log in it (no table oncelog_log on its search_path).")
    try:
        schema_version = await connection.fetchval(SQL["schema_version"])
    except asyncpg.UndefinedColumnError as error:
        raise NotALogError(f"{name} has a table oncelog_log that is not ours: {error}. Nothing was changed.") from error
    if schema_version is None:
        raise CorruptError(f"{name} says it is a log, but its table oncelog_log has no row")
    if schema_version > SCHEMA_VERSION:
        raise NewerSchemaError(
            f"{name} was made by a newer Oncelog (schema {schema_version}, this one reads up to {SCHEMA_VERSION}). "
            "Nothing was changed."
        )
    row = await connection.fetchrow(SQL["log"])
    schema_version, epoch, lanes, eviction_interval, index_secret, created_ms = row
    try:
        settings = Settings(lanes, eviction_interval)
    except SettingsError as error:
        raise CorruptError(f"{name} says it is a log, but no log has such settings: {error}") from error
    return LogMetadata(schema_version, epoch, settings, index_secret, created_ms)


async def create_log(
    connection: Any, settings: Settings, now_ms: int | None, epoch: str | None = None, secret: bytes | None = None
) -> None:
    """Makes the tables of a log, inside a transaction."""
    if await connection.fetchval("SELECT current_schema()") is None:
        raise SettingsError("the connection's search_path names no schema that exists: create it first")
    for _, script in MIGRATIONS:
        await connection.execute(script)  # whole: its statements go on one way to the server
    if now_ms is None:
        now_ms = await connection.fetchval(SQL["time"])
    await connection.execute(
        SQL["make_log"],
        SCHEMA_VERSION,
        epoch or new_epoch(),
        settings.lanes,
        settings.eviction_interval,
        secret or secrets.token_bytes(SECRET_BYTES),
        now_ms,
    )
    await connection.execute(SQL["make_state"])
    await connection.execute(SQL["make_lanes"], settings.lanes, LaneHead().block_hash)


async def check_database(connection: Any, name: str) -> None:
    """Raises SettingsError for a database in which there can be no log, or none that is written to."""
    encoding, is_standby = await connection.fetchrow(SQL["encoding"])
    if encoding != "UTF8":
        raise SettingsError(f"{name} is encoded in {encoding}; a log needs a database in UTF8")
    if is_standby:
        raise SettingsError(f"{name} is a standby, which cannot be written to; name the primary beside it")


async def migrate_schema(connection: Any, version: int) -> None:
    """All steps in the transaction that the caller has begun: the log is of the new version, or still of the old."""
    for number, script in MIGRATIONS:
        if number > version:
            await connection.execute(script)
            await connection.execute(SQL["set_schema_version"], number)

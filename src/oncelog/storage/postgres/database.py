"""Creates and migrates the tables of a log, and refuses databases that it cannot read."""

import secrets
from typing import Any

import asyncpg

from oncelog.core.values import LaneHead, RequestedSettings, Settings
from oncelog.errors import CorruptError, NotALogError, SettingsError, StoreError
from oncelog.storage.key_hash import SECRET_BYTES
from oncelog.storage.metadata import LogMetadata, check_schema_version, check_settings, new_epoch, new_settings
from oncelog.storage.postgres.statements import MIGRATIONS, SCHEMA_VERSION, SQL


async def create_or_open(
    connection: Any, name: str, settings: Settings | RequestedSettings | None, now_ms: int | None
) -> LogMetadata:
    """Create the log if the database has none, migrate an older schema, and return the log's metadata.

    Raises SettingsError if the log was created with different settings; None accepts the log's settings.
    """
    await check_database(connection, name)
    if await connection.fetchval(SQL["is_there"]):
        # Check without the lock below, because a process that is frozen while it holds the lock would block all others.
        metadata = await load_metadata(connection, name)
        if metadata.schema_version == SCHEMA_VERSION:
            check_settings(name, metadata.settings, settings)
            return metadata
    async with connection.transaction():
        await connection.execute(SQL["alone"])  # several processes may start at the same time
        if not await connection.fetchval(SQL["is_there"]):
            await create_log(connection, new_settings(settings), now_ms)
        metadata = await load_metadata(connection, name)
        check_settings(name, metadata.settings, settings)
        if metadata.schema_version < SCHEMA_VERSION:
            await migrate_schema(connection, metadata.schema_version)
            metadata = await load_metadata(connection, name)
    return metadata


async def load_metadata(connection: Any, name: str) -> LogMetadata:
    """Return a log's metadata without changing anything. Raises NotALogError, NewerSchemaError or CorruptError.

    Raises StoreError for a log that `oncelog move` has not copied completely.
    """
    metadata = await load_any_metadata(connection, name)
    if await connection.fetchval(SQL["move"]) is not None:
        raise StoreError(f"a move from a file into {name} has not finished: run `oncelog move` again")
    return metadata


async def load_any_metadata(connection: Any, name: str) -> LogMetadata:
    """Like `load_metadata`, but also accepts a log that has not been copied completely."""
    if not await connection.fetchval(SQL["is_there"]):
        raise NotALogError(f"{name} contains no log (no table oncelog_log on its search_path).")
    try:
        schema_version = await connection.fetchval(SQL["schema_version"])
    except asyncpg.UndefinedColumnError as error:
        raise NotALogError(
            f"{name} has a table oncelog_log that belongs to another program: {error}. Nothing was changed."
        ) from error
    if schema_version is None:
        raise CorruptError(f"{name} contains a log, but its table oncelog_log has no row")
    check_schema_version(name, schema_version, SCHEMA_VERSION)
    [columns] = await connection.fetch(SQL["log"])
    return LogMetadata.from_columns(name, columns)


async def create_log(
    connection: Any, settings: Settings, now_ms: int | None, epoch: str | None = None, secret: bytes | None = None
) -> None:
    """Create the tables of a log. The caller has begun a transaction."""
    if await connection.fetchval("SELECT current_schema()") is None:
        raise SettingsError("no schema in the connection's search_path exists: create one first")
    for _, script in MIGRATIONS:
        await connection.execute(script)  # all statements of the script in one round trip
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
    """Raise SettingsError if the database cannot contain a log, or is a standby."""
    [(encoding, is_standby)] = await connection.fetch(SQL["encoding"])
    if encoding != "UTF8":
        raise SettingsError(f"the encoding of {name} is {encoding}, but a log needs UTF8")
    if is_standby:
        raise SettingsError(f"{name} is a standby, which accepts no writes; add the primary to the address")


async def migrate_schema(connection: Any, version: int) -> None:
    """Migrate the schema from a version to the newest one.

    The caller has begun a transaction, so either all migrations take effect or none.
    """
    for number, script in MIGRATIONS:
        if number > version:
            await connection.execute(script)
            await connection.execute(SQL["set_schema_version"], number)

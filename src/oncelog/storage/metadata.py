"""Metadata of a log: schema version, epoch, settings."""

import secrets
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from oncelog.core.values import RequestedSettings, Settings
from oncelog.errors import CorruptError, NewerSchemaError, SettingsError

EPOCH_BYTES: Final = 8


class LogMetadata(Struct, frozen=True):
    """What a log was made with. Only epoch and version ever change."""

    schema_version: int
    epoch: str
    settings: Settings
    index_secret: bytes
    created_ms: int


def new_epoch() -> str:
    """A name that no other history has."""
    return secrets.token_hex(EPOCH_BYTES)


def new_settings(wanted: Settings | RequestedSettings | None) -> Settings:
    """What a new log is made with."""
    return wanted.to_settings() if isinstance(wanted, RequestedSettings) else wanted or Settings()


def check_schema_version(log_name: str, version: int, newest: int) -> None:
    """Raise NewerSchemaError for a log of a newer version of Oncelog."""
    if version > newest:
        raise NewerSchemaError(
            f"{log_name} was made by a newer Oncelog (schema {version}, this one reads up to {newest}). "
            "Nothing was changed."
        )


def decode_metadata(log_name: str, columns: Iterable[Any]) -> LogMetadata:
    """Return metadata from the columns of the statement `log`. Raises CorruptError for settings that no log has."""
    schema_version, epoch, lanes, eviction_interval, index_secret, created_ms = columns
    try:
        settings = Settings(lanes, eviction_interval)
    except SettingsError as error:
        raise CorruptError(f"{log_name} says it is a log, but no log has such settings: {error}") from error
    return LogMetadata(schema_version, epoch, settings, index_secret, created_ms)


def check_settings(log_name: str, stored: Settings, requested: Settings | RequestedSettings | None) -> None:
    """Raise SettingsError for settings that differ from those of the log. None accepts every log."""
    for name in Settings.__struct_fields__:
        stored_value, requested_value = getattr(stored, name), getattr(requested, name, None)
        if requested_value is not None and stored_value != requested_value:
            raise SettingsError(
                f"{log_name} was made with {name}={stored_value}, for ever, and cannot be opened with "
                f"{name}={requested_value}. "
                "Give no settings to open it with those it has."
            )

"""Metadata of a log: schema version, epoch, settings."""

import secrets
from collections.abc import Iterable
from typing import Any, Final

from msgspec import Struct

from oncelog.core.values import RequestedSettings, Settings
from oncelog.errors import CorruptError, NewerSchemaError, SettingsError

EPOCH_BYTES: Final = 8


class LogMetadata(Struct, frozen=True):
    """Properties of a log. Only the epoch and the schema version ever change."""

    schema_version: int
    epoch: str
    settings: Settings
    index_secret: bytes
    created_ms: int

    @classmethod
    def from_columns(cls, log_name: str, columns: Iterable[Any]) -> "LogMetadata":
        """Return metadata from the columns of the statement `log`. Raises CorruptError for invalid settings."""
        schema_version, epoch, lanes, eviction_interval, index_secret, created_ms = columns
        try:
            settings = Settings(lanes, eviction_interval)
        except SettingsError as error:
            raise CorruptError(f"{log_name} is marked as a log, but its settings are invalid: {error}") from error
        return cls(schema_version, epoch, settings, index_secret, created_ms)


def new_epoch() -> str:
    """Return a random name for a new history."""
    return secrets.token_hex(EPOCH_BYTES)


def new_settings(wanted: Settings | RequestedSettings | None) -> Settings:
    """Return the settings of a new log."""
    return wanted.to_settings() if isinstance(wanted, RequestedSettings) else wanted or Settings()


def check_schema_version(log_name: str, version: int, newest: int) -> None:
    """Raise NewerSchemaError for a log of a newer version of Oncelog."""
    if version > newest:
        raise NewerSchemaError(
            f"{log_name} was created by a newer Oncelog (schema {version}; this version reads schemas up to {newest}). "
            "Nothing was changed."
        )


def check_settings(log_name: str, stored: Settings, requested: Settings | RequestedSettings | None) -> None:
    """Raise SettingsError if requested settings differ from the settings of the log. None accepts every log."""
    for name in Settings.__struct_fields__:
        stored_value, requested_value = getattr(stored, name), getattr(requested, name, None)
        if requested_value is not None and stored_value != requested_value:
            raise SettingsError(
                f"{log_name} was created with {name}={stored_value}, which cannot change, and cannot be opened with "
                f"{name}={requested_value}. Leave out the settings to open the log with its stored settings."
            )

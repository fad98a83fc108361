"""Metadata of a log: schema version, epoch, settings."""

import secrets
from typing import Final

from msgspec import Struct

from oncelog.core.values import RequestedSettings, Settings
from oncelog.errors import SettingsError

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


def check_settings(log_name: str, stored: Settings, requested: Settings | RequestedSettings) -> None:
    """Raises SettingsError for settings that a log was not made with."""
    for name in Settings.__struct_fields__:
        stored_value, requested_value = getattr(stored, name), getattr(requested, name)
        if requested_value is not None and stored_value != requested_value:
            raise SettingsError(
                f"{log_name} was made with {name}={stored_value}, for ever, and cannot be opened with "
                f"{name}={requested_value}. "
                "Give no settings to open it with those it has."
            )

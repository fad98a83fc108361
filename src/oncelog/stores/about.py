"""What a log says about itself, in whatever store."""

import secrets
from typing import Final

from msgspec import Struct

from oncelog.core.values import Settings, WantedSettings
from oncelog.errors import SettingsError

EPOCH_BYTES: Final = 8


class About(Struct, frozen=True):
    """What a log was made with. Only epoch and version ever change."""

    schema_version: int
    epoch: str
    settings: Settings
    index_secret: bytes
    created_ms: int


def new_epoch() -> str:
    """A name that no other history has."""
    return secrets.token_hex(EPOCH_BYTES)


def new_settings(wanted: Settings | WantedSettings | None) -> Settings:
    """What a new log is made with."""
    return wanted.complete() if isinstance(wanted, WantedSettings) else wanted or Settings()


def demand_settings(name_of_log: str, made_with: Settings, given: Settings | WantedSettings) -> None:
    """Raises SettingsError for settings that a log was not made with."""
    for name in Settings.__struct_fields__:
        its, other = getattr(made_with, name), getattr(given, name)
        if other is not None and its != other:
            raise SettingsError(
                f"{name_of_log} was made with {name}={its}, for ever, and cannot be opened with {name}={other}. "
                "Give no settings to open it with those it has."
            )

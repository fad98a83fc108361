"""Profiles: named servers, with the credentials for them, in a file of the user."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
from msgspec import Struct

from oncelog.cli.files import get_secret_check, read_token_file
from oncelog.errors import OncelogError, SettingsError
from oncelog.server.auth import secret_files

FILE_VARIABLE: Final = "ONCELOG_PROFILES_FILE"
FILE_NAME: Final = "oncelog/profiles.toml"
FILE_BYTES_MAX: Final = 1024 * 1024
TOKEN_FILE_BYTES_MAX: Final = 64 * 1024


class Profile(Struct, frozen=True, forbid_unknown_fields=True):
    """A server, and how commands authenticate to it."""

    url: str
    token: str | None = None
    token_file: str | None = None
    """Path of a file with the token. A relative path starts at the directory of the profile file."""
    client_id: str | None = None
    """Default of the --client-id option."""

    def __repr__(self) -> str:
        return f"Profile({self.url!r})"


class ProfileFile(Struct, frozen=True):
    """The profiles of a user."""

    path: str
    default: str = ""
    """Name of the profile that commands use by default, or "" for none."""
    profiles: Mapping[str, Profile] = {}

    def get(self, name: str, source: str) -> Profile:
        """Return a profile. `source` is the origin of its name. Raises SettingsError if the file does not have it."""
        found = self.profiles.get(name)
        if found is None:
            known = f"it has {', '.join(self.profiles)}" if self.profiles else "it has no profiles"
            raise SettingsError(
                f"{source}: {self.path} has no profile {name!r}; {known}. Add a table [profiles.{name}] with url"
            )
        return found

    def load_token(self, profile: Profile) -> str | None:
        """Return the token of a profile, or None if it has none. Raises OncelogError."""
        if profile.token_file is None:
            return profile.token
        path = Path(self.path).parent / Path(profile.token_file).expanduser()
        return read_token_file(str(path), TOKEN_FILE_BYTES_MAX)


def find_path() -> str:
    """Return the path of the profile file, which may be missing."""
    chosen = os.environ.get(FILE_VARIABLE)
    if chosen:
        return chosen
    home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")  # noqa: PTH111 - never raises
    return f"{home}/{FILE_NAME}"


def load_profiles() -> ProfileFile:
    """Load the profile file. A missing file has no profiles, unless ONCELOG_PROFILES_FILE names it.

    Raises SettingsError if the file is malformed, if other users may read a token in it, or if they may change it.
    """
    path = find_path()
    if not os.environ.get(FILE_VARIABLE) and not os.path.lexists(path):
        return ProfileFile(path)
    contents = secret_files.read_file(path, FILE_BYTES_MAX)
    contents.check_write_protected("the addresses of servers")
    found = _decode(path, secret_files.parse_toml(contents))
    if any(profile.token is not None for profile in found.profiles.values()):
        contents.check_secret("a token", get_secret_check())
    return found


def _decode(path: str, document: dict[str, Any]) -> ProfileFile:
    unknown = sorted(document.keys() - {"default", "profiles"})
    if unknown:
        raise SettingsError(
            f"{path}: unknown name {unknown[0]!r}: the file has `default` and tables [profiles.NAME] only"
        )
    default, tables = document.get("default", ""), document.get("profiles", {})
    if not isinstance(default, str) or not isinstance(tables, dict):
        raise SettingsError(f"{path}: `default` must be a string, and `profiles` a table")
    found = ProfileFile(path, default, {name: _decode_profile(path, name, table) for name, table in tables.items()})
    if default:
        found.get(default, "default")
    return found


def _decode_profile(path: str, name: str, table: object) -> Profile:
    try:
        profile = msgspec.convert(table, Profile)
    except msgspec.ValidationError as error:
        problem = str(error)
    else:
        if profile.token is None or profile.token_file is None:
            return profile
        problem = "must not have both token and token_file"
    raise OncelogError(f"{path}: profiles.{name}: {problem}")

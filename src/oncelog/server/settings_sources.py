"""Reads settings from a TOML file, the environment and the command line, and decodes their values.

A setting has a name (`limits.queue_items_max`) and a kind, which is the type of its field. A `SettingsError` contains
the source of an invalid setting. It repeats a value only if the value cannot be a secret: an operator may have entered
a secret instead of the path of its file.
"""

import re
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Annotated, Any, Final, Literal, Union, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from oncelog.core.limits import SETTING_NUMBER_MAX
from oncelog.core.tenants import Tenant
from oncelog.errors import SettingsError
from oncelog.server.auth import secret_files
from oncelog.server.auth.signing_keys import KeyFile, KeyKind, PlainText
from oncelog.server.limits import SETTINGS_FILE_BYTES_MAX

VARIABLE_PREFIX: Final = "ONCELOG_"
PORTS: Final = ("port", "grpc_port", "metrics_port")
"""The settings that are port numbers."""
PORT_MAX: Final = 65_535
_NUMBER: Final = re.compile(r"[+-]?[0-9]+(_[0-9]+)*", re.ASCII)
_NUMBER_CHARACTERS_MAX: Final = 40
_FLAGS: Final = {"true": True, "false": False}


class SourcedValue(Struct, frozen=True):
    """The value of a setting and its source."""

    value: object
    source: str
    is_text: bool
    """Whether the source is the environment or the command line, where numbers are strings."""


# --- the three sources ----------------------------------------------------------------------------------


def read_file(path: str, names: Collection[str]) -> dict[str, SourcedValue]:
    """Return the settings in a TOML file, including unknown ones. Raises SettingsError for an unreadable or malformed
    file.
    """
    tables = _list_tables(names)
    found: dict[str, SourcedValue] = {}
    for key, value in secret_files.parse_toml(secret_files.read_file(path, SETTINGS_FILE_BYTES_MAX)).items():
        if key not in tables:
            found[key] = SourcedValue(value, path, is_text=False)
        elif isinstance(value, dict):
            found |= {f"{key}.{name}": SourcedValue(nested, path, is_text=False) for name, nested in value.items()}
        else:
            raise SettingsError(f"{path}: {key} must be a table")
    return found


def _list_tables(names: Iterable[str]) -> set[str]:
    return {name.partition(".")[0] for name in names if "." in name}


def load_environment(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, SourcedValue]:
    """Return the settings in variables that begin with `ONCELOG_`. Raises SettingsError for an unknown one."""
    variables = {to_variable(name): name for name in names}
    found = {}
    for variable in sorted(name for name in environment if name.startswith(VARIABLE_PREFIX)):
        check_known(variable, variables, "environment")
        found[variables[variable]] = SourcedValue(
            environment[variable], f"environment variable {variable}", is_text=True
        )
    return found


def load_command_line(overrides: Mapping[str, str], names: Collection[str]) -> dict[str, SourcedValue]:
    """Return the settings in command-line flags. Raises SettingsError for an unknown name."""
    for name in overrides:
        check_known(name, names, "command line")
    return {name: SourcedValue(text, "command line", is_text=True) for name, text in overrides.items()}


def to_variable(name: str) -> str:
    """Return the environment variable of a setting: `ONCELOG_LIMITS__QUEUE_ITEMS_MAX`."""
    return VARIABLE_PREFIX + name.replace(".", "__").upper()


def check_known(name: str, names: Collection[str], source: str) -> None:
    """Raise SettingsError for an unknown setting, with the most similar name."""
    if name not in names:
        close = get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        raise SettingsError(f"{source}: unknown setting {name!r}{hint}")


def check_known_in_file(name: str, names: Collection[str], path: str) -> None:
    """Raise SettingsError for an unknown setting in a file, with the most similar name of a setting or table."""
    check_known(name, names if "." in name else {*names, *_list_tables(names)}, path)


# --- values ---------------------------------------------------------------------------------------------


class _Form(Struct, frozen=True):
    """How values of one kind are described and decoded."""

    kind: Any
    """The type that msgspec converts a value to."""
    description: str
    """What the value must be, for error messages."""
    parse: Callable[[str], object] = str
    """Converts a string from the environment or the command line."""
    plural: str = ""
    is_table: bool = False
    """Whether a file may contain, instead of a table, a string in the form used on the command line."""

    def decode(self, value: object, is_text: bool) -> object:
        """Convert a value to its type. Raises _WrongValueError if that is impossible."""
        if isinstance(value, str) and (is_text or self.is_table):
            value = self.parse(value)
        with suppress(msgspec.ValidationError):
            return msgspec.convert(value, self.kind)
        raise _WrongValueError(self.description)


class _WrongValueError(Exception):
    """An invalid value. The message states what the value must be."""


def decode_value(name: str, kind: Any, sourced: SourcedValue) -> Any:
    """Convert a setting's value to its type. Raises SettingsError for a value of a different type."""
    try:
        return _decode(kind, sourced.value, sourced.is_text)
    except _WrongValueError as error:
        problem = f"a whole number from 0 to {PORT_MAX}" if name in PORTS else str(error)
    raise SettingsError(f"{sourced.source}: {name} must be {problem}")


def _decode(kind: Any, value: object, is_text: bool) -> object:
    if get_origin(kind) in (Union, types.UnionType):
        # An empty variable resets a setting that the file contains.
        return None if is_text and value == "" else _decode(get_args(kind)[0], value, is_text)
    if get_origin(kind) is tuple:
        return _decode_list(_FORMS[get_args(kind)[0]], value, is_text)
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        return _Form(kind, f"{', '.join(others)} or {last}").decode(value, is_text)
    return _FORMS[kind].decode(value, is_text)


def _decode_list(form: _Form, value: object, is_text: bool) -> tuple[object, ...]:
    if is_text and isinstance(value, str):
        value = [item.strip() for item in value.split(",")] if value.strip() else []
    description = f"a {'comma-separated ' if is_text else ''}list of {form.plural}"
    if type(value) is not list or "" in value:
        raise _WrongValueError(f"{description}, none of them empty")
    try:
        return tuple(form.decode(item, is_text) for item in value)
    except _WrongValueError as error:
        problem = str(error)
    raise _WrongValueError(f"{description}: each must be {problem}")


def _parse_integer(text: str) -> int | None:
    is_number = len(text) <= _NUMBER_CHARACTERS_MAX and _NUMBER.fullmatch(text) is not None
    return int(text) if is_number else None


def _parse_key_file(text: str) -> dict[str, object]:
    """Parse `kind:path` or `kind#key_id:path`."""
    head, _, path = text.partition(":")
    kind, mark, key_id = head.partition("#")
    return {"kind": kind, "path": path, "key_id": key_id if mark else None}


def _parse_tenant(text: str) -> dict[str, object]:
    """Parse a prefix, followed by `name=number` for each of its limits."""
    prefix, *limits = text.split() or [""]
    pairs = [limit.partition("=") for limit in limits]
    numbers = {name: _FLAGS.get(value) if name == "own_ids" else _parse_integer(value) for name, _, value in pairs}
    return {"prefix": prefix, **numbers}


_TENANT_FORM: Final = (
    '"prefix name=number …", where the names are '
    f"{', '.join(name for name in Tenant.__struct_fields__[1:] if name != 'own_ids')}, and own_ids=true or "
    "own_ids=false; or, in a file, a table with prefix and these names"
)
_KEY_FILE_FORM: Final = (
    f'"kind:path" or "kind#key_id:path", where the kind is {", ".join(one.value for one in KeyKind)}; or, in a file, '
    "a table with kind, path and key_id"
)
_FORMS: Final[Mapping[Any, _Form]] = {
    int: _Form(
        Annotated[int, Meta(ge=-SETTING_NUMBER_MAX, le=SETTING_NUMBER_MAX)],
        f"a whole number, at most {SETTING_NUMBER_MAX}",
        _parse_integer,
    ),
    bool: _Form(bool, "true or false", lambda text: _FLAGS.get(text.lower())),
    str: _Form(PlainText, "a non-empty string without U+0000", plural="strings"),
    KeyFile: _Form(KeyFile, _KEY_FILE_FORM, _parse_key_file, plural="key files", is_table=True),
    Tenant: _Form(Tenant, _TENANT_FORM, _parse_tenant, plural="tenants", is_table=True),
}

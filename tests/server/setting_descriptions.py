"""Descriptions of all settings, for tests of their documentation."""

import inspect
from typing import Any, Literal, get_args, get_origin

from msgspec import NODEFAULT, Struct, json
from msgspec.structs import fields

from oncelog.core.tenants import Tenant
from oncelog.server.attribute_docstrings import find_attribute_docstrings
from oncelog.server.auth.signing_keys import KeyFile
from oncelog.server.settings import _FIELDS, _PARTS

KINDS = {int: "whole number", bool: "true or false", str: "text"}
PLURALS: dict[Any, str] = {str: "texts", KeyFile: "key files", Tenant: "tenants"}


class SettingDescription(Struct, frozen=True):
    """A setting as documented."""

    name: str
    kind: str
    default: str
    """The default in TOML, `none`, or `required` if the table is invalid without this setting."""
    text: str
    """The docstring of its field."""


def describe_settings() -> list[SettingDescription]:
    """Describe every setting, table by table, in field order."""
    descriptions = []
    for name, field in _FIELDS.items():
        _, defaults = _PARTS[field.part]
        text = load_docstrings(type(defaults)).get(field.name, "")
        default = describe_default(defaults, field.name)
        descriptions.append(SettingDescription(name, describe_type(field.kind), default, text))
    return descriptions


def describe_type(kind: Any) -> str:
    if get_origin(kind) is tuple:
        return f"list of {PLURALS[get_args(kind)[0]]}"
    if get_origin(kind) is Literal:
        *others, last = get_args(kind)
        return f"{', '.join(others)} or {last}"
    return KINDS[kind] if kind in KINDS else describe_type(get_args(kind)[0])


def describe_default(defaults: Struct, name: str) -> str:
    (field,) = (one for one in fields(defaults) if one.name == name)
    value = getattr(defaults, name)
    if field.default is NODEFAULT:
        return "required"
    return "none" if value is None else json.encode(value).decode()


def load_docstrings(of: type[Struct]) -> dict[str, str]:
    """Return the docstring below each field."""
    return {name: inspect.cleandoc(text) for name, text in find_attribute_docstrings(of).items()}

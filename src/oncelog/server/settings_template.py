"""The settings file that `oncelog init` writes: every setting with its docstring, and with its default as a comment.

The file is generated from the structs in `oncelog.server.settings`, so it lists exactly the settings of this version.
"""

import json
import textwrap
from collections.abc import Iterator, Mapping
from inspect import cleandoc
from typing import Any, Final

import msgspec
from msgspec import Struct

from oncelog.server.attribute_docstrings import find_attribute_docstrings
from oncelog.server.settings import list_tables

LINE_CHARACTERS: Final = 100


def render_settings(introduction: str, values: Mapping[str, object]) -> str:
    """Return a settings file. The named values are set; every other setting is a comment with its default.

    A comment that begins with `#name =`, without a space, is a setting. A setting without a value has no default. Other
    comments begin with `# `.
    """
    lines = list(_comment(introduction))
    for prefix, parts in list_tables().items():
        lines += ["", "", f"[{prefix.rstrip('.')}]"] if prefix else [""]
        for part in parts:
            lines += _comment(cleandoc(type(part).__doc__ or ""))
            lines += _render_part(prefix, part, values)
    return "\n".join(lines) + "\n"


def _render_part(prefix: str, defaults: Struct, values: Mapping[str, object]) -> Iterator[str]:
    docstrings = find_attribute_docstrings(type(defaults))
    for field in msgspec.structs.fields(defaults):
        default = None if field.required else getattr(defaults, field.name)
        note = " Required if this table has any setting." if field.required else ""
        yield ""
        yield from _comment(" ".join(docstrings.get(field.name, "").split()) + note)
        if f"{prefix}{field.name}" in values:
            yield f"{field.name} = {format_value(values[f'{prefix}{field.name}'])}"
        else:
            yield f"#{field.name} = {'' if default is None else format_value(default)}".rstrip()


def format_value(value: Any) -> str:
    """Format a value in TOML."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    # A basic string of TOML is a JSON string that also escapes U+007F.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _comment(text: str) -> Iterator[str]:
    for number, paragraph in enumerate(text.split("\n\n")):
        if number:
            yield "#"
        yield from (f"# {line}".rstrip() for line in textwrap.wrap(paragraph, LINE_CHARACTERS - 2))

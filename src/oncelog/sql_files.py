"""Load named statements and scripts from SQL files."""

import re
from importlib.resources.abc import Traversable
from typing import Any, Final

_NAMED_STATEMENT: Final = re.compile(r"^-- name: (\w+)\n(.*?);\s*$", re.MULTILINE | re.DOTALL)
_FRAGMENT: Final = re.compile(r"^-- fragment: (\w+)\n(.*?);\s*$", re.MULTILINE | re.DOTALL)
_COMMENT: Final = re.compile(r"^--.*\n", re.MULTILINE)


def parse_statements(text: str) -> dict[str, str]:
    """Return the statements of a file by name. A line `-- name: NAME` precedes each statement.

    Statements can share a fragment: a line `-- fragment: NAME` precedes it, and `{NAME}` includes it.
    """
    for name, fragment in _FRAGMENT.findall(text):
        text = text.replace(f"{{{name}}}", _COMMENT.sub("", fragment))
    return {name: _COMMENT.sub("", statement).strip() for name, statement in _NAMED_STATEMENT.findall(text)}


def run_script(connection: Any, script: str) -> None:
    """Execute the statements of a script one by one. Semicolons inside statements are not supported."""
    for statement in filter(None, map(str.strip, _COMMENT.sub("", script).split(";"))):
        connection.execute(statement)


def list_scripts(directory: Traversable) -> list[tuple[int, str]]:
    """Return the scripts in a directory, each with its number: the first four characters of the file name."""
    scripts = [entry for entry in directory.iterdir() if entry.name.endswith(".sql")]
    return sorted((int(entry.name[:4]), entry.read_text(encoding="utf-8")) for entry in scripts)

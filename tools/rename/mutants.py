"""Renames in tests/mutants/mutants.toml, where each fault names a function and quotes one line of it."""

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

from tools.rename.project import Project, module_of
from tools.rename.scopes import Source
from tools.rename.text import Edit

MUTANTS: Final = "tests/mutants/mutants.toml"
_WORD: Final = re.compile(r"[A-Za-z_]\w*")


class Edited(Protocol):
    """A file with its edits."""

    source: Source
    final: list[Edit]


def new_mutants(project: Project, edited: "dict[str, Any]") -> tuple[str, list[str]]:
    """Return the new text of the list, and notes about mutants that need manual changes."""
    text = Path(MUTANTS).read_text()
    notes: list[str] = []
    blocks = text.split("[[mutant]]")
    tables = tomllib.loads(text)["mutant"]
    for number, table in enumerate(tables, 1):
        file = edited.get(table["file"])
        if file is None:
            notes.append(f"{MUTANTS}: mutant {number}: no file {table['file']}")
            continue
        new = dict(table)
        new["file"] = project.moves.files[table["file"]]
        new["function"] = _function(project, table["file"], table["function"])
        line = _line(file, table["function"], table["before"])
        if line is None:
            notes.append(f"{MUTANTS}: mutant {number}: {table['function']} has no line {table['before']!r}")
            continue
        new["before"], words = line
        new["after"] = _WORD.sub(lambda match, words=words: words.get(match[0], match[0]), table["after"])  # type: ignore[misc]
        for field, value in table.items():
            if new[field] != value:
                blocks[number] = blocks[number].replace(str(value), new[field], 1)
                if tomllib.loads("[[mutant]]" + blocks[number])["mutant"][0][field] != new[field]:
                    notes.append(f"{MUTANTS}: mutant {number}: {field} could not be replaced")
    return "[[mutant]]".join(blocks), notes


def broken() -> Iterator[str]:
    """Yield mutants whose line is missing from their function, for example because it was wrapped."""
    for number, table in enumerate(tomllib.loads(Path(MUTANTS).read_text())["mutant"], 1):
        path = table["file"]
        source = Source(path, module_of(path), Path(path).read_text())
        node: Any = source.nodes.get(table["function"])
        span = None if node is None else (source.offset(node.lineno, 0), source.span(node)[1])
        if span is None or next(_places(source.text, table["before"], *span), None) is None:
            yield f"{number}: {path}: {table['function']}: {table['before']}"


def _function(project: Project, path: str, qualname: str) -> str:
    key, new = f"{module_of(path)}:", []
    for name in qualname.split("."):
        key += name if key.endswith(":") else f".{name}"
        new.append(project.names.new_name(key, name))
    return ".".join(new)


def _line(file: Edited, function: str, before: str) -> tuple[str, dict[str, str]] | None:
    """Return the line of a function after the edits, and its changed words."""
    node: Any = file.source.nodes.get(function)
    if node is None:
        return None
    text = file.source.text
    start = file.source.offset(node.lineno, 0)
    end = file.source.offset(node.end_lineno, node.end_col_offset)
    for at in _places(text, before, start, end):
        words, out, last = {}, [], at
        for edit in sorted(file.final):
            if at <= edit.start and edit.end <= at + len(before):
                words[text[edit.start : edit.end]] = edit.new
                out += [text[last : edit.start], edit.new]
                last = edit.end
        return "".join([*out, text[last : at + len(before)]]), words
    return None


def _places(text: str, before: str, start: int, end: int) -> Iterator[int]:
    at = text.find(before, start, end)
    while at >= 0:
        first = text.rfind("\n", 0, at) + 1
        rest = text[at + len(before) : text.find("\n", at)].strip()
        if not text[first:at].strip() and (not rest or rest.startswith("#")):
            yield at
        at = text.find(before, at + 1, end)

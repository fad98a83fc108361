"""Apply a map to the working tree."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from tools.rename.edits import Context, FileEdits
from tools.rename.facts import Facts
from tools.rename.mutants import MUTANTS, new_mutants
from tools.rename.project import OWN, TOP, Project
from tools.rename.text import TextMap

TEXT: Final = (".md", ".toml", ".yml", ".yaml", ".cfg", ".sh", "Makefile", ".gitattributes", ".gitignore")
UNTOUCHED: Final = ("docs/decisions/", "CHANGELOG.md", "requirements/", MUTANTS)
NO_LOGGERS: Final = ("pyproject.toml", "Makefile")
_MEMBER: Final = re.compile(r"(?<=\.)[A-Za-z_]\w*")
RUFF: Final = (
    ("check", "--quiet", "--fix", "--select", "I,RUF022,RUF023", "."),
    ("format", "--quiet", "."),
)


@dataclass(slots=True)
class Result:
    """The new content of changed files, by old path, and the notes for a manual review."""

    context: Context
    texts: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)


def loggers_of(project: Project) -> frozenset[str]:
    """Return the logger names, which do not change even if a module has the same name."""
    found = set()
    for source in project.sources.values():
        for call, _ in source.calls:
            name = getattr(call.func, "attr", getattr(call.func, "id", ""))
            if name == "getLogger" and call.args:
                value = getattr(call.args[0], "value", None)
                if isinstance(value, str):
                    found.add(value)
    return frozenset(found)


def compute(project: Project, facts: Facts) -> Result:
    """Compute all new texts without changing files."""
    text = TextMap(project, loggers_of(project))
    result = Result(Context(project, facts, text))
    edited: dict[str, FileEdits] = {}
    for source in project.sources.values():
        edits = edited[source.path] = FileEdits(result.context, source)
        new = edits.run()
        if new != source.text:
            result.texts[source.path] = new
    for path in project.moves.files:
        if path.endswith(TEXT) and not path.startswith((*UNTOUCHED, *OWN)):
            _document(result, text, path)
    if Path(MUTANTS).exists():
        new, notes = new_mutants(project, edited)
        result.notes += notes
        if new != Path(MUTANTS).read_text():
            result.texts[MUTANTS] = new
    return result


def _document(result: Result, text: TextMap, path: str) -> None:
    old = Path(path).read_text()
    plain = path.endswith(NO_LOGGERS)
    new = text.apply(old, keep_loggers=not plain)
    if new != old:
        result.texts[path] = new
    if path.endswith(".md"):
        result.documents += _programs(result.context, path, old)
    if not plain:
        result.context.kept += [f"{path}:{old.count(chr(10), 0, at) + 1}" for at in text.kept(old)]


def _programs(context: Context, path: str, text: str) -> Iterator[str]:
    """Yield lines of a document's Python programs that use a member that no class has after the renames."""
    is_python = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_python = not is_python and "python" in line
        elif is_python:
            found = {word for word in _MEMBER.findall(line) if word in context.vanishing}
            if found:
                yield f"{path}:{number}: {', '.join(sorted(found))}: {line.strip()}"


def write(project: Project, result: Result, *, ruff: bool = True) -> None:
    """Write the new texts, move the files, and sort and format the changed ones."""
    for path, text in result.texts.items():
        Path(path).write_text(text)
    moved = {old: new for old, new in project.moves.files.items() if old != new}
    for old in moved:  # The files move in two steps, because a new path may be the old path of another file.
        Path(old).rename(f"{old}.moving")
    for old, new in moved.items():
        Path(new).parent.mkdir(parents=True, exist_ok=True)
        Path(f"{old}.moving").rename(new)
    for package, docstring in project.names.packages.items():
        init = Path("src", *package.split("."), "__init__.py")
        init.parent.mkdir(parents=True, exist_ok=True)
        if not init.exists():
            init.write_text(f'"""{docstring}"""\n')
    for directory in sorted({parent for old in moved for parent in PurePosixPath(old).parents}, reverse=True):
        _remove_empty(Path(directory))
    if ruff:
        for arguments in RUFF:
            subprocess.run([".venv/bin/ruff", *arguments], check=False)  # noqa: S603
    subprocess.run(["git", "add", "--all", *(one for one in TOP if Path(one).exists())], check=True)  # noqa: S603, S607


def _remove_empty(directory: Path) -> None:
    if not directory.is_dir() or any(one.name != "__pycache__" for one in directory.iterdir()):
        return
    cache = directory / "__pycache__"
    if cache.is_dir():
        for one in cache.iterdir():
            one.unlink()
        cache.rmdir()
    directory.rmdir()

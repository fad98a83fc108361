"""The name map: the content of the TOML files, as lookups by old name."""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

SECTIONS: Final = ("modules", "names", "tests", "identifiers", "packages", "public", "unresolved")
_KEY: Final = re.compile(r"(?P<module>[\w.]+):(?P<qualname>[\w.]+)(?:\((?P<local>\w+)\))?")


@dataclass(slots=True)
class NameMap:
    """`names` maps "module:Qualified.name" and "module:Qualified.name(parameter)" to the new last part."""

    modules: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    tests: dict[str, str] = field(default_factory=dict)
    identifiers: dict[str, str] = field(default_factory=dict)
    packages: dict[str, str] = field(default_factory=dict)
    unresolved: dict[str, str] = field(default_factory=dict)
    """Decisions about uses that types do not resolve, by file and name, or by file and quoted name."""
    errors: list[str] = field(default_factory=list)

    def new_name(self, key: str, old: str) -> str:
        return self.names.get(key) or self.identifiers.get(old, old)


def load(paths: Iterable[Path]) -> NameMap:
    """Read all files as one map, and collect mistakes in `errors`."""
    found = NameMap()
    for path in paths:
        try:
            tables = tomllib.loads(path.read_text())
        except tomllib.TOMLDecodeError as error:
            found.errors.append(f"{path}: {error}")
            continue
        for section, table in tables.items():
            if section not in SECTIONS:
                found.errors.append(f"{path}: unknown section [{section}]; known: {', '.join(SECTIONS)}")
                continue
            _add(found, path, "names" if section == "public" else section, table)
    return found


def _add(found: NameMap, path: Path, section: str, table: dict[str, object]) -> None:
    known: dict[str, str] = getattr(found, section)
    for raw, new in table.items():
        key = raw.removesuffix("/") if section == "tests" else raw
        if not isinstance(new, str):
            found.errors.append(f"{path}: [{section}] {key!r}: the new name must be a string")
        elif known.setdefault(key, new) != new:
            found.errors.append(f"{path}: [{section}] {key!r}: both {known[key]!r} and {new!r}")
        elif section == "names" and not _KEY.fullmatch(key):
            found.errors.append(
                f"{path}: [names] {key!r}: expected 'module:Name', 'module:Class.attribute' or '…(parameter)'"
            )
        elif section in {"names", "identifiers"} and not new.isidentifier():
            found.errors.append(f"{path}: [{section}] {key!r}: {new!r} is not an identifier (give the last part only)")
        elif section == "modules" and not all(part.isidentifier() for part in new.split(".")):
            found.errors.append(f"{path}: [modules] {key!r}: {new!r} is not a dotted name")


def parts(key: str) -> tuple[str, str, str]:
    """Split a key of `names` into module, qualified name and parameter ("" if it names no parameter)."""
    match = _KEY.fullmatch(key)
    if match is None:
        return key, "", ""
    return match["module"], match["qualname"], match["local"] or ""


def old_last_part(key: str) -> str:
    _, qualname, local = parts(key)
    return local or qualname.rpartition(".")[2]

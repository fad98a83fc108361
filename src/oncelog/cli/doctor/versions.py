"""Checks of versions: Python, the installed packages, and SQLite."""

import re
import sqlite3
import sys
from collections.abc import Collection
from importlib import metadata
from typing import Final

from oncelog.cli.doctor.findings import Check, ok, problem, warning

_PACKAGE: Final = "oncelog"
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)\s*>=\s*([0-9.]+)(?:\s*;.*extra\s*==\s*['\"](\w+)['\"])?")
_SAFE_SQLITE: Final = ((3, 51, 3), (3, 50, 7), (3, 44, 6))
"""Versions in which a commit and a checkpoint of different processes cannot damage a file. The first one and all
later versions are safe; the others are patched releases of older series (docs/decisions/0008)."""


def check_packages(extras: Collection[str]) -> Check:
    """Check the versions of the packages that Oncelog and these extras need, by the metadata of the package."""
    python = ".".join(map(str, sys.version_info[:3]))
    found = 0
    for line in metadata.requires(_PACKAGE) or []:
        requirement = _REQUIREMENT.fullmatch(line)
        if requirement is None or requirement[3] not in (None, *extras):
            continue
        name, lowest, extra = requirement.groups()
        install = f"pip install --upgrade '{_PACKAGE}{f'[{extra}]' if extra else ''}'"
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield problem("versions", f"the package {name} is not installed", f"Install it: {install}")
            continue
        if _parse(version) < _parse(lowest):
            message = f"{name} is {version}, and Oncelog needs {lowest} or newer"
            yield problem("versions", message, f"Update it: {install}")
            continue
        found += 1
    yield ok("versions", f"Oncelog {metadata.version(_PACKAGE)}, Python {python}, {found} packages are new enough")


def check_sqlite() -> Check:
    """Check the version of SQLite, for a log in a file."""
    version = sqlite3.sqlite_version
    if is_safe_sqlite(_parse(version)):
        yield ok("sqlite", f"SQLite {version}")
        return
    yield warning(
        "sqlite",
        f"SQLite {version} has a bug that can damage a file that several processes open for writing",
        f"Let only one program open the log (a continuous backup is a second one), or use Python with SQLite "
        f"{'.'.join(map(str, _SAFE_SQLITE[0]))} or newer. Commands that only read, such as `oncelog backup FILE COPY` "
        f"and `oncelog verify`, are safe: they neither commit nor run checkpoints while another process has the log "
        f"open.",
    )


def is_safe_sqlite(version: tuple[int, ...]) -> bool:
    """Return whether several processes can safely use one file with this version."""
    newest, *patched = _SAFE_SQLITE
    return version >= newest or any(version[:2] == safe[:2] and version >= safe for safe in patched)


def _parse(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version."""
    numbers = re.match(r"[0-9]+(\.[0-9]+)*", version)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()

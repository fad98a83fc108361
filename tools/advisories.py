"""Check the pinned versions against the committed list of security advisories, without a network.

    python -m tools.advisories                  check; exits with status 1 if a pinned version is affected
    python -m tools.advisories --renew DIR      rewrite the list from a checkout of the PyPA advisory database

The list contains the advisories for all packages that requirements/*.txt pin, and the date of the database.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import yaml  # type: ignore[import-untyped]
from packaging.version import Version

from tools.sbom import Pin, read_pins

ROOT: Final = Path(__file__).parent.parent
REQUIREMENTS: Final = ROOT / "requirements"
LIST: Final = REQUIREMENTS / "advisories.json"

Advisory = dict[str, Any]


def all_pins() -> list[Pin]:
    """Return the pins of all requirements files, without duplicates."""
    return sorted({pin for file in REQUIREMENTS.glob("*.txt") for pin in read_pins(file)})


def is_affected(version: str, advisory: Advisory) -> bool:
    """Return whether an advisory affects this version."""
    return version in advisory["versions"] or any(_is_in(Version(version), one) for one in advisory["ranges"])


def _is_in(version: Version, affected: dict[str, str]) -> bool:
    if version < Version(affected["introduced"]):
        return False
    if "fixed" in affected:
        return version < Version(affected["fixed"])
    return "last_affected" not in affected or version <= Version(affected["last_affected"])


def affected_pins(pins: Iterable[Pin], packages: dict[str, list[Advisory]]) -> Iterator[tuple[Pin, Advisory]]:
    """Yield each pin that an advisory affects."""
    for pin in pins:
        for advisory in packages.get(pin.name, ()):
            if is_affected(pin.version, advisory):
                yield pin, advisory


def read_database(directory: Path, names: set[str]) -> dict[str, list[Advisory]]:
    """Read the advisories for these packages from a checkout of the PyPA advisory database."""
    packages: dict[str, list[Advisory]] = {}
    for name in sorted(names):
        files = sorted((directory / "vulns" / name).glob("*.yaml"))
        found = [read_advisory(yaml.safe_load(file.read_text()), name) for file in files]
        kept = [advisory for advisory in found if advisory is not None]
        if kept:
            packages[name] = kept
    return packages


def read_advisory(document: dict[str, Any], name: str) -> Advisory | None:
    """Return the fields of an OSV document that the check uses, or None if the advisory was withdrawn."""
    if document.get("withdrawn"):
        return None
    ranges: list[dict[str, str]] = []
    versions: list[str] = []
    for affected in document["affected"]:
        if affected["package"]["name"].lower().replace("_", "-") != name:
            continue
        found = [one for part in affected.get("ranges", ()) if part["type"] == "ECOSYSTEM" for one in _ranges(part)]
        ranges += found
        if not found:
            versions += affected.get("versions", ())
    aliases = sorted(document.get("aliases", ()))
    return {"id": document["id"], "aliases": aliases, "ranges": ranges, "versions": versions}


def _ranges(part: dict[str, Any]) -> Iterator[dict[str, str]]:
    current: dict[str, str] = {}
    for event in part["events"]:
        if "introduced" in event:
            if current:
                yield current
            current = {"introduced": event["introduced"]}
        else:
            current.update(event)
            yield current
            current = {}
    if current:
        yield current


def _renew(directory: Path) -> None:
    command = ["git", "-C", str(directory), "log", "-1", "--format=%cs"]
    date = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603
    packages = read_database(directory, {pin.name for pin in all_pins()})
    LIST.write_text(json.dumps({"database_date": date, "packages": packages}, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.advisories", description=__doc__.partition("\n")[0])
    parser.add_argument("--renew", type=Path, metavar="DIR", help="a checkout of the PyPA advisory database")
    options = parser.parse_args()
    if options.renew is not None:
        _renew(options.renew)
    listed = json.loads(LIST.read_text())
    pins = all_pins()
    found = list(affected_pins(pins, listed["packages"]))
    for pin, advisory in found:
        names = ", ".join([advisory["id"], *advisory["aliases"]])
        print(f"{pin.name} {pin.version} is affected by {names}")
    count = sum(map(len, listed["packages"].values()))
    print(f"{len(pins)} pinned versions, {count} advisories of {listed['database_date']}, {len(found)} affected")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()

"""Rename modules, classes, functions, attributes and parameters by a map in TOML files.

    python -m tools.rename --validate MAP.toml …     report mistakes in the map; change nothing
    python -m tools.rename MAP.toml …                apply the map to the working tree, which must be clean
    python -m tools.check_renames OLD NEW MAP.toml … compare the syntax trees of two revisions modulo the map

Sections of a map, each from old to new:

    [modules]      dotted module or package; the most specific entry wins; the entry of a package includes its modules
    [packages]     new package without an old one: its docstring
    [names]        "module:Name", "module:Class.attribute", "module:function(parameter or local variable)"; the module
                   and the names are the old ones, the value is the new last part
    [public]       the same as [names]; names that need a deprecated alias, which the tool does not write
    [tests]        path of a file or directory
    [unresolved]   'path:name', 'path:name=' or 'path:"name"': decision about uses in a file that the tool lists as
                   unresolved or as strings; the same name means that it stays. 'path:line:name' decides one of them
    [identifiers]  a name token, everywhere in the code
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from tools.rename import facts, groups, mutants, name_map, project, tree, validate


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.rename", description=__doc__.partition("\n")[0])
    parser.add_argument("maps", type=Path, nargs="+", metavar="MAP.toml")
    parser.add_argument("--validate", action="store_true", help="report mistakes and change nothing")
    parser.add_argument("--propagate", action="store_true", help="add members that override or implement a renamed one")
    parser.add_argument("--dirty", action="store_true", help="apply to a working tree with changes")
    parser.add_argument("--despite-errors", action="store_true", help="apply even if the map has mistakes")
    parser.add_argument("--no-ruff", action="store_true", help="do not sort imports or format afterwards")
    parser.add_argument("--show", type=int, default=200, metavar="N", help="print at most N lines of each kind")
    options = parser.parse_args()
    began = time.monotonic()
    if not options.validate and not options.dirty and _changed():
        sys.exit("the working tree has changes: commit them first, or use --dirty")
    found = project.load(name_map.load(options.maps))
    print(f"{time.monotonic() - began:.0f} s: {len(found.sources)} files parsed", flush=True)
    known = facts.load(found.sources)
    print(f"{time.monotonic() - began:.0f} s: types known", flush=True)
    if options.propagate:
        _print("Added by --propagate", groups.propagate(found, known), options.show)
    result = tree.compute(found, known)
    errors = [*validate.errors(found, known), *sorted(found.conflicts), *result.context.errors]
    unused = set(found.names.unresolved) - result.context.decided
    errors += [f"[unresolved] {key}: there is no such unresolved use" for key in sorted(unused)]
    for source in found.sources.values():
        if source.path in result.texts:
            errors += validate.captures(source, result.texts[source.path])
    context = result.context
    _print("Warnings", validate.warnings(found, known), options.show)
    _print("Kept as logger names (change the names of modules)", context.kept, options.show)
    _print("Depends on the place or name of a module", validate.places(found), options.show)
    _print("Strings that equal an old name, not changed", context.strings, options.show)
    _print("Guessed: private members of objects of unknown type", context.guessed, options.show)
    _print("Unresolved uses of old attributes and parameters, not changed", context.unresolved, options.show)
    _print("Programs in documents with an old name", result.documents, options.show)
    _print("Notes", result.notes, options.show)
    _print("ERRORS", errors, options.show)
    moved = sum(old != new for old, new in found.moves.files.items())
    print(f"{time.monotonic() - began:.0f} s: {len(result.texts)} files change, {moved} move, {len(errors)} errors")
    if errors and not options.despite_errors:
        return 1
    if not options.validate:
        tree.write(found, result, ruff=not options.no_ruff)
        _print("Mutants to correct", mutants.broken(), options.show)
        print(f"{time.monotonic() - began:.0f} s: applied; run `make lint` and the tests")
    return 0


def _changed() -> bool:
    return bool(subprocess.run(["git", "status", "--porcelain"], check=True, capture_output=True).stdout)  # noqa: S607


def _print(title: str, lines: Iterable[str], limit: int) -> None:
    unique = list(dict.fromkeys(lines))
    if unique:
        print(f"\n{title}: {len(unique)}")
        for line in unique[:limit]:
            print(f"  {line}")
        if len(unique) > limit:
            print(f"  … and {len(unique) - limit} more (--show)")


if __name__ == "__main__":
    sys.exit(main())

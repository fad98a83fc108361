"""Check that every package of Oncelog has an exhaustive import contract, so that every module belongs to one.

import-linter fails if a contract does not list a module of its package. It does not detect a package without a
contract.
"""

import sys
import tomllib
from pathlib import Path


def main() -> int:
    """Print the packages without a contract. Return 1 if there are any."""
    settings = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    covered = {name for contract in contracts if contract.get("exhaustive") for name in contract["containers"]}
    source = Path("src")
    packages = {
        ".".join(path.parent.relative_to(source).parts)
        for path in source.glob("oncelog/**/__init__.py")
        if any(other != path for other in path.parent.glob("*.py")) or any(path.parent.glob("*/__init__.py"))
    }
    missing = sorted(packages - covered)
    for package in missing:
        print(f"pyproject.toml: {package} has no exhaustive import contract", file=sys.stderr)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

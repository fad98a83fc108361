"""Programs and limit tables on the clients' documentation pages."""

import re
from pathlib import Path

from cli.processes import Command


def programs_of(page: str) -> list[str]:
    """Return the programs on a page that run without changes."""
    found = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return [one for one in found if one.startswith(("import", "from"))]


def limits_of(page: str) -> dict[str, int]:
    """Return the limits in a page's table, with their defaults."""
    rows = {
        name: value
        for names, value in re.findall(r"^\| (`[a-z_`, ]+`) \| ([\d, MiB]+) \|", page, re.MULTILINE)
        for name, value in zip(re.findall(r"`(\w+)`", names), re.split(r", (?=\d)", value), strict=True)
    }
    return {name: _number(value) for name, value in rows.items()}


def _number(text: str) -> int:
    digits, _, unit = text.replace(",", "").partition(" ")
    return int(digits) * (2**20 if unit == "MiB" else 1)


def run_program(program: str, directory: Path) -> str:
    """Run a program in a separate process, assert that it succeeds, and return its output."""
    with Command(program=program, cwd=directory, stderr=None) as process:
        output, _ = process.communicate()
    assert process.returncode == 0
    return output

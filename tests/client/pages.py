"""What the pages of clients have in them: programs, and tables of limits."""

import re


def programs_of(page: str) -> list[str]:
    """Those that can be run as they are."""
    found = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    return [one for one in found if one.startswith(("import", "from"))]


def limits_of(page: str) -> dict[str, int]:
    """The limits of the table, with their defaults."""
    rows = {
        name: value
        for names, value in re.findall(r"^\| (`[a-z_`, ]+`) \| ([\d, MiB]+) \|", page, re.MULTILINE)
        for name, value in zip(re.findall(r"`(\w+)`", names), re.split(r", (?=\d)", value), strict=True)
    }
    return {name: _number(value) for name, value in rows.items()}


def _number(text: str) -> int:
    digits, _, unit = text.replace(",", "").partition(" ")
    return int(digits) * (2**20 if unit == "MiB" else 1)

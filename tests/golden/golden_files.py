"""Golden files: recorded behaviour that tests compare with the current behaviour."""

from collections.abc import Mapping
from difflib import unified_diff
from itertools import islice
from pathlib import Path
from typing import Final

FILES: Final = Path(__file__).parent / "files"
DIFF_LINES_MAX: Final = 120
"""Maximum diff lines per file in the message of a failed test."""
REGENERATE: Final = (
    "Recorded behaviour has changed. If that is intended, run `make golden`, read "
    "`git diff tests/golden/files` and commit it. A commit that only renames or moves code does not change these files."
)


def write(recorded: Mapping[str, str]) -> list[str]:
    """Write the files that differ, and return their names."""
    FILES.mkdir(exist_ok=True)
    changed = [name for name, text in recorded.items() if _read_stored(name) != text]
    for name in changed:
        (FILES / name).write_text(recorded[name], encoding="utf-8", newline="")
    return changed


def differences(recorded: Mapping[str, str]) -> str:
    """Return a unified diff of the golden files and the recorded texts, or an empty string if they are equal."""
    return "\n".join(_diff_file(name, text) for name, text in recorded.items() if _read_stored(name) != text)


def _read_stored(name: str) -> str | None:
    path = FILES / name
    return path.read_bytes().decode() if path.exists() else None


def _diff_file(name: str, text: str) -> str:
    stored = _read_stored(name)
    if stored is None:
        return f"tests/golden/files/{name} does not exist"
    before, after = (one.split("\n") for one in (stored, text))
    lines = unified_diff(before, after, f"tests/golden/files/{name}", "now", lineterm="")
    shown = list(islice(lines, DIFF_LINES_MAX + 1))
    if len(shown) > DIFF_LINES_MAX:
        shown[-1] = f"… ({name}: the rest is not shown)"
    return "\n".join(shown)

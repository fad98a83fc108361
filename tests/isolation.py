"""`pytest --alone`: run every test in a separate process, so that no test can depend on another one.

The parent process collects the tests and starts PostgreSQL. It then forks a child for each test, in the order that
pytest-randomly has drawn, and prints the output of the children that fail. `--alone-jobs=N` sets the number of
children that run at the same time.
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from _pytest.terminal import TerminalReporter

import databases
from oncelog.testing.postgres import VARIABLE

PROGRESS_TESTS = 200
"""The parent prints a line after this number of tests."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", action="store_true", help="run every test in a separate process")
    parser.addoption("--alone-jobs", type=int, default=os.cpu_count() or 1, help="processes at the same time")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    if not session.config.getoption("--alone") or session.config.getoption("collectonly"):
        return None
    os.environ.setdefault(VARIABLE, databases.server_address())
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one directory for all children
    reporter: TerminalReporter = session.config.pluginmanager.get_plugin("terminalreporter")  # type: ignore[assignment]
    jobs: int = session.config.getoption("--alone-jobs")
    running: dict[int, tuple[pytest.Item, Path]] = {}
    for number, item in enumerate(session.items, 1):
        while len(running) >= jobs:
            _collect_child(session, reporter, running)
        output = Path(tempfile.mkstemp(prefix="oncelog-alone-")[1])
        running[_start_child(item, output)] = item, output
        if number % PROGRESS_TESTS == 0:
            reporter.write_line(f"{number} of {len(session.items)} tests started, {session.testsfailed} failed")
    while running:
        _collect_child(session, reporter, running)
    reporter.write_line(f"{len(session.items) - session.testsfailed} passed, {session.testsfailed} failed")
    return True


def _start_child(item: pytest.Item, output: Path) -> int:
    child = os.fork()
    if child == 0:
        with _redirect_output(output):
            reports = runtestprotocol(item, nextitem=None, log=False)
            failed = [report for report in reports if report.failed]
            for report in failed:
                print(report.longreprtext, *(text for _, text in report.sections), sep="\n")  # noqa: T201
        os._exit(1 if failed else 0)
    return child


@contextmanager
def _redirect_output(output: Path) -> Iterator[None]:
    with output.open("w") as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        sys.stdout = sys.stderr = stream
        yield


def _collect_child(
    session: pytest.Session, reporter: TerminalReporter, running: dict[int, tuple[pytest.Item, Path]]
) -> None:
    child, status = os.wait()
    if child not in running:
        return
    item, output = running.pop(child)
    if status:
        session.testsfailed += 1
        reporter.write_sep("_", item.nodeid)
        reporter.write_line(output.read_text(errors="replace")[-20_000:])
    output.unlink()

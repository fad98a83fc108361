"""`pytest --alone`: run every test in a separate process, so that no test can depend on another.

The parent process collects the tests and forks a child for each test, in the order drawn by pytest-randomly. A child
runs the complete protocol of a test, with all plugins, and tears down the fixtures of every scope. It writes its
reports to a file. The parent passes the reports to its plugins, so that the summary, `--maxfail` and the exit status
work as in any other run. `--alone-jobs=N` sets how many children run concurrently.

The parent starts PostgreSQL if a selected test needs it, because a server per test would take longer than most tests.
A child that needs PostgreSQL unexpectedly starts its own server.
"""

import faulthandler
import math
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

import pytest
from _pytest.capture import CaptureManager
from _pytest.config import create_terminal_writer

from databases import needs_postgres, server_address, stop_server

OUTPUT_CHARACTERS_MAX: Final = 20_000
"""Maximum length of a failed test's output in its report."""
TIMEOUTS_MAX: Final = 2
"""A child may run for twice the limit of pytest-timeout, because that limit does not cover the teardown of a failed
test.
"""
STOP_S: Final = 60
"""Time that an interrupted child has to tear down its fixtures."""

_fork: Final = multiprocessing.get_context("fork")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", action="store_true", help="run every test in a separate process")
    parser.addoption("--alone-jobs", type=int, default=os.cpu_count() or 1, help="processes at the same time")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--alone") and config.getoption("numprocesses", None):
        raise pytest.UsageError("--alone cannot be combined with --numprocesses; use --alone-jobs.")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    config = session.config
    has_errors = session.testsfailed and not config.getoption("continue_on_collection_errors")
    if not config.getoption("--alone") or config.getoption("collectonly") or has_errors:
        return None  # pytest's own loop
    if any(needs_postgres(item) for item in session.items):
        server_address()
    config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # one directory for all children
    _disable_capture(config)
    config.pluginmanager.get_plugin("terminalreporter").showfspath = False  # type: ignore[union-attr]
    with tempfile.TemporaryDirectory(prefix="oncelog-alone-") as directory:
        _run_children(session, Path(directory), config.getoption("--alone-jobs"))
    return True


def _disable_capture(config: pytest.Config) -> None:
    """Switch to `--capture=no`, because the children would share the temporary files of pytest's capture."""
    plugins = config.pluginmanager
    shared: Any = plugins.unregister(name="capturemanager")
    shared.stop_global_capturing()
    manager = CaptureManager("no")
    plugins.register(manager, "capturemanager")
    manager.start_global_capturing()


def _run_children(session: pytest.Session, directory: Path, jobs: int) -> None:
    running: list[Child] = []
    try:
        for number, item in enumerate(session.items):
            running.append(Child(item, directory, number))
            while len(running) >= jobs:
                _report_ended(session, running)
        while running:
            _report_ended(session, running)
    finally:
        for child in running:
            child.interrupt()
        for child in running:
            child.stop()


def _report_ended(session: pytest.Session, running: list["Child"]) -> None:
    """Wait until a child exits or times out, and pass its reports on."""
    rest_s = min(child.deadline_s for child in running) - time.monotonic()
    ended = wait([child.descriptor for child in running], None if rest_s == math.inf else max(0, rest_s))
    for child in [child for child in running if child.descriptor in ended or child.deadline_s <= time.monotonic()]:
        running.remove(child)
        child.report()
    if session.shouldfail:
        raise session.Failed(session.shouldfail)
    if session.shouldstop:
        raise session.Interrupted(session.shouldstop)


class Child:
    """The parent's view of a process that runs one test."""

    def __init__(self, item: pytest.Item, directory: Path, number: int) -> None:
        self._item = item
        self._output = directory / f"{number}.output"
        self._reports = directory / f"{number}.reports"
        timeout_s = getattr(item.config, "_env_timeout", None)  # set by pytest-timeout
        self.deadline_s = time.monotonic() + TIMEOUTS_MAX * timeout_s if timeout_s else math.inf
        self._process = _fork.Process(target=_run_test, args=(item, self._output, self._reports))
        self._process.start()
        self.descriptor = os.pidfd_open(self._pid)
        """Becomes readable when the process exits. The multiprocessing sentinel would also wait for descendants."""

    def report(self) -> None:
        """Pass the child's reports to the parent's plugins. Abort a child that is still running."""
        self._signal(signal.SIGABRT)  # faulthandler prints the stack
        self.stop()
        reports, output = self._read_reports(), self._read_output()
        for report in [report for report in reports if report.failed and output][-1:]:
            report.sections.append(("Captured output", output))
        hook, item = self._item.ihook, self._item
        hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for report in reports:
            hook.pytest_runtest_logreport(report=report)
        hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        self._output.unlink(missing_ok=True)
        self._reports.unlink(missing_ok=True)
        self._process.close()

    def interrupt(self) -> None:
        """Ask the process to tear down its fixtures and exit."""
        self._signal(signal.SIGINT)

    def stop(self) -> None:
        """Wait for the process to exit, and kill it after a timeout. Also kill processes that its test left behind."""
        self._process.join(STOP_S)
        self._process.kill()
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        self._process.join()
        os.close(self.descriptor)

    @property
    def _pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def _signal(self, number: int) -> None:
        if self._process.is_alive():
            os.kill(self._pid, number)

    def _read_reports(self) -> list[pytest.TestReport]:
        item, reports = self._item, []
        if self._reports.exists():
            with self._reports.open("rb") as stream, suppress(EOFError, pickle.UnpicklingError):
                while True:
                    data = pickle.load(stream)  # noqa: S301 - from the child
                    reports.append(item.config.hook.pytest_report_from_serializable(config=item.config, data=data))
        if self._process.exitcode != 0 or not reports or reports[-1].when != "teardown":
            text = f"the process ended with status {self._process.exitcode} before the end of the test"
            reports.append(pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call"))
        return reports

    def _read_output(self) -> str:
        text = self._output.read_text(errors="replace") if self._output.exists() else ""
        return text[-OUTPUT_CHARACTERS_MAX:]


# --- in the child ----------------------------------------------------------------------------------------------------


class ReportWriter:
    """Writes a child's reports to a file. Replaces the terminal reporter and prints nothing."""

    def __init__(self, config: pytest.Config, output: TextIO, reports: Path) -> None:
        self._config = config
        self._reports = reports
        self._tw = create_terminal_writer(config, output)  # what `config.get_terminal_writer()` returns

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        with self._reports.open("ab") as stream:
            pickle.dump(data, stream)


def _run_test(item: pytest.Item, output: Path, reports: Path) -> NoReturn:
    """Run a test and exit the process. Never return, because the session belongs to the parent."""
    code = 1
    try:
        os.setpgrp()  # The terminal sends Ctrl-C only to the parent, which interrupts its children.
        stream = _redirect_output(output)
        faulthandler.enable(stream)
        _run_protocol(item, ReportWriter(item.config, stream, reports))
        code = 0
    except BaseException:  # noqa: BLE001 - includes KeyboardInterrupt and pytest.exit()
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _redirect_output(output: Path) -> TextIO:
    stream = output.open("w", buffering=1)
    os.dup2(stream.fileno(), 1)
    os.dup2(stream.fileno(), 2)
    sys.stdout = sys.stderr = stream
    return stream


def _run_protocol(item: pytest.Item, writer: ReportWriter) -> None:
    item.config.pluginmanager.unregister(name="terminalreporter")
    item.config.pluginmanager.register(writer, "terminalreporter")
    try:
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
    finally:
        item.session._setupstate.teardown_exact(None)  # An interrupted test has not torn down its fixtures.
        stop_server()

"""The previous version, unpacked from its wheel, and programs that run with it."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cli.processes import ENVIRONMENT
from cli.server_process import ServerProcess
from deadlines import WAIT_S

DIRECTORY: Final = Path(__file__).parent
WHEEL: Final = DIRECTORY / "oncelog-0.1.0.dev0-py3-none-any.whl"
"""Built from commit f7e5c29."""
MAIN: Final = "from oncelog.cli import main; main()"


class PreviousVersion:
    """The unpacked wheel. Each program runs in a new interpreter, in which the old package takes precedence over the
    current one.
    """

    def __init__(self, unpacked: Path) -> None:
        tests = str(DIRECTORY.parent)
        self._environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(unpacked), tests))}

    def run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run an `oncelog` command until it exits."""
        return self._run("-c", MAIN, *arguments)

    def run_script(self, name: str, *arguments: object) -> str:
        """Run a script of this directory and return its output. Fail with its error output."""
        done = self._run(str(DIRECTORY / name), *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(  # noqa: S603
            [sys.executable, *map(str, arguments)],
            env=self._environment,
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )

    @contextmanager
    def serving(self, store: str) -> Iterator[ServerProcess]:
        """Run `oncelog serve` of the previous version on a log."""
        server = _PreviousServer(store, self._environment)
        try:
            server.start()
            yield server
        finally:
            server.end()


class _PreviousServer(ServerProcess):
    def __init__(self, store: str, environment: dict[str, str]) -> None:
        super().__init__(store, grpc=True)
        self._environment = environment

    def _start_process(self) -> "subprocess.Popen[str]":
        return subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", MAIN, *self._arguments],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

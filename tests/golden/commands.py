"""Run `oncelog` commands, servers and scripts with fixed sources of time and randomness."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, Final

from cli.processes import ENVIRONMENT, MAIN, Command, ForkServer
from cli.server_process import ServerProcess
from deadlines import WAIT_S
from scripts import RUN

COLUMNS: Final = "100"
"""Terminal width of `--help` output in the golden files."""
_PROGRAM: Final = (
    f"import os, sys; os.urandom.seed = sys.argv.pop(); sys.modules['__main__'].__package__ = None; {MAIN}"
)
"""The last argument seeds the random bytes. Without `__package__`, usage lines show the script name, `oncelog`."""
_ENVIRONMENT: Final = {**ENVIRONMENT, "COLUMNS": COLUMNS, "TZ": "UTC", "USER": "golden", "LOGNAME": "golden"}


class FixedCommand(Command):
    """A command with a frozen clock and the same random bytes in every run."""

    fork_server: ClassVar = ForkServer("golden.fixed_sources")


class FixedServer(ServerProcess):
    """A server with a frozen clock and the same random bytes in every run."""

    def _start_process(self) -> "subprocess.Popen[str]":
        return FixedCommand(*self._arguments, environment=_ENVIRONMENT, stdin=None, stdout=None)


@contextmanager
def fixed_server(store: str, *arguments: str, grpc: bool = False) -> Iterator[FixedServer]:
    """Run a server, and kill it at the end of the block."""
    server = FixedServer(store, arguments, grpc=grpc)
    try:
        server.start()
        yield server
    finally:
        server.end()


def run_command(*arguments: str, stdin: str = "", cwd: Path, seed: str = "") -> subprocess.CompletedProcess[str]:
    """Run a command in a directory, wait until it exits, and return its output.

    `stdin` is sent to its standard input. Commands with different seeds get different random bytes.
    """
    return _run(FixedCommand(*arguments, seed, program=_PROGRAM, environment=_ENVIRONMENT, cwd=cwd), stdin)


def run_script(script: Path, *arguments: str) -> str:
    """Run a Python script with fixed sources, and return its output."""
    done = _run(FixedCommand(str(script), *arguments, program=RUN, environment=_ENVIRONMENT), "")
    assert done.returncode == 0, done.stderr
    return done.stdout


def _run(process: FixedCommand, stdin: str) -> subprocess.CompletedProcess[str]:
    with process:
        try:
            said, errors = process.communicate(stdin, timeout=WAIT_S)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, said, errors)

"""Run test scripts in separate processes."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cli.processes import Command
from deadlines import WAIT_S

RUN: Final = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
RUN_TWICE: Final = "import sys; [exec(sys.argv[1], {'__name__': '__main__'}) for _ in range(2)]"
"""Program that runs the program in its first argument twice."""


@contextmanager
def start_script(script: Path | str, *arguments: object) -> Iterator[Command]:
    """Run a script with pipes for input and output, and kill its process when the block ends.

    The process is forked from a process that has imported `oncelog`, so it starts quickly.
    """
    with Command(str(script), *map(str, arguments), program=RUN, stderr=None) as process:
        try:
            yield process
        finally:
            process.kill()


def print_line(*words: object) -> None:
    """Print a line without buffering. Scripts use this function."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def read_line(process: Command) -> str:
    """Wait for the next line of output."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write_line(process: Command, line: str = "") -> None:
    """Send a line to the script."""
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def run_until_killed(script: Path | str, *arguments: object) -> None:
    """Run a script until it kills its own process."""
    with start_script(script, *arguments) as process:
        assert process.wait(WAIT_S) == -signal.SIGKILL

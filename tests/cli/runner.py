"""Runs commands in the test process."""

from functools import cache
from typing import Any, Final

from typer import testing
from typer.main import get_command
from typer.testing import CliRunner, Result

from oncelog.cli import app

__all__ = ["COMMAND", "RUNNER", "Result"]

# Build the command line once: building it for each command takes longer than most commands.
_testing: Any = testing
_testing._get_command = cache(get_command)

COMMAND: Final = app
RUNNER: Final = CliRunner(env={"XDG_CONFIG_HOME": "/nonexistent"})
"""Runs commands without the profiles of the user who runs the tests."""

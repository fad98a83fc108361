"""Commands of the CLI, run in this process, and scripts, run in forked processes."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from typer.testing import CliRunner, Result

from cli.processes import Command
from oncelog.cli import app


async def oncelog(*arguments: str) -> Result:
    """Run a command in another thread, because commands start an event loop of their own."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, arguments))


@contextmanager
def started(script: str, *arguments: str) -> Iterator[Command]:
    """Start a script in a process forked from one that has imported `oncelog`; kill it at the end of the block."""
    program = f"import runpy; runpy.run_path({script!r}, None, '__main__')"
    with Command(*arguments, program=program, stdin=None, stderr=None) as process:
        try:
            yield process
        finally:
            process.kill()

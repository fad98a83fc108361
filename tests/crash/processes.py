"""Python processes that tests start and kill."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

_TESTS: Final = str(Path(__file__).parent.parent)
START: Final = (
    f"import runpy, sys; sys.path.insert(0, {_TESTS!r}); del sys.argv[0]; runpy.run_path(sys.argv[0], None, '__main__')"
)


@contextmanager
def started(script: str, *arguments: str) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a Python process that runs the script, with pipes; kill it at the end if it is still running."""
    command = [sys.executable, "-c", START, script, *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:  # noqa: S603
        try:
            yield process
        finally:
            process.kill()

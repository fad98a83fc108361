"""Real processes for the commands that speak to a server: the server itself, and the command line."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from databases import log_at

WAIT_S = 60
"""Nothing takes that long. It is here so that what hangs ends as a failure."""
ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
    "NO_COLOR": "1",
    "COLUMNS": "200",
    "PYTHONUNBUFFERED": "1",
}


def oncelog(*arguments: str, given: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command, from its start to its end."""
    return subprocess.run(  # noqa: S603
        [sys.executable, "-m", "oncelog", *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_S,
        env={**ENVIRONMENT, **environment},
    )


@contextmanager
def started(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """A command that goes on; at the end of the block it is killed, if it is there still."""
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-m", "oncelog", *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Waits for its end: exit status, and what it has said that was not read before."""
    said, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, said, errors


class Served:
    """A server in a process of its own, which can be killed and started again where it was."""

    def __init__(self, directory: Path, arguments: Sequence[str]) -> None:
        self.store = log_at(directory / "log.db")
        self._arguments = arguments
        # Bound here as long as this lives: nobody who asks for any port is given it while the server is away.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self.process: subprocess.Popen[str]
        self._draining: threading.Thread
        self.url = ""
        self.start()

    def start(self) -> None:
        """At the same place as before."""
        port = self._port.getsockname()[1]
        # Without gRPC unless it is asked for: its port is another one, and nobody holds that.
        command = ["serve", "--port", str(port), "--store", self.store, "--set", "grpc=false", *self._arguments]
        self.process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "oncelog", *command], stderr=subprocess.PIPE, text=True, env=ENVIRONMENT
        )
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            found = re.search(r"listening urls=(\S+)", line)
            if found:
                self.url = found[1]
                # What it says later must not fill the pipe: a server waits for whoever reads its log.
                self._draining = threading.Thread(target=self.process.stderr.read)
                self._draining.start()
                return
        raise AssertionError(said)

    def kill(self) -> None:
        """As a power cut does."""
        self.process.kill()
        self._end()

    def stop(self) -> int:
        """In order."""
        self.process.send_signal(signal.SIGTERM)
        return self._end()

    def end(self) -> None:
        """For good."""
        self.kill()
        self._port.close()

    def _end(self) -> int:
        status = self.process.wait(WAIT_S)
        self._draining.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@contextmanager
def serving(directory: Path, *arguments: str) -> Iterator[Served]:
    """A server in development mode, unless other arguments are given."""
    served = Served(directory, arguments or ["--development", "--quiet"])
    try:
        yield served
    finally:
        served.end()

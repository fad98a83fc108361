"""Commands and servers as separate processes, for tests of commands that connect to a server."""

import re
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from cli.processes import ENVIRONMENT, MAIN, Command
from databases import log_at

__all__ = ["ENVIRONMENT", "WAIT_S", "Served", "ended", "oncelog", "serving", "started"]

WAIT_S = 300
"""Guards against a hang: a process that takes longer fails its test."""


def oncelog(
    *arguments: str, given: str | None = None, program: str = MAIN, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with `given` on its standard input. For `program` see `Command`."""
    stdin = None if given is None else subprocess.PIPE
    with Command(*arguments, program=program, environment={**ENVIRONMENT, **environment}, stdin=stdin) as process:
        try:
            said, errors = process.communicate(given, timeout=WAIT_S)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, said, errors)


@contextmanager
def started(*arguments: str, program: str = MAIN) -> Iterator["subprocess.Popen[str]"]:
    """Start a command, and kill it at the end of the block if it is still running. For `program` see `Command`."""
    process = Command(*arguments, program=program)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def ended(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait for the end of a command. Returns its exit status and the output that has not been read before."""
    said, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, said, errors


class Served:
    """A server in a separate process, which can be killed and started again at the same address."""

    def __init__(self, directory: Path, arguments: Sequence[str]) -> None:
        self.store = log_at(directory / "log.db")
        self._arguments = arguments
        # Bound as long as this object lives: no other process gets the port while the server is down.
        self._port = socket.socket()
        self._port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._port.bind(("127.0.0.1", 0))
        self.process: subprocess.Popen[str]
        self._draining: threading.Thread
        self.url = ""
        self.start()

    def start(self) -> None:
        """Start the server, at the same address as before."""
        port = self._port.getsockname()[1]
        # Without gRPC by default: its port is another one, which is not bound here.
        command = ["serve", "--port", str(port), "--store", self.store, "--set", "grpc=false", *self._arguments]
        self.process = Command(*command, stdin=None, stdout=None)
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            found = re.search(r"listening urls=(\S+)", line)
            if found:
                self.url = found[1]
                # The log must not fill the pipe: the server would wait for a reader.
                self._draining = threading.Thread(target=self.process.stderr.read)
                self._draining.start()
                return
        self.process.wait()
        raise AssertionError(said)

    def kill(self) -> None:
        """Kill the server, as a power cut does."""
        self.process.kill()
        self._end()

    def stop(self) -> int:
        """Stop the server in an orderly way. Returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self._end()

    def end(self) -> None:
        """Kill the server and release its port."""
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
    """Run a server, in development mode unless other arguments are given."""
    served = Served(directory, arguments or ["--development", "--quiet"])
    try:
        yield served
    finally:
        served.end()

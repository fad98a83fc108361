"""Commands and servers as separate processes, for tests of commands that connect to a server."""

import asyncio
import re
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final

from cli.processes import ENVIRONMENT, MAIN, Command
from databases import log_at
from deadlines import WAIT_S

__all__ = [
    "DEVELOPMENT", "ENVIRONMENT", "ServerProcess", "ended", "oncelog", "reserve_port", "server_process", "serving",
    "start_command",
]  # fmt: skip

DEVELOPMENT: Final = ("--development", "--quiet")


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
def start_command(*arguments: str, program: str = MAIN) -> Iterator[Command]:
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


@contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a port of 127.0.0.1 on which servers of the test can be started one after another.

    The socket is bound and does not listen: connections are refused while no server runs, and no other process gets
    the port in the meantime.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


class ServerProcess:
    """A process that runs `oncelog serve`. It can be killed and started again with the same ports."""

    def __init__(
        self, store: str, arguments: Sequence[str] = DEVELOPMENT, *, grpc: bool = False, start_tries: int = 1
    ) -> None:
        self.store = store
        self._ports = ExitStack()
        self.port = self._ports.enter_context(reserve_port())
        self.rpc_port = self._ports.enter_context(reserve_port()) if grpc else 0
        rpc = [f"--set=grpc_port={self.rpc_port}"] if grpc else ["--set=grpc=false"]
        self._arguments = ["serve", "--port", str(self.port), "--store", store, *rpc, *arguments]
        self._start_tries = start_tries
        self._process: subprocess.Popen[str] | None = None
        self._listening: threading.Thread
        self.said: list[str] = []
        """The lines of the log."""
        self.url = ""

    @property
    def process(self) -> "subprocess.Popen[str]":
        assert self._process is not None
        return self._process

    @property
    def rpc_address(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    def start(self) -> None:
        """Start the process and return when the server listens. If it cannot open its log, try again."""
        if not any(self._try_start() for _ in range(self._start_tries)):
            raise AssertionError("".join(self.said))

    def _start_process(self) -> "subprocess.Popen[str]":
        return Command(*self._arguments, stdin=None, stdout=None)

    def _try_start(self) -> bool:
        process = self._start_process()
        assert process.stderr is not None
        for line in process.stderr:
            self.said.append(line)
            found = re.search(r"listening urls=(\S+)", line)
            if found:
                self.url = found[1]
                # The log must not fill the pipe: the server would wait for a reader.
                self._listening = threading.Thread(target=self.said.extend, args=[process.stderr])
                self._listening.start()
                self._process = process
                return True
        process.stderr.close()
        process.wait()
        return False

    def kill(self) -> None:
        """Kill the server, as a power cut does."""
        self.process.kill()
        self._wait()

    def stop(self) -> int:
        """Stop the server in an orderly way. Returns its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def end(self) -> None:
        """Kill the server if it runs, and release its ports."""
        if self._process is not None:
            self.kill()
        self._ports.close()

    def _wait(self) -> int:
        status = self.process.wait(WAIT_S)
        self._listening.join()
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status


@contextmanager
def serving(directory: Path, *arguments: str, **options: Any) -> Iterator[ServerProcess]:
    """Run a server on the log in the directory, in development mode unless other arguments are given."""
    server = ServerProcess(log_at(directory / "log.db"), arguments or DEVELOPMENT, **options)
    try:
        server.start()
        yield server
    finally:
        server.end()


@asynccontextmanager
async def server_process(directory: Path, *arguments: str, **options: Any) -> AsyncIterator[ServerProcess]:
    """Run a server as `serving` does, without blocking the event loop."""
    server = ServerProcess(log_at(directory / "log.db"), arguments or DEVELOPMENT, **options)
    try:
        await asyncio.to_thread(server.start)
        yield server
    finally:
        await asyncio.to_thread(server.end)

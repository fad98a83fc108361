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
    "DEVELOPMENT",
    "ENVIRONMENT",
    "ServerProcess",
    "oncelog",
    "reserve_port",
    "server_process",
    "serving",
    "start_command",
    "wait_for_exit",
]  # fmt: skip

DEVELOPMENT: Final = ("--development", "--quiet")
NO_TOKEN: Final = "no token was sent: use --token-file, ONCELOG_TOKEN or a profile"  # noqa: S105 - an error
"""Why a server refuses a command without a token."""

ONE_ATTEMPT: Final = """
from msgspec.structs import replace
from oncelog.cli import main, remote
remote.PAUSE_LIMITS = replace(remote.PAUSE_LIMITS, pause_ms_min=3_600_000, pause_ms_max=3_600_000)
main()
"""
"""The pause before the second attempt is longer than the deadline, so the command gives up immediately."""


def oncelog(
    *arguments: str, given: str | None = None, program: str = MAIN, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a command with `given` as standard input, and wait for its exit. For `program` see `Command`."""
    stdin = None if given is None else subprocess.PIPE
    with Command(*arguments, program=program, environment={**ENVIRONMENT, **environment}, stdin=stdin) as process:
        try:
            output, errors = process.communicate(given, timeout=WAIT_S)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(arguments, process.returncode, output, errors)


@contextmanager
def start_command(*arguments: str, program: str = MAIN) -> Iterator[Command]:
    """Start a command. If it is still running at the end of the block, kill it. For `program` see `Command`."""
    process = Command(*arguments, program=program)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for_exit(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    """Wait until a command exits. Return its exit status and the unread output."""
    output, errors = process.communicate(timeout=WAIT_S)
    return process.returncode, output, errors


@contextmanager
def reserve_port() -> Iterator[int]:
    """Reserve a port on 127.0.0.1 for servers that the test starts one after another.

    The socket is bound but does not listen. Connections are therefore refused while no server runs, and no other
    process can take the port.
    """
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        yield reserved.getsockname()[1]


class ServerProcess:
    """A process that runs `oncelog serve`. It can be killed and restarted on the same ports."""

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
        self.log_lines: list[str] = []
        """The server's log lines."""
        self.url = ""

    @property
    def process(self) -> "subprocess.Popen[str]":
        assert self._process is not None
        return self._process

    @property
    def rpc_address(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    def start(self) -> None:
        """Start the process and wait until the server listens. Retry if it cannot open its log."""
        if not any(self._try_start() for _ in range(self._start_tries)):
            raise AssertionError("".join(self.log_lines))

    def _start_process(self) -> "subprocess.Popen[str]":
        return Command(*self._arguments, stdin=None, stdout=None)

    def _try_start(self) -> bool:
        process = self._start_process()
        assert process.stderr is not None
        for line in process.stderr:
            self.log_lines.append(line)
            found = re.search(r"listening urls=(\S+)", line)
            if found:
                self.url = found[1]
                # Read the log continuously: a full pipe would block the server.
                self._listening = threading.Thread(target=self.log_lines.extend, args=[process.stderr])
                self._listening.start()
                self._process = process
                return True
        process.stderr.close()
        process.wait()
        return False

    def kill(self) -> None:
        """Kill the server, as a power failure would."""
        self.process.kill()
        self._wait()

    def stop(self) -> int:
        """Stop the server gracefully, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self._wait()

    def end(self) -> None:
        """Kill the server if it is running, and release its ports."""
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
    """Run a server on the log in a directory (default: in development mode)."""
    server = ServerProcess(log_at(directory / "log.db"), arguments or DEVELOPMENT, **options)
    try:
        server.start()
        yield server
    finally:
        server.end()


@asynccontextmanager
async def server_process(directory: Path, *arguments: str, **options: Any) -> AsyncIterator[ServerProcess]:
    """Run a server like `serving`, but without blocking the event loop."""
    server = ServerProcess(log_at(directory / "log.db"), arguments or DEVELOPMENT, **options)
    try:
        await asyncio.to_thread(server.start)
        yield server
    finally:
        await asyncio.to_thread(server.end)

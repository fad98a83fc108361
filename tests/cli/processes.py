"""`oncelog` commands as separate processes, forked from a process that has imported the package already."""

import os
import pickle
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

MAIN: Final = "from oncelog.cli import main; main()"
ENVIRONMENT: Final = {
    **{name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")},
    "NO_COLOR": "1",
    "COLUMNS": "200",
    "PYTHONUNBUFFERED": "1",
}


class ForkServer:
    """Runs `cli.fork_server`, from the first command that the test process starts to the end of the test process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: socket.socket | None = None
        self._owner = 0

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Start a command with these standard streams. Returns its process id."""
        with self._lock:
            if self._requests is None or self._owner != os.getpid():  # `--alone` forks the test process
                self._requests, self._owner = self._start_server(), os.getpid()
            socket.send_fds(self._requests, [pickle.dumps(request)], [*descriptors])
            return int(self._requests.recv(100))

    def _start_server(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # It ends when the socket is closed, at the latest with this process.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", "cli.fork_server", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        return ours


_fork_server: Final = ForkServer()


class Command(subprocess.Popen[str]):
    """A running `oncelog` command. Its streams are text, and pipes unless others are given.

    `program` replaces the program that the `oncelog` script runs, for commands with something changed in them.
    """

    def __init__(
        self,
        *arguments: str,
        program: str = MAIN,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        **streams: Any,
    ) -> None:
        self._program = program
        self._status_lock = threading.Lock()
        piped = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        environment = ENVIRONMENT if environment is None else environment
        super().__init__(
            ["oncelog", *arguments],
            encoding="utf-8",
            errors="surrogateescape",
            env=environment,
            cwd=cwd,
            **{**piped, **streams},
        )

    def _execute_child(self, args: Sequence[str], *rest: Any) -> None:
        """Ask the fork server for the process that Popen would start. The order of `rest` is that of Popen's method."""
        cwd, environment = rest[4], rest[5]
        child_in, parent_in, parent_out, child_out, parent_error, child_error = rest[9:15]
        request = {
            "program": self._program,
            "arguments": [*args],
            "environment": {**environment},
            "cwd": None if cwd is None else str(cwd),
        }
        streams = (child_in, child_out, child_error)
        inherited = [number if stream < 0 else stream for number, stream in enumerate(streams)]
        self._status, status = os.pipe()
        try:
            self.pid = _fork_server.start(request, [*inherited, status])
        finally:
            os.close(status)
        self._child_created = True
        self._close_pipe_fds(child_in, parent_in, parent_out, child_out, parent_error, child_error)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        """Read the exit status if the command has ended."""
        return self._read_status(0)

    def _wait(self, timeout: float | None) -> int:
        code = self._read_status(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return code

    def _read_status(self, timeout: float | None) -> int | None:
        if self.returncode is None and self._has_ended(timeout):
            with self._status_lock:
                if self.returncode is None:
                    self.returncode = int(os.read(self._status, 100))
                    os.close(self._status)
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        # Without the lock: a thread may wait for the command while another one asks whether to kill it.
        poll = select.poll()  # select() refuses descriptors above 1023
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))

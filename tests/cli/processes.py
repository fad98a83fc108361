"""`oncelog` commands as separate processes, forked from a process that has already imported the package."""

import atexit
import inspect
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final

MAIN: Final = "from oncelog.cli import main; main()"
ENVIRONMENT: Final = {
    **{
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and not name.startswith("ONCELOG_")
    },
    "XDG_CONFIG_HOME": "/nonexistent",  # without the profiles of the user who runs the tests
    "NO_COLOR": "1",
    "COLUMNS": "200",
    "PYTHONUNBUFFERED": "1",
}


class ForkServer:
    """Runs `cli.fork_server` from the first command of the test process until that process ends.

    `module` is the program to start. A module other than `cli.fork_server` patches something for all commands and then
    runs `cli.fork_server`.
    """

    def __init__(self, module: str = "cli.fork_server") -> None:
        self._module = module
        self._lock = threading.Lock()
        self._requests: socket.socket | None = None
        self._owner = 0

    def start(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Start a command with the given standard streams, and return its process id."""
        with self._lock:
            if self._requests is None or self._owner != os.getpid():  # `--alone` forks the test process
                self._owner = os.getpid()
                self._requests = self._start_server()
            try:
                socket.send_fds(self._requests, [pickle.dumps(request)], [*descriptors])
                answer = self._requests.recv(100)
            except ConnectionError:
                answer = b""
            if not answer:
                raise RuntimeError(f"the fork server does not answer; its exit status is {self._process.poll()}")
            return int(answer)

    def _start_server(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            # The server also stops when the socket closes, for example because the test process was killed.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-m", self._module, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join(sys.path)},
            )
        atexit.register(self._stop_server, ours)
        return ours

    def _stop_server(self, requests: socket.socket) -> None:
        requests.close()
        if self._owner == os.getpid():
            self._process.terminate()
            self._process.wait()


_POPEN_PARAMETERS: Final = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]


class Command(subprocess.Popen[str]):
    """A running `oncelog` command with text streams, which are pipes by default.

    `program` replaces the program of the `oncelog` script, for commands with patched parts.
    """

    fork_server: ClassVar = ForkServer()

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
        """Start the process through the fork server instead of Popen."""
        given = _POPEN_PARAMETERS.bind(self, args, *rest).arguments
        request = {
            "program": self._program,
            "arguments": [*args],
            "environment": {**given["env"]},
            "cwd": None if given["cwd"] is None else str(given["cwd"]),
        }
        streams = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        inherited = [number if stream < 0 else stream for number, stream in enumerate(streams)]
        self._status, status = os.pipe()
        try:
            self.pid = self.fork_server.start(request, [*inherited, status])
        finally:
            os.close(status)
        self._child_created = True
        pipes = [given[name] for name in ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")]
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        """Read the exit status if the command has exited."""
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
                    status = os.read(self._status, 100)
                    if not status:
                        raise RuntimeError(f"the monitor of {self.args!r} ended without an exit status")
                    self.returncode = int(status)
                    os.close(self._status)
        return self.returncode

    def _has_ended(self, timeout: float | None) -> bool:
        # No lock: one thread may wait for the command while another polls it.
        poll = select.poll()  # select() refuses descriptors above 1023
        poll.register(self._status, select.POLLIN)
        return bool(poll.poll(None if timeout is None else timeout * 1000))
